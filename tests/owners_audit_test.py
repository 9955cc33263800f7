# Copyright 2026 The dice_tf Authors.
# SPDX-License-Identifier: Apache-2.0
"""Owners in texts, in runs of several lists, and units in `gradient_norms`."""

import keras
import numpy as np
import pytest

import dice_tf
from dice_tf import accounting, mechanism, sampling
from dice_tf.errors import SamplingError

IDS = np.arange(60) % 20
X = np.ones([60, 2], "float32")
Y = np.ones([60, 1], "float32")


def owners(ids=IDS):
    return sampling.PoissonSampling.of_owners(ids, expected_batch_size=5, rows_per_owner=3)


def compiled():
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    optimizer = dice_tf.DiceSGDOptimizer(
        l2_norm_clip=1.0, noise_multiplier=4.0, expected_batch_size=5, rows_per_unit=3
    )
    model.compile(optimizer, loss="mse")
    return model


def test_texts_of_several_runs_and_of_a_guarantee_are_about_owners():
    one = mechanism.DiceMechanism(
        l2_norm_clip=1.0, noise_multiplier=4.0, expected_batch_size=5, rows_per_unit=3
    )
    run = (one, owners(), 4)
    texts = (
        str(accounting.guarantee(*run, 1e-3)),
        str(accounting.guarantee(*run, 1e-3, group_size=2)),
        accounting.compose_statement([run, run], 1e-3),
        accounting.selection_statement(*run, 1e-3, 3.0, "public"),
    )
    for text in texts:
        assert "example" not in text and "owner" in text, text


def test_one_epsilon_is_not_of_owners_of_two_lists():
    first, second = owners(), owners(np.roll(IDS, 1) // 2 * 2 + (np.arange(60) >= 30))
    assert first.num_examples == second.num_examples
    model = compiled()
    model.fit(first.dataset(X, Y), verbose=0)
    assert dice_tf.accounted_run(model, first)[2] == first.steps_per_epoch
    with pytest.raises(SamplingError, match="another list"):
        dice_tf.accounted_run(model, second)
    with pytest.raises(SamplingError, match="another list"):
        model.fit(second.dataset(X, Y), verbose=0)
    # An equal list is the same.
    model.fit(owners().dataset(X, Y), verbose=0)


def test_gradient_norms_take_units_that_do_not_divide_the_default_chunk():
    assert dice_tf.gradient_norms(compiled(), (X[:12], Y[:12])).norms.shape == (4,)


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__]))
