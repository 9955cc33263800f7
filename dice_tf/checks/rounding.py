# Copyright 2026 The dice_tf Authors.
# SPDX-License-Identifier: Apache-2.0
"""What rounding does to the gradient of one example, to weigh other differences against.

A ReLU near its kink, or the larger of two near equals, is decided by the last bit. A batch
of another size sums in another order, so in a deep network some of these decisions differ,
each with a jump of the gradient. Weights and inputs that are changed by a few last bits show
how large these jumps are for an example on its own.
"""

import keras
import numpy as np
import tensorflow as tf

from dice_tf.checks.silenced_draws import silenced, silencers
from dice_tf.engine import rematerialization
from dice_tf.engine.loss import call_in_training, per_example_losses
from dice_tf.engine.overrides import overridden

DRAWS = 12
# Some last bits, because the rounding of all sums of a network comes together in a batch.
_SIZES = {"float64": 2.0**-48, "float32": 2.0**-19, "float16": 2.0**-9, "bfloat16": 2.0**-7}


def size(model):
    """Returns by how much a number is changed at most, relative to it, for the dtypes of a model.

    Args:
        model: A Keras model.
    """
    dtypes = {layer.compute_dtype for layer in model._flatten_layers()}
    return max(_SIZES.get(dtype, 0.0) for dtype in dtypes | {"float32"})


def has_fractions(x):
    """Whether some numbers of an eager nest are not whole, so that they are no indices."""
    floats = [t for t in tf.nest.flatten(x) if t is not None and t.dtype.is_floating]
    return any(bool(tf.reduce_any(tf.round(t) != t)) for t in floats)


def perturbed(x, size, seed):
    """Returns a nest of tensors with fractions changed by a few last bits.

    Args:
        x: Nest of tensors, or `None`.
        size: Float, the largest change, relative to a number.
        seed: Two ints, or an int32 tensor `[2]`.
    """
    count = iter(range(2**30))
    seed = tf.convert_to_tensor(seed, tf.int32)

    def perturb(tensor):
        if tensor is None or not tensor.dtype.is_floating:
            return tensor
        noise = tf.random.stateless_uniform(
            tf.shape(tensor), seed + [next(count), 0], -size, size, tf.float32
        )
        # Whole numbers may be indices.
        keep = tf.round(tensor) == tensor
        return tf.where(keep, tensor, tensor * tf.cast(1.0 + noise, tensor.dtype))

    return tf.nest.map_structure(perturb, x)


def perturbed_gradient(model, x, y, rows_per_unit=1):
    """Returns a function for the gradient of one example with inputs and weights perturbed.

    Args:
        model: A built and compiled Keras model.
        x: Inputs of one example, `[1, ...]`.
        y: Its targets.
        rows_per_unit: Int, if `x` holds so many rows whose mean gradient is wanted.

    Returns:
        Function `(x, y, seed) -> gradient`, as `vectors`, with `seed` an int32 tensor `[2]`.
    """
    most, variables = size(model), model.trainable_variables
    others = [v for v in model.variables if all(v is not t for t in variables)]

    def gradient(x, y, seed):
        values, rest = (
            [tf.convert_to_tensor(v.value) for v in listed] for listed in (variables, others)
        )
        values, rest, x = perturbed((values, rest, x), most, seed)
        state = [*zip(variables, values, strict=True), *zip(others, rest, strict=True)]
        with tf.GradientTape(watch_accessed_variables=False) as tape:
            tape.watch(values)
            with keras.StatelessScope(state):
                losses = per_example_losses(model, x, y, call_in_training(model, x), None)
            loss = tf.reduce_sum(losses) / rows_per_unit
        return vectors(tape.gradient(loss, values), variables)

    replaced = [*silencers(), *rematerialization.interceptions()]
    with overridden(replaced), silenced():
        seed = tf.zeros([2], tf.int32)
        return tf.function(gradient, autograph=False).get_concrete_function(x, y, seed)


def vectors(gradients, variables):
    """Returns gradients as float32 vectors, one for each variable, with zeros where there is none.

    Not as one vector: each copy would be as large as the model, and TensorFlow keeps the memory.
    """
    return [
        tf.zeros([v.shape.num_elements()])
        if g is None
        else tf.cast(tf.reshape(tf.convert_to_tensor(g), [-1]), tf.float32)
        for g, v in zip(gradients, variables, strict=True)
    ]


def norm(gradient):
    """Returns the norm of a gradient as a float, also where its square overflows."""
    norms = [_norm_of_vector(vector) for vector in gradient if vector.shape[0]]
    return float(np.linalg.norm(norms))


def _norm_of_vector(vector):
    largest = tf.reduce_max(tf.abs(vector))
    return float(largest * tf.norm(tf.math.divide_no_nan(vector, largest)))


def distance(first, second):
    """Returns the distance of two gradients: 0 if neither is finite, infinite if one is not.

    Args:
        first: List of float32 vectors.
        second: List of float32 vectors.
    """
    broken = [
        not all(tf.reduce_all(tf.math.is_finite(vector)) for vector in gradient)
        for gradient in (first, second)
    ]
    if any(broken):
        return 0.0 if all(broken) else float("inf")
    return norm(difference(first, second))


def difference(first, second, factor=1.0):
    """Yields the vectors of one gradient less a multiple of another."""
    for a, b in zip(first, second, strict=True):
        yield a - factor * b
