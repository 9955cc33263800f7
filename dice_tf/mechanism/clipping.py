# Copyright 2026 The dice_tf Authors.
# SPDX-License-Identifier: Apache-2.0
r"""How much of each per-example gradient is released now, and how much later.

A per-example gradient \(g_i\) is only ever multiplied by two scalars, both
functions of its norm: the head \(h_i = a_i g_i\) enters this step, the residual
\(r_i = b_i g_i\) enters the error that is fed back at the next one.
"""

import tensorflow as tf

from dice_tf.mechanism import DiceMechanism, rounding

# Keeps a normalised gradient smooth at 0, where it has no direction (Bu et al., gamma).
STABILITY = 0.01


def clip_weights(norms, mechanism: DiceMechanism):
    r"""Returns the head and residual weight of every per-example gradient.

    With \(n_i = \lVert g_i \rVert\):

    \[a_i = \min(1, C_1 / n_i), \qquad
      b_i = \min(1 - a_i, C_2 / n_i) \text{ (bounded residuals)}, \qquad
      b_i = 1 - a_i \text{ (unbounded)}.\]

    Since \(\lVert g_i - a_i g_i \rVert = (1 - a_i) n_i\), the bounded \(b_i g_i\) is
    exactly \(\mathrm{clip}(g_i - \mathrm{clip}(g_i, C_1), C_2)\).

    With `clipping="automatic"` nothing is clipped: with \(\gamma\) = `STABILITY`,

    \[a_i = \frac{1}{n_i + \gamma}, \qquad b_i = \min(1 - a_i, a_i) \text{ (bounded)}, \qquad
      b_i = 1 - a_i \text{ (unbounded)}.\]

    So the head is the normalised gradient, and the residual is what normalising took away,
    but not longer than the head; where it added (\(n_i + \gamma < 1\)) the residual is
    negative and takes it back. Both are below \(C_1 = C_2 = 1\), whatever the norm:
    \(a_i n_i = n_i / (n_i + \gamma) < 1\); a positive \(b_i\) is at most \(a_i\); a negative
    one is \(1 - a_i \ge -a_i\). They add up to \((a_i + b_i) g_i = \min(1, 2 a_i) g_i\), the
    gradient itself up to a norm of nearly 2.

    In place of \(n_i\) stands \((1 + 10^{-5}) n_i\) (`dice_tf.mechanism.rounding`), more than
    rounding can have taken off a norm and can add to a weight and its products: whatever the
    processor, the exact norms of the weighted gradients are at most \(C_1\) and \(C_2\).

    Args:
        norms: Float32 `[units]`, norms over all trainable variables at once.
        mechanism: The thresholds \(C_1\), \(C_2\) and the form of the algorithm.

    Returns:
        A pair of float32 `[units]`: head weights, and residual weights or `None` if
        `error_norm_clip` is 0. Both are 0 where the norm is not finite: a broken
        example contributes nothing, and so reveals nothing.

    Example:

    >>> mechanism = DiceMechanism(
    ...     l2_norm_clip=1.0, error_norm_clip=0.5, noise_multiplier=1.0,
    ...     expected_batch_size=4)
    >>> head, residual = clip_weights(tf.constant([0.5, 1.25, 4.0, float("inf")]), mechanism)
    >>> [round(float(a), 3) for a in head], [round(float(b), 3) for b in residual]
    ([1.0, 0.8, 0.25, 0.0], [0.0, 0.2, 0.125, 0.0])

    >>> automatic = DiceMechanism(
    ...     clipping="automatic", noise_multiplier=1.0, expected_batch_size=4)
    >>> head, residual = clip_weights(tf.constant([0.49, 1.59, 4.99]), automatic)
    >>> [round(float(a), 3) for a in head], [round(float(b), 3) for b in residual]
    ([2.0, 0.625, 0.2], [-1.0, 0.375, 0.2])

    Source: Zhang et al., ICLR 2024, Alg. 1 line 5, the first term of v (head) and
    line 7, the per-example part of the error (residual); appendix, automatic DiceSGD,
    which normalises gradients and error. Bu et al., "Automatic Clipping: Differentially
    Private Deep Learning Made Easier and Stronger", NeurIPS 2023 (gamma).
    """
    norms = tf.cast(norms, tf.float32)
    finite = tf.math.is_finite(norms)
    # Infinity makes both quotients below 0 without a special case; NaN would survive.
    norms = tf.where(finite, rounding.RAISED * norms, float("inf"))
    if mechanism.clipping == "automatic":
        head = 1.0 / (norms + STABILITY)
        residual = 1.0 - head
        if mechanism.bound_residuals:
            residual = tf.minimum(residual, head)
    else:
        head, residual = _flat_weights(norms, mechanism)
    if mechanism.error_norm_clip == 0:
        return head, None
    return head, tf.where(finite, residual, tf.zeros_like(residual))


def _flat_weights(norms, mechanism):
    head = tf.minimum(1.0, tf.math.divide_no_nan(mechanism.l2_norm_clip, norms))
    head = tf.where(norms > 0, head, tf.ones_like(head))
    residual = 1.0 - head
    if mechanism.bound_residuals:
        within = tf.math.divide_no_nan(mechanism.error_norm_clip, norms)
        residual = tf.where(norms > 0, tf.minimum(residual, within), tf.zeros_like(residual))
    return head, residual
