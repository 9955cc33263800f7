# Copyright 2026 The dice_tf Authors.
# SPDX-License-Identifier: Apache-2.0
"""That an optimizer clips as one what the data holds as one.

Rows of one unit that are clipped apart count several times, rows of several units that are
clipped together hide behind each other: epsilon would be about neither.
"""

from typing import Any

from dice_tf.errors import SamplingError


def check_data(mechanism: Any, found: list) -> None:
    """Refuses data of `fit` whose units are not those of the optimizer.

    Args:
        mechanism: The `DiceMechanism` of the optimizer.
        found: List of `admission.Source`s behind the data.

    Raises:
        SamplingError: If one has another number of rows per unit, or units are wanted and no
            sampler is seen to draw them.
    """
    size = mechanism.rows_per_unit
    if size > 1 and not found:
        raise SamplingError(
            f"The optimizer clips units of {size} rows, and only a sampler is known to hand out "
            f"whole ones. Received: rows_per_unit={size} and data of no sampler. Pass `fit` "
            "`sampling.dataset(x, y, views=...)`, or the data set of `of_owners(...)`, itself."
        )
    for source in found:
        if source.rows_per_unit != size:
            raise SamplingError(
                f"This data set has {source.rows_per_unit} rows for each example or owner drawn, "
                f"and the optimizer clips {size} as one, so that epsilon would be of other units. "
                f"Received: rows_per_unit={size} with {source.sampling!r}. Make the optimizer with "
                f"rows_per_unit={source.rows_per_unit}, without `num_microbatches`."
            )


def check_same_owners(optimizer: Any, sampling: Any, begins: bool = False) -> None:
    """Refuses one epsilon of steps that drew the owners of different lists.

    Args:
        optimizer: A private optimizer.
        sampling: The sampling that its run is accounted with.
        begins: Whether a `fit` begins that draws them.

    Raises:
        SamplingError: If an earlier `fit` of this process drew other owners.
    """
    private, owners = optimizer._private, getattr(sampling, "owners", None)
    if owners is None:
        return
    if private.owners not in (None, owners.digest):
        raise SamplingError(
            "Earlier steps of this optimizer drew owners by another list of ids, in which rows "
            "belong together otherwise: no one epsilon is of both. Received: "
            f"{sampling!r}. Use one list, with rows in one order, or compile with a new optimizer."
        )
    if begins:
        private.owners = owners.digest


def check_steps(mechanism: Any, loose_steps: int) -> None:
    """Refuses to account units of batches that no sampler drew.

    Units of another size than the sampler's need no check of their own: the marks in the
    weights of its batches then do not count as its marks.

    Args:
        mechanism: The `DiceMechanism` of the optimizer.
        loose_steps: Int, number of steps outside `fit` on batches without a mark.

    Raises:
        SamplingError: If there are any, and units have several rows.
    """
    if mechanism.rows_per_unit > 1 and loose_steps:
        raise SamplingError(
            f"Cannot account {loose_steps} steps outside `fit`: their batches have no mark of a "
            f"sampler with units of {mechanism.rows_per_unit} rows, so nobody knows which rows "
            f"belong together. Received: rows_per_unit={mechanism.rows_per_unit}. Loop over a "
            "Poisson sampler's `dataset(..., views=...)` or that of owners, and begin anew."
        )
