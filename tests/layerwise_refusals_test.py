# Copyright 2026 The dice_tf Authors.
# SPDX-License-Identifier: Apache-2.0
"""What the layer-wise engine refuses, what it leaves untouched, and broken examples."""

import threading

import keras
from keras import layers as L
import numpy as np
import pytest
import tensorflow as tf

from dice_tf.engine import gram, layerwise, rules
from dice_tf.engine.contributions import OuterProduct, PerExample, Rows
from dice_tf.engine.loss import per_example_losses
from dice_tf.engine.merging import merged
from dice_tf.errors import GradientEngineError
from dice_tf.mechanism import DiceMechanism
from dice_tf.mechanism.clipping import clip_weights


def weights(norms):
    mechanism = DiceMechanism(
        l2_norm_clip=0.5, noise_multiplier=1.0, expected_batch_size=8, error_norm_clip=0.3
    )
    return clip_weights(norms, mechanism)


def compiled(model):
    model.compile(loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    model._compile_loss.build(tf.zeros([2]), tf.zeros([2, 3]))  # the train step does this
    return model


def data(shape=(6,), batch=4):
    rng = np.random.RandomState(0)
    x = tf.constant(rng.randn(batch, *shape).astype("float32"))
    return x, tf.constant(rng.randint(0, 3, batch))


def sums(model, x, y, sample_weight=None):
    return layerwise.weighted_gradient_sums(model, x, y, sample_weight, weights)


def traced_sums(model, x, y):
    """Under `fit`'s usual signature, where the batch size is not known."""
    signature = [tf.TensorSpec([None, *t.shape[1:]], t.dtype) for t in (x, y)]
    return tf.function(lambda x, y: sums(model, x, y), input_signature=signature, autograph=False)(
        x, y
    )


class ReadsAnothersKernel(keras.Model):
    def __init__(self):
        super().__init__(name="reader")
        self.hidden, self.out = L.Dense(6, name="hidden"), L.Dense(3, name="out")

    def call(self, x):
        return self.out(keras.ops.matmul(self.hidden(x), keras.ops.transpose(self.hidden.kernel)))


class PositionsAtTheTop(keras.Model):
    def __init__(self):
        super().__init__(name="positions")
        self.table, self.out = L.Embedding(4, 6, name="table"), L.Dense(3)

    def call(self, x):
        # Four positions and four examples: only the origin tells them apart.
        return self.out(x + keras.ops.mean(self.table(keras.ops.arange(4)), axis=0))


class CallsInALoop(keras.Model):
    def __init__(self):
        super().__init__(name="loop")
        self.step, self.out = L.Dense(6, name="step"), L.Dense(3)

    def call(self, x):
        x = keras.ops.fori_loop(0, 3, lambda i, x: self.step(x), x)
        return self.out(x)


class FoldsTimeIntoBatch(keras.Model):
    def __init__(self):
        super().__init__(name="folds")
        self.step, self.out = L.Dense(2, name="step"), L.Dense(3)

    def call(self, x):
        x = self.step(keras.ops.reshape(x, (-1, 2)))
        return self.out(keras.ops.reshape(x, (-1, 6)))


@pytest.mark.parametrize(
    ("model_class", "words"),
    [
        (ReadsAnothersKernel, "'reader/hidden/kernel'.*read outside the layer"),
        (PositionsAtTheTop, "layer 'positions/table'.*without the batch axis"),
        (CallsInALoop, "layer 'loop/step'.*inside a loop"),
    ],
)
def test_unaccounted_weights_are_refused_by_name(model_class, words):
    model = compiled(model_class())
    x, y = data()
    model(x)
    with pytest.raises(GradientEngineError, match=words):
        traced_sums(model, x, y)


@pytest.mark.parametrize("batch", [1, 4])
def test_batch_axis_mixed_with_another_axis_is_refused(batch):
    model = compiled(FoldsTimeIntoBatch())
    x, y = data(batch=batch)
    model(x)
    with pytest.raises(GradientEngineError, match="layer 'folds/step'.*batch axis"):
        sums(model, x, y)
    for xla in (False, True):
        traced = tf.function(lambda x, y: sums(model, x, y), jit_compile=xla)
        with pytest.raises(GradientEngineError, match="layer 'folds/step'.*folded into the batch"):
            traced(x, y)


def test_random_numbers_that_cannot_be_repeated_are_refused():
    class Noisy(L.Layer):
        def build(self, shape):
            self.gain = self.add_weight(shape=shape[1:], initializer="ones")

        def call(self, x):
            return x * self.gain * tf.random.uniform(tf.shape(x))

    model = compiled(keras.Sequential([keras.Input((6,)), Noisy(name="noisy"), L.Dense(3)]))
    with pytest.raises(GradientEngineError, match="noisy.*RandomUniform"):
        traced_sums(model, *data())


def test_rule_that_forgets_a_weight_is_refused():
    class Scale(L.Layer):
        def build(self, shape):
            self.gain = self.add_weight(shape=shape[1:], name="gain")
            self.shift = self.add_weight(shape=shape[1:], name="shift")

        def call(self, x):
            return x * self.gain + self.shift

    rules.register_rule(Scale, lambda layer, call: [(layer.shift, PerExample(call.cotangents))])
    model = compiled(keras.Sequential([keras.Input((6,)), Scale(name="scale"), L.Dense(3)]))
    with pytest.raises(GradientEngineError, match="scale.*gain"):
        sums(model, *data())
    with pytest.raises(GradientEngineError, match="layer_class"):
        rules.register_rule(model, lambda layer, call: [])


def attributes(model):
    return [
        {k: id(v) for k, v in vars(layer).items() if k != "_dtype_policy"}
        for layer in model._flatten_layers()
    ]


def test_layers_are_left_as_they_were_even_after_an_error():
    class Fails(L.Layer):
        broken = False

        def call(self, x):
            if self.broken:
                raise RuntimeError("no")
            return x

    fails = Fails()
    model = compiled(
        keras.Sequential([keras.Input((6,)), L.Dense(4, activation="relu"), fails, L.Dense(3)])
    )
    x, y = data()
    sums(model, x, y)
    uniform = keras.src.backend.random.uniform
    before = attributes(model)
    sums(model, x, y)
    assert attributes(model) == before
    Fails.broken = True
    with pytest.raises(RuntimeError):
        sums(model, x, y)
    assert attributes(model) == before
    assert keras.src.backend.random.uniform is uniform
    Fails.broken = False
    again = sums(model, x, y)
    assert np.isfinite(again.norms).all()


def test_threads_share_layers():
    model = compiled(keras.Sequential([keras.Input((6,)), L.Dense(4, "relu"), L.Dense(3)]))
    x, y = data()
    want = sums(model, x, y)
    before = attributes(model)
    results = [None] * 4
    barrier = threading.Barrier(4)

    def work(i):
        barrier.wait()
        results[i] = traced_sums(model, x, y)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert attributes(model) == before
    for got in results:
        np.testing.assert_allclose(got.norms, want.norms, rtol=1e-6)


@pytest.mark.parametrize("jit", [False, True])
def test_broken_example_contributes_exactly_nothing(jit):
    model = compiled(keras.Sequential([
        keras.Input((6, 4)), L.Conv1D(3, 2), L.LayerNormalization(), L.Dense(5, "relu"),
        L.Flatten(), L.Dense(3)]))  # fmt: skip
    x, y = data((6, 4))
    step = tf.function(lambda x, y: sums(model, x, y), jit_compile=jit)
    for value in (np.nan, np.inf):
        broken = step(tf.tensor_scatter_nd_update(x, [[1, 2, 3]], [value]), y)
        without = step(tf.gather(x, [0, 2, 3]), tf.gather(y, [0, 2, 3]))
        assert not np.isfinite(broken.norms[1])
        for got, want in zip(
            broken.head + broken.residual, without.head + without.residual, strict=True
        ):
            np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-6)
    everything = step(x * np.nan, y)
    assert all(not np.any(s) for s in everything.head + everything.residual)


