# Copyright 2026 The dice_tf Authors.
# SPDX-License-Identifier: Apache-2.0
r"""The closed form of ConvLSTM1D, ConvLSTM2D and ConvLSTM3D: a convolution at every time step.

The gates are \(W * x_t + b + U * h_{t-1}\). As in `rules_recurrent`, the layer runs on the
sequence \(W * x_t + b\), one convolution for all steps. Its cotangents, with the patches of
\(x_t\) and \(h_{t-1}\), give the gradients: the places of all time steps are positions.
"""

import math
from typing import Any, NamedTuple

from keras import ops
import tensorflow as tf

from dice_tf.engine import rules_conv, rules_recurrent
from dice_tf.engine.contributions import OuterProduct, PerExample


class _Geometry(NamedTuple):
    """What `rules_conv` asks of a convolution."""

    rank: int
    kernel_size: tuple
    strides: tuple
    dilation_rate: tuple
    padding: str


def supports(layer, inputs):
    """Whether the closed form describes a layer as it is configured."""
    cell = layer.cell
    return (
        cell.data_format == "channels_last"
        and inputs.shape.rank == cell.rank + 3
        and inputs.shape[1:].is_fully_defined()
        and rules_recurrent.is_plain(layer)
    )


def run(layer, function, args, kwargs, watch):
    """Runs a layer on what its inputs contribute to the gates.

    Args:
        layer: ConvLSTM1D, ConvLSTM2D or ConvLSTM3D.
        function: Its `call`.
        args: Positional arguments of the call.
        kwargs: Keyword arguments of the call.
        watch: Function from a tensor to the same tensor, whose cotangent is wanted.

    Returns:
        Pair of the layer's output and what `contributions` needs to remember.
    """
    cell, inputs = layer.cell, args[0]
    folded = tf.reshape(inputs, [-1, *inputs.shape[2:]])
    gates: Any = ops.conv(
        folded,
        cell.kernel,
        strides=cell.strides,
        padding=cell.padding,
        data_format="channels_last",
        dilation_rate=cell.dilation_rate,
    )
    if cell.use_bias:
        gates += ops.cast(cell.bias, gates.dtype)
    gates = tf.reshape(gates, [-1, inputs.shape[1], *gates.shape[1:]])
    return rules_recurrent.run_on_gates(layer, function, watch(gates), args, kwargs, _step)


def contributions(layer, call):
    """Returns the contributions of a layer to its weights."""
    cell, cotangents = layer.cell, tf.cast(call.cotangents, tf.float32)
    before, gates = rules_recurrent.outputs_before(layer, call), cotangents
    if layer.go_backwards:
        # The sequence of outputs is in the order of the loop, the gates in that of time.
        gates = tf.reverse(cotangents, [1])
    steps = (cell.strides, cell.dilation_rate, cell.padding)
    ones = (1,) * cell.rank
    products: list[Any] = [
        (cell.kernel, _product(cell, cell.kernel, call.inputs, cotangents, *steps)),
        (cell.recurrent_kernel,
         _product(cell, cell.recurrent_kernel, before, gates, ones, ones, "same")),
    ]  # fmt: skip
    if cell.use_bias:
        axes = list(range(1, cotangents.shape.rank - 1))
        products.append((cell.bias, PerExample(tf.reduce_sum(cotangents, axes))))
    return products


def _product(cell, kernel, inputs, cotangents, strides, dilation, padding):
    geometry = _Geometry(cell.rank, cell.kernel_size, strides, dilation, padding)
    folded = tf.reshape(inputs, [-1, *inputs.shape[2:]])
    patches, transposed = rules_conv.patches_of(geometry, folded)
    if transposed:
        patches = tf.linalg.matrix_transpose(patches)
    positions = math.prod(cotangents.shape[1:-1])
    return OuterProduct(
        tf.reshape(patches, [-1, positions, patches.shape[-1]]),
        tf.reshape(cotangents, [-1, positions, cotangents.shape[-1]]),
        shape=kernel.shape,
    )


def _step(cell, gates, states, training=False):
    del training
    before, carry = states
    gates += cell.recurrent_conv(before, cell.recurrent_kernel)
    parts: Any = ops.split(gates, 4, axis=-1)
    enter, forget, candidate, leave = parts
    carry = cell.recurrent_activation(forget) * carry
    carry += cell.recurrent_activation(enter) * cell.activation(candidate)
    output = cell.recurrent_activation(leave) * cell.activation(carry)
    return output, [output, carry]
