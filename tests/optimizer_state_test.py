# Copyright 2026 The dice_tf Authors.
# SPDX-License-Identifier: Apache-2.0
"""What an optimizer keeps, saves and loads, and what must never be in a file."""

import copy
import json
import pathlib
import sys
import warnings
import zipfile

import h5py
import keras
import numpy as np
import pytest
import tensorflow as tf

sys.path.insert(0, str(pathlib.Path(__file__).parent))

from softmax_regression import BATCH, STEPS, flat, make_model, make_optimizer, make_problem

from dice_tf.ledger import provenance
from dice_tf.training import error_slots
from dice_tf.training.optimizers import DiceSGDOptimizer


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
    assert not loaded.optimizer.mechanism.noise_is_secret  # Nor was it.
    assert int(loaded.optimizer.iterations) == STEPS
    np.testing.assert_array_equal(flat(loaded.optimizer.errors), 0.0)
    np.testing.assert_array_equal(flat(loaded.optimizer.momentums), flat(model.optimizer.momentums))
    for name in ("l2_norm_clip", "error_norm_clip", "noise_multiplier", "expected_batch_size"):
        assert getattr(loaded.optimizer.mechanism, name) == getattr(optimizer.mechanism, name)
    loaded.fit(x, y, batch_size=BATCH, verbose=0)
    assert int(loaded.optimizer.iterations) == 2 * STEPS


@pytest.mark.filterwarnings("ignore:This file holds the error")
@pytest.mark.parametrize("save_errors", [False, True])
def test_weights_loaded_into_an_optimizer_that_is_not_built_keep_the_step_count(
    tmp_path, save_errors
):
    x, y = make_problem()
    make = lambda: make_model(make_optimizer(momentum=0.9, save_errors=save_errors))
    first, second = make(), make()
    first.fit(x, y, batch_size=BATCH, verbose=0)
    first.save_weights(tmp_path / "run.weights.h5")
    second.load_weights(tmp_path / "run.weights.h5")
    assert not second.optimizer.built and int(second.optimizer.iterations) == STEPS
    second.optimizer.build(second.trainable_variables)
    assert int(second.optimizer.iterations) == STEPS
    assert int(second.optimizer._private.noise_draws) == STEPS
    for name in ("momentums", "errors"):
        ours, loaded = (flat(getattr(m.optimizer, name)) for m in (first, second))
        assert np.abs(ours).max() > 0
        expected = ours if save_errors or name == "momentums" else np.zeros_like(ours)
        np.testing.assert_array_equal(loaded, expected)
    second.fit(x, y, batch_size=BATCH, verbose=0)
    assert int(second.optimizer.iterations) == 2 * STEPS


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


@pytest.mark.filterwarnings("ignore:This file holds the error")
@pytest.mark.parametrize("private", [False, True])
@pytest.mark.parametrize("seed", [None, 5])
@pytest.mark.parametrize("make_rewind", [rewind_by_weights, rewind_by_checkpoint, rewind_by_hand])
def test_going_back_never_repeats_noise(tmp_path, make_rewind, seed, private):
    """The difference of two runs from one checkpoint must not be free of noise."""
    x, y = make_problem()
    model = make_model(make_optimizer(noise_multiplier=1.0, noise_seed=seed))
    model.train_on_batch(x[:BATCH], y[:BATCH])
    # Too late for the step that is traced: the file takes the count of draws back.
    model.optimizer.save_errors = private
    rewind = make_rewind(model, tmp_path)
    ends = []
    for _ in range(2):
        rewind()
        assert int(model.optimizer.iterations) == 1
        model.train_on_batch(x[:BATCH], y[:BATCH])
        ends.append(flat(model.trainable_variables))
    assert np.abs(ends[0] - ends[1]).min() > 0


@pytest.mark.parametrize("jit_compile", [False, True])
@pytest.mark.parametrize("feedback_steps", [1, 2])
def test_an_error_of_discarded_steps_is_not_fed_back(tmp_path, jit_compile, feedback_steps):
    x, y = make_problem()
    arguments = dict(feedback_steps=feedback_steps, l2_norm_clip=0.1)
    model = make_model(make_optimizer(**arguments), jit_compile=jit_compile)
    step = lambda: model.train_on_batch(x[:BATCH], y[:BATCH])
    step()
    rewind = rewind_by_checkpoint(model, tmp_path)

    def end(forget_before=None):
        step()
        rewind()
        assert np.abs(flat(model.optimizer.errors)).max() > 0
        for number in range(2):
            if number == forget_before:
                for error in model.optimizer.errors:
                    error.assign(np.zeros(error.shape))
            step()
        return flat(model.trainable_variables)

    expected = end(forget_before=0)
    np.testing.assert_array_equal(end(), expected)
    # What the step after it leaves is fed back as always.
    assert np.abs(end(forget_before=1) - expected).max() > 1e-3


