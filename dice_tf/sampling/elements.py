# Copyright 2026 The dice_tf Authors.
# SPDX-License-Identifier: Apache-2.0
"""Elements of a source, stacked into a batch: one structure, one shape and one type each."""

import collections.abc

import numpy as np

from dice_tf.errors import SamplingError
from dice_tf.sampling.conversion import as_array, is_string, standardize

# Their shape and type are found without decoding anything.
_PLAIN = (bool, int, float, complex, str, bytes, list, type(None))


def stack(elements):
    """Turns a list of equally structured elements into one structure of stacked arrays.

    Args:
        elements: List of elements: nests of dictionaries and tuples, with arrays, lists, numbers
            or strings in them.

    Raises:
        SamplingError: If they differ in structure or shape.
    """
    return _by_leaf(_stack_leaf, elements)


def common_row(elements):
    """Returns `stack` of one element, uninitialised, with a type that holds those of all.

    Args:
        elements: List of elements. Only what costs nothing is looked at: an element that has no
            type before it is decoded, such as an image, counts if it is the first.

    Raises:
        SamplingError: If they differ in structure or shape, or mix strings and numbers.
    """
    return _by_leaf(_common_leaf, elements)


def cast(rows, dtype):
    """Returns stacked rows in the type of the first element of their source.

    Raises:
        SamplingError: If that would change values, other than by rounding.
    """
    strings, expected = rows.dtype == object, dtype == object
    result = rows if strings or expected else rows.astype(dtype)
    exact = dtype.kind in "biu"
    if strings != expected or (exact and not np.array_equal(result, rows)):
        raise SamplingError(
            "Elements of the source must have one type each, that of its first element. Received: "
            f"{rows.dtype} after {dtype}. Make them alike in `__getitem__`, by `np.float32(...)` "
            "for instance."
        )
    return result


def _by_leaf(function, elements):
    """Applies `function` to the list of what the elements have at a place, place by place."""
    first, kinds = elements[0], {_kind(element) for element in elements}
    if len(kinds) > 1:
        raise SamplingError(
            "Elements of the source must have one structure, to be stacked into a batch. Received: "
            f"{' and '.join(sorted(kinds))}. Give every element the same keys, or as many parts."
        )
    if isinstance(first, collections.abc.Mapping):
        return {key: _by_leaf(function, [e[key] for e in elements]) for key in first}
    if isinstance(first, tuple):
        leaves = [_by_leaf(function, list(parts)) for parts in zip(*elements, strict=True)]
        return type(first)(*leaves) if hasattr(first, "_fields") else tuple(leaves)
    return function(elements)


def _kind(element):
    if isinstance(element, collections.abc.Mapping):
        return f"a dictionary with the keys {sorted(map(str, element))}"
    return f"a tuple of {len(element)}" if isinstance(element, tuple) else "an array"


def _stack_leaf(values):
    arrays = [_array(value) for value in values]
    _check_one_shape({array.shape for array in arrays})
    _common_type({array.dtype for array in arrays}, values)
    return standardize(np.stack(arrays))


def _common_leaf(values):
    plain = [v for v in values[1:] if hasattr(v, "dtype") or isinstance(v, _PLAIN)]
    shapes, dtypes = zip(*{_shape_and_type(value) for value in [values[0], *plain]})
    _check_one_shape(set(shapes))
    return standardize(np.zeros((1, *shapes[0]), _common_type(set(dtypes), values)))


def _shape_and_type(value):
    dtype = getattr(value, "dtype", None)
    dtype = getattr(dtype, "as_numpy_dtype", dtype)
    try:
        if dtype is not None and not is_string(np.dtype(dtype)):
            return tuple(value.shape), np.dtype(dtype)
    except TypeError:
        pass  # Another library's own name of a type.
    array = _array(value)
    return array.shape, array.dtype


def _array(value):
    try:
        array = as_array(value)
    except ValueError:
        _raise_several_shapes("lists of several lengths within one element")
    return array.astype(object) if is_string(array.dtype) else array


def _raise_several_shapes(received):
    raise SamplingError(
        "Elements of the source must have one shape each, to be stacked into a batch. Received: "
        f"{received}. Pad or resize them, in `__getitem__` of a source or before, and mask "
        "padding (`mask_zero=True`)."
    ) from None


def _check_one_shape(shapes):
    if len(shapes) > 1:
        _raise_several_shapes(f"shapes {sorted(shapes)}")


def _common_type(dtypes, values):
    strings = {dtype == object for dtype in dtypes}
    if len(strings) > 1 or any(value is None for value in values):
        raise SamplingError(
            "Elements of the source mix strings and numbers in one place, or have gaps (None). "
            f"Received: {', '.join(sorted(map(str, dtypes)))}. Fill gaps, and keep strings and "
            "numbers in parts of their own."
        )
    return np.result_type(*dtypes)
