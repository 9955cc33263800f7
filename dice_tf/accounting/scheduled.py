# Copyright 2026 The dice_tf Authors.
# SPDX-License-Identifier: Apache-2.0
r"""Rounds of a run whose noise changes by a schedule.

A round is the steps in which an example enters once at most: a cycle of groups, or an epoch. Its
entry at step t moves release t by a head and the next s by residuals. So a round whose steps are
k to l costs at most a window whose head meets the smallest noise of the steps k to l, and whose
residuals the smallest of the steps k + 1 to l + s (`DiceMechanism.sensitivity`). Away from the
boundaries of the schedule that is the noise of the piece; near one, the smaller of both.
"""

from collections import Counter
from typing import Any

from dice_tf.errors import AccountingError


def check_schedule(mechanism: Any, sampling: Any) -> None:
    """Refuses a schedule of noise with draws whose price is not that of their rounds, added up.

    Args:
        mechanism: `DiceMechanism` of the run.
        sampling: How batches are drawn.

    Raises:
        AccountingError: If it is such a sampling.
    """
    # In the class itself, as its price is.
    if mechanism.schedule is not None and not vars(type(sampling)).get("rounds_add_up", False):
        raise AccountingError(
            f"`{type(sampling).__name__}` does not say that its rounds add up (`rounds_add_up`), "
            f"so a schedule of noise has no known cost. Received: schedule={mechanism.schedule!r}. "
            "Leave `schedule` out, or draw by a sampler of dice_tf."
        )


def scheduled_rounds(mechanism: Any, sampling: Any, steps: int, factor: float) -> list[Any]:
    """Returns the rounds of a run with bounded residuals and a schedule.

    Args:
        mechanism: `DiceMechanism` with a schedule.
        sampling: A sampling that `check_schedule` accepts.
        steps: Int > 0.
        factor: Float, by which neighbours multiply all sensitivities.

    Returns:
        What `sampling.accounted_rounds` says of the rounds of each noise.
    """
    size, count = sampling.steps_per_round, sampling.rounds(steps)
    # For how many steps a residual is fed back.
    delay = mechanism.feedback_steps if mechanism.error_norm_clip > 0 else 0
    separate = sampling.separates_entries(mechanism.feedback_steps)

    def multiplier_of(number):
        first, last = number * size, (number + 1) * size - 1
        head = mechanism.schedule.smallest_noise(first, last)
        residual = mechanism.schedule.smallest_noise(first + 1, last + delay) if delay else head
        shift = mechanism.sensitivity(separate_entries=separate, noise_factors=(head, residual))
        return mechanism.noise_stddev_of_sum / (factor * shift)

    # Rounds between these have all their steps in one piece, so they cost the same.
    starts = {0, count}
    for boundary in mechanism.schedule.boundaries:
        first = max(0, (boundary - size - delay) // size)
        starts.update(range(first, min(boundary // size + 2, count)))
    edges = sorted(start for start in starts if start <= count)
    of_noise: Counter[float] = Counter()
    for first, following in zip(edges, edges[1:], strict=False):
        of_noise[multiplier_of(first)] += following - first
    return [r for noise, n in of_noise.items() for r in sampling.accounted_rounds(noise, n * size)]
