# Copyright 2026 The dice_tf Authors.
# SPDX-License-Identifier: Apache-2.0
"""What the trials of compare.py show: intervals, a verdict, and the table."""

import math
import statistics
from typing import NamedTuple

import scipy.stats

METHODS = ("DP-SGD", "DiceSGD")


class Summary(NamedTuple):
    """The comparison at one epsilon.

    Attributes:
        target_epsilon: Float.
        scores: Dict from method to the list of test scores, one per search.
        intervals: Dict from method to (mean, half width of the 95 % interval).
        difference: DiceSGD less DP-SGD: (mean, low end, high end).
        draw_difference: The same over all draws of the searches, on held-out data, both
            methods with the same draw: (median, low end, high end).
        num_draws: Int, how many draws these were.
        verdict: Text, about `difference`.
    """

    target_epsilon: float
    scores: dict
    intervals: dict
    difference: tuple
    draw_difference: tuple
    num_draws: int
    verdict: str


def summarise(epsilon, scores, search_scores):
    """Compares the test scores of both methods, repeat by repeat, and their draws one by one.

    Args:
        epsilon: Float.
        scores: Dict from method to a list of at least two scores, one per repeat.
        search_scores: Dict from method to the scores of all draws, in the same order.

    Returns:
        `Summary`.

    Example:

    >>> tests = {"DP-SGD": [0.80, 0.81, 0.82], "DiceSGD": [0.90, 0.92, 0.92]}
    >>> summarise(8.0, tests, {"DP-SGD": [0.5, 0.8], "DiceSGD": [0.5, 0.9]}).verdict
    'DiceSGD ahead'
    """
    intervals = {method: _t_interval(values) for method, values in scores.items()}
    # Paired: the methods share draws, seeds and so much of their luck.
    mean, half = _t_interval(_differences(scores))
    verdict = "no difference shown"
    # Equal differences tell nothing about how much they vary.
    if half > 0 and abs(mean) > half:
        verdict = "DiceSGD ahead" if mean > 0 else "DP-SGD ahead"
    draws = _differences(search_scores)
    # The median, because bad draws fail by any amount; its interval needs no distribution.
    interval = scipy.stats.quantile_test(draws, p=0.5).confidence_interval(0.95)
    draw_difference = (statistics.median(draws), float(interval.low), float(interval.high))
    difference = (mean, mean - half, mean + half)
    return Summary(epsilon, scores, intervals, difference, draw_difference, len(draws), verdict)


def _differences(scores):
    pairs = zip(scores["DiceSGD"], scores["DP-SGD"], strict=True)
    return [dice - plain for dice, plain in pairs]


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
        f"| epsilon | DP-SGD, {score} in % | DiceSGD | difference, 95 % interval | verdict | "
        "draw by draw, held out: median difference |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    for summary in summaries:
        cells = [f"{summary.target_epsilon:g}"]
        for method in METHODS:
            mean, half = summary.intervals[method]
            cells.append(f"{100 * mean:.2f} ± {100 * half:.2f}")
        cells += [_with_interval(summary.difference), summary.verdict]
        cells.append(f"{_with_interval(summary.draw_difference)}, {summary.num_draws} draws")
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def _with_interval(difference):
    middle, low, high = (100 * value for value in difference)
    # Few draws have no such interval.
    interval = "no interval" if math.isnan(low + high) else f"{low:+.2f} to {high:+.2f}"
    return f"{middle:+.2f} ({interval})"
