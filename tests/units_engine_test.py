# Copyright 2026 The dice_tf Authors.
# SPDX-License-Identifier: Apache-2.0
"""Units of several rows in both engines, against a loop of `GradientTape` over units."""

import functools

import keras
from keras import layers as L
import numpy as np
import pytest
import tensorflow as tf

from dice_tf.engine import chunks, layerwise, vectorized
from dice_tf.engine.units import Units
from dice_tf.errors import GradientEngineError

ENGINES = {"layerwise": layerwise, "vectorized": vectorized}
CLASSES, UNITS, K = 3, 5, 3


def attention():
    inputs = keras.Input((4, 8))
    x = L.LayerNormalization()(inputs + L.MultiHeadAttention(2, 4)(inputs, inputs))
    return keras.Model(inputs, L.Dense(CLASSES)(L.GlobalAveragePooling1D()(x)))


class Scale(L.Layer):
    """Has no rule, so it is differentiated row by row."""

    def build(self, shape):
        self.scale = self.add_weight(shape=(shape[-1],), initializer="ones")

    def call(self, x):
        return x * keras.ops.tanh(self.scale)


def stack(shape, *layers):
    return keras.Sequential([keras.Input(shape), *layers, L.Dense(CLASSES)])


MODELS = {
    "dense": lambda: stack((6,), L.Dense(5, activation="relu")),
    "conv": lambda: stack(
        (6, 6, 2), L.Conv2D(4, 3, activation="relu"), L.Flatten()),
    "depthwise": lambda: stack((6, 6, 2), L.DepthwiseConv2D(2), L.Flatten()),
    "grouped_conv": lambda: stack((8, 4), L.Conv1D(4, 3, groups=2), L.Flatten()),
    "separable": lambda: stack((8, 4), L.SeparableConv1D(6, 3), L.GlobalAveragePooling1D()),
    "embedding": lambda: keras.Sequential(
        [keras.Input((5,), dtype="int32"), L.Embedding(7, 4), L.LayerNormalization(),
         L.GlobalAveragePooling1D(), L.Dense(CLASSES)]),
    "norms": lambda: stack((6,), L.LayerNormalization(), L.Dense(4), Scale()),
    "attention": attention,
    "lstm": lambda: stack((4, 3), L.LSTM(5)),
}  # fmt: skip
# TensorFlow cannot vectorize the others, or the reference engine refuses them.
BOTH = [(name, engine) for name in MODELS for engine in ENGINES
        if engine == "layerwise" or name in ("dense", "conv", "embedding", "norms")]  # fmt: skip


