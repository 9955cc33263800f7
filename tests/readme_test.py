# Copyright 2026 The dice_tf Authors.
# SPDX-License-Identifier: Apache-2.0
"""The README and docs/features.md: their code runs as written, their numbers hold."""

import math
import pathlib
import re

import keras
import numpy as np
import pytest

import dice_tf
from dice_tf import accounting
from dice_tf.sampling import PoissonSampling, ShuffledEpochs

ROOT = pathlib.Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
FEATURES = (ROOT / "docs" / "features.md").read_text(encoding="utf-8")


def code_of(page):
    (block,) = re.findall(r"```python\n(.*?)```", page, flags=re.DOTALL)
    return block


def names():
    random = np.random.default_rng(0)
    y = random.integers(0, 4, 60_000)
    x = np.eye(4, dtype="float32")[y] + random.normal(size=(60_000, 4)).astype("float32") / 4
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(10, activation="softmax")])
    return {"model": model, "x": x, "y": y, "x_val": x[:100], "y_val": y[:100]}


@pytest.fixture(scope="module")
def after_the_readme():
    """What the names of the README's program stand for after it ran."""
    scope = names()
    exec(code_of(README), scope)  # The reader's own lines, from our own README.
    return scope


def test_the_code_of_the_readme_runs_all_epochs_within_the_budget(after_the_readme):
    plan, history = after_the_readme["plan"], after_the_readme["model"].history.history
    assert history["epsilon"] == sorted(history["epsilon"])
    assert len(history["epsilon"]) == plan.epochs == 20
    assert history["epsilon"][-1] == plan.epsilon() <= 3.0
    assert history["val_accuracy"][-1] > 0.9


def test_the_plan_is_printed_as_the_readme_shows_it(after_the_readme):
    printed = " ".join(str(after_the_readme["plan"]).split())
    (shown,) = re.findall(r"```\n(Privacy plan.*?)```", README, flags=re.DOTALL)
    words, expected = printed.split(), shown.split()
    assert len(words) == len(expected)
    for word, other in zip(words, expected, strict=True):
        # Up to the last digit, in which releases of dp_accounting may differ.
        if re.fullmatch(r"[\d.e+-]+", other) and "." in other:
            assert float(word) == pytest.approx(float(other), rel=2e-3)
        else:
            assert word == other


def test_the_table_of_epsilons_is_what_the_accountant_says(after_the_readme):
    plan = after_the_readme["plan"]
    assert f"the noise of the plan above, {plan.steps} steps" in README
    for label, sampling in {
        "`plan.dataset": plan.sampling,
        "`PoissonSampling": PoissonSampling(60_000, 2048),
        "arrays, `model.fit": ShuffledEpochs(60_000, 2048),
    }.items():
        (cell,) = re.findall(rf"^\| {label}.*\| ([0-9.]+) \|$", README, re.MULTILINE)
        epsilon = accounting.compute_epsilon(
            plan.mechanism(), sampling, plan.steps, plan.delta, plan.accountant
        )
        assert f"{math.ceil(epsilon * 100 - 1e-3) / 100:.2f}" == cell


def test_the_noise_that_error_feedback_saves_is_as_stated():
    # "up to 48 % less noise than DP-SGD": batches of 512, 1171 steps, epsilon 8, eight groups.
    noise = lambda sampling, clips, s: accounting.calibrate_noise_multiplier(
        8.0, 1e-5, sampling, 1171, *clips, feedback_steps=s, accountant="pld"
    ) * clips[0]  # fmt: skip
    spread = noise(dice_tf.CyclicPoissonSampling(60_000, 512, 8), (1 / 8, 7 / 8), 7)
    plain = noise(PoissonSampling(60_000, 512), (1.0, 0.0), 1)
    (stated,) = re.findall(r"takes up to (\d+) % less noise than DP-SGD", README)
    assert 100 * (1 - spread / plain) == pytest.approx(int(stated), abs=0.6)


def test_the_epsilon_of_random_allocation_is_as_the_guide_states(after_the_readme):
    guide = (ROOT / "docs" / "user_guide.md").read_text(encoding="utf-8")
    (stated,) = re.findall(r"epsilon is smaller: ([\d.]+) in place of ([\d.]+) for", guide)
    plan = after_the_readme["plan"]
    for sampling, shown in zip((dice_tf.RandomAllocation(60_000, 2048), plan.sampling), stated):
        mechanism = dice_tf.DiceMechanism(
            l2_norm_clip=0.25, noise_multiplier=2.843, expected_batch_size=2048
        )
        epsilon = accounting.compute_epsilon(mechanism, sampling, 600, 1.6e-6, "pld")
        assert float(shown) - 0.011 < epsilon <= float(shown)


def test_the_code_below_the_plan_runs_as_written():
    scope = names()
    exec(code_of(FEATURES), scope)  # Likewise.
    epsilons = scope["model"].history.history["epsilon"]
    assert len(epsilons) == 20 and epsilons[-1] <= 3.0
    # And one step more, by the loop of one's own.
    assert scope["budget"].epsilon() > epsilons[-1]


def test_the_readme_is_read_in_a_minute():
    lines = README.splitlines()
    assert len(lines) <= 120 and max(map(len, lines)) <= 120


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__]))
