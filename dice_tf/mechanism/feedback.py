# Copyright 2026 The dice_tf Authors.
# SPDX-License-Identifier: Apache-2.0
"""Error feedback: the direction of this step and the error for the next one."""

import tensorflow as tf

from dice_tf.mechanism import DiceMechanism


def direction_and_errors(heads, residuals, errors, mechanism: DiceMechanism):
    r"""Returns the un-noised direction v and the new error e.

    With \(B\) = `expected_batch_size` (the number of microbatches, if those are used):

    bounded residuals: \(v = \frac1B\sum_i h_i + e, \quad e' = \frac1B\sum_i r_i\), and
    with \(s\) = `feedback_steps` > 1, where \(e_k\) is the residual mean of k steps ago,
    \(v = \frac1B\sum_i h_i + \frac1s\sum_{k=1}^s e_k, \quad
    e' = (\frac1B\sum_i r_i, e_1, \dots, e_{s-1})\);

    unbounded: \(v = \frac1B\sum_i h_i + \mathrm{clip}(e, C_2), \quad
    e' = e + \frac1B\sum_i g_i - v\), computed as
    \(e - \mathrm{clip}(e, C_2) + \frac1B\sum_i (g_i - h_i)\), where with
    `clipping="automatic"` \(e / (\lVert e \rVert + \gamma)\), of a norm below
    \(C_2 = 1\), takes the place of \(\mathrm{clip}(e, C_2)\).

    Args:
        heads: List of float32 tensors, \(\frac1B\sum_i h_i\) per variable, over all replicas.
        residuals: List of float32 tensors, \(\frac1B\sum_i r_i\) (or
            \(\frac1B\sum_i (g_i - h_i)\)). Ignored if `error_norm_clip` is 0.
        errors: List of float32 tensors, the error e: one per variable, with `feedback_steps`
            \(e_1\) of all variables, then \(e_2\) of all. Empty if `error_norm_clip` is 0.
        mechanism: The thresholds and the form of the algorithm.

    Returns:
        A pair of lists of float32 tensors: direction v, and new errors (empty if
        `error_norm_clip` is 0).

    Source: Zhang et al., ICLR 2024, Alg. 1 lines 5 and 7. The bounded form enforces
    the paper's bounded-gradient assumption example by example; where no gradient
    exceeds C1 + C2 the two forms agree.
    """
    if mechanism.error_norm_clip == 0:
        return list(heads), []
    if mechanism.bound_residuals:
        kept = [*residuals, *errors[: -len(heads)]]
        # Not `tf.add_n`, which on CPUs adds in an order that differs from run to run.
        total = lambda parts: parts[0] if len(parts) == 1 else tf.reduce_sum(tf.stack(parts), 0)
        fed_back = [total(errors[i :: len(heads)]) for i in range(len(heads))]
        if mechanism.feedback_steps > 1:
            fed_back = [e / mechanism.feedback_steps for e in fed_back]
        return [h + e for h, e in zip(heads, fed_back)], kept
    clipped = mechanism.clip.bounded_error(errors, mechanism.error_norm_clip)
    direction = [h + c for h, c in zip(heads, clipped)]
    return direction, [e - c + r for e, c, r in zip(errors, clipped, residuals)]
