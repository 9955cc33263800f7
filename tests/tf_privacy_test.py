# Copyright 2026 The dice_tf Authors.
# SPDX-License-Identifier: Apache-2.0
"""`dice_tf.tf_privacy`: against NumPy, TF-Privacy's own queries and the accountants."""

import importlib
import importlib.util
import os
import subprocess
import sys

import dp_accounting
from dp_accounting.pld import pld_privacy_accountant
from dp_accounting.rdp import rdp_privacy_accountant
import numpy as np
from numpy_oracle import clip
import pytest
from scipy import stats
import tensorflow as tf

from dice_tf import accounting, errors
from dice_tf.mechanism import DiceMechanism
from dice_tf.sampling import CyclicPoissonSampling, PoissonSampling

# TF-Privacy cannot be installed on Python 3.12 and later. There, what remains of this module is
# that the rest of the package does without it, and that its absence is explained.
AVAILABLE = importlib.util.find_spec("tensorflow_privacy") is not None
if AVAILABLE:
    from tensorflow_privacy.privacy.dp_query import (
        dp_query,
        gaussian_query,
        nested_query,
        normalized_query,
    )

    from dice_tf import tf_privacy


def needs_tf_privacy(test):
    return test if AVAILABLE else None


SPECS = {"kernel": tf.TensorSpec([2, 3]), "rest": (tf.TensorSpec([]), tf.TensorSpec([4]))}
SIZE = 11


def to_record(vector):
    vector = tf.constant(vector, tf.float32)
    return {"kernel": tf.reshape(vector[:6], [2, 3]), "rest": (vector[6], vector[7:])}


def to_vector(structure):
    return np.concatenate([np.ravel(part) for part in tf.nest.flatten(structure)])


def play_round(query, records, state):
    params = query.derive_sample_params(state)
    sample = query.initial_sample_state(SPECS)
    for record in records:
        sample = query.accumulate_record(params, sample, record)
    return query.get_noised_result(sample, state)


def make_rounds(sizes=(3, 5, 0, 1, 4), seed=0):
    random = np.random.default_rng(seed)
    return [random.normal(size=(n, SIZE)) * random.uniform(0.05, 1.5, (n, 1)) for n in sizes]


@needs_tf_privacy
@pytest.mark.parametrize("c1, c2", [(1.0, 0.5), (0.3, None), (1.0, 0.0)])
@pytest.mark.parametrize("graph", [False, True], ids=["eager", "tf.function"])
def test_equals_numpy_over_rounds(c1, c2, graph):
    query = tf_privacy.DiceSumQuery(
        l2_norm_clip=c1, noise_multiplier=0.0, record_specs=SPECS, error_norm_clip=c2
    )
    step = lambda records, state: play_round(query, records, state)[:2]
    step = tf.function(step) if graph else step
    state, error = query.initial_global_state(), np.zeros(SIZE)
    for vectors in make_rounds():
        result, state = step([to_record(v) for v in vectors], state)
        heads = [clip(v, c1) for v in vectors]
        expected = sum(heads, error)
        error = sum((clip(v - h, c1 if c2 is None else c2) for v, h in zip(vectors, heads)), 0.0)
        tf.nest.assert_same_structure(result, SPECS)
        np.testing.assert_allclose(to_vector(result), expected, atol=2e-6)
        if c2 == 0.0:
            assert state.errors == ()
            error = np.zeros(SIZE)
        else:
            np.testing.assert_allclose(to_vector(state.errors), error + np.zeros(SIZE), atol=2e-6)


