# Copyright 2026 The dice_tf Authors.
# SPDX-License-Identifier: Apache-2.0
"""Audits: scores of canaries, of one run or many, turned into lower bounds on epsilon."""

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy import optimize, stats

from dice_tf.auditing.statistics import (
    choose_threshold,
    epsilon_from_counts,
    p_value_of_one_run,
    random_halves,
)
from dice_tf.checks.arguments import check_integer, check_number
from dice_tf.errors import AccountingError


class AuditResult(NamedTuple):
    """What an audit found.

    Attributes:
        epsilon_lower_bound: Float >= 0; with probability `confidence` over the audit, no
            smaller epsilon is true at this `delta`.
        delta: Float.
        confidence: Float.
        scores_in: Float64 array, scores of canaries (or runs) that were trained with.
        scores_out: Float64 array, scores of those that were left out.

    Example:

    >>> print(AuditResult(1.25, 1e-5, 0.95, scores_in=np.ones(3), scores_out=np.zeros(2)))
    epsilon >= 1.25 at delta = 1e-05, with confidence 0.95 (3 scores of canaries ...
    """

    epsilon_lower_bound: float
    delta: float
    confidence: float
    scores_in: NDArray[Any]
    scores_out: NDArray[Any]

    def __str__(self) -> str:
        return (
            f"epsilon >= {self.epsilon_lower_bound:.3g} at delta = {self.delta:.3g}, with "
            f"confidence {self.confidence:g} ({len(self.scores_in)} scores of canaries that were "
            f"trained with, {len(self.scores_out)} of others)"
        )


def epsilon_lower_bound(
    scores_in: ArrayLike,
    scores_out: ArrayLike,
    delta: float,
    confidence: float = 0.95,
    threshold: float | None = None,
) -> float:
    r"""Returns a lower bound on epsilon from scores of independent training runs.

    The test "score > threshold" fires with probability TPR with the canary and FPR
    without. Privacy demands \(TPR \le e^\varepsilon FPR + \delta\), and the same of the
    complements with the roles exchanged:

    \[\varepsilon \ge \max\Bigl(\log\frac{\underline{TPR} - \delta}{\overline{FPR}},\;
      \log\frac{1 - \overline{FPR} - \delta}{1 - \underline{TPR}}\Bigr),\]

    where \(\underline{TPR}\) and \(\overline{FPR}\) are one-sided Clopper-Pearson bounds
    that hold together with probability `confidence`.

    Args:
        scores_in: Floats `[runs]`, one score per run with the canary.
        scores_out: Floats `[runs]`, one score per run without it.
        delta: Float in [0, 1).
        confidence: Float in (0, 1), probability with which the bound is true.
        threshold: Float that was chosen without looking at these scores. `None`: half of
            the runs, taken at random, choose it and the other half are counted.

    Returns:
        Float >= 0. With n counted runs on each side it cannot exceed about
        `log(n) - log(log(2 / (1 - confidence)))`.

    Raises:
        AccountingError: If an argument is out of range or a score is not a number.

    Example:

    >>> rng = np.random.default_rng(1)
    >>> scores_in, scores_out = rng.normal(3.0, 1.0, 500), rng.normal(0.0, 1.0, 500)
    >>> round(epsilon_lower_bound(scores_in, scores_out, delta=1e-5, threshold=1.5), 2)
    2.4

    Source: Jagielski, Ullman and Oprea, "Auditing differentially private machine
    learning: how private is private SGD?", NeurIPS 2020, Sec. 4.
    """
    delta, confidence = _check_levels(delta, confidence)
    scores_in = _check_scores("scores_in", scores_in, minimum=1 if threshold is not None else 2)
    scores_out = _check_scores("scores_out", scores_out, minimum=1 if threshold is not None else 2)
    if threshold is None:
        # A choice made on the scores that are counted would make the bound too large.
        choice_in, scores_in = random_halves(scores_in)
        choice_out, scores_out = random_halves(scores_out)
        threshold = choose_threshold(choice_in, choice_out, delta, confidence)
    true_positives, false_positives = np.sum(scores_in > threshold), np.sum(scores_out > threshold)
    counts = (true_positives, len(scores_in), false_positives, len(scores_out))
    return float(epsilon_from_counts(*counts, delta, confidence))


