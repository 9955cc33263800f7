# Copyright 2026 The dice_tf Authors.
# SPDX-License-Identifier: Apache-2.0
"""`private_search`: what it trains, keeps, releases and refuses."""

import builtins
import collections
import dataclasses
import math
import os
import pathlib
import stat
import subprocess
import sys

import keras
import numpy as np
import pytest
from searches import (
    DELTA,
    PLAN,
    B,
    N,
    Scores,
    X,
    Y,
    fit,
    make,
    search,
)

import dice_tf
from dice_tf import accounting
from dice_tf.accounting import repeated_selection
from dice_tf.errors import (
    AccountingError,
    MissingPackageError,
    ReleaseError,
)
from dice_tf.search import SearchResult, search_record, search_space

pytestmark = pytest.mark.usefixtures("one_epsilon_for_all")


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


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__]))
