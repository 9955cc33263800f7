# Copyright 2026 The dice_tf Authors.
# SPDX-License-Identifier: Apache-2.0
"""Random draws replaced by their mean, so that a batch and single examples see the same.

A Dropout mask depends on the batch it is drawn for. Where gradients are compared, draws
through `keras.random` return their mean, or one possible value.
"""

import inspect
import threading

import keras
from keras.src import backend
import tensorflow as tf

_silence = threading.local()


class silenced:
    """Context manager: random draws of this thread return their mean, or one possible value."""

    loud = None  # Name of a draw for which there is no such value.

    def __enter__(self):
        self._outer = getattr(_silence, "scope", None)
        _silence.scope = self
        return self

    def __exit__(self, *exception):
        _silence.scope = self._outer


def silencers():
    """Returns replacements of `keras.random`'s functions for `overridden`."""

    def silencer(name):
        def make(function):
            signature = inspect.signature(function)

            def draw(*args, **kwargs):
                scope = getattr(_silence, "scope", None)
                if scope is None:
                    return function(*args, **kwargs)
                bound = signature.bind(*args, **kwargs)
                bound.apply_defaults()
                return _mean_of_draw(scope, name, function, bound.arguments)

            return draw

        return backend.random, name, make

    names = ("dropout", "normal", "truncated_normal", "uniform", "randint", "categorical",
             "gamma", "beta", "binomial", "shuffle")  # fmt: skip
    return [silencer(name) for name in names if hasattr(backend.random, name)]


def _mean_of_draw(scope, name, function, arguments):
    if name == "dropout":
        return arguments["inputs"]
    if name == "shuffle":
        # Without it the examples that it mixes would stay apart, with it they differ from alone.
        scope.loud = name
        return function(**arguments)
    if name == "categorical":
        rows = tf.shape(arguments["logits"])[0]
        return tf.zeros([rows, arguments["num_samples"]], arguments["dtype"])
    value = {
        "normal": lambda mean, **_: mean,
        "truncated_normal": lambda mean, **_: mean,
        "uniform": lambda minval, maxval, **_: (minval + maxval) / 2,
        "randint": lambda minval, **_: minval,
        "gamma": lambda alpha, **_: alpha,
        "beta": lambda alpha, beta, **_: alpha / (alpha + beta),
        "binomial": lambda counts, probabilities, **_: counts * probabilities,
    }[name](**arguments)
    dtype = arguments["dtype"] or keras.config.floatx()
    return tf.broadcast_to(tf.cast(value, dtype), arguments["shape"])