def one_run_p_value(
    num_correct: int, num_guesses: int, num_canaries: int, epsilon: float, delta: float
) -> float:
    r"""Returns a bound on how probable so many correct guesses are under (epsilon, delta).

    Each of m canaries was included by a fair coin \(S_i\); r coins, r fixed beforehand,
    were guessed from the output, and W guesses are right. With
    \(\hat W \sim \mathrm{Binomial}(r, q)\), \(q = e^\varepsilon / (1 + e^\varepsilon)\),

    \[\Pr[W \ge v] \le \Pr[\hat W \ge v] + m \delta \min\Bigl(\max_{i \ge 1}
      \tfrac{2}{i} \Pr[v > \hat W \ge v - i],\; \frac{1}{1 + e^\varepsilon}\Bigr).\]

    The first term of the minimum is the theorem of the source. The second is simpler,
    and smaller for large epsilon. Given the guesses and the coins before it, coin i is as
    guessed with probability at most q plus an excess. Let P and Q be the laws of the
    output for the two values of the coin: the excess of the guess "P" is
    \([P / (P + Q) - q]_+\), of mean \(\frac12 \int [(1 - q) P - q Q]_+ \le
    \frac12 (1 - q) \delta\); so is that of the guess "Q". Outside an event of probability
    \(m (1 - q) \delta\) no excess matters, and W is dominated by \(\hat W\).

    Args:
        num_correct: Int in [0, r], the number v of right guesses.
        num_guesses: Int in [1, m], the number r of guesses, fixed beforehand.
        num_canaries: Int >= 1, the number m of coins.
        epsilon: Float >= 0.
        delta: Float in [0, 1).

    Returns:
        Float in [0, 1].

    Raises:
        AccountingError: If an argument is out of range.

    Example:

    >>> round(one_run_p_value(60, 100, num_canaries=1000, epsilon=0.0, delta=0.0), 4)
    0.0284

    Source: Steinke, Nasr and Jagielski, "Privacy auditing with one (1) training run",
    NeurIPS 2023, Thm. 5.2.
    """
    _check_guesses(num_correct, num_guesses, num_canaries)
    epsilon = check_number("epsilon", epsilon, exclusive=False, error=AccountingError)
    delta, _ = _check_levels(delta, 0.5)
    return p_value_of_one_run(num_correct, num_guesses, num_canaries, epsilon, delta)


def one_run_epsilon_lower_bound(
    num_correct: int,
    num_guesses: int,
    num_canaries: int,
    delta: float,
    confidence: float = 0.95,
) -> float:
    r"""Returns a lower bound on epsilon from guesses about one training run.

    The epsilon at which `one_run_p_value` reaches `1 - confidence`: any smaller one
    would make the guesses less probable than that.

    Args:
        num_correct: Int, number of right guesses.
        num_guesses: Int, number of guesses, fixed beforehand; the rest are abstentions.
        num_canaries: Int, number of canaries, each included by its own fair coin.
        delta: Float in [0, 1).
        confidence: Float in (0, 1).

    Returns:
        Float >= 0.

    Raises:
        AccountingError: If an argument is out of range.

    Example:

    >>> round(one_run_epsilon_lower_bound(95, 100, num_canaries=1000, delta=1e-5), 2)
    2.17

    Source: as `one_run_p_value`.
    """
    _check_guesses(num_correct, num_guesses, num_canaries)
    delta, confidence = _check_levels(delta, confidence)
    excess = lambda epsilon: (
        p_value_of_one_run(num_correct, num_guesses, num_canaries, epsilon, delta)
        - (1 - confidence)
    )
    if excess(0.0) >= 0:
        return 0.0
    # Without the term in delta the answer is Clopper and Pearson's bound on q.
    largest = stats.beta.ppf(1 - confidence, num_correct, num_guesses - num_correct + 1)
    upper = float(np.log(largest / (1 - largest)))
    return upper if excess(upper) <= 0 else float(optimize.brentq(excess, 0.0, upper))


