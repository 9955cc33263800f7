# Copyright 2026 The dice_tf Authors.
# SPDX-License-Identifier: Apache-2.0
"""How compare.py searches: the same draws for both methods, in ranges that extend themselves.

A search is a generator: it yields trials, is sent their scores, and returns what it chose. So many
searches go on side by side, and their trials can be trained together.
"""

from typing import NamedTuple

import numpy as np

METHODS = ("DP-SGD", "DiceSGD")
MOMENTA = (0.0, 0.9)
# Of the number of steps: over how many of the last ones iterates are averaged; 0 is none.
AVERAGED_PARTS = (0.0, 0.05, 0.2)
# A best draw this close to the end of a range counts as being at its edge; the range is then
# extended by the second factor.
_EDGE, _EXTENSION = 1.25, 2.0
# How far from the best draws the search goes on.
_NEAR = 1.6
_MOST_WAVES = 10
_FINALISTS = 4
_VALIDATION_SEEDS = 3
# Repetitions of the whole comparison are this far apart, so that none has the seeds of another.
SEEDS_APART = 1000


class Setting(NamedTuple):
    """What both methods are given.

    Attributes:
        target_epsilon: Float.
        epochs: Int.
        batch: Int, the batch size, or 0: it is searched, too.
    """

    target_epsilon: float
    epochs: int
    batch: int


class Trial(NamedTuple):
    """What one training run has of its own: a row of search.csv or final.csv."""

    method: str
    target_epsilon: float
    epochs: int
    batch: int
    seed: int
    batch_size: int
    feedback_steps: int  # 0 for DP-SGD
    share: float  # C1 / (C1 + C2)
    clip: float  # C1 + C2
    step_length: float  # Learning rate * (C1 + C2) / (1 - momentum).
    momentum: float
    averaged_part: float

    @property
    def setting(self):
        """The `Setting` that it is of."""
        return Setting(self.target_epsilon, self.epochs, self.batch)

    @property
    def learning_rate(self):
        """Float."""
        return self.step_length * (1 - self.momentum) / self.clip


class Choice(NamedTuple):
    """What a search found.

    Attributes:
        trials: Dict from method to the chosen `Trial`.
        scores: Dict from method to its mean score over the validation seeds.
        clips: Pair of floats, the range of C1 + C2 in the end.
        step_lengths: Pair of floats, the range of step lengths in the end.
        at_edge: Names of ranges at whose edge a best draw still is; empty if all is well.
        draws: Int, draws per method.
    """

    trials: dict
    scores: dict
    clips: tuple
    step_lengths: tuple
    at_edge: tuple
    draws: int


