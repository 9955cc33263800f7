# Copyright 2026 The dice_tf Authors.
# SPDX-License-Identifier: Apache-2.0
"""`class_weight` of `fit`: one weight per example, from its class.

Keras takes the largest target as the class, whatever the targets are, and refuses
`class_weight` next to sample weights, which every batch of a sampler has. Here targets that
name no class are refused, and a sampler's weights are multiplied.
"""

import contextlib

import keras
import numpy as np
import tensorflow as tf

from dice_tf.errors import SamplingError

# By this text an error is known again that comes out of `tf.data`.
_NO_CLASS = "Targets name no single class"


def with_class_weights(x, y, class_weight, is_sampled):
    """Returns what `fit` is to train on, with its targets checked and weighted.

    Args:
        x: What `fit` received as `x`.
        y: What it received as `y`.
        class_weight: Dict from class to a weight that is at least 0. A class that it lacks has
            weight 1.
        is_sampled: Whether `x` is a sampler's data set of `(x, y, sample_weight)`. Its weights
            are multiplied; otherwise Keras will apply `class_weight`.

    Returns:
        `x`, or a data set in its place. What it raises is typed within `typed_errors`.

    Raises:
        SamplingError: If `class_weight` is no such dict, or targets are not of one class each:
            several outputs, several labels per example, numbers that are no classes.
    """
    pairs = class_weight.items() if isinstance(class_weight, dict) else [(None, None)]
    if not all(_is_class(c) and _is_weight(w) for c, w in pairs):
        raise SamplingError(
            "Argument `class_weight` must be a dict from classes to weights that are at least 0. "
            f"Received: class_weight={class_weight!r}."
        )
    if isinstance(x, tf.data.Dataset):

        def weighted(*batch):
            inputs, targets, weights = keras.utils.unpack_x_y_sample_weight(batch)
            of_class = _weights(_classes(targets), class_weight)
            if not is_sampled:
                with tf.control_dependencies([of_class]):
                    return (inputs, tf.identity(targets), *batch[2:])
            # A zero keeps its sign, which carries the provenance mark.
            product = lambda w: w * tf.cast(of_class, w.dtype)
            return inputs, targets, tf.nest.map_structure(product, weights)

        return x.map(tf.autograph.experimental.do_not_convert(weighted))
    if y is not None:
        with typed_errors():
            _classes(y)
    return x


@contextlib.contextmanager
def typed_errors():
    """Context of a `fit`: what its targets raise within `tf.data` becomes a `SamplingError`."""
    try:
        yield
    except tf.errors.InvalidArgumentError as error:
        if _NO_CLASS in error.message:
            _refuse("targets with several labels per example, or that are no whole numbers")
        raise


def _is_class(value):
    return isinstance(value, (int, float, np.number)) and float(value).is_integer()


def _is_weight(value):
    return isinstance(value, (int, float, np.number)) and np.isfinite(value) and value >= 0


def _classes(targets):
    """Returns the class of every example, int64 `[batch]`."""
    if targets is None or tf.nest.is_nested(targets) and not _is_rows(targets):
        _refuse(f"targets in a {type(targets).__name__}")
    targets = tf.convert_to_tensor(targets)
    if targets.shape.rank not in (1, 2) or targets.dtype == tf.string:
        _refuse(f"targets of shape {tuple(targets.shape)} and dtype {targets.dtype.name}")
    values = tf.cast(targets, tf.float32)
    if targets.shape.rank == 1 or targets.shape[1] == 1:
        values = tf.reshape(values, [-1])
        fits, classes = values == tf.round(values), values
    else:
        # One-hot, or nearly so (label smoothing). Of others Keras would take the first largest.
        one = tf.abs(tf.reduce_sum(values, 1) - 1.0) < 1e-3
        fits = one & tf.reduce_all(values >= 0, 1) & (tf.reduce_max(values, 1) > 0.5)
        classes = tf.argmax(values, 1)
    with tf.control_dependencies([tf.debugging.Assert(tf.reduce_all(fits), [_NO_CLASS])]):
        return tf.cast(classes, tf.int64)


def _is_rows(targets):
    return isinstance(targets, list) and not hasattr(targets[0], "shape")


def _weights(classes, class_weight):
    keys = tf.constant(list(map(int, class_weight)), tf.int64)
    matches = classes[:, None] == keys
    weights = tf.where(matches, tf.constant(list(map(float, class_weight.values()))), 0.0)
    return tf.where(tf.reduce_any(matches, 1), tf.reduce_sum(weights, 1), 1.0)


def _refuse(received):
    raise SamplingError(
        "Argument `class_weight` needs one output, whose targets are one class per example: whole "
        f"numbers, or one-hot rows. Received: {received}. Otherwise compute one weight per example "
        "yourself: `sampling.dataset(x, y, sample_weight=weights)`, a structure of them for "
        "several outputs."
    )
