# Copyright 2026 The dice_tf Authors.
# SPDX-License-Identifier: Apache-2.0
"""Epsilon by privacy loss distributions, within bounds of time and memory."""

import functools
import math
import warnings

import dp_accounting
from dp_accounting import pld
from dp_accounting.pld import privacy_loss_distribution

from dice_tf.accounting import random_allocation

# Discretization of the privacy loss, relative to the epsilon expected: halving it changes the
# result by less than 3 in 10,000. Time and memory grow with the number of grid points of one
# round, and beyond the largest interval exp(interval) is no longer close to 1.
_RELATIVE_INTERVAL = 3e-4
_LARGEST_INTERVAL = 0.02
_MOST_POINTS = 100_000
# Standard deviations within which all but exp(-50) of a Gaussian lies, as dp_accounting cuts it.
_TAIL = 10.0


def loss_interval(noise_multiplier, epsilon):
    """Returns the discretization interval of the privacy loss, or `None` if none will do.

    Args:
        noise_multiplier: Float > 0, the smallest one of the composition.
        epsilon: Float > 0, a rough epsilon of the whole composition.

    Returns:
        Float, or `None` where the loss of one round spans so wide a range that its
        distribution would not fit in memory.
    """
    loss_range = (1 + 2 * _TAIL * noise_multiplier) / noise_multiplier**2
    smallest = loss_range / _MOST_POINTS
    if smallest > _LARGEST_INTERVAL:
        return None
    # Powers of 2: neighbouring numbers of steps share a grid, so that one distribution serves
    # them all, and epsilon does not fall, by rounding to another grid, while steps are made.
    wanted = 2.0 ** math.floor(math.log2(_RELATIVE_INTERVAL * epsilon))
    return min(max(wanted, smallest), _LARGEST_INTERVAL)


_allocation_distribution = functools.lru_cache(maxsize=8)(random_allocation.loss_distribution)


# The largest takes some MB. A run needs one for each doubling of epsilon, with a schedule for each
# noise as well.
@functools.lru_cache(maxsize=32)
def _round_distribution(noise_multiplier, sampling_probability, interval):
    return privacy_loss_distribution.from_gaussian_mechanism(
        noise_multiplier,
        value_discretization_interval=interval,
        sampling_prob=sampling_probability,
    )


def _distribution(rounds, event, interval, relation):
    """Returns epsilon of delta and delta of epsilon.

    Most of the time goes into the distribution of one round, which does not depend on the
    number of rounds, and so is kept.
    """
    if event is not None:
        accountant = pld.PLDAccountant(relation, interval).compose(event)
        return accountant.get_epsilon, accountant.get_delta
    # An example that becomes empty is one that is removed: it shifts nothing when drawn.
    parts = [_of_rounds(one, interval) for one in rounds]
    whole = functools.reduce(lambda left, right: left.compose(right), parts)
    return whole.get_epsilon_for_delta, whole.get_delta_for_epsilon


def _of_rounds(one, interval):
    """Returns the loss distribution of the `count` rounds that a `Round` is."""
    if isinstance(one, random_allocation.AllocatedRound):
        epoch = _allocation_distribution(one.cycles, one.noise_multiplier, interval)
        return epoch.self_compose(one.count)
    if one.sampling_probability < 1.0:
        turn = _round_distribution(one.noise_multiplier, one.sampling_probability, interval)
        return turn.self_compose(one.count)
    # Exact: n of them are one of a root of n times the shift.
    return _round_distribution(one.noise_multiplier / one.count**0.5, 1.0, interval)


def loss_distribution_curve(rounds, renyi_curve, log_delta, event=None, relation=None):
    """Returns epsilon as a function of log(delta), by privacy loss distributions.

    Falls back on the Renyi accountant, with a warning, where the distribution would be
    too large, fails, or resolves no epsilon.

    Args:
        rounds: List of `Round`s, which an example that is added, removed or becomes empty enters.
        renyi_curve: Function from log(delta) to a valid epsilon.
        log_delta: Float, where the curve will mainly be asked.
        event: `dp_accounting.DpEvent` that says more of the run than its rounds, or `None`.
        relation: `dp_accounting.NeighboringRelation` that `event` supports; `None` for
            "add or remove one".

    Returns:
        Function from a float log(delta) to a float epsilon >= 0, and one from increasing
        epsilons to deltas, or `None` in its place after falling back.
    """
    relation = relation or dp_accounting.NeighboringRelation.ADD_OR_REMOVE_ONE
    rough = renyi_curve(log_delta)
    if rough == 0:
        return renyi_curve, None
    smallest = min(r.noise_multiplier for r in rounds)
    interval = loss_interval(smallest, rough) if math.isfinite(rough) else None
    if interval is None:
        _warn(f"the privacy loss (epsilon about {rough:.3g}) spans too wide a range")
        return renyi_curve, None
    try:
        epsilon_at, delta_at = _distribution(rounds, event, interval, relation)
    except (MemoryError, OverflowError, ValueError) as error:
        _warn(f"the privacy loss distribution failed ({error})")
        return renyi_curve, None

    def curve(log_delta):
        epsilon = epsilon_at(math.exp(log_delta))
        if not math.isfinite(epsilon):
            _warn(f"the distribution does not resolve delta=exp({log_delta:.4g})")
            return renyi_curve(log_delta)
        return max(0.0, float(epsilon))

    return curve, delta_at


def supports(event, relation):
    """Whether the installed dp_accounting knows the loss of `event` under a relation."""
    return pld.PLDAccountant(relation).supports(event)


def _warn(reason):
    warnings.warn(
        f'accountant="pld": {reason}. The epsilon reported is that of accountant="rdp", which '
        "holds but is larger.",
        stacklevel=2,
    )