def test_a_broken_example_in_a_contribution_of_ones_own_contributes_nothing():
    class InTwoParts(PerExample):
        """Keeps what its sums read where the engine does not look."""

        def __init__(self, parts):
            super().__init__(tf.concat(parts, 1))
            self.parts = parts

        def weighted_sums(self, weights):
            sums = [PerExample(part).weighted_sums(weights) for part in self.parts]
            return [tf.concat(pair, 0) for pair in zip(*sums, strict=True)]

        def without(self, broken):
            clear = lambda t: tf.where(broken[:, tf.newaxis], 0.0, t)
            return InTwoParts([clear(part) for part in self.parts])

    class Shift(keras.layers.Layer):
        def build(self, shape):
            self.shift = self.add_weight(shape=shape[1:], initializer="zeros")

        def call(self, x):
            return x + self.shift

    def rule(layer, call):
        return [(layer.shift, InTwoParts(tf.split(call.cotangents, [2, 4], 1)))]

    rules.register_rule(Shift, rule)
    model = compiled(keras.Sequential([keras.Input((6,)), Shift(), L.Dense(3)]))
    x, y = data()
    broken = sums(model, tf.tensor_scatter_nd_update(x, [[1, 2]], [np.nan]), y)
    without = sums(model, tf.gather(x, [0, 2, 3]), tf.gather(y, [0, 2, 3]))
    for got, want in zip(broken.head, without.head, strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-6)


