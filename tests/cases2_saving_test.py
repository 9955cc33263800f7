# Copyright 2026 The dice_tf Authors.
# SPDX-License-Identifier: Apache-2.0
"""Files, copies and processes: what comes back is private, and no noise or draw comes twice."""

import copy
import os
import pathlib
import pickle
import subprocess
import sys
import warnings

import h5py
import keras
import numpy as np
import pytest
import tensorflow as tf

sys.path.insert(0, str(pathlib.Path(__file__).parent))

from optimizer_state_test import private_bytes, values_in, write_every_kind_of_file
from softmax_regression import BATCH, STEPS, flat, make_model, make_optimizer, make_problem

import dice_tf
from dice_tf import accounting
from dice_tf.checkpoints import private_checkpoints
from dice_tf.errors import DataDependentChoiceWarning, MechanismError, SamplingError

sys.path.insert(0, str(pathlib.Path(__file__).parent))

X, Y = make_problem()
N = len(X)
ROOT = pathlib.Path(__file__).parents[1]
COPIES = {
    "copy": copy.copy,
    "deepcopy": copy.deepcopy,
    "pickle": lambda original: pickle.loads(pickle.dumps(original)),
}
quiet = pytest.mark.filterwarnings("ignore:This file holds the error")


def make(**arguments):
    return make_model(make_optimizer(noise_multiplier=1.0, momentum=0.9, **arguments))


def fit(model, **arguments):
    return model.fit(X, Y, batch_size=BATCH, verbose=0, **arguments)


@pytest.fixture(scope="module")
def h5_file(tmp_path_factory):
    """A trained model, saved in the legacy format, and the path."""
    path = str(tmp_path_factory.mktemp("h5") / "a.h5")
    model = make()
    fit(model, callbacks=[keras.callbacks.ModelCheckpoint(path)])
    model.save(path)
    return model, path


def through_file(path):
    def save_and_load(model):
        model.save(path)
        return keras.models.load_model(path)

    return save_and_load


def test_a1_h5_save_keeps_the_optimizer(h5_file, tmp_path):
    model, _ = h5_file
    trained = {".keras": through_file(tmp_path / "a.keras"), ".h5": through_file(tmp_path / "b.h5")}
    untrained = {
        "clone": keras.models.clone_model,
        "json": lambda m: keras.models.model_from_json(m.to_json()),
    }
    for name, way in {**trained, **COPIES, **untrained}.items():
        again = way(model)
        assert type(again.optimizer) is type(model.optimizer), name
        assert again.optimizer.mechanism == model.optimizer.mechanism
        steps = 0 if name in untrained else STEPS
        assert int(again.optimizer.iterations) == steps, name
    # Without any optimizer: what only has the configuration, and what is only for inference.
    config = keras.Sequential.from_config(model.get_config())
    assert getattr(config, "optimizer", None) is None
    model.export(tmp_path / "exported", verbose=False)
    assert not hasattr(tf.saved_model.load(str(tmp_path / "exported")), "optimizer")


def test_a1_a_model_from_an_h5_file_goes_on_where_the_saved_one_was(h5_file, tmp_path):
    model, path = h5_file
    loaded = keras.models.load_model(path)
    # Also when it is brought to the new format before anything else.
    for again in (loaded, through_file(tmp_path / "a.keras")(loaded)):
        private_checkpoints.build_optimizer(again)
        assert len(again.optimizer.variables) == 5
        np.testing.assert_array_equal(
            flat(again.optimizer.variables), flat(model.optimizer.variables)
        )
    sampling = dice_tf.ShuffledEpochs(N, BATCH)
    budget = dice_tf.EpsilonCallback(sampling, delta=1e-3)
    before = flat(loaded.trainable_variables)
    fit(loaded, callbacks=[budget])
    assert budget.accounted_steps() == 2 * STEPS
    assert budget.epsilon() == accounting.compute_epsilon(
        loaded.optimizer.mechanism, sampling, 2 * STEPS, 1e-3
    )
    assert np.abs(flat(loaded.trainable_variables) - before).min() > 0


