# Copyright 2026 The dice_tf Authors.
# SPDX-License-Identifier: Apache-2.0
"""Thresholds per layer: the steps of NumPy, the bound of flat clipping, and its epsilon."""

import dataclasses
import pathlib
import sys
from typing import ClassVar

import hypothesis
import hypothesis.strategies as st
import keras
from keras import layers as L
import numpy as np
import pytest
import tensorflow as tf

sys.path.insert(0, str(pathlib.Path(__file__).parent))

import numpy_oracle
from per_layer_model import HIDDEN, PARTS, SIZE, UNEVEN, make_model, mechanism
from softmax_regression import BATCH, CLASSES, flat, make_optimizer, make_problem

from dice_tf import PerLayerClipping
from dice_tf.engine import layerwise, vectorized
from dice_tf.mechanism import clip_rules
from dice_tf.mechanism.clipping import VariableGroups, clip_weights
from dice_tf.mechanism.feedback import direction_and_errors


@dataclasses.dataclass(frozen=True)
class PerVariableClipping(PerLayerClipping):
    """What a new rule takes: its groups; thresholds and their proof are there."""

    name: ClassVar[str] = "per_variable"

    def groups(self, model):
        count = len(model.trainable_variables)
        return VariableGroups(tuple(range(count)), (count**-0.5,) * count)


def oracle(model, x, y, arguments, parts, microbatch=1):
    def gradients(parameters, rows):
        each = numpy_oracle.two_layer_gradients(
            parameters, x[rows].astype(np.float64), y[rows], np.ones(len(rows)), HIDDEN, CLASSES
        )
        return each.reshape(-1, microbatch, SIZE).mean(1)

    return numpy_oracle.dice_sgd(
        gradients,
        flat(model.trainable_variables),
        list(np.arange(len(x)).reshape(-1, BATCH)) * 2,
        arguments["l2_norm_clip"],
        arguments.get("error_norm_clip", arguments["l2_norm_clip"]),
        BATCH // microbatch,
        numpy_oracle.sgd_rule(0.5),
        True,
        arguments.get("feedback_steps", 1),
        parts=parts,
    )


@pytest.mark.parametrize(
    "arguments",
    [
        {},
        {"gradient_engine": "vectorized"},
        {"clipping": UNEVEN, "feedback_steps": 3},
        {"clipping": UNEVEN, "feedback_steps": 3, "gradient_engine": "vectorized"},
        {"chunk_size": 3, "error_norm_clip": 0.3},
        {"error_norm_clip": 0.0, "clipping": UNEVEN},
        {"num_microbatches": 4, "feedback_steps": 2},
    ],
    ids=str,
)
def test_equals_numpy_transcription(arguments):
    arguments = {"clipping": "per_layer", "l2_norm_clip": 0.4, **arguments}
    x, y = make_problem(1.0)
    model = make_model(make_optimizer(**arguments))
    microbatch = BATCH // arguments.get("num_microbatches", BATCH)
    expected, errors = oracle(model, x, y, arguments, PARTS[arguments["clipping"]], microbatch)
    another, _ = oracle(model, x, y, arguments, None, microbatch)
    model.fit(x, y, batch_size=BATCH, shuffle=False, epochs=2, verbose=0)
    np.testing.assert_allclose(flat(model.trainable_variables), expected, rtol=1e-5, atol=2e-6)
    if arguments.get("error_norm_clip", 1) > 0:
        np.testing.assert_allclose(flat(model.optimizer.errors), errors, rtol=1e-5, atol=2e-6)
        assert np.abs(errors).max() > 1e-3
    # Flat clipping takes other steps.
    assert np.abs(another - expected).max() > 1e-2


def test_a_new_rule_is_one_class(monkeypatch):
    monkeypatch.setitem(clip_rules.RULES, "per_variable", PerVariableClipping)
    x, y = make_problem(1.0)
    arguments = {"clipping": PerVariableClipping(), "l2_norm_clip": 0.4}
    model = make_model(make_optimizer(**arguments))
    ends = np.cumsum([0] + [v.shape.num_elements() for v in model.trainable_variables])
    parts = [(slice(*pair), 0.5) for pair in zip(ends[:-1], ends[1:], strict=True)]
    expected, _ = oracle(model, x, y, arguments, parts)
    model.fit(x, y, batch_size=BATCH, shuffle=False, epochs=2, verbose=0)
    np.testing.assert_allclose(flat(model.trainable_variables), expected, rtol=1e-5, atol=2e-6)
    assert model.optimizer.get_config()["clipping"] == "per_variable"


