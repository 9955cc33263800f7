# Copyright 2026 The dice_tf Authors.
# SPDX-License-Identifier: Apache-2.0
"""A search of small models, for the tests of `private_search`."""

import functools

import keras
import numpy as np

import dice_tf
from dice_tf.accounting import repeated_selection

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