def search(setting, task, draws, feedback_steps, repetition=0):
    """Searches for the best trial of each method.

    First `draws` draws from the whole ranges; then, until no best draw is at an edge, a quarter
    as many beyond that edge; and half as many near the best three of each method. The best
    four of each method are then trained with further seeds, and their mean decides.

    Args:
        setting: `Setting`.
        task: `comparison_tasks.Task`.
        draws: Int.
        feedback_steps: Ints, among which the search draws for DiceSGD.
        repetition: Int; each has other draws, batches and noise.

    Yields:
        Lists of `Trial`; sent the list of their scores.

    Returns:
        `Choice`.
    """
    random = np.random.default_rng([round(1000 * setting.target_epsilon), *setting[1:], repetition])
    seed, *more_seeds = (SEEDS_APART * repetition + seed for seed in range(_VALIDATION_SEEDS))
    ranges = {"clip": task.clips, "step_length": task.step_lengths}
    scores = {}

    def best_of(method, count=1):
        known = [trial for trial in scores if trial.method == method]
        return sorted(known, key=scores.get, reverse=True)[:count]

    wave = _first_draws(setting, task, draws, feedback_steps, random, seed)
    refined = False
    for left in reversed(range(_MOST_WAVES)):
        found = yield wave
        scores.update(zip(wave, found, strict=True))
        best = {method: best_of(method)[0] for method in METHODS}
        edges = _edges(ranges, best.values())
        if not left:
            break
        if edges:
            wave = []
            for name, side in edges:
                strip = _extend(ranges, name, side)
                for _ in range(max(1, draws // (4 * len(edges)))):
                    wave += _near(best.values(), random, {name: strip})
        elif not refined:
            refined, wave = True, []
            leaders = [best_of(method, 3) for method in METHODS]
            for draw in range(max(1, draws // 2)):
                wave += _near([trials[draw % len(trials)] for trials in leaders], random, {})
        else:
            break
    number = sum(trial.method == METHODS[0] for trial in scores)
    finalists = [trial for method in METHODS for trial in best_of(method, _FINALISTS)]
    again = [trial._replace(seed=other) for trial in finalists for other in more_seeds]
    found = yield again
    totals = {trial: [scores[trial]] for trial in finalists}
    for trial, score in zip(again, found, strict=True):
        totals[trial._replace(seed=seed)].append(score)
    means = {trial: float(np.mean(values)) for trial, values in totals.items()}
    trials = {
        method: max((t for t in means if t.method == method), key=means.get) for method in METHODS
    }
    return Choice(
        trials,
        {method: means[trial] for method, trial in trials.items()},
        ranges["clip"],
        ranges["step_length"],
        tuple(f"{name} {side}" for name, side in edges),
        number,
    )


def of_all_batches(choices):
    """Returns what is best of all batch sizes, for each method by itself.

    Held-out scores decide, so each method is given its best batch size.

    Args:
        choices: List of `Choice` of one task, of settings that differ in their batch sizes only.

    Returns:
        `Choice`; a method that takes the smallest or largest batches is at an edge.
    """
    sizes = [choice.trials[METHODS[0]].batch_size for choice in choices]
    trials, scores, edges = {}, {}, []
    for method in METHODS:
        best = max(choices, key=lambda choice: choice.scores[method])
        trials[method], scores[method] = best.trials[method], best.scores[method]
        for side, end in (("low", min(sizes)), ("high", max(sizes))):
            edges += [f"batch of {method} {side}"] * (trials[method].batch_size == end)
    edges += [edge for choice in choices for edge in choice.at_edge]
    ranges = [
        (min(low for low, _ in ranges), max(high for _, high in ranges))
        for ranges in zip(*((choice.clips, choice.step_lengths) for choice in choices), strict=True)
    ]
    draws = sum(choice.draws for choice in choices)
    return Choice(trials, scores, *ranges, tuple(dict.fromkeys(edges)), draws)


def run_searches(searches, evaluate):
    """Runs searches side by side.

    Args:
        searches: Dict from any key to a generator of `search`.
        evaluate: Function from a list of trials to the list of their scores.

    Returns:
        Dict from key to `Choice`.
    """
    choices, waiting = {}, {}
    for key, generator in searches.items():
        waiting[key] = next(generator)
    while waiting:
        trials = [trial for wave in waiting.values() for trial in wave]
        scores = iter(evaluate(trials))
        for key, wave in list(waiting.items()):
            try:
                waiting[key] = searches[key].send([next(scores) for _ in wave])
            except StopIteration as stop:
                choices[key] = stop.value
                del waiting[key]
    return choices


def _log_uniform(random, low, high):
    return float(np.exp(random.uniform(np.log(low), np.log(high))))


def _first_draws(setting, task, draws, feedback_steps, random, seed):
    trials = []
    for _ in range(draws):
        drawn = dict(
            seed=seed,
            batch_size=setting.batch or int(random.choice(task.batch_sizes)),
            clip=_log_uniform(random, *task.clips),
            step_length=_log_uniform(random, *task.step_lengths),
            momentum=float(random.choice(MOMENTA)),
            averaged_part=float(random.choice(AVERAGED_PARTS)),
        )
        # Each of s + 1 groups must hold a batch.
        most = (len(task.x) - task.held_out) // drawn["batch_size"] - 1
        s = int(random.choice([steps for steps in feedback_steps if steps <= most]))
        share = float(random.choice((1 / (s + 1), 0.3, 0.5)))
        trials += [
            Trial("DP-SGD", *setting, feedback_steps=0, share=1.0, **drawn),
            Trial("DiceSGD", *setting, feedback_steps=s, share=share, **drawn),
        ]
    return trials


def _near(trials, random, fixed):
    """Returns one draw near each of the trials, all by the same factors."""
    factors = {
        name: _log_uniform(random, 1 / _NEAR, _NEAR)
        for name in ("clip", "step_length")
        if name not in fixed
    }
    fixed = {name: _log_uniform(random, *strip) for name, strip in fixed.items()}
    return [
        trial._replace(
            **{name: getattr(trial, name) * factor for name, factor in factors.items()}, **fixed
        )
        for trial in trials
    ]


def _edges(ranges, trials):
    """Returns the ends of ranges that the best trials are at or beyond, as (name, side)."""
    edges = []
    for name, (low, high) in ranges.items():
        values = [getattr(trial, name) for trial in trials]
        if min(values) < low * _EDGE:
            edges.append((name, "low"))
        if max(values) > high / _EDGE:
            edges.append((name, "high"))
    return edges


def _extend(ranges, name, side):
    """Extends a range at one end, and returns the part that is new."""
    low, high = ranges[name]
    if side == "low":
        ranges[name] = low / _EXTENSION, high
        return low / _EXTENSION, low
    ranges[name] = low, high * _EXTENSION
    return high, high * _EXTENSION
