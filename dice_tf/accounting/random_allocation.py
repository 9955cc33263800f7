# Copyright 2026 The dice_tf Authors.
# SPDX-License-Identifier: Apache-2.0
r"""What an epoch costs in which each example takes part once, at a cycle that it draws itself.

An epoch has \(n\) cycles; an example draws one of them uniformly, and its entry moves the
releases of that cycle by at most \(S\) against noise of standard deviation \(\sigma\). The
epoch is no more distinguishable than the pair

\[P = \tfrac1n \sum_c N(S e_c, \sigma^2 I_n), \qquad Q = N(0, \sigma^2 I_n).\]

Proof. Without the example the noise of cycle c is \(N(0, \sigma^2 I)\) whatever came before; with
it in cycle c it is shifted by \(\Delta_c\), which earlier releases determine, of norm at most S.
So the likelihood ratio of the epoch is \(L = \frac1n\sum_c X_c\), where \(X_c\) given the past is
lognormal with mean 1 and log-variance \(|\Delta_c|^2/\sigma^2\): smaller in convex order than
\(X\) with log-variance \(v = S^2/\sigma^2\). Replace the \(X_c\) by independent copies of X from
the last to the first: the expectation of every convex function of L grows, and \((L-\gamma)^+\) and
\((1-\gamma L)^+\), the hockey-stick divergences of both directions, are convex in L.

Under Q, \(X = e^{\sqrt v Z - v/2}\) with Z standard normal. `renyi_divergence` and
`loss_distribution` are of the pair (P, Q).
"""

import dataclasses
import functools
import math
from typing import Any, NamedTuple

import dp_accounting
from dp_accounting.pld import pld_pmf, privacy_loss_distribution
import numpy as np
from scipy import fft, special, stats

# What the grid of `loss_distribution` cuts off of X, as a probability; it is added to delta.
_TAIL = 1e-10
# Spacing of the grid against the standard deviation of X: less changes epsilon by < 2 in 1,000,
# and so do more points.
_SPACING = 0.05
_MOST_POINTS = 2**18
# Integer orders above are left out: their moments take long, and only tiny epsilons need them.
_LARGEST_ORDER = 256
# Standard deviations of z that `_laplace_transform` covers.
_RANGE = 40.0


@dataclasses.dataclass(frozen=True)
class RandomAllocationDpEvent(dp_accounting.DpEvent):
    """One epoch of random allocation; dp_accounting has no event of this kind.

    Attributes:
        cycles: Int >= 1, n.
        noise_multiplier: Float > 0, sigma / S.
    """

    cycles: int
    noise_multiplier: float


class AllocatedRound(NamedTuple):
    """`count` epochs of random allocation, as `events.Round` is for subsampled rounds.

    Attributes:
        cycles: Int >= 1, n.
        noise_multiplier: Float > 0, sigma / S.
        count: Int > 0, number of epochs begun.
    """

    cycles: int
    noise_multiplier: float
    count: int

    @property
    def sampling_probability(self):
        """Float, with which an example takes part in a cycle."""
        return 1.0 / self.cycles

    @property
    def event(self):
        """The same as a `dp_accounting.DpEvent`, which `loss_distribution` knows."""
        event = RandomAllocationDpEvent(self.cycles, self.noise_multiplier)
        return dp_accounting.SelfComposedDpEvent(event, self.count)

    def divergences(self, orders):
        """Returns the Renyi divergences of one epoch at a tuple of orders."""
        return _divergences(self.cycles, self.noise_multiplier, orders)


@functools.lru_cache(maxsize=1024)
def _divergences(cycles, noise_multiplier, orders):
    values = np.array([renyi_divergence(cycles, noise_multiplier, order) for order in orders])
    values.setflags(write=False)
    return values


def renyi_divergence(cycles, noise_multiplier, order):
    r"""Returns the larger Renyi divergence of P and Q, over both directions.

    \[D_\alpha(P \| Q) = \tfrac{1}{\alpha - 1}\log E_Q[L^\alpha], \qquad
      D_\alpha(Q \| P) = \tfrac{1}{\alpha - 1}\log E_Q[L^{1 - \alpha}].\]

    Args:
        cycles: Int >= 1, n.
        noise_multiplier: Float > 0, sigma / S.
        order: Float > 1. Between whole numbers \(\log E[L^\alpha]\), which is convex in
            \(\alpha\), is bounded by the chord.

    Returns:
        Float >= 0, of one epoch; infinite for orders above 256.

    Example:

    >>> round(renyi_divergence(1, 2.0, 8), 6) == round(8 / (2 * 2.0**2), 6)  # Gaussian.
    True
    >>> 0 < renyi_divergence(100, 2.0, 8) < 0.02
    True

    Source: `docs/privacy.md`, section 2 (our own proof).
    """
    if order > _LARGEST_ORDER:
        return math.inf
    low = math.floor(order)
    share = order - low
    moments = _log_moments(cycles, noise_multiplier, 1 << max(1, low.bit_length()))
    forward = (1 - share) * moments[low] + share * moments[low + 1]
    reverse = _log_negative_moment(cycles, noise_multiplier, order - 1)
    return max(forward, reverse, 0.0) / (order - 1)


