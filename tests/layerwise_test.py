# Copyright 2026 The dice_tf Authors.
# SPDX-License-Identifier: Apache-2.0
"""The layer-wise engine equals a loop over examples, for a zoo of layers and models."""

import keras
from keras import layers as L
import numpy as np
import pytest
import tensorflow as tf

from dice_tf.engine import layerwise
from dice_tf.engine.loss import per_example_losses
from dice_tf.mechanism import DiceMechanism
from dice_tf.mechanism.clipping import clip_weights

BATCH = 5
TOLERANCE = 1e-5


class AddPositions(L.Layer):
    """A user's layer with a weight that has no rule."""

    def build(self, shape):
        self.positions = self.add_weight(shape=shape[1:], initializer="random_normal")

    def call(self, x):
        return x + self.positions


class TokenAndPosition(L.Layer):
    """The usual Keras recipe: an embedding that is called on positions, without a batch."""

    def __init__(self, length, vocabulary, dim):
        super().__init__()
        self.tokens, self.positions = L.Embedding(vocabulary, dim), L.Embedding(length, dim)

    def build(self, shape):
        self.tokens.build(shape)
        self.positions.build((shape[1],))

    def call(self, x):
        return self.tokens(x) + self.positions(keras.ops.arange(x.shape[1]))


class Tied(L.Layer):
    """Uses one weight twice: through its layer, and by reading it."""

    def __init__(self):
        super().__init__()
        self.dense = L.Dense(4, activation="tanh")

    def build(self, shape):
        self.dense.build(shape)

    def call(self, x):
        h = self.dense(x)
        return keras.ops.matmul(h, keras.ops.transpose(self.dense.kernel))


class SquaredDense(L.Dense):
    """A subclass whose call is not that of its parent."""

    def call(self, inputs, training=None):
        return keras.ops.square(keras.ops.matmul(inputs, self.kernel)) + self.bias


class Block(L.Layer):
    """A composite layer with a weight of its own and sublayers."""

    def __init__(self):
        super().__init__()
        self.first, self.second = L.Dense(6, activation="relu"), L.Dense(4)

    def build(self, shape):
        self.gain = self.add_weight(shape=(6,), initializer="random_normal")
        self.first.build(shape)
        self.second.build((*shape[:-1], 6))

    def call(self, x):
        return self.second(self.first(x) * self.gain) + x


def sequential(*layers, inputs, dtype="float32"):
    return lambda: keras.Sequential([keras.Input(inputs, dtype=dtype), *(f() for f in layers),
                                     L.Flatten(), L.Dense(3)])  # fmt: skip


def conv(cls, **kwargs):
    return lambda: cls(**kwargs)


def twice_the_same_dense():
    inputs = keras.Input((6, 4))
    dense = L.Dense(4, activation="tanh")
    return keras.Model(inputs, L.Dense(3)(L.Flatten()(dense(dense(inputs)))))


def shared_embedding():
    inputs = keras.Input((6,), dtype="int32")
    embedding = L.Embedding(7, 4)
    x = embedding(inputs) * embedding(keras.ops.flip(inputs, 1))
    return keras.Model(inputs, L.Dense(3)(L.Flatten()(x)))


def language_model():
    inputs = keras.Input((6,), dtype="int32")
    embedding = L.ReversibleEmbedding(7, 4)
    x = L.LayerNormalization()(L.Dense(4)(embedding(inputs)))
    return keras.Model(inputs, L.Dense(3)(L.Flatten()(embedding(x, reverse=True))))


def attention(query_heads=None):
    inputs = keras.Input((6, 8))
    if query_heads:
        mixed = L.GroupQueryAttention(4, query_heads, 2)(inputs, inputs)
    else:
        mixed = L.MultiHeadAttention(2, 4, value_dim=3)(inputs, inputs)
    x = L.LayerNormalization()(inputs + mixed)
    return keras.Model(inputs, L.Dense(3)(L.GlobalAveragePooling1D()(x)))


def with_lora(layer, inputs, dtype="float32"):
    def build():
        model = sequential(lambda: layer, inputs=inputs, dtype=dtype)()
        layer.enable_lora(2)
        for v in layer.trainable_variables:
            v.assign(keras.random.normal(v.shape, seed=3))
        return model

    return build


