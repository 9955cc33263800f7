# Copyright 2026 The dice_tf Authors.
# SPDX-License-Identifier: Apache-2.0
"""Batches as dense tensors, which per-example gradients are computed from.

Sparse ones are made dense, as the layers of Keras do with them. Ragged ones are refused: only
who has the data knows how to pad them. No message shows rows.
"""

import keras
from scipy import sparse
import tensorflow as tf

from dice_tf.errors import SamplingError
from dice_tf.sampling.conversion import standardize


def to_dense(name, batch):
    """Returns a part of a batch with dense tensors in place of its leaves.

    Args:
        name: String, `x`, `y` or `sample_weight`, for messages.
        batch: Nest of tensors, arrays, sparse tensors or SciPy's sparse matrices, or `None`, also
            within the nest.

    Raises:
        SamplingError: If some leaf is ragged.
    """
    return keras.tree.map_structure(lambda leaf: _dense_leaf(name, leaf), batch)


def densify(name, batch):
    """Does the same with what `train_on_batch` receives, and leaves all that is dense alone."""
    convert = lambda leaf: _dense_leaf(name, leaf) if _is_special(leaf) else leaf
    return keras.tree.map_structure(convert, batch)


def check_dense(given):
    """Refuses ragged rows, which no private step can stack, before the first step.

    Args:
        given: Dict of the arguments of `fit`.

    Raises:
        SamplingError: If some part of the data is ragged.
    """
    for name in ("x", "y", "sample_weight"):
        data = given.get(name)
        parts = data.element_spec if isinstance(data, tf.data.Dataset) else data
        for leaf in tf.nest.flatten(parts):
            _check_not_ragged(name, leaf)


def _is_special(leaf):
    return isinstance(leaf, (tf.RaggedTensor, tf.SparseTensor)) or sparse.issparse(leaf)


def _dense_leaf(name, leaf):
    if leaf is None:
        return None
    _check_not_ragged(name, leaf)
    if sparse.issparse(leaf):
        leaf = standardize(leaf.toarray())
    if isinstance(leaf, tf.SparseTensor):
        # In any order: SciPy's matrices need not have theirs sorted.
        dense = tf.sparse.to_dense(tf.sparse.reorder(leaf))
        return tf.ensure_shape(dense, leaf.shape)
    return tf.convert_to_tensor(leaf)


def _check_not_ragged(name, leaf):
    if isinstance(leaf, (tf.RaggedTensor, tf.RaggedTensorSpec)):
        dtype = leaf.dtype.name
        raise SamplingError(
            "Ragged rows cannot be stacked into a batch of per-example gradients. Pad them, "
            "`x.to_tensor()` for arrays or in a `map` of the data set, and mask the padding "
            f"(`mask_zero=True`). Received: a ragged tensor in `{name}`, {dtype} of shape "
            f"{leaf.shape}."
        )
