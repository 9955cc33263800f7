# Copyright 2026 The dice_tf Authors.
# SPDX-License-Identifier: Apache-2.0
r"""The loop of a recurrent layer over time, with a backward pass that only does what is asked.

Keras' loop is differentiated by TensorFlow, operation by operation. That starts from a list of
zeros as large as all gates, adds a list with one entry to it at every step, and keeps every
value in between. Here a step keeps what goes into its activations, \(z_t\), and the states. The
backward pass computes the activations again, and hands out \(\partial L / \partial z_t\) step by
step. The product with the recurrent weights is done once each way.
"""

import functools
import inspect
from typing import Any, NamedTuple

import keras
from keras import ops
import tensorflow as tf
from tensorflow.python.eager import record as tf_record


class Cell(NamedTuple):
    r"""A recurrent cell in three parts.

    Attributes:
        sums: From gates \(x_t W + b\) and \(h_{t-1} U\) to \(z_t\), what activations get.
        states: From the Keras cell, \(z_t\) and the old states to the new ones, of which the
            first is the output.
        recurrent: From the gradient of \(z_t\) to that of \(h_{t-1} U\).
        gates: The same, to that of the gates.
    """

    sums: Any
    states: Any
    recurrent: Any
    gates: Any


def supports(layer, mask):
    """Whether the loop here does what that of Keras would do."""
    cell = layer.cell
    functions = cell.activation, getattr(cell, "recurrent_activation", None)
    # Others, and layers in their place, may read weights, which only Keras' loop lets one see.
    stock = lambda f: f is None or (inspect.isfunction(f) and f.__module__.startswith("keras."))
    known = all(map(stock, functions))
    return known and type(cell) in CELLS and not layer.unroll and (
        mask is None or mask.shape.rank == 2
    )  # fmt: skip


def inner_loop(layer, sequences, initial_state, mask=None, training=False):
    """Stands in for the method of that name of a layer that is run on its gates.

    Args:
        layer: SimpleRNN, LSTM or GRU.
        sequences: Gates, `[batch, time, ...]`.
        initial_state: List of tensors, `[batch, units]`.
        mask: `None` or `[batch, time]`.
        training: Not used; dropout is not supported.

    Returns:
        What the method returns: the last output, all outputs `[batch, time, units]` in the order
        of the loop, and the last states.
    """
    del training
    cell, mask = layer.cell, None if mask is None else tf.cast(mask, tf.bool)
    # Outside, so that they are seen to be read by this layer, and not by the loop.
    read: Any = ops.convert_to_tensor
    kernel = tf.cast(read(cell.recurrent_kernel), sequences.dtype)
    bias = None
    if cell.use_bias and isinstance(cell, keras.layers.GRUCell):
        bias = tf.cast(read(cell.bias), sequences.dtype)[1]
    loop = _Loop(CELLS[type(cell)], cell, kernel, bias, mask, layer.go_backwards)
    run = tf.custom_gradient(lambda *given: _run(loop, *given))
    outputs, *states = run(sequences, *tf.nest.flatten(initial_state))
    shape = [*sequences.shape[:2], cell.units]
    outputs = tf.ensure_shape(tf.transpose(outputs, [1, 0, 2]), shape)
    if mask is not None:
        # Keras puts out zeros until the first step that is not masked.
        seen = tf.reverse(mask, [1]) if layer.go_backwards else mask
        started = tf.cumsum(tf.cast(seen, tf.int32), 1)[..., None] > 0
        outputs = tf.where(started, outputs, tf.zeros_like(outputs))
    return outputs[:, -1], outputs, states


class _Loop(NamedTuple):
    """What stays the same at all steps."""

    parts: Cell
    cell: Any
    kernel: Any
    bias: Any
    mask: Any
    backwards: bool

    def place(self, step, steps):
        """Returns where in time a step of the loop is."""
        return steps - 1 - step if self.backwards else step

    def sums(self, gates, output):
        """Returns what goes into the activations of a step."""
        product = tf.matmul(output, self.kernel)
        return self.parts.sums(gates, product if self.bias is None else product + self.bias)

    def states(self, sums, old, place):
        """Returns the states after a step."""
        new = self.parts.states(self.cell, sums, old)
        if self.mask is None:
            return new
        taken = self.mask[:, place, None]
        return [tf.where(taken, n, o) for n, o in zip(new, old, strict=True)]


