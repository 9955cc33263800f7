# Copyright 2026 The dice_tf Authors.
# SPDX-License-Identifier: Apache-2.0
"""Two worker processes on loopback: one private run, or a refusal on both."""

import json

import keras
import numpy as np
import pytest
from softmax_regression import CLASSES
import worker_processes

from dice_tf.distribution import multi_worker

SCENARIO = ["worker_scenario.py"]
WORKERS = 2


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
    configurations = worker_processes.task_configurations(WORKERS)
    processes = [
        worker_processes.start(SCENARIO, configuration, folder)
        for configuration, folder in zip(configurations, folders, strict=True)
    ]
    return [result_of(process) for process in processes]


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """What it saw in a process without a cluster."""
    return result_of(worker_processes.start(SCENARIO, None, tmp_path_factory.mktemp("alone")))


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


def test_workers_draw_alike_after_a_run_that_was_prefetched_differently(seen):
    first, second = (result["second fit"] for result in seen)
    assert first == second and len(first) == 3


@pytest.mark.parametrize(
    "scenario, error, message",
    [
        ("other_noise", "DistributionError", "noise_multiplier"),
        ("other_size", "SamplingError", "num_examples"),
        ("other_seed", "SamplingError", "(secret)"),
        ("other_draws", "DistributionError", "sampler='(secret)'"),
        ("backup_in_scope", "DistributionError", "call `fit` outside"),
        ("arrays", "SamplingError", "ShuffledEpochs"),
        ("loop_before_comparison", "DistributionError", "check_gradients"),
    ],
)
def test_workers_that_differ_are_refused_before_the_first_step(seen, scenario, error, message):
    for result in seen:
        assert result[scenario].get("error") == error, result[scenario]
        assert message in result[scenario]["message"]


def test_keras_is_repaired_only_where_that_was_tested(monkeypatch):
    versions = {"3.11.9": False, "3.12.0": True, "3.15.1": True, "3.16.0": False}
    for version, expected in versions.items():
        monkeypatch.setattr(keras, "version", lambda version=version: version)
        assert multi_worker.is_repaired() == expected


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__]))
