# Copyright 2026 The dice_tf Authors.
# SPDX-License-Identifier: Apache-2.0
"""Residuals that are fed back over several steps."""

import pathlib
import sys

import keras
import numpy as np
import pytest

sys.path.insert(0, str(pathlib.Path(__file__).parent))

import numpy_oracle
from softmax_regression import (
    BATCH,
    CLASSES,
    FEATURES,
    flat,
    make_model,
    make_optimizer,
    make_problem,
)

import dice_tf
from dice_tf import accounting
from dice_tf.errors import MechanismError
from dice_tf.training import rebuilding

CLIPS = dict(l2_norm_clip=0.4, error_norm_clip=1.2)


@pytest.mark.parametrize("feedback_steps", [1, 2, 3, 7])
@pytest.mark.parametrize("arguments", [{}, {"run_eagerly": True}, {"steps_per_execution": 3}])
def test_equals_numpy_transcription(feedback_steps, arguments):
    x, y = make_problem()
    model = make_model(make_optimizer(feedback_steps=feedback_steps, **CLIPS), **arguments)
    gradients = lambda parameters, rows: numpy_oracle.softmax_gradients(
        parameters, x[rows].astype(np.float64), y[rows], np.ones(BATCH), CLASSES
    )
    batches = list(np.arange(len(x)).reshape(-1, BATCH)) * 2
    expected, errors = numpy_oracle.dice_sgd(
        gradients,
        flat(model.trainable_variables),
        batches,
        *CLIPS.values(),
        BATCH,
        numpy_oracle.sgd_rule(0.5),
        bounded=True,
        feedback_steps=feedback_steps,
    )
    model.fit(x, y, batch_size=BATCH, shuffle=False, epochs=2, verbose=0)
    np.testing.assert_allclose(flat(model.trainable_variables), expected, rtol=2e-5, atol=5e-6)
    np.testing.assert_allclose(flat(model.optimizer.errors), errors, rtol=2e-5, atol=5e-6)


def test_one_example_comes_back_in_equal_parts_and_then_no_more():
    """Its own step, then s steps with a part each, then nothing."""
    x, y = make_problem()
    weights = np.zeros(BATCH)
    moves = []
    model = make_model(make_optimizer(learning_rate=1.0, feedback_steps=3, **CLIPS))
    for step in range(6):
        weights[1] = step == 0
        before = flat(model.trainable_variables)
        model.train_on_batch(x[:BATCH], y[:BATCH], sample_weight=weights)
        moves.append(flat(model.trainable_variables) - before)
    assert np.linalg.norm(moves[0]) == pytest.approx(0.4 / BATCH, rel=1e-3)
    for move in moves[1:4]:
        np.testing.assert_allclose(move, moves[0] * (1.2 / 3) / 0.4, rtol=1e-3, atol=1e-6)
    np.testing.assert_array_equal(moves[4:], np.zeros([2, moves[0].size]))


def test_errors_are_listed_step_by_step():
    model = make_model(make_optimizer(feedback_steps=3, **CLIPS))
    x, y = make_problem()
    model.train_on_batch(x[:BATCH], y[:BATCH])
    variables, errors = model.trainable_variables, model.optimizer.errors
    assert [e.shape for e in errors] == 3 * [v.shape for v in variables]
    assert {e.dtype for e in errors} == {"float32"}
    assert len({e.path for e in errors}) == len(errors)
    first = flat(errors[:2])
    assert np.abs(first).max() > 0 and not np.any(flat(errors[2:]))
    model.train_on_batch(x[BATCH : 2 * BATCH], y[BATCH : 2 * BATCH])
    np.testing.assert_array_equal(flat(model.optimizer.errors[2:4]), first)


def test_errors_start_from_zero_when_weights_are_loaded(tmp_path):
    model = make_model(make_optimizer(feedback_steps=3, noise_multiplier=1.0, **CLIPS))
    x, y = make_problem()
    model.fit(x, y, batch_size=BATCH, verbose=0)
    assert np.abs(flat(model.optimizer.errors)).min() > 0
    model.save(tmp_path / "model.keras")
    loaded = keras.models.load_model(tmp_path / "model.keras")
    assert loaded.optimizer.mechanism.feedback_steps == 3
    assert len(loaded.optimizer.errors) == 6
    model.load_weights(tmp_path / "model.keras")
    for one in (loaded, model):
        np.testing.assert_array_equal(flat(one.optimizer.errors), 0.0)