def test_weight_zero_contributes_exactly_nothing():
    model = compiled(keras.Sequential([keras.Input((6,)), L.Dense(4, "relu"), L.Dense(3)]))
    x, y = data()
    got = sums(model, x, y, tf.constant([1.0, 0.0, 2.0, 1.0]))
    rows = [0, 2, 3]
    want = sums(model, tf.gather(x, rows), tf.gather(y, rows), tf.constant([1.0, 2.0, 1.0]))
    assert got.norms[1] == 0
    for a, b in zip(got.head, want.head, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-7)


def test_unused_and_frozen_weights_have_no_sums():
    class Heads(keras.Model):
        def __init__(self):
            super().__init__()
            self.body, self.used, self.unused = L.Dense(4), L.Dense(3), L.Dense(2)

        def call(self, x):
            h = self.body(x)
            self.unused(h)
            return self.used(h)

    model = compiled(Heads())
    x, y = data()
    model(x)
    got = traced_sums(model, x, y)
    assert [s is None for s in got.head] == [False] * 4 + [True] * 2
    model.body.trainable = False
    got = traced_sums(model, x, y)
    assert [s is None for s in got.residual] == [False] * 2 + [True] * 2


def test_no_trainable_weights():
    model = compiled(keras.Sequential([keras.Input((6,)), L.Dense(3)]))
    model.trainable = False
    got = sums(model, *data())
    assert got.head == [] and not np.any(got.norms)


def test_no_residual_wanted():
    model = compiled(keras.Sequential([keras.Input((6,)), L.Dense(3)]))
    x, y = data()
    got = layerwise.weighted_gradient_sums(model, x, y, None, lambda n: (tf.ones_like(n), None))
    assert got.residual is None
    with tf.GradientTape() as tape:
        loss = tf.reduce_sum(per_example_losses(model, x, y, model(x), None))
    want = tape.gradient(loss, [v.value for v in model.trainable_variables])
    for a, b in zip(got.head, want, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)


def dropout_in_a_unit():
    class Unit(L.Layer):
        def __init__(self):
            super().__init__()
            self.dropout, self.noise = L.Dropout(0.5, seed=3), L.GaussianNoise(0.5, seed=4)

        def build(self, shape):
            self.gain = self.add_weight(shape=shape[1:], initializer="ones")

        def call(self, x):
            return self.dropout(self.noise(x) * self.gain)

    return Unit()


def rnn_with_dropout():
    return L.SimpleRNN(4, dropout=0.4, recurrent_dropout=0.4, seed=3, return_sequences=True)


@pytest.mark.parametrize(
    ("make", "traced"),
    [(dropout_in_a_unit, False), (dropout_in_a_unit, True), (rnn_with_dropout, True)],
)
def test_recomputed_layers_see_the_masks_of_the_forward_pass(make, traced):
    # With all weights equal to 1 the head is the plain gradient of the batch, which
    # depends on the masks; both runs start from the same seed state.
    layer = make()
    model = compiled(
        keras.Sequential(
            [keras.Input((5, 6)), layer, L.Dropout(0.3, seed=9), L.Flatten(), L.Dense(3)]
        )
    )
    x, y = data((5, 6))
    seeds = [v for v in model.non_trainable_variables if "seed" in v.path]
    start = [v.numpy() for v in seeds]
    ones = lambda n: (tf.ones_like(n), None)
    step = lambda x, y: layerwise.weighted_gradient_sums(model, x, y, None, ones)
    got = (tf.function(step) if traced else step)(x, y)
    after = [v.numpy() for v in seeds]
    for v, value in zip(seeds, start, strict=True):
        v.assign(value)
    with tf.GradientTape() as tape:
        loss = tf.reduce_sum(per_example_losses(model, x, y, model(x, training=True), None))
    want = tape.gradient(loss, [v.value for v in model.trainable_variables])
    for a, b in zip(got.head, want, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5)
    for v, value in zip(seeds, after, strict=True):
        np.testing.assert_array_equal(v.numpy(), value)  # advanced once, as in one pass
    assert any(np.any(a != b) for a, b in zip(start, after, strict=True))


