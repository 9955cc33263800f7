# Copyright 2026 The dice_tf Authors.
# SPDX-License-Identifier: Apache-2.0
"""Fetching the rows of a batch by index, from arrays or from random-access sources."""

import collections.abc
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from dice_tf.errors import SamplingError
from dice_tf.sampling import elements
from dice_tf.sampling.conversion import to_array
from dice_tf.sampling.row_readers import row_reader


def row_fetcher(x, y, num_examples) -> Any:
    """Returns the function that fetches the rows with given indices.

    Args:
        x: Nest of arrays with `num_examples` rows each, or a random-access source of
            `num_examples` elements: an object with `__len__` and `__getitem__` that is
            neither array, dictionary nor tuple, such as `tfds.data_source` or a list of
            `(features, label)` pairs. A list of arrays is a nest, as in Keras. Arrays on disk
            (memory maps, h5py, Zarr) and sparse ones are read row by row, never as a whole.
        y: Nest of arrays, or `None`. If `None` and the source's elements are pairs,
            they are taken as `(features, label)`.
        num_examples: Int, the declared number of examples.

    Returns:
        Function from an int64 tensor `[rows]` to `(x, y)`, nests of tensors
        `[rows, ...]`, for use inside `tf.data`. `y` is `None` if there is none.

    Raises:
        SamplingError: If the data has no random access, or not `num_examples` rows.
    """
    _check_random_access("x", x)
    if _is_source(x):
        fetch_x = _source_fetcher(x, num_examples)
        pairs = y is None and isinstance(x[0], tuple) and len(x[0]) == 2
    else:
        fetch_x, pairs = _array_fetcher("x", x, num_examples), False
    fetch_y = _array_fetcher("y", y, num_examples)

    def fetch(indices):
        rows = fetch_x(indices)
        return rows if pairs else (rows, fetch_y(indices))

    return fetch


def row_weights(sample_weight, num_examples):
    """Returns user weights as float32 tensors `[num_examples]`, validated.

    Args:
        sample_weight: Array `[num_examples]`, a nest of them (one per output), or `None`, also
            within the nest.
        num_examples: Int, the declared number of examples.

    Returns:
        The same nest, of float32 tensors in which no zero is negative.

    Raises:
        SamplingError: If a weight is negative or not finite, or the shape is wrong.
    """

    def convert(name, value):
        weights = np.asarray(value, dtype=np.float32)
        if weights.shape != (num_examples,):
            raise SamplingError(
                f"Argument `{name}` must hold one weight per example, shape ({num_examples},). "
                f"Received: shape {weights.shape}."
            )
        bad = ~(np.isfinite(weights) & (weights >= 0))
        if bad.any():
            raise SamplingError(
                f"Argument `{name}` must hold finite weights that are at least 0. Received: "
                f"{weights[bad][0]} at index {int(np.argmax(bad))}."
            )
        # A negative zero would read as a provenance mark; -0.0 + 0.0 is +0.0.
        return _on_host(weights + np.float32(0.0))

    return _map_leaves(convert, "sample_weight", sample_weight)


def _is_array(value):
    return len(getattr(value, "shape", ())) > 0


def _is_list_of_arrays(value):
    # `None` stands for an output without weights, as in Keras.
    found = [item for item in value if item is not None] if isinstance(value, list) else []
    return bool(found) and all(_is_array(item) for item in found)


def _is_source(x):
    if isinstance(x, list):
        return not _is_list_of_arrays(x)
    nest = isinstance(x, (collections.abc.Mapping, tuple, str, bytes))
    # Some have a shape, of a table, whose rows they give all the same.
    return _has_random_access(x) and not nest and not (hasattr(x, "shape") and not _is_bulk(x))


def _is_bulk(x):
    return hasattr(x, "__getitems__")


def _has_random_access(value):
    return hasattr(value, "__getitem__") and hasattr(value, "__len__")