@functools.lru_cache(maxsize=1024)
def _log_moments(cycles, noise_multiplier, most):
    r"""Returns the logarithms of \(E_Q[L^k]\) for k = 0 to `most`.

    \[E[(X_1 + ... + X_n)^k] = k!\,[y^k] \Bigl(\sum_j e^{j(j-1)v/2} \frac{y^j}{j!}\Bigr)^n.\]
    """
    k = np.arange(most + 1.0)
    log_factorials = special.gammaln(k + 1)
    series = k * (k - 1) / (2 * noise_multiplier**2) - log_factorials
    power = _power(series, cycles, _log_product)
    return power + log_factorials - k * math.log(cycles)


def _power(value, exponent, product) -> Any:
    """Returns `value` to a whole power, by squaring."""
    result = None
    while exponent:
        if exponent & 1:
            result = value if result is None else product(result, value)
        exponent >>= 1
        if exponent:
            value = product(value, value)
    return result


def _log_product(left, right):
    """Returns the logarithms of the coefficients of a product of power series."""
    return np.array([special.logsumexp(left[: k + 1] + right[k::-1]) for k in range(len(left))])


@functools.lru_cache(maxsize=65536)
def _log_negative_moment(cycles, noise_multiplier, exponent):
    r"""Returns the logarithm of \(E_Q[L^{-k}]\).

    \[E[(\textstyle\sum_c X_c)^{-k}] = \frac{1}{\Gamma(k)} \int_0^\infty t^{k-1} E[e^{-tX}]^n dt.\]

    Both integrals are of smooth functions that decay fast at both ends, in log t and in z, so
    that sums over evenly spaced points are exact to rounding. Where k is too large for their
    range: the arithmetic mean L is at least the geometric one, so that
    \(E[L^{-k}] \le e^{kv/2 + k^2 v/(2n)}\).
    """
    if exponent > 0.75 * _RANGE * noise_multiplier:
        variance = 1 / noise_multiplier**2
        return exponent * variance / 2 + exponent**2 * variance / (2 * cycles)
    log_t, log_laplace = _laplace_transform(noise_multiplier)
    spacing = log_t[1] - log_t[0]
    log_terms = exponent * log_t + cycles * log_laplace
    log_sum: Any = special.logsumexp(log_terms)
    log_integral = log_sum + math.log(spacing)
    return float(exponent * math.log(cycles) + log_integral - special.gammaln(exponent))


@functools.lru_cache(maxsize=64)
def _laplace_transform(noise_multiplier):
    """Returns evenly spaced log t and the logarithms of E[exp(-t X)] there."""
    scale = 1 / noise_multiplier
    z = np.linspace(-_RANGE, _RANGE, 1001)
    log_total: Any = special.logsumexp(-z * z / 2)
    log_weights = -z * z / 2 - log_total
    x = np.exp(scale * z - scale**2 / 2)
    log_t = np.linspace(-80, 20 + scale * (_RANGE + scale), 2001)
    with np.errstate(over="ignore"):
        rows = [special.logsumexp(log_weights - np.exp(u) * x) for u in log_t]
    return log_t, np.array(rows)


def loss_distribution(cycles, noise_multiplier, interval):
    r"""Returns the privacy loss distribution of the pair, which bounds it in both directions.

    The law of X goes on an evenly spaced grid, the mass of a cell to both its ends such that
    its mean is kept. That makes X larger in convex order, so the result is an upper bound. The
    n-fold convolution is the law of n L; what it cuts off counts as infinite loss.

    Args:
        cycles: Int >= 1, n.
        noise_multiplier: Float > 0, sigma / S.
        interval: Float > 0, discretization of the loss, rounded up.

    Returns:
        `dp_accounting.pld.PrivacyLossDistribution` of one epoch, both directions.

    Example:

    >>> gaussian = loss_distribution(1, 2.0, 1e-3)
    >>> amplified = loss_distribution(100, 2.0, 1e-3)
    >>> gaussian.get_epsilon_for_delta(1e-5) > 10 * amplified.get_epsilon_for_delta(1e-5)
    True

    Source: `docs/privacy.md`, section 2 (our own proof).
    """
    if cycles == 1:
        return privacy_loss_distribution.from_gaussian_mechanism(
            noise_multiplier, value_discretization_interval=interval
        )
    ratio, mass, lost_ratio = _law_of_ratio(cycles, noise_multiplier, large=True)
    some = ratio > 0
    remove = _pmf(np.log(ratio[some]), mass[some] * ratio[some], lost_ratio, interval)
    ratio, mass, _ = _law_of_ratio(cycles, noise_multiplier, large=False)
    some = ratio > 0
    add = _pmf(-np.log(ratio[some]), mass[some], mass[~some].sum(), interval)
    return privacy_loss_distribution.PrivacyLossDistribution(remove, add)


