# Copyright 2026 The dice_tf Authors.
# SPDX-License-Identifier: Apache-2.0
"""EpsilonCallback, or its absence, in searches, in copies and beside other callbacks.

Each test is named after its line in the list of failures that real use has shown.
"""

import copy
import csv
import warnings

import keras
import keras_tuner
import numpy as np
import pytest

import dice_tf
from dice_tf import accounting
from dice_tf.errors import UnaccountedStepsWarning

N, B, DELTA = 80, 10, 1e-3
RANDOM = np.random.default_rng(0)
X = RANDOM.normal(size=(N, 3)).astype("float32")
Y = RANDOM.normal(size=(N, 1)).astype("float32")


def make(units=1):
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(units), keras.layers.Dense(1)])
    optimizer = dice_tf.DiceSGDOptimizer(
        0.1, l2_norm_clip=1.0, noise_multiplier=5.0, expected_batch_size=B
    )
    model.compile(optimizer, "mse", jit_compile=False)
    return model


def planned(steps, sampling):
    return accounting.compute_epsilon(make().optimizer.mechanism, sampling, steps, DELTA)


def search(folder, sampling, callbacks):
    """Tries two widths, for one epoch each."""
    tuner = keras_tuner.RandomSearch(
        lambda hp: make(hp.Choice("units", [1, 2])),
        objective="val_loss",
        max_trials=2,
        directory=folder,
        seed=0,
    )
    tuner.search(
        sampling.dataset(X, Y),
        validation_data=(X[:B], Y[:B]),
        callbacks=callbacks,
        verbose=0,
    )
    return tuner


# --- B4 and A2: keras_tuner ---------------------------------------------------------


def test_b4_every_trial_of_a_search_has_its_epsilon(tmp_path):
    sampling = dice_tf.CyclicPoissonSampling(N, B)
    callback = dice_tf.EpsilonCallback(sampling, DELTA, target_epsilon=100.0)
    with warnings.catch_warnings():
        warnings.simplefilter("error", UnaccountedStepsWarning)
        tuner = search(tmp_path, sampling, [callback])
    trials = tuner.oracle.get_best_trials(2)
    assert [trial.metrics.get_best_value("epsilon") for trial in trials] == [
        planned(8, sampling)
    ] * 2
    best = tuner.get_best_models(1)[0]
    run = dice_tf.accounted_run(best, sampling)
    assert dice_tf.run_epsilon(best, sampling, DELTA) == planned(8, sampling)
    both = accounting.compose_epsilon([run] * 2, DELTA)
    assert planned(8, sampling) < both < 2 * planned(8, sampling)


def test_a2_a_search_without_the_callback_says_what_is_unaccounted(tmp_path):
    sampling = dice_tf.CyclicPoissonSampling(N, B)
    with pytest.warns(UnaccountedStepsWarning, match="took 8 private steps") as caught:
        search(tmp_path, sampling, [])
    of_ours = [w for w in caught if w.category is UnaccountedStepsWarning]
    assert len(of_ours) == 2 and "choosing one costs the epsilon of all" in str(of_ours[0].message)


def test_a2_fit_without_the_callback_says_so_once_for_an_optimizer():
    model, sampling = make(), dice_tf.ShuffledEpochs(N, B)
    with pytest.warns(UnaccountedStepsWarning, match="took 16 private steps") as caught:
        model.fit(X, Y, batch_size=B, epochs=2, verbose=0)
    (warning,) = [w for w in caught if w.category is UnaccountedStepsWarning]
    assert warning.filename == __file__
    # The two remedies of the message, as they stand there.
    assert "`dice_tf.run_epsilon(model, sampling, delta)`" in str(warning.message)
    assert "callbacks=[dice_tf.EpsilonCallback(sampling, delta)]" in str(warning.message)
    assert dice_tf.run_epsilon(model, sampling, delta=DELTA) == planned(16, sampling)
    with warnings.catch_warnings():
        warnings.simplefilter("error", UnaccountedStepsWarning)
        model.fit(X, Y, batch_size=B, verbose=0)
        callbacks = [dice_tf.EpsilonCallback(sampling, delta=DELTA)]
        make().fit(X, Y, batch_size=B, verbose=0, callbacks=callbacks)
        stock = make()
        stock.compile("sgd", "mse")
        stock.fit(X, Y, verbose=0)
    assert callbacks[0].epsilon() == planned(8, sampling)


