# Copyright 2026 The dice_tf Authors.
# SPDX-License-Identifier: Apache-2.0
"""Recognises rows that come in another order than before.

`CyclicPoissonSampling` assigns rows to groups by their place. If the rows change places, an
example may change groups, and its windows of steps overlap.
"""

import hashlib

import numpy as np
import tensorflow as tf

_ROWS = 64


def fingerprint(fetch, num_examples, owners=b""):
    """Returns a number that is another one for rows in another order.

    It is made of rows at evenly spaced, public places: shuffling, sorting, leaving out and
    inserting show, exchanging two other rows does not. It depends on the data and must not
    leave the process.

    Args:
        fetch: Function from int64 indices to rows, from `data_sources.row_fetcher`.
        num_examples: Int, the number of rows.
        owners: Bytes, another value for rows of other owners.

    Returns:
        Int of 63 bits.

    Example:

    >>> rows, turned = tf.range(100), tf.reverse(tf.range(100), [0])
    >>> first, same, other = (
    ...     fingerprint(lambda i: tf.gather(r, i), 100) for r in (rows, rows, turned))
    >>> first == same, first == other
    (True, False)
    """
    places = np.unique(np.linspace(0, num_examples - 1, _ROWS).astype(np.int64))
    digest = hashlib.sha256(owners)
    for leaf in tf.nest.flatten(fetch(tf.constant(places))):
        if leaf is not None:
            values = np.asarray(leaf)
            # Texts are objects, whose bytes are addresses.
            digest.update(repr(values.tolist()).encode() if values.dtype == object
                          else np.ascontiguousarray(values).tobytes())  # fmt: skip
    return int.from_bytes(digest.digest()[:8], "little") >> 1
