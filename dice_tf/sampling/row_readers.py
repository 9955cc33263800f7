# Copyright 2026 The dice_tf Authors.
# SPDX-License-Identifier: Apache-2.0
"""Arrays that are too big to copy, read by the rows of a batch: on disk, or sparse.

Such are NumPy's memory maps, data sets of h5py and arrays of Zarr, and sparse matrices.
"""

import math
import mmap

import numpy as np
from scipy import sparse
import tensorflow as tf

from dice_tf.errors import SamplingError
from dice_tf.sampling.conversion import standardize, to_array


def row_reader(name, value):
    """Returns how to read the rows of an array that is not dense in memory.

    Args:
        name: String, the argument, for messages.
        value: An array.

    Returns:
        Function from an int64 array of indices, in any order and with repetitions, to a dense
        array of these rows; `None` if the array is dense and in memory.

    Raises:
        SamplingError: If the rows are of a type that TensorFlow does not have.
    """
    if is_sparse(value):
        return _sparse_reader(name, value)
    return _disk_reader(name, value) if _is_on_disk(value) else None


def is_sparse(value):
    """Whether a value is a sparse tensor of TensorFlow or a sparse matrix of SciPy."""
    return isinstance(value, tf.SparseTensor) or sparse.issparse(value)


def _is_on_disk(value):
    if isinstance(value, np.ndarray):
        return _maps_a_file(value)
    in_memory = ("__array_interface__", "__dlpack__", "iloc")  # NumPy's, most others', pandas'.
    if tf.is_tensor(value) or any(hasattr(value, name) for name in in_memory):
        return False
    try:
        np.dtype(value.dtype)
    except (AttributeError, TypeError):
        return False
    return hasattr(value, "__getitem__") and len(getattr(value, "shape", ())) > 0


def _maps_a_file(array):
    """Whether an array is a part of a memory map, however often it was sliced."""
    while array is not None:
        if isinstance(array, (np.memmap, mmap.mmap)):
            return True
        array = array.obj if isinstance(array, memoryview) else getattr(array, "base", None)
    return False


def _disk_reader(name, value):
    def one_by_one(places):
        # Assigned, not stacked: strings of any length, as objects, stay what they are.
        rows = np.empty((len(places), *value.shape[1:]), value.dtype)
        for row, place in enumerate(places):
            rows[row] = value[int(place)]
        return rows

    ends = np.asarray(sorted({0, value.shape[0] - 1}))
    expected = one_by_one(ends)
    to_array(name, expected)
    # Not all arrays take many indices at once, and some read them as those of several axes.
    read = _many_at_once(value) if _agrees(_many_at_once(value), ends, expected) else one_by_one

    def read_rows(indices):
        # In the order of the file, each row once: h5py insists on it, and disks like it.
        places, inverse = np.unique(indices, return_inverse=True)
        return standardize(read(places))[inverse]

    return read_rows


def _many_at_once(value):
    # A plain array of a memory map is the same memory, without a subclass that finds out at
    # every slice whether it still is one.
    array = value.view(np.ndarray) if isinstance(value, np.memmap) else value
    return lambda places: np.asarray(array[places])


def _agrees(read, places, expected):
    try:
        rows = read(places)
    except (TypeError, ValueError, IndexError, KeyError, NotImplementedError):
        return False
    if rows.shape != expected.shape or rows.dtype != expected.dtype:
        return False
    if rows.dtype == object:
        return bool(np.all(rows == expected))
    # Bytes, because NaN does not equal itself.
    return rows.tobytes() == expected.tobytes()


def _sparse_reader(name, value):
    shape = tuple(int(length) for length in value.shape)
    width = math.prod(shape[1:])
    try:
        if isinstance(value, tf.SparseTensor):
            flat = tf.sparse.reshape(value, (shape[0], width))
            entries = flat.values.numpy(), flat.indices.numpy().T
            matrix = sparse.csr_array(entries, shape=(shape[0], width))
        else:
            matrix = (value if len(shape) == 2 else value.reshape(shape[0], width)).tocsr()
        matrix[:1].toarray()
    except (TypeError, ValueError) as error:
        raise SamplingError(
            f"Argument `{name}` is sparse and of a type whose rows SciPy does not read. Received: "
            f"{value.dtype}. Pass a dense array, or a source with `__getitem__`."
        ) from error
    return lambda indices: standardize(matrix[indices].toarray()).reshape(-1, *shape[1:])
