# Copyright 2026 The dice_tf Authors.
# SPDX-License-Identifier: Apache-2.0
"""The benchmarks of replicas and GPUs run, and calculate right. Nothing here judges a time."""

import math
import os
import pathlib
import re
import sys
import types

from absl import flags
import keras
import numpy as np
import pytest

ROOT = pathlib.Path(__file__).absolute().parents[1]
sys.path.insert(0, str(ROOT / "benchmarks"))

import gpu
import models
import protocol
import replicas


def parse(module, *arguments):
    values = flags.FlagValues()
    module.define_flags(values)
    values(["benchmark", *arguments])
    return values


@pytest.mark.parametrize("workers", [1, 2, 4, 1000])
def test_ring_is_the_sum_over_its_messages(workers):
    """A ring passes every W-th part on W - 1 times to add it up, and W - 1 times to share it."""
    latency, bandwidth, floats = 0.5, 2000.0, 8000
    messages = [4 * floats / workers] * 2 * (workers - 1)
    expected = math.fsum(latency + size / bandwidth for size in messages)
    assert replicas.ring_milliseconds(workers, floats, latency, bandwidth) == pytest.approx(
        expected
    )
    # All workers together send W times 2 (W - 1) / W of the vector, as docs/scaling.md says.
    assert workers * sum(messages) == pytest.approx(2 * (workers - 1) * 4 * floats)


@pytest.mark.parametrize("latency, bandwidth", [(0.25, 1e6), (3.0, 2e4)])
def test_network_is_found_again_from_the_rows_of_two_workers(latency, bandwidth):
    measured = {
        (2, floats): replicas.ring_milliseconds(2, floats, latency, bandwidth)
        for floats in replicas.FLOATS
    }
    assert replicas.fit_network(measured) == pytest.approx((latency, bandwidth))


def test_sums_over_local_processes_are_timed():
    milliseconds = replicas.exchange(workers=2, floats=8, rounds=1)
    assert math.isfinite(milliseconds) and milliseconds > 0


def test_private_and_plain_steps_take_turns_on_replicas(monkeypatch):
    # The measurement is a process of its own, for which `dice_tf` need not be installed here.
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(ROOT), *sys.path]))
    cell = dict(model="cnn", batch=8, optimizer="sgd", engine="layerwise", method="DiceSGD",
                chunk_size=None, replicas=2, rounds=1, seconds=0.0)  # fmt: skip
    for _ in range(replicas._ATTEMPTS):
        result = protocol.measure("replica_cell.py", cell)
        if "failed" not in result:
            break
    assert "failed" not in result, result["failed"]
    assert result["ratio"] == pytest.approx(result["private_ms"] / result["plain_ms"])
    assert result["lowest_ratio"] <= result["ratio"] <= result["highest_ratio"]


def test_tables_show_what_was_measured(monkeypatch, capsys):
    seen = []

    def measure(script, specification):
        seen.append((specification["model"], specification["replicas"]))
        if len(seen) == 1:
            return {"failed": "a crash of TensorFlow"}  # It is tried again.
        return dict(plain_ms=2.0, private_ms=3.0, ratio=1.5, lowest_ratio=1.2, highest_ratio=1.9)

    exchange = lambda workers, floats, rounds: replicas.ring_milliseconds(workers, floats, 0.5, 1e5)
    monkeypatch.setattr(protocol, "measure", measure)
    monkeypatch.setattr(replicas, "exchange", exchange)
    replicas.run(parse(replicas, "--rounds=1"))
    printed = capsys.readouterr().out
    assert seen[0] == seen[1]
    assert seen[1:] == [(model, count) for model in ("cnn", "mlp") for count in (1, 2, 4)]
    assert "| cnn | 256 | 4 | 2.0 | 3.0 | 1.50 | 1.20 to 1.90 |" in printed
    rows = re.findall(r"^\| \d+ \| (\d) \| ([\d.]+) \| ([\d.]+) \|$", printed, re.MULTILINE)
    assert len(rows) == len(replicas.WORKERS) * len(replicas.FLOATS)
    # A network that is a ring is predicted exactly.
    assert all(measured == predicted for _, measured, predicted in rows)
    assert "0.50 ms per message, 0.10 GB/s" in printed


@pytest.fixture
def tiny(monkeypatch):
    """A model that takes no time in the place of the CNN."""
    monkeypatch.setitem(protocol.INPUT_SHAPES, "cnn", (8,))
    monkeypatch.setitem(models._BODIES, "cnn", lambda keras, x: keras.layers.Dense(10)(x))
    monkeypatch.setattr(protocol, "_EXAMPLES", 256)


@pytest.mark.filterwarnings("ignore:noise_multiplier=0")
def test_gpu_script_checks_and_times_the_devices_it_is_given(tiny, capsys):
    gpu.run(parse(gpu, "--devices=CPU:0", "--models=cnn", "--rounds=1", "--batch=128"))
    printed = capsys.readouterr().out
    assert re.search(r"noiseless steps against the CPU: [\d.e+-]+ \(must be below 2e-05\)", printed)
    assert "all replicas hold the same bits: True" in printed
    assert re.search(r"^\| cnn \| 128 \| [\d.]+ \| [\d.]+ \| [\d.]+ \| ", printed, re.MULTILINE)


@pytest.mark.parametrize("difference, agree", [(1e-3, True), (1e-7, False), (math.nan, True)])
def test_gpu_script_fails_where_training_is_not_right(monkeypatch, difference, agree):
    monkeypatch.setattr(gpu, "largest_difference", lambda strategy: difference)
    monkeypatch.setattr(gpu, "replicas_agree", lambda strategy: agree)
    with pytest.raises(SystemExit, match="FAILED"):
        gpu.run(parse(gpu, "--devices=CPU:0", "--models="))


def test_gpu_script_says_that_there_is_no_gpu(monkeypatch):
    monkeypatch.setattr(gpu.tf.config, "list_logical_devices", lambda kind: [])
    with pytest.raises(SystemExit, match="no GPU"):
        gpu.run(parse(gpu))


def variable(*copies):
    copies = [keras.Variable(np.asarray(copy, np.float32)) for copy in copies]
    mirrored = types.SimpleNamespace(values=[copy.value for copy in copies])
    return types.SimpleNamespace(value=mirrored, numpy=copies[0].numpy)


def test_differences_are_relative_to_the_largest_value_of_each_variable(monkeypatch):
    cpu = [variable([1.0, -4.0]), variable([0.0, 0.5])]
    states = iter([
        cpu, [variable([1.5, -4.0]), variable([0.0, 0.625])],
        cpu, [variable([1.5, -4.0]), variable([0.0, math.nan])],
    ])  # fmt: skip
    monkeypatch.setattr(gpu, "train", lambda strategy, noise_multiplier: None)
    monkeypatch.setattr(gpu, "state", lambda model: next(states))
    assert gpu.largest_difference(None) == pytest.approx(0.25)  # Not 0.5 / 4.
    assert math.isnan(gpu.largest_difference(None))


@pytest.mark.parametrize("second, agree", [([1.0, 2.0], True), ([1.0, 2.0000002], False)])
def test_replicas_are_compared_bit_by_bit(monkeypatch, second, agree):
    monkeypatch.setattr(gpu, "train", lambda strategy, noise_multiplier: None)
    monkeypatch.setattr(gpu, "state", lambda model: [variable([1.0, 2.0], second)])
    assert gpu.replicas_agree(None) is agree


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__]))