def test_a1_a_learning_rate_assigned_after_loading_stays(h5_file, tmp_path):
    _, path = h5_file
    loaded = keras.models.load_model(path)
    assert float(loaded.optimizer.learning_rate) == 0.5
    loaded.optimizer.learning_rate = 0.25
    again = through_file(tmp_path / "a.keras")(loaded)
    for model in (loaded, again):
        fit(model)
        assert float(model.optimizer.learning_rate) == 0.25
        assert int(model.optimizer.iterations) == 2 * STEPS


def test_a1_an_h5_file_without_its_record_is_refused_before_the_first_step(h5_file, tmp_path):
    """Keras catches errors of its own loader, and would begin to count from 0."""
    model, path = h5_file
    changed = tmp_path / "changed.h5"
    changed.write_bytes(pathlib.Path(path).read_bytes())
    with h5py.File(changed, "r+") as file:
        attributes = file["optimizer_weights"].attrs
        names = attributes["weight_names"][:-1]
        attributes["weight_names"] = names
    loaded = keras.models.load_model(changed)
    with pytest.raises(SamplingError, match="has 4 variables, and this one"):
        fit(loaded)


def test_a1_an_optimizer_that_was_assigned_is_the_one_that_is_saved(tmp_path):
    model = make_model("sgd")
    model.optimizer = make_optimizer(noise_multiplier=1.0)
    fit(model)
    for way in (through_file(tmp_path / "a.keras"), copy.deepcopy, keras.models.clone_model):
        assert type(way(model).optimizer) is dice_tf.DiceSGDOptimizer
    # Other models are none of our business.
    plain = make_model("sgd")
    assert type(copy.deepcopy(plain).optimizer) is keras.optimizers.SGD


@quiet
@pytest.mark.parametrize("save_errors", [False, True])
def test_a1_weights_loaded_before_the_first_step_are_saved_with_their_count(tmp_path, save_errors):
    model = make(save_errors=save_errors)
    fit(model)
    model.save_weights(tmp_path / "a.weights.h5")
    waiting = make(save_errors=save_errors)
    waiting.load_weights(tmp_path / "a.weights.h5")
    assert not waiting.optimizer.built
    waiting.save_weights(tmp_path / "b.weights.h5")
    for name in ("a", "b"):
        again = make(save_errors=save_errors)
        again.optimizer.build(again.trainable_variables)
        again.load_weights(tmp_path / f"{name}.weights.h5")
        np.testing.assert_array_equal(
            flat(again.optimizer.variables), flat(model.optimizer.variables)
        )
        kept = flat(again.optimizer.errors)
        np.testing.assert_array_equal(kept, flat(model.optimizer.errors) * save_errors)
    waiting.optimizer.save_errors = False
    waiting.save_weights(tmp_path / "released.weights.h5")
    with h5py.File(tmp_path / "released.weights.h5") as file:
        assert len(file["optimizer/vars"]) == 5


@keras.saving.register_keras_serializable("cases2_saving")
class Watched(keras.layers.Layer):
    """A layer with a metric of its own."""

    def __init__(self, **arguments):
        super().__init__(**arguments)
        self.seen = keras.metrics.Mean(name="seen")

    def call(self, x):
        return x


def make_watched(**arguments):
    optimizer = make_optimizer(noise_multiplier=1.0, momentum=0.9, **arguments)
    model = keras.Sequential([keras.Input((6,)), keras.layers.Dense(4), Watched()])
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    binary = lambda y, p: keras.metrics.binary_accuracy(keras.ops.one_hot(y, 4), p)
    binary.__name__ = "binary"
    metrics = ["accuracy", keras.metrics.SparseTopKCategoricalAccuracy(2), binary]
    model.compile(optimizer, loss, metrics=metrics)
    model.layers[-1].seen.update_state([3.0, 4.0])
    return model


