# Copyright 2026 The dice_tf Authors.
# SPDX-License-Identifier: Apache-2.0
"""`clipping="automatic"`: normalised gradients, no thresholds."""

import pathlib
import sys

import hypothesis
import hypothesis.strategies as st
import keras
import numpy as np
import pytest
import tensorflow as tf

sys.path.insert(0, str(pathlib.Path(__file__).parent))

import numpy_oracle
from softmax_regression import BATCH, CLASSES, flat, make_model, make_optimizer, make_problem

import dice_tf
from dice_tf import accounting
from dice_tf.errors import MechanismError
from dice_tf.mechanism import DiceMechanism
from dice_tf.mechanism.clipping import clip_weights

AUTOMATIC = dict(clipping="automatic", l2_norm_clip=None)


def mechanism(**arguments):
    return DiceMechanism(
        **{"clipping": "automatic", "noise_multiplier": 1.0, "expected_batch_size": 4, **arguments}
    )


@pytest.mark.parametrize(
    "arguments",
    [
        {},
        {"gradient_engine": "vectorized"},
        {"chunk_size": 3},
        {"feedback_steps": 3},
        {"error_norm_clip": 0.0},
        {"bound_residuals": False},
    ],
    ids=str,
)
@pytest.mark.parametrize("scale", [3.0, 0.1])
def test_equals_numpy_transcription(arguments, scale):
    x, y = make_problem(scale)
    model = make_model(make_optimizer(**AUTOMATIC, **arguments))
    gradients = lambda parameters, rows: numpy_oracle.softmax_gradients(
        parameters, x[rows].astype(np.float64), y[rows], np.ones(BATCH), CLASSES
    )
    batches = list(np.arange(len(x)).reshape(-1, BATCH)) * 2
    expected, errors = numpy_oracle.dice_sgd(
        gradients,
        flat(model.trainable_variables),
        batches,
        1.0,
        arguments.get("error_norm_clip", 1.0),
        BATCH,
        numpy_oracle.sgd_rule(0.5),
        arguments.get("bound_residuals", True),
        arguments.get("feedback_steps", 1),
        automatic=True,
    )
    model.fit(x, y, batch_size=BATCH, shuffle=False, epochs=2, verbose=0)
    np.testing.assert_allclose(flat(model.trainable_variables), expected, rtol=5e-5, atol=5e-6)
    if "error_norm_clip" in arguments:
        assert model.optimizer.errors == []
    else:
        np.testing.assert_allclose(flat(model.optimizer.errors), errors, rtol=5e-5, atol=5e-6)


norms = st.floats(0, float(np.finfo(np.float32).max), width=32)


@hypothesis.given(st.lists(norms, min_size=1, max_size=8), st.sampled_from([0.0, 1.0]))
def test_no_example_moves_a_release_by_more_than_1(values, error_norm_clip):
    """The bound that privacy rests on, for every norm there is."""
    head, residual = clip_weights(
        tf.constant(values, tf.float32), mechanism(error_norm_clip=error_norm_clip)
    )
    exact = np.array(values, np.float32).astype(np.float64)
    assert np.all(np.isfinite(head)) and np.all(head.numpy() >= 0)
    assert np.all(head.numpy().astype("float64") * exact <= 1)
    if error_norm_clip:
        assert np.all(np.abs(residual.numpy()) * exact <= 1 + 1e-6)


@hypothesis.given(st.lists(st.floats(2**-10, 2**10, width=32), min_size=1, max_size=8))
def test_head_and_residual_add_up_to_the_gradient_clipped_at_nearly_2(values):
    head, residual = clip_weights(tf.constant(values, tf.float32), mechanism())
    exact = np.array(values, np.float32).astype(np.float64)
    whole = np.minimum(exact, 2 * exact / (exact + 0.01))
    np.testing.assert_allclose((head + residual) * exact, whole, rtol=1e-5, atol=1e-5)
    _, rest = clip_weights(tf.constant(values, tf.float32), mechanism(bound_residuals=False))
    np.testing.assert_allclose((head + rest) * exact, exact, rtol=1e-5)


