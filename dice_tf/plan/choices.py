# Copyright 2026 The dice_tf Authors.
# SPDX-License-Identifier: Apache-2.0
"""What a `PrivacyPlan` chooses where its user does not: how errors are fed back.

Source: our own measurements of accuracy at equal epsilon, to be confirmed on more data.
"""

from dice_tf import accounting
from dice_tf.mechanism import DiceMechanism
from dice_tf.sampling import CyclicPoissonSampling, PoissonSampling

# Number of optimizer steps from which on a residual is fed back over so many of them.
_FEEDBACK_FROM_STEPS = ((700, 7), (350, 3), (200, 1))
# From so many steps of feedback on, C1 has the smaller share of C1 + C2, below it the larger.
_MANY_FEEDBACK_STEPS = 7
_SHARES = 0.3, 0.5
# Feedback delays gradients, so it is to take less noise than DP-SGD that clips to C1 + C2.
_LESS_NOISE = 0.97


def feedback_steps(
    num_examples: int,
    batch_size: int,
    epochs: int,
    delta: float,
    target_epsilon: float,
    group_size: int = 1,
) -> int:
    """Returns over how many later steps a residual is fed back; 0 is DP-SGD.

    The largest number that the steps of the training, the examples and the noise admit: where
    a batch is a large part of the data, feedback over many steps takes more noise than none.

    Args:
        num_examples: Int, N.
        batch_size: Int, B.
        epochs: Int >= 1.
        delta: Float.
        target_epsilon: Float, at which noises are compared, by the fast accountant.
        group_size: Int >= 1, for how many examples of a person.
    """
    steps = epochs * max(1, round(num_examples / batch_size))
    admitted = [
        feedback
        for least, feedback in _FEEDBACK_FROM_STEPS
        if steps >= least and (feedback + 1) * batch_size <= num_examples
    ]
    if not admitted:
        return 0
    plain = PoissonSampling(num_examples, batch_size)
    noise = accounting.calibrate_noise_multiplier(
        target_epsilon,
        delta,
        plain,
        plain.steps(epochs),
        error_norm_clip=0.0,
        group_size=group_size,
    )
    for feedback in admitted:
        sampling = CyclicPoissonSampling(num_examples, batch_size, feedback + 1)
        # C1 + C2 is 1, as the threshold of DP-SGD is.
        share = 1 / (1 + error_norm_clip_ratio(feedback))
        mechanism = DiceMechanism(
            l2_norm_clip=share,
            error_norm_clip=1 - share,
            feedback_steps=feedback,
            noise_multiplier=_LESS_NOISE * noise / share,
            expected_batch_size=batch_size,
        )
        steps = sampling.steps(epochs)
        epsilon = accounting.compute_epsilon(
            mechanism, sampling, steps, delta, group_size=group_size
        )
        if epsilon <= target_epsilon:
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
