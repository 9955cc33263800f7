# Copyright 2026 The dice_tf Authors.
# SPDX-License-Identifier: Apache-2.0
"""Error feedback: the direction of this step and the error for the next one."""

import tensorflow as tf

from dice_tf.mechanism import DiceMechanism


def clip_by_global_norm(tensors, threshold):
    r"""Scales tensors so that their joint norm is at most `threshold`.

    \[\mathrm{clip}(e, C) = \min(1, C / \lVert e \rVert)\, e\]

    Args:
        tensors: List of float32 tensors, taken as one vector.
        threshold: Float > 0.

    Returns:
        List of tensors of the same shapes.

    Source: Zhang et al., ICLR 2024, Alg. 1, the operator clip.
    """
    norm = tf.sqrt(tf.add_n([tf.reduce_sum(tf.square(t)) for t in tensors]))
    factor = tf.where(norm > threshold, tf.math.divide_no_nan(threshold, norm), tf.ones_like(norm))
    return [factor * t for t in tensors]


def direction_and_errors(head_sums, residual_sums, errors, mechanism: DiceMechanism):
    r"""Returns the un-noised direction v and the new error e.

    With \(B\) = `expected_batch_size` (the number of microbatches, if those are used):

    bounded residuals: \(v = \frac1B\sum_i h_i + e, \quad e' = \frac1B\sum_i r_i\);

    unbounded: \(v = \frac1B\sum_i h_i + \mathrm{clip}(e, C_2), \quad
    e' = e + \frac1B\sum_i g_i - v\), computed as
    \(e - \mathrm{clip}(e, C_2) + \frac1B\sum_i (g_i - h_i)\).

    Args:
        head_sums: List of float32 tensors, \(\sum_i h_i\) per variable, over all replicas.
        residual_sums: List of float32 tensors, \(\sum_i r_i\) (or \(\sum_i g_i - h_i\)).
            Ignored if `error_norm_clip` is 0.
        errors: List of float32 tensors, the error e. Empty if `error_norm_clip` is 0.
        mechanism: The thresholds, the divisor and the form of the algorithm.

    Returns:
        A pair of lists of float32 tensors: direction v, and new errors (empty if
        `error_norm_clip` is 0).

    Source: Zhang et al., ICLR 2024, Alg. 1 lines 5 and 7. The bounded form enforces
    the paper's bounded-gradient assumption example by example; where no gradient
    exceeds C1 + C2 the two forms agree.
    """
    heads = [head / mechanism.divisor for head in head_sums]
    if mechanism.error_norm_clip == 0:
        return heads, []
    residuals = [residual / mechanism.divisor for residual in residual_sums]
    if mechanism.bound_residuals:
        return [h + e for h, e in zip(heads, errors)], residuals
    clipped = clip_by_global_norm(errors, mechanism.error_norm_clip)
    direction = [h + c for h, c in zip(heads, clipped)]
    return direction, [e - c + r for e, c, r in zip(errors, clipped, residuals)]
