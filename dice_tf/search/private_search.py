# Copyright 2026 The dice_tf Authors.
# SPDX-License-Identifier: Apache-2.0
"""`private_search`: the best of a random number of private trainings, at an epsilon known before.

Trials are independent and alike: each draws its hyperparameters by one law, and has a sampler of
its own. How many there are is drawn once and kept secret. Why that costs less than all trials
together is in `dice_tf.accounting.repeated_selection`.
"""

from __future__ import annotations

from collections.abc import Callable
import dataclasses
import math
import os
import pathlib
from typing import TYPE_CHECKING, Any
import weakref

import keras

from dice_tf import accounting
from dice_tf.accounting import joint_statements, repeated_selection
from dice_tf.accounting.epsilon import up
from dice_tf.accounting.events import is_amplified
from dice_tf.errors import AccountingError, PlainGradientsError, SamplingError
from dice_tf.ledger import provenance
from dice_tf.ledger.runs import accounted_run
from dice_tf.mechanism import DiceMechanism
from dice_tf.plan import PrivacyPlan
from dice_tf.sampling import Sampling
from dice_tf.search import search_space
from dice_tf.search.search_record import SearchRecord
from dice_tf.training.epsilon_callback import EpsilonCallback

__all__ = ["SearchResult", "Trial", "private_search"]

if TYPE_CHECKING:
    import keras_tuner


@dataclasses.dataclass(frozen=True)
class Trial:
    """What one trial of `private_search` trains with.

    Attributes:
        values: Dictionary from the names of hyperparameters to what was drawn; `trial["rate"]`
            is one of them.
        sampling: The sampler of this trial, with draws and groups of its own. Its data set is
            the one to train on: `trial.sampling.dataset(x, y)`.
        delta: Float, that of the search.
        accountant: `"rdp"` or `"pld"`, that of the search.
        directory: A private folder that is deleted when the trial is done, and is still there
            if it was cut short: for `keras.callbacks.BackupAndRestore`.
    """

    values: dict[str, Any]
    sampling: Sampling
    delta: float
    accountant: str
    directory: pathlib.Path

    def __getitem__(self, name: str) -> Any:
        return self.values[name]

    def callback(self) -> EpsilonCallback:
        """Returns an `EpsilonCallback`, which shows what this trial costs alone."""
        return EpsilonCallback(self.sampling, self.delta, accountant=self.accountant)


@dataclasses.dataclass(frozen=True)
class SearchResult:
    """What a search releases: all of it is covered by its epsilon, and nothing else is.

    Attributes:
        model: The best model, or `None` if the number of trials was 0 (`shape=math.inf` only).
        values: Dictionary, its hyperparameters.
        score: Float, its score; NaN without a model.
        epsilon: Float, of model, values and score together.
        delta: Float.
        statement: Text, `accounting.selection_statement`.
    """

    model: keras.Model | None
    values: dict[str, Any]
    score: float
    epsilon: float
    delta: float
    statement: str = dataclasses.field(repr=False)