@pytest.mark.parametrize("bounded", [True, False])
def test_non_finite_and_zero_norms(bounded):
    values = tf.constant([np.nan, np.inf, -np.inf, 0.0, 1e-45, 1e37])
    head, residual = clip_weights(values, mechanism(bound_residuals=bounded))
    np.testing.assert_allclose(head, [0, 0, 0, 100, 100, 1e-37], rtol=1.1e-5)
    last = 1e-37 if bounded else 1.0
    np.testing.assert_allclose(residual, [0, 0, 0, -99, -99, last], rtol=1.1e-5)


def test_broken_examples_and_padding_contribute_nothing():
    x, y = make_problem()
    x = x[:BATCH].copy()
    x[2], x[5] = np.nan, np.inf
    results = []
    for inputs, weights in ((x, np.ones(BATCH)), (np.nan_to_num(x), np.ones(BATCH))):
        weights[[2, 5]] = 0 if inputs is not x else 1
        model = make_model(make_optimizer(**AUTOMATIC))
        model.train_on_batch(inputs, y[:BATCH], sample_weight=weights)
        results.append(flat(model.trainable_variables + model.optimizer.errors))
    assert np.isfinite(results[0]).all()
    np.testing.assert_allclose(results[0], results[1], rtol=1e-6, atol=1e-7)


def test_large_losses_take_the_same_steps_whatever_their_units():
    """What the name promises: where gradients are long, their scale does not matter."""
    x, y = make_problem(scale=1.0)
    ends = []
    for units in (1e3, 1e5):
        model = make_model(make_optimizer(**AUTOMATIC, learning_rate=0.01))
        weights = np.full(len(x), units)
        model.fit(x, y, sample_weight=weights, batch_size=BATCH, shuffle=False, verbose=0)
        ends.append(flat(model.trainable_variables))
    np.testing.assert_allclose(ends[0], ends[1], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    "arguments",
    [
        {"l2_norm_clip": 0.5},
        {"l2_norm_clip": 2.0, "error_norm_clip": 1.0},
        {"error_norm_clip": 0.5},
        {"error_norm_clip": 2.0},
    ],
    ids=str,
)
def test_thresholds_are_refused(arguments):
    with pytest.raises(MechanismError, match="l2_norm_clip=.*error_norm_clip="):
        mechanism(**arguments)


def test_thresholds_default_to_1_and_flat_clipping_has_no_default():
    assert mechanism() == mechanism(l2_norm_clip=1.0, error_norm_clip=1)
    assert mechanism().noise_stddev == 0.25
    with pytest.raises(MechanismError, match="l2_norm_clip=None"):
        DiceMechanism(noise_multiplier=1.0, expected_batch_size=4)


def test_is_accounted_as_flat_clipping_with_both_thresholds_1():
    sampling = dice_tf.CyclicPoissonSampling(1000, 100)
    run = dict(noise_multiplier=3.0, expected_batch_size=100)
    flat_clipping = DiceMechanism(l2_norm_clip=1.0, error_norm_clip=1.0, **run)
    for bounded in (True, False):
        ours, same = (
            accounting.compute_epsilon(m, sampling, 20, 1e-4)
            for m in (
                mechanism(bound_residuals=bounded, **run),
                DiceMechanism(l2_norm_clip=1.0, bound_residuals=bounded, **run),
            )
        )
        assert ours == same > 0
    text = accounting.privacy_statement(mechanism(**run), sampling, 20, 1e-4)
    assert "automatic" in text and "divided by its own norm" in text
    noise = accounting.calibrate_noise_multiplier(2.0, 1e-4, sampling, 20)
    spent = accounting.compute_epsilon(
        mechanism(noise_multiplier=noise, expected_batch_size=100), sampling, 20, 1e-4
    )
    assert spent == pytest.approx(2.0, rel=1e-3) and flat_clipping.clipping == "flat"


def test_survives_serialization(tmp_path):
    optimizer = dice_tf.DiceAdamOptimizer(
        clipping="automatic", noise_multiplier=1.0, expected_batch_size=BATCH
    )
    model = make_model(optimizer)
    model.save(tmp_path / "model.keras")
    loaded = keras.models.load_model(tmp_path / "model.keras").optimizer
    assert loaded.mechanism == optimizer.mechanism and loaded.mechanism.clipping == "automatic"


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__]))
