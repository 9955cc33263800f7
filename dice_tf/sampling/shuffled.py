# Copyright 2026 The dice_tf Authors.
# SPDX-License-Identifier: Apache-2.0
"""`ShuffledEpochs`: each example once per epoch in any order, without amplification."""

import dataclasses
import math

import numpy as np

from dice_tf.accounting.events import Round, Rounds
from dice_tf.errors import SamplingError
from dice_tf.mechanism import DiceMechanism
from dice_tf.sampling import padding
from dice_tf.sampling.base import DRAW_STREAM, DrawPlan, Sampling

__all__ = ["ShuffledEpochs"]


@dataclasses.dataclass(frozen=True)
class ShuffledEpochs(Sampling):
    r"""Each epoch visits every example once, in any order; no amplification is claimed.

    This is what `model.fit(x, y, batch_size=...)` does. Shuffling is not Poisson
    sampling: the accountant counts one full, unsampled release per epoch begun, so T steps
    are \(\lceil T / \lceil N / B \rceil \rceil\) releases.

    Args:
        num_examples: Int >= 1, the size N of the data set.
        expected_batch_size: Int in [1, N], the number B of examples in a batch.
        seed: Int >= 0 or `None`, as in `PoissonSampling`; it decides the order.

    Raises:
        SamplingError: If a value is out of range.

    Example:

    >>> sampling = ShuffledEpochs(num_examples=29_404, expected_batch_size=32)
    >>> sampling.sampling_probability, sampling.steps_per_epoch, sampling.rounds(920)
    (1.0, 919, 2)

    Source: own; `docs/privacy.md`, section 2, form 3.
    """

    seed: int | None = None

    own_coins = False
    amplified = False
    whole_epochs = True
    rounds_add_up = True

    def __post_init__(self):
        if self.owners is not None:
            raise SamplingError(
                "`ShuffledEpochs` shows rows, not owners. Received: "
                f"owners={self.owners!r}. Use `RandomAllocation.of_owners(...)`, in whose epochs "
                "each owner comes once, or `CyclicPoissonSampling.of_owners(...)`."
            )
        super().__post_init__()

    @property
    def sampling_probability(self) -> float:
        """1: an example is certain to be used once in every epoch."""
        return 1.0

    @property
    def steps_per_epoch(self) -> int:
        """Int, number of batches in one epoch, the last and shorter one included."""
        return math.ceil(self.num_examples / self.expected_batch_size)

    def separates_entries(self, feedback_steps: int) -> bool:
        """Returns `False`: an example may end one epoch and begin the next."""
        return False

    def check_mechanism(self, mechanism: DiceMechanism) -> None:
        """Accepts all: an example enters at known steps, and forms 3 and 4 cover them."""

    def accounted_rounds(self, noise_multiplier: float, steps: int) -> Rounds:
        """Returns one full release for each epoch begun."""
        return [Round(1.0, noise_multiplier, self.rounds(steps))]

    def description(self, steps: int) -> str:
        """Returns how examples are drawn."""
        return (
            "Every example is used once per epoch, in any order. Shuffling is not accounted as "
            f"random sampling: no amplification, {self.rounds(steps)} rounds. An unfinished epoch "
            "at the end counts in full."
        )

    def draw_plan(self, planned_steps: int, replicas: int = 1) -> DrawPlan:
        """Returns consecutive parts of an order that is drawn for each epoch."""
        size, count = self.expected_batch_size, self.num_examples
        starts = range(0, count, size)
        # Not up to one size: padding costs an example a second entry if its weight is lost.
        sizes = {padding.round_up(min(size, count - start), replicas) for start in (0, starts[-1])}

        def begin():
            *stream, _ = self._begin_iteration().tolist()
            rng = self._generator(DRAW_STREAM, *stream)
            return rng.permutation(count)

        def draw(order, step):
            start = starts[int(step)]
            drawn = min(size, count - start)
            places = np.arange(start, start + padding.round_up(drawn, replicas))
            return order.take(places, mode="wrap"), padding.weights(len(places), drawn, marks=0)

        return begin, draw, sizes.pop() if len(sizes) == 1 else None
