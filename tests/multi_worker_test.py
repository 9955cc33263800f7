# Copyright 2026 The dice_tf Authors.
# SPDX-License-Identifier: Apache-2.0
"""Two worker processes on loopback: one private run, or a refusal on both."""

import json
import os
import pathlib
import socket
import subprocess
import sys

import keras
import numpy as np
import pytest
from softmax_regression import CLASSES

from dice_tf import multi_worker

TESTS = pathlib.Path(__file__).parent
WORKERS = 2


def free_ports(count):
    sockets = [socket.socket() for _ in range(count)]
    for s in sockets:
        s.bind(("127.0.0.1", 0))
    ports = [s.getsockname()[1] for s in sockets]
    for s in sockets:
        s.close()
    return ports


def start(config, folder):
    path = os.pathsep.join([str(TESTS.parent), os.environ.get("PYTHONPATH", "")])
    environment = {
        **os.environ,
        "PYTHONPATH": path,
        "CUDA_VISIBLE_DEVICES": "-1",
        "TF_CPP_MIN_LOG_LEVEL": "2",
        "TMPDIR": str(folder),
        "PYTHONDONTWRITEBYTECODE": "1",
    }
    environment.pop("TF_CONFIG", None)
    if config is not None:
        environment["TF_CONFIG"] = json.dumps(config)
    return subprocess.Popen(
        [sys.executable, str(TESTS / "worker_scenario.py")],
        env=environment,
        cwd=folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )


def result_of(process):
    try:
        output = process.communicate(timeout=600)[0].decode(errors="replace")
    finally:
        process.kill()
    lines = [line for line in output.splitlines() if line.startswith("RESULT ")]
    assert lines, output[-3000:]
    return json.loads(lines[-1].removeprefix("RESULT "))


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    return [tmp_path_factory.mktemp(f"worker_{i}") for i in range(WORKERS)]


@pytest.fixture(scope="module")
def seen(folders):
    """What `worker_scenario.py` saw, on each of the workers."""
    addresses = [f"127.0.0.1:{port}" for port in free_ports(WORKERS)]
    cluster = {"worker": addresses}
    processes = [
        start({"cluster": cluster, "task": {"type": "worker", "index": i}}, folder)
        for i, folder in enumerate(folders)
    ]
    return [result_of(process) for process in processes]


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """What it saw in a process without a cluster."""
    return result_of(start(None, tmp_path_factory.mktemp("alone")))


def test_two_workers_take_the_steps_of_one_process(seen, alone):
    assert [result["replicas"] for result in seen] == [2, 2]
    for result in seen:
        np.testing.assert_allclose(
            result["noiseless"]["weights"], alone["noiseless"]["weights"], atol=1e-6, rtol=1e-6
        )


@pytest.mark.parametrize("scenario", ["noisy", "noisy, several steps"])
def test_workers_hold_the_same_state_after_noisy_steps(seen, scenario):
    first, second = (result[scenario] for result in seen)
    # Draws, noise, weights, errors, metrics and epsilon: nothing differs by a bit.
    assert first == second
    assert first["iterations"] == 8
    assert np.isfinite(first["weights"]).all()
    assert {"loss", "epsilon", "val_loss"} <= set(first["history"])


def test_each_run_has_a_noise_key_of_its_own(seen):
    assert seen[0]["noisy"]["key"] != seen[0]["noisy, several steps"]["key"]


def test_the_noise_key_is_in_no_file(seen, folders):
    noisy = seen[0]["noisy"]
    files = [path for folder in folders for path in folder.rglob("*") if path.is_file()]
    held = lambda needle: [path.name for path in files if needle.tobytes() in path.read_bytes()]
    # The weights, to see that a needle would be found.
    bias = np.asarray(noisy["weights"][-CLASSES:], np.float32)
    assert {"model.keras", "checkpoint-1.data-00000-of-00001"} <= set(held(bias))
    assert held(np.asarray(noisy["key"], np.int32)) == []


@pytest.mark.parametrize("kind", ["PoissonSampling", "CyclicPoissonSampling", "ShuffledEpochs"])
def test_workers_share_out_every_draw(seen, kind):
    first, second = (result[f"shards {kind}"] for result in seen)
    assert len(first) == len(second)
    drawn = [a + b for a, b in zip(first, second)]
    assert all(len(rows) == len(set(rows)) for rows in drawn)
    if kind == "ShuffledEpochs":
        assert sorted(row for rows in drawn for row in rows) == list(range(40))
    else:
        # Unseeded draws that were not shared would meet in some row.
        assert sum(len(rows) for rows in drawn) > 15


@pytest.mark.parametrize(
    "scenario, error, message",
    [
        ("other_noise", "DistributionError", "noise_multiplier"),
        ("other_size", "SamplingError", "num_examples"),
        ("other_seed", "SamplingError", "(secret)"),
        ("arrays", "SamplingError", "ShuffledEpochs"),
        ("loop_before_comparison", "DistributionError", "check_gradients"),
    ],
)
def test_workers_that_differ_are_refused_before_the_first_step(seen, scenario, error, message):
    for result in seen:
        assert result[scenario].get("error") == error, result[scenario]
        assert message in result[scenario]["message"]


def test_keras_is_repaired_only_where_that_was_tested(monkeypatch):
    for version, expected in (("3.14.9", False), ("3.15.0", True), ("3.16.0", False)):
        monkeypatch.setattr(keras, "version", lambda version=version: version)
        assert multi_worker.is_repaired() == expected


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__]))