def frozen_layer():
    model = keras.Sequential(
        [keras.Input((6,)), L.Dense(5, activation="relu"), L.Dense(4), L.Dense(3)]
    )
    model.layers[1].trainable = False
    return model


def masked_lstm():
    inputs = keras.Input((5,), dtype="int32")
    x = L.Embedding(7, 4, mask_zero=True)(inputs)
    return keras.Model(inputs, L.Dense(3)(L.LSTM(3)(x)))


def lstm_returns_state():
    inputs = keras.Input((4, 3))
    _, hidden, carry = L.LSTM(3, return_state=True)(inputs)
    return keras.Model(inputs, L.Dense(3)(hidden + carry))


def lstm_from_a_state():
    inputs = keras.Input((4, 3))
    state = [L.Dense(4)(inputs[:, 0]), L.Dense(4)(inputs[:, 1])]
    return keras.Model(inputs, L.Dense(3)(L.LSTM(4)(inputs, initial_state=state)))


def subclass_model():
    class Net(keras.Model):
        def __init__(self):
            super().__init__()
            self.hidden, self.block, self.out = L.Dense(4, "tanh"), Block(), L.Dense(3)

        def call(self, x):
            return self.out(self.block(self.hidden(x)))

    model = Net()
    model.build((None, 6))
    return model


def nested_model():
    inner = keras.Sequential([keras.Input((6,)), L.Dense(4, activation="gelu"), L.Dense(4)])
    inputs = keras.Input((6,))
    return keras.Model(inputs, L.Dense(3)(inner(inputs)))


