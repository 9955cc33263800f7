# Copyright 2026 The dice_tf Authors.
# SPDX-License-Identifier: Apache-2.0
"""Arguments and trials that `private_search` refuses."""

import dataclasses
import inspect
import json
import math

import keras
import numpy as np
import pytest
from searches import DELTA, PLAN, B, N, Scores, X, Y, fit, make, search

import dice_tf
from dice_tf.errors import (
    AccountingError,
    DicePrivacyError,
    PlainGradientsError,
    SamplingError,
)

pytestmark = pytest.mark.usefixtures("one_epsilon_for_all")


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


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__]))
