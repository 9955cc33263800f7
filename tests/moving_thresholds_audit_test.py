# Copyright 2026 The dice_tf Authors.
# SPDX-License-Identifier: Apache-2.0
"""No unit moves a window of releases by more than is claimed, however thresholds move.

Pairs of runs with and without one unit, whose thresholds an adversary sets between steps: in the
proof they are functions of what was released, which is the same in both. Releases are gradients
over the noise of their step, and counts over theirs.
"""

import pathlib
import sys

import numpy as np
import pytest
import tensorflow as tf

sys.path.insert(0, str(pathlib.Path(__file__).parent))

from per_layer_model import make_model
from softmax_regression import CLASSES, FEATURES, flat, make_optimizer

import dice_tf
from dice_tf import AdaptiveClipping
from dice_tf.training import thresholds

pytestmark = pytest.mark.filterwarnings("ignore:self_check=False")
C1, UNITS, ROWS = 0.4, 4, 2
STEPS = 7


def windows(per_layer, feedback_steps, ratio, random, often=False, pairs=12):
    """Yields pairs of the largest shift of a run, and the claim: a window, or one release."""
    y_of_counts = 1.5
    rule = AdaptiveClipping(
        per_layer=per_layer, count_noise_multiplier=y_of_counts, learning_rate=0.5
    )
    arguments = dict(
        l2_norm_clip=C1, error_norm_clip=ratio * C1, feedback_steps=feedback_steps, clipping=rule
    )
    # Gradients without noise; the claim is about z = 1.
    claim = dice_tf.DiceMechanism(noise_multiplier=1.0, expected_batch_size=UNITS, **arguments)
    claim = claim.sensitivity(separate_entries=not often) / C1
    model = make_model(make_optimizer(
        learning_rate=1.0, rows_per_unit=ROWS, expected_batch_size=UNITS, self_check=False,
        noise_seed=1, **arguments))  # fmt: skip
    optimizer, variables = model.optimizer, model.trainable_variables
    optimizer.build(variables)
    start, begin = [v.numpy() for v in variables], flat(variables)
    step = tf.function(lambda *data: dice_tf.private_train_step(model, data), autograph=False)
    layers = 2 if per_layer else 1

    def releases(batches, moves, is_there):
        """Gradients over C of their step, and counts over their noise, of every step."""
        optimizer._private.process_draws.assign(0)  # The same noise on counts, in both runs.
        for error in optimizer.errors:
            error.assign(tf.zeros(error.shape))
        found = []
        for number, (x, y, entered) in enumerate(batches):
            # All variables of a layer have its threshold.
            factors = np.repeat(moves[number], 2) if per_layer else moves[number]
            optimizer._threshold_factors.assign(factors)
            c1 = np.array(list(dice_tf.clip_thresholds(model).values()))
            weights = np.ones(UNITS * ROWS, np.float32)
            if not (is_there and entered):
                weights[:ROWS] = 0
            step(x, y, weights)
            moved = optimizer._threshold_factors.numpy()[:: 2 if per_layer else 1] / moves[number]
            counts = -np.log(moved.astype(np.float64)) * UNITS / 0.5
            gradient = (begin - flat(variables)) * UNITS / np.linalg.norm(c1)
            stddev = y_of_counts * layers**0.5 / 2
            found.append(np.concatenate([gradient, counts / stddev]))
            for variable, value in zip(variables, start, strict=True):
                variable.assign(value)
        return np.array(found)

    for pair in range(pairs):
        moves = 10.0 ** random.uniform(-2, 1, (STEPS, layers))
        if pair % 2 == 0:
            # The worst: large when the unit enters, small when its residual is released.
            moves[1:] = moves[0] * 10.0 ** random.uniform(-3, -1, (STEPS - 1, layers))
        batches = []
        for number in range(STEPS):
            x = random.normal(size=(UNITS * ROWS, FEATURES)).astype("float32")
            x[:ROWS] *= 10.0 ** random.uniform(-3, 3)
            y = random.integers(0, CLASSES, UNITS * ROWS)
            batches.append((x, y, often or number == 0))
        shift = releases(batches, moves, True) - releases(batches, moves, False)
        if often:
            yield np.linalg.norm(shift[-1]), claim
        else:
            # Nothing is left of it after the window.
            assert np.abs(shift[feedback_steps + 1 :]).max() < 1e-5
            yield np.linalg.norm(shift[: feedback_steps + 1]), claim


@pytest.mark.parametrize("per_layer, feedback_steps", [(False, 1), (True, 3)])
def test_no_unit_moves_a_window_by_more_than_the_claim(per_layer, feedback_steps):
    random = np.random.default_rng(feedback_steps)
    found = list(windows(per_layer, feedback_steps, ratio=1.5, random=random))
    assert all(shift <= claim * (1 + 1e-4) for shift, claim in found)
    assert max(shift / claim for shift, claim in found) > 0.8


def test_units_that_meet_their_own_residual_stay_below_the_sum():
    random = np.random.default_rng(5)
    found = list(windows(True, 2, ratio=1.5, random=random, often=True))
    assert all(shift <= claim * (1 + 1e-4) for shift, claim in found)
    assert max(shift / claim for shift, claim in found) > 0.6


def test_the_claim_is_false_without_the_rescaling(monkeypatch):
    """Mutation: were residuals left as they are, the windows of the test above would break it."""
    monkeypatch.setattr(thresholds, "rescaled", lambda optimizer, errors, *rest: errors)
    random = np.random.default_rng(1)
    found = list(windows(False, 1, ratio=1.5, random=random, pairs=4))
    assert max(shift / claim for shift, claim in found) > 5


def test_the_claim_is_false_without_the_noise_on_counts_in_it():
    """Mutation: counts alone move a window; gradients at their claim do not make up for it."""
    random = np.random.default_rng(1)
    gradients_alone = np.hypot(1.0, 1.5)
    found = list(windows(False, 1, ratio=1.5, random=random, pairs=8))
    assert max(shift for shift, _ in found) > gradients_alone * 1.01


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__]))
