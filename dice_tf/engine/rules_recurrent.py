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

import keras
from keras import ops
import tensorflow as tf

from dice_tf.engine.contributions import OuterProduct, PerExample
from dice_tf.engine.overrides import shallow_copy


def supports(layer, inputs):
    """Whether the closed form describes a layer as it is configured."""
    cell = layer.cell
    return (
        type(cell) in _STEPS
        and inputs.shape.rank == 3
        and not (layer.return_state or layer.stateful or layer.zero_output_for_mask)
        and not (cell.dropout or cell.recurrent_dropout)
        and getattr(cell, "reset_after", True)
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
    cell = layer.cell
    gates = ops.matmul(args[0], cell.kernel)
    if cell.use_bias:
        gates += cell.bias[0] if isinstance(cell, keras.layers.GRUCell) else cell.bias
    gates = watch(gates)
    # Copies, because other threads may run the layer as it is.
    on_gates, cell_on_gates = shallow_copy(layer), shallow_copy(cell)
    vars(cell_on_gates)["call"] = functools.partial(_STEPS[type(cell)], cell)
    vars(on_gates).update(cell=cell_on_gates, return_sequences=True, use_cudnn=False)
    sequence = function.__func__(on_gates, gates, *args[1:], **kwargs)
    wanted = sequence if layer.return_sequences else sequence[:, -1]
    return wanted, (gates, sequence)


def contributions(layer, call):
    """Returns the contributions of a recurrent layer to its weights."""
    cell = layer.cell
    (gates, sequence), cotangents = call.remembered, tf.cast(call.cotangents, tf.float32)
    initial = call.kwargs.get("initial_state", call.args[1] if len(call.args) > 1 else None)
    before = tf.zeros_like(sequence[:, 0]) if initial is None else tf.nest.flatten(initial)[0]
    before = tf.concat([tf.cast(before, sequence.dtype)[:, None], sequence[:, :-1]], 1)
    recurrent = cotangents
    if layer.go_backwards:
        # The sequence of outputs is in the order of the loop, the gates in that of time.
        gates, recurrent = tf.reverse(gates, [1]), tf.reverse(cotangents, [1])
    before = tf.cast(before, tf.float32)
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
    products = [
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


def _simple_step(cell, gates, states, training=False):
    del training
    (before,) = tf.nest.flatten(states)
    output = gates + ops.matmul(before, cell.recurrent_kernel)
    output = output if cell.activation is None else cell.activation(output)
    return output, [output]


def _lstm_step(cell, gates, states, training=False):
    del training
    before, carry = states
    gates += ops.matmul(before, cell.recurrent_kernel)
    enter, forget, candidate, leave = ops.split(gates, 4, axis=1)
    carry = cell.recurrent_activation(forget) * carry
    carry += cell.recurrent_activation(enter) * cell.activation(candidate)
    output = cell.recurrent_activation(leave) * cell.activation(carry)
    return output, [output, carry]


def _gru_step(cell, gates, states, training=False):
    del training
    (before,) = tf.nest.flatten(states)
    inner = ops.matmul(before, cell.recurrent_kernel)
    if cell.use_bias:
        inner += cell.bias[1]
    update, reset, candidate = ops.split(gates, 3, axis=1)
    inner_update, inner_reset, inner_candidate = ops.split(inner, 3, axis=1)
    update = cell.recurrent_activation(update + inner_update)
    reset = cell.recurrent_activation(reset + inner_reset)
    candidate = cell.activation(candidate + reset * inner_candidate)
    output = update * before + (1 - update) * candidate
    return output, [output]


_STEPS = {
    keras.layers.SimpleRNNCell: _simple_step,
    keras.layers.LSTMCell: _lstm_step,
    keras.layers.GRUCell: _gru_step,
}
