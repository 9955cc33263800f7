# Copyright 2026 The dice_tf Authors.
# SPDX-License-Identifier: Apache-2.0
"""Parts of a model that only some batches use: noise must not depend on who is in a batch."""

import keras
import numpy as np
import pytest
import tensorflow as tf

from dice_tf.errors import ModelError
from dice_tf.training.optimizers import DiceSGDOptimizer

RANDOM = np.random.default_rng(0)
X = RANDOM.normal(size=(8, 4)).astype("float32")
Y = RANDOM.normal(size=(8, 1)).astype("float32")


class SkipsExpert(keras.layers.Layer):
    """Mixes no examples: each takes the expert by its own input, none if nobody does."""

    def __init__(self):
        super().__init__()
        self.expert = keras.layers.Dense(4, name="expert")

    def build(self, shape):
        self.expert.build(shape)

    def call(self, x):
        mask = tf.cast(x[:, :1] > 5, tf.float32)
        if not keras.src.backend.is_keras_tensor(x) and tf.executing_eagerly():
            if not bool(tf.reduce_any(mask > 0)):
                return x
        return x + mask * self.expert(x)


class DependsOnLength(keras.layers.Layer):
    def __init__(self):
        super().__init__()
        self.short, self.long = keras.layers.Dense(2), keras.layers.Dense(2, name="long")

    def build(self, shape):
        self.short.build((None, shape[-1]))
        self.long.build((None, shape[-1]))

    def call(self, x):
        total = keras.ops.sum(x, axis=1)
        output = self.short(total)
        return output + self.long(total) if (x.shape[1] or 0) > 3 else output


def make(layer, shape, run_eagerly=False):
    model = keras.Sequential([keras.Input(shape), layer, keras.layers.Dense(1)])
    optimizer = DiceSGDOptimizer(l2_norm_clip=1.0, noise_multiplier=1.0, expected_batch_size=8)
    model.compile(optimizer, "mse", run_eagerly=run_eagerly)
    return model


def test_an_expert_that_a_batch_leaves_out_is_refused():
    model = make(SkipsExpert(), (4,), run_eagerly=True)
    model.train_on_batch(X, Y)
    with_expert = X.copy()
    with_expert[0, 0] = 9.0
    with pytest.raises(ModelError, match=r"expert/kernel.*in some batches.*multiply a part by 0"):
        model.train_on_batch(with_expert, Y)
    assert int(model.optimizer.iterations) == 1


def test_a_branch_on_the_length_of_a_batch_is_refused():
    model = make(DependsOnLength(), (None, 2))
    short, long = (RANDOM.normal(size=(8, n, 2)).astype("float32") for n in (3, 4))
    model.train_on_batch(long, Y)
    with pytest.raises(ModelError, match="long/kernel.*in some batches"):
        model.train_on_batch(short, Y)


def test_parts_that_no_batch_uses_and_frozen_ones_are_no_matter():
    inputs = keras.Input((4,))
    hidden = keras.layers.Dense(3, name="hidden")(inputs)
    model = keras.Model(inputs, {n: keras.layers.Dense(1, name=n)(hidden) for n in ("a", "b")})
    optimizer = DiceSGDOptimizer(l2_norm_clip=1.0, noise_multiplier=1.0, expected_batch_size=8)
    model.compile(optimizer, {"a": "mse", "b": None})
    targets = {"a": Y, "b": Y}
    model.fit(X, targets, batch_size=8, epochs=2, verbose=0)
    model.get_layer("hidden").trainable = False
    model.fit(X, targets, batch_size=8, verbose=0)
    model.get_layer("hidden").trainable = True
    model.compile(optimizer, {"a": "mse", "b": "mse"})
    model.fit(X, targets, batch_size=8, verbose=0)
    assert int(optimizer.iterations) == 4


class Remembers(keras.layers.Layer):
    def __init__(self):
        super().__init__()
        self.queue = tf.queue.FIFOQueue(9, [tf.float32])

    def call(self, x):
        self.queue.enqueue(tf.reduce_sum(x))
        return x


def test_a_queue_that_a_layer_fills_is_refused():
    with pytest.raises(ModelError, match="assigns .*[eE]nqueue"):
        make(Remembers(), (4,)).fit(X, Y, verbose=0)


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__]))
