# Copyright 2026 The dice_tf Authors.
# SPDX-License-Identifier: Apache-2.0
"""Signatures that name privacy arguments name all fields of `DiceMechanism`, and no others."""

import dataclasses
import inspect

import numpy as np
import pytest

from dice_tf import (
    AdaptiveClipping,
    CyclicPoissonSampling,
    DiceAdamOptimizer,
    DiceMechanism,
    DiceSGDOptimizer,
    PiecewiseSchedule,
    PoissonSampling,
)
from dice_tf.accounting import calibrate_noise_multiplier, compute_epsilon
from dice_tf.mechanism import PRIVACY_ARGUMENTS

FIELDS = {field.name: field for field in dataclasses.fields(DiceMechanism)}
# What decides a run's privacy besides, or where else it comes from.
OF_THE_OPTIMIZER = {"plan", "chunk_size", "gradient_engine", "self_check", "rescale_to_unit_norm",
                    "save_errors", "noise_seed"}  # fmt: skip
OF_THE_BUDGET = {"target_epsilon", "delta", "sampling", "steps", "accountant",
                 "group_size", "neighbouring_relation"}  # fmt: skip
# A value of each that differs from its default and is valid beside all others.
OTHER = {
    "l2_norm_clip": 0.5,
    "noise_multiplier": 2.0,
    "expected_batch_size": 16,
    "error_norm_clip": 0.25,
    "bound_residuals": True,
    "clipping": "flat",
    "feedback_steps": 3,
    "num_microbatches": 4,
    # Not beside microbatches; `test_rows_per_unit_is_handed_on_and_written_down` has another.
    "rows_per_unit": 1,
    "schedule": PiecewiseSchedule([10], [1.0, 2.0]),
}
WRITTEN = {**OTHER, "schedule": OTHER["schedule"].get_config()}


def parameters_of(function, left_out=()):
    parameters = inspect.signature(function).parameters
    named = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    return {n: p for n, p in parameters.items() if p.kind in named and n not in left_out}


def test_the_list_is_all_fields_but_the_one_that_the_seed_decides():
    assert set(FIELDS) - set(PRIVACY_ARGUMENTS) == {"noise_is_secret"}
    assert list(OTHER) == list(PRIVACY_ARGUMENTS)


@pytest.mark.parametrize("optimizer_class", [DiceSGDOptimizer, DiceAdamOptimizer])
def test_optimizers_take_each_field_hand_it_on_and_write_it_down(optimizer_class):
    parameters = parameters_of(optimizer_class.__init__, {"self", "learning_rate"})
    assert set(parameters) == set(PRIVACY_ARGUMENTS) | OF_THE_OPTIMIZER
    optimizer = optimizer_class(**OTHER)
    assert optimizer.mechanism == DiceMechanism(**OTHER)
    config = optimizer.get_config()
    assert {name: config[name] for name in OTHER} == WRITTEN
    assert optimizer_class.from_config(config).mechanism == optimizer.mechanism
    # The defaults are those of the mechanism.
    required = dict(l2_norm_clip=1.0, noise_multiplier=1.0, expected_batch_size=8)
    assert optimizer_class(**required).mechanism == DiceMechanism(**required)


def test_rows_per_unit_is_handed_on_and_written_down():
    arguments = dict(OTHER, num_microbatches=None, rows_per_unit=4)
    optimizer = DiceSGDOptimizer(**arguments)
    assert optimizer.mechanism == DiceMechanism(**arguments)
    assert optimizer.get_config()["rows_per_unit"] == 4


def test_a_flag_of_numpy_is_written_to_files_as_a_plain_one():
    arguments = dict(OTHER, feedback_steps=1, bound_residuals=np.bool_(False), schedule=None)
    assert DiceSGDOptimizer(**arguments).get_config()["bound_residuals"] is False


def test_calibration_takes_each_field_that_epsilon_depends_on():
    parameters = parameters_of(calibrate_noise_multiplier, OF_THE_BUDGET)
    # It returns the noise, has batch size and unit from the sampling, and divides by no threshold.
    elsewhere = {"noise_multiplier", "expected_batch_size", "rows_per_unit"}
    assert set(parameters) == set(PRIVACY_ARGUMENTS) - elsewhere
    for name in set(parameters) - {"l2_norm_clip"}:
        assert parameters[name].default == FIELDS[name].default
    units = dict(l2_norm_clip=1.0, noise_multiplier=2.0, expected_batch_size=16)
    sampling = PoissonSampling(num_examples=160, expected_batch_size=16)
    epsilons = [
        compute_epsilon(DiceMechanism(**units, clipping=clipping), sampling, 10, 1e-3)
        for clipping in ("flat", "automatic")
    ]
    assert epsilons[0] == epsilons[1]


@pytest.mark.parametrize(
    "name, value",
    [
        ("l2_norm_clip", 0.5),
        ("error_norm_clip", 0.25),
        ("bound_residuals", False),
        ("feedback_steps", 3),
        ("num_microbatches", 4),
        ("clipping", AdaptiveClipping(count_noise_multiplier=3.0)),
        ("schedule", PiecewiseSchedule([4], [1.0, 0.5])),
    ],
)
def test_calibration_hands_each_field_on(name, value):
    # With so many groups every number of feedback steps has its own sensitivity.
    sampling = CyclicPoissonSampling(num_examples=640, expected_batch_size=16, num_groups=4)
    given = {"l2_norm_clip": 1.0, "error_norm_clip": 1.0, name: value}
    noise = calibrate_noise_multiplier(2.0, 1e-3, sampling, 10, **given)
    plain = calibrate_noise_multiplier(2.0, 1e-3, sampling, 10)
    assert noise != plain or name in ("l2_norm_clip", "error_norm_clip")
    mechanism = DiceMechanism(noise_multiplier=noise, expected_batch_size=16, **given)
    assert 1.99 < compute_epsilon(mechanism, sampling, 10, 1e-3) <= 2.0


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__]))