@needs_tf_privacy
def test_without_error_feedback_it_is_the_gaussian_sum_query():
    ours = tf_privacy.DiceSumQuery(0.7, 0.0, SPECS, error_norm_clip=0)
    theirs = gaussian_query.GaussianSumQuery(l2_norm_clip=0.7, stddev=0.0)
    assert isinstance(ours, dp_query.SumAggregationDPQuery)
    for vectors in make_rounds(sizes=(3, 6)):
        records = [to_record(v) for v in vectors]
        result, _, event = play_round(ours, records, ours.initial_global_state())
        expected, _, their_event = play_round(theirs, records, theirs.initial_global_state())
        # Which does not allow for rounding when it clips.
        np.testing.assert_allclose(to_vector(result), to_vector(expected), rtol=2e-5, atol=2e-5)
        assert event.noise_multiplier == float(their_event.noise_multiplier) == 0.0
    event = play_round(tf_privacy.DiceSumQuery(0.7, 1.3, SPECS, error_norm_clip=0), [], ())[2]
    theirs = gaussian_query.GaussianSumQuery(l2_norm_clip=0.7, stddev=1.3 * 0.7)
    their_event = play_round(theirs, [], theirs.initial_global_state())[2]
    assert type(event) is type(their_event)
    assert event.noise_multiplier == pytest.approx(float(their_event.noise_multiplier), rel=1e-6)


@needs_tf_privacy
def test_noise_has_the_stated_law_and_never_repeats():
    spec = tf.TensorSpec([20_000])
    query = tf_privacy.DiceSumQuery(0.5, 3.0, spec, error_norm_clip=1.0)
    state, sample = query.initial_global_state(), query.initial_sample_state()
    draw = tf.function(lambda state: query.get_noised_result(sample, state)[0])
    # Not even where one state is used again and again.
    noises = [query.get_noised_result(sample, state)[0].numpy() for _ in range(2)]
    noises += [draw(state).numpy() for _ in range(2)]
    for noise in noises:
        assert stats.kstest(noise, stats.norm(scale=3.0 * 0.5).cdf).pvalue > 1e-3
    assert np.abs(np.corrcoef(noises) - np.eye(4)).max() < 0.04
    fresh = tf_privacy.DiceSumQuery(0.5, 3.0, spec).get_noised_result(sample, state)[0].numpy()
    assert abs(np.corrcoef(fresh, noises[0])[0, 1]) < 0.04
    # The parts of a record get noise of their own.
    parts = tf_privacy.DiceSumQuery(1.0, 1.0, [tf.TensorSpec([500])] * 3, error_norm_clip=0)
    result = parts.get_noised_result(parts.initial_sample_state(), parts.initial_global_state())[0]
    assert np.abs(np.corrcoef(result) - np.eye(3)).max() < 0.2
    seeded = [
        tf_privacy.DiceSumQuery(0.5, 3.0, spec, noise_seed=7).get_noised_result(sample, state)[0]
        for _ in range(2)
    ]
    np.testing.assert_array_equal(*seeded)


@needs_tf_privacy
@pytest.mark.parametrize("c2", [0.0, 0.25, 1.0])
@pytest.mark.parametrize(
    "name, accountant_class",
    [
        ("rdp", rdp_privacy_accountant.RdpAccountant),
        ("pld", pld_privacy_accountant.PLDAccountant),
    ],
)
def test_events_compose_to_what_the_accountant_says(c2, name, accountant_class):
    sampling, steps, delta = PoissonSampling(10_000, 500), 40, 1e-6
    query = tf_privacy.DiceSumQuery(0.5, 2.0, SPECS, error_norm_clip=c2)
    ledger, state = dp_accounting.DpEventBuilder(), query.initial_global_state()
    for _ in range(steps):
        _, state, event = play_round(query, [], state)
        ledger.compose(dp_accounting.PoissonSampledDpEvent(sampling.sampling_probability, event))
    epsilon = accountant_class().compose(ledger.build()).get_epsilon(delta)
    mechanism = DiceMechanism(
        l2_norm_clip=0.5, noise_multiplier=2.0, expected_batch_size=500, error_norm_clip=c2
    )
    ours = accounting.compute_epsilon(mechanism, sampling, steps, delta, name)
    # The library's PLD accountant chooses its discretization by the noise.
    assert epsilon == pytest.approx(ours, rel=1e-6 if name == "rdp" else 2e-3)
    if c2 > 0:
        cyclic = CyclicPoissonSampling(10_000, 500)
        assert accounting.compute_epsilon(mechanism, cyclic, steps, delta, name) < ours


