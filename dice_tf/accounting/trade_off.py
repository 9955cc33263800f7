# Copyright 2026 The dice_tf Authors.
# SPDX-License-Identifier: Apache-2.0
r"""How often an attacker is right, given how often it is wrong; and what groups of examples cost.

A test accuses if the models that it sees lie in a set S. Where D and D' are neighbours, let
\(g(x)\) be at least \(\Pr[M(D') \in S]\) for every S with \(\Pr[M(D) \in S] \le x\): the largest
true-positive rate at a false-positive rate x. Two bounds hold for every x, and so does the
smaller of them:

\[g(x) \le \min_{\varepsilon \in R} e^\varepsilon x + \delta(\varepsilon), \qquad
  g(x) \le \min_{\alpha > 1} (e^{D_\alpha} x)^{1 - 1/\alpha}.\]

The first is the definition of differential privacy, with
\(\delta(-\varepsilon) = 1 - e^{-\varepsilon}(1 - \delta(\varepsilon))\), which is the same
statement about the complement of S with D and D' exchanged. The second is Hoelder's inequality
for the Renyi divergence \(D_\alpha\).

**Groups.** Let \(D_0, ..., D_k\) be data sets, each a neighbour of the next. A test of \(D_0\)
against \(D_k\) is one of every \(D_i\), so its rates satisfy \(x_{i+1} \le g(x_i)\), and as g
grows with x,

\[x_k \le g(g(...g(x_0))) = g^{(k)}(x_0).\]

Nothing else is used: not how the run draws, not in which groups of a cyclic sampler the k
examples are, not whether their residuals meet in one release. For Gaussian mechanisms it is
exact: the k-th iterate of \(\Phi(\Phi^{-1}(x) + \mu)\) is \(\Phi(\Phi^{-1}(x) + k\mu)\). It is
never worse than the usual \((k\varepsilon, \sum_{i<k} e^{i\varepsilon}\delta)\), which comes of
one and the same line \(e^\varepsilon x + \delta\) for each of the k steps.

Source: Dong, Roth, Su, "Gaussian differential privacy", 2022, Thm 2.14 (groups); Mironov,
"Renyi differential privacy", CSF 2017, Prop. 10 (the second bound).
"""

import math

import numpy as np
from scipy import optimize

from dice_tf.accounting.renyi import ORDERS, renyi_epsilon, total_divergences

# Convolutions in float64 do not resolve smaller deltas; the Renyi bound goes on from there.
_SMALLEST_DELTA = 1e-14
_GRID = 2001
# dp_accounting takes the exponential of epsilon, which overflows beyond 709.
_LARGEST_EPSILON = 700.0
# Beyond exp(-_FARTHEST) no false-positive rate is looked at.
_FARTHEST = 1e7


def log_power(account, log_delta, hops):
    r"""Returns \(\log g^{(k)}\) as a function of \(\log x\).

    Args:
        account: `account.Account` of the run, between neighbours.
        log_delta: Float below 0, near which the result will be wanted.
        hops: Int >= 1, k.

    Returns:
        Function from an array of floats <= 0 to one of the same shape.
    """
    lines = _lines(account.rounds, account.delta_at)
    exponents, log_factors = _powers(account.rounds, log_delta, hops * account.moves)

    def renyi(log_x):
        return np.minimum(0.0, (exponents * (log_factors + log_x[:, None])).min(axis=1))

    def hop(log_x):
        if account.moves_of_distribution == 2:
            # The loss distribution knows the exchange as a whole.
            return np.minimum(renyi(renyi(log_x)), lines(log_x))
        for _ in range(account.moves):
            log_x = np.minimum(renyi(log_x), lines(log_x))
        return log_x

    def power(log_x):
        log_x = np.asarray(log_x, dtype=np.float64)
        result = log_x.ravel()
        for _ in range(hops):
            result = hop(result)
        return result.reshape(log_x.shape)

    return power


