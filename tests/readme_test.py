# Copyright 2026 The dice_tf Authors.
# SPDX-License-Identifier: Apache-2.0
"""The README: its code runs as written, and its numbers are those of the accountant."""

import pathlib
import re

import keras
import numpy as np
import pytest

from dice_tf import accounting
from dice_tf.mechanism import DiceMechanism
from dice_tf.sampling import CyclicPoissonSampling, PoissonSampling, ShuffledEpochs

README = (pathlib.Path(__file__).parents[1] / "README.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"```python\n(.*?)```", README, flags=re.DOTALL)


def stated(name):
    """Returns the number that the first block gives for an argument, every time it does."""
    (value,) = set(re.findall(rf"\b{name}=([\d.e_-]+)", BLOCKS[0]))
    return float(value)


def test_the_code_runs_as_written():
    random = np.random.default_rng(0)
    y = random.integers(0, 4, 60_000)
    x = np.eye(4, dtype="float32")[y] + random.normal(size=(60_000, 4)).astype("float32") / 4
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(10, activation="softmax")])
    names = {"model": model, "x": x, "y": y}
    assert len(BLOCKS) == 2
    exec(BLOCKS[0], names)  # The reader's own lines, from our own README.
    history = model.history.history
    assert history["epsilon"] == sorted(history["epsilon"])
    assert history["epsilon"][-1] <= stated("target_epsilon")
    assert len(history["epsilon"]) == stated("epochs")
    # Up to the last digit, in which releases of dp_accounting may differ.
    (printed,) = re.findall(r"^# Epoch 20/20 .* epsilon: ([\d.]+)", BLOCKS[0], re.MULTILINE)
    assert history["epsilon"][-1] == pytest.approx(float(printed), abs=2e-4)
    assert history["accuracy"][-1] > 0.9
    exec(BLOCKS[1], names)
    assert names["epsilon"] == history["epsilon"][-1]
    # The example has the noise that its own calibration asks for, or more.
    assert names["noise_multiplier"] <= stated("noise_multiplier")
    (calibrated,) = re.findall(r"steps\(epochs=20\)\) +# ([\d.]+)$", BLOCKS[1], re.MULTILINE)
    assert f"{names['noise_multiplier']:.2f}" == calibrated


def test_the_budget_of_the_example_allows_all_its_epochs():
    batch_size = int(stated("expected_batch_size"))
    sampling = CyclicPoissonSampling(int(stated("num_examples")), batch_size)
    names = ("l2_norm_clip", "error_norm_clip", "noise_multiplier")
    parameters = {name: stated(name) for name in names}
    mechanism = DiceMechanism(expected_batch_size=batch_size, **parameters)
    steps = sampling.steps(int(stated("epochs")))
    assert f"epsilon of the example above, {steps} steps" in README
    epsilon = accounting.compute_epsilon(mechanism, sampling, steps, stated("delta"))
    assert epsilon <= stated("target_epsilon")


@pytest.mark.parametrize(
    "sampling", [CyclicPoissonSampling, PoissonSampling, ShuffledEpochs], ids=lambda s: s.__name__
)
def test_the_table_of_epsilons_is_what_the_accountant_says(sampling):
    (cell,) = re.findall(rf"^\|.*`{sampling.__name__}.*\| ([0-9.]+) \|$", README, re.MULTILINE)
    mechanism = DiceMechanism(l2_norm_clip=0.25, noise_multiplier=2.85, expected_batch_size=2048)
    epsilon = accounting.compute_epsilon(mechanism, sampling(60_000, 2048), 600, 1e-5)
    assert f"{epsilon:.2f}" == cell


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__]))
