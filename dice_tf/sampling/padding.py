# Copyright 2026 The dice_tf Authors.
# SPDX-License-Identifier: Apache-2.0
"""Rows of weight 0 that bring batches to few sizes.

They are rows that were not drawn. A loop that loses their weight 0 still clips each of them,
and an example then enters a step once, where a copy of a drawn row would enter it twice.
"""

import math

import numpy as np


def round_up(size, multiple):
    """Returns the smallest multiple, at least `multiple` itself, that holds `size`."""
    return multiple * max(1, math.ceil(size / multiple))


def with_others(drawn, num_examples, size, rng):
    """Returns the rows drawn, and then others that were not.

    Args:
        drawn: Int array, different numbers below `num_examples`.
        num_examples: Int >= 1.
        size: Int >= `len(drawn)`.
        rng: NumPy `Generator`.

    Returns:
        Int64 `[size]`. Numbers come twice only if there are fewer examples than rows.
    """
    others = rng.choice(num_examples, min(num_examples, size), replace=False)
    rows = np.append(drawn, np.setdiff1d(others, drawn, assume_unique=True))
    return np.resize(rows, size).astype(np.int64)


def weights(size, drawn, marks):
    """Returns the weights of a batch: 1 for rows drawn, then 0, the last `marks` of them -0.

    Args:
        size: Int, number of rows.
        drawn: Int, how many of them were drawn.
        marks: Int, at most `size - drawn`; see `dice_tf.ledger.provenance`.

    Returns:
        Float32 `[size]`.
    """
    values = np.zeros(size, dtype=np.float32)
    values[:drawn] = 1.0
    values[size - marks :] = -0.0
    return values