@pytest.mark.parametrize("sizes", [(3,), (2**16,), (2**16, 3, 2**16 + 1)], ids=str)
def test_errors_of_another_step_are_nothing_whatever_their_size(sizes):
    variables = [keras.Variable(tf.zeros([size])) for size in sizes]
    optimizer = make_optimizer()
    optimizer.build(variables)
    for number, error in enumerate(optimizer.errors):
        error.assign(tf.fill(error.shape, number + 1.0))
    values = lambda: error_slots.values(optimizer, optimizer.errors)
    for read in (values, tf.function(values)):
        for step, factor in [(0, 1.0), (5, 0.0)]:
            optimizer.iterations.assign(step)
            expected = [np.full(size, factor * (n + 1)) for n, size in enumerate(sizes)]
            for got, want in zip(read(), expected, strict=True):
                np.testing.assert_array_equal(got, want)
    # Not by a product: what is forgotten may be anything.
    optimizer.errors[0].assign(tf.fill(optimizer.errors[0].shape, np.nan))
    np.testing.assert_array_equal(values()[0], np.zeros(sizes[0]))


@pytest.mark.parametrize("kind", ["model.keras", "run.weights.h5", "checkpoint"])
def test_a_seeded_run_is_never_called_secret_again(tmp_path, kind):
    x, y = make_problem()
    model = make_model(make_optimizer(noise_multiplier=1.0, noise_seed=1))
    model.train_on_batch(x[:BATCH], y[:BATCH])
    other = make_model(make_optimizer(noise_multiplier=1.0))
    other.train_on_batch(x[:BATCH], y[:BATCH])
    assert other.optimizer.mechanism.noise_is_secret
    path = str(tmp_path / kind)
    if kind == "checkpoint":
        saved = tf.train.Checkpoint(model=model, optimizer=model.optimizer).save(path)
        tf.train.Checkpoint(model=other, optimizer=other.optimizer).restore(saved)
    elif kind == "model.keras":
        model.save(path)
        other = keras.models.load_model(path)
    else:
        model.save_weights(path)
        other.load_weights(path)
    assert not other.optimizer.mechanism.noise_is_secret
    # Nor after more steps with a secret key, saved and loaded once more.
    other.train_on_batch(x[:BATCH], y[:BATCH])
    other.save(tmp_path / "again.keras")
    mechanism = keras.models.load_model(tmp_path / "again.keras").optimizer.mechanism
    assert mechanism == model.optimizer.mechanism


@pytest.mark.parametrize("is_built", [False, True])
def test_a_file_with_a_record_of_another_version_is_refused(tmp_path, is_built):
    x, y = make_problem()
    path = tmp_path / "old.weights.h5"
    model = make_model(make_optimizer())
    model.train_on_batch(x[:BATCH], y[:BATCH])
    model.save_weights(path)
    with h5py.File(path, "r+") as file:
        variables = file["optimizer/vars"]
        (name,) = [n for n in variables if variables[n].shape == (provenance.RECORD_SIZE,)]
        record = variables[name][:7]
        del variables[name]
        variables[name] = record
    model = make_model(make_optimizer())
    match = rf"another version.*\(7,\), not \({provenance.RECORD_SIZE},\)"
    with pytest.raises(ValueError, match=match):
        if is_built:
            model.optimizer.build(model.trainable_variables)
        model.load_weights(path)
        model.optimizer.build(model.trainable_variables)


def write_every_kind_of_file(model, path):
    """Also those that Keras fills with all variables of the optimizer; returns raw contents."""
    x, y = make_problem()
    callbacks = [
        keras.callbacks.ModelCheckpoint(path / "checkpoint.keras"),
        keras.callbacks.ModelCheckpoint(path / "checkpoint.weights.h5", save_weights_only=True),
        keras.callbacks.BackupAndRestore(str(path / "backup"), delete_checkpoint=False),
    ]
    model.fit(x, y, batch_size=BATCH, verbose=0, callbacks=callbacks)
    model.save(path / "model.keras")
    model.save(path / "legacy.h5")
    model.save_weights(path / "model.weights.h5")
    tf.train.Checkpoint(model=model, optimizer=model.optimizer).save(str(path / "tf"))
    model.export(path / "exported", verbose=False)
    for archive in path.rglob("*.keras"):
        zipfile.ZipFile(archive).extractall(archive.with_suffix(".unzipped"))
    files = [file for file in path.rglob("*") if file.is_file() and file.suffix != ".keras"]
    assert len(files) > 15
    return {file: file.read_bytes() for file in files}


