# Copyright 2026 The dice_tf Authors.
# SPDX-License-Identifier: Apache-2.0
r"""Squared norms of per-example products from Gram matrices, without the products.

\[\lVert A_i^\top D_i \rVert^2 = \sum_{s,t} G_{st} H_{st}, \qquad
  G = A_i A_i^\top, \quad H = D_i D_i^\top\]

**Never too small.** Off the diagonal the terms may cancel, so a relative error of \(G\) is not
one of the sum. With \(v_s = \lVert a_s \rVert\), \(w_s = \lVert d_s \rVert\) and
\(\gamma_k\) the bound for a scalar product of `k` terms (`dice_tf.mechanism.rounding`), the
computed \(\hat G\) has \(|G - \hat G|_{st} \le \gamma_k v_s v_t\), and \(\hat H\) likewise, in
whatever order a processor adds. Hence

\[\sum G_{st} H_{st} \le \sum \hat G_{st} \hat H_{st} + \gamma_k\, v^\top |\hat H| v
  + \gamma_f\, w^\top |\hat G| w + \gamma_k \gamma_f (v^\top w)^2,\]

and adding up the products in blocks loses at most \(\gamma \sum |\hat G_{st} \hat H_{st}|\)
more. These terms are added. They raise the norm of 128 random positions by some 1e-4, and
by at most `raised_by` (some 1e-3) where the gradients of the positions do not cancel. To keep them
small, scalar products are added in blocks, which are shorter where there are more positions.
"""

import functools
import math
import platform
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf

from dice_tf.mechanism import rounding

# Four rounding units of float32, relative to the sum of absolute values.
_ROUNDING = 4 * 2.0**-23
# Processors may take every smaller float32 for 0, as the square of 1e-19 is.
_SMALLEST = 2.0**-126
# Multiplications per example from which compiling pays.
_WORTH_COMPILING = 2**20
# Terms of a scalar product that are added at once, for few positions and for many.
_BLOCKS = (256, 32)
# Up to so many positions the matrices of all variables take far less memory than activations.
MOST_POSITIONS_KEPT = 16


class Matrices(NamedTuple):
    """The Gram matrices of one variable.

    Attributes:
        inputs: Float32 `[batch, (groups,) positions, positions]`, of the inputs.
        cotangents: The same of the cotangents.
        k: Int, size of an input.
        f: Int, size of a cotangent.
    """

    inputs: Any
    cotangents: Any
    k: int
    f: int


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
    more: Any = [[0, missing], [0, 0], [0, 0]]
    pad = lambda t: tf.pad(t, more)
    inputs, cotangents = tf.cond(
        missing > 0, lambda: (pad(inputs), pad(cotangents)), lambda: (inputs, cotangents)
    )
    return _compiled(transposed)(inputs, cotangents)[:batch]


@functools.cache
def _compiled(transposed):
    compute = functools.partial(_from_gram_matrices, transposed=transposed)
    return tf.function(compute, jit_compile=True, autograph=False, reduce_retracing=False)


def _from_gram_matrices(inputs, cotangents, transposed):
    return squared_norms_of([matrices(inputs, cotangents, transposed=transposed)])[0]


def matrices(inputs, cotangents, *, transposed=False):
    """Returns the `Matrices` from which `squared_norms_of` takes what `squared_norms` returns."""
    positions = cotangents.shape[-2]
    return Matrices(
        _gram_matrix(inputs, positions, transposed),
        _gram_matrix(cotangents, positions, False),
        k=inputs.shape[-2 if transposed else -1],
        f=cotangents.shape[-1],
    )


def squared_norms_of(listed):
    """Returns squared norms over several variables, which take few operations together.

    Args:
        listed: List of `Matrices`, each of one variable.

    Returns:
        List of float32 `[batch]`, fewer than variables: one for all of equal number of positions.
    """
    by_shape = {}
    for of_variable in listed:
        by_shape.setdefault(tuple(of_variable.inputs.shape[1:]), []).append(of_variable)
    return [_squared_norms_together(equal) for equal in by_shape.values()]


def _squared_norms_together(listed):
    """The same of `Matrices` of one shape."""
    if len(listed) == 1:
        squares = _squared_norms(*listed[0])
    else:
        inputs, cotangents, k, f = zip(*listed, strict=True)
        squares = _squared_norms(tf.stack(inputs, 1), tf.stack(cotangents, 1), k, f)
    return rounding.total(squares) if squares.shape.rank > 1 else squares