def membership_guesses(scores: ArrayLike, num_guesses: int) -> NDArray[Any]:
    """Guesses which canaries were included: the highest scores were, the lowest not.

    Args:
        scores: Floats `[num_canaries]`, higher for a canary that looks included.
        num_guesses: Even int: half of the guesses are "included", half "left out".

    Returns:
        Int array `[num_canaries]`: 1 included, -1 left out, 0 abstention.

    Raises:
        AccountingError: If `num_guesses` is odd or exceeds the number of scores.

    Example:

    >>> membership_guesses([0.1, 2.0, -1.0, 0.4, 0.3], num_guesses=2).tolist()
    [0, 1, -1, 0, 0]
    """
    scores = _check_scores("scores", scores, minimum=1)
    check_integer("num_guesses", num_guesses, minimum=2, error=AccountingError)
    if num_guesses % 2 or num_guesses > len(scores):
        raise AccountingError(
            "Argument `num_guesses` must be even and at most the number of canaries. Received: "
            f"num_guesses={num_guesses}, with {len(scores)} canaries."
        )
    order = np.argsort(scores, kind="stable")
    guesses = np.zeros(len(scores), dtype=np.int64)
    guesses[order[: num_guesses // 2]] = -1
    guesses[order[-(num_guesses // 2) :]] = 1
    return guesses


def audit(
    train_function: Callable[[bool], float],
    num_runs: int,
    delta: float,
    confidence: float = 0.95,
    threshold: float | None = None,
) -> AuditResult:
    """Trains many times, with a canary and without, and bounds epsilon from below.

    Args:
        train_function: Callable that takes a bool, whether to include the canary, makes
            one complete and independent private training run, and returns the score of
            the released model: a float, higher if it looks trained with the canary.
        num_runs: Int >= 2, number of runs with the canary, and as many without.
        delta: As in `epsilon_lower_bound`, like the next two.
        confidence: Float.
        threshold: Float or `None`.

    Returns:
        An `AuditResult`; compare its `epsilon_lower_bound` with the epsilon reported for
        one run.

    Raises:
        AccountingError: If an argument is out of range or a score is not a number.

    Example:

    >>> rng = np.random.default_rng(0)
    >>> result = audit(lambda include: 4.0 * include + rng.normal(), num_runs=200, delta=1e-5)
    >>> 2.0 < result.epsilon_lower_bound < 4.0
    True

    Source: as `epsilon_lower_bound`.
    """
    check_integer("num_runs", num_runs, minimum=2, error=AccountingError)
    _check_levels(delta, confidence)
    scores = [(train_function(True), train_function(False)) for _ in range(num_runs)]
    scores_in, scores_out = np.asarray(scores, dtype=np.float64).reshape(num_runs, 2).T
    bound = epsilon_lower_bound(scores_in, scores_out, delta, confidence, threshold)
    return AuditResult(bound, delta, confidence, scores_in, scores_out)


def audit_one_run(
    train_function: Callable[[NDArray[Any]], ArrayLike],
    num_canaries: int,
    num_guesses: int,
    delta: float,
    confidence: float = 0.95,
    seed: int | None = None,
) -> AuditResult:
    """Trains once, with about half of many canaries, and bounds epsilon from below.

    Args:
        train_function: Callable that takes a bool array `[num_canaries]`, which canaries to
            include, makes one private training run, and returns the scores of all canaries
            under the released model: floats `[num_canaries]`, higher if included.
        num_canaries: Int >= 2. A thousand give a useful bound.
        num_guesses: Even int, on how many canaries to guess (those with extreme scores):
            few guesses are more often right, many count for more. A tenth of the
            canaries is a good start.
        delta: Float in [0, 1).
        confidence: Float in (0, 1).
        seed: Int or `None`, decides the coins.

    Returns:
        An `AuditResult`; compare its `epsilon_lower_bound` with the epsilon reported for
        the run under adding or removing one example (or replacing it by an empty one).

    Raises:
        AccountingError: If an argument is out of range or a score is not a number.

    Example:

    >>> rng = np.random.default_rng(0)
    >>> result = audit_one_run(lambda included: 3.0 * included + rng.normal(size=1000),
    ...                        num_canaries=1000, num_guesses=100, delta=1e-5, seed=0)
    >>> 2.0 < result.epsilon_lower_bound < 4.0
    True

    Source: Steinke, Nasr and Jagielski, NeurIPS 2023, Alg. 1.
    """
    check_integer("num_canaries", num_canaries, minimum=2, error=AccountingError)
    _check_levels(delta, confidence)
    included = np.random.default_rng(seed).random(num_canaries) < 0.5
    scores = np.asarray(train_function(included.copy()), dtype=np.float64)
    if scores.shape != (num_canaries,):
        raise AccountingError(
            "Argument `train_function` must return one score per canary. Received: an array of "
            f"shape {scores.shape}, for {num_canaries} canaries."
        )
    guesses = membership_guesses(scores, num_guesses)
    correct = int(np.sum(guesses == np.where(included, 1, -1)))
    bound = one_run_epsilon_lower_bound(correct, num_guesses, num_canaries, delta, confidence)
    return AuditResult(bound, delta, confidence, scores[included], scores[~included])


def _check_scores(name, scores, minimum):
    scores = np.asarray(scores, dtype=np.float64)
    if scores.ndim != 1 or len(scores) < minimum or np.isnan(scores).any():
        raise AccountingError(
            f"Argument `{name}` must be a list of at least {minimum} numbers. Received: an array "
            f"of shape {scores.shape} with {int(np.isnan(scores).sum())} NaN. A run that "
            "diverged must be given a score too (such as 0): leaving it out would depend on it."
        )
    return scores


def _check_guesses(num_correct, num_guesses, num_canaries):
    check_integer("num_canaries", num_canaries, error=AccountingError)
    check_integer("num_guesses", num_guesses, error=AccountingError)
    check_integer("num_correct", num_correct, minimum=0, error=AccountingError)
    if not num_correct <= num_guesses <= num_canaries:
        raise AccountingError(
            "The counts must satisfy num_correct <= num_guesses <= num_canaries. Received: "
            f"num_correct={num_correct}, num_guesses={num_guesses}, num_canaries={num_canaries}."
        )


def _check_levels(delta, confidence):
    delta = check_number("delta", delta, exclusive=False, error=AccountingError)
    confidence = check_number("confidence", confidence, error=AccountingError)
    if delta >= 1 or confidence >= 1:
        raise AccountingError(
            "Arguments `delta` and `confidence` must be below 1. Received: "
            f"delta={delta!r}, confidence={confidence!r}."
        )
    return delta, confidence
