# Copyright 2026 The dice_tf Authors.
# SPDX-License-Identifier: Apache-2.0
"""The second weighted sum of per-example gradients, from the rows that the first lacks."""

from typing import NamedTuple

import tensorflow as tf

# Weights that differ by less, relative to their size, differ by rounding only.
_ROUNDING = 8 * 2.0**-24


class ResidualRows(NamedTuple):
    r"""A sum \(\sum_i b_i g_i\) as \(c \sum_i a_i g_i + \sum_{i \in R} w_i g_i\).

    Attributes:
        multiple: Float32 scalar \(c\).
        rows: Int32 `[rows]`, the examples \(R\).
        weights: Float32 `[rows]`, \(w_i = b_i - c a_i\).
    """

    multiple: tf.Tensor
    rows: tf.Tensor
    weights: tf.Tensor


def residual_rows(head, residual, norms):
    r"""Splits residual weights so that few examples need a second product.

    Where \(n_i \ge C_1 + C_2\), \(b_i = \frac{C_2}{C_1} a_i\): such an example is part of
    \(c\) times the first sum. Where \(n_i \le C_1\), \(b_i = 0\): it is part of 0 times
    the first sum. The choice with fewer examples left over is taken.

    Args:
        head: Float32 `[batch]`, weights \(a\).
        residual: Float32 `[batch]`, weights \(b\).
        norms: Float32 `[batch]`, norms of the gradients. Padding has norm 0, and is no row
            that is left over, whatever its weights.

    Returns:
        A `ResidualRows`.

    Example:

    >>> head, residual = tf.constant([1.0, 0.5, 0.25]), tf.constant([0.0, 0.5, 0.25])
    >>> split = residual_rows(head, residual, norms=tf.constant([0.7, 2.0, 4.0]))
    >>> float(split.multiple), split.rows.numpy().tolist(), split.weights.numpy().tolist()
    (1.0, [0], [-1.0])
    """
    counts = tf.math.is_finite(norms) & (norms > 0)
    ratios = tf.math.divide_no_nan(residual, head)
    multiple = tf.reduce_max(ratios)
    added = counts & (tf.abs(ratios - multiple) > _ROUNDING * multiple)
    kept = counts & (residual != 0)
    count = lambda mask: tf.math.count_nonzero(mask, dtype=tf.int32)
    use_multiple = count(added) < count(kept)
    multiple = tf.where(use_multiple, multiple, tf.zeros_like(multiple))
    rows = tf.cast(tf.where(tf.where(use_multiple, added, kept))[:, 0], tf.int32)
    weights = tf.gather(residual - multiple * head, rows)
    return ResidualRows(multiple, rows, weights)


def heads_and_residuals(contributions, head, split):
    r"""Returns \(\sum_i a_i g_i\) and \(\sum_i b_i g_i\) for many contributions, with one branch.

    TensorFlow takes longer to make a branch ready than most of these sums to compute.

    Args:
        contributions: List of contributions that have a `weighted_sum_of`.
        head: Float32 `[batch]`, weights \(a\).
        split: `ResidualRows` of the weights \(b\).

    Returns:
        List of pairs of weighted sums, one per contribution.
    """
    heads = [part.weighted_sums([head])[0] for part in contributions]
    scaled = lambda: [split.multiple * total for total in heads]

    def with_picked():
        rest = [part.weighted_sum_of(split.rows, split.weights) for part in contributions]
        return [total + more for total, more in zip(scaled(), rest, strict=True)]

    residuals = tf.cond(tf.equal(tf.size(split.rows), 0), scaled, with_picked)
    return [list(pair) for pair in zip(heads, tf.nest.flatten(residuals), strict=True)]
