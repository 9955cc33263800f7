# Copyright 2026 The dice_tf Authors.
# SPDX-License-Identifier: Apache-2.0
"""Whose rows are whose: people, who are drawn as a whole, a few rows of each at a time."""

import dataclasses
import hashlib
from typing import Any, TypeVar

import numpy as np

from dice_tf.checks.arguments import check_integer
from dice_tf.errors import SamplingError
from dice_tf.sampling.conversion import to_array

Self = TypeVar("Self", bound="OfOwners")


@dataclasses.dataclass(init=False, unsafe_hash=True)
class Owners:
    """Which rows of a data set belong to which owner, and how many may take part at a time.

    Of the ids only the grouping is kept. Groups of owners are groups of numbers that do not
    depend on what else an owner has, so no owner is ever in two of them.

    Args:
        owner_ids: One id for every row, `[rows]`: ints, strings or booleans, as a list, a NumPy
            array, a pandas column or a tensor.
        rows_per_owner: Int >= 1, the most rows of an owner that take part at a time.

    Raises:
        SamplingError: If ids are not one for each row, or of a type with gaps (floats, `None`),
            or `rows_per_owner` is below 1.

    Example:

    >>> owners = Owners(["ann", "bob", "ann"], rows_per_owner=2)
    >>> owners.count, owners.num_rows, owners
    (2, 3, Owners(rows_per_owner=2))
    """

    rows_per_owner: int
    # Private, as the ids are; only compared.
    digest: bytes = dataclasses.field(repr=False)

    def __init__(self, owner_ids: Any, rows_per_owner: int) -> None:
        self.rows_per_owner = check_integer("rows_per_owner", rows_per_owner, error=SamplingError)
        ids = _ids(owner_ids)
        _, number, counts = np.unique(ids, return_inverse=True, return_counts=True)
        self.num_rows, self.count = len(ids), len(counts)
        self._counts = counts.astype(np.int64)
        self._starts = np.cumsum(self._counts) - self._counts
        self._rows = np.argsort(number.reshape(-1), kind="stable").astype(np.int64)
        self.digest = hashlib.sha256(number.astype(np.int64).tobytes()).digest()

    def rows_of(self, drawn: Any, weights: Any, rng: Any) -> tuple[Any, Any]:
        """Returns the rows that owners show in one batch, one owner after the other.

        An owner of more rows than `rows_per_owner` shows a uniform subset, without replacement,
        by coins of this batch. One of fewer fills up with its own rows of weight 0, so that a
        loop that loses the weights still trains on this owner alone.

        Args:
            drawn: Int64 `[owners]`, numbers of owners.
            weights: Float32 `[owners]`: 1 for those that take part, else a zero of any sign.
            rng: NumPy `Generator` of this batch.

        Returns:
            Pair of int64 `[owners * rows_per_owner]`, rows, and float32 of that shape, weights.
        """
        most, counts = self.rows_per_owner, self._counts[drawn]
        places = np.tile(np.arange(most, dtype=np.int64), (len(drawn), 1))
        many = np.flatnonzero(counts > most)
        places[many] = _subsets(counts[many], most, rng)
        few = places >= counts[:, None]
        rows = self._rows[self._starts[drawn][:, None] + places % counts[:, None]]
        shown = np.repeat(weights.astype(np.float32)[:, None], most, 1)
        # Padding keeps the very bits of its weight, which carry the provenance mark.
        shown[few & (shown > 0)] = 0.0
        return rows.reshape(-1), shown.reshape(-1)


class OfOwners:
    """What a sampling has to do with owners; the base of `Sampling`."""

    num_examples: int
    owners: Owners | None

    @classmethod
    def of_owners(
        cls: type[Self],
        owner_ids: Any,
        *,
        expected_batch_size: int,
        rows_per_owner: int,
        **arguments: Any,
    ) -> Self:
        r"""Returns a sampling that draws whole owners: user-level privacy.

        Where an example is drawn otherwise, an owner is: by one coin, into one group. At most
        k = `rows_per_owner` of its rows take part at a time, other ones each time, drawn
        without replacement. Their mean gradient is clipped as one (`rows_per_unit=k` of the
        optimizer), so the guarantee is for all that an owner has in the data, however much.

        Args:
            owner_ids: One id for every row of the data: ints or strings, a list, an array, a
                column or a tensor. Windows of a time series have the id of its owner.
            expected_batch_size: Int >= 1, the mean number B of owners in a batch.
            rows_per_owner: Int k >= 1, the most rows of an owner in a batch.
            **arguments: `num_groups` and `seed` of the class.

        Returns:
            Object of this class; `num_examples` is the number of owners, which counts as
            public. Its `dataset` takes all rows, in the order of the ids.

        Raises:
            SamplingError: If ids are not one per row, or a value is out of range.

        Example:

        >>> from dice_tf.sampling import CyclicPoissonSampling
        >>> ids = np.arange(3000) % 600
        >>> sampling = CyclicPoissonSampling.of_owners(
        ...     ids, expected_batch_size=30, rows_per_owner=4, num_groups=2)
        >>> sampling.num_examples, sampling.rows_per_unit, sampling.steps_per_epoch
        (600, 4, 20)

        Source: McMahan et al., "Learning Differentially Private Recurrent Language Models",
        ICLR 2018 (users as the unit); `docs/units.md`.
        """
        owners = Owners(owner_ids, rows_per_owner)
        make: Any = cls  # A data class, which only its subclasses are.
        made: Self = make(
            num_examples=owners.count,
            expected_batch_size=expected_batch_size,
            owners=owners,
            **arguments,
        )
        return made

    @property
    def num_rows(self) -> int:
        """Int, the number of rows of the data set: of examples, or of all owners."""
        return self.num_examples if self.owners is None else self.owners.num_rows

    @property
    def rows_per_unit(self) -> int:
        """Int, the number of rows of a batch that are one owner's, 1 for examples."""
        return 1 if self.owners is None else self.owners.rows_per_owner


def _subsets(sizes, count, rng):
    """Returns `[len(sizes), count]`: uniform subsets of `range(size)`, for each size.

    Floyd's algorithm, for all sizes at once: the i-th number is drawn below size - count + i + 1,
    and replaced by the largest possible one if the subset has it already.
    """
    chosen = np.zeros((len(sizes), count), np.int64)
    for i in range(count):
        last = sizes - count + i
        number = rng.integers(0, last, endpoint=True)
        taken = (chosen[:, :i] == number[:, None]).any(1)
        chosen[:, i] = np.where(taken, last, number)
    return chosen


def _ids(owner_ids):
    ids = to_array("owner_ids", owner_ids)
    if ids.ndim != 1 or not len(ids):
        raise SamplingError(
            "Argument `owner_ids` must hold one id for every row, shape (rows,). Received: shape "
            f"{ids.shape}."
        )
    if ids.dtype.kind not in "biuSU" and ids.dtype != object:
        raise SamplingError(
            "Argument `owner_ids` must hold ints or strings: what is not a number equals nothing, "
            f"so that each gap would be an owner of its own. Received: {ids.dtype}. Give rows "
            'without an owner an id of their own, and use `.astype("int64")`.'
        )
    return ids.astype(str) if ids.dtype == object and isinstance(ids[0], str) else ids
