# Copyright 2026 The dice_tf Authors.
# SPDX-License-Identifier: Apache-2.0
"""What `fit` can tell about the data it gets: lengths, rows per epoch, rows per step.

`ShuffledEpochs` believes that an epoch shows each example once. Rows do not say which examples
they are, but there are no more of them than examples.
"""

import contextlib
import math
import re
from typing import Any
import warnings

import tensorflow as tf

from dice_tf.errors import SamplingError
from dice_tf.ledger import admission, provenance, row_counts
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
    repeats = admission.repeating_operation(given["x"]) is not None
    if repeats or given.get("steps_per_epoch") not in (None, steps):
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


def check_validation_split(given, samplings):
    """Refuses a `validation_split` that contradicts the sampling, by its name.

    Args:
        given: Dict of the arguments of `fit`.
        samplings: Objects of `dice_tf.sampling` that it is accounted with, or drawn by.

    Raises:
        SamplingError: If a data set is to be split, or if the split leaves another number of
            rows, and so of steps, than `ShuffledEpochs` counts.
    """
    split = given.get("validation_split")
    if not split or given.get("validation_data") is not None:
        return
    hold_out = (
        "Hold rows out beforehand: `x_val, y_val = x[n:], y[n:]` and `x, y = x[:n], y[:n]`; declare"
        " num_examples=n, and pass `validation_data=(x_val, y_val)`."
    )
    if samplings and isinstance(given["x"], tf.data.Dataset):
        raise SamplingError(
            f"`validation_split` cannot split a `tf.data.Dataset`. {hold_out} Received: "
            f"validation_split={split}."
        )
    rows, batch_size = _count_array_rows(given), given.get("batch_size") or _DEFAULT_BATCH_SIZE
    for sampling in samplings:
        if rows is None or sampling.amplified or rows == sampling.num_examples:
            continue
        if -(-rows // batch_size) != sampling.steps_per_epoch:
            raise SamplingError(
                f"`validation_split` leaves {rows} rows to train on, but {sampling!r} was "
                f"declared. {hold_out} Received: validation_split={split}."
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
        row_counts.check_epoch(sampling, rows or 0)


@contextlib.contextmanager
def typed_errors():
    """Context of a `fit`: what a source raises while a batch is read becomes `SamplingError`."""
    try:
        yield
    except tf.errors.OpError as error:
        # What was raised as a batch was read comes out of `tf.data` as a text.
        raised = re.search(rf"{SamplingError.__name__}: (.*)", error.message)
        if not raised:
            raise
        typed = SamplingError(raised[1])
        raise typed from None


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
    shapes: list[Any] = [getattr(leaf, "shape", ()) for leaf in leaves]
    if not shapes or not all(len(shape) for shape in shapes):
        return None
    split = 0 if given.get("validation_data") is not None else given.get("validation_split", 0)
    return math.floor(shapes[0][0] * (1 - split))