@needs_tf_privacy
def test_the_event_has_the_sensitivity_of_a_record_that_comes_back():
    c1, c2, noise_multiplier = 0.5, 0.75, 2.0
    large = 100.0 * np.eye(SIZE)[3]
    query = tf_privacy.DiceSumQuery(c1, 0.0, SPECS, error_norm_clip=c2)
    releases = []
    for present in (True, False):
        state = query.initial_global_state()
        for vectors in make_rounds(sizes=(2, 2)):
            records = [to_record(v) for v in [*vectors, *[large] * present]]
            result, state, _ = play_round(query, records, state)
        releases.append(to_vector(result))
    shift = np.linalg.norm(releases[0] - releases[1])
    event = play_round(
        tf_privacy.DiceSumQuery(c1, noise_multiplier, SPECS, error_norm_clip=c2), [], state
    )[2]
    assert (c1 + c2) * (1 - 2e-5) <= shift <= c1 + c2
    assert event.noise_multiplier == pytest.approx(noise_multiplier * c1 / shift, rel=2e-5)


@needs_tf_privacy
def test_inside_normalized_and_nested_queries():
    part = lambda spec: tf_privacy.DiceSumQuery(1.0, 0.0, spec, error_norm_clip=2.0)
    query = normalized_query.NormalizedQuery(
        nested_query.NestedSumQuery([part(tf.TensorSpec([2])), part(tf.TensorSpec([]))]), 4.0
    )
    state = query.initial_global_state()
    releases = []
    for _ in range(2):
        params, record = query.derive_sample_params(state), [tf.constant([4.0, 0.0]), 0.5]
        sample = query.initial_sample_state([tf.zeros(2), 0.0])
        sample = query.merge_sample_states(sample, query.accumulate_record(params, sample, record))
        result, state, event = query.get_noised_result(sample, state)
        releases.append(to_vector(result).tolist())
    # Heads 1 and 0.5; residuals min(4 - 1, 2) and 0.
    np.testing.assert_allclose(releases, [[0.25, 0.0, 0.125], [0.75, 0.0, 0.125]], rtol=2e-5)
    assert releases[0][0] <= 0.25 and releases[1][0] <= 0.75
    assert list(event.events) == 2 * [dp_accounting.GaussianDpEvent(0.0)]


@needs_tf_privacy
def test_records_with_gaps_repeated_rows_and_infinities():
    query = tf_privacy.DiceSumQuery(1.0, 0.0, SPECS, error_norm_clip=10.0)
    rows = tf.IndexedSlices(tf.constant([[3.0, 0, 0], [1.0, 0, 0]]), [1, 1], [2, 3])
    sparse = {"kernel": rows, "rest": (None, None)}
    broken = to_record(np.where(np.arange(SIZE) == 8, np.inf, 1.0))
    undefined = to_record(np.where(np.arange(SIZE) == 0, np.nan, 0.0))
    state = query.initial_global_state()
    result, state, _ = play_round(query, [broken, sparse, undefined], state)
    # The norm is that of the summed row, 4, and not of the two rows side by side.
    np.testing.assert_allclose(to_vector(result), [0, 0, 0, 1] + [0] * 7, rtol=2e-5)
    np.testing.assert_allclose(to_vector(state.errors), [0, 0, 0, 3] + [0] * 7, rtol=2e-5)


@needs_tf_privacy
def test_results_have_the_dtype_of_records():
    spec = tf.TensorSpec([3], tf.bfloat16)
    query = tf_privacy.DiceSumQuery(1.0, 1.0, spec)
    sample = query.accumulate_record((), query.initial_sample_state(), tf.ones([3], tf.bfloat16))
    result, state, _ = query.get_noised_result(sample, query.initial_global_state())
    assert (result.dtype, state.errors.dtype) == (tf.bfloat16, tf.float32)


