# Copyright 2026 The dice_tf Authors.
# SPDX-License-Identifier: Apache-2.0
"""Many models trained at once are the models that the package trains one by one."""

import pathlib
import sys

import keras
import numpy as np
import pytest
from scipy import stats

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1] / "examples"))

import stacked_trainer

import dice_tf

EXAMPLES, INPUTS, CLASSES, BATCH, EPOCHS = 240, 7, 3, 20, 2


@pytest.fixture(scope="module", name="data")
def small_data():
    random = np.random.default_rng(0)
    x = random.normal(size=(EXAMPLES, INPUTS)).astype(np.float32)
    x *= random.choice([0.05, 1.0, 4.0], size=(EXAMPLES, 1)).astype(np.float32)
    return x, random.integers(0, CLASSES, EXAMPLES)


def sampling_of(name, seed, feedback_steps):
    groups = feedback_steps + 1
    if name == "allocation":
        return dice_tf.RandomAllocation(EXAMPLES, BATCH, groups, seed=seed)
    if feedback_steps:
        return dice_tf.CyclicPoissonSampling(EXAMPLES, BATCH, groups, seed=seed)
    return dice_tf.PoissonSampling(EXAMPLES, BATCH, seed=seed)


def by_the_package(data, name, feedback_steps, configuration, seed):
    ratio = configuration.error_norm_clip / configuration.l2_norm_clip
    plan = dice_tf.PrivacyPlan(
        sampling=sampling_of(name, seed, feedback_steps),
        epochs=EPOCHS,
        noise_multiplier=configuration.noise_multiplier,
        delta=1e-4,
        feedback_steps=feedback_steps,
        error_norm_clip_ratio=ratio,
    )
    arguments = dict(
        learning_rate=configuration.learning_rate,
        momentum=configuration.momentum,
        use_ema=configuration.averaging > 0,
        ema_momentum=configuration.averaging or 0.99,
        l2_norm_clip=configuration.l2_norm_clip,
        plan=plan,
        noise_seed=seed,
    )
    if configuration.noise_multiplier:
        optimizer = dice_tf.DiceSGDOptimizer(**arguments)
    else:
        with pytest.warns(UserWarning, match="not private"):
            optimizer = dice_tf.DiceSGDOptimizer(**arguments)
    layer = keras.layers.Dense(CLASSES, use_bias=False, kernel_initializer="zeros")
    model = keras.Sequential([keras.Input((data[0].shape[1],)), layer])
    model.compile(optimizer, keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    model.fit(plan.dataset(*data), epochs=EPOCHS, verbose=0)
    return layer.kernel.numpy()


def stacked(data, name, feedback_steps, configurations, seed, noise_seed=0):
    return stacked_trainer.train(
        data,
        CLASSES,
        stacked_trainer.softmax_errors,
        configurations,
        sampling_of(name, seed, feedback_steps),
        EPOCHS,
        feedback_steps=max(1, feedback_steps),
        noise_seed=noise_seed,
    )


@pytest.mark.parametrize("name", ["poisson", "allocation"])
@pytest.mark.parametrize("feedback_steps", [0, 1, 3])
def test_without_noise_they_are_equal(data, name, feedback_steps):
    # Thresholds of which gradients are shorter, and longer; rates, momentum, averaging.
    configurations = [
        stacked_trainer.Configuration(c1, c2 * bool(feedback_steps), 0.0, rate, momentum, averaging)
        for c1, c2, rate, momentum, averaging in (
            (0.05, 0.1, 2.0, 0.0, 0.0),
            (1.0, 0.5, 0.2, 0.9, 0.8),
        )
    ]
    found = stacked(data, name, feedback_steps, configurations, seed=5)
    for model, configuration in enumerate(configurations):
        expected = by_the_package(data, name, feedback_steps, configuration, seed=5)
        assert np.abs(expected).max() > 0.05
        np.testing.assert_allclose(found[:, model], expected, rtol=1e-5, atol=1e-5)
    # Other draws are another model.
    assert not np.allclose(found, stacked(data, name, feedback_steps, configurations, 6), atol=1e-3)


@pytest.mark.parametrize("feedback_steps", [0, 3])
def test_with_noise_they_are_equal_in_distribution(feedback_steps):
    # Thresholds so small that weights are the sum of all noise, whatever the data.
    inputs = 1000
    data = np.full((EXAMPLES, inputs), 0.1, np.float32), np.zeros(EXAMPLES, int)
    configuration = stacked_trainer.Configuration(
        1e-5, 3e-5 * bool(feedback_steps), 5000.0, 1.0, 0.5, 0.0
    )
    package = by_the_package(data, "poisson", feedback_steps, configuration, 0).ravel()
    found = [
        stacked(data, "poisson", feedback_steps, [configuration], 0, seed)[:, 0].ravel()
        for seed in range(10)
    ]
    found = np.concatenate(found)
    assert stats.ks_2samp(package, found).pvalue > 0.01
    # A fifth more noise would be seen.
    assert stats.ks_2samp(1.2 * package, found).pvalue < 0.001
    # By hand: the noise of a step has gone (1 - 0.5^k) / 0.5 of its way k steps later.
    steps = sampling_of("poisson", 0, feedback_steps).steps(EPOCHS)
    weights = (1 - 0.5 ** np.arange(1, steps + 1)) / 0.5
    expected = 5000.0 * 1e-5 / BATCH * np.sqrt((weights**2).sum())
    assert found.std() == pytest.approx(expected, rel=0.03)


def test_noise_of_models_side_by_side_is_scaled(data):
    quiet = stacked_trainer.Configuration(1e-6, 0.0, 1000.0, 1.0, 0.0, 0.0)
    models = stacked(data, "poisson", 0, [quiet, quiet._replace(noise_multiplier=3000.0)], seed=1)
    np.testing.assert_allclose(models[:, 1].std() / models[:, 0].std(), 3.0, rtol=0.01)


def test_gradients_of_squares():
    outputs = np.array([[[1.0], [3.0]]], np.float32)
    errors = stacked_trainer.squared_errors(outputs, np.array([2.0], np.float32))
    np.testing.assert_allclose(errors[0, :, 0], [-2.0, 2.0])


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__]))