def problem(name, rows=UNITS * K):
    keras.utils.set_random_seed(1)
    model, random = MODELS[name](), np.random.default_rng(0)
    model.compile("sgd", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    shape = (rows, *model.input_shape[1:])
    x = random.integers(0, 7, shape) if name == "embedding" else random.normal(size=shape)
    x = tf.constant(x, "int32" if name == "embedding" else "float32")
    y = tf.constant(random.integers(0, CLASSES, rows))
    weights = random.uniform(0.5, 2.0, rows).astype("float32")
    model._compile_loss.build(y, model(x))
    return model, x, y, weights


def loop_over_units(model, x, y, weights, size, divide_by_all=False):
    """Gradient of every unit, `[units, parameters]`: the mean over its rows with a weight."""
    gradients = []
    for start in range(0, len(weights), size):
        total, live = 0.0, 0
        for row in range(start, min(start + size, len(weights))):
            with tf.GradientTape() as tape:
                logits = model(x[row : row + 1], training=True)
                loss = weights[row] * keras.losses.sparse_categorical_crossentropy(
                    y[row : row + 1], logits, from_logits=True
                )
            if weights[row] == 0:
                continue
            parts = tape.gradient(loss, model.trainable_weights)
            flat = [tf.reshape(tf.convert_to_tensor(part), [-1]).numpy() for part in parts]
            total, live = total + np.concatenate(flat).astype("float64"), live + 1
        if not live:
            total = np.zeros(sum(int(np.prod(w.shape)) for w in model.trainable_weights))
        gradients.append(total / (size if divide_by_all else max(live, 1)))
    return np.array(gradients)


clip_weights = lambda norms: (1 / (1 + norms), norms / (2 + norms))


def check(sums, expected):
    norms = np.linalg.norm(expected, axis=1)
    join = lambda parts: np.concatenate([p.numpy().ravel() for p in parts])
    np.testing.assert_allclose(sums.norms[: len(norms)], norms, rtol=2e-5, atol=1e-6)
    for part, weights in zip((sums.head, sums.residual), clip_weights(norms), strict=True):
        scale = (weights @ np.abs(expected)).max()
        np.testing.assert_allclose(join(part), weights @ expected, rtol=1e-5, atol=1e-5 * scale)


@pytest.mark.parametrize("name, engine", BOTH)
@pytest.mark.parametrize("graph", [False, True])
def test_norms_and_sums_equal_a_loop_over_units(name, engine, graph):
    model, x, y, weights = problem(name)
    weights[[1, 3, 4, 5, 12]] = 0  # One row of a unit, a whole unit, the first row of the last.
    run = functools.partial(ENGINES[engine].weighted_gradient_sums, model, units=Units(K))
    run = tf.function(run, autograph=False) if graph else run
    sums = run(x, y, tf.constant(weights), clip_weights)
    check(sums, loop_over_units(model, x, y, weights, K))
    assert sums.norms[1] == 0 and sums.losses.shape == (UNITS * K,)
    np.testing.assert_allclose(sums.y_pred, model(x), rtol=1e-5, atol=1e-6)


def test_without_weights_and_of_unknown_size():
    model, x, y, weights = problem("conv")
    expected = loop_over_units(model, x, y, np.ones_like(weights), K)

    @tf.function(input_signature=[tf.TensorSpec([None, 6, 6, 2]), tf.TensorSpec([None], tf.int64)])
    def run(x, y):
        return layerwise.weighted_gradient_sums(model, x, y, None, clip_weights, Units(K))[:2]

    sums = layerwise.weighted_gradient_sums(model, x, y, None, clip_weights, Units(K))
    check(sums, expected)
    for part, same in zip(run(x, y), sums[:2], strict=True):
        for value, other in zip(part, same, strict=True):
            np.testing.assert_allclose(value, other, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("rows", [UNITS * K, UNITS * K - 2])
def test_microbatches_divide_by_their_size_whatever_rows_they_have(engine, rows):
    model, x, y, weights = problem("conv", rows)
    weights[[1, 6, 7, 8]] = 0
    units = Units(K, microbatches=True)
    sums = ENGINES[engine].weighted_gradient_sums(
        model, x, y, tf.constant(weights), clip_weights, units
    )
    check(sums, loop_over_units(model, x, y, weights, K, divide_by_all=True))
    assert sums.losses.shape == (rows,) and sums.y_pred.shape[0] == rows


@pytest.mark.parametrize("engine", ENGINES)
def test_a_row_that_is_not_finite_takes_its_unit_with_it_and_no_other(engine):
    model, x, y, weights = problem("conv")
    broken = tf.tensor_scatter_nd_update(x, [[4, 0, 0, 0]], [np.nan])
    clip = lambda norms: tuple(
        tf.where(tf.math.is_finite(norms), w, 0.0) for w in clip_weights(norms)
    )
    run = functools.partial(ENGINES[engine].weighted_gradient_sums, model)
    sums = run(broken, y, tf.constant(weights), clip, Units(K))
    assert not np.isfinite(sums.norms[1]) and np.isfinite(np.delete(sums.norms, 1)).all()
    weights[3:6] = 0
    without = run(x, y, tf.constant(weights), clip, Units(K))
    for part, other in zip(sums.head + sums.residual, without.head + without.residual):
        np.testing.assert_allclose(part, other, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("chunk_size", [K, 2 * K, 40 * K])
def test_chunks_hold_whole_units(engine, chunk_size):
    model, x, y, weights = problem("conv")
    weights[[1, 3, 4, 5]] = 0
    sums_of = ENGINES[engine].weighted_gradient_sums
    run = lambda x, y, w: sums_of(model, x, y, w, clip_weights, Units(K))
    sums = chunks.sums_in_chunks(run, x, y, tf.constant(weights), chunk_size, K)
    check(sums, loop_over_units(model, x, y, weights, K))


def test_a_unit_of_one_row_is_an_example_to_the_last_bit():
    model, x, y, weights = problem("conv")
    one, stock = (
        layerwise.weighted_gradient_sums(model, x, y, tf.constant(weights), clip_weights, *units)
        for units in ([Units(1)], [])
    )
    for part, other in zip(one.head + one.residual, stock.head + stock.residual):
        np.testing.assert_array_equal(part, other)


def test_contributions_of_other_classes_are_refused():
    from dice_tf.engine.units import in_units

    with pytest.raises(GradientEngineError, match="Received: object.*vectorized"):
        in_units(object(), 2)


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__]))
