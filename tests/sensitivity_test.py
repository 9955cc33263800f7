# Copyright 2026 The dice_tf Authors.
# SPDX-License-Identifier: Apache-2.0
"""No example moves a clipped sum by more than C1, whatever its magnitudes and ids are."""

import keras
from keras import layers as L
import numpy as np
import pytest
import tensorflow as tf

from dice_tf.engine import gram, layerwise, vectorized
from dice_tf.engine.contributions import OuterProduct, Rows
from dice_tf.engine.merging import merged
from dice_tf.mechanism import DiceMechanism, rounding
from dice_tf.mechanism.clipping import clip_weights

C1 = 0.1
MECHANISM = DiceMechanism(
    l2_norm_clip=C1, error_norm_clip=0.0, noise_multiplier=1.0, expected_batch_size=4
)
ROUNDING = 1 + 1e-5
heads = lambda norms: clip_weights(norms, MECHANISM)[0]


def over_many_decades(shape, seed):
    """Standard normal numbers, each position of each example with a magnitude of its own."""
    random = np.random.default_rng(seed)
    magnitudes = 10.0 ** random.uniform(-44, 19, [*shape[:-1], 1])
    return (random.normal(size=shape) * magnitudes).astype("float32")


@pytest.mark.parametrize("jit_compile", [False, True])
@pytest.mark.parametrize(
    "groups, positions, k, f, transposed",
    [
        ((), 1, 1, 1, False),
        ((), 1, 700, 3, False),
        ((), 1, 2, 300, True),
        ((), 3, 64, 40, False),
        ((), 3, 64, 40, True),
        ((), 64, 100, 200, False),  # compiled
        ((2,), 1, 90, 9, False),
        ((2,), 3, 90, 30, False),
    ],
)
def test_weights_of_products_whatever_their_magnitudes(
    groups, positions, k, f, transposed, jit_compile
):
    batch = 40 if positions > 3 else 400
    inputs = over_many_decades([batch, *groups, positions, k], seed=k)
    cotangents = over_many_decades([batch, *groups, positions, f], seed=f + 1)
    # Half of them: squares of one factor underflow, the other factor makes up for it.
    small, large = np.float32(9e-20), np.float32(1e19 / f)
    inputs[: batch // 4], cotangents[: batch // 4] = small, large
    inputs[batch // 4 : batch // 2] = large * f / k
    cotangents[batch // 4 : batch // 2] = small
    given = inputs.swapaxes(-1, -2) if transposed else inputs

    @tf.function(jit_compile=jit_compile)
    def squares(given, cotangents):
        shape = (*groups, k, f)
        product = OuterProduct(given, cotangents, shape=shape, transposed=transposed)
        return product.squared_norms()

    weights = heads(tf.sqrt(squares(given, cotangents))).numpy().astype("float64")
    each = np.einsum("...tk,...tf->...kf", inputs.astype("float64"), cotangents.astype("float64"))
    influence = weights * np.linalg.norm(each.reshape(batch, -1), axis=1)
    assert np.all(influence <= C1 * ROUNDING)
    assert np.count_nonzero(weights) > batch // 4


def test_ordinary_squares_keep_every_bit_and_padding_stays_next_to_nothing():
    random = np.random.default_rng(0)
    for scale in (1e-10, 1.0, 1e10):
        numbers = tf.constant(scale * random.normal(size=(50, 30)), tf.float32)
        np.testing.assert_array_equal(
            gram.factor_squares(numbers), rounding.sums_of_squares(numbers)
        )
    inputs = tf.constant(100 * random.normal(size=(5, 3, 40)), tf.float32)
    for positions in (1, 3):
        padding = OuterProduct(inputs[:, :positions], tf.zeros([5, positions, 50]), shape=(40, 50))
        assert np.all(np.sqrt(padding.squared_norms()) < 1e-13)


class TimesInput(L.Layer):
    """Embeddings of ids, each times a number of the data, added up."""

    def __init__(self):
        super().__init__()
        self.embedding = L.Embedding(5, 2)

    def call(self, x):
        return keras.ops.sum(self.embedding(x[..., 0]) * x[..., 1:], 1)


MODELS = {
    "dense": ((800,), lambda: [L.Dense(2, use_bias=False)]),
    "two_dense": ((64,), lambda: [L.Dense(64, use_bias=False), L.Dense(4, use_bias=False)]),
    "dense_on_a_sequence": (
        (4, 64), lambda: [L.Dense(8, use_bias=False), L.GlobalAveragePooling1D()]),
    "convolution": (
        (8, 64), lambda: [L.Conv1D(4, 3, use_bias=False), L.GlobalAveragePooling1D()]),
    "depthwise": (
        (8, 64), lambda: [L.DepthwiseConv1D(3, use_bias=False), L.GlobalAveragePooling1D()]),
    "einsum": (
        (4, 64), lambda: [L.EinsumDense("btk,kf->btf", (4, 4)), L.GlobalAveragePooling1D()]),
    "lstm": ((4, 64), lambda: [L.LSTM(8, use_bias=False)]),
    "bfloat16": ((800,), lambda: [L.Dense(2, use_bias=False, dtype="mixed_bfloat16")]),
}  # fmt: skip


def clipped_sums(model, engine=layerwise):
    """The sums that an engine gives for x, y and sample weights."""
    no_residual = lambda norms: (heads(norms), None)
    return tf.function(lambda *batch: engine.weighted_gradient_sums(model, *batch, no_residual))


def moved(engine, x, y, sample_weight):
    """How far the last example moves the clipped sum, and the norms."""
    without = sample_weight * (np.arange(len(x)) < len(x) - 1)
    x, y = tf.constant(x), tf.constant(y)
    sums = [engine(x, y, tf.constant(w, tf.float32)) for w in (sample_weight, without)]
    flat = [np.concatenate([h.numpy().ravel().astype("float64") for h in s.head]) for s in sums]
    return np.linalg.norm(flat[0] - flat[1]), sums[0].norms.numpy()


def compiled(model, loss="mse"):
    model.compile(loss=loss)
    outputs = model.output_shape[-1]
    model._compile_loss.build(tf.zeros([2, outputs]), tf.zeros([2, outputs]))
    return model


@pytest.mark.parametrize("name", MODELS)
def test_tiny_features_and_a_huge_weight(name):
    keras.utils.set_random_seed(0)
    shape, layers = MODELS[name]
    model = compiled(keras.Sequential([keras.Input(shape), *layers()]), "mae")
    x = np.random.default_rng(0).normal(size=(4, *shape)).astype("float32")
    y = np.full((4, model.output_shape[-1]), 100, "float32")
    engine = clipped_sums(model)
    for size in (9e-20, 3e-20, 1e-19, 1e-21):
        for weight in (1e18, 1e19, 3e19):
            x[3] = size
            distance, _ = moved(engine, x, y, np.array([1, 1, 1, weight]))
            assert distance <= C1 * 1.001, (size, weight)


def test_tiny_features_and_a_huge_target():
    keras.utils.set_random_seed(0)
    model = compiled(keras.Sequential([keras.Input((784,)), L.Dense(1, use_bias=False)]))
    x, y = np.ones((4, 784), "float32"), np.ones((4, 1), "float32")
    x[3], y[3] = 9e-20, -9e18
    distance, norms = moved(clipped_sums(model), x, y, np.ones(4))
    assert distance <= C1 * ROUNDING
    assert norms[3] >= 45


@pytest.mark.parametrize("length", [2, 40])
@pytest.mark.parametrize("name", ["embedding", "dense"])
def test_what_cancels_in_one_example_does_not_round_the_others_away(name, length):
    keras.utils.set_random_seed(0)
    layers = [TimesInput()]
    if name == "dense":
        layers = [L.Dense(2, use_bias=False), L.GlobalAveragePooling1D()]
    model = compiled(keras.Sequential([keras.Input((length, 2)), *layers]))
    x = np.ones([8, length, 2], "float32")
    for size in (1e4, 1e8, 1e12):
        x[7] = size * (-1.0) ** np.arange(length)[:, None]
        x[:, :, 0] = x[:, :, 0] if name == "dense" else 3
        distance, _ = moved(clipped_sums(model), x, np.full((8, 2), 5, "float32"), np.ones(8))
        assert distance <= C1 * 1.01


class Transposed(L.Layer):
    """Scores by a table that is another layer's: no closed form."""

    def __init__(self, embedding):
        super().__init__()
        self.embedding = embedding

    def call(self, x):
        return keras.ops.matmul(x, keras.ops.transpose(self.embedding.embeddings))


def embeddings(kind):
    inputs = keras.Input((2,), dtype="int32")
    layer = L.ReversibleEmbedding if kind.startswith("reversible") else L.Embedding
    embedding = layer(4, 2, embeddings_initializer="ones")
    if kind == "lora":
        embedding.build(None)
        embedding.enable_lora(2, b_initializer="ones")
    hidden = keras.ops.sum(embedding(inputs), 1)
    if kind == "without_closed_form":
        hidden = Transposed(embedding)(hidden)
    if kind == "reversible_tied":
        hidden = embedding(hidden, reverse=True)
    return keras.Model(inputs, hidden)


@pytest.mark.parametrize("kind", ["plain", "lora", "reversible_tied", "without_closed_form"])
def test_negative_ids_count_from_the_last_row(kind):
    keras.utils.set_random_seed(0)
    model = compiled(embeddings(kind))
    ids = np.array([[0, 1], [3, -1], [2, 2], [-1, -4]], "int32")
    y = np.arange(4.0 * model.output_shape[-1]).reshape(4, -1).astype("float32")
    batch = tf.constant(ids), tf.constant(y), None
    fast, reference = (clipped_sums(model, engine)(*batch) for engine in (layerwise, vectorized))
    np.testing.assert_allclose(fast.norms, reference.norms, rtol=1e-5)
    for got, want in zip(fast.head, reference.head, strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-6)


def test_ids_of_no_row_reach_no_other_example():
    ids, cotangents = tf.constant([[0, -1], [1, 5], [2, 2]]), tf.ones([3, 2, 4])
    written = Rows(ids, cotangents, shape=(3, 4)).materialised().numpy()[:, :, 0]
    np.testing.assert_array_equal(written, [[1, 0, 0], [0, 1, 0], [0, 0, 2]])


def test_ids_of_no_row_do_not_lower_the_norm_of_a_tied_table():
    outer = OuterProduct(tf.ones([1, 1, 3]), tf.ones([1, 1, 4]), shape=(3, 4))
    rows = Rows(tf.constant([[-1]]), -tf.ones([1, 1, 4]), shape=(3, 4))
    squares, parts = merged([outer, rows], 1)
    released = sum(part.weighted_sums([tf.ones([1])])[0].numpy() for part in parts)
    assert np.sqrt(squares[0]) >= np.linalg.norm(released)


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__]))
