# Copyright 2026 The dice_tf Authors.
# SPDX-License-Identifier: Apache-2.0
"""Runs grouped convolutions with TensorFlow's own kernels, where it has them.

Keras compiles `Conv2D` with `groups` with XLA on every device, because TensorFlow once had no
gradient of it on CPUs. oneDNN has, and is many times as fast. Whether it has for a precision is
tried, once. Values are the same but for rounding.
"""

import functools

import keras
import tensorflow as tf
from tensorflow.python.ops import control_flow_util

from dice_tf.engine.overrides import overridden

# Another, put on the class later, is a user's own.
_OF_KERAS = keras.layers.Conv2D.convolution_op


def natively(model):
    """Returns a context in which grouped convolutions of a model run without XLA.

    Only those of `keras.layers.Conv2D` itself: what a subclass computes is its own affair.

    Args:
        model: A Keras model.
    """
    replacements = [
        (layer, "convolution_op", functools.partial(_native, layer))
        for layer in model._flatten_layers()
        if type(layer) is keras.layers.Conv2D
        and keras.layers.Conv2D.convolution_op is _OF_KERAS
        and layer.groups > 1
        and layer.data_format == "channels_last"
        and "convolution_op" not in vars(layer)
    ]
    return overridden(replacements)


def _native(layer, of_keras):
    def convolution_op(inputs, kernel):
        graph = tf.compat.v1.get_default_graph()
        if control_flow_util.GraphOrParentsInXlaContext(graph) or not _works(inputs.dtype):
            return of_keras(inputs, kernel)
        return tf.nn.convolution(
            inputs,
            kernel,
            strides=layer.strides,
            padding=layer.padding.upper(),
            dilations=layer.dilation_rate,
        )

    return convolution_op


@functools.cache
def _works(dtype):
    """Whether TensorFlow computes a grouped convolution and its gradients on this processor."""
    with tf.init_scope(), tf.device("CPU"):
        images, kernel = tf.ones([2, 3, 3, 4], dtype), tf.ones([2, 2, 2, 6], dtype)
        geometry = {"strides": [1, 1, 1, 1], "padding": "SAME"}
        try:
            outputs = tf.nn.conv2d(images, kernel, **geometry)
            # Not by a tape, which records nothing in an `init_scope`.
            tf.raw_ops.Conv2DBackpropInput(
                input_sizes=images.shape, filter=kernel, out_backprop=outputs, **geometry
            )
            tf.raw_ops.Conv2DBackpropFilter(
                input=images, filter_sizes=kernel.shape, out_backprop=outputs, **geometry
            )
        except (tf.errors.InvalidArgumentError, tf.errors.UnimplementedError):
            return False
    return True