@needs_tf_privacy
@pytest.mark.parametrize("spec", [tf.TensorSpec([None, 3]), tf.constant([1, 2]), "kernel"])
def test_refuses_specs_that_are_no_known_shapes(spec):
    with pytest.raises(errors.MechanismError, match="record_specs"):
        tf_privacy.DiceSumQuery(1.0, 1.0, [spec])


@needs_tf_privacy
def test_refuses_records_that_would_be_broadcast():
    query = tf_privacy.DiceSumQuery(1.0, 1.0, tf.TensorSpec([3]))
    with pytest.raises(errors.MechanismError, match="shape"):
        query.preprocess_record((), tf.ones([1]))
    # A shape that is only known when it runs.
    unknown = tf.function(query.preprocess_record, input_signature=[(), tf.TensorSpec(None)])
    with pytest.raises(tf.errors.InvalidArgumentError, match="not compatible"):
        unknown((), tf.ones([1]))
    with pytest.raises(errors.MechanismError, match="l2_norm_clip"):
        tf_privacy.DiceSumQuery(0.0, 1.0, SPECS)


@needs_tf_privacy
def test_refuses_a_state_that_is_a_constant_of_a_function():
    query = tf_privacy.DiceSumQuery(1.0, 1.0, SPECS)
    state = query.initial_global_state()
    step = lambda: query.get_noised_result(query.initial_sample_state(), state)[0]
    step()
    with pytest.raises(errors.MechanismError, match="run_eagerly=True"):
        tf.function(step)()


@needs_tf_privacy
def test_the_error_is_not_written_out():
    with pytest.raises(errors.ReleaseError, match="include_optimizer=False"):
        tf_privacy.DiceSumQuery(1.0, 1.0, SPECS).initial_global_state()._asdict()
    plain = tf_privacy.DiceSumQuery(1.0, 1.0, SPECS, error_norm_clip=0).initial_global_state()
    assert plain._asdict() == {"errors": ()}


def test_says_what_to_do_where_tf_privacy_is_missing(monkeypatch):
    monkeypatch.delitem(sys.modules, "dice_tf.tf_privacy", raising=False)
    monkeypatch.delitem(sys.modules, "tensorflow_privacy", raising=False)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(errors.MissingPackageError, match="DiceSGDOptimizer") as raised:
        importlib.import_module("dice_tf.tf_privacy")
    assert isinstance(raised.value, ImportError)


@needs_tf_privacy
def test_says_what_failed_where_tf_privacy_is_broken(monkeypatch):
    monkeypatch.setitem(sys.modules, "tensorflow_privacy", None)
    with pytest.raises(errors.MissingPackageError, match="cannot be imported.*ModuleNotFound"):
        tf_privacy.import_tensorflow_privacy()
    assert not hasattr(sys, "skip_tf_privacy_import")


@needs_tf_privacy
@pytest.mark.parametrize("needs_switch", [True, False])
def test_uses_the_switch_only_where_the_plain_import_fails(monkeypatch, tmp_path, needs_switch):
    (tmp_path / "tensorflow_privacy").mkdir()
    (tmp_path / "tensorflow_privacy" / "__init__.py").write_text(
        "import sys\n"
        f"if hasattr(sys, 'skip_tf_privacy_import') != {needs_switch}:\n"
        "  raise ImportError('no estimator')\n"
    )
    monkeypatch.delitem(sys.modules, "tensorflow_privacy")
    monkeypatch.syspath_prepend(tmp_path)
    assert str(tmp_path) in tf_privacy.import_tensorflow_privacy().__file__
    assert not hasattr(sys, "skip_tf_privacy_import")


