# Copyright 2026 The dice_tf Authors.
# SPDX-License-Identifier: Apache-2.0
r"""Closed forms of SimpleRNN, LSTM and GRU: every time step is a position.

A recurrent layer adds \(x_t W + b\) to \(h_{t-1} U\), so the gradient of what the inputs
contribute, \(\delta_t\), gives \(g_W = \sum_t x_t^\top \delta_t\) and
\(g_U = \sum_t h_{t-1}^\top \delta_t\). The layer is therefore run on the sequence
\(x_t W + b\), computed outside its loop over time, and \(\delta\) comes from the one
backward pass.
"""

import functools
from typing import Any

import keras
from keras import ops
import tensorflow as tf

from dice_tf.engine import recurrent_loop
from dice_tf.engine.contributions import OuterProduct, PerExample
from dice_tf.engine.overrides import shallow_copy


def supports(layer, inputs):
    """Whether the closed form describes a layer as it is configured."""
    cell = layer.cell
    return (
        type(cell) in recurrent_loop.CELLS
        and inputs.shape.rank == 3
        and is_plain(layer)
        and getattr(cell, "reset_after", True)
    )


def is_plain(layer):
    """Whether a layer has outputs that are states or zeros, and nothing that is drawn or kept."""
    return not (
        layer.return_state
        or layer.stateful
        # There Keras takes the mask of a reversed sequence in the wrong order.
        or (layer.zero_output_for_mask and layer.unroll)
        or layer.cell.dropout
        or layer.cell.recurrent_dropout
    )


def run(layer, function, args, kwargs, watch):
    """Runs a recurrent layer on what its inputs contribute to the gates.

    Args:
        layer: SimpleRNN, LSTM or GRU.
        function: Its `call`.
        args: Positional arguments of the call.
        kwargs: Keyword arguments of the call.
        watch: Function from a tensor to the same tensor, whose cotangent is wanted.

    Returns:
        Pair of the layer's output and what `contributions` needs to remember: the sequence
        of gate inputs and that of outputs, in the order of time.
    """
    cell, bias = layer.cell, layer.cell.bias
    gates: Any = ops.matmul(args[0], cell.kernel)
    if cell.use_bias:
        gates += bias[0] if isinstance(cell, keras.layers.GRUCell) else bias
    return run_on_gates(layer, function, watch(gates), args, kwargs, _step)


def run_on_gates(layer, function, gates, args, kwargs, step):
    """Runs the loop of a layer on the sequence of what its inputs contribute to the gates.

    Args:
        layer: Recurrent layer.
        function: Its `call`.
        gates: `[batch, time, ...]`.
        args: Positional arguments of the call.
        kwargs: Keyword arguments of the call.
        step: What its cell does in place of `call`: a function of the cell, gates and states.

    Returns:
        Pair of the layer's output and the sequences of gates and states, in the order of time.
    """
    # Copies, because other threads may run the layer as it is.
    on_gates, cell_on_gates = shallow_copy(layer), shallow_copy(layer.cell)
    vars(cell_on_gates).update(call=functools.partial(step, layer.cell), _input_spec=None)
    vars(on_gates).update(
        cell=cell_on_gates, return_sequences=True, use_cudnn=False, zero_output_for_mask=False
    )
    mask = _given(args, kwargs).get("mask")
    if recurrent_loop.supports(layer, mask):
        vars(on_gates).update(inner_loop=functools.partial(recurrent_loop.inner_loop, layer))
    sequence = wanted = function.__func__(on_gates, gates, *args[1:], **kwargs)
    if layer.zero_output_for_mask and mask is not None:
        # Put out in place of states, of which the next step takes the last one nevertheless.
        shown = _along(mask, sequence, layer.go_backwards)
        wanted = tf.where(shown, sequence, tf.zeros_like(sequence))
    return wanted if layer.return_sequences else wanted[:, -1], (gates, sequence)


def _given(args, kwargs):
    """Arguments of the call of a recurrent layer by name."""
    return {**dict(zip(("sequences", "initial_state", "mask"), args, strict=False)), **kwargs}


def _along(mask, sequence, backwards):
    """A mask in the order of the loop, with as many axes as a sequence."""
    mask = tf.cast(tf.reverse(mask, [1]) if backwards else mask, tf.bool)
    return tf.reshape(mask, [*tf.unstack(tf.shape(mask)[:2]), *[1] * (sequence.shape.rank - 2)])


def contributions(layer, call):
    """Returns the contributions of a recurrent layer to its weights."""
    cell = layer.cell
    (gates, _), cotangents = call.remembered, tf.cast(call.cotangents, tf.float32)
    before = outputs_before(layer, call)
    recurrent = cotangents
    if layer.go_backwards:
        # The sequence of outputs is in the order of the loop, the gates in that of time.
        gates, recurrent = tf.reverse(gates, [1]), tf.reverse(cotangents, [1])
    if isinstance(cell, keras.layers.GRUCell):
        # The reset gate multiplies what the last column block of U gives.
        columns = slice(cell.units, 2 * cell.units)
        reset = tf.matmul(before, tf.convert_to_tensor(cell.recurrent_kernel.value)[:, columns])
        reset += tf.cast(gates, tf.float32)[..., columns]
        if cell.use_bias:
            reset += tf.convert_to_tensor(cell.bias.value)[1, columns]
        reset = cell.recurrent_activation(reset)
        recurrent = tf.concat(
            [recurrent[..., : 2 * cell.units], reset * recurrent[..., 2 * cell.units :]], -1
        )
    products: list[Any] = [
        (cell.kernel, OuterProduct(call.inputs, cotangents, shape=cell.kernel.shape)),
        (cell.recurrent_kernel,
         OuterProduct(before, recurrent, shape=cell.recurrent_kernel.shape)),
    ]  # fmt: skip
    if cell.use_bias:
        bias = tf.reduce_sum(cotangents, 1)
        if isinstance(cell, keras.layers.GRUCell):
            bias = tf.stack([bias, tf.reduce_sum(recurrent, 1)], 1)
        products.append((cell.bias, PerExample(bias)))
    return products


def outputs_before(layer, call):
    """Returns the output before every time step, float32 `[batch, time, ...]`, as looped over."""
    given = _given(call.args, call.kwargs)
    initial, mask, (_, sequence) = given.get("initial_state"), given.get("mask"), call.remembered
    sequence = tf.cast(sequence, tf.float32)
    first = tf.zeros_like(sequence[:, :1])
    if initial is None:
        return tf.concat([first, sequence[:, :-1]], 1)
    first = tf.cast(tf.nest.flatten(initial)[0], tf.float32)[:, None]
    if mask is not None:
        # Keras puts out zeros until the first step that is not masked, but keeps the state.
        seen = _along(mask, sequence, layer.go_backwards)
        started = tf.cumsum(tf.cast(seen, tf.int32), 1) > 0
        sequence = tf.where(started, sequence, first)
    return tf.concat([first, sequence[:, :-1]], 1)


def _step(cell, gates, states, training=False):
    """Does what a cell does, on what its inputs contribute to the gates."""
    del training
    parts, old = recurrent_loop.CELLS[type(cell)], tf.nest.flatten(states)
    product: Any = ops.matmul(old[0], cell.recurrent_kernel)
    bias: Any = cell.bias
    if bias is not None and isinstance(cell, keras.layers.GRUCell):
        product += bias[1]
    new = parts.states(cell, parts.sums(gates, product), old)
    return new[0], new