TOKENS = {"inputs": (6,), "dtype": "int32"}
IMAGE = {"inputs": (7, 6, 3)}
MANY = {"inputs": (6, 5, 8)}
SERIES = {"inputs": (9, 4)}
SHORT = {"inputs": (4, 3)}
ZOO = {
    "dense": sequential(conv(L.Dense, units=4, activation="relu"), inputs=(6,)),
    "dense_no_bias": sequential(conv(L.Dense, units=4, use_bias=False), inputs=(6,)),
    "dense_rank_3": sequential(conv(L.Dense, units=4, activation="softmax"), inputs=(5, 6)),
    "dense_rank_4": sequential(conv(L.Dense, units=4), inputs=(2, 3, 6)),
    "dense_long": sequential(conv(L.Dense, units=2), inputs=(40, 2)),
    "dense_layer_as_activation": lambda: sequential(
        conv(L.Dense, units=4, activation=L.PReLU()), inputs=(6,))(),
    "einsum": sequential(
        conv(L.EinsumDense, equation="abc,cde->abde", output_shape=(5, 2, 3), bias_axes="de"),
        inputs=(5, 4)),
    "einsum_ellipsis": sequential(
        conv(L.EinsumDense, equation="...x,xy->...y", output_shape=4, bias_axes="y"),
        inputs=(5, 4)),
    "einsum_groups": sequential(
        conv(L.EinsumDense, equation="abc,bcd->abd", output_shape=(5, 3), bias_axes="bd"),
        inputs=(5, 4)),
    "einsum_groups_permuted": sequential(
        conv(L.EinsumDense, equation="abec,dcb->adeb", output_shape=(3, 2, 5), bias_axes="d"),
        inputs=(5, 2, 4)),
    "einsum_summed_input": sequential(
        conv(L.EinsumDense, equation="abc,bd->ad", output_shape=(3,), bias_axes="d"),
        inputs=(5, 4)),
    "conv1d": sequential(conv(L.Conv1D, filters=3, kernel_size=3, activation="relu"), **SERIES),
    "conv1d_causal": sequential(
        conv(L.Conv1D, filters=3, kernel_size=3, padding="causal", dilation_rate=2), **SERIES),
    "conv2d": sequential(conv(L.Conv2D, filters=4, kernel_size=3), **IMAGE),
    "conv2d_same_strides": sequential(
        conv(L.Conv2D, filters=4, kernel_size=(3, 2), strides=(2, 3), padding="same"), **IMAGE),
    "conv2d_dilated": sequential(
        conv(L.Conv2D, filters=4, kernel_size=2, dilation_rate=2, padding="same"), **MANY),
    "conv2d_groups": sequential(conv(L.Conv2D, filters=4, kernel_size=3, groups=2), **MANY),
    "conv2d_pointwise": sequential(conv(L.Conv2D, filters=4, kernel_size=1), **MANY),
    "conv3d": sequential(
        conv(L.Conv3D, filters=2, kernel_size=2, strides=2, padding="same"),
        inputs=(4, 3, 3, 2)),
    "depthwise1d": sequential(
        conv(L.DepthwiseConv1D, kernel_size=3, depth_multiplier=2), **SERIES),
    "depthwise2d": sequential(
        conv(L.DepthwiseConv2D, kernel_size=3, depth_multiplier=2, padding="same", strides=2),
        **IMAGE),
    "separable": sequential(conv(L.SeparableConv2D, filters=4, kernel_size=3), **IMAGE),
    "conv_transpose": sequential(
        conv(L.Conv2DTranspose, filters=2, kernel_size=3, strides=2), **IMAGE),
    "embedding": sequential(conv(L.Embedding, input_dim=7, output_dim=4), **TOKENS),
    "embedding_shared": shared_embedding,
    "embedding_tied": language_model,
    "token_and_position": sequential(lambda: TokenAndPosition(6, 7, 4), **TOKENS),
    "layer_norm": sequential(L.LayerNormalization, inputs=(5, 4)),
    "layer_norm_axes": sequential(conv(L.LayerNormalization, axis=(1, 3)), **IMAGE),
    "rms_norm": sequential(L.RMSNormalization, inputs=(5, 4)),
    "group_norm": sequential(conv(L.GroupNormalization, groups=2), **MANY),
    "group_norm_of_rows": sequential(conv(L.GroupNormalization, groups=3, axis=1), **MANY),
    "group_norm_of_vectors": sequential(
        conv(L.GroupNormalization, groups=3, center=False), inputs=(9,)),
    "attention": attention,
    "grouped_query_attention": lambda: attention(query_heads=4),
    "prelu": sequential(conv(L.PReLU, shared_axes=[1, 2]), **IMAGE),
    "simple_rnn": sequential(conv(L.SimpleRNN, units=4), **SHORT),
    "gru": sequential(conv(L.GRU, units=4, return_sequences=True), **SHORT),
    "gru_without_bias": sequential(conv(L.GRU, units=4, use_bias=False), **SHORT),
    "gru_backwards": sequential(conv(L.GRU, units=4, go_backwards=True), **SHORT),
    "gru_reset_before": sequential(conv(L.GRU, units=3, reset_after=False), **SHORT),
    "lstm": sequential(conv(L.LSTM, units=4, activation="relu"), **SHORT),
    "lstm_unrolled": sequential(conv(L.LSTM, units=4, unroll=True, use_bias=False), **SHORT),
    "lstm_returns_state": lstm_returns_state,
    "lstm_from_a_state": lstm_from_a_state,
    "stacked_rnn": sequential(
        lambda: keras.Sequential([L.LSTM(3, return_sequences=True), L.SimpleRNN(4)]), **SHORT),
    "masked_lstm": masked_lstm,
    "bidirectional": sequential(lambda: L.Bidirectional(L.LSTM(3)), **SHORT),
    "time_distributed": sequential(lambda: L.TimeDistributed(L.Dense(4)), **SERIES),
    "custom": sequential(AddPositions, inputs=(5, 4)),
    "composite": sequential(Block, inputs=(4,)),
    "subclass_of_dense": sequential(lambda: SquaredDense(4), inputs=(6,)),
    "tied_in_a_layer": sequential(Tied, inputs=(6,)),
    "dense_twice": twice_the_same_dense,
    "lora_dense": with_lora(L.Dense(4), inputs=(5, 6)),
    "lora_einsum": with_lora(
        L.EinsumDense("abc,cde->abde", (5, 2, 3), bias_axes="de"), inputs=(5, 4)),
    "lora_embedding": with_lora(L.Embedding(7, 4), **TOKENS),
    "lora_conv": with_lora(L.Conv2D(4, 3), **IMAGE),
    "frozen": frozen_layer,
    "subclass_model": subclass_model,
    "nested_model": nested_model,
}  # fmt: skip
# Loops take long to vectorise, so these run in the way that `fit` runs them only.
TRACED_ONLY = {"gru_reset_before", "lstm_returns_state"}
XLA = {"simple_rnn", "lstm", "gru", "attention", "conv2d_same_strides", "embedding_tied",
       "dense_twice", "token_and_position", "layer_norm_axes", "custom", "conv2d_groups",
       "separable", "conv1d_causal"}  # fmt: skip


