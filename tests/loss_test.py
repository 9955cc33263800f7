# Copyright 2026 The dice_tf Authors.
# SPDX-License-Identifier: Apache-2.0
"""Per-example losses: equal to the compiled loss on a batch of one, or refused."""

import keras
import numpy as np
import pytest
import tensorflow as tf

from dice_tf.engine.loss import check_losses, individual_losses, per_example_losses
from dice_tf.errors import LossError
from dice_tf.training.optimizers import DiceSGDOptimizer
from dice_tf.training.private_step import private_train_step

BATCH = 5
RANDOM = np.random.default_rng(0)


def compiled(loss, outputs=1, shape=(3,), **arguments):
    """A model that returns its input, once per output, and is compiled with `loss`."""
    keras.utils.set_random_seed(0)
    inputs = keras.Input(shape)
    heads = [
        keras.layers.Dense(shape[-1], name=f"head_{i}", activation="sigmoid")(inputs)
        for i in range(outputs)
    ]
    model = keras.Model(inputs, heads if outputs > 1 else heads[0])
    model.compile("sgd", loss, **arguments)
    return model


def build(model, x, y):
    y_pred = model(x)
    model._compile_loss(y, y_pred)
    return y_pred


def one(tensors, i):
    return tf.nest.map_structure(lambda t: t[i : i + 1], tensors)


@pytest.mark.parametrize("reduction", ["sum_over_batch_size", "mean", "sum"])
@pytest.mark.parametrize(
    "loss", ["MeanSquaredError", "BinaryCrossentropy", "Huber", "CosineSimilarity", "Poisson"]
)
def test_case_2_equals_the_stock_loss_on_a_batch_of_one(loss, reduction):
    model = compiled(getattr(keras.losses, loss)(reduction=reduction), shape=(4, 3))
    x = tf.constant(RANDOM.uniform(size=(BATCH, 4, 3)), tf.float32)
    y = tf.constant(RANDOM.integers(0, 2, (BATCH, 4, 3)), tf.float32)
    y_pred = build(model, x, y)
    values = per_example_losses(model, x, y, y_pred, None)
    expected = [model._compile_loss(one(y, i), one(y_pred, i)) for i in range(BATCH)]
    assert values.shape == (BATCH,) and values.dtype == tf.float32
    np.testing.assert_allclose(values, expected, rtol=1e-6)


@pytest.mark.parametrize(
    "loss",
    ["mse", "binary_crossentropy", keras.losses.mean_absolute_error],
    ids=["mse", "binary_crossentropy", "function"],
)
def test_strings_and_functions_work_and_average_to_the_stock_loss(loss):
    model = compiled(loss)
    x = tf.constant(RANDOM.uniform(size=(BATCH, 3)), tf.float32)
    y = tf.constant(RANDOM.integers(0, 2, (BATCH, 3)), tf.float32)
    weight = tf.constant(RANDOM.uniform(0, 2, BATCH), tf.float32)
    y_pred = build(model, x, y)
    values = per_example_losses(model, x, y, y_pred, weight)
    np.testing.assert_allclose(
        tf.reduce_mean(values), model._compile_loss(y, y_pred, weight), rtol=1e-6
    )


@pytest.mark.parametrize("container", [list, dict])
def test_several_outputs_with_loss_weights(container):
    losses, weights, names = ["mse", "mae"], [0.25, 3.0], ["head_0", "head_1"]
    if container is dict:
        losses, weights = dict(zip(names, losses)), dict(zip(names, weights))
    model = compiled(losses, outputs=2, loss_weights=weights)
    x = tf.constant(RANDOM.uniform(size=(BATCH, 3)), tf.float32)
    targets = [tf.constant(RANDOM.uniform(size=(BATCH, 3)), tf.float32) for _ in range(2)]
    y = dict(zip(names, targets)) if container is dict else targets
    y_pred = build(model, x, y)
    sample_weight = tf.constant(RANDOM.uniform(size=BATCH), tf.float32)
    mse, mae = (
        tf.reduce_mean(f(targets[i] - y_pred[i]), 1) for i, f in enumerate((tf.square, tf.abs))
    )
    np.testing.assert_allclose(
        per_example_losses(model, x, y, y_pred, sample_weight),
        sample_weight * (0.25 * mse + 3.0 * mae),
        rtol=1e-6,
    )
    separate = individual_losses(model, y, y_pred, sample_weight)
    np.testing.assert_allclose(separate, [sample_weight * mse, sample_weight * mae], rtol=1e-6)


def test_weights_per_time_step():
    model = compiled("mse", shape=(4, 3))
    x = tf.constant(RANDOM.uniform(size=(BATCH, 4, 3)), tf.float32)
    y = tf.zeros_like(x)
    y_pred = build(model, x, y)
    weight = tf.constant(RANDOM.integers(0, 2, (BATCH, 4)), tf.float32)
    values = per_example_losses(model, x, y, y_pred, weight)
    expected = np.mean(np.mean(y_pred.numpy() ** 2, -1) * weight.numpy(), -1)
    np.testing.assert_allclose(values, expected, rtol=1e-6)