def private_search(
    train: Callable[[Trial], tuple[keras.Model, float]] | keras_tuner.HyperModel,
    space: dict[str, Any] | None = None,
    *,
    run: PrivacyPlan | tuple[DiceMechanism, Sampling, int],
    mean_trials: float,
    score_data: str,
    direction: str,
    directory: str | os.PathLike[str],
    delta: float | None = None,
    shape: float = 1.0,
    accountant: str | None = None,
    fit_arguments: Callable[[Trial], dict[str, Any]] | None = None,
    objective: str | None = None,
) -> SearchResult:
    r"""Trains a random number of models privately, and returns the best one.

    The number of trials \(K\) is drawn before the first one, from entropy of the operating
    system, and is never shown. That is why the best model costs about two to three times the
    epsilon of one trial, not that of all of them:

    \[\varepsilon' = \min_\alpha\; r(\alpha) + \tfrac{\log E[K]}{\alpha - 1}
      + (1 + \eta)\min_\beta[(1 - \tfrac1\beta) r(\beta) + \tfrac1\beta\log\tfrac1\gamma]
      + \ldots,\]

    as `accounting.selection_epsilon` has it in full. It is printed before the first trial.

    A search that was cut short goes on when it is called again with the same arguments. The trial
    that was under way is made anew, with its hyperparameters and with fresh noise and draws.
    That costs nothing, because nothing of it was kept, provided that it was not stopped because of
    how it went. An error that `train` raises stops the search in the same way; a training that
    fails by its hyperparameters must return the score NaN, which is the worst.

    Args:
        train: Function from a `Trial` to a Keras model, which it made and trained by a private
            optimizer on `trial.sampling`, and its score. It must not depend on earlier
            trials. Or a `keras_tuner.HyperModel`.
        space: Dictionary from each hyperparameter to a list of choices, or to a function that
            draws a value from a `numpy.random.Generator`. With a hypermodel, leave it out.
        run: What every trial costs at most: a `PrivacyPlan`, or `(mechanism, sampling, steps)`.
        mean_trials: Float from 1 to 1e6, the mean of K.
        score_data: Where scores come from: `"public"`, or `"held_out"`, rows that no sampler
            has. The guarantee does not cover them.
        direction: `"max"` or `"min"`: which score is best.
        directory: Private folder of the search, new or empty, or its own to go on. One process
            at a time.
        delta: Float in (0, 1/N). Defaults to that of the plan.
        shape: Float >= 0, or `math.inf`, as for `accounting.selection_epsilon`: 1 is geometric.
        accountant: `"rdp"` or `"pld"`. Defaults to that of the plan, or `"rdp"`.
        fit_arguments: Function from a `Trial` to the dictionary of arguments that a
            hypermodel's `fit` receives; for a hypermodel only.
        objective: The name of a hypermodel's score, such as `"val_accuracy"`, of its last epoch.

    Returns:
        A `SearchResult`: the best model, its hyperparameters, its score, epsilon, statement.
        The other trials are in `private_trials(directory)`, and are not covered.

    Raises:
        AccountingError: If an argument is out of range, scores are from private data, a tuner
            would choose by results, or a trial cost more than `run`.
        PlainGradientsError: If a trial was not trained by a private optimizer.
        SamplingError: If a trial was not trained on its own sampler.
        ReleaseError: If `directory` has other files.

    Example:

    >>> import dice_tf, keras, numpy as np, tempfile
    >>> x, y = np.ones([80, 4]), np.ones([80, 1])
    >>> plan = dice_tf.PrivacyPlan(num_examples=80, batch_size=8, epochs=1, target_epsilon=1.0)
    >>> def train(trial):
    ...     model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
    ...     model.compile(dice_tf.DiceSGDOptimizer(trial["rate"], l2_norm_clip=1.0, plan=plan),
    ...                   loss="mse")
    ...     data = trial.sampling.dataset(x, y)
    ...     _ = model.fit(data, callbacks=[trial.callback()], verbose=0)
    ...     return model, model.evaluate(np.ones([5, 4]), np.ones([5, 1]), verbose=0)
    >>> result = dice_tf.private_search(
    ...     train, {"rate": [0.1, 0.3]}, run=plan, mean_trials=2, score_data="public",
    ...     direction="min", directory=tempfile.mkdtemp())  # doctest: +ELLIPSIS
    Private search: the best model costs epsilon = 1..., delta = 0.00125 (PLD accountant)...
    >>> result.values["rate"] in (0.1, 0.3)
    True

    Source: Papernot, Steinke, "Hyperparameter tuning with Renyi differential privacy", ICLR 2022.
    """
    train, draw_values = _trials_of(train, space, fit_arguments, objective)
    mechanism, sampling, steps, delta, accountant = _declared_run(run, delta, accountant)
    declared_run = (mechanism, sampling, steps)
    if direction not in ("max", "min"):
        raise AccountingError(
            'Argument `direction` must be "max", where a larger score is better, or "min". '
            f"Received: direction={direction!r}."
        )
    statement = joint_statements.selection_statement(
        *declared_run, delta, mean_trials, score_data, shape, accountant
    )
    mean, shape = repeated_selection.check_law(mean_trials, shape)
    epsilon = repeated_selection.selection_epsilon(*declared_run, delta, mean, shape, accountant)
    declared = {
        "run": f"({mechanism!r}, {sampling!r}, {steps})",
        # Their list is private, and not in the text of a sampling.
        "owners": "none" if sampling.owners is None else sampling.owners.digest.hex()[:16],
        "delta": repr(delta),
        "mean_trials": repr(mean),
        "shape": repr(shape),
        "accountant": accountant,
        "score_data": score_data,
        "direction": direction,
        "hyperparameters": "those of the hypermodel" if space is None else repr(sorted(space)),
    }
    record = SearchRecord(
        directory, declared, lambda: repeated_selection.draw_number_of_trials(mean, shape)
    )
    alone = accounting.compute_epsilon(*declared_run, delta, accountant)
    print(
        f"Private search: the best model costs epsilon = {up(epsilon)}, delta = {delta:g} "
        f"({accountant.upper()} accountant); one trial alone costs {up(alone)}. The number of "
        f"trials, {mean:g} on average, is secret."
    )
    best_model, earlier = None, weakref.WeakSet()
    while not record.is_done:
        values = record.begin_trial(draw_values)
        own = dataclasses.replace(sampling)  # Of equal parameters, with entropy of its own.
        trial = Trial(dict(values), own, delta, accountant, record.trial_directory)
        model, score = _results(train(trial))
        made = _check_trial(model, own, declared_run, (delta, accountant), earlier)
        earlier.add(model)
        model.optimizer.save_errors = False  # The result is for release.
        if record.end_trial(model, score, made):
            best_model = model
    best = record.best
    if best is None:
        return SearchResult(None, {}, math.nan, epsilon, delta, statement)
    if best_model is None:  # It is of an earlier process.
        best_model = keras.models.load_model(record.directory / best["model"])
    return SearchResult(best_model, best["values"], best["score"], epsilon, delta, statement)