@quiet
@pytest.mark.parametrize("save_errors", [False, True])
def test_d8_the_state_tree_holds_no_metrics_and_nothing_private(save_errors):
    model = make_watched(save_errors=save_errors)
    fit(model)
    for value_format in ("backend_tensor", "numpy_array"):
        tree = model.get_state_tree(value_format)
        assert tree["metrics_variables"] == {}
        values = [np.asarray(value).tobytes() for value in keras.tree.flatten(tree)]
        secrets = [
            *private_bytes(model),
            model.optimizer._private.process_key.read().numpy().tobytes(),
        ]
        assert len(values) == 7 and not set(values) & set(secrets)
        metrics = {v.numpy().tobytes() for v in model.metrics_variables if np.any(v.numpy())}
        assert len(metrics) >= 4 and not set(values) & (metrics - {np.float32(2).tobytes()})
    # It brings another model to the same state.
    other = make_watched(save_errors=save_errors)
    other.optimizer.build(other.trainable_variables)
    other.set_state_tree(keras.tree.map_structure(np.asarray, renamed(tree, model, other)))
    for name in ("weights", "trainable_variables"):
        np.testing.assert_array_equal(flat(getattr(other, name)), flat(getattr(model, name)))
    assert int(other.optimizer.iterations) == STEPS
    # And a model that is not private keeps what Keras gives it.
    plain = make_model("sgd")
    fit(plain)
    assert plain.get_state_tree()["metrics_variables"]


def renamed(tree, model, other):
    """Returns a tree with the automatic names of another model's layers."""
    text = lambda one: [layer.name for layer in (one, one.optimizer, *one.layers)]
    names = dict(zip(text(model), text(other), strict=True))
    if not isinstance(tree, dict):
        return tree
    join = lambda key: "_".join(names.get(part, part) for part in [key])
    slots = {
        v.path.split("/")[-1]: w.path.split("/")[-1]
        for v, w in zip(model.optimizer.variables, other.optimizer.variables, strict=True)
    }
    return {slots.get(join(k), join(k)): renamed(v, model, other) for k, v in tree.items()}


def test_d8_no_file_holds_the_state_of_a_metric(tmp_path):
    """Also of metrics that a layer owns, and in the middle of an epoch."""
    model = make_watched()
    write_every_kind_of_file(model, tmp_path)
    known = {v.numpy().tobytes() for v in (*model.weights, *model.optimizer.variables)}
    public = ("save_counter", "_CHECKPOINTABLE_OBJECT_GRAPH")
    others = [
        name for name, value in values_in(tmp_path)
        if value not in known and not any(word in name for word in public)
    ]  # fmt: skip
    assert not others
    assert all("seen" not in name and "metric" not in name for name, _ in values_in(tmp_path))


@quiet
def test_d8_a_saved_model_of_tensorflow_is_as_private_as_its_optimizer(tmp_path):
    """`tf.saved_model.save` writes what `tf.train.Checkpoint` does; `export` never does."""
    for save_errors in (False, True):
        model = make_watched(save_errors=save_errors)
        fit(model)
        folder = tmp_path / str(save_errors)
        tf.saved_model.save(model, str(folder / "saved"))
        model.export(folder / "exported", verbose=False)
        read = lambda kind: b"".join(
            f.read_bytes() for f in (folder / kind / "variables").iterdir()
        )
        holds = lambda kind: any(secret in read(kind) for secret in private_bytes(model))
        assert holds("saved") is save_errors and not holds("exported")


DECIDING = {
    "TerminateOnNaN by 'loss'": lambda: keras.callbacks.TerminateOnNaN(),
    "EarlyStopping by 'loss'": lambda: keras.callbacks.EarlyStopping(monitor="loss"),
    "ReduceLROnPlateau by 'accuracy'": lambda: keras.callbacks.ReduceLROnPlateau(
        "accuracy", mode="max"
    ),
    "ModelCheckpoint by 'loss'": lambda: keras.callbacks.ModelCheckpoint(
        "best.keras", monitor="loss", save_best_only=True
    ),
}


@pytest.mark.parametrize("named", DECIDING)
def test_d9_a_callback_that_decides_by_training_metrics_is_named_once(tmp_path, monkeypatch, named):
    monkeypatch.chdir(tmp_path)
    model = make()
    with pytest.warns(DataDependentChoiceWarning) as caught:
        fit(model, epochs=2, callbacks=[DECIDING[named](), keras.callbacks.CSVLogger("log.csv")])
    (warning,) = [w for w in caught if w.category is DataDependentChoiceWarning]
    text = str(warning.message)
    assert f": {named}. Monitor a" in text and "CSVLogger" not in text
    assert warning.filename == __file__ and len(text.split()) <= 60 + 3
    # All of them in one warning, and none where nothing is claimed.
    nested = keras.callbacks.CallbackList([make_callback() for make_callback in DECIDING.values()])
    with pytest.warns(DataDependentChoiceWarning, match=", ".join(DECIDING)) as caught:
        fit(model, callbacks=nested)
    assert len([w for w in caught if w.category is DataDependentChoiceWarning]) == 1
    with warnings.catch_warnings():
        warnings.simplefilter("error", DataDependentChoiceWarning)
        fit(make_model("sgd"), callbacks=[DECIDING[named]()])


