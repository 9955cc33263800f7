# Copyright 2026 The dice_tf Authors.
# SPDX-License-Identifier: Apache-2.0
"""What a `PrivacyPlan` chooses where its user does not: how errors are fed back.

Source: our own measurements of accuracy at equal epsilon, to be confirmed on more data.
"""

# Number of optimizer steps from which on a residual is fed back over so many of them.
_FEEDBACK_FROM_STEPS = ((700, 7), (350, 3), (200, 1))
# From so many steps of feedback on, C1 has the smaller share of C1 + C2, below it the larger.
_MANY_FEEDBACK_STEPS = 7
_SHARES = 0.3, 0.5


def feedback_steps(steps: int, most_groups: int) -> int:
    """Returns over how many later steps a residual is fed back; 0 is DP-SGD.

    Args:
        steps: Int, number of optimizer steps in the whole training.
        most_groups: Int >= 1, how many groups of a batch there are examples for.
    """
    for least, feedback in _FEEDBACK_FROM_STEPS:
        if steps >= least and feedback < most_groups:
            return feedback
    return 0


def error_norm_clip_ratio(feedback: int) -> float:
    """Returns C2 over C1.

    Args:
        feedback: Int >= 0, number of feedback steps.
    """
    if feedback == 0:
        return 0.0
    share = _SHARES[feedback < _MANY_FEEDBACK_STEPS]
    return (1 - share) / share