LAZY = """
import sys
import dice_tf
loaded = [name for name in sys.modules if name.startswith(("tensorflow_privacy", "dice_tf.tf_"))]
assert not loaded, loaded
"""

# The model is y = x . w, so that the gradient of an example is written out by hand.
KERAS_OPTIMIZER = """
import numpy as np
import tensorflow as tf
from dice_tf import errors, tf_privacy
from tensorflow_privacy.privacy.optimizers import dp_optimizer_keras

random = np.random.default_rng(0)
x = random.normal(size=(12, 3)).astype("float32")
y = random.normal(size=(12, 1)).astype("float32") * 3

def train(error_norm_clip, run_eagerly):
    model = tf.keras.Sequential(
        [tf.keras.layers.Dense(1, use_bias=False, kernel_initializer="zeros", input_shape=(3,))])
    query = tf_privacy.DiceSumQuery(
        l2_norm_clip=0.5, noise_multiplier=0.0, error_norm_clip=error_norm_clip,
        record_specs=model.trainable_variables)
    optimizer = dp_optimizer_keras.GenericDPSGDOptimizer(
        dp_sum_query=query, num_microbatches=4, learning_rate=0.3)
    loss = tf.keras.losses.MeanSquaredError(reduction=tf.losses.Reduction.NONE)
    model.compile(optimizer, loss, run_eagerly=run_eagerly)
    model.fit(x, y, batch_size=4, epochs=2, shuffle=False, verbose=0)
    return model

def expected(error_norm_clip):
    clip = lambda v, c: v * min(1, c / max(np.linalg.norm(v), 1e-30))
    w, e = np.zeros(3), np.zeros(3)
    for step in range(6):
        part = slice(4 * (step % 3), 4 * (step % 3) + 4)
        gradients = [2 * (a @ w - b[0]) * a for a, b in zip(x[part], y[part])]
        heads = [clip(g, 0.5) for g in gradients]
        total = sum(heads) + e
        e = sum(clip(g - h, error_norm_clip) for g, h in zip(gradients, heads))
        w = w - 0.3 * total / 4
    return w

for error_norm_clip, run_eagerly in ((1.0, True), (0.0, True), (0.0, False)):
    model = train(error_norm_clip, run_eagerly)
    weights = model.get_weights()[0][:, 0]
    np.testing.assert_allclose(weights, expected(error_norm_clip), atol=1e-5)
    assert np.abs(weights - expected(1.0 - error_norm_clip)).max() > 0.01
    if error_norm_clip:
        try:
            model.optimizer.get_config()
            raise AssertionError("the error was written out")
        except errors.ReleaseError:
            pass
try:
    train(1.0, False)
    raise AssertionError("the error was lost in silence")
except errors.MechanismError as error:
    assert "run_eagerly=True" in str(error)
"""


def test_imported_on_demand_and_trains_in_a_keras_optimizer_of_tf_privacy():
    run = subprocess.run(
        [sys.executable, "-c", LAZY + (KERAS_OPTIMIZER if AVAILABLE else "")],
        env={**os.environ, "TF_USE_LEGACY_KERAS": "1", "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stderr[-3000:]


@needs_tf_privacy
@pytest.mark.parametrize("jit_compile", [False, True])
def test_d1_a_long_record_is_not_longer_than_the_thresholds(jit_compile):
    spec = tf.TensorSpec([4_000_000])
    query = tf_privacy.DiceSumQuery(0.5, 0.0, spec, error_norm_clip=0.25)
    record = np.random.default_rng(0).standard_normal(4_000_000, "float32")
    preprocess = tf.function(lambda t: query.preprocess_record((), t), jit_compile=jit_compile)
    parts = preprocess(tf.constant(record))
    for part, threshold in ((parts.heads, 0.5), (parts.residuals, 0.25)):
        length = np.linalg.norm(part.numpy().astype("float64"))
        assert threshold * (1 - 2e-5) <= length <= threshold


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__]))
