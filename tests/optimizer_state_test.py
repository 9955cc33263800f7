# Copyright 2026 The dice_tf Authors.
# SPDX-License-Identifier: Apache-2.0
"""What an optimizer keeps, saves and loads, and what must never be in a file."""

import copy
import pathlib
import sys
import zipfile

import keras
import numpy as np
import pytest
import tensorflow as tf

sys.path.insert(0, str(pathlib.Path(__file__).parent))

from softmax_regression import BATCH, STEPS, flat, make_model, make_optimizer, make_problem

from dice_tf.optimizers import DiceSGDOptimizer


def test_case_4_keras_file_round_trip_keeps_the_step_count_and_neither_errors_nor_seed(tmp_path):
    x, y = make_problem()
    optimizer = make_optimizer(noise_multiplier=0.5, momentum=0.9, noise_seed=11)
    model = make_model(optimizer)
    model.fit(x, y, batch_size=BATCH, verbose=0)
    assert np.abs(flat(optimizer.errors)).max() > 0
    model.save(tmp_path / "model.keras")
    loaded = keras.models.load_model(tmp_path / "model.keras")
    assert isinstance(loaded.optimizer, DiceSGDOptimizer)
    assert "noise_seed" not in loaded.optimizer.get_config()
    assert loaded.optimizer.mechanism.noise_is_secret
    assert int(loaded.optimizer.iterations) == STEPS
    np.testing.assert_array_equal(flat(loaded.optimizer.errors), 0.0)
    np.testing.assert_array_equal(
        flat(loaded.optimizer.momentums), flat(model.optimizer.momentums)
    )
    for name in ("l2_norm_clip", "error_norm_clip", "noise_multiplier", "expected_batch_size"):
        assert getattr(loaded.optimizer.mechanism, name) == getattr(optimizer.mechanism, name)
    loaded.fit(x, y, batch_size=BATCH, verbose=0)
    assert int(loaded.optimizer.iterations) == 2 * STEPS


def rewind_by_weights(model, path):
    model.save_weights(path / "start.weights.h5")
    return lambda: model.load_weights(path / "start.weights.h5")


def rewind_by_checkpoint(model, path):
    checkpoint = tf.train.Checkpoint(model=model, optimizer=model.optimizer)
    saved = checkpoint.save(str(path / "checkpoint"))
    return lambda: checkpoint.restore(saved)


def rewind_by_hand(model, path):
    start = [v.numpy() for v in model.trainable_variables]

    def rewind():
        model.optimizer.iterations.assign(1)
        for variable, value in zip(model.trainable_variables, start):
            variable.assign(value)

    return rewind


@pytest.mark.parametrize("seed", [None, 5])
@pytest.mark.parametrize(
    "make_rewind", [rewind_by_weights, rewind_by_checkpoint, rewind_by_hand]
)
def test_going_back_never_repeats_noise(tmp_path, make_rewind, seed):
    """The difference of two runs from one checkpoint must not be free of noise."""
    x, y = make_problem()
    model = make_model(make_optimizer(noise_multiplier=1.0, noise_seed=seed))
    model.train_on_batch(x[:BATCH], y[:BATCH])
    rewind = make_rewind(model, tmp_path)
    ends = []
    for _ in range(2):
        rewind()
        assert int(model.optimizer.iterations) == 1
        model.train_on_batch(x[:BATCH], y[:BATCH])
        ends.append(flat(model.trainable_variables))
    assert np.abs(ends[0] - ends[1]).min() > 0


def test_no_file_holds_the_error(tmp_path):
    """Not even those that Keras fills with all variables of the optimizer."""
    x, y = make_problem()
    model = make_model(make_optimizer(noise_multiplier=1.0, momentum=0.9))
    model.fit(x, y, batch_size=BATCH, verbose=0)
    errors = model.optimizer.errors
    assert np.abs(flat(errors)).min() > 0
    model.save(tmp_path / "model.keras")
    model.save(tmp_path / "legacy.h5")
    model.save_weights(tmp_path / "model.weights.h5")
    tf.train.Checkpoint(model=model, optimizer=model.optimizer).save(str(tmp_path / "checkpoint"))
    model.export(tmp_path / "exported", verbose=False)
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    contents = b"".join(
        zipfile.ZipFile(path).read(name)
        for path in files if path.suffix == ".keras"
        for name in zipfile.ZipFile(path).namelist()
    ) + b"".join(path.read_bytes() for path in files)  # fmt: skip
    # The test can see what is there: weights and momentum, as float32 in memory order.
    for variable in (*model.trainable_variables, *model.optimizer.momentums):
        assert variable.numpy().tobytes() in contents
    for error in errors:
        assert error.numpy().tobytes() not in contents
    key = model.optimizer._private.noise_key.read().numpy().tobytes()
    assert key not in contents


def test_a_copied_optimizer_does_not_share_its_noise():
    optimizer = make_optimizer(noise_multiplier=1.0)
    key = optimizer._private.noise_key
    for other in (copy.copy(key), copy.deepcopy(key)):
        assert np.any(other.read() != key.read())
    clone = DiceSGDOptimizer.from_config(optimizer.get_config())
    assert np.any(clone._private.noise_key.read() != optimizer._private.noise_key.read())
    assert clone.mechanism == optimizer.mechanism


def test_learning_rate_schedules_work_and_survive_serialization():
    schedule = keras.optimizers.schedules.PiecewiseConstantDecay([2], [0.5, 0.0])
    model = make_model(make_optimizer(learning_rate=schedule))
    x, y = make_problem()
    model.fit(x[: 3 * BATCH], y[: 3 * BATCH], batch_size=BATCH, shuffle=False, verbose=0)
    after = flat(model.trainable_variables)
    model.fit(x, y, batch_size=BATCH, shuffle=False, verbose=0)
    np.testing.assert_array_equal(flat(model.trainable_variables), after)
    clone = DiceSGDOptimizer.from_config(
        {**model.optimizer.get_config(), "noise_multiplier": 1.0}
    )
    assert isinstance(clone._learning_rate, keras.optimizers.schedules.PiecewiseConstantDecay)


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__]))
