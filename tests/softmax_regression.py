# Copyright 2026 The dice_tf Authors.
# SPDX-License-Identifier: Apache-2.0
"""A small softmax regression that several tests train."""

import contextlib

import keras
import numpy as np
import pytest

from dice_tf.training.optimizers import DiceSGDOptimizer

FEATURES, CLASSES, BATCH, STEPS = 6, 4, 8, 5


def make_problem(scale=3.0):
    random = np.random.default_rng(0)
    x = random.normal(size=(BATCH * STEPS, FEATURES)).astype("float32") * scale
    x[::3] *= 0.1
    return x, random.integers(0, CLASSES, BATCH * STEPS)


def make_model(optimizer, **compile_arguments):
    keras.utils.set_random_seed(3)
    model = keras.Sequential([keras.Input((FEATURES,)), keras.layers.Dense(CLASSES)])
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(optimizer, loss, **compile_arguments)
    return model


def make_optimizer(optimizer_class=DiceSGDOptimizer, **arguments):
    defaults = dict(
        learning_rate=0.5, l2_norm_clip=1.0, noise_multiplier=0.0, expected_batch_size=BATCH
    )
    silent = "noise_multiplier" in arguments
    with contextlib.nullcontext() if silent else pytest.warns(UserWarning, match="not private"):
        return optimizer_class(**{**defaults, **arguments})


def flat(variables):
    return np.concatenate([v.numpy().ravel() for v in variables])
