# Copyright 2026 The dice_tf Authors.
# SPDX-License-Identifier: Apache-2.0
"""The reference engine against a loop over examples."""

import keras
import numpy as np
import pytest
import tensorflow as tf

from dice_tf.engine import vectorized
from dice_tf.engine.units import Units
from dice_tf.errors import GradientEngineError

LAYERS = keras.layers


def two_towers():
    """Conv, Dense, Embedding (with repeated ids) and LayerNormalization in one model."""
    image = keras.Input((6, 6, 1))
    tokens = keras.Input((5,), dtype="int32")
    left = LAYERS.Flatten()(LAYERS.Conv2D(3, 3, strides=2, activation="tanh")(image))
    right = LAYERS.LayerNormalization()(LAYERS.Embedding(4, 3)(tokens))
    right = LAYERS.GlobalAveragePooling1D()(right)
    return keras.Model([image, tokens], LAYERS.Dense(3)(LAYERS.Concatenate()([left, right])))


def recurrent():
    return keras.Sequential(
        [
            keras.Input((4,), dtype="int32"),
            LAYERS.Embedding(5, 3),
            LAYERS.LSTM(4, unroll=True),
            LAYERS.Dense(3),
        ]
    )


MODELS = {"two_towers": two_towers, "recurrent": recurrent}
BATCH = 7


def make(name):
    keras.utils.set_random_seed(1)
    model = MODELS[name]()
    model.compile("sgd", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    random = np.random.default_rng(0)
    x = [
        tf.constant(
            random.integers(0, 4, (BATCH, *i.shape[1:]))
            if i.dtype == "int32"
            else random.normal(size=(BATCH, *i.shape[1:])),
            i.dtype,
        )
        for i in model.inputs
    ]
    x = x if len(x) > 1 else x[0]
    y = tf.constant(random.integers(0, 3, BATCH))
    weight = tf.constant(random.uniform(0.5, 2.0, BATCH), tf.float32)
    model._compile_loss.build(y, model(x))
    return model, x, y, weight


def loop_over_examples(model, x, y, weight):
    gradients = []
    for i in range(BATCH):
        one = tf.nest.map_structure(lambda t: t[i : i + 1], x)
        with tf.GradientTape() as tape:
            logits = model(one, training=True)
            loss = weight[i] * keras.ops.sparse_categorical_crossentropy(
                y[i : i + 1], logits, from_logits=True
            )
        gradients.append(
            [tf.convert_to_tensor(g).numpy() for g in tape.gradient(loss, model.trainable_weights)]
        )
    return gradients


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("microbatch_size", [1, 2])
@pytest.mark.parametrize("graph", [False, True])
def test_norms_and_sums_equal_a_loop_over_examples(name, microbatch_size, graph):
    model, x, y, weight = make(name)
    clip_weights = lambda norms: (1 / (1 + norms), norms**2)

    def run(x, y, weight):
        units = Units(microbatch_size, microbatches=True)
        sums = vectorized.weighted_gradient_sums(model, x, y, weight, clip_weights, units)
        return sums.head, sums.residual, sums.norms, sums.losses, sums.y_pred

    head, residual, norms, losses, y_pred = (tf.function(run) if graph else run)(x, y, weight)

    per_example = loop_over_examples(model, x, y, weight)
    flat = np.array([np.concatenate([g.ravel() for g in one]) for one in per_example])
    units = -(-BATCH // microbatch_size)
    flat = np.concatenate([flat, np.zeros((units * microbatch_size - BATCH, flat.shape[1]))])
    flat = flat.reshape(units, microbatch_size, -1).mean(1)
    expected_norms = np.linalg.norm(flat, axis=1)
    join = lambda sums: np.concatenate([s.numpy().ravel() for s in sums])
    scale = np.abs(flat).max()
    np.testing.assert_allclose(norms, expected_norms, rtol=1e-5)
    np.testing.assert_allclose(
        join(head), (1 / (1 + expected_norms)) @ flat, rtol=1e-5, atol=1e-5 * scale
    )
    np.testing.assert_allclose(
        join(residual), expected_norms**2 @ flat, rtol=1e-5, atol=1e-5 * scale
    )
    assert losses.shape == (BATCH,)
    np.testing.assert_allclose(y_pred, model(x), rtol=1e-5, atol=1e-6)


def test_every_example_has_its_own_dropout_mask_and_the_seed_moves_on():
    keras.utils.set_random_seed(0)
    dropout = LAYERS.Dropout(0.5)
    model = keras.Sequential(
        [
            keras.Input((64,)),
            LAYERS.Dense(64, use_bias=False, kernel_initializer="identity"),
            dropout,
        ]
    )
    model.compile("sgd", "mse")
    x = tf.ones([4, 64])
    model._compile_loss.build(x, x)
    outputs = []
    for _ in range(2):
        sums = vectorized.weighted_gradient_sums(
            model, x, x, None, lambda norms: (tf.ones_like(norms), None)
        )
        assert sums.residual is None
        outputs.append(sums.y_pred.numpy() > 0)
    masks = np.concatenate(outputs)
    assert len({mask.tobytes() for mask in masks}) == 8
    # 512 fair coins: 6 deviations around one half.
    assert abs(masks.mean() - 0.5) < 6 * 0.5 / np.sqrt(512)


def test_a_loop_over_time_is_refused_by_layer():
    model = keras.Sequential([keras.Input((4, 2)), LAYERS.GRU(3, name="memory")])
    model.compile("sgd", "mse")
    with pytest.raises(GradientEngineError, match="memory.*unroll=True"):
        vectorized.weighted_gradient_sums(
            model, tf.ones([2, 4, 2]), tf.ones([2, 3]), None, lambda n: (n, n)
        )


def test_attention_without_xla_is_refused_by_layer():
    inputs = keras.Input((4, 8))
    attention = LAYERS.MultiHeadAttention(2, 4, name="self_attention")(inputs, inputs)
    model = keras.Model(inputs, LAYERS.Dense(1)(attention))
    model.compile("sgd", "mse", jit_compile=False)
    with pytest.raises(GradientEngineError, match="self_attention.*layerwise"):
        vectorized.weighted_gradient_sums(
            model, tf.ones([2, 4, 8]), tf.ones([2, 4, 1]), None, lambda n: (n, n)
        )


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__]))