def values_in(path):
    """Yields the name and the raw value of each variable in the HDF5 files and checkpoints."""
    for file in [*path.rglob("*.h5"), path / "exported/variables/variables", path / "tf-1"]:
        if file.suffix != ".h5":
            reader = tf.train.load_checkpoint(str(file))
            for name in reader.get_variable_to_shape_map():
                yield f"{file.name}: {name}", np.asarray(reader.get_tensor(name)).tobytes()
            continue
        found = []
        with h5py.File(file) as opened:
            opened.visititems(lambda name, item: found.append((name, item)))
            for name, item in found:
                if isinstance(item, h5py.Dataset):
                    yield f"{file.name}: {name}", item[()].tobytes()


def private_bytes(model):
    key = model.optimizer._private.noise_key.read().numpy()
    return [key.tobytes(), *(error.numpy().tobytes() for error in model.optimizer.errors)]


def test_files_hold_weights_slots_and_public_counts_and_nothing_else(tmp_path):
    """No error, no key, no loss or accuracy: no statistic of the data that is not noised."""
    model = make_model(make_optimizer(noise_multiplier=1.0, momentum=0.9), metrics=["accuracy"])
    contents = write_every_kind_of_file(model, tmp_path)
    optimizer = model.optimizer
    assert np.abs(flat(optimizer.errors)).min() > 0
    together = b"".join(contents.values())
    # The test can see what is there: weights and momentum, as float32 in memory order.
    for variable in (*model.trainable_variables, *optimizer.momentums):
        assert variable.numpy().tobytes() in together
    for secret in private_bytes(model):
        assert secret not in together
    known = {v.numpy().tobytes() for v in (*model.weights, *optimizer.variables)}
    public = ("save_counter", "_CHECKPOINTABLE_OBJECT_GRAPH")
    others = [
        name for name, value in values_in(tmp_path)
        if value not in known and not any(word in name for word in public)
    ]  # fmt: skip
    assert not others
    assert len(optimizer.variables) == 5  # Steps, learning rate, two momentums, the record.
    metadata = json.loads((tmp_path / "backup/training_metadata.json").read_text())
    assert set(metadata) == {"epoch", "batch"}
    for file, content in contents.items():
        if file.name == "config.json":
            assert json.loads(content)["compile_config"]["optimizer"]["config"] == {
                **optimizer.get_config(), "learning_rate": 0.5
            }  # fmt: skip
            assert b"seed" not in json.dumps(optimizer.get_config()).encode()


def test_private_files_hold_it_on_request_and_say_so(tmp_path):
    model = make_model(make_optimizer(noise_multiplier=1.0, save_errors=True))
    with pytest.warns(UserWarning, match="who reads it can remove the noise") as caught:
        contents = write_every_kind_of_file(model, tmp_path)
    assert len([w for w in caught if "can remove the noise" in str(w.message)]) == 5
    secrets = private_bytes(model)
    private = {file.name for file, raw in contents.items() if all(s in raw for s in secrets)}
    assert private == {
        "model.weights.h5", "checkpoint.weights.h5", "latest.weights.h5", "tf-1.data-00000-of-00001"
    }  # fmt: skip
    # Its steps were traced with `save_errors`: the other key is not used, and nowhere.
    process_key = model.optimizer._private.process_key.read().numpy().tobytes()
    assert process_key != secrets[0] and not any(process_key in raw for raw in contents.values())
    # Nothing of it anywhere else, such as in the format that Keras calls legacy.
    for file, raw in contents.items():
        assert file.name in private or not any(secret in raw for secret in secrets)
    for name, _ in values_in(tmp_path):
        assert "error" not in name and "noise" not in name or "private_" in name

    model.optimizer.save_errors = False
    (tmp_path / "released").mkdir()
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        warnings.filterwarnings("ignore", message=".*legacy")
        released = write_every_kind_of_file(model, tmp_path / "released")
    together = b"".join(released.values())
    assert not any(secret in together for secret in private_bytes(model))
    assert not any("private" in name for name, _ in values_in(tmp_path / "released"))


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
    clone = DiceSGDOptimizer.from_config({**model.optimizer.get_config(), "noise_multiplier": 1.0})
    assert isinstance(clone._learning_rate, keras.optimizers.schedules.PiecewiseConstantDecay)


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__]))
