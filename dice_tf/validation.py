# Copyright 2026 The dice_tf Authors.
# SPDX-License-Identifier: Apache-2.0
"""`check_model` refuses models that mix examples; `fix_model` repairs the usual case.

Per-example clipping bounds what one example does to its own gradient. A layer that
lets an example change the gradients of the others, or that stores something computed
from the batch, lets it escape that bound.
"""

from typing import Any

import keras

from dice_tf.errors import LossError, ModelError
from dice_tf.per_example.assignments import Assignments
from dice_tf.per_example.loss import call_in_training

# The two choices that Wu & He (2018) found best. A group of one channel is of no use: without
# positions to average over it is a constant, and with them their mean is.
_MOST_GROUPS, _CHANNELS_PER_GROUP = 32, 16

# Keras takes the histogram of an Equalization, which RandAugment and AugMix hold, over the batch.
_MIXES_IMAGES = (keras.layers.MixUp, keras.layers.CutMix, keras.layers.Equalization)


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
    for layer in model._flatten_layers():
        problem = _problem(layer)
        if problem is not None:
            raise ModelError(
                f"Layer '{layer.path or layer.name}' ({type(layer).__name__}) {problem}"
            )
    return model


def check_forward_pass(model, x):
    """Raises if a forward pass in training mode stores data or adds a loss to the batch.

    Args:
        model: A built Keras model.
        x: Inputs of a batch, as `keras.KerasTensor`s.

    Returns:
        The model's outputs, as `keras.KerasTensor`s.

    Raises:
        ModelError: Naming the variables, other than random seeds and states of metrics, that
            are assigned, or the operations that assign variables of TensorFlow.
        LossError: Naming the layer that uses `add_loss`.
    """
    scope = Assignments()

    def forward(inputs):
        with scope:
            return call_in_training(model, inputs)

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
    return outputs


def fix_model(model: keras.Model) -> keras.Model:
    """Returns a copy in which every BatchNormalization is a GroupNormalization.

    GroupNormalization normalises each example on its own: images in groups of 16 channels
    or more, vectors in one group. The other layers keep their configuration and weights;
    the replaced ones start anew, because batch statistics have no meaning for them.

    Args:
        model: A Sequential or Functional Keras model.

    Returns:
        A new, uncompiled model that passes `check_model` if BatchNormalization was the
        only problem.

    Raises:
        ModelError: If the model has another problem, or cannot be cloned.

    Example:

    >>> model = keras.Sequential([
    ...     keras.Input((8, 8, 4)), keras.layers.Conv2D(6, 3), keras.layers.BatchNormalization()])
    >>> [type(layer).__name__ for layer in fix_model(model).layers]
    ['Conv2D', 'GroupNormalization']

    Source: Wu and He, "Group normalization", ECCV 2018.
    """
    try:
        fixed = keras.models.clone_model(model, clone_function=_without_batch_statistics)
    except ValueError as error:
        raise ModelError(
            f"Model '{model.name}' ({type(model).__name__}) cannot be rebuilt by fix_model; "
            "replace its BatchNormalization layers by GroupNormalization yourself. "
            f"Keras says: {error}"
        ) from error
    for old, new in zip(model.layers, fixed.layers, strict=True):
        if type(old) is type(new) and old.weights:
            new.set_weights(old.get_weights())
    return check_model(fixed)


def _problem(layer):
    if isinstance(layer, keras.layers.BatchNormalization) and layer.trainable:
        return (
            "normalises with statistics of the whole batch, so each example changes the gradients "
            "of the others. Leave it out, use `dice_tf.fix_model(model)` to replace it by "
            "GroupNormalization, or, if it was pretrained, set `layer.trainable = False`."
        )
    if isinstance(layer, _MIXES_IMAGES):
        return (
            "changes each image of a batch by the others, so that clipping an example does not "
            "bound what it does to the model. Leave it out, or apply it to each example alone."
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


def _without_batch_statistics(layer):
    if not isinstance(layer, keras.layers.BatchNormalization):
        return layer.__class__.from_config(layer.get_config())
    return keras.layers.GroupNormalization(
        groups=_groups(layer),
        axis=layer.axis,
        epsilon=layer.epsilon,
        center=layer.center,
        scale=layer.scale,
        name=layer.name,
    )


def _groups(layer):
    channels = layer.moving_mean.shape[0]
    # Units of a dense layer have no order that would make some of them a group.
    most = 1 if layer.input_spec.ndim == 2 else min(_MOST_GROUPS, channels // _CHANNELS_PER_GROUP)
    return max((g for g in range(1, most + 1) if channels % g == 0), default=1)
