# Copyright 2026 The dice_tf Authors.
# SPDX-License-Identifier: Apache-2.0
"""A GAN with a private discriminator, as docs/recipes.md has it."""

import pathlib
import sys

import keras
import numpy as np
import pytest
import tensorflow as tf

sys.path.insert(0, str(pathlib.Path(__file__).parent))

from recipes import recipe

import dice_tf
from dice_tf.errors import SamplingError


@pytest.fixture(scope="module")
def names():
    keras.utils.set_random_seed(0)
    found = {}
    exec(recipe("gan"), found)  # The reader's own lines, from our own page.
    return found


def test_b13_the_recipe_trains_both_and_has_an_epsilon(names):
    steps = names["sampling"].steps_per_epoch
    assert int(names["pairs"].optimizer.iterations) == steps
    assert int(names["optimizer"].iterations) == steps
    expected = dice_tf.accounting.compute_epsilon(
        names["pairs"].optimizer.mechanism, names["sampling"], steps, 1e-5
    )
    assert names["budget"].epsilon() == pytest.approx(expected)


def test_b13_the_recipe_for_fit_trains_both(names):
    steps = names["sampling"].steps_per_epoch
    exec(recipe("gan in fit"), names)
    gan = names["gan"]
    assert int(gan.optimizer.iterations) == steps
    assert int(gan.generator_optimizer.iterations) == steps


def test_b13_a_loop_that_concatenates_is_refused_where_the_recipe_asks(names):
    """After its first step, by the budget that has its model."""
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    optimizer = dice_tf.DiceSGDOptimizer(
        0.1, l2_norm_clip=0.5, noise_multiplier=1.0, expected_batch_size=32
    )
    model.compile(optimizer, "mse")
    sampling = dice_tf.PoissonSampling(num_examples=256, expected_batch_size=32)
    budget = dice_tf.EpsilonCallback(sampling, delta=1e-5)
    budget.set_model(model)
    rows, *_ = next(iter(sampling.dataset(names["x"], np.ones([256, 1], "float32"))))
    both = tf.concat([rows, tf.zeros_like(rows)], 0)
    dice_tf.private_train_step(model, (both, tf.ones([len(both), 1])))
    with pytest.raises(SamplingError, match="did not draw"):
        budget.epsilon()


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__]))
