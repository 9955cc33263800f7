# Copyright 2026 The dice_tf Authors.
# SPDX-License-Identifier: Apache-2.0
"""Compares a gradient engine with plain gradients of single examples, on real data.

A closed form may be wrong, a custom layer or loss may let examples see each other: both
show when the gradient of an example in a batch differs from its gradient alone. Random
layers are silenced for the comparison, because a Dropout mask depends on the batch.
"""

import inspect
import threading

import keras
import tensorflow as tf
from keras.src import backend

from dice_tf.errors import GradientEngineError
from dice_tf.per_example.loss import call_in_training, per_example_losses
from dice_tf.per_example.overrides import overridden

_EXAMPLES = 3
# Far above rounding (and above TF32 on GPUs), far below what mixing examples does.
_TOLERANCE = 0.01
_TOLERANCE_HALF_PRECISION = 0.1

_silence = threading.local()


def check_against_single_examples(model, engine, x, y):
    """Raises if the engine's gradients are not those of the examples on their own.

    Args:
        model: A built and compiled Keras model.
        engine: Function `(x, y, sample_weight, clip_weights) -> GradientSums`.
        x: Inputs of a batch; the first few examples are used.
        y: Targets of the batch.

    Raises:
        GradientEngineError: If norms or weighted sums differ by more than rounding.
    """
    x, y = (keras.tree.map_structure(lambda t: t[:_EXAMPLES], part) for part in (x, y))
    count = tf.nest.flatten(x)[0].shape[0]
    if not count:
        return
    weights = tf.constant([1.0, 0.5, 0.25][:count])
    variables = model.trainable_variables

    @tf.function(autograph=False)
    def compare():
        sums = engine(x, y, None, lambda norms: (weights, None))
        singles = [_gradients_alone(model, x, y, i, variables) for i in range(count)]
        alone = [
            tf.concat([_flat(g, v) for g, v in zip(single, variables, strict=True)], 0)
            for single in singles
        ]
        head = tf.concat([_flat(g, v) for g, v in zip(sums.head, variables, strict=True)], 0)
        return sums.norms, tf.stack(alone), head

    with overridden(_silencers()), _silenced() as draws:
        norms, alone, head = compare()
    if draws.loud:
        return
    expected = tf.norm(alone, axis=1)
    difference = tf.abs(norms - expected)
    in_sum = tf.norm(head - tf.linalg.matvec(alone, weights, transpose_a=True))
    scale = tf.reduce_max(tf.concat([norms, expected], 0))
    # A data set may begin with examples whose gradient is 0 or not finite; that is no fault.
    if not tf.math.is_finite(scale) or scale == 0:
        return
    tolerance = _tolerance(model) * scale
    if tf.reduce_max(difference) > tolerance or in_sum > tolerance:
        raise GradientEngineError(
            f"The gradients of the first {count} examples of model '{model.name}' depend on the "
            f"other examples of their batch: norms in the batch {norms.numpy().tolist()}, alone "
            f"{expected.numpy().tolist()}. A layer or a loss mixes examples (look for reductions "
            "over axis 0), or a rule registered for a layer is wrong. Without exact per-example "
            "gradients there is no privacy."
        )


def _gradients_alone(model, x, y, index, variables):
    one = lambda t: t[index : index + 1]
    x, y = (keras.tree.map_structure(one, part) for part in (x, y))
    values = [v.value for v in variables]
    with tf.GradientTape() as tape:
        losses = per_example_losses(model, x, y, call_in_training(model, x), None)
    return tape.gradient(losses, values)


def _flat(gradient, variable):
    if gradient is None:
        return tf.zeros([variable.shape.num_elements()])
    return tf.cast(tf.reshape(tf.convert_to_tensor(gradient), [-1]), tf.float32)


def _tolerance(model):
    dtypes = {layer.compute_dtype for layer in model._flatten_layers()}
    return _TOLERANCE if dtypes <= {"float32", "float64", None} else _TOLERANCE_HALF_PRECISION


class _silenced:
    """Context manager: random draws of this thread return their mean."""

    loud = False

    def __enter__(self):
        _silence.scope = self
        return self

    def __exit__(self, *exception):
        _silence.scope = None


def _silencers():
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
    if name in ("normal", "truncated_normal", "uniform"):
        low, high = (
            (arguments["minval"], arguments["maxval"])
            if name == "uniform"
            else (arguments["mean"], arguments["mean"])
        )
        dtype = arguments["dtype"] or keras.config.floatx()
        return tf.fill(arguments["shape"], tf.cast((low + high) / 2, dtype))
    # Whole numbers have no mean to stand in for them: the comparison would prove nothing.
    scope.loud = True
    return function(**arguments)
