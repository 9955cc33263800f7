# Copyright 2026 The dice_tf Authors.
# SPDX-License-Identifier: Apache-2.0
"""Is private training right on the GPUs of this machine, and what does it cost there?

First the same noiseless steps on the CPU and on all GPUs, whose weights and errors must
agree; then noisy steps, after which all GPUs must hold the same bits. Then step times of
DiceSGD over Keras SGD under the same strategy, in turns in one process.

    python benchmarks/gpu.py
    python benchmarks/gpu.py --models=cnn,transformer --batch=1024
    python benchmarks/gpu.py --devices=CPU:0 --rounds=1        to see the script work

docs/gpu.md says how to read what it prints. It exits with 1 if a check fails.
"""

import sys

from absl import app, flags
import cell
import keras
import numpy as np
import protocol
import tensorflow as tf

import dice_tf

STEPS, BATCH = 3, 64
# Sums in another order, over three steps: far below TF32, whose error is 1e-3.
TOLERANCE = 2e-5


def train(strategy, noise_multiplier):
    """Takes a few steps with the CNN.

    Args:
        strategy: The `tf.distribute.Strategy`.
        noise_multiplier: Float.

    Returns:
        The trained model.
    """
    x, y = protocol.make_examples("cnn", BATCH)
    keras.utils.set_random_seed(0)
    with strategy.scope():
        model = cell.models.build(keras, "cnn")
        optimizer = dice_tf.DiceSGDOptimizer(
            0.1, l2_norm_clip=0.5, noise_multiplier=noise_multiplier, expected_batch_size=BATCH
        )
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(optimizer, loss, jit_compile=False)
    model.fit(x[: STEPS * BATCH], y[: STEPS * BATCH], batch_size=BATCH, shuffle=False, verbose=0)
    return model


def state(model):
    """Returns what a step leaves behind: weights and errors."""
    return [*model.trainable_variables, *model.optimizer.errors]


def largest_difference(strategy):
    """Returns how far noiseless steps differ from the CPU's, relative to the largest value."""
    with tf.device("CPU:0"):
        expected = [v.numpy() for v in state(train(tf.distribute.OneDeviceStrategy("CPU:0"), 0.0))]
    found = [v.numpy() for v in state(train(strategy, 0.0))]
    pairs = zip(found, expected, strict=True)
    # NumPy's maximum keeps NaN.
    return float(np.max([np.abs(f - e).max() / np.abs(e).max() for f, e in pairs]))


def replicas_agree(strategy):
    """Whether all replicas hold the same bits after noisy steps."""
    for variable in state(train(strategy, 1.0)):
        first, *others = (copy.numpy() for copy in getattr(variable.value, "values", [variable]))
        if not all(np.array_equal(first, other) for other in others):
            return False
    return True


def run(values):
    """Runs the checks and the timings.

    Args:
        values: Parsed flags.
    """
    devices = values.devices or [d.name for d in tf.config.list_logical_devices("GPU")]
    if not devices:
        sys.exit("There is no GPU here that TensorFlow can use, so there is nothing to measure.")
    for device in tf.config.list_physical_devices("GPU"):
        print(tf.config.experimental.get_device_details(device).get("device_name", device.name))
    print(f"TensorFlow {tf.__version__}, Keras {keras.version()}, devices: {', '.join(devices)}")
    strategy = tf.distribute.MirroredStrategy(devices)

    difference, agree = largest_difference(strategy), replicas_agree(strategy)
    print(f"noiseless steps against the CPU: {difference:.1e} (must be below {TOLERANCE:.0e})")
    print(f"all replicas hold the same bits: {agree}\n")
    print("| model | batch | SGD, ms | DiceSGD, ms | ratio | range |")
    print("| --- | --- | --- | --- | --- | --- |")
    for model in values.models:
        specification = dict(
            model=model, batch=values.batch, optimizer="sgd", engine="layerwise", method="DiceSGD",
            chunk_size=None, rounds=values.rounds, seconds=1.0,
        )  # fmt: skip
        with strategy.scope():
            r = cell.measure_ratio(specification)
        print(
            f"| {model} | {values.batch} | {r['plain_ms']:.2f} | {r['private_ms']:.2f} | "
            f"{r['ratio']:.2f} | {r['lowest_ratio']:.2f} to {r['highest_ratio']:.2f} |",
            flush=True,
        )
    if not difference <= TOLERANCE or not agree:  # NaN is not right either.
        sys.exit("FAILED: private training is not right on these devices; do not use it there.")


def define_flags(flag_values):
    """Defines the flags of this script."""
    options = {"flag_values": flag_values}
    models = ["cnn", "mlp", "transformer"]
    flags.DEFINE_list("models", models, "Models of models.py.", **options)
    flags.DEFINE_list("devices", [], "Devices; by default all GPUs.", **options)
    for name, default, text in (
        ("batch", 256, "Batch size over all devices."),
        ("rounds", 5, "Turns of the private and the plain model."),
    ):
        flags.DEFINE_integer(name, default, text, lower_bound=1, **options)


def main(argv):
    """Runs the script with the flags of the command line."""
    del argv
    run(flags.FLAGS)


if __name__ == "__main__":
    define_flags(flags.FLAGS)
    app.run(main)
