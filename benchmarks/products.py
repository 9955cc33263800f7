# Copyright 2026 The dice_tf Authors.
# SPDX-License-Identifier: Apache-2.0
"""What the gradients of a convolution's kernel cost: their sum, and one per example.

The convolutions are those of the benchmark's CNN, and a depthwise one for every kernel size. For
scale, a product of two matrices and the sum of two arrays tell what the processor can do. All on
one thread, by processor time, in turns; the smallest of the rounds is reported.

    python benchmarks/products.py
    python benchmarks/products.py --examples=64 --rounds=9
"""

import math
import time

from absl import app, flags
import keras
import tensorflow as tf

from dice_tf.engine import rules_conv
from dice_tf.engine.merging import merged
from dice_tf.engine.recording import LayerCall

_SIDE, _ENTRIES = 2048, 2**25
_MAPS = 8
_CONVOLUTIONS = {
    "first of the CNN, 8 x 8 x 1 to 16": (lambda k: k.Conv2D(16, 8, 2, "same"), (28, 28, 1)),
    "second of the CNN, 4 x 4 x 16 to 32": (lambda k: k.Conv2D(32, 4, 2), (13, 13, 16)),
    "depthwise, 3 x 3": (lambda k: k.DepthwiseConv2D(3, padding="same"), (_MAPS, _MAPS, 128)),
    "depthwise, 5 x 5": (lambda k: k.DepthwiseConv2D(5, padding="same"), (_MAPS, _MAPS, 128)),
    "depthwise, 7 x 7": (lambda k: k.DepthwiseConv2D(7, padding="same"), (_MAPS, _MAPS, 128)),
}  # fmt: skip


def _of_convolution(make, shape, examples):
    """Returns functions of the summed gradient, and of norms and two weighted sums of each."""
    layer = make(keras.layers)
    layer.build((None, *shape))
    kernel = getattr(layer, "_kernel", layer.kernel)
    inputs = tf.random.normal([examples, *shape])
    outputs = layer(inputs)
    cotangents, weights = tf.random.normal(tf.shape(outputs)), tf.random.uniform([2, examples])
    rule = rules_conv.depthwise if hasattr(layer, "depth_multiplier") else rules_conv.convolution

    def summed(inputs, cotangents, weights):
        # TensorFlow leaves the outputs out, which nothing depends on.
        with tf.GradientTape() as tape:
            outputs = layer(inputs)
        return tape.gradient(outputs, kernel.value, output_gradients=cotangents)

    def each(inputs, cotangents, weights):
        call = LayerCall(layer, (inputs,), {}, [], cotangents=cotangents)
        contribution = next(c for variable, c in rule(layer, call) if variable is kernel)
        squares, parts = merged([contribution], examples)
        sums = [part.weighted_sums(tf.unstack(weights * squares)) for part in parts]
        return tf.stack([tf.reshape(s, [-1]) for of_part in sums for s in of_part])

    return (inputs, cotangents, weights), {"summed": summed, "each": each}


def measure(examples, rounds):
    """Times all of them.

    Args:
        examples: Int.
        rounds: Int.

    Returns:
        Pair: floats, the processor's GFLOP/s and GB/s; and a dict from a convolution to the
        milliseconds of its summed gradient and of norms and weighted sums per example.
    """
    matrix, array = tf.random.normal([_SIDE, _SIDE]), tf.random.normal([_ENTRIES])
    jobs = {
        "product": (lambda a: tf.matmul(a, a), (matrix,)),
        "addition": (lambda a, b: a + b, (array, tf.ones_like(array))),
    }
    for name, (make, shape) in _CONVOLUTIONS.items():
        arguments, functions = _of_convolution(make, shape, examples)
        jobs.update({(name, kind): (f, arguments) for kind, f in functions.items()})
    # One number of the result, so that nothing else is copied, and nothing is left out.
    first = lambda f: tf.function(lambda *a: tf.reshape(f(*a), [-1])[0], autograph=False)
    jobs = {key: (first(f), arguments) for key, (f, arguments) in jobs.items()}
    best = dict.fromkeys(jobs, math.inf)
    for i in range(rounds + 1):
        for key, (f, arguments) in jobs.items():
            start = time.process_time()
            f(*arguments).numpy()
            taken = time.process_time() - start
            # The first round traces.
            best[key] = min(best[key], taken) if i else math.inf
    speeds = 2 * _SIDE**3 / best["product"] / 1e9, 12 * _ENTRIES / best["addition"] / 1e9
    times = lambda name: (1e3 * best[name, "summed"], 1e3 * best[name, "each"])
    return speeds, {name: times(name) for name in _CONVOLUTIONS}


def run(flag_values):
    """Measures and prints a table.

    Args:
        flag_values: Parsed flags, see `define_flags`.

    Returns:
        What `measure` returns.
    """
    (flops, bandwidth), times = measure(flag_values.examples, flag_values.rounds)
    print(f"TensorFlow {tf.__version__}, one thread: {flops:.0f} GFLOP/s, {bandwidth:.0f} GB/s")
    print(f"\n| {flag_values.examples} examples | sum, ms | each, ms |\n| --- | --- | --- |")
    for name, (summed, each) in times.items():
        print(f"| {name} | {summed:.1f} | {each:.1f} |")
    return (flops, bandwidth), times


def define_flags(flag_values):
    """Defines the flags of this script.

    Args:
        flag_values: `absl.flags.FlagValues` to define them in.
    """
    options = {"flag_values": flag_values}
    flags.DEFINE_integer("examples", 512, "Examples.", lower_bound=1, **options)
    flags.DEFINE_integer("rounds", 9, "Rounds.", lower_bound=1, **options)


def main(argv):
    """Runs the script with the flags of the command line."""
    del argv
    tf.config.threading.set_intra_op_parallelism_threads(1)
    tf.config.threading.set_inter_op_parallelism_threads(1)
    run(flags.FLAGS)


if __name__ == "__main__":
    define_flags(flags.FLAGS)
    app.run(main)