def weights(norms):
    mechanism = DiceMechanism(
        l2_norm_clip=0.5, noise_multiplier=1.0, expected_batch_size=8, error_norm_clip=0.3
    )
    return clip_weights(norms, mechanism)


def example_data(model, batch=BATCH, seed=0):
    rng = np.random.RandomState(seed)
    spec = model.inputs[0] if hasattr(model, "inputs") and model.inputs else None
    shape = (batch, *spec.shape[1:]) if spec is not None else (batch, 6)
    if spec is not None and "int" in str(spec.dtype):
        x = rng.randint(0, 7, shape).astype("int32")
    else:
        x = rng.randn(*shape).astype("float32")
    return tf.constant(x), tf.constant(rng.randint(0, 3, batch))


def compiled(model):
    model.compile(loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    model._compile_loss.build(tf.zeros([2]), tf.zeros([2, 3]))  # the train step does this
    rng = np.random.RandomState(1)
    for v in model.trainable_variables:  # zeros and ones would hide mistakes
        v.assign(v + 0.1 * rng.randn(*v.shape))
    return model


def loop(model, x, y, sample_weight=None):
    """Norms and both sums from batches of one example, on the stock model."""
    per_example, norms = [], []
    for i in range(len(y)):
        one = lambda t: None if t is None else t[i : i + 1]
        with tf.GradientTape() as tape:
            losses = per_example_losses(
                model, one(x), one(y), model(one(x), training=False), one(sample_weight)
            )
        gradients = tape.gradient(losses, [v.value for v in model.trainable_variables])
        gradients = [
            None if g is None else tf.convert_to_tensor(g).numpy().astype("float64")
            for g in gradients
        ]
        norms.append(np.sqrt(sum((g**2).sum() for g in gradients if g is not None)))
        per_example.append(gradients)
    sums = [
        [None if gs[0] is None else sum(w * g for w, g in zip(ws, gs, strict=True))
         for gs in zip(*per_example, strict=True)]
        for ws in (w.numpy() for w in weights(tf.constant(norms, tf.float32)))
    ]  # fmt: skip
    return np.array(norms), *sums


def assert_same(sums, expected, tolerance=TOLERANCE):
    norms, head, residual = expected
    np.testing.assert_allclose(sums.norms, norms, rtol=tolerance)
    for got, want in ((sums.head, head), (sums.residual, residual)):
        scale = np.sqrt(sum((w**2).sum() for w in want if w is not None))
        assert scale > 0
        for g, w in zip(got, want, strict=True):
            assert (g is None) == (w is None)
            if g is not None:
                np.testing.assert_allclose(g, w, rtol=tolerance, atol=tolerance * scale)


def test_a_recurrent_layer_stays_as_it_is_for_other_threads_while_it_is_recorded():
    def spy(x):
        # A patched layer would be seen by a thread that predicts at the same time.
        seen.append((layer.return_sequences, "call" in vars(layer.cell)))
        return keras.ops.tanh(x)

    keras.utils.set_random_seed(0)
    seen, layer = [], L.LSTM(3, activation=spy)
    model = compiled(keras.Sequential([keras.Input((4, 3)), layer, L.Dense(3)]))
    layerwise.weighted_gradient_sums(model, *example_data(model), None, weights)
    assert seen and set(seen) == {(False, False)}


@pytest.mark.parametrize("name", ZOO)
def test_equals_a_loop_over_examples(name):
    keras.utils.set_random_seed(0)
    model = compiled(ZOO[name]())
    x, y = example_data(model)
    expected = loop(model, x, y)
    assert len(expected[1]) and expected[0].min() > 0
    step = lambda x, y: layerwise.weighted_gradient_sums(model, x, y, None, weights)
    if name not in TRACED_ONLY:
        assert_same(step(x, y), expected)
    signature = [tf.TensorSpec([None, *t.shape[1:]], t.dtype) for t in (x, y)]
    assert_same(tf.function(step, input_signature=signature, autograph=False)(x, y), expected)
    if name in XLA:
        assert_same(tf.function(step, jit_compile=True)(x, y), expected)


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__]))
