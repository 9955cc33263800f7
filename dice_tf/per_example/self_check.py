# Copyright 2026 The dice_tf Authors.
# SPDX-License-Identifier: Apache-2.0
"""Compares a gradient engine with plain gradients of single examples, on real data.

A closed form may be wrong, a custom layer or loss may let examples see each other: both
show when the gradient of an example in a batch differs from its gradient alone. Random
layers are silenced for the comparison, because a Dropout mask depends on the batch.
"""

import inspect
import threading
import warnings

import keras
import numpy as np
import tensorflow as tf
from keras.src import backend

from dice_tf.errors import GradientEngineError, UncheckedGradientsWarning
from dice_tf.per_example.loss import call_in_training, per_example_losses
from dice_tf.per_example.overrides import overridden

_WEIGHTS = (1.0, 0.5, 0.25)  # One per example that is compared at a time.
_CANDIDATES = 32
# Far above rounding (and above TF32 on GPUs), far below what mixing examples does.
_TOLERANCE = 0.01
_TOLERANCE_HALF_PRECISION = 0.1
# Squares of smaller norms are 0 in float32, squares of larger ones infinite.
_SMALLEST, _LARGEST = 1e-15, 1e15

_silence = threading.local()


def check_against_single_examples(model, engine, x, y, sample_weight=None, jit_compile=False):
    """Raises if the engine's gradients are not those of the examples on their own.

    Args:
        model: A built and compiled Keras model.
        engine: Function `(x, y, sample_weight, clip_weights) -> GradientSums`.
        x: Inputs of a batch; a few different examples are used.
        y: Targets of the batch.
        sample_weight: `None`, or the weights of the batch: examples of weight 0 are not used.
        jit_compile: Whether the engine is compiled with XLA.

    Returns:
        Whether that is settled. `False` if this batch has nothing to compare: no example of
        nonzero weight, or only gradients that are 0 or not finite.

    Raises:
        GradientEngineError: If norms or weighted sums differ by more than rounding, or are
            finite in the batch and not alone, or the reverse.
    """
    groups = _groups_of_different_examples(x, y, sample_weight)
    if not groups:
        return False
    x, y = (_map(lambda t: tf.gather(t, sum(groups, [])), part) for part in (x, y))
    count = len(groups[0])
    if count == 1:
        # All examples are alike. One that differs keeps it company, for a layer to mix it with.
        count = 2
        x, y = (_map(lambda t: tf.stack([t[0], tf.zeros_like(t[0])]), part) for part in (x, y))
        if len(set(_keys(x, count))) < count:
            return False
        groups = groups[:1]
    weights = tf.constant(_WEIGHTS[:count])
    variables = model.trainable_variables

    def compare(x, y):
        clip = lambda norms: (tf.where(tf.math.is_finite(norms), weights, 0.0), None)
        run = lambda x, y: engine(x, y, None, clip)
        sums = (tf.function(run, jit_compile=True, autograph=False) if jit_compile else run)(x, y)
        singles = [_gradients_alone(model, x, y, i, variables) for i in range(count)]
        alone = tf.stack([_flat(single, variables) for single in singles])
        largest = tf.reduce_max(tf.abs(alone), axis=1)
        expected = largest * tf.norm(tf.math.divide_no_nan(alone, largest[:, None]), axis=1)
        alone = tf.where(tf.math.is_finite(sums.norms)[:, None], alone, 0.0)
        sum_alone = tf.linalg.matvec(alone, clip(sums.norms)[0], transpose_a=True)
        return sums.norms, expected, tf.norm(_flat(sums.head, variables) - sum_alone)

    group = lambda n: (_map(lambda t: t[n * count : (n + 1) * count], part) for part in (x, y))
    with overridden(_silencers()), _silenced() as draws:
        # The concrete function, because TensorFlow warns of functions that are traced anew.
        compare = tf.function(compare, autograph=False).get_concrete_function(*group(0))
    if draws.loud:
        warnings.warn(
            f"The gradients of model '{model.name}' were not compared with those of single "
            f"examples: a layer draws with keras.random.{draws.loud}, whose draws cannot be made "
            "the same for one example and for several. Make sure that it does not mix examples.",
            UncheckedGradientsWarning,
            stacklevel=2,
        )
        return True
    return any(_agree(model, *compare(*group(n))) for n in range(len(groups)))


