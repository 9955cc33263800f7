# Copyright 2026 The dice_tf Authors.
# SPDX-License-Identifier: Apache-2.0
"""How many rows an epoch really showed, wherever they came from.

`ShuffledEpochs` believes that an epoch shows each example once; so there are no more rows than
examples. The numbers depend on the data, by weights of 0 for instance, so they stay in the
process: not in the sampling record, which every file holds.
"""

import tensorflow as tf

from dice_tf.errors import SamplingError

# Rows of nonzero weight in unmarked batches since an epoch began, the largest such number so
# far, and that of a single step.
SIZE = 3


def update(counts, marks, rows, in_fit):
    """Returns the counts after one more step.

    Args:
        counts: Int64 `[SIZE]`.
        marks: Scalar, `provenance.count_marks` of the step's batch over all replicas.
        rows: Scalar, its rows of nonzero weight. Those of marked batches do not count.
        in_fit: Whether `fit` takes the step: outside, nobody says where an epoch begins.

    Returns:
        Int64 tensor `[SIZE]`.

    Example:

    >>> counts = tf.zeros([SIZE], tf.int64)
    >>> for rows in (8, 7):
    ...     counts = update(counts, marks=0, rows=rows, in_fit=True)
    >>> counts.numpy().tolist()
    [15, 15, 8]
    """
    epoch, most, largest = tf.unstack(tf.convert_to_tensor(counts))
    of_step = tf.where(
        tf.cast(marks, tf.int64) > 0, tf.constant(0, tf.int64), tf.cast(rows, tf.int64)
    )
    epoch = tf.where(tf.cast(in_fit, tf.bool), epoch, tf.zeros_like(epoch)) + of_step
    return tf.stack([epoch, tf.maximum(most, epoch), tf.maximum(largest, of_step)])


def begin_epoch(optimizer):
    """Counts the rows of an epoch from its beginning."""
    counts = optimizer._private.row_counts
    if counts is not None:
        counts.assign(counts.value * tf.constant([0, 1, 1], tf.int64))


def largest_batch(optimizer):
    """Returns the largest number of rows of one step of this process, of a built optimizer."""
    return int(optimizer._private.row_counts.numpy()[2])


def check(optimizer, sampling):
    """Refuses a run one of whose epochs showed more rows than there are examples.

    Args:
        optimizer: A private optimizer that is built.
        sampling: The sampling object that the run is accounted with.

    Raises:
        SamplingError: If `sampling` is to show each example once per epoch.
    """
    _, most, largest = optimizer._private.row_counts.numpy().tolist()
    # Where every step counts as an epoch, `fit` may have called several of them one.
    check_epoch(sampling, largest if sampling.steps_per_epoch == 1 else most)


def check_epoch(sampling, rows):
    """Refuses an epoch of more rows than there are examples.

    Args:
        sampling: What the run is accounted with; only one without amplification is checked.
        rows: Int.

    Raises:
        SamplingError: If there are more.
    """
    if not sampling.amplified and rows > sampling.num_examples:
        raise SamplingError(
            "Under `ShuffledEpochs` an epoch shows each example once, but one of this run has "
            f"{rows} rows, more rows than there are examples. Received: {sampling!r}. Declare the "
            "true `num_examples`; leave `repeat` and resampling out; keep the weights of a "
            "sampler's batches, which are 0 for padding."
        )