def _check_random_access(name, value):
    """Refuses what can only be iterated over, or whose items are batches."""
    if isinstance(value, keras.utils.PyDataset):
        raise SamplingError(
            f"Argument `{name}` is a `PyDataset`, whose items are batches, not examples. Pass an "
            "object whose `__len__` is the number of examples and whose `__getitem__(i)` returns "
            f"one of them. Received: {type(value).__name__}."
        )
    streams = isinstance(value, tf.data.Dataset)
    array = hasattr(value, "shape") or hasattr(value, "__array__")
    items = hasattr(value, "__iter__") or hasattr(value, "__getitem__")
    if streams or (items and not array and not _has_random_access(value)):
        raise SamplingError(
            f"Argument `{name}` must give access to any row by its index; what only streams, or "
            "has no length, cannot be drawn from independently. Pass arrays, a source with "
            "`__len__` and `__getitem__` such as `tfds.data_source(...)`, or `list(...)` of what "
            "fits into memory; apply `map` to the data set that `dataset` returns. Received: "
            f"{'tf.data.Dataset' if streams else type(value).__name__}."
        )


def _map_leaves(function, name, value):
    """Applies `function(name, leaf)` in a nest. Lists become tuples: `tf.data` stacks lists."""
    if value is None:
        return None
    if isinstance(value, collections.abc.Mapping):
        return {k: _map_leaves(function, f"{name}[{k!r}]", v) for k, v in value.items()}
    if isinstance(value, tuple) or _is_list_of_arrays(value):
        leaves = [_map_leaves(function, f"{name}[{i}]", v) for i, v in enumerate(value)]
        return type(value)(*leaves) if hasattr(value, "_fields") else tuple(leaves)
    return function(name, value)


def _on_host(value):
    # `tf.data` runs on the host. An eager tensor that a `tf.data` function captures is held
    # once, by reference; it never becomes a constant in a graph, which may not exceed 2 GB.
    with tf.device("CPU:0"):
        return tf.identity(value)


def _array_fetcher(name, nest, num_examples):
    leaf = lambda name, value: _leaf_fetcher(name, value, num_examples)
    fetchers = _map_leaves(leaf, name, nest)
    return lambda indices: _map_leaves(lambda _, fetch: fetch(indices), name, fetchers)


def _leaf_fetcher(name, value, num_examples):
    """Returns the function from a tensor of indices to these rows of one array."""
    _check_random_access(name, value)
    if not (_is_array(value) or tf.is_tensor(value)):
        value = to_array(name, value)
    rows = value.shape[0] if len(value.shape) else None
    if rows != num_examples:
        raise SamplingError(
            f"Argument `{name}` must have num_examples={num_examples} rows, one per "
            f"example of the declared data set. Received: {rows} rows (shape {value.shape})."
        )
    read = row_reader(name, value)
    if read is None:
        tensor = _on_host(value if tf.is_tensor(value) else to_array(name, value))
        return lambda indices: tf.gather(tensor, indices)
    first = to_array(name, read(np.zeros(1, np.int64)))
    dtype = tf.as_dtype(first.dtype)

    def fetch(indices):
        as_strings = lambda rows: rows.astype(object) if dtype == tf.string else rows
        rows = tf.numpy_function(lambda i: as_strings(read(i)), [indices], dtype)
        return tf.ensure_shape(rows, (None, *first.shape[1:]))

    return fetch


def _source_fetcher(source, num_examples):
    if len(source) != num_examples:
        raise SamplingError(
            f"Argument `x` must have num_examples={num_examples} elements, one per example of the "
            f"declared data set. Received: {len(source)} elements ({type(source).__name__})."
        )
    # A list can be looked at as a whole; other sources are found out by their batches.
    whole = isinstance(source, list)
    example = elements.stack([source[0]])
    for leaf in tf.nest.flatten(example):
        to_array("x", leaf)
    example = elements.common_row(source) if whole else example
    leaves = tf.nest.flatten(example)
    dtypes = [leaf.dtype for leaf in leaves]

    def fetch_rows(indices):
        if _is_bulk(source):
            found = list(source.__getitems__(indices.tolist()))
        else:
            found = [source[i] for i in indices.tolist()]
        rows = tf.nest.flatten(elements.stack(found))
        return [elements.cast(*pair) for pair in zip(rows, dtypes, strict=True)]

    def fetch(indices):
        rows = tf.numpy_function(fetch_rows, [indices], list(map(tf.as_dtype, dtypes)))
        shaped = [
            tf.ensure_shape(row, (None, *leaf.shape[1:]))
            # Outside of a graph a list of one comes back without the list.
            for row, leaf in zip(tf.nest.flatten(rows), leaves, strict=True)
        ]
        return tf.nest.pack_sequence_as(example, shaped)

    return fetch