def test_spectral_normalization_is_differentiated_as_keras_does():
    layer = L.SpectralNormalization(L.Dense(4))
    model = compiled(keras.Sequential([keras.Input((6,)), layer, L.Dense(3)]))
    x, y = data()
    start = [v.numpy() for v in model.weights]
    ones = lambda n: (tf.ones_like(n), None)
    got = layerwise.weighted_gradient_sums(model, x, y, None, ones)
    for v, value in zip(model.weights, start, strict=True):
        v.assign(value)
    with tf.GradientTape() as tape:
        loss = tf.reduce_sum(per_example_losses(model, x, y, model(x, training=True), None))
    want = tape.gradient(loss, [v.value for v in model.trainable_variables])
    for a, b in zip(got.head, want, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)


def test_repeated_rows_equal_their_written_down_sum():
    rng = np.random.RandomState(0)
    rows = Rows(tf.constant(rng.randint(0, 4, (3, 9))), rng.randn(3, 9, 2), shape=(4, 2))
    dense = PerExample(rows.materialised())
    np.testing.assert_allclose(rows.squared_norms(), dense.squared_norms(), rtol=1e-5)
    w = [tf.constant([1.0, 2.0, 3.0])]
    np.testing.assert_allclose(rows.weighted_sums(w)[0], dense.weighted_sums(w)[0], rtol=1e-5)


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize(("positions", "k", "f"), [(1, 5, 3), (4, 9, 8), (40, 2, 3)])
def test_gram_and_materialised_norms_agree(positions, k, f, transposed):
    rng = np.random.RandomState(0)
    a = rng.randn(3, positions, k).astype("float32")
    d = rng.randn(3, positions, f).astype("float32")
    given = a.transpose(0, 2, 1) if transposed else a
    product = OuterProduct(given, d, shape=(k, f), transposed=transposed)
    want = np.einsum("btk,btf->bkf", a.astype("float64"), d)
    squares, raised = (want**2).sum((1, 2)), 2 * gram.raised_by(positions, k, f)
    for found in (product.squared_norms(), merged([product], 3)[0]):
        assert np.all(found >= squares * (1 - 1e-6)) and np.all(found <= squares * (1 + raised))
    np.testing.assert_allclose(product.materialised(), want, rtol=1e-4, atol=1e-5)


def test_norms_never_fall_below_the_truth_where_uses_cancel():
    """Rounding of the Gram matrix would hide a gradient of norm 40 below one of norm 0."""
    random = np.random.default_rng(0)
    inputs = 1e3 * random.normal(size=(20, 8, 16))
    cotangents = random.normal(size=(20, 8, 5))
    inputs = np.concatenate([inputs, inputs], 1).astype("float32")
    cotangents = np.concatenate([cotangents, -cotangents * (1 - 3e-7)], 1).astype("float32")
    product = np.einsum("btk,btf->bkf", inputs.astype("float64"), cotangents.astype("float64"))
    expected = np.linalg.norm(product.reshape(20, -1), axis=1)
    norms = np.sqrt(OuterProduct(inputs, cotangents, shape=(16, 5)).squared_norms())
    assert np.all(norms >= expected)


def test_mixed_contributions_add_up():
    rng = np.random.RandomState(0)
    rows = Rows(tf.constant(rng.randint(0, 4, (3, 5))), rng.randn(3, 5, 2), shape=(4, 2))
    outer = OuterProduct(rng.randn(3, 6, 4), rng.randn(3, 6, 2), shape=(4, 2))
    written = PerExample(rng.randn(3, 4, 2))
    for parts in ([rows, outer], [rows, rows], [outer, outer], [rows, outer, written]):
        total = sum(np.asarray(p.materialised(), "float64") for p in parts)
        squares, merged_parts = merged(parts, None)
        np.testing.assert_allclose(squares, (total**2).sum((1, 2)), rtol=1e-4)
        w = tf.constant([1.0, 0.5, 2.0])
        got = sum(np.asarray(p.weighted_sums([w])[0]) for p in merged_parts)
        np.testing.assert_allclose(got, np.einsum("b,bkf->kf", w, total), rtol=1e-4, atol=1e-5)


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__]))
