# Copyright 2026 The dice_tf Authors.
# SPDX-License-Identifier: Apache-2.0
"""`private_search`: what it trains, keeps, releases and refuses."""

import builtins
import collections
import dataclasses
import functools
import inspect
import json
import math
import os
import pathlib
import stat
import subprocess
import sys
import warnings

import keras
import keras_tuner
import numpy as np
import pytest

import dice_tf
from dice_tf import accounting
from dice_tf.accounting import repeated_selection
from dice_tf.errors import (
    AccountingError,
    DicePrivacyError,
    MissingPackageError,
    PlainGradientsError,
    ReleaseError,
    SamplingError,
)
from dice_tf.search import SearchResult, Trial, search_record, search_space

N, B, DELTA = 40, 10, 1e-3
RANDOM = np.random.default_rng(0)
X = RANDOM.normal(size=(N, 3)).astype("float32")
Y = RANDOM.normal(size=(N, 1)).astype("float32")
PLAN = dice_tf.PrivacyPlan(
    num_examples=N, batch_size=B, epochs=1, noise_multiplier=3.0, delta=DELTA, accountant="rdp",
    feedback_steps=1,
)  # fmt: skip
SELECTION_EPSILON = functools.cache(repeated_selection.selection_epsilon)
SPACE = {"rate": [0.1, 0.2, 0.3], "units": lambda rng: int(rng.integers(1, 4))}


def make(rate=0.1, units=1, **arguments):
    keras.utils.clear_session()
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(units), keras.layers.Dense(1)])
    arguments = arguments or {"plan": PLAN}
    optimizer = dice_tf.DiceSGDOptimizer(rate, l2_norm_clip=1.0, self_check=False, **arguments)
    model.compile(optimizer, "mse", run_eagerly=True)
    return model


@pytest.fixture(autouse=True)
def one_epsilon_for_all(monkeypatch):
    """Computes each epsilon once, since many searches here are alike."""
    warnings.simplefilter("ignore", dice_tf.errors.UnaccountedStepsWarning)
    monkeypatch.setattr(repeated_selection, "selection_epsilon", SELECTION_EPSILON)


def fit(trial, model, **arguments):
    model.fit(trial.sampling.dataset(X, Y), verbose=0, callbacks=[trial.callback()], **arguments)
    return model


class Scores:
    """A `train` that makes real private steps, and gives the scores that it is told."""

    def __init__(self, scores):
        self.scores, self.trials, self.models = iter(scores), [], []

    def __call__(self, trial):
        self.trials.append(trial)
        self.models.append(fit(trial, make(trial["rate"], trial["units"])))
        return self.models[-1], next(self.scores)


def search(folder, train, space=SPACE, **changes):
    arguments = {"run": PLAN, "mean_trials": 3.0, "score_data": "held_out", "direction": "max"}
    return dice_tf.private_search(train, space, directory=folder, **{**arguments, **changes})


@pytest.fixture
def three_trials(monkeypatch):
    monkeypatch.setattr(repeated_selection, "draw_number_of_trials", lambda mean, shape: 3)


# --- what it does -------------------------------------------------------------------


@pytest.mark.parametrize("direction, best", [("max", 1), ("min", 2)])
def test_the_best_of_all_trials_is_released(tmp_path, capsys, three_trials, direction, best):
    train = Scores([0.5, 0.75, 0.25])
    result = search(tmp_path / "search", train, direction=direction)
    assert len(train.trials) == 3
    assert result.model is train.models[best] and result.score == [0.5, 0.75, 0.25][best]
    assert result.values == train.trials[best].values
    run = PLAN.mechanism(), PLAN.sampling, PLAN.steps
    assert result.epsilon == accounting.selection_epsilon(*run, DELTA, 3.0)
    assert result.statement == accounting.selection_statement(*run, DELTA, 3.0, "held_out")
    printed = capsys.readouterr().out
    assert f"epsilon = {accounting.epsilon.up(result.epsilon)}, delta = 0.001 (RDP" in printed
    # A sampler of its own for each trial.
    assert len({trial.sampling.entropy for trial in train.trials} | {PLAN.sampling.entropy}) == 4
    assert len({trial.sampling.assignment for trial in train.trials}) == 3


