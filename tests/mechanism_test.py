# Copyright 2026 The dice_tf Authors.
# SPDX-License-Identifier: Apache-2.0
"""The privacy parameters: scales, sensitivities, refusals."""

import math

import pytest

from dice_tf.errors import DicePrivacyError, MechanismError
from dice_tf.mechanism import DiceMechanism
from dice_tf.training.optimizers import DiceSGDOptimizer


def make(**arguments):
    return DiceMechanism(
        **{"l2_norm_clip": 2.0, "noise_multiplier": 1.5, "expected_batch_size": 12, **arguments}
    )


@pytest.mark.parametrize(
    "name, advice",
    [
        ("l2_norm_clip", 'clipping="automatic" needs none'),
        ("noise_multiplier", "calibrate_noise_multiplier"),
        ("expected_batch_size", "`batch_size` of `fit`"),
    ],
)
def test_what_was_left_out_is_named_with_advice(name, advice):
    given = {"l2_norm_clip": 2.0, "noise_multiplier": 1.5, "expected_batch_size": 12}
    del given[name]
    with pytest.raises(MechanismError) as caught:
        DiceSGDOptimizer(learning_rate=0.1, **given)
    assert f"Received: {name}=None." in str(caught.value) and advice in str(caught.value)


def test_error_norm_clip_defaults_to_l2_norm_clip():
    assert make().error_norm_clip == 2.0
    assert make(error_norm_clip=0).error_norm_clip == 0.0


def test_noise_is_relative_to_l2_norm_clip_and_divided_by_the_public_batch_size():
    mechanism = make(error_norm_clip=5.0)
    assert mechanism.noise_stddev_of_sum == 3.0
    assert mechanism.noise_stddev == 0.25


def test_sensitivities():
    mechanism = make(error_norm_clip=1.5)
    assert mechanism.sensitivity(separate_entries=True) == 2.5
    assert mechanism.sensitivity(separate_entries=False) == 3.5
    spread = make(error_norm_clip=3.0, feedback_steps=4)
    assert spread.sensitivity(separate_entries=True) == 2.5
    assert spread.sensitivity(separate_entries=False) == 5.0
    assert make(error_norm_clip=0).sensitivity(separate_entries=False) == 2.0
    unbounded_without_feedback = make(error_norm_clip=0, bound_residuals=False)
    assert unbounded_without_feedback.sensitivity(separate_entries=True) == 2.0


def test_case_7_microbatches_double_the_sensitivity_and_divide_by_their_number():
    mechanism = make(error_norm_clip=1.5, num_microbatches=4)
    assert mechanism.sensitivity(separate_entries=True) == 5.0
    assert (mechanism.microbatch_size, mechanism.divisor) == (3, 4)
    assert mechanism.noise_stddev == 0.75


def test_unbounded_residuals_have_no_finite_sensitivity():
    with pytest.raises(MechanismError, match="error_norm_clip=2.0"):
        make(bound_residuals=False).sensitivity(separate_entries=True)


@pytest.mark.parametrize(
    "arguments, match",
    [
        ({"l2_norm_clip": 0}, "l2_norm_clip=0"),
        ({"l2_norm_clip": math.nan}, "l2_norm_clip=nan"),
        ({"l2_norm_clip": 1e-21}, "at least 1e-12. Received: l2_norm_clip=1e-21"),
        ({"error_norm_clip": 1e-21}, "at least 1e-12. Received: error_norm_clip=1e-21"),
        ({"noise_multiplier": None}, "noise_multiplier=None"),
        ({"expected_batch_size": 12.0}, "expected_batch_size=12.0"),
        ({"expected_batch_size": -1}, "expected_batch_size=-1"),
        ({"feedback_steps": 0}, "feedback_steps=0"),
        ({"feedback_steps": 2, "bound_residuals": False}, "feedback_steps=2"),
        ({"num_microbatches": 5}, "num_microbatches=5"),
        ({"clipping": "none"}, "clipping='none'"),
    ],
)
def test_bad_values_are_refused_by_name(arguments, match):
    with pytest.raises(MechanismError, match=match) as raised:
        make(**arguments)
    assert isinstance(raised.value, DicePrivacyError) and isinstance(raised.value, ValueError)


def test_is_frozen_and_compares_by_value():
    assert make() == make(error_norm_clip=2.0)
    with pytest.raises(AttributeError):
        make().l2_norm_clip = 1e9


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__]))
