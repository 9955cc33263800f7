# Copyright 2026 The dice_tf Authors.
# SPDX-License-Identifier: Apache-2.0
"""`check_model` refuses models that mix examples or remember data.

Per-example clipping bounds what one example does to its own gradient. A layer that
lets an example change the gradients of the others, or that stores something computed
from the batch, lets it escape that bound.
"""

from typing import Any

import keras
import keras.src
import tensorflow as tf

from dice_tf.checks.assignments import Assignments
from dice_tf.engine import memory
from dice_tf.engine.loss import call_in_training
from dice_tf.errors import LossError, ModelError

__all__ = ["check_model"]

_GRAPHS = (keras.Sequential, keras.src.models.Functional)

# Made of several images, so of no use to one alone.
_MIXES_PAIRS = (keras.layers.MixUp, keras.layers.CutMix)

# Keras takes the histogram of an Equalization, which the other two hold, over the batch.
_MIXES_HISTOGRAMS = (keras.layers.RandAugment, keras.layers.AugMix, keras.layers.Equalization)


def check_model(model: Any) -> Any:
    """Raises if a layer of the model mixes examples or remembers data.

    Args:
        model: A Keras model or layer.

    Returns:
        The model, unchanged.

    Raises:
        ModelError: Naming the layer's path, what it does and what to do about it.

    Example:

    >>> model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(2)])
    >>> check_model(model) is model
    True
    """
    for path, layer in layers_with_paths(model):
        problem = _problem(layer, model)
        if problem is not None:
            raise ModelError(f"Layer '{path}' ({type(layer).__name__}) {problem}")
    return model


def check_forward_pass(model, x):
    """Raises if a forward pass in training mode stores data or adds a loss to the batch.

    Args:
        model: A built Keras model.
        x: Inputs of a batch, as `keras.KerasTensor`s.

    Returns:
        The model's outputs, as `keras.KerasTensor`s, and the bytes that computing them for one
        row takes, see `memory.bytes_of_forward_pass`.

    Raises:
        ModelError: Naming the variables, other than random seeds and states of metrics, that
            are assigned, or the operations that assign variables of TensorFlow.
        LossError: Naming the layer that uses `add_loss`.
    """
    scope, computed = Assignments(), []

    def forward(inputs):
        with scope:
            outputs = call_in_training(model, inputs)
        graph, rows = tf.compat.v1.get_default_graph(), tf.nest.flatten(inputs)[0].shape[0]
        computed.append(memory.bytes_of_forward_pass(graph, rows))
        return outputs

    outputs = keras.src.backend.compute_output_spec(forward, x)
    for layer in model._flatten_layers():
        if any(id(loss) in layer._loss_ids for loss in scope.losses):
            raise LossError(
                f"Layer '{layer.path or layer.name}' ({type(layer).__name__}) uses `add_loss`. "
                "Such a loss is one number for the whole batch, so it cannot be clipped per "
                "example. Make it an output of the model with a loss of its own in "
                "`compile(loss=...)`; penalties on weights belong in a `kernel_regularizer`."
            )
    metrics = [metric for layer in model._flatten_layers() for metric in layer._metrics]
    assigned = scope.names(allowed=[v for metric in metrics for v in metric.variables])
    if assigned:
        raise ModelError(
            f"Model '{model.name}' assigns {assigned} during the forward pass. State "
            "computed from the data would be released without clipping or noise, and each example "
            "would see the others through it. Remove the layer that keeps it, or freeze it with "
            "`layer.trainable = False` if that stops the update."
        )
    return outputs, computed[0]


def layers_with_paths(layer):
    """Yields a layer and all below it, with the names that lead there.

    Args:
        layer: A Keras model or layer. Keras' own `path` leaves out the models around it.

    Yields:
        Pairs of a path, such as `"backbone/block1/norm"`, and a layer; each layer once.
    """
    yield layer.path or layer.name, layer
    seen, waiting = {id(layer)}, [("", layer)]
    while waiting:
        prefix, parent = waiting.pop(0)
        for child in parent._flatten_layers(recursive=False, include_self=False):
            if id(child) not in seen:
                seen.add(id(child))
                yield prefix + child.name, child
                waiting.append((f"{prefix}{child.name}/", child))


def is_graph(layer):
    """Whether a layer is a Sequential or Functional model, and calls its layers as such."""
    return isinstance(layer, _GRAPHS) and type(layer).call in [graph.call for graph in _GRAPHS]


def mixes_batch_statistics(layer):
    """Whether a layer is a BatchNormalization that is not frozen."""
    return isinstance(layer, keras.layers.BatchNormalization) and layer.trainable


def _problem(layer, model):
    if mixes_batch_statistics(layer):
        remedy = (
            "`dice_tf.fix_model(model)` replaces it by GroupNormalization"
            if is_graph(model)
            else "Or write `keras.layers.GroupNormalization(groups=1)` in its place, in the code "
            "of " + type(model).__name__
        )
        return (
            "normalises with statistics of the whole batch, so each example changes the gradients "
            "of the others. Leave it out, or, if it was pretrained, set `layer.trainable = False`. "
            f"{remedy}."
        )
    if isinstance(layer, _MIXES_PAIRS):
        return (
            "mixes each image of a batch with others, so that clipping an example does not bound "
            "what it does to the model. Leave it out: random crops, flips, rotations and erasing "
            "change each image alone."
        )
    if isinstance(layer, _MIXES_HISTOGRAMS):
        return (
            "changes each image of a batch by the others, so that clipping an example does not "
            "bound what it does to the model. Take it out of the model, and call it on one image "
            "at a time: `data.map(lambda x, y, w: (tf.map_fn(augment, x, "
            "fn_output_signature='float32'), y, w))`."
        )
    if getattr(layer, "stateful", False) and isinstance(layer, keras.layers.RNN):
        return (
            "has stateful=True: it carries state of one batch into the next, where other examples "
            "see it. Use stateful=False."
        )
    if layer.activity_regularizer is not None:
        return (
            "has an activity regularizer, whose loss is one number for the whole batch and cannot "
            "be clipped per example. Remove it, or compute the penalty in the loss function."
        )
    return None
