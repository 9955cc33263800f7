# Copyright 2026 The dice_tf Authors.
# SPDX-License-Identifier: Apache-2.0
"""Trains until it is killed: runs that tests kill with SIGKILL and start again.

python tests/killed_run.py --rounds=20    # 20 runs killed at random steps, about a minute each

With `TF_CONFIG` a process is one of several workers (`killed_workers_test.py`).
"""

import argparse
import json
import os
import pathlib
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import warnings

EPOCHS = 6


def train(folder, save_errors):
    """Trains with a backup in `folder`; prints every step, and at last what came out."""
    sys.path.insert(0, str(pathlib.Path(__file__).parents[1]))
    import keras
    import numpy as np
    import tensorflow as tf

    import dice_tf

    warnings.simplefilter("ignore")
    several = bool(os.environ.get("TF_CONFIG"))
    strategy = (
        tf.distribute.MultiWorkerMirroredStrategy() if several else tf.distribute.get_strategy()
    )
    keras.utils.set_random_seed(3)
    data = np.random.default_rng(0)
    x, y = data.normal(size=(240, 6)).astype("float32"), data.integers(0, 4, 240)
    with strategy.scope():
        model = keras.Sequential([keras.Input((6,)), keras.layers.Dense(4)])
        optimizer = dice_tf.DiceAdamOptimizer(
            0.1,
            l2_norm_clip=0.5,
            noise_multiplier=1.0,
            expected_batch_size=12,
            save_errors=save_errors,
        )
        model.compile(optimizer, keras.losses.SparseCategoricalCrossentropy(from_logits=True))
        sampling = dice_tf.CyclicPoissonSampling(240, 12)
        batches = sampling.dataset(x, y, planned_epochs=EPOCHS)
    budget = dice_tf.EpsilonCallback(sampling, delta=1e-3)
    tell = keras.callbacks.LambdaCallback(
        on_train_batch_end=lambda batch, logs: print(optimizer.iterations.numpy(), flush=True)
    )
    backup = keras.callbacks.BackupAndRestore(
        folder, double_checkpoint=True, delete_checkpoint=False
    )
    # The backup comes last: what it restores must reach the budget all the same.
    callbacks = [budget, tell, backup]
    model.fit(batches, epochs=EPOCHS, verbose=0, callbacks=callbacks)
    result = {
        "weights": b"".join(v.numpy().tobytes() for v in model.weights).hex(),
        "steps": int(optimizer.iterations.numpy()),
        "epsilon": budget.epsilon(),
        "assignment": sampling.assignment,
        "draws": int(optimizer._private.noise_draws.numpy()),
    }
    print(json.dumps(result), flush=True)
    if several:
        os._exit(0)  # Without waiting for workers that may be gone.


def start(folder, save_errors, kill_at=None):
    """Runs `train` in a process; kills it at that step, or returns what it printed last."""
    command = [sys.executable, __file__, f"--folder={folder}"]
    return finish(command + (["--save_errors"] if save_errors else []), kill_at)


def finish(command, kill_at=None, **process_arguments):
    """Runs a command that prints its steps; kills it at one, or returns its last line, as JSON."""
    with tempfile.TemporaryFile("w+") as complaints:
        process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=complaints, text=True, **process_arguments
        )
        lines = []
        for line in process.stdout:
            lines.append(line)
            if kill_at is not None and line.strip().isdigit() and int(line) >= kill_at:
                process.send_signal(signal.SIGKILL)
        code = process.wait()
        complaints.seek(0)
        assert code == (0 if kill_at is None else -signal.SIGKILL), complaints.read()[-3000:]
    return json.loads(lines[-1]) if kill_at is None else None


def survive(folder, save_errors, seed):
    """Kills a run once or twice and starts it again; returns its end, and the steps.

    The first kill comes after the first backup. What is in `folder` then is copied to
    `<folder>.twin`, from which a run that is not killed can start.
    """
    steps = 20 * EPOCHS
    kills = sorted(random.Random(seed).sample(range(21, steps - 20), 1 + seed % 2))
    for number, step in enumerate(kills):
        start(folder, save_errors, kill_at=step)
        if number == 0:
            shutil.copytree(folder, f"{folder}.twin")
    return start(folder, save_errors), kills


if __name__ == "__main__":
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    parser = argparse.ArgumentParser()
    parser.add_argument("--folder")
    parser.add_argument("--save_errors", action="store_true")
    parser.add_argument("--rounds", type=int, default=0)
    arguments = parser.parse_args()
    if arguments.folder:
        train(arguments.folder, arguments.save_errors)
    for seed in range(arguments.rounds):
        with tempfile.TemporaryDirectory() as parent:
            end, kills = survive(f"{parent}/run", True, seed)
            twin = start(f"{parent}/run.twin", True)
            verdict = "the same" if end == twin else "NOT THE SAME"
            print(f"round {seed}: killed at {kills}, {end['steps']} steps, "
                  f"epsilon {end['epsilon']:.4f}, weights {verdict}", flush=True)  # fmt: skip