class Twice(L.Layer):
    """A layer of layers, one of which is used twice."""

    def __init__(self):
        super().__init__(name="twice")
        self.shared = L.Dense(4, name="shared", activation="tanh")
        self.scale = self.add_weight(shape=(4,), initializer="ones", name="scale")

    def call(self, x):
        return self.shared(self.shared(x)) * self.scale


def varied_model():
    keras.utils.set_random_seed(1)
    ids = keras.Input((6,), dtype="int32")
    embedded = L.Embedding(9, 4, name="table")(ids)
    hidden = L.Conv1D(4, 3, name="conv")(embedded)
    hidden = L.SimpleRNN(4, name="rnn", unroll=True)(hidden)
    hidden = L.LayerNormalization(name="norm")(Twice()(hidden))
    last = [L.Dense(6, name="a"), L.Dense(3, name="b")]
    inner = keras.Sequential([keras.Input((4,)), *last], name="inner")
    model = keras.Model(ids, inner(hidden))
    model.compile(loss="mse")
    model._compile_loss.build(tf.zeros([2, 3]), tf.zeros([2, 3]))
    return model


NAMES = ["table", "conv", "rnn/simple_rnn_cell", "twice", "twice/shared", "norm", "inner/a",
         "inner/b"]  # fmt: skip


def test_layers_are_what_owns_variables_and_keep_their_names_in_files(tmp_path):
    model = varied_model()
    weights = {name: n + 1.0 for n, name in enumerate(NAMES)}
    rule = PerLayerClipping(weights)
    of_variables, shares = rule.groups(model)
    assert sum(p**2 for p in shares) == pytest.approx(1, abs=1e-12)
    share_of = {v.path: shares[g] for v, g in zip(model.trainable_variables, of_variables)}
    for path, share in share_of.items():
        name = max((n for n in NAMES if f"/{path}".rsplit("/", 1)[0].endswith(f"/{n}")), key=len)
        assert share == pytest.approx(weights[name] / np.linalg.norm(list(weights.values())))
    inner = model.get_layer("inner")
    inner.save(tmp_path / "inner.keras")
    again = keras.models.load_model(tmp_path / "inner.keras")
    rule = PerLayerClipping({"a": 1.0, "b": 2.0})
    assert rule.groups(again) == rule.groups(inner)


@pytest.mark.parametrize("engine", [layerwise, vectorized], ids=["layerwise", "vectorized"])
def test_sums_equal_a_loop_over_examples(engine):
    model, random = varied_model(), np.random.default_rng(0)
    x = random.integers(0, 9, (7, 6)).astype("int32")
    y = random.normal(size=(7, 3)).astype("float32") * 10.0 ** random.uniform(-2, 1, (7, 1))
    y = y.astype("float32")
    groups, run = PerLayerClipping().groups(model), mechanism(l2_norm_clip=2.0)
    weights = lambda norms: clip_weights(norms, run, groups)
    step = lambda x, y: engine.weighted_gradient_sums(
        model, x, y, None, weights, groups=groups.of_variables
    )
    sums = tf.function(step)(tf.constant(x), tf.constant(y))
    expected = [[0.0, 0.0] for _ in model.trainable_variables]
    share, lengths = len(NAMES) ** -0.5, []
    for i in range(len(x)):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((model(x[i : i + 1], training=True) - y[i]) ** 2)
        values = [v.value for v in model.trainable_variables]
        each = [
            tf.convert_to_tensor(g).numpy().astype("float64") for g in tape.gradient(loss, values)
        ]
        squares = np.zeros(len(NAMES))
        np.add.at(squares, list(groups.of_variables), [np.sum(g**2) for g in each])
        lengths.append(np.sqrt(squares))
        for n, g in enumerate(each):
            norm = lengths[-1][groups.of_variables[n]]
            head = min(1, 2 * share / norm)
            rest = min(1 - head, 2 * share / norm)
            expected[n] = [expected[n][0] + head * g, expected[n][1] + rest * g]
    np.testing.assert_allclose(sums.norms, lengths, rtol=1e-4, atol=1e-6)
    clipped = np.array(lengths) > 2 * share
    assert 0.1 < clipped.mean() < 0.9
    for got, want in zip(zip(sums.head, sums.residual, strict=True), expected, strict=True):
        np.testing.assert_allclose(got[0], want[0], rtol=5e-5, atol=1e-5)
        np.testing.assert_allclose(got[1], want[1], rtol=5e-5, atol=1e-5)


