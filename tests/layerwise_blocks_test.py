# Copyright 2026 The dice_tf Authors.
# SPDX-License-Identifier: Apache-2.0
"""Blocks of image models, and recurrent layers of convolutions, equal a loop over examples."""

import unittest.mock

import keras
from keras import layers as L
from keras.src.applications import convnext
import layerwise_test
from layerwise_test import BATCH, assert_same, compiled, example_data, loop, weights
import numpy as np
import pytest
import tensorflow as tf

from dice_tf.engine import layerwise, local_gradients

IMAGE, MANY, FRAMES = (9, 8, 3), (7, 6, 12), (4, 5, 6, 2)


def image_model(block, shape):
    inputs = keras.Input(shape)
    return keras.Model(inputs, L.Dense(3)(L.GlobalAveragePooling2D()(block(inputs))))


def normalised(x):
    # In place of BatchNormalization, which mixes examples.
    return L.GroupNormalization(4)(x)


def squeezed_and_excited(x, ratio=4):
    channels = x.shape[-1]
    gate = L.GlobalAveragePooling2D(keepdims=True)(x)
    gate = L.Conv2D(channels // ratio, 1, activation="silu")(gate)
    return x * L.Conv2D(channels, 1, activation="sigmoid")(gate)


def inverted_residual(x, stride=1, squeeze=False):
    """MobileNetV2's block; with `squeeze` that of EfficientNet."""
    act = "silu" if squeeze else "relu6"
    h = L.Activation(act)(normalised(L.Conv2D(24, 1, padding="same", use_bias=False)(x)))
    if stride > 1:
        h = L.ZeroPadding2D(((0, 1), (0, 1)))(h)
    h = L.DepthwiseConv2D(
        3, strides=stride, padding="valid" if stride > 1 else "same", use_bias=False
    )(h)
    h = L.Activation(act)(normalised(h))
    h = squeezed_and_excited(h) if squeeze else h
    h = normalised(L.Conv2D(x.shape[-1], 1, padding="same", use_bias=False)(h))
    return x + h if stride == 1 else h


def dense_block(x, layers=3, growth=4):
    for _ in range(layers):
        h = L.Activation("relu")(normalised(x))
        h = L.Conv2D(4 * growth, 1, use_bias=False)(h)
        h = L.Activation("relu")(normalised(h))
        h = L.Conv2D(growth, 3, padding="same", use_bias=False)(h)
        x = L.Concatenate()([x, h])
    return L.AveragePooling2D(2)(L.Conv2D(8, 1, use_bias=False)(x))


class TwiceScaled(convnext.LayerScale):
    """A subclass that computes something else, to which the rule must not apply."""

    def call(self, x):
        return x * self.gamma**2


def convnext_block(x, multiplier=1):
    h = L.Conv2D(12 * multiplier, 7, padding="same", groups=12)(x)
    h = L.LayerNormalization(epsilon=1e-6)(h)
    h = L.Dense(12, activation="gelu")(h)
    return x + TwiceScaled(0.5, 12)(h)


def resnext_block(x):
    h = L.Conv2D(8, 1, activation="relu")(x)
    h = L.Conv2D(12, 3, padding="same", groups=4, strides=2, activation="relu")(h)
    h = L.Conv2D(12, 2, padding="same", groups=2, dilation_rate=2, use_bias=False)(h)
    return L.Conv2D(24, 3, padding="same", groups=12, strides=2)(normalised(h))


def residual_unit(x):
    h = L.Conv2D(12, 3, padding="same", activation="relu")(x)
    return L.Activation("relu")(x + L.Conv2D(12, 3, padding="same")(h))


def separable_rows(x):
    for _ in range(2):
        x = L.SeparableConv2D(8, 3, padding="same", activation="relu")(x)
    return L.Conv2D(8, 3, groups=4, activation="relu")(x)


def normalisations(x):
    for layer in (L.LayerNormalization(), L.GroupNormalization(3), L.RMSNormalization()):
        x = layer(x)
    return L.LayerNormalization(axis=[1, 3])(L.GroupNormalization(-1)(x))


def few_positions(x):
    """Layers of 16 positions and of 4, whose norms are taken together."""
    for features in (40, 24):
        x = L.Conv2D(features, 3, padding="same", activation="tanh")(x)
    x = L.AveragePooling2D(2)(x)
    for size in (1, 2, 1):
        x = L.Conv2D(12, size, padding="same", activation="tanh")(x)
    return x


def conv_lstm(cls=L.ConvLSTM2D, shape=FRAMES, **arguments):
    inputs = keras.Input(shape)
    x = cls(3, **{"kernel_size": 3, **arguments})(inputs)
    return keras.Model(inputs, L.Dense(3)(L.Flatten()(x)))


def stacked_conv_lstm():
    inputs = keras.Input(FRAMES)
    x = L.ConvLSTM2D(3, 3, padding="same", return_sequences=True)(inputs)
    x = L.LayerNormalization()(x)
    return keras.Model(inputs, L.Dense(3)(L.Flatten()(L.ConvLSTM2D(2, 2)(x))))


def from_a_state(layer, places, mask):
    """A recurrent layer with a first state, and steps left out at both ends."""
    inputs = keras.Input((5, *places, 2))
    start = L.Dense(3)(inputs[:, 0])
    steps = np.array([0, 1, 1, 0, 0], bool) if mask else np.ones(5, bool)
    seen = keras.ops.any(inputs > -100, axis=range(2, 2 + len(places) + 1)) & steps
    x = layer(inputs, initial_state=[start, 0.5 * start], mask=seen)
    return keras.Model(inputs, L.Dense(3)(L.Flatten()(x)))


def with_gaps(*stack, places=()):
    """Recurrent layers whose masks leave out steps between others, each example its own."""
    x = inputs = keras.Input((6, *places, 2))
    seen = keras.ops.any(inputs > 0.3, axis=range(2, 3 + len(places)))
    for layer in stack:
        x = layer(x, mask=seen)
    return keras.Model(inputs, L.Dense(3)(L.Flatten()(x)))


ZOO = {
    "inverted_residual": lambda: image_model(inverted_residual, MANY),
    "inverted_residual_strides": lambda: image_model(lambda x: inverted_residual(x, 2), MANY),
    "efficient_net": lambda: image_model(lambda x: inverted_residual(x, squeeze=True), MANY),
    "squeeze_and_excite": lambda: image_model(squeezed_and_excited, MANY),
    "dense_block": lambda: image_model(dense_block, MANY),
    "convnext_block": lambda: image_model(convnext.ConvNeXtBlock(12, name="block"), MANY),
    "convnext_block_subclass": lambda: image_model(convnext_block, MANY),
    "convnext_block_multiplied": lambda: image_model(lambda x: convnext_block(x, 2), MANY),
    "one_factor_for_all": lambda: image_model(convnext.LayerScale(0.5, 1), MANY),
    "resnext_block": lambda: image_model(resnext_block, (9, 8, 3)),
    "residual_unit": lambda: image_model(residual_unit, MANY),
    "separable_rows": lambda: image_model(separable_rows, IMAGE),
    "normalisations": lambda: image_model(normalisations, MANY),
    "few_positions": lambda: image_model(few_positions, (4, 4, 12)),
    "conv_lstm": conv_lstm,
    "conv_lstm_strides": lambda: conv_lstm(strides=2, use_bias=False, return_sequences=True),
    "conv_lstm_dilated": lambda: conv_lstm(
        kernel_size=2, dilation_rate=2, activation="relu", go_backwards=True),
    "conv_lstm_many_channels": lambda: conv_lstm(shape=(3, 4, 4, 9), padding="same"),
    "conv_lstm_1d": lambda: conv_lstm(L.ConvLSTM1D, (4, 6, 3), padding="same"),
    "conv_lstm_3d": lambda: conv_lstm(L.ConvLSTM3D, (3, 3, 3, 4, 2), kernel_size=2),
    "conv_lstm_stacked": stacked_conv_lstm,
    "conv_lstm_masked": lambda: from_a_state(
        L.ConvLSTM2D(3, 2, padding="same", return_sequences=True), (4, 3), mask=True),
    "conv_lstm_masked_backwards": lambda: from_a_state(
        L.ConvLSTM2D(3, 2, padding="same", go_backwards=True), (4, 3), mask=True),
    "lstm_masked_from_a_state": lambda: from_a_state(L.LSTM(3), (), mask=True),
    "lstm_masked_backwards": lambda: from_a_state(
        L.LSTM(3, go_backwards=True, return_sequences=True), (), mask=True),
    "zeros_from_a_state": lambda: from_a_state(
        L.LSTM(3, return_sequences=True, zero_output_for_mask=True), (), mask=True),
    "zeros_at_the_end": lambda: with_gaps(L.GRU(3, zero_output_for_mask=True, go_backwards=True)),
    "zeros_simple": lambda: with_gaps(
        L.SimpleRNN(3, zero_output_for_mask=True, go_backwards=True, return_sequences=True)),
    "zeros_conv_lstm": lambda: with_gaps(
        L.ConvLSTM2D(2, 2, zero_output_for_mask=True, return_sequences=True), places=(3, 3)),
    "bidirectional_masked": lambda: with_gaps(
        L.Bidirectional(L.LSTM(3, return_sequences=True)), L.Bidirectional(L.GRU(2))),
}  # fmt: skip
XLA = {
    "inverted_residual",
    "convnext_block",
    "resnext_block",
    "few_positions",
    "conv_lstm",
    "normalisations",
    "zeros_from_a_state",
}
# Norms from Gram matrices are raised by what rounding may have lost.
TOLERANCE = {"few_positions": 1e-4}
# Every layer but those that compute something else has a rule.
ONE_BY_ONE = {
    "convnext_block_subclass": {"TwiceScaled"},
    "convnext_block_multiplied": {"TwiceScaled"},
    "one_factor_for_all": {"LayerScale"},
}


@pytest.mark.parametrize("name", ZOO)
def test_equals_a_loop_over_examples(name):
    keras.utils.set_random_seed(0)
    model = compiled(ZOO[name]())
    x, y = example_data(model)
    assert len(x) == BATCH
    expected = loop(model, x, y)
    assert expected[0].min() > 0
    step = lambda x, y: layerwise.weighted_gradient_sums(model, x, y, None, weights)
    signature = [tf.TensorSpec([None, *t.shape[1:]], t.dtype) for t in (x, y)]
    with unittest.mock.patch.object(
        local_gradients, "contributions", wraps=local_gradients.contributions
    ) as one_by_one:
        found = tf.function(step, input_signature=signature, autograph=False)(x, y)
    tolerance = TOLERANCE.get(name, layerwise_test.TOLERANCE)
    assert_same(found, expected, tolerance)
    seen = {type(call.args[0].layer).__name__ for call in one_by_one.call_args_list}
    assert seen == ONE_BY_ONE.get(name, set())
    if name in XLA:
        assert_same(tf.function(step, jit_compile=True)(x, y), expected, tolerance)


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__]))
