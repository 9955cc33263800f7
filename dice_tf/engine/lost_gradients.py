# Copyright 2026 The dice_tf Authors.
# SPDX-License-Identifier: Apache-2.0
"""Weights that the loss depends on, but of which an engine found no gradient.

Such a weight would silently keep its value: one that a SavedModel uses, or one that is read
where no layer call is seen. A weight that the loss does not depend on has no gradient either,
and rightly so.
"""

import weakref

import keras
import tensorflow as tf

from dice_tf.engine.loss import call_in_training, compiled_loss, per_example_losses
from dice_tf.errors import GradientEngineError

# Compiled loss -> ids of the values that it is known not to depend on.
_unreachable = weakref.WeakKeyDictionary()


def refuse_lost(model, x, y, found):
    """Raises if the loss depends on a trainable variable without a per-example gradient.

    Args:
        model: A compiled Keras model.
        x: Inputs of a batch.
        y: Its targets.
        found: Ids of the values of the variables that have one.

    Raises:
        GradientEngineError: Naming the weight and its layer.
    """
    missing = [v for v in model.trainable_variables if id(v._value) not in found]
    known = _unreachable.setdefault(compiled_loss(model), set())
    if {id(v._value) for v in missing} <= known:
        return
    for variable, gradient in zip(missing, _gradients(model, x, y, missing), strict=True):
        if gradient is not None:
            raise GradientEngineError(
                f"Weight '{variable.path}'{_layer_of(model, variable)} has no per-example "
                "gradient and would never move: the layer reads it where Keras does not see it, "
                "as a SavedModel does. Freeze the layer (`layer.trainable = False`), or build it "
                "from Keras layers."
            )
    known.update(id(v._value) for v in missing)


def _gradients(model, x, y, variables):
    """Gradients of the whole batch, of which only matters whether there are any."""
    found = []

    def differentiate(x, y):
        values = [v.value for v in variables]
        with keras.StatelessScope(), tf.GradientTape() as tape:
            losses = per_example_losses(model, x, y, call_in_training(model, x), None)
        found[:] = tape.gradient(losses, values)

    if tf.executing_eagerly():
        # Not traced: a layer may take another branch then.
        differentiate(x, y)
    else:
        tf.function(differentiate, autograph=False).get_concrete_function(x, y)
    return found


def _layer_of(model, variable):
    for layer in model._flatten_layers(include_self=False, recursive=True):
        if any(v is variable for v in layer._trainable_variables):
            return f" of layer '{layer.path or layer.name}' ({type(layer).__name__})"
    return ""