def test_weights_per_example_of_a_loss_that_ignores_a_class():
    loss = keras.losses.SparseCategoricalCrossentropy(ignore_class=-1)
    model = compiled(loss, shape=(4, 3))
    x = tf.constant(RANDOM.uniform(size=(BATCH, 4, 3)), tf.float32)
    y = np.repeat([[0, 1, 2, -1]], BATCH, axis=0)
    y[2, 1:] = -1
    weight = tf.constant(RANDOM.uniform(0.5, 2, BATCH), tf.float32)
    spec = lambda t: keras.KerasTensor(t.shape, keras.backend.standardize_dtype(t.dtype))
    y_pred = model(x)
    check_losses(model, spec(y), spec(y_pred), spec(weight))
    values = per_example_losses(model, x, tf.constant(y), y_pred, weight)
    right = -np.log(np.take_along_axis(y_pred.numpy(), np.maximum(y, 0)[..., None], -1)[..., 0]
                    / y_pred.numpy().sum(-1))  # fmt: skip
    counts = y != -1
    expected = weight * (right * counts).sum(1) / counts.sum(1)
    np.testing.assert_allclose(values, expected, rtol=1e-5)


def test_weights_with_too_many_dimensions_are_refused():
    model = compiled("mse")
    x = tf.ones([BATCH, 3])
    y_pred = build(model, x, x)
    with pytest.raises(LossError, match="sample_weight.*(5, 3)"):
        per_example_losses(model, x, x, y_pred, tf.ones([BATCH, 3]))


@pytest.mark.parametrize("reduction", ["sum_over_batch_size", "sum"])
def test_masks_count_an_examples_own_entries_only(reduction):
    """Keras divides by the valid entries of the whole batch, which couples examples."""
    loss = keras.losses.MeanSquaredError(reduction=reduction)
    model = compiled(loss, shape=(4, 3))
    x = tf.constant(RANDOM.uniform(size=(BATCH, 4, 3)), tf.float32)
    y = tf.zeros_like(x)
    y_pred = build(model, x, y)
    lengths = np.array([4, 1, 2, 3, 0])
    mask = np.arange(4) < lengths[:, None]
    y_pred._keras_mask = tf.constant(mask)
    values = per_example_losses(model, x, y, y_pred, None)
    per_step = np.mean(y_pred.numpy() ** 2, -1) * mask
    expected = per_step.sum(1)
    if reduction != "sum":
        expected = expected / np.maximum(lengths, 1)
    np.testing.assert_allclose(values, expected, rtol=1e-6)
    alone = one(y_pred, 1)
    alone._keras_mask = one(y_pred._keras_mask, 1)
    np.testing.assert_allclose(values[1], loss(one(y, 1), alone), rtol=1e-6)


def scalar_loss(y_true, y_pred):
    return tf.reduce_mean(tf.square(y_true - y_pred))


def loss_over_the_batch(y_true, y_pred):
    return tf.reduce_mean(tf.square(y_true - y_pred), axis=0)


class OwnCall(keras.losses.Loss):
    def __call__(self, y_true, y_pred, sample_weight=None):
        return scalar_loss(y_true, y_pred)


@pytest.mark.parametrize(
    "loss, match",
    [
        (scalar_loss, r"'scalar_loss' must return one value per example.*Received shape \(\)"),
        (loss_over_the_batch, r"'loss_over_the_batch'.*Received shape \(3,\)"),
        (keras.losses.Dice(), r"'dice'.*Received shape \(\)"),
        (keras.losses.Circle(), "Circle.*compares the examples"),
        (OwnCall(name="own"), "'own' .*overrides `__call__`"),
        (
            keras.losses.MeanSquaredError(reduction="mean_with_sample_weight"),
            "reduction='mean_with_sample_weight'.*couples examples",
        ),
        (None, "without a loss"),
    ],
)
def test_case_2_losses_without_a_value_per_example_are_refused_by_name(loss, match):
    model = compiled(loss)
    model.optimizer = DiceSGDOptimizer(
        l2_norm_clip=1.0, noise_multiplier=1.0, expected_batch_size=BATCH
    )
    before = [v.numpy() for v in model.trainable_variables]
    x = np.ones((BATCH, 3), "float32")
    with pytest.raises(LossError, match=match):
        private_train_step(model, (x, x))
    np.testing.assert_array_equal(before[0], model.trainable_variables[0].numpy())


class AddsLoss(keras.layers.Layer):
    def call(self, x):
        self.add_loss(tf.reduce_mean(x**2))
        return x


class ComputesLoss(keras.Model):
    def __init__(self):
        super().__init__()
        self.dense = keras.layers.Dense(3)

    def call(self, x):
        return self.dense(x)

    def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, training=True):
        return tf.reduce_mean(tf.square(y - y_pred))


@pytest.mark.parametrize(
    "make, match",
    [
        (
            lambda: keras.Sequential([keras.layers.Dense(3), AddsLoss(name="adds")]),
            "adds' .*`add_loss`",
        ),
        (ComputesLoss, "ComputesLoss.*overrides `compute_loss`"),
    ],
)
def test_case_20_losses_of_the_whole_batch_are_refused_by_layer(make, match):
    model = make()
    model.compile(
        DiceSGDOptimizer(l2_norm_clip=1.0, noise_multiplier=1.0, expected_batch_size=BATCH), "mse"
    )
    x = np.ones((BATCH, 3), "float32")
    with pytest.raises(LossError, match=match):
        model.fit(x, x, verbose=0)


def test_missing_targets_are_refused():
    model = compiled("mse")
    model.compile(
        DiceSGDOptimizer(l2_norm_clip=1.0, noise_multiplier=1.0, expected_batch_size=BATCH), "mse"
    )
    with pytest.raises(LossError, match="y=None"):
        model.fit(np.ones((BATCH, 3), "float32"), verbose=0)


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__]))
