# Copyright 2026 The dice_tf Authors.
# SPDX-License-Identifier: Apache-2.0
"""Statistics of audits: thresholds, rates with their confidence, and tails of binomials."""

import numpy as np
from scipy import stats


def choose_threshold(scores_in, scores_out, delta, confidence):
    """Returns a threshold that promises a large bound on other scores like these."""
    candidates = np.unique(np.concatenate([scores_in, scores_out]))
    # Just above the largest score seen, the rate of false positives only looks like 0:
    # averaging it over a normal kernel predicts what other runs will show.
    width = 0.9 * np.std(scores_out) * len(scores_out) ** -0.2
    kernel = width * stats.norm.ppf((np.arange(32) + 0.5) / 32)
    above = lambda scores, x: len(scores) - np.searchsorted(np.sort(scores), x, side="right")
    true_positives = above(scores_in, candidates)
    false_positives = above(scores_out, candidates[:, np.newaxis] + kernel).mean(axis=1)
    counts = (true_positives, len(scores_in), false_positives, len(scores_out))
    return candidates[np.argmax(epsilon_from_counts(*counts, delta, confidence))]


def epsilon_from_counts(true_positives, runs_in, false_positives, runs_out, delta, confidence):
    """Returns the bound of `epsilon_lower_bound` from counts of how often the test fired."""
    # Both rates hold together if each fails with half of the probability.
    tail = (1 - confidence) / 2
    tpr = _smallest_rate(true_positives, runs_in, tail)
    fpr = 1 - _smallest_rate(runs_out - false_positives, runs_out, tail)
    fires = np.maximum(tpr - delta, 0) / fpr
    rests = np.maximum(1 - fpr - delta, 0) / (1 - tpr)
    # A ratio below 1 shows nothing.
    return np.log(np.maximum(1.0, np.maximum(fires, rests)))


def _smallest_rate(successes, trials, tail):
    """Clopper and Pearson's lower bound: a smaller rate gives as many with probability < tail."""
    successes = np.asarray(successes, dtype=np.float64)
    # Predicted counts need not be whole; those below 1 say as little as 0.
    bound = stats.beta.ppf(tail, np.maximum(successes, 1.0), trials - successes + 1)
    return np.where(successes >= 1, bound, 0.0)


def p_value_of_one_run(v, r, m, epsilon, delta):
    """Returns `auditing.one_run_p_value` of arguments that were checked."""
    q = 1 / (1 + np.exp(-epsilon))
    result = stats.binom.sf(v - 1, r, q)
    if delta > 0 and v > 0:
        # Entry i-1: the probability that v > W >= v - i, divided by i.
        below = np.cumsum(stats.binom.pmf(np.arange(v - 1, -1, -1), r, q)) / np.arange(1, v + 1)
        result += m * delta * min(2 * below.max(), 1 - q)
    return float(min(1.0, result))


def random_halves(scores):
    """Returns two halves of an array, of which one may choose what the other is tested by."""
    # At random, because runs may come sorted; always the same, so that nobody tries again.
    shuffled = np.random.default_rng(0).permutation(scores)
    return shuffled[: len(scores) // 2], shuffled[len(scores) // 2 :]
