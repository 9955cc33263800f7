# Copyright 2026 The dice_tf Authors.
# SPDX-License-Identifier: Apache-2.0
"""What a `PrivacyPlan` finds out where its user does not say it: sizes, and feedback.

Source: measurements of accuracy at equal epsilon, in docs/results.md. With small batches feedback
pays from 700 steps on, and not below 200; which number of steps and which share are best is not
settled. Between the two neither method was ahead throughout.
"""

from typing import Any

from dice_tf import accounting
from dice_tf.accounting.events import check_sampling
from dice_tf.checks.arguments import check_integer
from dice_tf.errors import MechanismError, SamplingError
from dice_tf.mechanism import DiceMechanism
from dice_tf.sampling import CyclicPoissonSampling, PoissonSampling, Sampling

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


def feedback_steps_and_reason(
    plan: Any, ratio: float | None, sampling: Sampling | None, target_epsilon: float
) -> tuple[int, str]:
    """Returns a number of feedback steps for a plan that does not have it, and why it is that.

    Args:
        plan: `PrivacyPlan` with all of N, B, epochs, delta and group size.
        ratio: Its `error_norm_clip_ratio`, or `None`.
        sampling: Its sampling, or `None`.
        target_epsilon: Float.
    """
    if ratio == 0:
        return 0, "as error_norm_clip_ratio is 0"
    if sampling is not None and sampling.num_groups > 1:
        return sampling.num_groups - 1, "one less than groups"
    if sampling is not None:
        return 0, "as it pays with groups only"
    steps = plan.epochs * max(1, round(plan.num_examples / plan.batch_size))
    chosen = feedback_steps(
        plan.num_examples,
        plan.batch_size,
        plan.epochs,
        plan.delta,
        target_epsilon,
        plan.group_size,
    )
    return chosen, f"chosen for about {steps} steps on {plan.num_examples} examples"


def sizes(
    num_examples: int | None, batch_size: int | None, sampling: Sampling | None
) -> tuple[int, int]:
    """Returns N and B, which are arguments of the plan, or of its sampling."""
    if sampling is not None:
        check_sampling(sampling)
        own = {"num_examples": num_examples, "batch_size": batch_size}
        its = {
            "num_examples": sampling.num_examples,
            "batch_size": sampling.expected_batch_size,
        }
        for name, value in own.items():
            if value is not None and value != its[name]:
                raise MechanismError(
                    f"Argument `{name}` contradicts `sampling`, which has it already. Received: "
                    f"{name}={value!r}, sampling={sampling!r}. Leave `{name}` out."
                )
        return its["num_examples"], its["batch_size"]
    if num_examples is None or batch_size is None:
        raise MechanismError(
            "A plan needs `num_examples`, the size of the training data, and `batch_size`, or else "
            f"`sampling`, which has both. Received: num_examples={num_examples!r}, "
            f"batch_size={batch_size!r}."
        )
    num_examples = check_integer("num_examples", num_examples, error=SamplingError)
    batch_size = check_integer("batch_size", batch_size, error=SamplingError)
    if batch_size > num_examples:
        raise SamplingError(
            "Argument `batch_size` must not exceed `num_examples`. Received: "
            f"batch_size={batch_size}, num_examples={num_examples}."
        )
    return num_examples, batch_size
