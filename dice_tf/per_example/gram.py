# Copyright 2026 The dice_tf Authors.
# SPDX-License-Identifier: Apache-2.0
r"""Squared norms of per-example products from Gram matrices, without the products.

\[\lVert A_i^\top D_i \rVert^2 = \sum_{s,t} (A_i A_i^\top)_{st} (D_i D_i^\top)_{st}\]
"""

import functools
import platform

import tensorflow as tf

# Four rounding units of float32, relative to the sum of absolute values.
_ROUNDING = 4 * 2.0**-23
# Processors may take every smaller float32 for 0, as the square of 1e-19 is.
_SMALLEST = 2.0**-126
# Multiplications per example from which compiling pays.
_WORTH_COMPILING = 2**20


def worth_compiling(positions, k, f):
    """Whether Gram matrices of this size are computed by XLA, if the processor is a CPU.

    TensorFlow's own batched products of such sizes take about twice as long there.

    Args:
        positions: Int or `None`, the static number of positions.
        k: Int, size of an input.
        f: Int, size of a cotangent.
    """
    if positions is None or positions**2 * (k + f) < _WORTH_COMPILING:
        return False
    return platform.system() == "Linux" and not tf.config.list_physical_devices("GPU")


def squared_norms(inputs, cotangents, *, transposed=False):
    """Returns the squared norms of `inputs[i].T @ cotangents[i]`, float32 `[batch]`.

    Args:
        inputs: Float32 `[batch, (groups,) positions, k]`; with `transposed`, the last two
            axes change places.
        cotangents: Float32 `[batch, (groups,) positions, f]`.
        transposed: Whether `inputs` has positions last.
    """
    positions, f = cotangents.shape[-2:]
    k = inputs.shape[-2 if transposed else -1]
    if cotangents.shape.rank > 3 or not worth_compiling(positions, k, f):
        return _from_gram_matrices(inputs, cotangents, transposed)
    batch = tf.shape(cotangents)[0]
    # XLA compiles once per size: few sizes per octave, whatever batches there are.
    eighth = tf.bitwise.left_shift(1, tf.maximum(_bit_length(batch) - 4, 0))
    missing = tf.math.floormod(-batch, eighth)
    pad = lambda t: tf.pad(t, [[0, missing], [0, 0], [0, 0]])
    inputs, cotangents = tf.cond(
        missing > 0, lambda: (pad(inputs), pad(cotangents)), lambda: (inputs, cotangents)
    )
    return _compiled(transposed)(inputs, cotangents)[:batch]


@functools.cache
def _compiled(transposed):
    compute = functools.partial(_from_gram_matrices, transposed=transposed)
    return tf.function(compute, jit_compile=True, autograph=False, reduce_retracing=False)


def _from_gram_matrices(inputs, cotangents, transposed):
    left = {"transpose_a": True} if transposed else {"transpose_b": True}
    gram = tf.matmul(inputs, inputs, **left)
    other = tf.matmul(cotangents, cotangents, transpose_b=True)
    # Entries of one matrix that underflowed were multiplied by entries of the other, whose
    # sum of absolute values is at most `positions` times the trace.
    k, f = inputs.shape[-2 if transposed else -1], cotangents.shape[-1]
    each = 2 * _SMALLEST * tf.cast(tf.shape(other)[-1], tf.float32)
    lost = k * each * tf.linalg.trace(other) + f * each * tf.linalg.trace(gram)
    return safe_total(gram * other) + (tf.reduce_sum(lost, 1) if lost.shape.rank > 1 else lost)


def _bit_length(number):
    """Number of binary digits of a positive int32 below 2**24."""
    logarithm = tf.math.log(tf.cast(number, tf.float32) + 0.5) / tf.math.log(2.0)
    return tf.cast(logarithm, tf.int32) + 1


def sums_of_squares(tensor):
    """Sums squares over the last axis; as a product of matrices, which reads memory once."""
    if (tensor.shape[-1] or 0) <= 256:
        return tf.reduce_sum(tf.square(tensor), -1)
    return tf.matmul(tensor[..., None, :], tensor[..., :, None])[..., 0, 0]


def factor_squares(tensor):
    """Sums squares that will be multiplied by large numbers, erring on the large side.

    Squares of numbers below 1e-19 underflow. In the squared norm of a gradient that is no
    harm, as no threshold is so small. But 0 times the squares of large cotangents would
    hide a large gradient, so each square counts for as much as it may have lost.

    Args:
        tensor: Float32 `[..., size]`.

    Returns:
        Float32 `[...]`, not below the exact sums but for rounding, and equal to the rounded
        ones where numbers are larger than about 1e-15.
    """
    size = tf.cast(tf.shape(tensor)[-1], tf.float32)
    return sums_of_squares(tensor) + size * _SMALLEST


def safe_total(terms):
    """Adds up the terms of squared norms, erring on the side of too large a norm.

    Where large terms cancel, the rounded total may be far below the true one, even
    negative; the example would then be clipped too little. Adding a multiple of the
    rounding unit of the largest possible total keeps the norm an upper bound. Without
    cancellation that changes a norm by less than one millionth.

    Args:
        terms: Float32 `[batch, ...]`.

    Returns:
        Float32 `[batch]`.
    """
    axes = list(range(1, terms.shape.rank))
    total = tf.reduce_sum(terms, axes)
    # tf.maximum may turn NaN into 0, and a norm of 0 would release a broken example.
    total = tf.where(total < 0, tf.zeros_like(total), total)
    return total + _ROUNDING * tf.reduce_sum(tf.abs(terms), axes)
