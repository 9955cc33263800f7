# Copyright 2026 The dice_tf Authors.
# SPDX-License-Identifier: Apache-2.0
"""What `fit` can tell about the data it gets: lengths, rows per epoch, rows per step.

`ShuffledEpochs` believes that an epoch shows each example once. Rows do not say which examples
they are, but there are no more of them than examples.
"""

import math
import warnings

import tensorflow as tf

from dice_tf import provenance
from dice_tf.errors import SamplingError
from dice_tf.sampling import ShuffledEpochs

_DEFAULT_BATCH_SIZE = 32  # That of `fit`, for arrays.


def known_cardinality(x):
    """Returns the number of batches of a `tf.data.Dataset`, `None` if infinite or unknown.

    Args:
        x: What `fit` received as `x`; `None` is returned for other than data sets.
    """
    if not isinstance(x, tf.data.Dataset):
        return None
    cardinality = int(x.cardinality())
    return cardinality if cardinality >= 0 else None


def unaccounted_pass(given, samplings, budgets):
    """Returns what to record of a `fit` whose data neither one sampler draws nor a callback checks.

    Args:
        given: Dict of the arguments of `fit`.
        samplings: Objects of `dice_tf.sampling` that draw its data.
        budgets: Each `EpsilonCallback` of this `fit`.

    Returns:
        `ShuffledEpochs` of as many steps, if an epoch is one pass of known length;
        `provenance.UNSEEN` if it need not be, `provenance.SEVERAL` if several samplers draw.
        `None` if there is nothing to record.
    """
    if len(set(map(id, samplings))) > 1:
        return provenance.SEVERAL
    if samplings or budgets:
        return None
    rows, steps = _count_array_rows(given), _count_batches(given["x"])
    if given.get("steps_per_epoch") not in (None, steps):
        return provenance.UNSEEN
    if rows:
        batch_size = given.get("batch_size") or _DEFAULT_BATCH_SIZE
        return ShuffledEpochs(rows, min(rows, batch_size))
    # How many examples there are makes no difference to what an epoch costs.
    return ShuffledEpochs(steps, 1) if steps else provenance.UNSEEN


def _count_batches(x):
    """Returns the number of batches of a data set, a `PyDataset` or a loader, if they tell."""
    if isinstance(x, tf.data.Dataset) or not hasattr(x, "__len__") or hasattr(x, "shape"):
        return known_cardinality(x)
    try:
        return len(x)
    except (TypeError, ValueError):
        return None


def check_dense(x):
    """Refuses ragged rows, which no private step can stack.

    Args:
        x: What `fit` received as `x`.

    Raises:
        SamplingError: If some part of it is ragged.
    """
    parts = x.element_spec if isinstance(x, tf.data.Dataset) else x
    if any(isinstance(p, (tf.RaggedTensor, tf.RaggedTensorSpec)) for p in tf.nest.flatten(parts)):
        raise SamplingError(
            "Ragged rows cannot be stacked into a batch of per-example gradients. Pad them, "
            "`x.to_tensor()` for arrays or in a `map` of the data set, and mask the padding "
            f"(`mask_zero=True`). Received: {parts}."
        )


def check_rows(given, claims):
    """Refuses arrays with more rows than there are examples, for other data see `provenance`.

    Args:
        given: Dict of the arguments of `fit`.
        claims: Objects of `dice_tf.sampling` that it is accounted with.

    Raises:
        SamplingError: If an epoch of `ShuffledEpochs` would show an example twice.
    """
    rows = _count_array_rows(given)
    for sampling in claims:
        if not sampling.amplified and rows is not None and rows > sampling.num_examples:
            raise SamplingError(
                "Under `ShuffledEpochs` an epoch shows each example once, but this one holds "
                f"{rows} rows, more rows than there are examples. Received: {sampling!r}. Declare "
                "the true `num_examples`, and leave resampling out."
            )


def warn_of_batch_size(given, expected):
    """Warns if steps on arrays get another number of rows than the optimizer divides by.

    Args:
        given: Dict of the arguments of `fit`.
        expected: Int, `expected_batch_size` of the optimizer.
    """
    rows, batch_size = _count_array_rows(given), given.get("batch_size") or _DEFAULT_BATCH_SIZE
    if rows is not None and min(rows, batch_size) != expected:
        warnings.warn(
            f"`fit` trains on batches of {min(rows, batch_size)} examples, but the optimizer "
            f"divides their sum by expected_batch_size={expected}: steps are not as long as "
            f"planned, under the same noise. Pass `fit` batch_size={expected}, or the data set of "
            "a sampler.",
            stacklevel=4,
        )


def _count_array_rows(given):
    """Returns the number of rows that `fit` trains on, `None` if it did not receive arrays."""
    leaves = [] if given["x"] is None else tf.nest.flatten(given["x"])
    shapes = [getattr(leaf, "shape", ()) for leaf in leaves]
    if not shapes or not all(len(shape) for shape in shapes):
        return None
    split = 0 if given.get("validation_data") is not None else given.get("validation_split", 0)
    return math.floor(shapes[0][0] * (1 - split))
