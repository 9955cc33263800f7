# Copyright 2026 The dice_tf Authors.
# SPDX-License-Identifier: Apache-2.0
"""Grouped convolutions without XLA give what Keras gives, and only where TensorFlow can."""

import keras
from keras import layers as L
import numpy as np
import pytest
import tensorflow as tf

from dice_tf.engine import grouped_convolutions

GEOMETRIES = {
    "same": {"padding": "same"},
    "strides": {"padding": "same", "strides": 2},
    "valid": {"strides": (2, 1)},
    "dilated": {"padding": "same", "dilation_rate": (1, 2)},
    "by channel": {"groups": 8, "padding": "same"},
}


def model_of(layer):
    inputs = keras.Input((7, 6, 8))
    return keras.Model(inputs, layer(inputs))


def images(dtype="float32"):
    return tf.cast(np.random.default_rng(0).normal(size=(3, 7, 6, 8)), dtype)


def gradients(model, x):
    with tf.GradientTape() as tape:
        tape.watch(x)
        y = model(x)
        loss = tf.reduce_sum(tf.sin(y))
    return [y, *tape.gradient(loss, [x, *(v.value for v in model.trainable_variables)])]


def compiled_calls(function, *args):
    """Number of functions that a graph has XLA compile."""
    graph = tf.function(function, autograph=False).get_concrete_function(*args).graph
    return sum("_XlaMustCompile" in str(f.definition.attr) for f in graph._functions.values())


@pytest.mark.parametrize("name", GEOMETRIES)
def test_values_and_gradients_are_those_of_keras(name):
    keras.utils.set_random_seed(0)
    model = model_of(L.Conv2D(16, (3, 2), **{"groups": 4, **GEOMETRIES[name]}))
    expected = gradients(model, images())
    with grouped_convolutions.natively(model):
        found = gradients(model, images())
        traced = tf.function(gradients, autograph=False)(model, images())
    for got in (found, traced):
        for a, b in zip(got, expected, strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5 * np.abs(b).max())
    assert "convolution_op" not in vars(model.layers[1])


@pytest.mark.parametrize("dtype", [tf.float32, tf.bfloat16, tf.float16, tf.float64])
def test_a_precision_works_where_its_gradients_can_be_computed(dtype):
    x, kernel = images(dtype), tf.ones([3, 3, 2, 16], dtype)
    try:
        with tf.GradientTape() as tape:
            tape.watch([x, kernel])
            y = tf.nn.conv2d(x, kernel, 1, "SAME")
        tape.gradient(y, [x, kernel])
        can = True
    except (tf.errors.InvalidArgumentError, tf.errors.UnimplementedError):
        can = False
    assert grouped_convolutions._works(dtype) == can


def test_nothing_is_compiled_where_tensorflow_has_the_kernels(monkeypatch):
    # Traced only, so it need not have them here.
    monkeypatch.setattr(grouped_convolutions, "_works", lambda dtype: True)
    model = model_of(L.Conv2D(16, 3, groups=4))
    assert compiled_calls(model, images()) > 0
    with grouped_convolutions.natively(model):
        assert compiled_calls(model, images()) == 0


class Doubled(L.Conv2D):
    """Computes something else."""

    def convolution_op(self, inputs, kernel):
        return 2 * super().convolution_op(inputs, kernel)


def of_its_own():
    layer = L.Conv2D(16, 3, groups=4)
    layer.convolution_op = lambda inputs, kernel: 0 * keras.ops.conv(inputs, kernel)
    return layer


@pytest.mark.parametrize(
    "make", [lambda: Doubled(16, 3, groups=4), of_its_own, lambda: L.Conv2D(16, 3)]
)
def test_other_layers_are_left_alone(make):
    model = model_of(make())
    before = dict(vars(model.layers[1]))
    with grouped_convolutions.natively(model):
        assert vars(model.layers[1]) == before


def test_what_a_user_puts_on_the_class_is_used(monkeypatch):
    model = model_of(L.Conv2D(16, 3, groups=4))
    stock = L.Conv2D.convolution_op
    patch = lambda layer, inputs, kernel: 2 * stock(layer, inputs, kernel)
    expected = 2 * (model(images()) - model.layers[1].bias) + model.layers[1].bias
    monkeypatch.setattr(L.Conv2D, "convolution_op", patch)
    with grouped_convolutions.natively(model):
        np.testing.assert_allclose(model(images()), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", ["float16", "float64"])
def test_keras_computes_where_tensorflow_cannot(dtype, monkeypatch):
    monkeypatch.setattr(grouped_convolutions, "_works", lambda dtype: False)
    model = model_of(L.Conv2D(16, 3, groups=4, dtype=dtype))
    expected = model(images(dtype))
    with grouped_convolutions.natively(model):
        np.testing.assert_array_equal(model(images(dtype)), expected)
        assert compiled_calls(model, images(dtype)) > 0


def test_xla_compiles_the_whole_as_before():
    model = model_of(L.Conv2D(16, 3, groups=4))
    expected = model(images())
    with grouped_convolutions.natively(model):
        found = tf.function(lambda x: model(x), jit_compile=True)(images())
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5)


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__]))
