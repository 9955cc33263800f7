# Copyright 2026 The dice_tf Authors.
# SPDX-License-Identifier: Apache-2.0
r"""Whose privacy a run is about, where a unit is more than one row (form 7).

A unit is a set of at most k rows whose mean gradient is clipped, split into head and residual,
and drawn, as that of an example is: views of an example, or the rows of an owner. Every form of
`events` holds with "unit" for "example".

Proof for owners of more than k rows. Which rows an owner shows is decided by coins of its own
at each entry. Given them its contribution is a vector h of norm at most C1 (and r, at most C2),
so the release is a mixture, over these coins, of Gaussians with shifts in the same ball. A
divergence of mixtures with equal weights is at most that of their worst components
(joint quasi-convexity), which the forms bound.
"""

from __future__ import annotations

from collections.abc import Sequence
import re
from typing import TYPE_CHECKING

from dice_tf.errors import AccountingError

if TYPE_CHECKING:
    from dice_tf.mechanism import DiceMechanism
    from dice_tf.sampling import Sampling

_GROUPS = "Groups:"


def check_units(mechanism: DiceMechanism, sampling: Sampling) -> None:
    """Refuses a mechanism that clips rows of owners apart.

    Args:
        mechanism: The run's `DiceMechanism`.
        sampling: The run's sampling.

    Raises:
        AccountingError: If owners are drawn, and the rows that one shows are not clipped as one.
    """
    if sampling.owners is None:
        return
    size = sampling.rows_per_unit
    if mechanism.rows_per_unit % size or mechanism.num_microbatches is not None:
        raise AccountingError(
            f"The sampling draws owners, {size} rows of each, and the mechanism does not clip "
            "these as one, so that epsilon would not be of owners. Received: "
            f"rows_per_unit={mechanism.rows_per_unit}, "
            f"num_microbatches={mechanism.num_microbatches} with {sampling!r}. Make the optimizer "
            f"with rows_per_unit={size}, times `views` if there are."
        )


def check_same_units(samplings: Sequence[Sampling]) -> None:
    """Refuses runs that protect different units.

    Args:
        samplings: The samplings of runs on the same data.

    Raises:
        AccountingError: If some draw examples and some owners, or owners that are others.
    """
    digests = {None if s.owners is None else s.owners.digest for s in samplings}
    if len(digests) > 1:
        raise AccountingError(
            "Runs that draw examples and runs that draw owners (or other owners) protect different "
            "units, and no one epsilon is of both. Received: "
            f"{', '.join(map(repr, samplings))}. Draw the owners of one list in all runs; if a run "
            "draws examples, an owner of n of them counts n times."
        )


def word(sampling: Sampling) -> str:
    """Returns "example" or "owner": what the sampling draws."""
    return "example" if sampling.owners is None else "owner"


def parameters(mechanism: DiceMechanism, sampling: Sampling) -> dict[str, str]:
    """Returns rows for the statement: what a unit is, if it has several rows."""
    rows: dict[str, str] = {}
    if sampling.owners is not None:
        rows["rows per owner"] = f"{sampling.owners.rows_per_owner} at most"

    if mechanism.rows_per_unit > 1:
        rows["views of each row"] = str(mechanism.rows_per_unit // sampling.rows_per_unit)
    return rows


def notes(mechanism: DiceMechanism, sampling: Sampling) -> list[str]:
    """Returns sentences for the statement: how units of several rows are accounted."""
    found = []
    views = mechanism.rows_per_unit // sampling.rows_per_unit
    if sampling.owners is not None:
        found.append(
            "Whole owners are drawn, and an owner's mean gradient is clipped as one: the guarantee "
            "is for all rows of an owner, however many, of which at most "
            f"{sampling.owners.rows_per_owner} are used at a time, drawn by fresh coins."
        )
    if views > 1:
        found.append(
            f"{views} views of each row are clipped as one, by their mean gradient: they cost as "
            "much as one view."
        )
    return found


def not_covered(sampling: Sampling, items: Sequence[str]) -> list[str]:
    """Returns what a statement does not cover, in terms of the unit of the sampling."""
    if sampling.owners is None:
        return list(items)
    groups = (
        f"{_GROUPS} for k owners who belong together (a household) the guarantee weakens to k "
        "times epsilon, with a larger delta. What one person left in rows of another is the "
        "other's. That there are N owners counts as public."
    )
    return [groups if item.startswith(_GROUPS) else item for item in items]


def in_words_of(sampling: Sampling, text: str) -> str:
    """Returns a text about examples as one about what the sampling draws.

    Args:
        sampling: The run's sampling.
        text: English. "Owner" takes the article of "example", and is shorter.
    """
    if sampling.owners is None:
        return text
    return re.sub(r"\bexample(s?)\b", r"owner\1", text)
