# Copyright 2026 The dice_tf Authors.
# SPDX-License-Identifier: Apache-2.0
"""The script on random convolutions: its plan keeps the budget, with and without feedback."""

import pathlib
import sys

from absl import flags
import pytest

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1] / "examples"))

import train_on_features

from dice_tf import accounting


def parse(*arguments):
    values = flags.FlagValues()
    train_on_features.define_flags(values)
    values(["train_on_features", *arguments])
    return values


@pytest.mark.parametrize("arguments", [(), ("--dp_sgd",), ("--epsilon=1", "--feedback_steps=3")])
def test_the_noise_keeps_the_budget(arguments):
    values = parse(*arguments)
    plan = train_on_features.make_plan(values, 60_000)
    assert plan.delta == 1e-5 and values.epsilon * 0.998 < plan.epsilon() <= values.epsilon
    s = 0 if values.dp_sgd else values.feedback_steps
    assert plan.sampling.num_groups == s + 1 and plan.feedback_steps == s
    mechanism = plan.mechanism(1.0)
    # RDP, another way to account for the same draws, is above PLD, and not by much.
    by_rdp = accounting.compute_epsilon(mechanism, plan.sampling, plan.steps, plan.delta, "rdp")
    assert plan.epsilon() < by_rdp < 1.6 * plan.epsilon()


def test_what_one_example_passes_on_is_the_threshold():
    plan = train_on_features.make_plan(parse("--share=0.25"), 60_000)
    mechanism = plan.mechanism(0.25)
    assert mechanism.l2_norm_clip + mechanism.error_norm_clip == pytest.approx(1.0)


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__]))
