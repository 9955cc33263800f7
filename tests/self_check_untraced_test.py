# Copyright 2026 The dice_tf Authors.
# SPDX-License-Identifier: Apache-2.0
"""The check runs stock models untraced; whose code may tell a graph from no graph, it traces."""

import keras
import numpy as np
import pytest
import tensorflow as tf

import dice_tf
from dice_tf.checks import self_check, silenced_draws
from dice_tf.engine import PerExample, register_rule, rules
from dice_tf.engine.overrides import overridden
from dice_tf.errors import GradientEngineError

LAYERS = keras.layers
RANDOM = np.random.default_rng(0)
X = RANDOM.normal(size=(12, 6)).astype("float32")
Y = np.arange(12) % 3
CROSS_ENTROPY = keras.losses.SparseCategoricalCrossentropy(from_logits=True)


def mixed_in_graphs(x):
    """Subtracts the mean over the batch, but only where a step is compiled."""
    return x if tf.executing_eagerly() else x - keras.ops.mean(x, axis=0, keepdims=True)


class MixesInGraphs(LAYERS.Layer):
    def call(self, x):
        return mixed_in_graphs(x)


class ModelThatMixesInGraphs(keras.Model):
    def __init__(self):
        super().__init__()
        self.first, self.last = LAYERS.Dense(4), LAYERS.Dense(3)

    def call(self, x):
        return self.last(mixed_in_graphs(self.first(x)))


def loss_that_mixes_in_graphs(y_true, y_pred):
    return keras.losses.sparse_categorical_crossentropy(y_true, mixed_in_graphs(y_pred), True)


def with_a_call_of_its_own():
    layer = LAYERS.Dense(4)
    layer.call = lambda x, training=None: mixed_in_graphs(type(layer).call(layer, x))
    return layer


def carries_in_graphs(carry, row):
    """Adds the rows before, but only where a step is compiled."""
    carry = carry if tf.executing_eagerly() else carry + row
    return carry, row + carry


def with_an_operation():
    inputs = keras.Input((6,))
    hidden = LAYERS.Dense(4)(inputs)
    rows = keras.ops.scan(carries_in_graphs, keras.ops.zeros(4), hidden)[1]
    return keras.Model(inputs, LAYERS.Dense(3)(rows))


def sequential(*layers):
    return keras.Sequential([keras.Input((6,)), *layers, LAYERS.Dense(3)])


def compiled(model, loss=CROSS_ENTROPY, **arguments):
    optimizer = dice_tf.DiceSGDOptimizer(
        0.1, l2_norm_clip=1.0, noise_multiplier=1.0, expected_batch_size=4, **arguments
    )
    model.compile(optimizer, loss)
    return model


@pytest.mark.parametrize(
    "make, loss",
    [
        (lambda: sequential(LAYERS.Dense(4), MixesInGraphs()), CROSS_ENTROPY),
        (lambda: sequential(LAYERS.Dense(4, activation=mixed_in_graphs)), CROSS_ENTROPY),
        (lambda: sequential(LAYERS.Dense(4), LAYERS.Lambda(mixed_in_graphs)), CROSS_ENTROPY),
        (lambda: sequential(with_a_call_of_its_own()), CROSS_ENTROPY),
        (with_an_operation, CROSS_ENTROPY),
        (ModelThatMixesInGraphs, CROSS_ENTROPY),
        (lambda: sequential(LAYERS.Dense(4)), loss_that_mixes_in_graphs),
        (
            lambda: sequential(LAYERS.Dense(4)),
            keras.src.losses.losses.LossFunctionWrapper(loss_that_mixes_in_graphs),
        ),
    ],
    ids=["layer", "activation", "lambda", "call", "operation", "model", "loss", "wrapped loss"],
)
def test_code_that_mixes_in_compiled_steps_only_is_refused(make, loss):
    with pytest.raises(GradientEngineError, match="depend on the other examples"):
        compiled(make(), loss).fit(X, Y, batch_size=4, verbose=0)


@pytest.fixture
def traced(monkeypatch):
    """Models whose check traced them."""
    found, trace = [], self_check._traced
    monkeypatch.setattr(self_check, "_traced", lambda *a: (found.append(a[3]), trace(*a))[1])
    return found


def convolutional():
    inputs = keras.Input((6,))
    x = LAYERS.Reshape((6, 1, 1))(inputs)
    x = LAYERS.Conv2D(4, (3, 1), padding="same")(x)
    x = LAYERS.ReLU()(LAYERS.GroupNormalization(2)(x)) + keras.ops.tanh(x)
    x = LAYERS.Dropout(0.5)(LAYERS.Flatten()(x))
    return keras.Model(inputs, LAYERS.Dense(3)(x))


def test_stock_models_are_not_traced(traced):
    dice_tf.check_gradients(compiled(convolutional()), (X, Y))
    dice_tf.check_gradients(compiled(sequential(LAYERS.Dense(4, "gelu")), "mse"), (X, Y[:, None]))
    assert traced == []
    vectorized = compiled(sequential(LAYERS.Dense(4)), gradient_engine="vectorized")
    recurrent = compiled(sequential(LAYERS.Reshape((2, 3)), LAYERS.LSTM(2)))
    for slow in (vectorized, recurrent):
        dice_tf.check_gradients(slow, (X, Y))
    assert traced == [vectorized, recurrent]


def test_models_with_a_rule_of_a_user_are_traced(traced, monkeypatch):
    monkeypatch.setattr(rules, "_rules", dict(rules._rules))
    rule = lambda layer, call: [
        (layer.kernel, PerExample(call.inputs[..., None] * call.cotangents[:, None])),
        (layer.bias, PerExample(call.cotangents)),
    ]
    register_rule(LAYERS.Dense, rule, before_activation=True)
    model = compiled(sequential(LAYERS.Dense(4)))
    dice_tf.check_gradients(model, (X, Y))
    assert traced == [model]


def test_draws_stay_silent_after_an_inner_silence():
    ones = tf.ones([1000])
    with overridden(silenced_draws.silencers()), silenced_draws.silenced():
        with silenced_draws.silenced():
            pass
        np.testing.assert_array_equal(keras.random.dropout(ones, 0.5), ones)
    assert np.any(keras.random.dropout(ones, 0.5) != ones)


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__]))
