# Copyright 2026 The dice_tf Authors.
# SPDX-License-Identifier: Apache-2.0
"""Products that are rounded are refused, on processors too (on GPUs: distribution_test)."""

import os
import subprocess
import sys

import keras
import numpy as np
import pytest
import tensorflow as tf

from dice_tf.checks import precision
from dice_tf.errors import GradientEngineError
from dice_tf.training.optimizers import DiceSGDOptimizer

# Measures a product on its own terms, then trains a step.
SCRIPT = """
import keras, numpy as np, tensorflow as tf, dice_tf
from dice_tf.errors import GradientEngineError
rng = np.random.default_rng(0)
a, b = rng.normal(size=(2, 3, 32, 32)).astype("float32")
exact = a.astype("float64") @ b.astype("float64")
print("error", np.abs(tf.matmul(a, b).numpy() - exact).max())
model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
model.compile(dice_tf.DiceSGDOptimizer(
    l2_norm_clip=1.0, noise_multiplier=1.0, expected_batch_size=8), "mse")
try:
    model.fit(np.ones((8, 4)), np.ones((8, 1)), batch_size=8, verbose=0)
    print("trained")
except GradientEngineError as error:
    print("refused", error)
"""


def train(**arguments):
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
    optimizer = DiceSGDOptimizer(l2_norm_clip=1.0, noise_multiplier=1.0, expected_batch_size=8)
    model.compile(optimizer, "mse")
    model.fit(np.ones((8, 4)), np.ones((8, 1)), batch_size=8, verbose=0, **arguments)


@pytest.mark.parametrize("mode", [None, "BF16"])
@pytest.mark.parametrize("variable", ["TF_SET_ONEDNN_FPMATH_MODE", "ONEDNN_DEFAULT_FPMATH_MODE"])
def test_a_processor_that_rounds_is_refused_and_another_is_not(variable, mode):
    # Whether it does with the mode depends on its instructions, so the error is measured.
    environment = {**os.environ, **({variable: mode} if mode else {})}
    run = subprocess.run(
        [sys.executable, "-c", SCRIPT], env=environment, capture_output=True, text=True, check=True
    )
    (error,) = (float(line[6:]) for line in run.stdout.splitlines() if line.startswith("error"))
    rounds = error > 1e-3
    assert error < 1e-4 or rounds
    if rounds:
        assert mode and "refused" in run.stdout and f"{{'{variable}': 'BF16'}}" in run.stdout
    else:
        assert "trained" in run.stdout


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_rounded_products_are_found(monkeypatch, dtype):
    matmul = tf.linalg.matmul
    rounded = lambda t: tf.cast(tf.cast(t, dtype), tf.float32)
    monkeypatch.setattr(tf.linalg, "matmul", lambda a, b: matmul(rounded(a), rounded(b)))
    assert precision._host_rounds_products.__wrapped__() == (dtype != "float32")


def test_products_are_measured_where_a_step_is_traced(monkeypatch):
    monkeypatch.setattr(precision, "_host_rounds_products", lambda: True)
    with pytest.raises(GradientEngineError, match="half precision.*environment variables"):
        train()


@pytest.mark.parametrize("option", ["auto_mixed_precision_onednn_bfloat16", "auto_mixed_precision"])
def test_a_rewrite_to_half_precision_is_refused(option):
    train()
    tf.config.optimizer.set_experimental_options({option: True})
    try:
        with pytest.raises(GradientEngineError, match=rf"options \['{option}.*mixed_bfloat16"):
            train()
    finally:
        tf.config.optimizer.set_experimental_options({option: False})
    train()


def test_a_rewrite_that_begins_between_steps_is_refused():
    option = "auto_mixed_precision_onednn_bfloat16"
    switch = lambda on: tf.config.optimizer.set_experimental_options({option: on})
    begin = keras.callbacks.LambdaCallback(on_epoch_begin=lambda epoch, logs: switch(epoch > 0))
    try:
        with pytest.raises(GradientEngineError, match="rewrite float32"):
            train(epochs=2, callbacks=[begin])
    finally:
        switch(False)


@pytest.mark.parametrize(
    "flags, refused",
    [
        ("", False),
        ("--xla_cpu_enable_fast_math=true", False),
        ("--xla_cpu_enable_fast_math=true --xla_cpu_fast_math_honor_nans=false", True),
        ("--xla_cpu_fast_math_honor_infs=FALSE", True),
        ("--xla_cpu_fast_math_honor_nans=true", False),
    ],
)
def test_xla_without_nan_and_inf_is_refused(monkeypatch, flags, refused):
    monkeypatch.setenv("XLA_FLAGS", flags)
    if not refused:
        return precision.check_float32_products()
    with pytest.raises(GradientEngineError, match="XLA_FLAGS with .*honor_"):
        precision.check_float32_products()


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__]))
