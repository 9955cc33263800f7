# Copyright 2026 The dice_tf Authors.
# SPDX-License-Identifier: Apache-2.0
"""Random draws of a forward pass, remembered so that a layer can be recomputed.

A layer that is recomputed one example at a time must see the dropout mask that this
example had in the batch. Draws through `keras.random` are remembered with the seed they
used; a recomputation gets the example's slice of the same draw.
"""

import inspect
import threading
from typing import Any, NamedTuple

from keras.src import backend
from keras.src.random.seed_generator import SeedGenerator, draw_seed
import tensorflow as tf

from dice_tf.errors import GradientEngineError

_NAMES = (
    "normal", "uniform", "categorical", "randint", "truncated_normal", "dropout", "shuffle",
    "gamma", "binomial", "beta",
)  # fmt: skip
_current = threading.local()


class Draw(NamedTuple):
    """One call of a `keras.random` function: its name, arguments, seed and value."""

    name: str
    function: Any
    arguments: dict
    value: tf.Tensor

    def remembered(self):
        """Returns the drawn tensor; for dropout, the mask that multiplies the inputs."""
        if self.name != "dropout":
            return self.value
        return self.function(**{**self.arguments, "inputs": tf.ones_like(self.value)})


class _KnownSeed(SeedGenerator):
    """Stands in for a seed generator whose seed has been drawn already."""

    def __init__(self, seed):  # The base class would make a variable.
        self._seed = seed

    def next(self, ordered=True):
        del ordered
        return self._seed


class RecordedDraws:
    """Listener that remembers every draw of the current thread, in order."""

    def __init__(self):
        self.draws = []

    def __call__(self, name, function, arguments):
        """Draws, and remembers what was drawn."""
        arguments["seed"] = _KnownSeed(draw_seed(arguments.get("seed")))
        value = function(**arguments)
        self.draws.append(Draw(name, function, arguments, value))
        return value


class ReplayedDraws:
    """Listener that returns remembered draws in order.

    Args:
        names: Names of the draws, in order.
        values: Their values for one example, with a leading axis of size one where the
            draw was per example.
        path: Path of the layer, for errors.
    """

    def __init__(self, names, values, path):
        self._rest = list(zip(names, values, strict=True))
        self._path = path

    def __call__(self, name, function, arguments):
        """Returns the next remembered draw."""
        del function
        if not self._rest or self._rest[0][0] != name or name == "shuffle":
            raise GradientEngineError(
                f"Layer '{self._path}' draws random numbers (keras.random.{name}) that cannot be "
                "repeated for one example at a time. Draw one mask per example with a "
                "SeedGenerator of the layer, or register a rule for the layer."
            )
        value = self._rest.pop(0)[1]
        if name != "dropout":
            return value
        kept = tf.cast(value, arguments["inputs"].dtype)
        return tf.where(kept == 0, tf.zeros_like(kept), arguments["inputs"] * kept)


class listening:
    """Context manager: draws of this thread go to `listener` (`None`: as usual)."""

    def __init__(self, listener):
        self._listener = listener

    def __enter__(self):
        self._outer = getattr(_current, "listener", None)
        _current.listener = self._listener

    def __exit__(self, *exception):
        _current.listener = self._outer


def interceptions():
    """Returns replacements of `keras.random`'s functions for `overridden`."""
    return [
        (backend.random, name, lambda function, name=name: _intercepted(name, function))
        for name in _NAMES
        if hasattr(backend.random, name)
    ]


def _intercepted(name, function):
    signature = inspect.signature(function)

    def draw(*args, **kwargs):
        listener = getattr(_current, "listener", None)
        if listener is None:
            return function(*args, **kwargs)
        return listener(name, function, dict(signature.bind(*args, **kwargs).arguments))

    return draw
