# Copyright 2026 The dice_tf Authors.
# SPDX-License-Identifier: Apache-2.0
"""The numbers of docs/scaling.md that follow from others: bytes, memory and efficiencies."""

import pathlib
import re
import sys

import keras
import numpy as np
import pytest

ROOT = pathlib.Path(__file__).absolute().parents[1]
sys.path.insert(0, str(ROOT / "benchmarks"))

import models

import dice_tf
from dice_tf.distribution import strategies

PAGE = (ROOT / "docs" / "scaling.md").read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def stated():
    """Dict from a model's name to its milliseconds per step and its number of weights."""
    found = re.findall(r"(\d+) ms \((CNN|MLP), d = ([\d,]+)\)", PAGE)
    return {name: (float(ms), int(d.replace(",", ""))) for ms, name, d in found}


def test_efficiencies_follow_from_the_stated_numbers(stated):
    text = " ".join(PAGE.split())
    assert "10 microseconds per message and 12.5 GB/s" in text
    assert "in brackets 50 microseconds and 1.25 GB/s" in text
    networks = [(10e-6, 12.5e9), (50e-6, 1.25e9)]
    rows = re.findall(
        r"^\| (\d+) \| ([\d.]+) \(([\d.]+)\) \| ([\d.]+) \(([\d.]+)\) \|$", PAGE, re.MULTILINE
    )
    assert [int(row[0]) for row in rows] == [1, 2, 4, 8, 16, 64, 256, 1000]
    for workers, *shown in rows:
        workers, expected = int(workers), []
        for name in ("CNN", "MLP"):
            milliseconds, weights = stated[name]
            for latency, bandwidth in networks:
                # Each of 2 (W - 1) messages carries a W-th part of two sums of float32.
                message = latency + 2 * 4 * weights / workers / bandwidth
                compute = milliseconds / 1e3
                expected.append(compute / (compute + 2 * (workers - 1) * message))
        np.testing.assert_allclose([float(s) for s in shown], expected, atol=0.00501)


def test_step_times_are_those_of_the_table(stated):
    for name, (milliseconds, _) in stated.items():
        row = re.search(rf"^\| {name}, [^|]+\| 256 \| 1 \| \d+ \| (\d+) \|", PAGE, re.MULTILINE)
        assert float(row[1]) == milliseconds


def test_models_have_the_stated_number_of_weights(stated):
    for name, (_, weights) in stated.items():
        assert models.build(keras, name.lower()).count_params() == weights


@pytest.mark.parametrize("clip, steps, sums", [(1.0, 1, 2), (1.0, 3, 2), (0.0, 1, 1)])
def test_a_step_sends_and_keeps_what_the_page_says(monkeypatch, clip, steps, sums):
    sent = []

    def record(tensors):
        sent.append(sum(int(np.prod(t.shape)) * t.dtype.size for t in tensors))
        return list(tensors)

    monkeypatch.setattr(strategies, "sum_over_replicas", record)
    keras.utils.set_random_seed(0)
    model = keras.Sequential([keras.Input((6,)), keras.layers.Dense(4), keras.layers.Dense(1)])
    optimizer = dice_tf.DiceSGDOptimizer(
        momentum=0.9, l2_norm_clip=1.0, error_norm_clip=clip, feedback_steps=steps,
        noise_multiplier=1.0, expected_batch_size=8,
    )  # fmt: skip
    model.compile(optimizer, "mse", run_eagerly=True)
    dice_tf.private_train_step(model, (np.ones((8, 6), np.float32), np.ones((8, 1), np.float32)))
    weights = model.count_params()
    assert sent == [4 * sums * weights + 8]
    held = lambda variables: sum(v.numpy().nbytes for v in variables)
    slots = [v for v in optimizer.variables if v.shape and "momentum" in v.path]
    assert held(model.trainable_variables) + held(slots) == 8 * weights
    assert held(optimizer.errors) == (4 * steps * weights if clip else 0)


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__]))
