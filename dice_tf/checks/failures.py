# Copyright 2026 The dice_tf Authors.
# SPDX-License-Identifier: Apache-2.0
"""What it means that a few examples, or one alone, cannot be computed at all.

A loss that takes negatives from its batch fails on a batch that has none. That is no fault
of the batch: it tells that examples depend on each other.
"""

from typing import Any, NoReturn

import tensorflow as tf

from dice_tf.engine.loss import call_in_training, per_example_losses
from dice_tf.errors import DicePrivacyError, GradientEngineError


def both(model, together, alone, few, one, whole):
    """Returns the results of two functions, or raises what their failure means.

    Args:
        model: A built and compiled Keras model.
        together: Function without arguments that computes on a few examples.
        alone: Function of what `together` returned that computes on single examples.
        few: The few examples `(x, y)`.
        one: One of them.
        whole: The batch `(x, y)` that they are from.

    Returns:
        Pair of the results.

    Raises:
        GradientEngineError: If examples depend on each other so that few or one cannot be
            computed where a whole batch can, or if the engine cannot where Keras can.
    """
    results, error = _attempt(together)
    if error is None:
        singles, error = _attempt(lambda: alone(results))
        if error is None:
            return results, singles
        if _attempt(lambda: _losses(model, *one))[1] is None:
            raise error
        _refuse_dependence(model, "one of them alone", error, whole)
    if _attempt(lambda: _losses(model, *few))[1] is None:
        # An engine may run every example as a batch of its own.
        if _attempt(lambda: _losses(model, *one))[1] is not None:
            _refuse_dependence(model, "one of them alone", error, whole)
        raise GradientEngineError(
            f"The gradient engine cannot compute model '{model.name}', which Keras can. Set "
            "gradient_engine='vectorized', or 'layerwise' if it is that already. Received: "
            f"{_first_line(error)}"
        ) from error
    if _attempt(lambda: _losses(model, *whole))[1] is not None:
        raise error
    _refuse_dependence(model, f"{_rows(few)} of them", error, whole)


def _refuse_dependence(model, which, error, whole) -> NoReturn:
    raise GradientEngineError(
        f"Examples of model '{model.name}' depend on each other: a layer or the loss can be "
        f"computed for a batch of {_rows(whole)} examples, but not for {which}. Make negatives "
        "from the batch an input of each example, drawn in `map`, and write no batch size into a "
        f"layer. Received: {_first_line(error)}"
    ) from error


def _attempt(function) -> tuple[Any, Exception | None]:
    """Returns a result and `None`, or `None` and the error."""
    try:
        return function(), None
    except (DicePrivacyError, tf.errors.ResourceExhaustedError):
        raise
    except Exception as error:  # Whatever a layer or loss of the user raises.
        return None, error


def _losses(model, x, y):
    run = lambda x, y: per_example_losses(model, x, y, call_in_training(model, x), None)
    return tf.function(run, autograph=False)(x, y)


def _rows(batch):
    return tf.nest.flatten(batch)[0].shape[0]


def _first_line(error):
    text = str(getattr(error, "message", error)).strip().splitlines() or [""]
    return f"{type(error).__name__}: {text[0][:200]}"
