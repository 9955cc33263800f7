# Copyright 2026 The dice_tf Authors.
# SPDX-License-Identifier: Apache-2.0
"""Rules and schedules of thresholds that are refused."""

import pathlib
import sys

import pytest

sys.path.insert(0, str(pathlib.Path(__file__).parent))


import dice_tf
from dice_tf import AdaptiveClipping, DiceMechanism, PiecewiseSchedule
from dice_tf.errors import (
    MechanismError,
    OptimizerArgumentError,
)

pytestmark = pytest.mark.filterwarnings("ignore:self_check=False", "ignore:`fit` took")


@pytest.mark.parametrize(
    "rule",
    [
        dict(target_quantile=0.0),
        dict(target_quantile=1.0),
        dict(target_quantile=float("nan")),
        dict(learning_rate=0.0),
        dict(learning_rate=-1.0),
        dict(count_noise_multiplier=0.0),
        dict(count_noise_multiplier=-2.0),
        dict(count_noise_multiplier="much"),
        dict(per_layer="yes"),
    ],
    ids=str,
)
def test_rules_out_of_range_are_refused(rule):
    with pytest.raises(MechanismError, match=next(iter(rule))):
        AdaptiveClipping(**rule)


@pytest.mark.parametrize(
    "schedule, what",
    [
        (dict(boundaries=[]), "boundaries"),
        (dict(boundaries=3), "boundaries"),
        (dict(boundaries=[5, 5]), "boundaries"),
        (dict(boundaries=[0]), "boundaries"),
        (dict(boundaries=[2.5]), "boundaries"),
        (dict(boundaries=[2], noise_factors=[1.0]), "noise_factors"),
        (dict(boundaries=[2], noise_factors=[1.0, 0.0]), "noise_factors"),
        (dict(boundaries=[2], clip_factors=[1.0, -1.0]), "clip_factors"),
    ],
    ids=str,
)
def test_schedules_out_of_range_are_refused(schedule, what):
    with pytest.raises(MechanismError, match=what):
        PiecewiseSchedule(**schedule)


SMALLER = PiecewiseSchedule([2], None, [1.0, 0.5])


@pytest.mark.parametrize(
    "arguments, message",
    [
        (dict(clipping="adaptive", bound_residuals=False), "needs bound_residuals=True"),
        (dict(schedule=SMALLER, bound_residuals=False), "needs bound_residuals=True"),
        (dict(schedule=SMALLER, clipping="adaptive"), "not for a schedule to set"),
        (dict(schedule=SMALLER, clipping="automatic", l2_norm_clip=1.0), "not for a schedule"),
        (dict(schedule="cosine"), "must be a `dice_tf.PiecewiseSchedule`"),
        (dict(schedule=PiecewiseSchedule([2], None, [1.0, 1e-12])), "too small"),
        (dict(schedule=PiecewiseSchedule([2], [1.0, 1e-30])), "too small"),
        (dict(clipping="adaptive", l2_norm_clip=0.0), "l2_norm_clip"),
    ],
    ids=str,
)
def test_contradictions_are_refused(arguments, message):
    given = dict(l2_norm_clip=0.5, noise_multiplier=0.9, expected_batch_size=8, **{})
    with pytest.raises(MechanismError, match=message):
        DiceMechanism(**{**given, **arguments})


def test_a_variance_that_changes_is_not_subtracted():
    arguments = dict(l2_norm_clip=0.5, noise_multiplier=1.0, expected_batch_size=8)
    corrected = dict(correct_noise_bias=True, **arguments)
    moving = [dict(clipping="adaptive"), dict(schedule=PiecewiseSchedule([3], [1.0, 2.0]),
                                              rescale_to_unit_norm=True)]  # fmt: skip
    for moves in moving:
        with pytest.raises(OptimizerArgumentError, match="no one variance"):
            dice_tf.DiceAdamOptimizer(**corrected, **moves)
    steady = dict(clipping="adaptive", rescale_to_unit_norm=True)
    assert dice_tf.DiceAdamOptimizer(**corrected, **steady)._noise_variance() == (1 / 8) ** 2


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__]))
