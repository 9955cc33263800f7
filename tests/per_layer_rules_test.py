# Copyright 2026 The dice_tf Authors.
# SPDX-License-Identifier: Apache-2.0
"""Thresholds per layer: the epsilon and noise of flat clipping, files, and what is refused."""

import json
import pathlib
import sys

import keras
from keras import layers as L
import numpy as np
import pytest
from scipy import stats
import tensorflow as tf

sys.path.insert(0, str(pathlib.Path(__file__).parent))

from per_layer_model import UNEVEN, make_model, mechanism
from softmax_regression import BATCH, flat, make_optimizer, make_problem

import dice_tf
from dice_tf import PerLayerClipping, accounting
from dice_tf.errors import MechanismError
from dice_tf.mechanism.clipping import VariableGroups, clip_weights

SAMPLINGS = {
    "cyclic": dice_tf.CyclicPoissonSampling(1000, 100),
    "poisson": dice_tf.PoissonSampling(1000, 100),
    "allocation": dice_tf.RandomAllocation(1000, 100),
    "shuffled": dice_tf.ShuffledEpochs(1000, 100),
}


@pytest.mark.parametrize("name", SAMPLINGS)
@pytest.mark.parametrize("clipping", ["per_layer", UNEVEN], ids=str)
def test_costs_what_flat_clipping_costs(name, clipping):
    sampling = SAMPLINGS[name]
    run = lambda clipping: mechanism(clipping, error_norm_clip=0.7, expected_batch_size=100)
    for accountant in ("rdp", "pld"):
        ours, same = (
            accounting.compute_epsilon(run(c), sampling, 20, 1e-4, accountant)
            for c in (clipping, "flat")
        )
        assert 0 < ours == same
    assert run(clipping).noise_stddev == run("flat").noise_stddev


def test_the_statement_says_per_layer():
    sampling = SAMPLINGS["cyclic"]
    texts = [
        accounting.privacy_statement(mechanism(c, expected_batch_size=100), sampling, 20, 1e-4)
        for c in ("flat", "per_layer", UNEVEN)
    ]
    words = [" ".join(text.split()) for text in texts]
    assert "clipping flat" in words[0] and "of its own, " not in words[0]
    for text, shares in zip(
        words[1:], ("equal shares", "shares in given proportions"), strict=True
    ):
        assert "clipping per_layer" in text
        assert f"thresholds of its own, {shares} of C1 and C2 whose squares add up to 1" in text
        assert "if layers are long in proportion" in text
    numbers = [[line for line in text.splitlines() if "epsilon" in line] for text in texts]
    assert numbers[0] == numbers[1] == numbers[2]


def test_a_plan_passes_the_rule_on():
    plan = dice_tf.PrivacyPlan(
        num_examples=40, batch_size=BATCH, epochs=2, noise_multiplier=2.0, delta=1e-3,
        feedback_steps=1)  # fmt: skip
    assert plan.mechanism(0.3, UNEVEN).clipping == UNEVEN
    x, y = make_problem()
    model = make_model(dice_tf.DiceSGDOptimizer(0.1, l2_norm_clip=0.3, clipping=UNEVEN, plan=plan))
    model.fit(plan.dataset(x, y), epochs=2, verbose=0, callbacks=[plan.callback()])
    assert "shares in given proportions" in " ".join(plan.statement(model).split())
    flat_model = make_model(dice_tf.DiceSGDOptimizer(0.1, l2_norm_clip=0.3, plan=plan))
    assert flat_model.optimizer.mechanism.noise_stddev == model.optimizer.mechanism.noise_stddev


def test_every_layer_gets_the_same_noise():
    keras.utils.set_random_seed(0)
    layers = [L.Dense(60, name="hidden"), L.Dense(60, name="output")]
    model = keras.Sequential([keras.Input((60,)), *layers])
    optimizer = dice_tf.DiceSGDOptimizer(
        1.0, l2_norm_clip=0.5, noise_multiplier=3.0, expected_batch_size=4, noise_seed=5,
        clipping="per_layer")  # fmt: skip
    model.compile(optimizer, "mse")
    before = [flat(layer.trainable_variables) for layer in layers]
    x = np.ones((4, 60), "float32")
    model.fit(x, x, sample_weight=np.zeros(4), batch_size=4, verbose=0)
    for layer, start in zip(layers, before, strict=True):
        moved = flat(layer.trainable_variables) - start
        p_value = lambda stddev: stats.kstest(moved, stats.norm(scale=stddev).cdf).pvalue
        assert p_value(3.0 * 0.5 / 4) > 0.01
        # Not that of noise in proportion to the threshold of the layer.
        assert p_value(3.0 * 0.5 / 4 * 0.5**0.5) < 1e-6


