# Copyright 2026 The dice_tf Authors.
# SPDX-License-Identifier: Apache-2.0
"""What a private search keeps in its directory: a secret number, trials, and the best model.

All of it is private. Names of files say nothing of the number of trials.
"""

from __future__ import annotations

import json
import math
import os
import pathlib
import secrets
import shutil
from typing import TYPE_CHECKING

from dice_tf.errors import AccountingError, MissingPackageError, ReleaseError

__all__ = ["PrivateTrials", "private_trials"]

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_STATE, _TRIAL = "search.json", "trial"
_MARK = "PRIVATE: for the person who trains, not covered by epsilon"


class SearchRecord:
    """The state of one search, on disk at all times.

    Args:
        directory: A folder that is new or empty, or that of the same search.
        declared: Dictionary from names to text: the public arguments of the search, with
            `"direction"`, which is `"max"` or `"min"`.
        draw_number: Function without arguments that draws the number of trials, once.

    Raises:
        ReleaseError: If the folder has other files, which others may be able to read.
        AccountingError: If the folder is that of a search with other arguments.
    """

    def __init__(self, directory, declared, draw_number):
        self.directory = pathlib.Path(directory)
        if (self.directory / _STATE).exists():
            self._state = _read(self.directory)
            _check_declared(self._state["declared"], declared, self.directory)
            return
        if self.directory.exists() and (
            not self.directory.is_dir() or any(self.directory.iterdir())
        ):
            raise ReleaseError(
                "Argument `directory` must be a new or an empty folder, or that of the search to "
                "go on with: what is kept there is private, and is deleted as a whole in the end. "
                f"Received: directory={str(directory)!r}."
            )
        self.directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        self.directory.chmod(0o700)
        self._state = {"declared": declared, "number": draw_number(), "trials": [], "pending": None}
        self._write()

    @property
    def is_done(self):
        """Whether no trial is left to make."""
        return len(self._state["trials"]) >= self._state["number"]

    @property
    def best(self):
        """The best trial so far, a dictionary, or `None` before the first one."""
        return _best(self._state, self._state["trials"])

    @property
    def trial_directory(self):
        """A folder for the files of the trial that is under way."""
        return self.directory / _TRIAL

    def begin_trial(self, draw_values):
        """Returns the hyperparameters of the next trial: of one that was cut short, its own."""
        if self._state["pending"] is None:
            self._state["pending"] = draw_values()
            self._write()
        self.trial_directory.mkdir(mode=0o700, exist_ok=True)
        return self._state["pending"]

    def end_trial(self, model, score, steps):
        """Notes a trial, and keeps its model if it is the best one.

        Args:
            model: Keras model.
            score: Float; NaN is the worst.
            steps: Int, what it made.

        Returns:
            Whether it is the best one so far.
        """
        trial = {"values": self._state["pending"], "score": score, "steps": steps, "model": None}
        before = self.best
        trials = [*self._state["trials"], trial]
        is_best = _best(self._state, trials) is trial
        if is_best:
            trial["model"] = f"{secrets.token_hex(8)}.keras"
            model.save(self.directory / trial["model"])
        # In this order a kill at any line leaves a state that is whole.
        self._state.update(trials=trials, pending=None)
        self._write()
        if is_best and before is not None:
            (self.directory / before["model"]).unlink(missing_ok=True)
        shutil.rmtree(self.trial_directory, ignore_errors=True)
        return is_best

    def _write(self):
        text = json.dumps(self._state, indent=1)
        draft = self.directory / f"{_STATE}.new"
        descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.replace(draft, self.directory / _STATE)