def test_epsilon_is_printed_before_the_first_trial(tmp_path, capsys, three_trials):
    def train(trial):
        assert "the best model costs epsilon" in capsys.readouterr().out
        raise InterruptedError

    with pytest.raises(InterruptedError):
        search(tmp_path / "search", train)


def test_nothing_released_tells_how_many_trials_there_were(tmp_path, capsys, monkeypatch):
    outputs = []
    for number in (1, 4):
        monkeypatch.setattr(repeated_selection, "draw_number_of_trials", lambda *_, n=number: n)
        train = Scores([0.5] * 4)
        result = search(tmp_path / str(number), train, {"rate": [0.1], "units": [1]})
        assert len(train.trials) == number
        # The first of equals wins.
        assert result.model is train.models[0]
        names = sorted(file.suffix for file in (tmp_path / str(number)).iterdir())
        outputs.append((capsys.readouterr().out, dataclasses.replace(result, model=None), names))
    assert outputs[0] == outputs[1]
    assert [field.name for field in dataclasses.fields(SearchResult)] == [
        "model", "values", "score", "epsilon", "delta", "statement"]  # fmt: skip


def test_hyperparameters_follow_the_declared_law():
    draw = search_space.check_space({"rate": [0.1, 0.3], "width": lambda rng: rng.integers(4)})
    drawn = [draw() for _ in range(2000)]
    rates = collections.Counter(values["rate"] for values in drawn)
    assert set(rates) == {0.1, 0.3} and abs(rates[0.1] - 1000) < 5 * math.sqrt(500)
    widths = collections.Counter(values["width"] for values in drawn)
    assert set(widths) == {0, 1, 2, 3} and all(abs(n - 500) < 5 * 20 for n in widths.values())
    assert all(type(values["width"]) is int for values in drawn)


def test_a_failed_training_is_the_worst(tmp_path, three_trials):
    result = search(tmp_path / "search", Scores([math.nan, -5.0, math.nan]))
    assert result.score == -5.0
    trials = dice_tf.private_trials(tmp_path / "search")
    assert [trial["best"] for trial in trials] == [False, True, False]


def test_a_poisson_number_may_be_zero(tmp_path, monkeypatch):
    monkeypatch.setattr(repeated_selection, "draw_number_of_trials", lambda mean, shape: 0)
    result = search(tmp_path / "search", Scores([]), shape=math.inf)
    assert result.model is None and math.isnan(result.score) and result.epsilon > 0


def test_a_run_may_be_spelled_out(tmp_path, three_trials):
    sampling = dice_tf.RandomAllocation(N, B, num_groups=2)
    mechanism = dice_tf.DiceMechanism(l2_norm_clip=1.0, noise_multiplier=3.0, expected_batch_size=B)
    run = mechanism, sampling, 8
    arguments = {"noise_multiplier": 3.0, "expected_batch_size": B}
    train = lambda trial: (fit(trial, make(**arguments)), trial["rate"])
    result = search(tmp_path / "search", train, run=run, delta=DELTA, mean_trials=4.0, shape=0.5)
    assert result.epsilon == accounting.selection_epsilon(*run, DELTA, 4.0, 0.5)


# --- resuming -----------------------------------------------------------------------