def _run(loop, gates, *initial):
    """Returns all outputs `[time, batch, units]` and the last states, and their gradient."""
    steps, initial = tf.shape(gates)[1], list(initial)
    array = lambda like, size: tf.TensorArray(
        gates.dtype, size, element_shape=like, clear_after_read=False
    )

    def step_forward(step, states, kept, seen):
        place = loop.place(step, steps)
        sums = loop.sums(gates[:, place], states[0])
        states = loop.states(sums, states, place)
        seen = [a.write(step + 1, s) for a, s in zip(seen, states, strict=True)]
        return step + 1, states, kept.write(step, sums), seen

    with tf_record.stop_recording():
        first = loop.sums(gates[:, 0], initial[0])  # For its shape, not computed.
        seen = [array(s.shape, steps + 1).write(0, s) for s in initial]
        _, last, kept, seen = tf.while_loop(
            lambda step, *_: step < steps,
            step_forward,
            (tf.constant(0), initial, array(first.shape, steps), seen),
            maximum_iterations=steps,
        )
        outputs = seen[0].stack()[1:]

    def pull_back(of_outputs, *of_last):
        def step_back(step, of_states, of_gates):
            place = loop.place(step, steps)
            of_states = [of_states[0] + of_outputs[step], *of_states[1:]]
            sums, old = kept.read(step), [a.read(step) for a in seen]
            with tf.GradientTape(watch_accessed_variables=False) as tape:
                tape.watch([sums, *old])
                new = loop.states(sums, old, place)
            of_sums, *of_old = tape.gradient(
                new, [sums, *old], of_states, tf.UnconnectedGradients.ZERO
            )
            of_product = loop.parts.recurrent(of_sums)
            of_old[0] += tf.matmul(of_product, loop.kernel, transpose_b=True)
            return step - 1, of_old, of_gates.write(place, loop.parts.gates(of_sums))

        _, of_initial, of_gates = tf.while_loop(
            lambda step, *_: step >= 0,
            step_back,
            (steps - 1, list(of_last), array(gates.shape[:1] + gates.shape[2:], steps)),
            maximum_iterations=steps,
        )
        return tf.transpose(of_gates.stack(), [1, 0, 2]), *of_initial

    return (outputs, *last), pull_back


def _simple_states(cell, sums, old):
    del old
    return [_activated(cell.activation, sums)]


def _lstm_states(cell, sums, old):
    enter, forget, candidate, leave = tf.split(sums, 4, 1)
    gate = functools.partial(_activated, cell.recurrent_activation)
    carry = gate(forget) * old[1] + gate(enter) * _activated(cell.activation, candidate)
    return [gate(leave) * _activated(cell.activation, carry), carry]


def _gru_sums(gates, product):
    update, reset, candidate = tf.split(gates, 3, 1)
    of_update, of_reset, inner = tf.split(product, 3, 1)
    return tf.concat([update + of_update, reset + of_reset, candidate, inner], 1)


def _gru_states(cell, sums, old):
    update, reset, candidate, inner = tf.split(sums, 4, 1)
    update, reset = (_activated(cell.recurrent_activation, t) for t in (update, reset))
    candidate = _activated(cell.activation, candidate + reset * inner)
    return [update * old[0] + (1 - update) * candidate]


def _activated(function, tensor):
    return tensor if function is None else function(tensor)


def _without(sums, block):
    """Gradients of the sums of a GRU without one of their four blocks."""
    parts = tf.split(sums, 4, 1)
    return tf.concat([*parts[:block], *parts[block + 1 :]], 1)


def _same(tensor):
    return tensor


CELLS = {
    keras.layers.SimpleRNNCell: Cell(tf.add, _simple_states, _same, _same),
    keras.layers.LSTMCell: Cell(tf.add, _lstm_states, _same, _same),
    keras.layers.GRUCell: Cell(
        _gru_sums,
        _gru_states,
        functools.partial(_without, block=2),
        functools.partial(_without, block=3),
    ),
}
