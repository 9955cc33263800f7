# Copyright 2026 The dice_tf Authors.
# SPDX-License-Identifier: Apache-2.0
"""Per-example gradients of one layer without a closed form.

The layer is run again on one example at a time, under `tf.vectorized_map`, from the
inputs, the state and the random draws of the recorded call, and the recorded cotangents
are pulled back to its weights. The rest of the model is not recomputed.
"""

import keras
import tensorflow as tf
from tensorflow.python.ops import control_flow_util

from dice_tf.engine import random_replay, rematerialization
from dice_tf.engine.contributions import PerExample
from dice_tf.engine.overrides import overridden
from dice_tf.errors import GradientEngineError


def contributions(call, batch):
    """Returns the contributions of a recorded layer call by differentiating it.

    Args:
        call: A `LayerCall` with a list of `cotangents`, one per floating output.
        batch: Static size of the leading axis of batched tensors (`None` if unknown).

    Returns:
        List of pairs of a Keras variable and a `PerExample`; variables that the outputs
        do not depend on are missing.

    Raises:
        GradientEngineError: If the layer draws random numbers that cannot be repeated, or
            takes sparse or ragged inputs.
    """
    leaves = tf.nest.flatten((call.args, call.kwargs))
    _refuse_composite(leaves, call.path)
    sliced = [i for i, leaf in enumerate(leaves) if _is_batched(leaf, batch)]
    masks = [getattr(leaves[i], "_keras_mask", None) for i in sliced]
    names = [draw.name for draw in call.draws]
    draws = [_remembered(draw, call.path) for draw in call.draws]
    per_example = [_is_batched(value, batch) for value in draws]
    values = [tf.convert_to_tensor(v._value) for v in call.variables]
    connected = []

    def gradients_of_example(elements):
        inputs, masks_, draws_, cotangents = tf.nest.map_structure(
            lambda t: tf.expand_dims(t, 0), elements
        )
        arguments = list(leaves)
        for i, value, mask in zip(sliced, inputs, _refilled(masks_, masks), strict=True):
            if mask is not None:
                value._keras_mask = mask
            arguments[i] = value
        args, kwargs = tf.nest.pack_sequence_as((call.args, call.kwargs), arguments)
        remaining = iter(draws_)
        replayed = [next(remaining) if p else v for p, v in zip(per_example, draws, strict=True)]
        graph = tf.compat.v1.get_default_graph()
        known = len(graph.get_operations())
        with tf.GradientTape(watch_accessed_variables=False) as tape:
            tape.watch(values)
            state = [*zip(call.variables, values, strict=True), *call.state]
            listener = random_replay.ReplayedDraws(names, replayed, call.path)
            with keras.StatelessScope(state), random_replay.listening(listener):
                outputs = call.layer(*args, **{"training": call.training, **kwargs})
        _refuse_fresh_randomness(graph.get_operations()[known:], call.path)
        outputs = [
            t for t in keras.tree.flatten(outputs) if tf.is_tensor(t) and t.dtype.is_floating
        ]
        gradients = tape.gradient(outputs, values, output_gradients=cotangents)
        connected[:] = [g is not None for g in gradients]
        return [tf.convert_to_tensor(g) for g in gradients if g is not None]

    elements = (
        [leaves[i] for i in sliced],
        [m for m in masks if m is not None],
        [v for p, v in zip(per_example, draws, strict=True) if p],
        call.cotangents,
    )
    with overridden(_recomputation_overrides(call.layer)):
        gradients = tf.vectorized_map(gradients_of_example, elements, warn=False)
    used = [v for v, c in zip(call.variables, connected, strict=True) if c]
    return [(v, PerExample(g)) for v, g in zip(used, gradients, strict=True)]


def _is_batched(leaf, batch):
    return tf.is_tensor(leaf) and bool(leaf.shape.rank) and leaf.shape[0] == batch


def _refilled(present, pattern):
    present = iter(present)
    return [None if mask is None else next(present) for mask in pattern]


def _refuse_composite(leaves, path):
    for leaf in leaves:
        if isinstance(leaf, (tf.SparseTensor, tf.RaggedTensor, tf.IndexedSlices)):
            raise GradientEngineError(
                f"Layer '{path}' takes a {type(leaf).__name__}, which cannot be cut into "
                "examples. Pass dense tensors, or register a rule for the layer."
            )


def _remembered(draw, path):
    graph = getattr(draw.value, "graph", None)
    if graph is not None and graph is not tf.compat.v1.get_default_graph():
        raise GradientEngineError(
            f"Layer '{path}' draws random numbers (keras.random.{draw.name}) inside a loop or a "
            "branch, which cannot be repeated for one example at a time. Draw them before the "
            "loop, or register a rule for the layer."
        )
    return draw.remembered()


def _refuse_fresh_randomness(operations, path):
    for operation in operations:
        if "Random" in operation.type or "Multinomial" in operation.type:
            raise GradientEngineError(
                f"Layer '{path}' draws random numbers with TensorFlow's {operation.type}, which "
                "cannot be repeated for one example at a time. Use keras.random with a "
                "SeedGenerator of the layer, or register a rule for the layer."
            )


def _recomputation_overrides(layer):
    """Makes RNNs run in a form that `tf.vectorized_map` (and XLA) can convert."""
    xla = control_flow_util.GraphOrParentsInXlaContext(tf.compat.v1.get_default_graph())
    overrides = [*random_replay.interceptions(), *rematerialization.interceptions()]
    for inner in layer._flatten_layers():
        if not isinstance(inner, keras.layers.RNN):
            continue
        if hasattr(inner, "use_cudnn"):
            overrides.append((inner, "use_cudnn", lambda present: False))
        if xla:
            overrides.append((inner, "unroll", lambda present: True))
    return overrides
