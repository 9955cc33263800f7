# Copyright 2026 The dice_tf Authors.
# SPDX-License-Identifier: Apache-2.0
"""Arrays that TensorFlow can take, or an error that says what is in the way.

Messages tell types and shapes, never values: a row of the data is nobody's to print.
"""

import keras
import numpy as np
import tensorflow as tf

from dice_tf.errors import SamplingError


def standardize(array):
    """Casts float64 to the Keras default float type, as `fit` does with arrays."""
    return array.astype(keras.backend.floatx()) if array.dtype == np.float64 else array


def as_array(value):
    """Returns `np.asarray(value)`; strings that were none of NumPy's become objects.

    NumPy's own strings have one length for all and lose zero bytes at the end, such as those of
    an encoded image.
    """
    array = np.asarray(value)
    numpys_own = isinstance(value, (np.ndarray, np.generic)) and array.dtype.kind != "T"
    return array if numpys_own or not is_string(array.dtype) else np.asarray(value, dtype=object)


def is_string(dtype):
    """Whether a type is one of NumPy's strings, which TensorFlow takes as objects."""
    return dtype.kind in "SUT"


def to_array(name, value):
    """Returns an array of a type that TensorFlow has, float64 cast as `fit` does.

    Args:
        name: String, the argument, for messages.
        value: An array, a list, or whatever NumPy makes an array of.

    Raises:
        SamplingError: If rows have several lengths, or values have no type, or no single one.
    """
    try:
        array = as_array(value)
    except ValueError:
        _raise_several_lengths(name)
    except TypeError:  # Of a library that does not hand its memory out.
        _raise_no_type(name, type(value).__name__)
    if array.dtype == object:
        array = _from_objects(name, array)
    try:
        tf.as_dtype(array.dtype)
    except TypeError:
        _raise_no_type(name, array.dtype)
    return standardize(array)


def _from_objects(name, array):
    """Returns an array of Python objects as TensorFlow takes it: they must be strings."""
    try:
        return tf.convert_to_tensor(array).numpy()
    except (TypeError, ValueError):
        kinds = {type(value) for value in array.ravel()}
    if any(issubclass(kind, (list, tuple, np.ndarray)) for kind in kinds):
        _raise_several_lengths(name)
    if len(kinds) == 1:
        _raise_no_type(name, *(kind.__name__ for kind in kinds))
    raise SamplingError(
        f"Argument `{name}` holds values of several types, and a tensor has one. Received: "
        f"{', '.join(sorted(kind.__name__ for kind in kinds))}. Fill gaps. Of a DataFrame pass a "
        "dict of columns, `{name: x[name].to_numpy() for name in x}`, and join them in `map` or "
        'in the model; or `x.astype("float32")`, if all are numbers.'
    )


def _raise_several_lengths(name):
    raise SamplingError(
        f"Argument `{name}` must be an array of numbers or strings, with rows of one length. Pad "
        "them and mask the padding (`mask_zero=True`). Received: rows of several lengths."
    ) from None


def _raise_no_type(name, received):
    raise SamplingError(
        f"Argument `{name}` has values of a type that tensors do not have. Turn dates into "
        "numbers, and records into a dict of columns, `{name: x[name] for name in x.dtype.names}`. "
        f"Received: {received}."
    ) from None
