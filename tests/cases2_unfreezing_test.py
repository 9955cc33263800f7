# Copyright 2026 The dice_tf Authors.
# SPDX-License-Identifier: Apache-2.0
"""Layers that are unfrozen on the way: case B10."""

from cases2_ledger_test import DELTA, B, N, X, Y, fit, make, planned, record
import keras
import numpy as np
import pytest
import tensorflow as tf

import dice_tf
from dice_tf.training import error_slots

pytestmark = [
    pytest.mark.filterwarnings("ignore::dice_tf.errors.UnaccountedStepsWarning"),
    pytest.mark.filterwarnings("ignore:This file holds the error"),
]


@pytest.mark.parametrize(
    "optimizer, extra",
    [
        (dice_tf.DiceSGDOptimizer, dict(momentum=0.9, use_ema=True, feedback_steps=2)),
        (dice_tf.DiceAdamOptimizer, {}),
    ],
)
def test_b10_unfreezing_layers_goes_on_with_one_count(tmp_path, optimizer, extra):
    sampling = dice_tf.CyclicPoissonSampling(N, B)
    model = make(layers=2, optimizer=optimizer, **extra)
    callback, kept = dice_tf.EpsilonCallback(sampling, DELTA), model.optimizer
    backbone, head = model.layers
    for number, (lower, upper) in enumerate([(False, True), (True, True), (True, False)], 1):
        backbone.trainable, head.trainable = lower, upper
        model.compile(kept, "mse", jit_compile=False)
        before = [layer.get_weights()[0] for layer in (backbone, head)]
        fit(model, sampling, callbacks=[callback])
        moved = [
            bool(np.any(layer.get_weights()[0] != old))
            for layer, old in zip((backbone, head), before)
        ]
        assert moved == [lower, upper]
        assert callback.epsilon() == planned(model, sampling, 8 * number)
        assert len(kept.errors) == len(model.trainable_variables) * extra.get("feedback_steps", 1)
    assert int(kept._private.process_draws) == 24
    # Files are those of an optimizer that was built for what is trained now.
    model.save(tmp_path / "run.keras")
    loaded = keras.models.load_model(tmp_path / "run.keras")
    assert dice_tf.run_epsilon(loaded, sampling, DELTA) == callback.epsilon()
    checkpoint = tf.train.Checkpoint(model=model, optimizer=kept)
    checkpoint.read(checkpoint.write(str(tmp_path / "checkpoint"))).assert_consumed()


def test_b10_slots_and_errors_stay_with_their_variables():
    model = make(layers=2, momentum=0.9)
    backbone, head = model.layers
    backbone.trainable = False
    model.compile(model.optimizer, "mse", jit_compile=False)
    sampling = dice_tf.PoissonSampling(N, B)
    data = list(sampling.dataset(X, Y))
    dice_tf.private_train_step(model, data[0])
    old = [error.numpy() for error in model.optimizer.errors]
    momentum = {v.name: v.numpy() for v in model.optimizer.variables if "momentum" in v.name}
    backbone.trainable = True
    model.optimizer.build(model.trainable_variables)
    new = [error.numpy() for error in model.optimizer.errors]
    assert not np.any(new[0]) and not np.any(new[1])
    for before, after in zip(old, new[2:], strict=True):
        np.testing.assert_array_equal(before, after)
    found = {v.name: v.numpy() for v in model.optimizer.variables if "momentum" in v.name}
    assert len(found) == 4 and all(np.array_equal(found[n], m) for n, m in momentum.items())
    # The error of a variable that is left out is forgotten, also when it comes back.
    dice_tf.private_train_step(model, data[1])
    head.trainable = False
    model.optimizer.build(model.trainable_variables)
    head.trainable = True
    model.optimizer.build(model.trainable_variables)
    errors = [error.numpy() for error in model.optimizer.errors]
    assert np.any(errors[0]) and not np.any(errors[2]) and not np.any(errors[3])


def test_b10_steps_that_were_compiled_before_feed_back_nothing_old():
    """Two compiled steps, for one layer and for both, taken in turns."""
    model, sampling = make(layers=2, noise_multiplier=1e-6), dice_tf.PoissonSampling(N, B)
    model.optimizer.learning_rate = 0.0
    backbone, head = model.layers
    batch = next(iter(sampling.dataset(100 * X, 100 * Y)))
    steps = {}
    for name, trainable in [("head", False), ("both", True)]:
        backbone.trainable = trainable
        steps[name] = tf.function(lambda: dice_tf.private_train_step(model, batch))
        steps[name]()
    old = model.optimizer.errors[2].numpy()
    assert np.any(old)
    # The old step leaves new errors alone; they are of another step then, and count as 0.
    steps["head"]()
    state = model.optimizer._private
    assert int(state.error_step) != int(model.optimizer.iterations)
    values = error_slots.values(model.optimizer, model.optimizer.errors)
    assert not any(np.any(value) for value in values)
    assert record(model)["steps"] == 3 and int(state.process_draws) == 3


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__]))