any_norm = st.floats(0, float(np.finfo(np.float32).max), width=32)


@hypothesis.given(
    st.lists(st.lists(any_norm, min_size=3, max_size=3), min_size=1, max_size=5),
    st.lists(st.floats(1e-3, 1e3), min_size=3, max_size=3),
    st.floats(1e-5, 1e6),
    st.floats(1e-5, 1e6),
)
def test_all_layers_together_stay_within_the_thresholds(norms, weights, c1, c2):
    """The bound that privacy rests on, float32 rounding included."""
    groups = VariableGroups((0, 1, 2), tuple(w / np.linalg.norm(weights) for w in weights))
    head, residual = clip_weights(
        tf.constant(norms), mechanism(l2_norm_clip=c1, error_norm_clip=c2), groups
    )
    exact = np.array(norms, np.float32).astype(np.float64)
    length = lambda weights: np.linalg.norm(weights.numpy().astype("float64") * exact, axis=1)
    assert np.all(length(head) <= c1) and np.all(length(residual) <= c2)
    assert np.all(head.numpy() >= 0) and np.all(residual.numpy() >= 0)


def test_a_norm_that_is_not_finite_counts_in_all_groups():
    groups = VariableGroups((0, 1), (0.6, 0.8))
    norms = tf.constant([[np.nan, 0.1], [0.1, np.inf], [-np.inf, 0.0], [0.1, 9.0]])
    head, residual = clip_weights(norms, mechanism(), groups)
    np.testing.assert_array_equal(head[:3], np.zeros((3, 2)))
    np.testing.assert_array_equal(residual[:3], np.zeros((3, 2)))
    np.testing.assert_allclose(head[3], [1, 0.4 / 9], rtol=2e-5)
    np.testing.assert_allclose(residual[3], [0, 0.4 / 9], rtol=2e-5)


def two_towers():
    keras.utils.set_random_seed(0)
    inputs = [keras.Input((3,)), keras.Input((3,))]
    # Zero, so that huge inputs do not reach the other tower.
    first = L.Dense(2, kernel_initializer="zeros", name="first")(inputs[0])
    model = keras.Model(inputs, first + L.Dense(2, name="second")(inputs[1]))
    model.compile(loss="mse")
    model._compile_loss.build(tf.zeros([2, 2]), tf.zeros([2, 2]))
    return model


