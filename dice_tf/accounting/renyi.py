# Copyright 2026 The dice_tf Authors.
# SPDX-License-Identifier: Apache-2.0
"""Epsilon by Renyi differential privacy, on a grid of orders that grows on demand.

The divergences are dp_accounting's, but for orders above 64, where its loop is slow.
Kept here: one vector per (probability, noise multiplier), so that asking again for
another number of steps is a multiplication; and a grid that is extended until the
best order lies inside it.
"""

import functools
from typing import Any
import warnings

import dp_accounting
from dp_accounting import rdp
import numpy as np
from scipy import special

from dice_tf.accounting.random_allocation import AllocatedRound

# Blocks of orders from low to high. For epsilon between about 0.3 and 30 the best order is in
# the block `_START`.
ORDERS = (
    tuple(1 + x / 1000 for x in (1, 2, 5)) + tuple(1 + x / 100 for x in range(1, 10)),
    tuple(1 + x / 10 for x in range(1, 10)),
    tuple(1 + x / 10 for x in range(10, 100)) + tuple(range(11, 64)),
    tuple(round(64 * 2 ** (x / 8)) for x in range(17)),
    tuple(round(256 * 2 ** (x / 4)) for x in range(1, 9)),
    tuple(round(1024 * 2 ** (x / 4)) for x in range(1, 13)),
    tuple(round(8192 * 2 ** (x / 4)) for x in range(1, 13)),
)
_START = 2


@functools.lru_cache(maxsize=8192)
def renyi_divergences(sampling_probability, noise_multiplier, block):
    """Returns the Renyi divergences of one round, at the orders of one block.

    Args:
        sampling_probability: Float in (0, 1].
        noise_multiplier: Float > 0.
        block: Index into the blocks of orders.

    Returns:
        Float64 array, read-only. Infinite where dp_accounting cannot evaluate an order.
    """
    of_order = _any_order
    if block > _START and sampling_probability < 1.0:
        of_order = _high_integer_order
    values = np.array(
        [of_order(sampling_probability, noise_multiplier, order) for order in ORDERS[block]]
    )
    values.setflags(write=False)
    return values


def _high_integer_order(sampling_probability, noise_multiplier, order):
    # Mironov, Talwar, Zhang, "Renyi differential privacy of the sampled Gaussian mechanism",
    # 2019, Sec. 3.3: a binomial sum.
    i = np.arange(order + 1.0)
    log_binomials = special.gammaln(order + 1) - special.gammaln(i + 1)
    log_binomials -= special.gammaln(order - i + 1)
    log_terms = log_binomials + i * np.log(sampling_probability)
    log_terms += (order - i) * np.log1p(-sampling_probability)
    log_terms += (i * i - i) / (2 * noise_multiplier**2)
    log_sum: Any = special.logsumexp(log_terms)
    return max(0.0, float(log_sum) / (order - 1))


def _any_order(sampling_probability, noise_multiplier, order):
    event = dp_accounting.GaussianDpEvent(noise_multiplier)
    if sampling_probability < 1.0:
        event = dp_accounting.PoissonSampledDpEvent(sampling_probability, event)
    # Series that do not converge raise or give NaN; without that order the bound still holds.
    try:
        value = float(rdp.RdpAccountant([order]).compose(event).rdp[0])
    except (ValueError, OverflowError, ZeroDivisionError):
        return np.inf
    return np.inf if np.isnan(value) else max(0.0, value)


def _of_one_round(one, block):
    if isinstance(one, AllocatedRound):
        return one.divergences(ORDERS[block])
    return renyi_divergences(one.sampling_probability, one.noise_multiplier, block)


def total_divergences(rounds, block):
    """Returns the Renyi divergences of a list of rounds together, at the orders of one block."""
    return sum(r.count * _of_one_round(r, block) for r in rounds)


def divergences_of(rounds):
    """Returns the Renyi divergences of a composition, on the whole grid.

    Args:
        rounds: List of `events.Round` and `AllocatedRound`.

    Returns:
        Two float64 arrays of one shape: the orders, ascending, and the divergences.
    """
    blocks = [total_divergences(rounds, block) for block in range(len(ORDERS))]
    return np.concatenate(ORDERS), np.concatenate(blocks)


def epsilon_per_order(orders, divergences, log_delta):
    r"""Converts Renyi divergences into epsilon, order by order.

    \[\varepsilon = r + \log\frac{\alpha - 1}{\alpha}
      - \frac{\log \delta + \log \alpha}{\alpha - 1}\]

    dp_accounting also tries a bound by the Kullback-Leibler divergence, which turns a
    rounding error near order 1 into epsilon 0; it is left out here on purpose.

    Args:
        orders: Float array, above 1.
        divergences: Float array of the same shape.
        log_delta: Float below 0, the logarithm of delta.

    Returns:
        Float array of the same shape; may be negative where delta alone suffices.

    Source: Canonne, Kamath, Steinke, "The discrete Gaussian for differential privacy",
    Prop. 12.
    """
    orders = np.asarray(orders, dtype=np.float64)
    return divergences + np.log1p(-1 / orders) - (log_delta + np.log(orders)) / (orders - 1)


def renyi_epsilon(rounds, log_delta):
    """Returns epsilon of a list of `Round`s and the order at which it was found.

    Args:
        rounds: List of `events.Round` and `AllocatedRound`.
        log_delta: Float below 0, the logarithm of delta, which itself may be too small
            for a float.

    Returns:
        A pair of floats, epsilon >= 0 and the best order.
    """
    blocks = {}

    def best_of(block):
        if block not in blocks:
            total = total_divergences(rounds, block)
            epsilons = epsilon_per_order(ORDERS[block], total, log_delta)
            index = int(np.argmin(epsilons))
            blocks[block] = float(epsilons[index]), float(ORDERS[block][index])
        return blocks[block]

    first = last = _START
    while True:
        epsilon, order = min(best_of(block) for block in range(first, last + 1))
        if order == ORDERS[last][-1] and last + 1 < len(ORDERS):
            last += 1
        elif first > 0 and (order == ORDERS[first][0] or not np.isfinite(epsilon)):
            first -= 1
        else:
            break
    return max(0.0, epsilon), order


def renyi_curve(rounds):
    """Returns epsilon of a list of `Round`s as a function of log(delta), which may warn."""

    def curve(log_delta):
        epsilon, order = renyi_epsilon(rounds, log_delta)
        warn_at_edge(epsilon, order)
        return epsilon

    return curve


def warn_at_edge(epsilon, order):
    """Warns if the best order is an end of the whole grid: epsilon may then not be tight.

    Args:
        epsilon: Float >= 0, as returned by `renyi_epsilon`.
        order: Float, as returned by `renyi_epsilon`.
    """
    if epsilon > 0 and order in (ORDERS[0][0], ORDERS[-1][-1]):
        warnings.warn(
            f"The best Renyi order, {order:g}, is an end of the grid of orders: epsilon="
            f'{epsilon:.3g} holds but may not be tight. Compare with accountant="pld".',
            stacklevel=2,
        )