def test_a_killed_run_goes_on_bit_for_bit(tmp_path):
    x, y = make_problem(1.0)
    arguments = dict(
        learning_rate=0.5, l2_norm_clip=0.4, noise_multiplier=1.0, expected_batch_size=BATCH,
        clipping=UNEVEN, save_errors=True, feedback_steps=2)  # fmt: skip
    fit = lambda model: model.fit(x, y, batch_size=BATCH, shuffle=False, verbose=0)
    whole = make_model(dice_tf.DiceSGDOptimizer(**arguments))
    fit(whole)
    whole.save(tmp_path / "model.keras")
    fit(whole)
    resumed = keras.models.load_model(tmp_path / "model.keras")
    assert resumed.optimizer.mechanism == whole.optimizer.mechanism
    assert resumed.optimizer.clipping == UNEVEN
    fit(resumed)
    for ours, same in zip(resumed.trainable_variables, whole.trainable_variables, strict=True):
        np.testing.assert_array_equal(ours, same)


def test_rules_have_one_form_and_survive_json():
    rules = [UNEVEN, "per_layer", PerLayerClipping(), "flat", "automatic"]
    for rule in rules:
        optimizer = dice_tf.DiceAdamOptimizer(
            l2_norm_clip=1.0, noise_multiplier=1.0, expected_batch_size=4, clipping=rule
        )
        config = json.loads(json.dumps(optimizer.get_config()))
        assert type(optimizer).from_config(config).mechanism == optimizer.mechanism
    assert mechanism(PerLayerClipping()) == mechanism("per_layer") != mechanism("flat")
    turned = PerLayerClipping(dict(reversed(UNEVEN.proportions)))
    assert turned == UNEVEN and repr(turned) == repr(UNEVEN) and hash(turned) == hash(UNEVEN)
    assert repr(mechanism(UNEVEN)) == repr(mechanism(turned)) != repr(mechanism("per_layer"))


def test_a_frozen_layer_leaves_its_share_to_the_others():
    model = make_model(make_optimizer(clipping=UNEVEN))
    assert UNEVEN.groups(model).shares == pytest.approx((0.1**0.5, 0.9**0.5))
    model.get_layer("hidden").trainable = False
    assert UNEVEN.groups(model) == VariableGroups((0, 0), (1.0,))
    assert PerLayerClipping().groups(model) == VariableGroups((0, 0), (1.0,))


class Shorter(PerLayerClipping):
    pass


class OfOnesOwn:
    name, threshold = "own", None


@pytest.mark.parametrize(
    "clipping, arguments, message",
    [
        ("per_layer", {"bound_residuals": False}, "bound_residuals=True"),
        ("per-layer", {}, "must be one of"),
        (Shorter(), {}, "not of a class of your own"),
        (OfOnesOwn(), {}, "not of a class of your own"),
        (PerLayerClipping, {}, "type ABCMeta|type type"),
        (None, {}, "clipping=None"),
    ],
)
def test_rules_without_a_proven_bound_are_refused(clipping, arguments, message):
    with pytest.raises(MechanismError, match=message) as error:
        mechanism(clipping, **arguments)
    assert len(str(error.value).split()) <= 60


@pytest.mark.parametrize(
    "proportions",
    [{}, {"hidden": 0.0}, {"hidden": -1}, {"a": "1"}, {"a": float("nan")}, [1.0], 2.0],
)
def test_proportions_that_are_none_are_refused(proportions):
    with pytest.raises(MechanismError, match="proportions") as error:
        PerLayerClipping(proportions)
    assert len(str(error.value).split()) <= 60


@pytest.mark.parametrize(
    "proportions, message",
    [
        ({"hidden": 1.0}, r"layers left out \['output'\]"),
        ({"hidden": 1.0, "output": 1.0, "head": 2.0}, r"unknown layers \['head'\]"),
        ({"model/hidden": 1.0, "output": 1.0}, r"unknown.*layers left out \['hidden'\]"),
    ],
)
def test_names_that_do_not_match_the_model_are_refused_before_the_first_step(proportions, message):
    model = make_model(make_optimizer(clipping=PerLayerClipping(proportions)))
    x, y = make_problem()
    before = flat(model.trainable_variables)
    with pytest.raises(MechanismError, match=message) as error:
        model.fit(x, y, batch_size=BATCH, verbose=0)
    assert len(str(error.value).split()) <= 60
    np.testing.assert_array_equal(flat(model.trainable_variables), before)


def test_a_name_of_several_layers_is_refused():
    class Pair(keras.Model):
        def __init__(self):
            super().__init__(name="pair")
            self.first, self.second = L.Dense(3, name="same"), L.Dense(2, name="same")

        def call(self, x):
            return self.second(self.first(x))

    model = Pair()
    model(tf.zeros([1, 4]))
    assert PerLayerClipping().groups(model).of_variables == (0, 0, 1, 1)
    with pytest.raises(MechanismError, match="several layers of one name"):
        PerLayerClipping({"same": 1.0}).groups(model)


def test_shares_that_are_too_small_or_too_large_are_refused():
    norms = tf.constant([[1.0, 1.0]])
    with pytest.raises(MechanismError, match="at least 1e-12"):
        clip_weights(norms, mechanism(), VariableGroups((0, 1), (1e-13, 1.0)))
    with pytest.raises(MechanismError, match="add up to 1"):
        clip_weights(norms, mechanism(), VariableGroups((0, 1), (1.0, 1.0)))


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__]))