def test_a_search_that_was_killed_goes_on(tmp_path, three_trials, monkeypatch):
    folder, begun = tmp_path / "search", []

    def killed_in_the_second(trial):
        begun.append(trial)
        model = fit(trial, make(trial["rate"], trial["units"]))
        (trial.directory / "backup").write_text("of this trial")
        if len(begun) == 2:
            raise KeyboardInterrupt
        return model, 0.5

    with pytest.raises(KeyboardInterrupt):
        search(folder, killed_in_the_second)
    assert len(dice_tf.private_trials(folder)) == 1
    # Another draw of the number would be another search.
    monkeypatch.setattr(repeated_selection, "draw_number_of_trials", lambda mean, shape: 1 / 0)
    again = []

    def train(trial):
        again.append((trial, (trial.directory / "backup").exists()))
        return fit(trial, make(trial["rate"], trial["units"])), 0.25

    result = search(folder, train)
    assert len(again) == 2 and [kept for _, kept in again] == [True, False]
    # The trial that was cut short has its hyperparameters, and fresh draws.
    assert again[0][0].values == begun[1].values
    assert again[0][0].sampling.entropy != begun[1].sampling.entropy
    # The best one is of the first process, and comes from the file with its record.
    assert result.score == 0.5 and result.values == begun[0].values
    run = dice_tf.accounted_run(result.model, PLAN.sampling)
    assert run[2] == PLAN.steps
    # It is done: nothing is trained any more.
    done = search(folder, lambda trial: 1 / 0)
    assert done.score == 0.5
    for ours, theirs in zip(done.model.get_weights(), result.model.get_weights(), strict=True):
        np.testing.assert_array_equal(ours, theirs)


def test_a_search_goes_on_with_its_own_arguments_only(tmp_path, three_trials):
    folder = tmp_path / "search"
    search(folder, Scores([0.1, 0.2, 0.3]))
    other = dice_tf.PrivacyPlan(
        num_examples=N, batch_size=B, epochs=2, noise_multiplier=3.0, delta=DELTA,
        accountant="rdp", feedback_steps=1,
    )  # fmt: skip
    for changes, word in (
        ({"mean_trials": 4.0}, "mean_trials"),
        ({"shape": 0.5}, "shape"),
        ({"score_data": "public"}, "score_data"),
        ({"direction": "min"}, "direction"),
        ({"delta": 2e-3}, "delta"),
        ({"accountant": "pld"}, "accountant"),
        ({"run": other}, "run"),
        ({"space": {"rate": [0.1]}}, "hyperparameters"),
    ):
        with pytest.raises(AccountingError, match=f"other arguments.*{word}"):
            search(folder, Scores([]), **changes)


def test_a_search_goes_on_with_its_own_owners_only(tmp_path, three_trials):
    def plan(ids):
        sampling = dice_tf.PoissonSampling.of_owners(ids, expected_batch_size=B, rows_per_owner=1)
        return dice_tf.PrivacyPlan(
            sampling=sampling, epochs=1, noise_multiplier=3.0, delta=DELTA, accountant="rdp"
        )

    def killed(trial):
        raise KeyboardInterrupt

    ids = np.arange(2 * N) // 2
    with pytest.raises(KeyboardInterrupt):
        search(tmp_path / "search", killed, run=plan(ids))
    with pytest.raises(KeyboardInterrupt):
        search(tmp_path / "search", killed, run=plan(ids))
    with pytest.raises(AccountingError, match="other arguments.*owners"):
        search(tmp_path / "search", killed, run=plan(np.roll(ids, 1)))


def test_the_directory_is_private(tmp_path, three_trials):
    folder = tmp_path / "deep" / "search"
    search(folder, Scores([0.1, 0.3, 0.2]))
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert stat.S_IMODE((folder / "search.json").stat().st_mode) == 0o600
    # One model, and no name with a number of trials in it.
    (kept,) = [file.name for file in folder.iterdir() if file.name != "search.json"]
    assert kept.endswith(".keras") and len(kept) == 16 + len(".keras")
    assert not (folder / "trial").exists()
    used = tmp_path / "used"
    used.mkdir()
    (used / "notes.txt").write_text("mine")
    for taken in (used, used / "notes.txt"):
        with pytest.raises(ReleaseError, match="directory"):
            search(taken, Scores([]))


