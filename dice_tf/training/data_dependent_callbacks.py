# Copyright 2026 The dice_tf Authors.
# SPDX-License-Identifier: Apache-2.0
"""Callbacks that let the private data decide when training stops, or what is kept.

The accountant knows how many steps were taken, and assumes that the data had no say in it.
Losses and metrics of training batches are computed from examples without noise: a rule
that stops by them tells about these examples, and epsilon does not cover it.
"""

import warnings

import keras

from dice_tf.errors import DataDependentChoiceWarning

# Of what may be monitored in the logs of training: these depend on no example.
_PUBLIC = ("epsilon", "learning_rate")


def warn_of(callbacks):
    """Warns of callbacks of a private `fit` that decide by metrics of the training data.

    Metrics of validation data are left alone: whether those examples are outside the
    guarantee only the user knows. So are callbacks that write metrics down.

    Args:
        callbacks: List of Keras callbacks.
    """
    found = [f"{type(c).__name__} by '{decides_by(c)}'" for c in callbacks if decides_by(c)]
    if found:
        warnings.warn(
            "Metrics of the training data, which have no noise, decide in this `fit` when it stops "
            f"or what it keeps, and epsilon does not cover that: {', '.join(found)}. Monitor a "
            "metric of data outside the guarantee (validation_data=..., monitor='val_loss'), or "
            "leave the callback out. Examples with NaN gradients contribute nothing anyway.",
            DataDependentChoiceWarning,
            stacklevel=4,
        )


def decides_by(callback):
    """Returns the training metric that a callback decides by, or `None`.

    Args:
        callback: A Keras callback.

    Example:

    >>> decides_by(keras.callbacks.EarlyStopping(monitor="loss"))
    'loss'
    >>> decides_by(keras.callbacks.EarlyStopping(monitor="val_loss")) is None
    True
    """
    if isinstance(callback, keras.callbacks.TerminateOnNaN):
        return "loss"
    deciding = keras.callbacks.EarlyStopping, keras.callbacks.ReduceLROnPlateau
    # Older versions of Keras have no `OrbaxCheckpoint`.
    saving = keras.callbacks.ModelCheckpoint, getattr(keras.callbacks, "OrbaxCheckpoint", ())
    decides = isinstance(callback, deciding) or (
        isinstance(callback, saving) and callback.save_best_only
    )
    private = decides and not callback.monitor.startswith("val_")
    return callback.monitor if private and callback.monitor not in _PUBLIC else None