def _read(directory):
    try:
        return json.loads((directory / _STATE).read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise AccountingError(
            "Argument `directory` must be the folder of a private search. "
            f"Received: directory={str(directory)!r}, which has no '{_STATE}'."
        ) from None


def _best(state, trials):
    sign = -1 if state["declared"]["direction"] == "min" else 1
    # The first of equals wins, an order that ignores the data.
    rank = lambda trial: -math.inf if math.isnan(trial["score"]) else sign * trial["score"]
    return max(trials, key=rank, default=None)


def _check_declared(stored, declared, directory):
    different = [
        f"{name}={declared.get(name)} (stored: {stored.get(name)})"
        for name in sorted({*stored, *declared})
        if stored.get(name) != declared.get(name)
    ]
    if different:
        raise AccountingError(
            f"The search in '{directory}' was begun with other arguments, by which its number of "
            f"trials was drawn and accounted. Received: {', '.join(different)}. Go on with its own "
            "arguments, or begin a search in another folder: the two compose."
        )


class PrivateTrials(list):
    """The trials of a search so far, for the person who trains.

    A list of dictionaries: `"values"` (hyperparameters), `"score"`, `"steps"`, and `"best"`.
    How many there are, and the scores of all but the best, are NOT covered by the epsilon of the
    search.

    Example:

    >>> trials = PrivateTrials([
    ...     {"values": {"rate": 0.1}, "score": 0.5, "steps": 20, "best": False},
    ...     {"values": {"rate": 0.3}, "score": 0.75, "steps": 20, "best": True}])
    >>> print(trials)
    PRIVATE: for the person who trains, not covered by epsilon
           score    steps  rate
             0.5       20  0.1
      *     0.75       20  0.3
    """

    def __str__(self) -> str:
        names = self._names()
        texts = [[str(trial["values"].get(name, "")) for name in names] for trial in self]
        widths = [max(map(len, column)) for column in zip(names, *texts)]
        row = lambda first, cells: (
            first + "".join(f"  {cell:<{width}}" for cell, width in zip(cells, widths))
        ).rstrip()
        lines = [_MARK, row(f"  {'':<2}{'score':>8}{'steps':>9}", names)]
        for trial, cells in zip(self, texts):
            mark = "*" if trial["best"] else ""
            lines.append(row(f"  {mark:<2}{trial['score']:>8.4g}{trial['steps']:>9}", cells))
        return "\n".join(lines)

    def _names(self):
        return list(dict.fromkeys(name for trial in self for name in trial["values"]))

    def plot(self) -> Figure:
        """Returns a figure of the scores, in order and against each hyperparameter.

        Returns:
            `matplotlib.figure.Figure`, marked as private, to be saved by `figure.savefig(file)`.

        Raises:
            MissingPackageError: If matplotlib is not installed.
        """
        try:
            from matplotlib.figure import Figure
        except ImportError as error:
            raise MissingPackageError(
                "The plot of trials needs the package matplotlib, which cannot be imported. "
                f"Received: {type(error).__name__}: {error}. Run `pip install matplotlib`, or "
                "print the trials as a table."
            ) from error
        names = self._names()
        figure = Figure(figsize=(3.2 * (1 + len(names)), 3.2), layout="constrained")
        figure.suptitle(_MARK, color="firebrick", fontsize="medium")
        panels = figure.subplots(1, 1 + len(names), sharey=True, squeeze=False)[0]
        for panel, name in zip(panels, [None, *names]):
            rows = [
                (index + 1 if name is None else trial["values"][name], trial)
                for index, trial in enumerate(self)
                if name is None or name in trial["values"]
            ]
            places = [place for place, _ in rows]
            if not all(type(place) in (int, float) for place in places):
                places = [str(place) for place in places]
            colors = ["C1" if trial["best"] else "C0" for _, trial in rows]
            panel.scatter(places, [trial["score"] for _, trial in rows], c=colors)
            if places and not isinstance(places[0], str) and min(places) > 0:
                if max(places) >= 30 * min(places) and name is not None:
                    panel.set_xscale("log")
            panel.set_xlabel("trial" if name is None else name)
        panels[0].set_ylabel("score")
        return figure


def private_trials(directory: str | os.PathLike[str]) -> PrivateTrials:
    """Returns the trials that a search has made so far: private, for the person who trains.

    To look at them costs nothing as long as they decide nothing: not when to stop, not what to
    try next. How many there are and what the others scored must not be shown with the result.

    Args:
        directory: That of `private_search`, during the search or after it.

    Returns:
        A `PrivateTrials`: a list of dictionaries that prints as a table and has `plot()`.

    Raises:
        AccountingError: If it is not the directory of a search.

    Example:

    >>> private_trials("no/such/folder")
    Traceback (most recent call last):
    dice_tf.errors.AccountingError: Argument `directory` must be the folder of a private search...
    """
    state = _read(pathlib.Path(directory))
    best = _best(state, state["trials"])
    return PrivateTrials(
        {**{name: trial[name] for name in ("values", "score", "steps")}, "best": trial is best}
        for trial in state["trials"]
    )