def test_a_kill_between_the_files_leaves_a_search_that_goes_on(tmp_path, three_trials, monkeypatch):
    folder, replace = tmp_path / "search", os.replace
    calls = []

    def killed(source, target):
        calls.append(target)
        # The first state, the first trial's values, its end: then power fails.
        if len(calls) == 3:
            raise KeyboardInterrupt
        return replace(source, target)

    monkeypatch.setattr(os, "replace", killed)
    with pytest.raises(KeyboardInterrupt):
        search(folder, Scores([0.1]))
    monkeypatch.setattr(os, "replace", replace)
    assert len(dice_tf.private_trials(folder)) == 0
    assert search(folder, Scores([0.2, 0.3, 0.1])).score == 0.3


def test_a_long_trial_goes_on_from_its_own_backup(tmp_path, three_trials):
    folder = tmp_path / "search"
    longer = PLAN.mechanism(), PLAN.sampling, 2 * PLAN.steps
    cut = keras.callbacks.LambdaCallback(
        on_epoch_begin=lambda epoch, logs: {}["killed"] if epoch == 1 else None
    )
    epochs = []

    def train(trial, *callbacks):
        model = make(save_errors=True, noise_multiplier=3.0, expected_batch_size=B)
        model.optimizer.build(model.trainable_variables)
        # In the private folder all files may hold all.
        backup = keras.callbacks.BackupAndRestore(
            str(trial.directory / "backup"), double_checkpoint=True
        )
        data = trial.sampling.dataset(X, Y, planned_epochs=2)
        callbacks = [trial.callback(), backup, *callbacks]
        history = model.fit(data, epochs=2, verbose=0, callbacks=callbacks)
        epochs.append(len(history.epoch))
        return model, 0.5

    with pytest.raises(KeyError, match="killed"):
        search(folder, lambda trial: train(trial, cut), {}, run=longer, delta=DELTA)
    result = search(folder, train, {}, run=longer, delta=DELTA)
    # The first trial makes the epoch that it lacks, the others both.
    assert epochs == [1, 2, 2]
    assert [trial["steps"] for trial in dice_tf.private_trials(folder)] == [2 * PLAN.steps] * 3
    # What is released holds neither error nor noise key.
    assert result.score == 0.5 and not result.model.optimizer.save_errors


TWO_DEVICES = """
import sys
import tensorflow as tf
(device,) = tf.config.list_physical_devices("CPU")
tf.config.set_logical_device_configuration(device, [tf.config.LogicalDeviceConfiguration()] * 2)
import keras, numpy as np
import dice_tf
from dice_tf.accounting import repeated_selection
repeated_selection.draw_number_of_trials = lambda mean, shape: 2
plan = dice_tf.PrivacyPlan(num_examples=40, batch_size=8, epochs=1, noise_multiplier=3.0,
                           delta=1e-3, accountant="rdp", feedback_steps=1)
strategy = tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"])
def train(trial):
    with strategy.scope():
        model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
        model.compile(dice_tf.DiceSGDOptimizer(0.1, l2_norm_clip=1.0, plan=plan), "mse")
        data = trial.sampling.dataset(np.ones([40, 3]), np.ones([40, 1]))
    model.fit(data, verbose=0, callbacks=[trial.callback()])
    return model, 0.5
result = dice_tf.private_search(train, {}, run=plan, mean_trials=2.0, score_data="public",
                                direction="max", directory=sys.argv[1])
trials = dice_tf.private_trials(sys.argv[1])
print(strategy.num_replicas_in_sync, [trial["steps"] for trial in trials], plan.steps)
"""


@pytest.mark.long
def test_trials_under_a_strategy_of_two_devices(tmp_path):
    found = subprocess.run(
        [sys.executable, "-c", TWO_DEVICES, str(tmp_path / "search")],
        capture_output=True, text=True, cwd=pathlib.Path(__file__).absolute().parents[1],
    )  # fmt: skip
    assert found.returncode == 0, found.stderr[-2000:]
    assert found.stdout.splitlines()[-1] == "2 [4, 4] 4"


# --- the table and the plot ---------------------------------------------------------