def _squared_norms(gram, other, k, f):
    """Squared norms, float32 `[batch, ...]`, from matrices `[batch, ..., positions, positions]`."""
    positions = gram.shape[-1]
    of_gram, of_other, of_sum = _margins(positions, k, f)
    products = _flat_matrices(gram * other)
    squared = rounding.total_of_signed(products)
    diagonals = tf.linalg.diag_part(gram), tf.linalg.diag_part(other)
    traces = [tf.reduce_sum(diagonal, -1) for diagonal in diagonals]
    # Entries of one matrix that underflowed were multiplied by entries of the other, whose
    # sum of absolute values is at most `positions` times the trace.
    count = tf.cast(tf.shape(other)[-1], tf.float32) if positions is None else float(positions)
    each = 2 * _SMALLEST * count
    k, f = np.asarray(k, np.float32), np.asarray(f, np.float32)
    lost = k * each * traces[1] + f * each * traces[0]
    # The norms of inputs and cotangents, at least.
    v, w = (
        tf.sqrt(diagonal + size[..., None] * np.float32(_SMALLEST))
        for diagonal, size in zip(diagonals, (k, f), strict=True)
    )
    quadratic = lambda matrix, x: tf.reduce_sum(x * tf.linalg.matvec(tf.abs(matrix), x), -1)
    lost += of_gram * quadratic(other, v) + of_other * quadratic(gram, w)
    lost += of_gram * of_other * tf.square(tf.reduce_sum(v * w, -1))
    # tf.maximum may turn NaN into 0, and a norm of 0 would release a broken example.
    squared = tf.where(squared < 0, tf.zeros_like(squared), squared)
    return squared + lost + of_sum * rounding.total(tf.abs(products))


def _margins(positions, k, f):
    """Bounds on the errors of both Gram matrices, and of the sum of their products."""
    block = _block(positions)
    of = lambda size: rounding.margin(min(size, block) + math.ceil(size / block).bit_length() + 1)
    of_each = lambda sizes: np.vectorize(of)(sizes).astype(np.float32)
    most = rounding.MOST_ADDITIONS if positions is None else rounding.additions(positions**2)
    return of_each(k), of_each(f), rounding.margin(most + 1)


def _block(positions):
    most, least = _BLOCKS
    return most if positions is None else max(least, min(most, 2**15 // max(positions, 1)))


def raised_by(positions, k, f):
    """Returns by how much `squared_norms` raises a norm at most, relative to it.

    That holds if the gradients of the positions are orthogonal or add up. Where they cancel,
    it is relative to the root of the sum of their squares.

    Args:
        positions: Int, number of positions.
        k: Int, size of an input.
        f: Int, size of a cotangent.
    """
    return 0.5 * positions * (float(sum(_margins(positions, k, f))) + 1e-6)


def _gram_matrix(tensor, positions, transposed):
    """Scalar products of all pairs of positions, from sums over short blocks of features."""
    axis = tensor.shape.rank - (2 if transposed else 1)
    size, block = tensor.shape[axis], _block(positions)
    sizes = [block] * (size // block) + [size % block] * (size % block > 0)
    parts = tf.split(tensor, sizes, axis) if len(sizes) > 1 else [tensor]
    product = lambda t: tf.matmul(t, t, transpose_a=transposed, transpose_b=not transposed)
    return rounding.add_up([product(part) for part in parts])


def flat(tensor):
    """One row per example."""
    known = tensor.shape[1:].is_fully_defined()
    size = math.prod(tensor.shape[1:]) if known else tf.reduce_prod(tf.shape(tensor)[1:])
    return tf.reshape(tensor, [-1, size])


def _flat_matrices(tensor):
    """Makes one axis of the last two."""
    positions = tensor.shape[-1]
    if positions is None:
        return tf.reshape(tensor, tf.concat([tf.shape(tensor)[:-2], [-1]], 0))
    return tf.reshape(tensor, [-1, *tensor.shape[1:-2], positions**2])


def _bit_length(number):
    """Number of binary digits of a positive int32 below 2**24."""
    logarithm = tf.math.log(tf.cast(number, tf.float32) + 0.5) / tf.math.log(2.0)
    return tf.cast(logarithm, tf.int32) + 1


def factor_squares(tensor):
    """Sums squares that will be multiplied by large numbers, erring on the large side.

    Squares of numbers below 1e-19 underflow. In the squared norm of a gradient that is no
    harm, as no threshold is so small. But 0 times the squares of large cotangents would
    hide a large gradient, so each square counts for twice as much as it may have lost.

    Args:
        tensor: Float32 `[..., size]`.

    Returns:
        Float32 `[...]`, not below the exact sums but for rounding, and equal to the rounded
        ones where numbers are larger than about 1e-15.
    """
    size = tf.cast(tf.shape(tensor)[-1], tf.float32)
    return rounding.sums_of_squares(tensor) + 2 * size * _SMALLEST


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
