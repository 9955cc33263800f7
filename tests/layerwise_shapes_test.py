# Copyright 2026 The dice_tf Authors.
# SPDX-License-Identifier: Apache-2.0
"""Closed forms under many shapes, strides, paddings and token repeats."""

import unittest.mock

from hypothesis import given, settings
from hypothesis import strategies as st
import keras
from keras import layers as L
import numpy as np
import pytest
import tensorflow as tf

from dice_tf.engine import layerwise, rules, rules_conv, rules_normalisation

sizes = st.integers(1, 3)


def check(layer, x):
    """Compares norms and a weighted sum with batches of one example."""
    model = keras.Sequential([keras.Input(x.shape[1:], dtype=x.dtype), layer, L.Flatten()])
    model.compile(loss="mse")
    y = np.random.RandomState(1).randn(*model.compute_output_shape(x.shape)).astype("float32")
    model._compile_loss.build(y, y)
    weights = tf.range(1.0, len(x) + 1.0)
    sums = layerwise.weighted_gradient_sums(
        model, tf.constant(x), tf.constant(y), None, lambda norms: (weights, None)
    )
    squares, want = [], 0.0
    for i in range(len(x)):
        with tf.GradientTape() as tape:
            # Not model(...): its loss is written out, independently of loss.py.
            loss = tf.reduce_mean(tf.square(model(x[i : i + 1]) - y[i : i + 1]))
        gradients = [
            np.asarray(tf.convert_to_tensor(g), "float64")
            for g in tape.gradient(loss, [v.value for v in model.trainable_variables])
        ]
        squares.append(sum((g**2).sum() for g in gradients))
        want = [
            w + (i + 1) * g for w, g in zip(want or [0] * len(gradients), gradients, strict=True)
        ]
    np.testing.assert_allclose(sums.norms, np.sqrt(squares), rtol=1e-5)
    for got, expected in zip(sums.head, want, strict=True):
        np.testing.assert_allclose(got, expected, rtol=1e-5, atol=1e-5 * np.sqrt(max(squares)))


@settings(max_examples=25, deadline=None, derandomize=True, database=None)
@given(
    rank=sizes, kernel=st.lists(sizes, min_size=3, max_size=3), stride=sizes, dilation=sizes,
    padding=st.sampled_from(["valid", "same"]), channels=st.sampled_from([1, 2, 4, 8]),
    groups=st.sampled_from([1, 2]), extra=st.lists(st.integers(0, 4), min_size=3, max_size=3),
    depthwise=st.booleans(), seed=st.integers(0, 9),
)  # fmt: skip
def test_convolutions(
    rank, kernel, stride, dilation, padding, channels, groups, extra, depthwise, seed
):
    dilation = 1 if stride > 1 else dilation
    kernel = kernel[:rank]
    spatial = [(k - 1) * dilation + 1 + e for k, e in zip(kernel, extra, strict=False)]
    arguments = {
        "kernel_size": kernel, "strides": stride, "padding": padding, "dilation_rate": dilation,
    }  # fmt: skip
    if depthwise and rank < 3:
        layer = [L.DepthwiseConv1D, L.DepthwiseConv2D][rank - 1](depth_multiplier=2, **arguments)
    else:
        # TensorFlow has no gradient for groups in three dimensions on CPU.
        groups = groups if channels % groups == 0 and rank < 3 and dilation == 1 else 1
        layer = [L.Conv1D, L.Conv2D, L.Conv3D][rank - 1](4, groups=groups, **arguments)
    x = np.random.RandomState(seed).randn(3, *spatial, channels).astype("float32")
    check(layer, x)


@settings(max_examples=15, deadline=None, derandomize=True, database=None)
@given(
    rank=st.integers(1, 2), kernel=sizes, stride=sizes, dilation=sizes, multiplier=sizes,
    padding=st.sampled_from(["valid", "same"]), channels=st.integers(1, 4),
    extra=st.lists(st.integers(0, 4), min_size=2, max_size=2), bias=st.booleans(),
)  # fmt: skip
def test_separable_convolutions(
    rank, kernel, stride, dilation, multiplier, padding, channels, extra, bias
):
    dilation = 1 if stride > 1 else dilation
    spatial = [(kernel - 1) * dilation + 1 + e for e in extra[:rank]]
    layer = [L.SeparableConv1D, L.SeparableConv2D][rank - 1](
        3, kernel, strides=stride, padding=padding, dilation_rate=dilation, activation="tanh",
        depth_multiplier=multiplier, use_bias=bias,
    )  # fmt: skip
    x = np.random.RandomState(0).randn(3, *spatial, channels).astype("float32")
    assert rules.rule_for(layer, layer.call, (tf.constant(x),), {})
    check(layer, x)


@settings(max_examples=15, deadline=None, derandomize=True, database=None)
@given(
    kernel=st.lists(st.integers(1, 4), min_size=2, max_size=2), largest=st.integers(4, 7),
    rank=st.integers(1, 2), stride=sizes, multiplier=sizes, channels=sizes,
    padding=st.sampled_from(["valid", "same"]),
    extra=st.lists(st.integers(0, 5), min_size=2, max_size=2),
)  # fmt: skip
def test_large_depthwise_kernels(
    kernel, largest, rank, stride, multiplier, channels, padding, extra
):
    kernel = [largest, *kernel][:rank]
    layer = [L.DepthwiseConv1D, L.DepthwiseConv2D][rank - 1](
        kernel, strides=stride, padding=padding, depth_multiplier=multiplier
    )
    if padding == "same":
        # Down to a single pixel.
        spatial = [1 + e for e in extra[:rank]]
    else:
        spatial = [k + e for k, e in zip(kernel, extra, strict=False)]
    x = np.random.RandomState(0).randn(3, *spatial, channels).astype("float32")
    with unittest.mock.patch.object(rules_conv, "_apart", wraps=rules_conv._apart) as as_kernel:
        check(layer, x)
    assert as_kernel.called