def _law_of_ratio(cycles, noise_multiplier, large):
    """Returns values of L, their mass under Q, and an upper bound of E[L] where it was cut off.

    For \\((L-\\gamma)^+\\) large values matter; what is cut off of them counts in full. For
    \\((1-\\gamma L)^+\\), which falls with L, small ones do: larger ones may be lowered to the end
    of the grid, and nothing is cut off.
    """
    scale = 1 / noise_multiplier
    deviation = math.sqrt(math.expm1(scale**2))
    largest = math.exp(scale**2 / 2 - stats.norm.ppf(_TAIL) * scale)
    if large:
        spacing = max(_SPACING * deviation, largest / _MOST_POINTS)
    else:
        # All X of an epoch are in the lowest cell with a probability of _TAIL at most.
        lowest = math.exp(scale * stats.norm.ppf(_TAIL ** (1 / cycles)) - scale**2 / 2)
        spacing = min(lowest, _SPACING * deviation)
    count = min(math.ceil(largest / spacing), _MOST_POINTS)
    edges = spacing * np.arange(count + 1.0)
    with np.errstate(divide="ignore"):
        z = np.log(edges) / scale + scale / 2
    mass, mean = np.diff(special.ndtr(z)), np.diff(special.ndtr(z - scale))
    upper = np.clip(mean / spacing - np.arange(count) * mass, 0.0, mass)
    grid = np.zeros(count + 1)
    grid[:-1] += mass - upper
    grid[1:] += upper
    # Enough for the sum: its own mean and deviation, and one very large term.
    points = math.ceil((largest + cycles + 10 * math.sqrt(cycles) * deviation) / spacing)
    points = max(count + 1, min(points, 2 * _MOST_POINTS))
    one = _Law(grid, special.ndtr(-z[-1]), special.ndtr(scale - z[-1]), 1)
    if not large:
        grid[-1] += one.lost_mass
        one = _Law(grid, 0.0, 0.0, 1)
    add = functools.partial(_sum_of, spacing=spacing, points=points, cut_off=large)
    total = _power(one, cycles, add)
    ratio = spacing / cycles * np.arange(len(total.mass))
    return ratio, total.mass, min(1.0, total.lost_sum / cycles)


class _Law(NamedTuple):
    """The law of a sum of `terms` copies of X under Q, on the grid.

    Attributes:
        mass: Probability at each multiple of the spacing.
        lost_mass: Upper bound of the probability of what was cut off.
        lost_sum: Upper bound of the expectation of the sum there.
        terms: Number of terms, which is also the expectation of the sum.
    """

    mass: np.ndarray
    lost_mass: float
    lost_sum: float
    terms: int


def _sum_of(left, right, spacing, points, cut_off):
    size = len(left.mass) + len(right.mass) - 1
    length = fft.next_fast_len(size, real=True)
    product = np.asarray(fft.rfft(left.mass, length)) * np.asarray(fft.rfft(right.mass, length))
    # Rounding leaves small negative numbers: up, never down.
    mass = np.maximum(np.asarray(fft.irfft(product, length))[:size], 0.0)
    mass, cut = mass[:points], mass[points:]
    terms = left.terms + right.terms
    if not cut_off:
        mass[-1] += cut.sum()
        return _Law(mass, 0.0, 0.0, terms)
    lost_sum = spacing * float(np.dot(np.arange(points, points + len(cut)), cut))
    for one, other in ((left, right), (right, left)):
        lost_sum += one.lost_sum + one.lost_mass * other.terms
    return _Law(mass, float(cut.sum()) + left.lost_mass + right.lost_mass, lost_sum, terms)


def _pmf(losses, mass, infinity_mass, interval):
    """Returns losses, rounded up to the grid of `interval`, as dp_accounting composes them."""
    indices = np.ceil(losses / interval).astype(np.int64)
    lowest = indices.min()
    probabilities = np.bincount(indices - lowest, weights=mass)
    return pld_pmf.DensePLDPmf(interval, int(lowest), probabilities, float(infinity_mass), True)
