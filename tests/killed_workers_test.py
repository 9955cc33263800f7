# Copyright 2026 The dice_tf Authors.
# SPDX-License-Identifier: Apache-2.0
"""A worker dies by SIGKILL: the job is started again and ends as if nothing had happened."""

import json
import math
import pathlib
import shutil
import signal
import sys

import dp_accounting
from dp_accounting import rdp
import keras
import numpy as np
import pytest
import tensorflow as tf

sys.path.insert(0, str(pathlib.Path(__file__).parent))

import worker_processes

from dice_tf.distribution import multi_worker, shared_backups
from dice_tf.training import keras_trainer

WORKERS, STEPS_PER_EPOCH = 2, 20


def run_job(folders, kill=None):
    """Runs `killed_run.py` on all workers, as a launcher would, until all have ended.

    Args:
        folders: One folder for each worker, its disk.
        kill: Pair of a worker's index and the step at which it is killed, or `None`.

    Returns:
        List of pairs of exit status and output, one for each worker.
    """
    arguments = ["killed_run.py", "--folder=backup", "--save_errors"]
    processes = [
        worker_processes.start(arguments, configuration, folder, text=True)
        for configuration, folder in zip(worker_processes.task_configurations(WORKERS), folders)
    ]
    printed = [""] * WORKERS
    try:
        if kill is not None:
            victim, step = kill
            for line in processes[victim].stdout:
                printed[victim] += line
                if line.strip() == str(step):
                    processes[victim].send_signal(signal.SIGKILL)
        for i, process in enumerate(processes):
            printed[i] += process.communicate(timeout=300)[0]
    finally:
        for process in processes:
            process.kill()
    return [(process.returncode, text) for process, text in zip(processes, printed)]


def results(job):
    assert [status for status, _ in job] == [0] * WORKERS, job
    return [json.loads(text.splitlines()[-1]) for _, text in job]


def test_a_job_that_lost_a_worker_ends_like_one_that_did_not(tmp_path):
    folders, twins = (
        [tmp_path / name / str(i) for i in range(WORKERS)] for name in ("run", "twin")
    )
    for folder in folders:
        folder.mkdir(parents=True)
    # The second epoch: there is a backup of the first.
    killed = run_job(folders, kill=(1, STEPS_PER_EPOCH + 13))
    assert killed[1][0] == -signal.SIGKILL
    # The survivor cannot go on without its peer, and does not: no step lacks a shard.
    assert killed[0][0] not in (0, -signal.SIGKILL)
    assert "Collective ops is aborted" in killed[0][1]
    assert str(STEPS_PER_EPOCH + 20) not in killed[0][1].split()
    # The disk of the first worker has the backup, and it is enough.
    assert [(folder / "backup").exists() for folder in folders] == [True, False]
    shutil.copytree(tmp_path / "run", tmp_path / "twin")

    resumed = run_job(folders)
    first_step = next(line for line in resumed[1][1].splitlines() if line.isdigit())
    assert int(first_step) == STEPS_PER_EPOCH + 1
    # From the same backup, another job that nobody kills: the key and the draws are secret,
    # and only the backup holds them.
    undisturbed = results(run_job(twins))
    assert results(resumed) == undisturbed and undisturbed[0] == undisturbed[1]

    result = undisturbed[0]
    assert result["steps"] == result["draws"] == 6 * STEPS_PER_EPOCH
    # Two groups of 240 examples take turns, each with probability 2 * 12 / 240.
    gaussian = dp_accounting.GaussianDpEvent(1.0 / math.sqrt(2))
    accountant = rdp.RdpAccountant(
        np.concatenate([1 + np.arange(1, 100) / 10, np.arange(11, 64)])
    ).compose(dp_accounting.PoissonSampledDpEvent(0.1, gaussian), 3 * STEPS_PER_EPOCH)
    assert result["epsilon"] == pytest.approx(accountant.get_epsilon(1e-3), rel=1e-9)


class Resolver:
    def __init__(self, task_type, task_id, jobs=("worker",)):
        self.task_type, self.task_id = task_type, task_id
        self.jobs = {job: [f"127.0.0.1:{i}" for i in range(2)] for job in jobs}

    def cluster_spec(self):
        return tf.train.ClusterSpec(self.jobs)


@pytest.mark.parametrize(
    "resolver, first",
    [
        (Resolver("worker", 0), True),
        (Resolver("worker", 1), False),
        (Resolver("chief", 0, ("chief", "worker")), True),
        (Resolver("worker", 0, ("chief", "worker")), False),
    ],
)
@pytest.mark.parametrize("listed", [False, True])
def test_only_the_first_worker_has_the_backup(monkeypatch, tmp_path, resolver, first, listed):
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    before, after = keras.callbacks.Callback(), keras.callbacks.Callback()
    backup = keras.callbacks.BackupAndRestore(tmp_path)
    given = [before, [backup, after]]
    if listed:
        given = keras.callbacks.CallbackList(given, model=model)
    callbacks = keras_trainer._listed(given)
    assert callbacks == [before, backup, after]
    assert shared_backups.share_backups(model, callbacks) is callbacks
    monkeypatch.setattr(multi_worker, "has_several_workers", lambda strategy: True)
    strategy = type("Strategy", (), {"cluster_resolver": resolver})()
    monkeypatch.setattr(keras.Model, "distribute_strategy", strategy)
    assert shared_backups.share_backups(model, keras_trainer._listed(before)) == [before]
    assert shared_backups.share_backups(model, keras_trainer._listed(None)) == []
    shared = shared_backups.share_backups(model, callbacks)
    shared = keras_trainer._as_given(model, given, shared)
    assert (shared is given) == listed
    *others, takes_over, last = shared.callbacks if listed else shared
    assert others == ([before, backup] if first else [before]) and last is after
    assert isinstance(takes_over, shared_backups._TakeOverFromFirstWorker)
    if listed:
        assert takes_over.model is model


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__]))
