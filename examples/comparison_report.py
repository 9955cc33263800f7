# Copyright 2026 The dice_tf Authors.
# SPDX-License-Identifier: Apache-2.0
"""What the runs of compare.py show: intervals, a verdict, and the table."""

import statistics
from typing import NamedTuple

from comparison_search import METHODS, Choice, Setting
import numpy as np
import scipy.stats


class Summary(NamedTuple):
    """The comparison in one setting.

    Attributes:
        setting: `comparison_search.Setting`.
        choice: `comparison_search.Choice`.
        scores: Dict from method to the list of test scores, one per seed.
        intervals: Dict from method to (mean, half width of the 95 % interval over seeds).
        difference: DiceSGD less DP-SGD, mean over seeds.
        over_seeds: Half width of its 95 % interval over seeds, both methods with the same.
        over_examples: Half width of its 95 % interval over test examples.
        noise_ratio: Noise on the mean gradient over that of DP-SGD, at the same C1 + C2.
        steps: Dict from method to its number of steps.
        verdict: Text: who is ahead by more than both intervals.
    """

    setting: Setting
    choice: Choice
    scores: dict
    intervals: dict
    difference: float
    over_seeds: float
    over_examples: float
    noise_ratio: float
    steps: dict
    verdict: str


def summarise(setting, choice, example_scores, results):
    """Compares the test scores of both methods, seed by seed and example by example.

    Args:
        setting: `comparison_search.Setting`.
        choice: `comparison_search.Choice`.
        example_scores: Dict from method to a list of at least two arrays, one per seed, with
            the score of every test example.
        results: Dict from method to a `comparison_runs.Result`.

    Returns:
        `Summary`.
    """
    scores = {m: [float(np.mean(s)) for s in arrays] for m, arrays in example_scores.items()}
    plain, dice = (np.asarray(example_scores[method], np.float64) for method in METHODS)
    difference, over_seeds = _t_interval([float(d) for d in (dice - plain).mean(1)])
    of_examples = (dice - plain).mean(0)
    over_examples = 1.96 * float(of_examples.std(ddof=1)) / len(of_examples) ** 0.5
    verdict = "no difference shown"
    # Equal differences tell nothing about how much they vary.
    if over_seeds > 0 and abs(difference) > max(over_seeds, over_examples):
        verdict = "DiceSGD ahead" if difference > 0 else "DP-SGD ahead"

    def noise(method):
        trial, result = choice.trials[method], results[method]
        # On the mean, at C1 + C2 = 1.
        return result.noise_multiplier * trial.share / trial.batch_size

    return Summary(
        setting,
        choice,
        scores,
        {method: _t_interval(values) for method, values in scores.items()},
        difference,
        over_seeds,
        over_examples,
        noise(METHODS[1]) / noise(METHODS[0]),
        {method: results[method].steps for method in METHODS},
        verdict,
    )


def _t_interval(values):
    """Returns the mean and the half width of its 95 % interval after Student."""
    error = statistics.stdev(values) / len(values) ** 0.5
    return statistics.fmean(values), float(scipy.stats.t.ppf(0.975, len(values) - 1) * error)


def format_table(summaries, score):
    """Returns the table of one task, as Markdown.

    Args:
        summaries: List of `Summary`.
        score: Text, what was measured.
    """
    lines = [
        f"| epochs, epsilon, batch | DP-SGD: {score} in % | DiceSGD | difference ± seeds ± test "
        "examples | verdict | chosen for DP-SGD | chosen for DiceSGD |",
        "| --- | --- | --- | --- | --- | --- | --- |",
    ]
    for summary in summaries:
        setting = summary.setting
        cells = [f"{setting.epochs}, {setting.target_epsilon:g}, {setting.batch or 'free'}"]
        for method in METHODS:
            mean, half = summary.intervals[method]
            cells.append(f"{100 * mean:.2f} ± {100 * half:.2f}")
        cells.append(
            f"{100 * summary.difference:+.2f} ± {100 * summary.over_seeds:.2f} ± "
            f"{100 * summary.over_examples:.2f}"
        )
        cells.append(summary.verdict)
        cells += [_chosen(summary, method) for method in METHODS]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def _chosen(summary, method):
    trial = summary.choice.trials[method]
    feedback = f"s {trial.feedback_steps}, C1 {trial.share:.2f} G, " * bool(trial.feedback_steps)
    extra = f", momentum {trial.momentum:g}" * bool(trial.momentum)
    extra += f", averaged {trial.averaged_part:g}" * bool(trial.averaged_part)
    return (
        f"{feedback}B {trial.batch_size}, T {summary.steps[method]}, G {trial.clip:.2g}, "
        f"u {trial.step_length:.3g}{extra}"
    )