def warn_unchecked(model, batches):
    """Warns that nothing could be compared.

    Args:
        model: A Keras model.
        batches: Int, the number of batches tried.
    """
    warnings.warn(
        f"The gradients of model '{model.name}' could not be compared with those of single "
        "examples, so it is not known whether a layer or the loss mixes examples: they were 0 or "
        f"not finite, or there was no example, in all batches tried. Batches tried: {batches}. "
        "Call `dice_tf.check_gradients(model, batch)` with another one.",
        UncheckedGradientsWarning,
        stacklevel=3,
    )


def _agree(model, norms, expected, in_sum):
    """Whether the gradients agree; `False` if they decide nothing; raises if they differ."""
    norms, expected, in_sum = norms.numpy(), expected.numpy(), float(in_sum)
    finite = np.isfinite(norms) & np.isfinite(expected)
    # How large a gradient may get before its norm is infinite is up to the formula.
    too_large = ~np.isfinite(norms) & np.isfinite(expected) & (expected > _LARGEST)
    one_only = (np.isfinite(norms) != np.isfinite(expected)) & ~too_large
    scale = max(norms[finite].max(initial=0), expected[finite].max(initial=0))
    if scale < _SMALLEST and not one_only.any():
        return False
    tolerance = _tolerance(model) * scale
    difference = np.abs(norms - expected)[finite].max(initial=0)
    if one_only.any() or difference > tolerance or not in_sum <= tolerance:
        raise GradientEngineError(
            f"The gradients of {len(norms)} examples of model '{model.name}' depend on the "
            f"other examples of their batch: norms in the batch {norms.tolist()}, alone "
            f"{expected.tolist()}. A layer or a loss mixes examples (look for reductions "
            "over axis 0; one that has nothing to reduce for a single example, such as a standard "
            "deviation or a range, gives nan or inf alone), or a rule registered for a layer is "
            "wrong. Without exact per-example gradients there is no privacy."
        )
    return True


def _groups_of_different_examples(x, y, sample_weight):
    """Returns lists of indices of one length: examples of nonzero weight, inputs all different."""
    live = np.flatnonzero(_is_live(x, sample_weight))[:_CANDIDATES]
    x_keys, y_keys = (_keys(_map(lambda t: tf.gather(t, live), part), len(live)) for part in (x, y))
    groups, left = [], list(range(len(live)))
    while left:
        group = []
        while len(group) < len(_WEIGHTS):
            taken = {x_keys[i] for i in group}
            fresh = [i for i in left if x_keys[i] not in taken]
            if not fresh:
                break
            # Other targets as well where possible: a loss may mix those.
            seen = {y_keys[i] for i in group}
            group.append(next((i for i in fresh if y_keys[i] not in seen), fresh[0]))
            left.remove(group[-1])
        if groups and len(group) < len(groups[0]):
            break
        groups.append(group)
    return [live[group].tolist() for group in groups]


def _is_live(x, sample_weight):
    weights, count = tf.nest.flatten(sample_weight), tf.nest.flatten(x)[0].shape[0]
    if not count or any(weight is None for weight in weights):
        return np.ones(count, bool)
    return np.any([np.any(np.reshape(w, [count, -1]) != 0, axis=1) for w in weights], axis=0)


def _keys(structure, count):
    """Returns one value per example, equal for equal examples."""
    leaves = [np.asarray(t) for t in tf.nest.flatten(structure) if t is not None]
    # Texts are objects, whose bytes are addresses.
    key = lambda row: repr(row.tolist()) if row.dtype == object else row.tobytes()
    return [tuple(key(np.asarray(leaf[i])) for leaf in leaves) for i in range(count)]


def _map(function, structure):
    return tf.nest.map_structure(lambda t: t if t is None else function(t), structure)


def _gradients_alone(model, x, y, index, variables):
    x, y = (_map(lambda t: t[index : index + 1], part) for part in (x, y))
    values = [v.value for v in variables]
    with tf.GradientTape() as tape:
        losses = per_example_losses(model, x, y, call_in_training(model, x), None)
    return tape.gradient(losses, values)


def _flat(gradients, variables):
    return tf.concat(
        [
            tf.zeros([v.shape.num_elements()])
            if g is None
            else tf.cast(tf.reshape(tf.convert_to_tensor(g), [-1]), tf.float32)
            for g, v in zip(gradients, variables, strict=True)
        ],
        0,
    )


def _tolerance(model):
    dtypes = {layer.compute_dtype for layer in model._flatten_layers()}
    return _TOLERANCE if dtypes <= {"float32", "float64", None} else _TOLERANCE_HALF_PRECISION


class _silenced:
    """Context manager: random draws of this thread return their mean, or one possible value."""

    loud = None  # Name of a draw for which there is no such value.

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
