# Copyright 2026 The dice_tf Authors.
# SPDX-License-Identifier: Apache-2.0
"""What a `train_step` of the user hands to the private step below it.

An autoencoder's `train_step` calls `super().train_step((x, x))`: the batch of `fit` has no
targets yet. So before the first step it is run on the first batch as far as the private
step, which takes note of its arguments and goes no further. Variables of Keras that are
assigned before that keep their values.
"""

import contextlib
import threading

import keras
import tensorflow as tf

from dice_tf.errors import PlainGradientsError, SamplingError
from dice_tf.ledger import provenance

_probing = threading.local()


class _Received(BaseException):
    """Leaves a `train_step` with a model and its data; no `except Exception` catches it."""


def received(model, data):
    """Returns the model and the batch that the private step receives for a batch of `fit`.

    Args:
        model: A Keras model compiled with a private optimizer.
        data: A batch as `fit` gets it.

    Raises:
        PlainGradientsError: If the model's `train_step` takes no private step.
        SamplingError: If it lost the mark of a sampler's batch.
    """
    if getattr(model.train_step, "dispatches_private_steps", False):
        return model, data
    outer = getattr(_probing, "active", False)
    _probing.active = True
    try:
        # Layers cannot be built in such a scope; then the few variables get their values back.
        with keras.StatelessScope() if model.built else values_kept(model.variables):
            model.train_step(data)
    except _Received as reached:
        _check_marks(model, data, reached.args[1])
        return reached.args
    finally:
        _probing.active = outer
    raise PlainGradientsError(
        f"The `train_step` of model '{model.name}' ({type(model).__name__}) takes no private step, "
        "so that its updates would have neither clipping nor noise. Compute targets there, leave "
        "the loss to `compile(loss=...)`, and end with `return super().train_step((x, y))`."
    )


@contextlib.contextmanager
def values_kept(variables):
    """Context after which variables have the values that they had before."""
    before = [(variable, variable.numpy()) for variable in variables]
    try:
        yield
    finally:
        for variable, value in before:
            variable.assign(value)


def note(model, data):
    """Ends a run of `received` when the private step is reached; does nothing otherwise.

    Args:
        model: The model that the step is to train.
        data: The batch of the step.
    """
    reached = _Received(model, data)
    if getattr(_probing, "active", False):
        raise reached


def check_first_marks(model, sample_weight):
    """Refuses a first step whose sample weights carry the marks of a later or of two batches.

    Args:
        model: A Keras model with a private optimizer that is built.
        sample_weight: The weights of the step, eager tensors, or `None`.

    Raises:
        SamplingError: If no accounting would ever believe that a sampler drew this batch.
    """
    if int(model.optimizer.iterations) > 0:
        return
    if int(provenance.count_marks(sample_weight, model.optimizer.mechanism.rows_per_unit)) > 1:
        raise SamplingError(
            f"The first step of model '{model.name}' is on a batch that no sampler begins with: "
            "rows of two batches were put together, or batches left out. Give each step one batch "
            "as it was drawn, and the optimizer `rows_per_unit` if examples have views. Rows "
            "beside real ones, as of a GAN, belong into a second input."
        )


def _check_marks(model, given, taken):
    size = model.optimizer.mechanism.rows_per_unit
    marks_given, marks_taken = (_marks(data, size) for data in (given, taken))
    if marks_given and marks_taken != marks_given:
        raise SamplingError(
            f"The `train_step` of model '{model.name}' lost the sampler's mark, which the sample "
            "weights of a batch carry, so no amplification could be claimed. Pass on the weights "
            "that it got, one row per example: `super().train_step((x, y, sample_weight))`. Rows "
            "put beside real ones belong into a second input."
        )


def _marks(data, rows_per_unit):
    weights = keras.utils.unpack_x_y_sample_weight(data)[2] if isinstance(data, tuple) else None
    if any(weight is None for weight in tf.nest.flatten(weights)):
        return 0
    weights = tf.nest.map_structure(tf.convert_to_tensor, weights)
    return int(provenance.count_marks(weights, rows_per_unit))