def test_d9_callbacks_that_log_or_look_at_other_data_are_left_alone(tmp_path):
    class Note(keras.callbacks.Callback):
        monitor = "loss"

    given = keras.callbacks
    callbacks = [
        given.EarlyStopping(monitor="val_loss"),
        given.ReduceLROnPlateau("val_accuracy", mode="max"),
        given.ModelCheckpoint(tmp_path / "best.keras", "val_loss", save_best_only=True),
        given.ModelCheckpoint(tmp_path / "each.keras", monitor="loss"),
        given.EarlyStopping(monitor="epsilon", mode="min"),
        given.CSVLogger(str(tmp_path / "log.csv")),
        given.LambdaCallback(on_epoch_end=lambda epoch, logs: None),
        given.LearningRateScheduler(lambda epoch: 0.1),
        given.BackupAndRestore(str(tmp_path / "backup")),
        given.History(),
        Note(),
    ]
    with warnings.catch_warnings():
        warnings.simplefilter("error", DataDependentChoiceWarning)
        fit(make(), callbacks=callbacks, validation_data=(X[:4], Y[:4]))


def test_d9_without_the_callback_a_nan_example_does_not_hurt():
    """As the warning says: nothing is gained by a stop that tells of that example."""
    x = np.repeat(X, 2, axis=0)
    x[7] = np.nan
    sampling = dice_tf.CyclicPoissonSampling(len(x), BATCH, seed=1)
    model = make(noise_seed=2)
    history = model.fit(sampling.dataset(x, np.repeat(Y, 2)), epochs=2, verbose=0)
    assert not np.isfinite(history.history["loss"]).all()
    assert int(model.optimizer.iterations) == 2 * sampling.steps_per_epoch
    assert np.isfinite(flat(model.weights)).all()


def test_b17_the_command_has_the_names_of_the_api_and_prints_nothing_else():
    command = [sys.executable, "-m", "dice_tf.accounting", "--num_examples=60000", "--steps=30"]
    command += ["--batch_size=2048", "--target_epsilon=2.5", "--delta=1e-5", "--sampling=shuffled"]
    environment = {k: v for k, v in os.environ.items() if k != "TF_CPP_MIN_LOG_LEVEL"}
    environment["PYTHONPATH"] = os.pathsep.join([str(ROOT), *sys.path])
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert (done.returncode, done.stderr) == (0, "")
    sampling = dice_tf.ShuffledEpochs(60000, 2048)
    found = accounting.calibrate_noise_multiplier(
        target_epsilon=2.5, delta=1e-5, sampling=sampling, steps=30, l2_norm_clip=1.0
    )
    mechanism = dice_tf.DiceMechanism(
        l2_norm_clip=1.0, noise_multiplier=found, expected_batch_size=2048
    )
    expected = accounting.privacy_statement(mechanism, sampling, 30, 1e-5)
    assert done.stdout.strip() == expected.strip()


def test_b17_noise_that_float32_rounds_to_none_is_refused():
    make_mechanism = lambda z: dice_tf.DiceMechanism(
        l2_norm_clip=1.0, noise_multiplier=z, expected_batch_size=5
    )
    assert np.float32(1e-200) == 0 and np.float32(1e-30) > 0
    for noise_multiplier in (1e-200, 9e-31):
        with pytest.raises(MechanismError, match="`noise_multiplier` must be finite and at least"):
            make_mechanism(noise_multiplier)
    # The smallest that is taken has an epsilon, as no noise has; a formula of the paper, too.
    for noise_multiplier in (2e-30, 0.0):
        sampling = dice_tf.PoissonSampling(50, 5)
        mechanism = make_mechanism(noise_multiplier)
        assert accounting.compute_epsilon(mechanism, sampling, 10, 1e-3) > 1e50
    assert accounting.paper_epsilon(1e-200, 1e-5, 50, 10, form="renyi") == np.inf


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__]))
