# Copyright 2026 The dice_tf Authors.
# SPDX-License-Identifier: Apache-2.0
"""Fetching the rows of a batch by index, from arrays or from random-access sources."""

import collections.abc

import keras
import numpy as np
import tensorflow as tf

from dice_tf.errors import SamplingError


def row_fetcher(x, y, num_examples):
    """Returns the function that fetches the rows with given indices.

    Args:
        x: Nest of arrays with `num_examples` rows each, or a random-access source of
            `num_examples` elements: an object with `__len__` and `__getitem__` that is
            neither array, dictionary nor tuple, such as `tfds.data_source` or a list of
            `(features, label)` pairs. A list of arrays is a nest, as in Keras.
        y: Nest of arrays, or `None`. If `None` and the source's elements are pairs,
            they are taken as `(features, label)`.
        num_examples: Int, the declared number of examples.

    Returns:
        Function from an int64 tensor `[rows]` to `(x, y)`, nests of tensors
        `[rows, ...]`, for use inside `tf.data`. `y` is `None` if there is none.

    Raises:
        SamplingError: If the data has no random access, or not `num_examples` rows.
    """
    if isinstance(x, tf.data.Dataset):
        raise SamplingError(
            "Argument `x` must give access to any row by its index; a `tf.data.Dataset` only "
            "streams, so its examples cannot be drawn independently. Pass arrays, or a source "
            "with `__len__` and `__getitem__` such as `tfds.data_source(...)`; apply `map` to the "
            f"data set that `dataset` returns. Received: x={x!r}."
        )
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
    random_access = hasattr(x, "__getitem__") and hasattr(x, "__len__")
    nest = isinstance(x, (collections.abc.Mapping, tuple, str, bytes))
    return random_access and not hasattr(x, "shape") and not nest


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


def _standardize(array):
    """Casts float64 to the Keras default float type, as `fit` does with arrays."""
    return array.astype(keras.backend.floatx()) if array.dtype == np.float64 else array


def _array_fetcher(name, nest, num_examples):
    def convert(leaf_name, value):
        if isinstance(value, tf.SparseTensor):
            raise SamplingError(
                f"Argument `{leaf_name}` is a SparseTensor, whose rows have no constant-time "
                "access. Pass a dense array, or a source with `__getitem__`."
            )
        if not tf.is_tensor(value):
            value = _to_array(leaf_name, value)
        rows = value.shape[0] if len(value.shape) else None
        if rows != num_examples:
            raise SamplingError(
                f"Argument `{leaf_name}` must have num_examples={num_examples} rows, one per "
                f"example of the declared data set. Received: {rows} rows (shape {value.shape})."
            )
        return _on_host(value)

    tensors = _map_leaves(convert, name, nest)
    return lambda indices: _map_leaves(lambda _, t: tf.gather(t, indices), name, tensors)


def _to_array(name, value):
    try:
        array = _standardize(np.asarray(value))
        # Strings are objects that TensorFlow takes; rows of several lengths are not.
        return tf.convert_to_tensor(array).numpy() if array.dtype == object else array
    except (TypeError, ValueError) as error:
        raise SamplingError(
            f"Argument `{name}` must be an array of numbers or strings, with rows of one length. "
            f"Pad them and mask the padding (`mask_zero=True`). Received: {error}"
        ) from error


def _source_fetcher(source, num_examples):
    if len(source) != num_examples:
        raise SamplingError(
            f"Argument `x` must have num_examples={num_examples} elements, one per example of the "
            f"declared data set. Received: {len(source)} elements ({type(source).__name__})."
        )
    if isinstance(source, list) and isinstance(source[0], list):
        # Cheap enough to look at all of it; other sources are found out by their first batch.
        _stack([np.empty(len(row)) for row in source])
    example = _stack([source[0]])
    leaves = tf.nest.flatten(example)

    def fetch_rows(indices):
        if hasattr(source, "__getitems__"):
            elements = list(source.__getitems__(indices.tolist()))
        else:
            elements = [source[i] for i in indices.tolist()]
        rows = tf.nest.flatten(_stack(elements))
        return [np.asarray(row, dtype=leaf.dtype) for row, leaf in zip(rows, leaves)]

    def fetch(indices):
        rows = tf.numpy_function(fetch_rows, [indices], [tf.as_dtype(l.dtype) for l in leaves])
        shaped = [tf.ensure_shape(row, (None, *l.shape[1:])) for row, l in zip(rows, leaves)]
        return tf.nest.pack_sequence_as(example, shaped)

    return fetch


def _stack(elements):
    """Turns a list of equally structured elements into one structure of stacked arrays."""
    first = elements[0]
    if isinstance(first, collections.abc.Mapping):
        return {key: _stack([element[key] for element in elements]) for key in first}
    if isinstance(first, tuple):
        leaves = [_stack(list(parts)) for parts in zip(*elements)]
        return type(first)(*leaves) if hasattr(first, "_fields") else tuple(leaves)
    arrays = [np.asarray(element) for element in elements]
    shapes = {array.shape for array in arrays}
    if len(shapes) > 1:
        raise SamplingError(
            "Elements of the source must have one shape each, to be stacked into a batch. "
            f"Received: shapes {sorted(shapes)}. Pad or resize them, in `__getitem__` of a source "
            "or before, and mask padding (`mask_zero=True`)."
        )
    stacked = _standardize(np.stack(arrays))
    return stacked.astype(object) if stacked.dtype.kind in "SU" else stacked