def test_a2_a_run_that_is_interrupted_is_told_too():
    def interrupt(batch, logs):
        raise KeyboardInterrupt

    stop = keras.callbacks.LambdaCallback(on_train_batch_end=interrupt)
    with pytest.warns(UnaccountedStepsWarning, match="took 1 private steps"):
        with pytest.raises(KeyboardInterrupt):
            make().fit(X, Y, batch_size=B, verbose=0, callbacks=[stop])


@pytest.mark.parametrize("how", [copy.copy, copy.deepcopy])
def test_b4_copies_share_the_sampler_and_nothing_else(how):
    sampling = dice_tf.CyclicPoissonSampling(N, B)
    original = dice_tf.EpsilonCallback(sampling, DELTA, accountant="pld")
    duplicate = how([original])[0] if how is copy.deepcopy else how(original)
    model = make()
    model.fit(sampling.dataset(X, Y), verbose=0, callbacks=[duplicate])
    assert duplicate.sampling is sampling and duplicate.accountant == "pld"
    assert original.model is None and duplicate.epsilon() > 0


# --- B15: epochs of a data set ------------------------------------------------------


@pytest.mark.parametrize("kind", [dice_tf.CyclicPoissonSampling, dice_tf.ShuffledEpochs])
def test_b15_the_name_says_that_epochs_are_planned_and_not_run(kind):
    sampling = kind(N, B)
    data = sampling.dataset(X, Y, planned_epochs=2)
    assert sum(1 for _ in data) == len(data) == sampling.steps_per_epoch
    assert sum(1 for _ in data.repeat(2)) == sampling.steps(epochs=2)
    with pytest.raises(TypeError, match="epochs"):
        sampling.dataset(X, Y, epochs=2)
    with pytest.raises(dice_tf.errors.SamplingError, match="planned_epochs=0"):
        sampling.dataset(X, Y, planned_epochs=0)


# --- B12: the order of callbacks ----------------------------------------------------


@pytest.mark.parametrize("in_list", [True, False])
def test_b12_loggers_listed_before_find_epsilon(tmp_path, in_list):
    class Watch(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            shown.append(logs["epsilon"])

    sampling, model, shown = dice_tf.CyclicPoissonSampling(N, B), make(), []
    log = keras.callbacks.CSVLogger(str(tmp_path / "log.csv"))
    budget = dice_tf.EpsilonCallback(sampling, DELTA)
    callbacks = [log, Watch(), budget]
    if in_list:
        callbacks = keras.callbacks.CallbackList(callbacks, add_history=True, model=model, epochs=2)
    model.fit(sampling.dataset(X, Y), epochs=2, verbose=0, callbacks=callbacks)
    with open(tmp_path / "log.csv", encoding="utf-8") as file:
        column = [float(row["epsilon"]) for row in csv.DictReader(file)]
    assert column == [planned(8, sampling), planned(16, sampling)]
    assert len(shown) == 16 and shown[-1] == column[-1]


def test_b12_the_order_of_all_others_is_kept(tmp_path):
    names = []

    def named(name):
        return keras.callbacks.LambdaCallback(on_epoch_begin=lambda *_: names.append(name))

    budget = dice_tf.EpsilonCallback(dice_tf.ShuffledEpochs(N, B), DELTA)
    callbacks = [named("a"), [named("b"), budget], named("c")]
    make().fit(X, Y, batch_size=B, verbose=0, callbacks=callbacks)
    assert names == ["a", "b", "c"] and budget.epsilon() > 0


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__]))
