# Copyright 2026 The dice_tf Authors.
# SPDX-License-Identifier: Apache-2.0
r"""Sums in float32 whose rounding has a proven bound, whatever adds them up.

With unit roundoff \(u = 2^{-24}\), a sum of \(n\) terms is off by at most
\(\gamma_d \sum |x_i|\), \(\gamma_d = d u / (1 - d u)\), where \(d\) is the largest number of
additions that one term goes through. An accumulator that takes the terms one by one has
\(d = n - 1\), and for squares that matters: XLA was seen to lose 5 % of \(10^7\) squares on a
CPU. So terms are added here in blocks of at most 16, those sums in blocks again, and so on:
\(d \le 15 \lceil \log_{16} n \rceil + 15 \le 135\) for \(n \le 2^{31}\), in whatever order a
block is added (Higham, "Accuracy and Stability of Numerical Algorithms", 2002, chapter 4).

**How much norms are raised.** A squared norm of a gradient has a relative error of at most

* \(135 u\) for a sum of squares, or \(150 u\) for a product of two of them; in place of it
  \(60 u\) for the sum over up to 16,384 variables whose Gram matrices are taken together;
* \(4 u\) for squaring, with the root of a block and its square, or \(8 u\) for a product of two
  such sums, \(1 u\) for their product, and what is lost where terms cancel, which
  `dice_tf.engine.gram` and `contributions` add to it themselves (\(3 u\));
* \(14 u\) for the sum over up to 16,384 variables, which are added in pairs;

together \(176 u\), so a norm has one of \(88 u\). Its root takes \(2 u\); a threshold as
float32, the product with `RAISED`, the quotient and the two products of a weight with a
gradient take \(6 u\), its division by \(B\), perhaps as a product with the reciprocal of a
rounded \(B\), takes \(3 u\), and a residual that is completed from the sum of heads
(`dice_tf.engine.residual_rows`) \(10 u\) more. That is \(109 u = 6.5
\cdot 10^{-6}\), less than `MARGIN` = \(10^{-5}\), by which norms are raised before they become
weights. So in exact arithmetic the weighted gradient of no example is longer than its
threshold.
"""

import tensorflow as tf
from tensorflow.python.ops import control_flow_util

# Unit roundoff of float32.
UNIT = 2.0**-24
# What float32 may take off a norm and add to a weight, relative to it.
MARGIN = 1e-5
RAISED = 1.0 + MARGIN

_BLOCK = 16
# Blocks shorter than this are filled up with zeros instead.
_SHORTEST = 4
# From this size the squares of a row are not written down.
_LONG = 1024
# Above `additions` of every size below 2**31.
MOST_ADDITIONS = 135


def margin(additions):
    """Bounds the relative error of so many operations in float32, with room for its own.

    Args:
        additions: Int, or an integer tensor, up to 100,000.

    Returns:
        Float, or a float32 tensor.
    """
    if tf.is_tensor(additions):
        additions = tf.cast(additions, tf.float32)
    return 1.01 * UNIT * additions


def additions(size):
    """Returns the largest number of additions that a term of `total` goes through.

    Args:
        size: Int, number of terms.
    """
    count = 0
    while size > _BLOCK:
        block, size = _cut(size)
        count += block - 1
        size //= block
    return count + max(size - 1, 0)


def _cut(size):
    """Returns the length of blocks and the size that they fill."""
    block = next(d for d in range(_BLOCK, 0, -1) if size % d == 0)
    return (block, size) if block >= _SHORTEST else (_BLOCK, size + -size % _BLOCK)


def total(terms):
    """Adds up numbers that are not negative over the last axis, in blocks.

    Args:
        terms: Float32 `[..., size]`.

    Returns:
        Float32 `[...]`, with a relative error of at most `margin(additions(size))`.

    Example:

    >>> float(total(tf.ones([20_000_000]))), float(total(tf.fill([3, 100], 0.5))[2])
    (20000000.0, 50.0)
    """
    return _signed_total(terms, tf.abs)


def total_of_signed(terms):
    """The same for numbers of either sign: the error is relative to the sum of absolute values."""
    # Any operation between two sums: XLA makes one long sum of two that follow each other.
    return _signed_total(terms, lambda t: tf.abs(t) * tf.sign(t))


def _signed_total(terms, between):
    size = terms.shape[-1]
    if size is None:
        # Enough blocks of blocks for 2**32 terms.
        for _ in range(8):
            terms = _fill(terms, tf.math.floormod(-tf.shape(terms)[-1], _BLOCK))
            terms = tf.reshape(terms, tf.concat([tf.shape(terms)[:-1], [-1, _BLOCK]], 0))
            terms = between(tf.reduce_sum(terms, -1))
        return tf.reduce_sum(terms, -1)
    leading = _leading(terms)
    while size > _BLOCK:
        block, filled = _cut(size)
        if filled > size:
            terms = _fill(terms, filled - size)
        size = filled // block
        # XLA makes one long sum of two that follow each other, but not across `between`.
        terms = between(tf.reduce_sum(tf.reshape(terms, [*leading, size, block]), -1))
    return tf.reduce_sum(terms, -1)


def _leading(tensor):
    """Returns the sizes of all axes but the last, for a reshape; no operation where one is open."""
    sizes = tensor.shape[:-1].as_list()
    if sizes.count(None) > 1 or 0 in sizes:
        return tf.unstack(tf.shape(tensor)[:-1])
    return [-1 if size is None else size for size in sizes]


def _fill(terms, missing):
    return tf.pad(terms, [[0, 0]] * (terms.shape.rank - 1) + [[0, missing]])


def sums_of_squares(tensor):
    """Sums squares over the last axis, with the error of `total` and at most four roundings more.

    Squares that underflow are lost, and with them sums of up to 16 that are hardly larger.
    """
    # Not as a product of a row and a column, which takes longer and adds one by one.
    size = tensor.shape[-1]
    if size is None or size < _LONG or size % _BLOCK or _may_be_compiled():
        return total(tf.square(tensor))
    # Roots of sums of squares are one operation, which writes no squares to memory. XLA has none
    # like it, so that it cannot make one long sum of two here either.
    leading = _leading(tensor)
    blocks = tf.reshape(tensor, [*leading, _BLOCK, size // _BLOCK])
    return total(tf.square(tf.math.reduce_euclidean_norm(blocks, -2)))


def _may_be_compiled():
    in_xla = control_flow_util.GraphOrParentsInXlaContext(tf.compat.v1.get_default_graph())
    return in_xla or tf.config.list_physical_devices("GPU")


def add_up(tensors):
    """Adds up tensors of one shape in pairs, so that each is rounded few times.

    Args:
        tensors: List of at least one tensor.
    """
    while len(tensors) > 1:
        pairs = zip(tensors[::2], tensors[1::2], strict=False)
        tensors = [a + b for a, b in pairs] + tensors[len(tensors) // 2 * 2 :]
    return tensors[0]


def global_norm(tensors):
    """Returns the norm of a list of float32 tensors, taken as one vector.

    Example:

    >>> float(global_norm([tf.constant([3.0]), tf.constant([[4.0, 12.0]])]))
    13.0
    """
    return tf.sqrt(add_up([sums_of_squares(tf.reshape(t, [-1])) for t in tensors]))
