# Copyright 2026 The dice_tf Authors.
# SPDX-License-Identifier: Apache-2.0
"""How long a million normal draws take: dice_tf's, and TensorFlow's own.

Both are stateless. `dice_tf.mechanism.noise.gaussian_noise` compiles its draws with XLA whether or
not the model is compiled; `tf.random.stateless_normal` is a kernel of TensorFlow's, and
slower with XLA. Functions take turns, and the median over rounds is reported.

    python benchmarks/noise.py
    python benchmarks/noise.py --draws=100000
"""

import functools
import os
import statistics
import time

from absl import app, flags
import tensorflow as tf

from dice_tf.mechanism.noise import gaussian_noise


def _gaussian_noise(seed, shape):
    return gaussian_noise(seed, 0, {0: shape}, 1.0)[0]


def _stateless_normal(seed, shape):
    return tf.random.stateless_normal(shape, seed, alg="philox")


_FUNCTIONS = {
    "dice_tf.mechanism.noise.gaussian_noise": _gaussian_noise,
    "tf.random.stateless_normal": _stateless_normal,
}


def measure(draws, rounds):
    """Times every way of drawing.

    Args:
        draws: Int, size of one draw.
        rounds: Int.

    Returns:
        Dict from a label to milliseconds per million draws: on the wall, and of all cores.
    """
    compiled = {}
    for label, function in _FUNCTIONS.items():
        draw = functools.partial(function, shape=(draws,))
        compiled[label] = tf.function(draw)
        compiled[f"{label}, XLA"] = tf.function(draw, jit_compile=True)
    times = {label: [] for label in compiled}
    for i in range(rounds + 1):
        for label, function in compiled.items():
            seed = tf.constant([i, 1], tf.int32)
            start = time.perf_counter(), time.process_time()
            function(seed).numpy()
            end = time.perf_counter(), time.process_time()
            taken = [1e3 * (b - a) / (draws / 1e6) for a, b in zip(start, end, strict=True)]
            times[label].append(taken)
    # The first round traces and compiles.
    medians = lambda taken: tuple(map(statistics.median, zip(*taken[1:], strict=True)))
    return {label: medians(taken) for label, taken in times.items()}


def run(flag_values):
    """Measures and prints a table.

    Args:
        flag_values: Parsed flags, see `define_flags`.

    Returns:
        What `measure` returns.
    """
    devices = [device.name for device in tf.config.list_logical_devices()]
    load = os.getloadavg()[0]
    print(f"TensorFlow {tf.__version__}, {', '.join(devices)}, load {load:.1f}")
    times = measure(flag_values.draws, flag_values.rounds)
    print(f"\n| draws of {flag_values.draws:,} | ms per million | processor ms |\n|---|---|---|")
    for label, (wall, processor) in times.items():
        print(f"| {label} | {wall:.2f} | {processor:.2f} |")
    return times


def define_flags(flag_values):
    """Defines the flags of this script.

    Args:
        flag_values: `absl.flags.FlagValues` to define them in.
    """
    options = {"flag_values": flag_values}
    flags.DEFINE_integer("draws", 1_000_000, "Size of one draw.", lower_bound=1, **options)
    flags.DEFINE_integer("rounds", 31, "Rounds.", lower_bound=1, **options)


def main(argv):
    """Runs the script with the flags of the command line."""
    del argv
    run(flags.FLAGS)


if __name__ == "__main__":
    define_flags(flags.FLAGS)
    app.run(main)
