# Copyright 2026 The dice_tf Authors.
# SPDX-License-Identifier: Apache-2.0
"""Loggers of experiments wrap `keras.Model.fit`, some before a private optimizer is made."""

import os
import pathlib
import subprocess
import sys

import pytest

PROGRAM = """
import keras, numpy as np

stock = keras.Model.fit
keras.Model.fit = lambda self, *args, **kwargs: stock(self, *args, **kwargs)

import dice_tf

model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
model.compile(dice_tf.DiceSGDOptimizer(
    l2_norm_clip=1.0, noise_multiplier=1.0, expected_batch_size=2), "mse")
x, y = np.ones((8, 3), "float32"), np.ones((8, 1), "float32")
sampling = dice_tf.CyclicPoissonSampling(8, 2)
model.fit(sampling.dataset(x, y), verbose=0)
print("STEPS", int(model.optimizer.iterations))

model.fit(sampling.dataset(x, y).take(1), verbose=0)
least = dice_tf.accounting.compute_epsilon(model.optimizer.mechanism, sampling, 5, 1e-3)
print("COUNTED", dice_tf.run_epsilon(model, sampling, 1e-3) >= least)
"""


EPOCHS = """
import keras, numpy as np
import dice_tf

def compiled():
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
    model.compile(dice_tf.DiceSGDOptimizer(
        l2_norm_clip=1.0, noise_multiplier=1.0, expected_batch_size=2), "mse")
    return model

if MADE_BEFORE:
    compiled()
stock = keras.Model.fit
keras.Model.fit = lambda self, *args, **kwargs: stock(self, *args, **kwargs)

x, y, model = np.ones((8, 3), "float32"), np.ones((8, 1), "float32"), compiled()
model.fit(x, y, batch_size=2, verbose=0)
try:
    print("EPSILON", dice_tf.run_epsilon(model, dice_tf.ShuffledEpochs(8, 2), 1e-3))
except dice_tf.errors.SamplingError as error:
    print("REFUSED", "wrapped it before the first private optimizer" in str(error))
"""


@pytest.mark.parametrize(("made_before", "found"), [(True, "EPSILON 8."), (False, "REFUSED True")])
def test_epochs_that_nobody_sees_under_a_wrapper_are_refused(made_before, found):
    assert run(f"MADE_BEFORE = {made_before}\n" + EPOCHS)[-1].startswith(found)


def test_steps_are_private_and_counted_under_a_wrapper_that_hides_arguments():
    assert run(PROGRAM)[-2:] == ["STEPS 4", "COUNTED True"]


def run(program):
    """Runs a program in a process of its own and returns the lines it prints."""
    root = str(pathlib.Path(__file__).absolute().parents[1])
    path = os.pathsep.join([root, os.environ.get("PYTHONPATH", "")])
    process = subprocess.run(
        [sys.executable, "-c", program],
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        check=False,
    )
    assert process.returncode == 0, process.stderr[-2000:]
    return process.stdout.splitlines()


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__]))
