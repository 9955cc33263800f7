# Copyright 2026 The dice_tf Authors.
# SPDX-License-Identifier: Apache-2.0
"""`private_search` over hypermodels of keras_tuner."""

import collections
import math

import keras
import keras_tuner
import numpy as np
import pytest
from searches import DELTA, PLAN, X, Y, make, search

from dice_tf import accounting
from dice_tf.errors import (
    AccountingError,
)
from dice_tf.search import Trial, search_space

pytestmark = pytest.mark.usefixtures("one_epsilon_for_all")


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
