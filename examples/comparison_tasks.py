# Copyright 2026 The dice_tf Authors.
# SPDX-License-Identifier: Apache-2.0
"""What compare.py trains: three convex problems, so that clipping and noise decide alone."""

from collections.abc import Callable
import time
from typing import NamedTuple

import image_datasets
import keras
import numpy as np
import scattering

# Scattering channels are standardised together, three at a time, in each example.
_GROUPS = 27


class Task(NamedTuple):
    """A problem with its data and the ranges to search in.

    Attributes:
        train: Pair of arrays to train on.
        held_out: Pair of arrays, of the training data, for the search.
        test: Pair of arrays, for what the search chose.
        source: Text, where the data comes from.
        make_model: Function without arguments to a model.
        loss: Loss for `compile`.
        metric: Metric for `compile`; larger is better.
        score: Text for tables and plots.
        batch_size: Int, the expected one.
        epochs: Int.
        delta: Float.
        clips: Pair of floats, range of C1 + C2.
        learning_rates: Pair of floats, range of learning rates, over 1 - momentum.
    """

    train: tuple
    held_out: tuple
    test: tuple
    source: str
    make_model: Callable
    loss: Callable
    metric: str
    score: str
    batch_size: int
    epochs: int
    delta: float
    clips: tuple
    learning_rates: tuple


def digits(data_dir, quick=False):
    """Softmax regression on the pixels of scikit-learn's digits.

    Args:
        data_dir: See `image_datasets.load_images`.
        quick: Whether to take few examples, to see it work.
    """
    del quick  # It is quick, so the flag changes nothing.
    pixels = lambda images: images.reshape(len(images), -1).astype(np.float32) - 127.5
    return _softmax_task(
        image_datasets.load_images("digits", data_dir),
        pixels,
        held_out=0.2,
        batch_size=96,
        epochs=30,
        delta=1e-4,
        learning_rates=(1.0, 256.0),
    )


def fashion_mnist(data_dir, quick=False):
    """Softmax regression on scattering features of Fashion-MNIST.

    Args:
        data_dir: See `image_datasets.load_images`.
        quick: Whether to take few examples, to see it work.
    """
    data = image_datasets.load_images("fashion_mnist", data_dir)
    if quick:
        data = data._replace(x_train=data.x_train[:1000], y_train=data.y_train[:1000],
                             x_test=data.x_test[:200], y_test=data.y_test[:200])  # fmt: skip
    return _softmax_task(
        data,
        _scattered,
        held_out=0.1,
        batch_size=83 if quick else 500,
        epochs=1 if quick else 10,
        delta=1e-4 if quick else 1e-5,
        learning_rates=(1.0, 32.0),
    )


def heavy_tails(data_dir=None, quick=False):
    """Least squares with skewed, heavy-tailed noise on the targets; synthetic.

    Targets are `w * x + noise` with 300 normal features and Lomax noise of shape 2.5, less its
    mean: few large errors upwards balance many small ones downwards. Clipped gradients see
    the many, so their fixed point is not the mean. Test targets have no noise: what
    counts is the distance to the conditional mean.

    Args:
        data_dir: Ignored.
        quick: Whether to take few examples, to see it work.
    """
    del data_dir
    # So many that a threshold above the tails would cost too much noise: made for the question.
    features = 300
    random = np.random.default_rng(0)
    weights = random.normal(size=features) / np.sqrt(features)

    def examples(count, noisy):
        x = random.normal(size=(count, features))
        noise = random.pareto(2.5, size=count) - 1 / 1.5 if noisy else 0.0
        y = (x @ weights + noise).astype(np.float32)[:, np.newaxis]
        return np.concatenate([x, np.ones((count, 1))], 1).astype(np.float32), y

    count = 1_000 if quick else 24_000
    return Task(
        train=examples(count, noisy=True),
        # What a practitioner has: targets with noise.
        held_out=examples(count // 4, noisy=True),
        test=examples(5_000, noisy=False),
        source="synthetic (seed 0), Lomax noise of shape 2.5 on the targets",
        make_model=lambda: _linear_model(features + 1, 1, None),
        loss=keras.losses.MeanSquaredError(),
        metric="r2_score",
        score="explained variance of noise-free test targets",
        batch_size=83 if quick else 500,
        epochs=4 if quick else 20,
        delta=1e-4 if quick else 1e-5,
        clips=(4.0, 256.0),
        learning_rates=(0.01, 0.3),
    )


TASKS = {"digits": digits, "heavy_tails": heavy_tails, "fashion_mnist": fashion_mnist}


def _softmax_task(data, to_features, held_out, *, batch_size, epochs, delta, learning_rates):
    test = _with_constant(to_features(data.x_test)), data.y_test
    data = image_datasets.hold_out(
        data._replace(x_train=_with_constant(to_features(data.x_train))), held_out
    )
    return Task(
        train=(data.x_train, data.y_train),
        held_out=(data.x_test, data.y_test),
        test=test,
        source=data.source,
        make_model=lambda: _linear_model(data.x_train.shape[1], data.num_classes, "softmax"),
        loss=keras.losses.SparseCategoricalCrossentropy(),
        metric="accuracy",
        score="test accuracy",
        batch_size=batch_size,
        epochs=epochs,
        delta=delta,
        # Features have norm 1, so the norm of a gradient is at most 1.4.
        clips=(0.05, 1.4),
        learning_rates=learning_rates,
    )


def _with_constant(features):
    """Scales every example to norm 1, and appends 0.1: a bias that learns more slowly."""
    features /= np.linalg.norm(features, axis=1, keepdims=True)
    # Half precision halves the memory; Keras casts each batch to float32.
    constant = np.full((len(features), 1), 0.1, np.float16)
    return np.concatenate([features.astype(np.float16), constant], 1)


def _scattered(images):
    seconds = time.monotonic()

    def progress(done, total):
        if done == total or not done % 5000:
            passed = time.monotonic() - seconds
            print(f"Scattering features: {done} of {total} images ({passed:.0f} s).", flush=True)

    features = scattering.features(images[..., 0], progress)
    # Statistics of the example alone: they tell nothing about others.
    groups = features.reshape(len(images), _GROUPS, -1)
    groups -= groups.mean(2, keepdims=True)
    groups /= groups.std(2, keepdims=True) + 1e-4
    return features.reshape(len(images), -1)


def _linear_model(inputs, outputs, activation):
    # From zero: convex problems need no random start. The constant is among the inputs.
    return keras.Sequential(
        [
            keras.Input((inputs,)),
            keras.layers.Dense(
                outputs, activation=activation, use_bias=False, kernel_initializer="zeros"
            ),
        ]
    )
