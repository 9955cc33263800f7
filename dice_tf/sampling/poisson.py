# Copyright 2026 The dice_tf Authors.
# SPDX-License-Identifier: Apache-2.0
"""Every example by a coin of its own: Poisson sampling, plain and in groups that take turns."""

import dataclasses

from dice_tf.accounting.events import Round, Rounds
from dice_tf.mechanism import DiceMechanism
from dice_tf.sampling import padding
from dice_tf.sampling.base import DrawPlan, Sampling


class _Coins(Sampling):
    """Draws by a coin of each member of the active group; its price is for subclasses to say."""

    own_coins = True

    def check_mechanism(self, mechanism: DiceMechanism) -> None:
        """Accepts all: every turn has a coin of its own, as forms 1, 2 and 4 need."""

    def description(self, steps: int) -> str:
        """Returns how examples are drawn."""
        cyclic = self.num_groups > 1
        turn = f"cycle of {self.num_groups} groups" if cyclic else "step"
        return (
            "Every example is drawn by its own coin, with probability "
            f"{self.sampling_probability:.6g}, once per {turn}: {self.rounds(steps)} rounds."
            f"{' An unfinished cycle at the end counts in full.' if cyclic else ''}"
        )

    def draw_plan(self, planned_steps: int, replicas: int = 1) -> DrawPlan:
        """Returns batches of the members whose coins fell so."""
        probability = self.sampling_probability
        # Given its size, a Poisson sample is uniform among the subsets of that size.
        pick = lambda pool, rng, epoch, cycle: rng.choice(
            pool, rng.binomial(pool, probability), replace=False
        )
        return padding.padded_draws(self, pick, planned_steps, replicas)


__all__ = ["CyclicPoissonSampling", "PoissonSampling"]


@dataclasses.dataclass(frozen=True)
class PoissonSampling(_Coins):
    r"""Each step draws every example independently with probability \(B/N\).

    Args:
        num_examples: Int >= 1, the size N of the data set.
        expected_batch_size: Int in [1, N], the mean number B of examples in a batch.
        seed: Int >= 0, or `None` for draws that nobody can predict, from the entropy of
            the operating system. With a seed, the k-th iteration of this object's data
            sets draws from (seed, k): reproducible, but the draws are only as secret
            as the seed, and a run resumed in a new process repeats them; give
            it another seed.

    Raises:
        SamplingError: If a value is out of range.

    Example:

    >>> sampling = PoissonSampling(num_examples=60_000, expected_batch_size=600)
    >>> sampling.sampling_probability, sampling.steps_per_epoch, sampling.rounds(200)
    (0.01, 100, 200)

    Source: Abadi et al., CCS 2016, Sec. 3.1 (lots).
    """

    seed: int | None = None

    rounds_add_up = True

    def accounted_rounds(self, noise_multiplier: float, steps: int) -> Rounds:
        """Returns one subsampled round for each step."""
        return [Round(self.sampling_probability, noise_multiplier, steps)]


@dataclasses.dataclass(frozen=True)
class CyclicPoissonSampling(_Coins):
    r"""Groups take turns; each step draws from its group with probability \(mB/N\).

    Every example belongs to one of m groups, by a uniform and independent choice that
    does not look at the data and never changes in the life of this object. Step t
    draws each example of group t mod m independently with probability mB/N. So two
    entries of one example are at least m steps apart: its residual is fed back before
    it can enter again, and its influence on two releases adds up in quadrature.
    Iterations run through whole cycles, groups 0 to m-1, however often they restart.

    Args:
        num_examples: Int >= 1, the size N of the data set.
        expected_batch_size: Int in [1, N/m], the mean number B of examples in a batch.
        num_groups: Int >= 1, the number of groups m. To gain from error feedback over s
            steps it must be s + 1 at least.
        seed: Int >= 0 or `None`, as in `PoissonSampling`; it also decides the groups.

    Raises:
        SamplingError: If a value is out of range, or `num_groups * expected_batch_size`
            exceeds `num_examples`.

    Example:

    >>> sampling = CyclicPoissonSampling(num_examples=60_000, expected_batch_size=2048)
    >>> round(sampling.sampling_probability, 4), sampling.steps_per_epoch, sampling.rounds(45)
    (0.0683, 30, 23)

    Source: Choquette-Choo et al., "(Amplified) Banded Matrix Factorization: A unified
    approach to private training", NeurIPS 2023 (the sampling scheme of banded mechanisms).
    """

    num_groups: int = 2
    seed: int | None = None

    rounds_add_up = True

    def accounted_rounds(self, noise_multiplier: float, steps: int) -> Rounds:
        """Returns one subsampled round for each cycle begun."""
        cycles = -(-steps // self.num_groups)
        return [Round(self.sampling_probability, noise_multiplier, cycles)]
