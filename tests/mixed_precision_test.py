# Copyright 2026 The dice_tf Authors.
# SPDX-License-Identifier: Apache-2.0
"""Half precision: layers may compute in it, but everything private is float32."""

import pathlib
import sys

import keras
import numpy as np
import pytest
import tensorflow as tf

sys.path.insert(0, str(pathlib.Path(__file__).parent))

from softmax_regression import flat, make_optimizer

from dice_tf.errors import OptimizerArgumentError

BATCH, CLASSES = 6, 3
CLIPS = dict(l2_norm_clip=0.03, error_norm_clip=0.02)
LOSS = keras.losses.SparseCategoricalCrossentropy(from_logits=True)


@pytest.fixture(params=["mixed_bfloat16", "bfloat16", "mixed_float16"], autouse=True)
def policy(request):
    before = keras.config.dtype_policy()
    keras.config.set_dtype_policy(request.param)
    yield request.param
    keras.config.set_dtype_policy(before)


def convolutional():
    inputs = keras.Input((8, 8, 2))
    hidden = keras.layers.Conv2D(4, 3, activation="tanh")(inputs)
    hidden = keras.layers.Flatten()(keras.layers.LayerNormalization()(hidden))
    x = np.random.default_rng(0).normal(size=(BATCH, 8, 8, 2)).astype("float32")
    return keras.Model(inputs, keras.layers.Dense(CLASSES)(hidden)), x


def attention():
    inputs = keras.Input((7,), dtype="int32")
    hidden = keras.layers.LayerNormalization()(keras.layers.Embedding(11, 8)(inputs))
    hidden = keras.layers.MultiHeadAttention(2, 4)(hidden, hidden)
    hidden = keras.layers.GlobalAveragePooling1D()(hidden)
    x = np.random.default_rng(0).integers(0, 11, (BATCH, 7))
    return keras.Model(inputs, keras.layers.Dense(CLASSES)(hidden)), x


def make(build, **arguments):
    keras.utils.set_random_seed(0)
    model, x = build()
    optimizer = make_optimizer(learning_rate=1.0, expected_batch_size=BATCH, **arguments)
    model.compile(optimizer, LOSS, auto_scale_loss=False)
    return model, x, np.arange(BATCH) % CLASSES


def float32(variables):
    return np.concatenate([tf.cast(v.value, tf.float32).numpy().ravel() for v in variables])


def gradient_of_one_example(model, x, y):
    with tf.GradientTape() as tape:
        loss = LOSS(y, model(x, training=True))
    gradients = tape.gradient(loss, [v.value for v in model.trainable_variables])
    dense = [tf.cast(tf.convert_to_tensor(g), tf.float32).numpy().ravel() for g in gradients]
    return np.concatenate(dense).astype(np.float64)


@pytest.mark.parametrize("build", [convolutional, attention])
def test_equals_a_loop_over_examples_in_the_same_policy(policy, build):
    model, x, y = make(build, chunk_size=4, **CLIPS)
    before = float32(model.trainable_variables)
    heads, residuals = [], []
    for i in range(BATCH):
        gradient = gradient_of_one_example(model, x[i : i + 1], y[i : i + 1])
        norm = np.linalg.norm(gradient)
        assert norm > 0.1
        heads.append(gradient * 0.03 / norm)
        residuals.append(gradient * 0.02 / norm)
    model.train_on_batch(x, y)
    # Rounding of the layers themselves: 11 bits of mantissa, or 8.
    tolerance = 2e-3 if policy == "mixed_float16" else 1e-2
    close = lambda a, b: np.linalg.norm(a - b) < tolerance * np.linalg.norm(b)
    assert close(float32(model.optimizer.errors), np.mean(residuals, 0))
    if policy.startswith("mixed"):
        moved = before - float32(model.trainable_variables)
        assert close(moved, np.mean(heads, 0))


@pytest.mark.parametrize("engine", ["layerwise", "vectorized"])
@pytest.mark.parametrize("build", [convolutional, attention])
def test_thresholds_hold_to_the_precision_of_float32(policy, build, engine):
    """Norms, weights and sums in half precision would miss them by a hundred times as much."""
    model, x, y = make(build, gradient_engine=engine, **CLIPS)
    if engine == "vectorized":
        model.compile(model.optimizer, LOSS, auto_scale_loss=False, jit_compile=True)
    one = np.zeros(BATCH)
    one[1] = 1.0
    before = float32(model.trainable_variables)
    model.train_on_batch(x, y, sample_weight=one)
    norm_of_error = np.linalg.norm(float32(model.optimizer.errors).astype(np.float64))
    assert norm_of_error * BATCH == pytest.approx(0.02, rel=2e-5)
    if policy.startswith("mixed"):
        moved = (before - float32(model.trainable_variables)).astype(np.float64)
        assert np.linalg.norm(moved) * BATCH == pytest.approx(0.03, rel=2e-4)


def test_noise_and_errors_are_float32(policy):
    model, x, y = make(convolutional, l2_norm_clip=1.0, noise_multiplier=1e-3, noise_seed=1)
    silent, _, _ = make(convolutional, l2_norm_clip=1.0)
    assert {v.dtype for v in model.trainable_variables} <= {"float32", policy}
    for one in (model, silent):
        one.train_on_batch(x, y)
        assert {e.dtype for e in one.optimizer.errors} == {"float32"}
    if policy.startswith("mixed"):
        noise = flat(model.trainable_variables) - flat(silent.trainable_variables)
        assert np.std(noise) == pytest.approx(1e-3 / BATCH, rel=0.15)
        # Half precision would leave few distinct values.
        assert len(np.unique(noise)) > 0.5 * noise.size


def test_loss_scaling_is_refused_by_compile_or_the_first_step(policy):
    keras.utils.set_random_seed(0)
    model, x = convolutional()
    optimizer = make_optimizer()
    if policy != "mixed_float16":
        model.compile(optimizer, LOSS)
        assert model.optimizer is optimizer
        return
    with pytest.raises(OptimizerArgumentError, match="mixed_bfloat16"):
        model.compile(optimizer, LOSS)
        model.train_on_batch(x, np.arange(BATCH) % CLASSES)


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__]))
