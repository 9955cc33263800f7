# Copyright 2026 The dice_tf Authors.
# SPDX-License-Identifier: Apache-2.0
"""`RandomAllocation`: epochs in which each example comes exactly once, amplified."""

import dataclasses
import functools

import numpy as np

from dice_tf.sampling.base import Sampling

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

    whole_epochs = True

    @property
    def cycles_per_epoch(self):
        """Int n, the number of steps of an epoch among which an example draws its own."""
        return max(1, round(self.num_examples / (self.num_groups * self.expected_batch_size)))

    @property
    def sampling_probability(self):
        """Probability 1/n with which a member of the active group takes part at a step."""
        return 1.0 / self.cycles_per_epoch

    @property
    def steps_per_round(self):
        """Int, number of steps in an epoch: an example enters once in each."""
        return self.steps_per_epoch

    def _picker(self):
        # The steps of an epoch come one after the other, and those of the next are fetched ahead.
        @functools.lru_cache(maxsize=2 * self.num_groups)
        def members_of_cycles(pool, epoch):
            rng = self._generator(_ALLOCATION_STREAM, *epoch)
            cycle_of = rng.integers(self.cycles_per_epoch, size=pool)
            order = np.argsort(cycle_of, kind="stable")
            ends = np.cumsum(np.bincount(cycle_of, minlength=self.cycles_per_epoch))
            return np.split(order, ends[:-1])

        return lambda pool, rng, epoch, cycle: members_of_cycles(pool, epoch)[cycle]
