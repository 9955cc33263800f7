# Copyright 2026 The dice_tf Authors.
# SPDX-License-Identifier: Apache-2.0
"""A masked bidirectional LSTM, as docs/recipes.md has it."""

import pathlib
import sys

import keras
import numpy as np
import pytest
import tensorflow as tf

sys.path.insert(0, str(pathlib.Path(__file__).parent))

from recipes import recipe

from dice_tf.engine import layerwise
from dice_tf.engine.loss import call_in_training, per_example_losses


@pytest.fixture(scope="module")
def names():
    keras.utils.set_random_seed(0)
    found = {}
    exec(recipe("lstm"), found)  # The reader's own lines, from our own page.
    return found


def test_the_recipe_takes_its_steps(names):
    model, sampling = names["model"], names["sampling"]
    assert int(model.optimizer.iterations) == 2 * sampling.steps_per_epoch
    assert np.isfinite(model.predict(names["x"][:4], verbose=0)).all()


def test_gradients_are_those_of_the_sequences_without_padding(names):
    """Each sequence alone, at its own length, by a plain gradient."""
    model, sequences = names["model"], names["sequences"][:4]
    x, y = names["x"][:4], names["labels"][:4, None]
    inner = keras.Sequential(model.layers)  # Takes sequences of any length.
    norms = []
    for sequence, target in zip(sequences, y):
        with tf.GradientTape() as tape:
            score = call_in_training(inner, tf.constant(sequence[None], tf.int32))
            loss = keras.losses.binary_crossentropy(target[None], score, from_logits=True)
        values = [v.value for v in model.trainable_variables]
        gradients = [tf.convert_to_tensor(g) for g in tape.gradient(loss, values)]
        norms.append(tf.linalg.global_norm(gradients))
    clip = lambda found: (tf.ones_like(found), None)
    sums = layerwise.weighted_gradient_sums(model, tf.constant(x), tf.constant(y), None, clip)
    np.testing.assert_allclose(sums.norms, norms, rtol=1e-4)
    y_pred = call_in_training(model, tf.constant(x))
    losses = per_example_losses(model, x, tf.constant(y), y_pred, None)
    np.testing.assert_allclose(sums.losses, losses, rtol=1e-5)


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__]))
