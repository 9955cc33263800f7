# Copyright 2026 The dice_tf Authors.
# SPDX-License-Identifier: Apache-2.0
"""`RandomAllocation`: epochs in which each example comes exactly once, amplified."""

import dataclasses
import functools

import numpy as np

from dice_tf.accounting.events import Rounds
from dice_tf.accounting.random_allocation import AllocatedRound
from dice_tf.errors import AccountingError
from dice_tf.mechanism import DiceMechanism
from dice_tf.sampling import padding
from dice_tf.sampling.base import DrawPlan, Sampling

__all__ = ["RandomAllocation"]

# Keeps these draws apart from those of `dice_tf.sampling`.
_ALLOCATION_STREAM = 2


@dataclasses.dataclass(frozen=True)
class RandomAllocation(Sampling):
    r"""Each epoch, every example draws one step of its group, and takes part at that step alone.

    Groups take turns as in `CyclicPoissonSampling`, so an epoch of t steps has
    \(n = t / m\) cycles. At its beginning every example draws one cycle uniformly, by a coin
    of its own. So an epoch is what its name says, each example exactly once, and nobody can
    tell at which step: the accountant counts amplification, which it must not for
    `ShuffledEpochs`. Batches vary in size a little less than Poisson samples.

    Args:
        num_examples: Int >= 1, the size N of the data set.
        expected_batch_size: Int in [1, N/m], the batch size B. An epoch has
            m * round(N / (m B)) steps, so batches hold B examples on average up to rounding.
        num_groups: Int >= 1, the number of groups m. With error feedback over s steps it must
            be s + 1 at least.
        seed: Int >= 0 or `None`, as in `PoissonSampling`; it also decides the groups.

    Raises:
        SamplingError: If a value is out of range, or `num_groups * expected_batch_size`
            exceeds `num_examples`.

    Example:

    >>> sampling = RandomAllocation(num_examples=60_000, expected_batch_size=2048)
    >>> sampling.cycles_per_epoch, sampling.steps_per_epoch, sampling.rounds(steps=45)
    (15, 30, 2)

    Source: `docs/privacy.md`, section 2, form 6 (our own proof).
    """

    num_groups: int = 2
    seed: int | None = None

    own_coins = True
    whole_epochs = True
    rounds_add_up = True

    @property
    def cycles_per_epoch(self) -> int:
        """Int n, the number of steps of an epoch among which an example draws its own."""
        return max(1, round(self.num_examples / (self.num_groups * self.expected_batch_size)))

    @property
    def sampling_probability(self) -> float:
        """Probability 1/n with which a member of the active group takes part at a step."""
        return 1.0 / self.cycles_per_epoch

    def check_mechanism(self, mechanism: DiceMechanism) -> None:
        """Refuses also residuals that are not gone before their example is back."""
        super().check_mechanism(mechanism)
        if mechanism.error_norm_clip and not self.separates_entries(mechanism.feedback_steps):
            raise AccountingError(
                "`RandomAllocation` is accounted where a residual is gone before its example is "
                f"back. Received: feedback_steps={mechanism.feedback_steps} with {self!r}. Take "
                f"num_groups={mechanism.feedback_steps + 1} or more."
            )

    def accounted_rounds(self, noise_multiplier: float, steps: int) -> Rounds:
        """Returns the epochs begun, which count in full."""
        return [AllocatedRound(self.cycles_per_epoch, noise_multiplier, self.rounds(steps))]

    def description(self, steps: int) -> str:
        """Returns how examples are drawn."""
        return (
            f"Every example takes part once per epoch, at one of {self.cycles_per_epoch} steps "
            f"that it draws by its own coin anew for each: {self.rounds(steps)} epochs. An "
            "unfinished epoch at the end counts in full."
        )

    def draw_plan(self, planned_steps: int, replicas: int = 1) -> DrawPlan:
        """Returns batches of the members of a group that drew the cycle of the step."""

        # The steps of an epoch come one after the other, and those of the next are fetched ahead.
        @functools.lru_cache(maxsize=2 * self.num_groups)
        def members_of_cycles(pool, epoch, entropy):
            del entropy  # A private file may bring another one, and then other draws.
            rng = self._generator(_ALLOCATION_STREAM, *epoch)
            cycle_of = rng.integers(self.cycles_per_epoch, size=pool)
            order = np.argsort(cycle_of, kind="stable")
            ends = np.cumsum(np.bincount(cycle_of, minlength=self.cycles_per_epoch))
            return np.split(order, ends[:-1])

        pick = lambda pool, rng, epoch, cycle: members_of_cycles(pool, epoch, self.entropy)[cycle]
        return padding.padded_draws(self, pick, planned_steps, replicas)
