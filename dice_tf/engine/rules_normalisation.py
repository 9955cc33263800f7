# Copyright 2026 The dice_tf Authors.
# SPDX-License-Identifier: Apache-2.0
"""Closed forms of layers `scale * normalised(inputs) + offset`, and `scale * inputs`."""

from typing import Any

import keras
import tensorflow as tf

from dice_tf.engine.contributions import PerExample


def contributions(layer, call):
    """Returns the contributions to scale and offset."""
    scale = layer.scale if isinstance(layer, keras.layers.RMSNormalization) else layer.gamma
    offset = getattr(layer, "beta", None)
    axes = layer.axis if isinstance(layer.axis, (list, tuple)) else [layer.axis]
    kept = [axis % call.inputs.shape.rank for axis in axes]
    reduced = [axis for axis in range(1, call.inputs.shape.rank) if axis not in kept]
    add_up = lambda t: tf.reduce_sum(t, reduced) if reduced else t
    cotangents = tf.cast(call.cotangents, tf.float32)
    pairs = []
    if scale is not None:
        if _has_groups_of_last_axis(layer, call.inputs):
            sums = _sums_of_groups(layer, call, cotangents)
        else:
            sums = add_up(cotangents * _normalised(layer, call, scale, offset))
        pairs.append((scale, PerExample(sums)))
    if offset is not None:
        pairs.append((offset, PerExample(add_up(cotangents))))
    return pairs


def _normalised(layer, call, scale, offset):
    """Returns the normalised inputs, as the layer itself gives them with scale 1 and offset 0."""
    one, nothing = tf.ones(scale.shape, scale.dtype), tf.zeros(scale.shape, scale.dtype)
    with tf.control_dependencies([call.cotangents]):
        # Otherwise TensorFlow would make the normalised inputs of all layers in the forward
        # pass already. Mean and variance are those of the forward pass.
        one, nothing = tf.identity(one), tf.identity(nothing)
    values = [(scale, one)]
    if offset is not None:
        values.append((offset, nothing))
    with keras.StatelessScope(values):
        output: Any = layer.call(call.inputs)
    return tf.cast(output, tf.float32)


def _has_groups_of_last_axis(layer, inputs):
    if not isinstance(layer, keras.layers.GroupNormalization):
        return False
    return layer.axis in (-1, inputs.shape.rank - 1) and inputs.shape[1:].is_fully_defined()


def _sums_of_groups(layer, call, cotangents):
    """Returns sums of cotangents times normalised inputs over positions, `[batch, channels]`.

    A group has one variance, by which its sums are divided in place of its inputs: that spares
    a pass over them.
    """
    *positions, channels = call.inputs.shape[1:].as_list()
    shape = [-1, *positions, layer.groups, channels // layer.groups]
    # Mean and variance as the layer has them: TensorFlow takes them from the forward pass.
    dtype = keras.backend.result_type(call.inputs.dtype, "float32")
    grouped = tf.cast(tf.reshape(call.inputs, shape), dtype)
    axes = list(range(1, len(positions) + 1))
    moments: Any = keras.ops.moments(grouped, axes=[*axes, len(positions) + 2], keepdims=True)
    mean, variance = moments
    with tf.control_dependencies([call.cotangents]):
        mean = tf.identity(mean)
    products = tf.cast(tf.reshape(cotangents, shape), dtype) * (grouped - mean)
    sums = tf.reduce_sum(products, axes) if axes else products
    inverse = tf.reshape(tf.math.rsqrt(variance + layer.epsilon), [-1, layer.groups, 1])
    return tf.reshape(sums * inverse, [-1, channels])


def supports(layer, inputs):
    """Whether the closed form describes a layer on these inputs."""
    axes = layer.axis if isinstance(layer.axis, (list, tuple)) else [layer.axis]
    return inputs.shape.rank is not None and all(axis % inputs.shape.rank for axis in axes)


def scaled(layer, call):
    """Returns the contribution to the scale of ConvNeXt's `LayerScale`, `inputs * scale`."""
    products = tf.cast(call.cotangents, tf.float32) * tf.cast(call.inputs, tf.float32)
    axes = list(range(1, call.inputs.shape.rank - 1))
    return [(layer.gamma, PerExample(tf.reduce_sum(products, axes) if axes else products))]


def supports_scaled(layer, inputs):
    """Whether `scaled` describes a layer on these inputs: one factor per feature."""
    return (inputs.shape.rank or 0) > 1 and tuple(layer.gamma.shape) == (inputs.shape[-1],)
