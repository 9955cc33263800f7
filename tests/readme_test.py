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


def test_the_code_runs_as_written():
    random = np.random.default_rng(0)
    y = random.integers(0, 4, 60_000)
    x = np.eye(4, dtype="float32")[y] + random.normal(size=(60_000, 4)).astype("float32") / 4
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(10, activation="softmax")])
    names = {"model": model, "x": x, "y": y}
    assert len(BLOCKS) == 2
    exec(BLOCKS[0], names)  # The reader's own lines, from our own README.
    history = model.history.history
    assert history["epsilon"] == sorted(history["epsilon"]) and history["epsilon"][-1] <= 2.7
    assert history["accuracy"][-1] > 0.9
    exec(BLOCKS[1], names)
    assert names["epsilon"] > 2.7
    # It was calibrated for the same 600 steps.
    assert names["noise_multiplier"] > 2.85


@pytest.mark.parametrize(
    "sampling", [CyclicPoissonSampling, PoissonSampling, ShuffledEpochs], ids=lambda s: s.__name__
)
def test_the_table_of_epsilons_is_what_the_accountant_says(sampling):
    (stated,) = re.findall(rf"^\|.*`{sampling.__name__}.*\| ([0-9.]+) \|$", README, re.MULTILINE)
    mechanism = DiceMechanism(l2_norm_clip=0.25, noise_multiplier=2.85, expected_batch_size=2048)
    epsilon = accounting.compute_epsilon(mechanism, sampling(60_000, 2048), 600, 1e-5)
    assert f"{epsilon:.2f}" == stated


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__]))