@pytest.mark.parametrize("engine", [layerwise, vectorized], ids=["layerwise", "vectorized"])
def test_an_example_that_is_broken_in_one_layer_contributes_to_none(engine):
    model, random = two_towers(), np.random.default_rng(0)
    x = [random.normal(size=(5, 3)).astype("float32") for _ in range(2)]
    x[0][2] = 1e30
    y = random.normal(size=(5, 2)).astype("float32")
    groups, run = PerLayerClipping().groups(model), mechanism(l2_norm_clip=0.1)
    weights = lambda norms: clip_weights(norms, run, groups)

    def heads_and_residuals(x, sample_weight):
        sums = tf.function(
            lambda x, w: engine.weighted_gradient_sums(
                model, x, tf.constant(y), w, weights, groups=groups.of_variables
            )
        )(list(map(tf.constant, x)), tf.constant(sample_weight, tf.float32))
        flattened = [np.ravel(t) for t in (*sums.head, *sums.residual)]
        return np.concatenate(flattened), sums.norms.numpy()

    broken, norms = heads_and_residuals(x, np.ones(5))
    assert np.isinf(norms[2, 0]) and 0.1 < norms[2, 1] < 100
    without, _ = heads_and_residuals([x[0] * (x[0] < 1e20), x[1]], [1, 1, 0, 1, 1])
    assert np.isfinite(broken).all() and np.abs(broken).max() > 0.01
    np.testing.assert_allclose(broken, without, rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize("steps", [1, 3])
@pytest.mark.parametrize("clipping", ["per_layer", UNEVEN], ids=str)
def test_no_example_moves_a_window_by_more_than_the_sensitivity(steps, clipping):
    """Pairs of runs, with and without an example, on adversarial lengths of its layers."""
    run = mechanism(clipping, error_norm_clip=0.8, feedback_steps=steps, expected_batch_size=1)
    groups, random = run.clip.groups(make_model(make_optimizer())), np.random.default_rng(steps)
    directions = random.normal(size=(400, 2, 50))
    directions /= np.linalg.norm(directions, axis=2, keepdims=True)
    lengths = 10.0 ** random.uniform(-4, 8, (400, 2))
    lengths[0], lengths[1] = 1e6, [1e6, 0]

    def releases(entries):
        """Releases of the steps of a window; the example has the given gradients there."""
        errors, released = [tf.zeros([400, 2, 50])] * steps, []
        for gradients in entries:
            norms = tf.constant(np.linalg.norm(gradients, axis=2), tf.float32)
            weights = [np.float64(w)[:, :, None] for w in clip_weights(norms, run, groups)]
            head, residual = ([tf.constant(w * gradients, tf.float32)] for w in weights)
            direction, errors = direction_and_errors(head, residual, errors, run)
            released.append(direction[0].numpy().astype("float64"))
        return np.stack(released, 1)

    gradients = directions * lengths[:, :, None]
    nothing = np.zeros_like(gradients)
    once = releases([gradients] + [nothing] * (2 * steps))
    moved = np.linalg.norm(once.reshape(400, -1), axis=1)
    claim = run.sensitivity(separate_entries=True)
    assert claim == pytest.approx(np.hypot(0.5, 0.8 / steps**0.5))
    assert np.all(moved <= claim * (1 + 1e-6)) and moved[0] >= 0.999 * claim
    # Drawn at every step, the example moves a single release by C1 + C2 at most.
    often = np.linalg.norm(releases([gradients] * (2 * steps))[:, -1].reshape(400, -1), axis=1)
    claim = run.sensitivity(separate_entries=False)
    assert claim == pytest.approx(1.3)
    assert np.all(often <= claim * (1 + 1e-6)) and often[0] >= 0.999 * claim


@pytest.mark.parametrize("engine", [layerwise, vectorized], ids=["layerwise", "vectorized"])
def test_no_example_moves_a_clipped_sum_by_more_than_c1_whatever_its_magnitude(engine):
    keras.utils.set_random_seed(0)
    layers = [L.Dense(16, name="a"), L.Dense(16, name="b"), L.Dense(2, name="c")]
    model = keras.Sequential([keras.Input((40,)), *layers])
    model.compile(loss="mae")
    model._compile_loss.build(tf.zeros([2, 2]), tf.zeros([2, 2]))
    rule = PerLayerClipping({"a": 1.0, "b": 100.0, "c": 10.0})
    groups, run = rule.groups(model), mechanism(l2_norm_clip=0.1)
    weights = lambda norms: clip_weights(norms, run, groups)
    step = tf.function(
        lambda x, y, w: engine.weighted_gradient_sums(
            model, x, y, w, weights, groups=groups.of_variables
        )
    )
    random = np.random.default_rng(0)
    x = random.normal(size=(4, 40)).astype("float32")
    y = np.full((4, 2), 100, "float32")
    reached = 0
    for size in (1e-30, 1e-19, 1e-6, 1.0, 1e6, 1e18):
        for weight in (1e-30, 1e-6, 1.0, 1e6, 1e19):
            x[3] = size
            both = [
                step(tf.constant(x), tf.constant(y), tf.constant([1, 1, 1, w], tf.float32))
                for w in (weight, 0)
            ]
            for kind in ("head", "residual"):
                sums = [
                    np.concatenate([np.float64(t).ravel() for t in getattr(s, kind)]) for s in both
                ]
                distance = np.linalg.norm(sums[0] - sums[1])
                assert distance <= 0.1 * (1 + 1e-5), (size, weight, kind)
                reached = max(reached, distance)
    assert reached > 0.0999


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__]))
