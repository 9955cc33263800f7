# Copyright 2026 The dice_tf Authors.
# SPDX-License-Identifier: Apache-2.0
"""Hyperparameters of the trials of a private search: drawn by one law, which ignores the data."""

import json
import secrets
import sys
from typing import Any

import numpy as np

from dice_tf.errors import AccountingError

# More conditional levels than any model has.
_MOST_BUILDS = 50


def check_space(space):
    """Refuses a space from which nothing can be drawn.

    Args:
        space: Dictionary from names to a list of choices, or to a function of a
            `numpy.random.Generator`.

    Returns:
        A function without arguments that draws a dictionary of values.

    Raises:
        AccountingError: If it is not such a dictionary, or draws what cannot be kept in a file.
    """
    if not isinstance(space, dict):
        raise AccountingError(
            "Argument `space` must be a dictionary from each hyperparameter to a list of choices, "
            "or to a function that draws one from a `numpy.random.Generator`. Received: "
            f"space={space!r} (of type {type(space).__name__})."
        )
    for name, choices in space.items():
        listed = isinstance(choices, (list, tuple)) and len(choices)
        if not isinstance(name, str) or not (listed or callable(choices)):
            raise AccountingError(
                "Argument `space` must have a list of choices, which is not empty, or a function "
                f"of a `numpy.random.Generator` for each name. Received: {name!r}: {choices!r}."
            )

    def draw():
        rng = np.random.default_rng(secrets.randbits(256))
        return {
            name: _plain(name, choices(rng) if callable(choices) else secrets.choice(choices))
            for name, choices in space.items()
        }

    draw()
    return draw


def _plain(name, value):
    value = value.item() if isinstance(value, np.generic) else value
    try:
        if json.loads(json.dumps(value)) == value:
            return value
    except (TypeError, ValueError):
        pass
    raise AccountingError(
        "Values of hyperparameters must be numbers, texts, booleans or lists of them, which can "
        f"be kept in a file. Received: {name}={value!r} (of type {type(value).__name__}). Draw "
        "its name, and look it up in `train`."
    )


def is_hypermodel(train):
    """Whether `train` is a hypermodel of keras_tuner.

    Raises:
        AccountingError: If it is a tuner or an oracle, which decides what to try next.
    """
    tuner = sys.modules.get("keras_tuner")
    if tuner is None:
        return False
    kind = train if isinstance(train, type) else type(train)
    if issubclass(kind, (tuner.Tuner, tuner.Oracle)):
        raise AccountingError(
            "A tuner decides what to try next by earlier results, or leaves out what was tried, "
            "and how many trials it makes is known: private selection is proven for independent "
            f"trials alone. Received: train={train!r}. Give the hypermodel itself: its "
            "hyperparameters are then drawn at random."
        )
    return isinstance(train, tuner.HyperModel)


def draw_of_hypermodel(hypermodel):
    """Returns a function without arguments that draws all values that `build` asks for.

    Args:
        hypermodel: `keras_tuner.HyperModel`.
    """
    import keras_tuner

    def draw():
        drawn = {}
        for _ in range(_MOST_BUILDS):
            # Which ones there are may depend on the values of others.
            hp = _with_values(keras_tuner.HyperParameters(), drawn)
            hypermodel.build(hp)
            new = [one for one in hp.space if hp.is_active(one) and one.name not in drawn]
            if not new:
                return {name: drawn[name] for name in hp.values}
            for one in new:
                sample = one.random_sample(secrets.randbits(31))
                drawn[one.name] = _plain(one.name, sample)
        raise AccountingError(
            f"The hypermodel asks for new hyperparameters at each of {_MOST_BUILDS} calls of "
            f"`build`, so no law of them is known. Received: {sorted(drawn)!r}. Give each one a "
            "name that does not change."
        )

    return draw


def _with_values(hp, values):
    hp.values.update(values)
    return hp


def train_of_hypermodel(hypermodel, fit_arguments, objective):
    """Returns the `train` of a hypermodel: builds, fits, and reads the score of the last epoch.

    Args:
        hypermodel: `keras_tuner.HyperModel`.
        fit_arguments: Function from a `Trial` to the dictionary that its `fit` receives.
        objective: Name of the metric that is the score, such as `"val_accuracy"`.

    Raises:
        AccountingError: If the last two are missing, or the objective is of the training data.
    """
    import keras_tuner

    if not callable(fit_arguments) or not isinstance(objective, str):
        raise AccountingError(
            "A hypermodel needs `fit_arguments`, a function from a trial to the arguments of its "
            "`fit`, with data from `trial.sampling.dataset(x, y)`, and `objective`, the name of "
            f"the score. Received: fit_arguments={fit_arguments!r}, objective={objective!r}."
        )
    if not objective.startswith("val_"):
        raise AccountingError(
            "Argument `objective` must begin with 'val_': other metrics are of the training data, "
            f"which is private. Received: objective={objective!r}. Pass `validation_data` to `fit`."
        )

    def train(trial):
        hp = _with_values(keras_tuner.HyperParameters(), trial.values)
        model = hypermodel.build(hp)
        arguments: Any = fit_arguments(trial)
        result = hypermodel.fit(hp, model, **arguments)
        unknown = sorted({one.name for one in hp.space} - {*trial.values})
        unknown = [name for name in unknown if name in hp.values]
        if unknown:
            raise AccountingError(
                "The hypermodel asks for hyperparameters in `fit` that `build` does not ask for: "
                f"they would keep their defaults in every trial. Received: {unknown!r}. Ask for "
                "them in `build`, too."
            )
        return model, _score_of(result, objective)

    return train


def _score_of(result, objective):
    # Not that of the best epoch: the model is that of the last one.
    logs = getattr(result, "history", result)
    if not isinstance(logs, dict):
        return logs
    if objective not in logs:
        raise AccountingError(
            f"Argument `objective` is not among what `fit` measured. Received: "
            f"objective={objective!r}; there are {sorted(logs)!r}. Pass `validation_data` and "
            "compile with that metric."
        )
    value = logs[objective]
    return value[-1] if isinstance(value, list) else value


def as_score(score):
    """Returns a score as a float.

    Args:
        score: A real number, or an array or tensor of one; NaN if training failed.

    Raises:
        AccountingError: If it is something else.
    """
    try:
        array = np.asarray(score)
        if array.shape == () and array.dtype.kind in "iuf":
            return float(array)
    except (TypeError, ValueError):
        pass
    raise AccountingError(
        "The score of a trial must be one real number, or NaN for a training that failed. "
        f"Received: {score!r} (of type {type(score).__name__})."
    )