@pytest.mark.parametrize(
    ("rank", "size", "kernel", "padded_by"),
    [
        (2, 2, 3, "VALID"),
        (2, 3, 3, "VALID"),
        (2, 4, 3, "SAME"),
        (1, 1, 2, "VALID"),
        (1, 3, 2, "SAME"),
    ],
)
def test_small_images_are_padded_before_a_depthwise_gradient(rank, size, kernel, padded_by):
    """TensorFlow takes many times as long for them if it pads as it reads."""
    layer = [L.DepthwiseConv1D, L.DepthwiseConv2D][rank - 1](kernel, padding="same")
    image = tf.TensorSpec([None, *[size] * rank, 8])
    layer.build(image.shape)
    traced = tf.function(
        lambda x, c: rules_conv._depthwise_gradients(layer, layer.kernel.shape, x, c)
    ).get_concrete_function(image, image)
    operations = [op for op in traced.graph.get_operations() if "BackpropFilter" in op.type]
    assert [op.get_attr("padding") for op in operations] == [padded_by.encode()]


@settings(max_examples=15, deadline=None, derandomize=True, database=None)
@given(
    kernel=st.lists(st.integers(1, 5), min_size=2, max_size=2),
    strides=st.lists(st.integers(1, 4), min_size=2, max_size=2),
    extra=st.lists(st.integers(0, 3), min_size=2, max_size=2),
    padding=st.sampled_from(["valid", "same"]), channels=st.integers(1, 4),
)  # fmt: skip
def test_kernels_on_few_channels_go_row_by_row(kernel, strides, extra, padding, channels):
    spatial = [5 * s + k + e for s, k, e in zip(strides, kernel, extra, strict=True)]
    layer = L.Conv2D(4, kernel, strides=strides, padding=padding)
    x = np.random.RandomState(0).randn(3, *spatial, channels).astype("float32")
    with unittest.mock.patch.object(
        rules_conv, "_written_by_rows", wraps=rules_conv._written_by_rows
    ) as by_rows:
        check(layer, x)
    assert by_rows.called


@settings(max_examples=10, deadline=None, derandomize=True, database=None)
@given(length=st.integers(1, 8), vocabulary=st.integers(1, 5), dim=sizes, seed=st.integers(0, 9))
def test_repeated_tokens(length, vocabulary, dim, seed):
    ids = np.random.RandomState(seed).randint(0, vocabulary, (3, length)).astype("int32")
    check(L.Embedding(vocabulary, dim), ids)


@settings(max_examples=10, deadline=None, derandomize=True, database=None)
@given(shape=st.lists(st.integers(1, 5), min_size=1, max_size=4), units=sizes)
def test_dense_of_any_rank(shape, units):
    x = np.random.RandomState(0).randn(3, *shape).astype("float32")
    check(L.Dense(units, activation="tanh"), x)


@settings(max_examples=10, deadline=None, derandomize=True, database=None)
@given(shape=st.lists(st.integers(2, 4), min_size=2, max_size=3), data=st.data())
def test_layer_normalization_over_any_axes(shape, data):
    axes = data.draw(st.sets(st.integers(1, len(shape)), min_size=1))
    x = np.random.RandomState(0).randn(3, *shape).astype("float32")
    check(L.LayerNormalization(axis=sorted(axes), epsilon=0.1), x)


@pytest.mark.parametrize("sizes_known", [True, False])
@pytest.mark.parametrize(("dtype", "mean"), [("float32", 10), ("float64", 1e6)])
def test_groups_of_images_of_any_size_and_mean(sizes_known, dtype, mean):
    """Also where float32 would lose what float64 tells from the mean."""
    layer = L.GroupNormalization(2, dtype=dtype)
    layer.build((None, None, None, 8))
    rng = np.random.RandomState(0)
    for variable in layer.weights:
        variable.assign(rng.randn(*variable.shape))
    x = tf.constant(mean + rng.randn(3, 6, 5, 8), dtype)
    cotangents = tf.constant(rng.randn(3, 6, 5, 8), dtype)

    def gradients(x, cotangents):
        call = unittest.mock.Mock(inputs=x, cotangents=cotangents)
        pairs = rules_normalisation.contributions(layer, call)
        return {variable.name: part.gradients for variable, part in pairs}

    spec = tf.TensorSpec([None, 6, 5, 8] if sizes_known else [None, None, None, 8], dtype)
    got = tf.function(gradients, [spec, spec])(x, cotangents)
    for i in range(3):
        with tf.GradientTape() as tape:
            output = layer(x[i : i + 1])
        weights = {v.name: v.value for v in layer.weights}
        for name, want in tape.gradient(output, weights, cotangents[i : i + 1]).items():
            np.testing.assert_allclose(got[name][i], want, rtol=1e-4, atol=1e-4)


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__]))
