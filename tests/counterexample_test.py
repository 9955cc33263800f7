# Copyright 2026 The dice_tf Authors.
# SPDX-License-Identifier: Apache-2.0
"""The counterexample to the paper's formula, as real training in one dimension.

Two runs with the same draws and the same noise, one with and one without the example whose
gradient is huge. What differs between their releases is what that example does.
"""

import keras
import numpy as np
import pytest

import dice_tf

NUM_EXAMPLES, BATCH_SIZE, STEPS = 20, 4, 30
C1, C2 = 1.0, 0.25
FIRST_DRAW = 7


def releases(draws, targets, bound_residuals, noise_seed=5):
    """Trains one weight with Keras and returns v + w of every step.

    The loss is minus target times weight: the gradient of an example is minus its target.
    """
    weight = keras.layers.Dense(1, use_bias=False, kernel_initializer="zeros")
    model = keras.Sequential([keras.Input((1,)), weight])
    optimizer = dice_tf.DiceSGDOptimizer(
        learning_rate=1.0,
        l2_norm_clip=C1,
        error_norm_clip=C2,
        noise_multiplier=1.5,
        expected_batch_size=BATCH_SIZE,
        bound_residuals=bound_residuals,
        noise_seed=noise_seed,
    )
    model.compile(optimizer, loss=lambda y, pred: -keras.ops.mean(y * pred, axis=-1))
    x = np.ones((NUM_EXAMPLES, 1), dtype=np.float32)
    y = np.asarray(targets, dtype=np.float32).reshape(-1, 1)
    weights = [0.0]
    for draw in draws:
        model.train_on_batch(x, y, sample_weight=draw.astype(np.float32))
        weights.append(float(model.get_weights()[0].item()))
    return np.diff(weights)


def shifts(bound_residuals, draws_of_the_example, target, others=0.0):
    """Returns by how much one example shifts each release, all else being equal."""
    draws = np.random.default_rng(0).random((STEPS, NUM_EXAMPLES)) < BATCH_SIZE / NUM_EXAMPLES
    draws[:, 0] = draws_of_the_example
    without = draws.copy()
    without[:, 0] = False
    targets = np.full(NUM_EXAMPLES, others)
    targets[0] = target
    return releases(draws, targets, bound_residuals) - releases(without, targets, bound_residuals)


def drawn_at(*steps):
    return np.isin(np.arange(STEPS), steps)


HUGE = C1 + STEPS * BATCH_SIZE * C2


@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_unbounded_residuals_one_draw_shifts_every_later_release_by_c2(sign):
    shift = shifts(False, drawn_at(FIRST_DRAW), sign * HUGE)
    expected = np.zeros(STEPS)
    expected[FIRST_DRAW] = C1 / BATCH_SIZE
    expected[FIRST_DRAW + 1 :] = C2
    np.testing.assert_allclose(shift, sign * expected, rtol=0, atol=1e-5)


def test_unbounded_residuals_shift_until_the_error_is_worn_off():
    # Half the gradient of the counterexample lasts for half as many steps.
    shift = shifts(False, drawn_at(FIRST_DRAW), C1 + 10 * BATCH_SIZE * C2)
    expected = np.zeros(STEPS)
    expected[FIRST_DRAW] = C1 / BATCH_SIZE
    expected[FIRST_DRAW + 1 : FIRST_DRAW + 11] = C2
    # Ten times what clipping allows for rounding comes after the rest.
    np.testing.assert_allclose(shift, expected, rtol=0, atol=12e-5 * C2)


def test_unbounded_residuals_the_shift_may_be_2_c2():
    # The others push the error to -C2, the example to +C2: the sensitivity of form 4.
    shift = shifts(False, drawn_at(FIRST_DRAW), 1000 * HUGE, others=-HUGE)
    np.testing.assert_allclose(shift[FIRST_DRAW + 1 :], 2 * C2, rtol=0, atol=1e-4)


@pytest.mark.parametrize("target", [HUGE, C1 + 0.5 * C2, 0.5 * C1])
def test_bounded_residuals_one_draw_shifts_two_releases(target):
    shift = shifts(True, drawn_at(FIRST_DRAW), target, others=0.3)
    head = min(target, C1)
    residual = min(target - head, C2)
    expected = np.zeros(STEPS)
    expected[FIRST_DRAW : FIRST_DRAW + 2] = head / BATCH_SIZE, residual / BATCH_SIZE
    np.testing.assert_allclose(shift, expected, rtol=0, atol=1e-5)


def test_bounded_residuals_every_draw_counts_the_same():
    shift = shifts(True, drawn_at(3, 4, 20), HUGE)
    expected = np.zeros(STEPS)
    for step in (3, 4, 20):
        expected[step] += C1 / BATCH_SIZE
        expected[step + 1] += C2 / BATCH_SIZE
    np.testing.assert_allclose(shift, expected, rtol=0, atol=1e-5)


def test_the_noise_is_there_and_cancels_only_because_it_is_the_same():
    targets, draws = np.zeros(NUM_EXAMPLES), np.zeros((STEPS, NUM_EXAMPLES), dtype=bool)
    first, second = (releases(draws, targets, False, noise_seed=seed) for seed in (5, 6))
    # Without gradients the releases are the noise: 60 draws of known standard deviation.
    stddev = np.std(np.concatenate([first, second])) / (1.5 * C1 / BATCH_SIZE)
    assert 0.7 < stddev < 1.3
    assert abs(np.corrcoef(first, second)[0, 1]) < 0.6


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__]))