def test_trials_are_a_table_and_a_plot_for_the_person_who_trains(tmp_path, three_trials):
    search(tmp_path / "search", Scores([0.5, 0.75, 0.25]), {"rate": [0.1, 9.0], "units": [1, 2]})
    trials = dice_tf.private_trials(tmp_path / "search")
    assert [trial["score"] for trial in trials] == [0.5, 0.75, 0.25]
    assert [trial["best"] for trial in trials] == [False, True, False]
    assert all(set(trial["values"]) == {"rate", "units"} for trial in trials)
    assert {trial["steps"] for trial in trials} == {PLAN.steps}
    lines = str(trials).splitlines()
    assert lines[0].startswith("PRIVATE") and len(lines) == 5 and "*" in lines[3]
    figure = trials.plot()
    assert "PRIVATE" in figure.get_suptitle()
    assert [axes.get_xlabel() for axes in figure.axes] == ["trial", "rate", "units"]
    points = figure.axes[1].collections[0].get_offsets()
    assert sorted(points[:, 1]) == [0.25, 0.5, 0.75]
    assert points[:, 0].tolist() == [trial["values"]["rate"] for trial in trials]
    figure.savefig(tmp_path / "trials.png")
    assert len(search_record.PrivateTrials().plot().axes) == 1
    words = search_record.PrivateTrials(
        [{"values": {"name": name}, "score": 0.5, "steps": 1, "best": False} for name in "ab"]
    )
    assert len(words.plot().axes) == 2


def test_a_plot_without_matplotlib_says_so(monkeypatch):
    imported = builtins.__import__

    def missing(name, *arguments, **keywords):
        if name.startswith("matplotlib"):
            raise ImportError(name)
        return imported(name, *arguments, **keywords)

    monkeypatch.setattr(builtins, "__import__", missing)
    with pytest.raises(MissingPackageError, match="matplotlib"):
        search_record.PrivateTrials().plot()


# --- what is refused ----------------------------------------------------------------


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"score_data": "private"}, "score from private data"),
        ({"score_data": "training"}, "score_data"),
        ({"direction": "up"}, "direction"),
        ({"mean_trials": 0}, "mean_trials"),
        ({"shape": -1.0}, "shape"),
        ({"run": "plan"}, "run"),
        ({"delta": 0.1}, "below 1/N"),
        ({"space": {"rate": []}}, "rate"),
        ({"space": {"rate": 0.1}}, "rate"),
        ({"space": {"rate": lambda rng: object()}}, "rate"),
        ({"space": None}, "space"),
        ({"train": 3}, "train"),
        ({"train": keras.Sequential}, "train"),
        ({"objective": "val_loss"}, "objective"),
        ({"accountant": "pld", "shape": math.inf}, "Poisson"),
    ],
)
def test_bad_arguments_are_refused_before_anything_is_made(tmp_path, changes, message):
    folder = tmp_path / "search"
    with pytest.raises(AccountingError, match=message):
        search(folder, **{"train": Scores([]), **changes})
    assert not folder.exists()


@pytest.mark.parametrize("name", ["score_data", "direction", "run", "mean_trials", "directory"])
def test_nothing_that_decides_has_a_default(name):
    parameter = inspect.signature(dice_tf.private_search).parameters[name]
    assert parameter.default is parameter.empty


def test_seeds_are_refused(tmp_path):
    seeded = dice_tf.CyclicPoissonSampling(N, B, seed=1)
    public = dataclasses.replace(PLAN.mechanism(), noise_is_secret=False)
    for run in (
        (PLAN.mechanism(), seeded, 8),
        (public, dice_tf.CyclicPoissonSampling(N, B), 8),
    ):
        with pytest.raises(AccountingError, match="independent"):
            search(tmp_path / "search", Scores([]), run=run, delta=DELTA)


SHARED = []


def plain(trial):
    model = make()
    model.compile("sgd", "mse")
    model.fit(X, Y, verbose=0)
    return model, 0.5


def recompiled(trial):
    model, _ = plain(trial)
    model.compile(make().optimizer, "mse")
    return model, 0.5


