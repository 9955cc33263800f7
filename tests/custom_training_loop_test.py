# Copyright 2026 The dice_tf Authors.
# SPDX-License-Identifier: Apache-2.0
"""The custom training loop: its epsilon, its stop at the budget, and what it warns of."""

import math
import pathlib
import re
import sys
import textwrap

from absl import flags
import keras
import numpy as np
import pytest
import tensorflow as tf

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1] / "examples"))
sys.path.insert(0, str(pathlib.Path(__file__).parent))

import accounting_releases
import custom_training_loop
import dp_accounting_oracle

import dice_tf

NUM_DIGITS = 1437


def parse(*arguments):
    values = flags.FlagValues()
    custom_training_loop.define_flags(values)
    values(["custom_training_loop", *arguments])
    return values


def composed_epsilon(batch_size, rounds, accountant="pld"):
    """Epsilon of two groups in turns with C1 = C2 and noise 4, by dp_accounting alone."""
    return dp_accounting_oracle.composed_epsilon(
        2 * batch_size / NUM_DIGITS, 4.0 / math.sqrt(2), rounds, 1e-4, accountant
    )


@pytest.mark.parametrize(("accountant", "steps"), [("pld", 96), ("rdp", 78)])
def test_plain_command_spends_its_budget(accountant, steps):
    plan = custom_training_loop.make_plan(parse(f"--accountant={accountant}"), NUM_DIGITS)
    assert (plan.steps, plan.accountant) == (120, accountant)
    found = custom_training_loop.affordable_steps(plan, parse().epsilon)
    # Newer releases of dp_accounting bound the Renyi divergence less tightly.
    assert found == steps or accountant == "rdp" and accounting_releases.LARGEST_RATIO > 1
    spent, more = (composed_epsilon(256, found // 2 + i, accountant) for i in (0, 1))
    assert spent <= 3.5 < more
    epsilon = plan.epsilon(found)
    assert epsilon == pytest.approx(spent, rel=dp_accounting_oracle.TOLERANCE[accountant])


def test_epochs_end_the_loop_if_the_budget_lasts():
    plan = custom_training_loop.make_plan(parse("--epochs=2"), NUM_DIGITS)
    assert custom_training_loop.affordable_steps(plan, 50.0) == plan.steps == 12


def test_loop_stops_within_an_epoch_where_the_budget_ends(tmp_path, capsys):
    arguments = ("--batch_size=240", "--epochs=3", "--epsilon=1.3", f"--data_dir={tmp_path}")
    progress = custom_training_loop.run(parse(*arguments))
    printed = capsys.readouterr().out
    epsilon = lambda rounds: composed_epsilon(240, rounds)
    for steps, spent, accuracy in progress:
        assert spent == pytest.approx(epsilon(math.ceil(steps / 2)), rel=1e-4)
        assert f"{steps} steps, " in printed and f"test accuracy {accuracy:.4f}" in printed
    last = progress[-1][0]
    assert last % 6 != 0 and epsilon(last // 2) <= 1.3 < epsilon(last // 2 + 1)
    assert f"--epsilon=1.3 lasts for {last} of these 18 steps." in printed
    assert "Stopped: another round would exceed --epsilon=1.3" in printed
    assert f"The model after {last} steps, with all models on the way, is (epsilon," in printed
    assert re.search(r"^  noise_multiplier +4$", printed, re.MULTILINE)
    rounded = f"{math.ceil(1000 * progress[-1][1]) / 1000:.3f}"
    assert f"epsilon = {rounded} (PLD accountant)" in " ".join(printed.split())


def test_the_loop_that_the_docstring_warns_of_is_refused():
    text = custom_training_loop.__doc__
    blocks = re.findall(r"^\n((?:    .+\n)+)", text, re.MULTILINE)
    (wrong,) = [block for block in blocks if "GradientTape" in block]
    keras.utils.set_random_seed(0)
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(2)])
    optimizer = dice_tf.DiceSGDOptimizer(
        l2_norm_clip=1.0, noise_multiplier=1.0, expected_batch_size=4
    )
    model.compile(optimizer, keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    x, y = np.ones((4, 3), np.float32), np.zeros(4, np.int32)
    before = [v.numpy() for v in model.variables]
    with pytest.raises(dice_tf.errors.PlainGradientsError, match="private_train_step"):
        exec(textwrap.dedent(wrong), {"tf": tf, "model": model, "x": x, "y": y})
    for value, variable in zip(before, model.variables, strict=True):
        np.testing.assert_array_equal(variable.numpy(), value)


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__]))