@pytest.mark.parametrize("feedback_steps", [1, 3])
def test_the_error_of_a_variable_without_gradient_is_forgotten(feedback_steps):
    """Kept, it would come back after more steps than the accountant assumes."""
    keras.utils.set_random_seed(0)
    model = keras.Sequential(
        [keras.Input((FEATURES,)), keras.layers.Dense(5), keras.layers.Dense(CLASSES)]
    )
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    optimizer = make_optimizer(feedback_steps=feedback_steps, **CLIPS)
    x, y = make_problem()
    kept = lambda: [bool(np.any(e.numpy())) for e in optimizer.errors]
    for trainable in (True, False):
        model.layers[0].trainable = trainable
        model.compile(optimizer, loss)
        model.fit(x, y, batch_size=BATCH, verbose=0)
        assert kept() == feedback_steps * (2 * trainable * [True] + [True, True])
    model.layers[0].trainable = True
    model.compile(optimizer, loss)
    rebuilding.build_again(model)
    assert kept() == feedback_steps * [False, False, True, True]


@pytest.mark.parametrize("feedback_steps", [2, 3])
def test_trains_and_is_accounted_with_as_many_groups(feedback_steps):
    x, y = make_problem()
    sampling = dice_tf.CyclicPoissonSampling(len(x), 5, num_groups=feedback_steps + 1)
    optimizer = make_optimizer(
        noise_multiplier=4.0, expected_batch_size=5, feedback_steps=feedback_steps, **CLIPS
    )
    model = make_model(optimizer)
    budget = dice_tf.EpsilonCallback(sampling, delta=1e-3)
    history = model.fit(
        sampling.dataset(x, y, planned_epochs=2), epochs=2, verbose=0, callbacks=[budget]
    )
    steps = int(optimizer.iterations)
    assert steps == sampling.steps(2)
    mechanism = optimizer.mechanism
    epsilon = accounting.compute_epsilon(mechanism, sampling, steps, 1e-3)
    assert history.history["epsilon"][-1] == pytest.approx(epsilon)
    event = accounting.dp_event(mechanism, sampling, steps)
    gaussian = event.event.event
    assert event.count == -(-steps // (feedback_steps + 1))
    assert event.event.sampling_probability == pytest.approx((feedback_steps + 1) * 5 / len(x))
    spread = np.hypot(0.4, 1.2 / np.sqrt(feedback_steps))
    assert gaussian.noise_multiplier == pytest.approx(4.0 * 0.4 / spread)


def test_a_pass_cut_short_forgets_the_errors_of_all_steps():
    x, y = make_problem()
    sampling = dice_tf.CyclicPoissonSampling(len(x), 5, num_groups=4)
    optimizer = make_optimizer(
        noise_multiplier=4.0, expected_batch_size=5, feedback_steps=3, **CLIPS
    )
    model = make_model(optimizer)
    budget = dice_tf.EpsilonCallback(sampling, delta=1e-3)
    model.fit(sampling.dataset(x, y), steps_per_epoch=3, verbose=0, callbacks=[budget])
    assert np.any(flat(optimizer.errors))
    budget.on_train_begin()
    budget.on_epoch_begin(0)
    np.testing.assert_array_equal(flat(optimizer.errors), 0.0)
    assert budget.accounted_steps() == 4


def test_calibration_and_statement():
    sampling = dice_tf.CyclicPoissonSampling(60_000, 512, num_groups=4)
    arguments = dict(l2_norm_clip=0.25, error_norm_clip=0.75)
    budget = (2.7, 1e-5, sampling, 1171)
    noise, without = (
        accounting.calibrate_noise_multiplier(*budget, feedback_steps=s, **arguments)
        for s in (3, 1)
    )
    # C1^2 + C2^2 / 3 against C1^2 + C2^2.
    assert noise / without == pytest.approx(np.sqrt((1 + 3) / (1 + 9)), rel=1e-3)
    mechanism = dice_tf.DiceMechanism(
        noise_multiplier=noise, expected_batch_size=512, feedback_steps=3, **arguments
    )
    text = accounting.privacy_statement(mechanism, sampling, 1171, 1e-5)
    assert "feedback_steps              3" in text and "sqrt(C1^2 + C2^2/3)" in text
    # Fewer groups than s + 1: an example may return while its residual is fed back.
    few = dice_tf.CyclicPoissonSampling(60_000, 512, num_groups=3)
    assert "sensitivity C1 + C2" in accounting.privacy_statement(mechanism, few, 1171, 1e-5)


def test_the_letter_of_algorithm_1_has_one_step():
    with pytest.raises(MechanismError, match="feedback_steps=2, bound_residuals=False"):
        make_optimizer(feedback_steps=2, bound_residuals=False, noise_multiplier=1.0)


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__]))