def too_long(trial):
    model = make()
    fit(trial, model)
    return fit(trial, model), 0.5


def too_little_noise(trial):
    arguments = {"noise_multiplier": 2.9, "expected_batch_size": B}
    return fit(trial, make(**arguments)), 0.5


def seeded_noise(trial):
    arguments = {"noise_multiplier": 3.0, "expected_batch_size": B, "noise_seed": 5}
    return fit(trial, make(**arguments)), 0.5


def foreign_sampler(trial):
    model = make()
    model.fit(PLAN.sampling.dataset(X, Y), verbose=0)
    return model, 0.5


def one_model_for_all(trial):
    if not SHARED:
        SHARED.append(fit(trial, make()))
    return SHARED[0], 0.5


@pytest.mark.parametrize(
    "train, error, message",
    [
        (plain, PlainGradientsError, "Without a private optimizer"),
        (recompiled, DicePrivacyError, "private"),
        (too_long, AccountingError, "cost more"),
        (too_little_noise, AccountingError, "cost more"),
        (seeded_noise, AccountingError, "seed"),
        (foreign_sampler, SamplingError, "own sampler"),
        (one_model_for_all, DicePrivacyError, "earlier trial"),
        (lambda trial: fit(trial, make()), AccountingError, "return model, score"),
        (lambda trial: (make().weights, 0.5), AccountingError, "return model, score"),
        (lambda trial: (fit(trial, make()), "good"), AccountingError, "one real number"),
        (lambda trial: (fit(trial, make()), [0.1, 0.2]), AccountingError, "one real number"),
        (lambda trial: (fit(trial, make()), True), AccountingError, "one real number"),
    ],
)
def test_trials_that_do_not_keep_to_the_run_are_refused(
    tmp_path, three_trials, train, error, message
):
    SHARED.clear()
    with pytest.raises(error, match=message):
        search(tmp_path / "search", train, {})
    # Nothing of it was kept.
    kept = json.loads((tmp_path / "search" / "search.json").read_text())["trials"]
    assert len(kept) == (1 if train is one_model_for_all else 0)


def test_a_shorter_trial_and_another_threshold_are_within_the_run(tmp_path, three_trials):
    def train(trial):
        model = make()
        model.optimizer = None
        optimizer = dice_tf.DiceSGDOptimizer(
            0.1,
            l2_norm_clip=trial["clip"],
            self_check=False,
            noise_multiplier=3.0,
            expected_batch_size=B,
        )
        model.compile(optimizer, "mse", run_eagerly=True)
        return fit(trial, model), np.float32(0.5)

    longer = PLAN.mechanism(), PLAN.sampling, 2 * PLAN.steps
    result = search(tmp_path / "s", train, {"clip": [0.1, 2.0]}, run=longer, delta=DELTA)
    assert result.score == 0.5


# --- keras_tuner --------------------------------------------------------------------


class Hypermodel(keras_tuner.HyperModel):
    """Two depths, and a width for each layer."""

    def build(self, hp):
        rate = hp.Float("rate", 0.01, 1.0, sampling="log")
        model = make(rate)
        layers = [keras.Input((3,))]
        for layer in range(hp.Int("depth", 1, 2)):
            layers.append(keras.layers.Dense(hp.Choice(f"units_{layer}", [2, 3])))
        layers.append(keras.layers.Dense(1))
        network = keras.Sequential(layers)
        network.compile(model.optimizer.from_config(model.optimizer.get_config()), "mse",
                        run_eagerly=True)  # fmt: skip
        return network


def fit_arguments(trial):
    return {"x": trial.sampling.dataset(X, Y), "verbose": 0, "validation_data": (X[:4], Y[:4]),
            "callbacks": [trial.callback()]}  # fmt: skip