def _trials_of(train, space, fit_arguments, objective):
    """Returns a function from a trial to its results, and one that draws hyperparameters."""
    if search_space.is_hypermodel(train):
        if space is not None:
            raise AccountingError(
                "A hypermodel says itself which hyperparameters it has. Received: "
                f"space={space!r}. Leave `space` out."
            )
        own = search_space.train_of_hypermodel(train, fit_arguments, objective)
        return own, search_space.draw_of_hypermodel(train)
    if not callable(train) or isinstance(train, type):
        raise AccountingError(
            "Argument `train` must be a function from a trial to a model and its score, or a "
            f"`keras_tuner.HyperModel`. Received: train={train!r}."
        )
    if fit_arguments is not None or objective is not None:
        raise AccountingError(
            "Arguments `fit_arguments` and `objective` are for a `keras_tuner.HyperModel`. "
            f"Received: objective={objective!r} with train={train!r}. Leave them out: the "
            "function fits, and returns its score."
        )
    return train, search_space.check_space(space)


def _declared_run(run, delta, accountant):
    if isinstance(run, PrivacyPlan):
        delta = run.delta if delta is None else delta
        accountant = run.accountant if accountant is None else accountant
        run = run.mechanism(), run.sampling, run.steps
    if not isinstance(run, (tuple, list)) or len(run) != 3:
        raise AccountingError(
            "Argument `run` must be a `PrivacyPlan` or `(mechanism, sampling, steps)`: what every "
            f"trial costs at most. Received: run={run!r}."
        )
    mechanism, sampling, steps = run
    accounting.compute_epsilon(mechanism, sampling, steps, delta)  # Checks all four.
    if not mechanism.noise_is_secret or (is_amplified(sampling) and sampling.seed is not None):
        raise AccountingError(
            "Trials of a private search must be independent: noise and draws from a seed would "
            f"come again in every trial. Received: noise_is_secret={mechanism.noise_is_secret}, "
            f"sampling={sampling!r}. Leave out `seed` of optimizer and sampler."
        )
    return mechanism, sampling, steps, delta, accountant or "rdp"


def _results(returned):
    """Returns the model and the score that `train` gave."""
    pair = isinstance(returned, (tuple, list)) and len(returned) == 2
    if not pair or not isinstance(returned[0], keras.Model):
        raise AccountingError(
            "Function `train` must return a Keras model and its score, `return model, score`. "
            f"Received: {returned!r}."
        )
    return returned[0], search_space.as_score(returned[1])


def _check_trial(model, sampling, declared_run, account, earlier):
    """Returns the steps of a trial, once its ledger says that it costs at most what is declared.

    Raises:
        DicePrivacyError: If it does not, or the trial was not independent of others.
    """
    if model in earlier:
        raise AccountingError(
            f"Function `train` returned the model of an earlier trial, '{model.name}': trials must "
            "be independent. Build a new model in every call."
        )
    made = accounted_run(model, sampling)
    mechanism, _, steps = made
    if steps == 0:
        raise PlainGradientsError(
            f"Model '{model.name}' of a trial has made no private step, so nothing says that its "
            "weights are private. Train it after the last `compile`, and return it as `fit` left "
            "it."
        )
    if not mechanism.noise_is_secret:
        raise AccountingError(
            f"The optimizer of model '{model.name}' has a seed, so trials share their noise: they "
            "must be independent. Leave `seed` out."
        )
    _check_draws(model, sampling)
    if not repeated_selection.costs_at_most(made, declared_run, *account):
        raise AccountingError(
            f"A trial cost more than `run` declares, by which the search is accounted. Received: "
            f"{steps} steps of {mechanism!r}. Declared: {declared_run[2]} steps of "
            f"{declared_run[0]!r}. Its model was not kept. Mend `train`, and begin a new search."
        )
    return steps


def _check_draws(model, sampling):
    # With the groups of another trial, or those of a sampler that all trials share until the
    # process ends, trials are not alike.
    if not is_amplified(sampling):
        return
    record = provenance.unpack_record(model.optimizer.sampling_record.numpy())
    other = sampling.num_groups > 1 and record["assignment"] != sampling.assignment
    if sampling.draws == 0 or other:
        raise SamplingError(
            f"Model '{model.name}' of a trial was not trained on the draws of its own sampler: "
            "trials must be independent. Received: batches of another object than "
            f"`trial.sampling`. Train on `trial.sampling.dataset(x, y)`, made in `train`."
        )