def _lines(rounds, delta_at):
    """Returns the first bound, as a function of log x."""
    if delta_at is None:
        return np.zeros_like
    most, _ = renyi_epsilon(rounds, math.log(_SMALLEST_DELTA))
    epsilons = np.linspace(0.0, min(most, _LARGEST_EPSILON), _GRID)
    deltas = np.clip(np.asarray(delta_at(epsilons), dtype=np.float64), _SMALLEST_DELTA, 1.0)
    # 1 - exp(-e) (1 - delta), without losing digits where e is small.
    reverse = -np.expm1(-epsilons[:0:-1]) + np.exp(-epsilons[:0:-1]) * deltas[:0:-1]
    slopes = np.concatenate([-epsilons[:0:-1], epsilons])
    offsets = np.concatenate([reverse, deltas])
    # Where each line crosses the next, steeper one. Every line is a bound, so a crossing that
    # rounding has moved costs tightness and nothing else.
    with np.errstate(divide="ignore"):
        crossings = np.log(np.maximum(-np.diff(offsets), 0.0)) - slopes[1:]
    crossings = np.minimum.accumulate(crossings - np.log(-np.expm1(-np.diff(slopes))))
    log_offsets = np.log(offsets)

    def lines(log_x):
        index = np.searchsorted(-crossings, -log_x)
        return np.logaddexp(log_offsets[index], slopes[index] + log_x)

    return lines


def _powers(rounds, log_delta, hops):
    """Returns 1 - 1/alpha and the divergence for orders around those that matter."""
    _, best = renyi_epsilon(rounds, log_delta)
    blocks = range(len(ORDERS))
    # The k steps of a group go through orders from the best one to about k more. Any other
    # choice holds, too: it is only less tight.
    first = max([b for b in blocks if ORDERS[b][0] <= best] or [0])
    last = min([b for b in blocks if ORDERS[b][-1] >= best + hops] or [blocks[-1]])
    used = range(max(0, first - 1), max(first, last) + 1)
    orders = np.concatenate([ORDERS[block] for block in used])
    divergences = np.concatenate([total_divergences(rounds, block) for block in used])
    finite = np.isfinite(divergences)
    if not finite.any():
        return np.array([0.0]), np.array([0.0])
    return 1 - 1 / orders[finite], divergences[finite]


def epsilon_of(power, log_delta):
    r"""Returns the epsilon of a pair of data sets whose tests obey a bound.

    \[\varepsilon(\delta) = \max\Bigl(0, \sup_x \log\frac{G(x) - \delta}{x}\Bigr),\]

    because \(G(x) \le e^\varepsilon x + \delta\) has to hold for every x. G is concave, as a
    minimum and an iterate of growing concave functions, so the ratio rises and then falls.

    Args:
        power: Function from log x to \(\log G(x)\), as `log_power` returns it.
        log_delta: Float below 0.

    Returns:
        Float >= 0, infinite if G does not fall to delta.

    Example:

    >>> from scipy.special import log_ndtr, ndtri_exp
    >>> gaussian = lambda log_x: log_ndtr(ndtri_exp(log_x) + 1.0)
    >>> round(epsilon_of(gaussian, math.log(1e-5)), 3)  # dp_accounting says the same.
    4.377
    """
    lowest = log_delta
    while power(np.array([lowest]))[0] > log_delta:
        lowest *= 2
        if lowest < -_FARTHEST:
            return math.inf

    def negative(log_x):
        gain = power(np.atleast_1d(log_x))
        with np.errstate(divide="ignore", invalid="ignore"):
            excess = gain + np.log(-np.expm1(np.minimum(log_delta - gain, 0.0)))
        # Where G(x) <= delta nothing follows; an infinity would upset the search.
        return np.where(np.isfinite(excess), np.atleast_1d(log_x) - excess, _FARTHEST)

    grid = np.linspace(lowest, 0.0, 301)
    values = negative(grid)
    best = int(np.argmin(values))
    ends = grid[max(0, best - 1)], grid[min(best + 1, len(grid) - 1)]
    found = optimize.minimize_scalar(
        lambda log_x: float(negative(log_x)[0]),
        bounds=ends,
        method="bounded",
        options={"xatol": 1e-7},
    )
    # The search stops this close to the top; the ratio falls no faster than 1/x to its right.
    return max(0.0, 1e-6 - min(float(found.fun), float(values[best])))