def test_a_hypermodel_is_searched_at_random(tmp_path, three_trials):
    result = search(tmp_path / "search", Hypermodel(), None, direction="min",
                    fit_arguments=fit_arguments, objective="val_loss")  # fmt: skip
    score = result.model.evaluate(X[:4], Y[:4], verbose=0)
    assert result.score == pytest.approx(score, rel=1e-5)
    depth = result.values["depth"]
    assert set(result.values) == {"rate", "depth", *(f"units_{i}" for i in range(depth))}
    widths = [layer.units for layer in result.model.layers]
    assert widths == [*(result.values[f"units_{i}"] for i in range(depth)), 1]
    rate = float(result.model.optimizer.learning_rate)
    assert rate == pytest.approx(result.values["rate"], rel=1e-6)


def test_values_of_a_hypermodel_follow_its_law():
    class Cheap(keras_tuner.HyperModel):
        def build(self, hp):
            kind = hp.Choice("kind", ["a", "b"])
            if kind == "b":
                hp.Float("only_of_b", 0.0, 1.0)
            with hp.conditional_scope("kind", ["a"]):
                hp.Int("only_of_a", 1, 4)

    draw = search_space.draw_of_hypermodel(Cheap())
    drawn = [draw() for _ in range(600)]
    kinds = collections.Counter(values["kind"] for values in drawn)
    assert abs(kinds["a"] - 300) < 5 * math.sqrt(150)
    of_a = [values for values in drawn if values["kind"] == "a"]
    assert all(set(values) == {"kind", "only_of_a"} for values in of_a)
    assert {values["only_of_a"] for values in of_a} == {1, 2, 3, 4}
    of_b = [values["only_of_b"] for values in drawn if values["kind"] == "b"]
    assert abs(np.mean(of_b) - 0.5) < 0.15


@pytest.mark.parametrize("tuner", [
    keras_tuner.BayesianOptimization, keras_tuner.RandomSearch,
    keras_tuner.oracles.HyperbandOracle(objective="val_loss")])  # fmt: skip
def test_tuners_are_refused(tmp_path, tuner):
    if isinstance(tuner, type):
        tuner = tuner(Hypermodel(), objective="val_loss", max_trials=2, directory=tmp_path)
    for refused in (tuner, type(tuner)):
        with pytest.raises(AccountingError, match="independent trials"):
            search(tmp_path / "search", refused, None)


class InFit(Hypermodel):
    """Asks for a hyperparameter that nobody drew."""

    def fit(self, hp, model, *args, **kwargs):
        hp.Int("epochs", 1, 2)
        return super().fit(hp, model, *args, **kwargs)


class Endless(keras_tuner.HyperModel):
    """Has new names at every call."""

    count = 0

    def build(self, hp):
        self.count += 1
        hp.Int(f"number_{self.count}", 0, 1)


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"space": {}}, "Leave `space` out"),
        ({"fit_arguments": None}, "fit_arguments"),
        ({"objective": None}, "objective"),
        ({"objective": "loss"}, "val_"),
        ({"objective": "val_accuracy"}, "not among"),
        ({"train": InFit()}, "epochs"),
        ({"train": Endless()}, "new hyperparameters"),
    ],
)
def test_hypermodels_that_do_not_say_all_are_refused(tmp_path, three_trials, changes, message):
    arguments = {"train": Hypermodel(), "space": None, "direction": "min",
                 "fit_arguments": fit_arguments, "objective": "val_loss"}  # fmt: skip
    with pytest.raises(AccountingError, match=message):
        search(tmp_path / "search", **{**arguments, **changes})


def test_a_trial_shows_its_own_epsilon(tmp_path, three_trials):
    seen = []

    def train(trial):
        model, callback = make(trial["rate"], trial["units"]), trial.callback()
        model.fit(trial.sampling.dataset(X, Y), verbose=0, callbacks=[callback])
        assert isinstance(trial, Trial)
        seen.append(callback.epsilon())
        return model, 0.5

    result = search(tmp_path / "search", train)
    alone = accounting.compute_epsilon(PLAN.mechanism(), PLAN.sampling, PLAN.steps, DELTA)
    assert seen == [alone] * 3 and alone < result.epsilon


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__]))
