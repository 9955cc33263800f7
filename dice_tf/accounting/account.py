# Copyright 2026 The dice_tf Authors.
# SPDX-License-Identifier: Apache-2.0
"""What is known of the privacy of a run between neighbours: rounds, and a curve of epsilon."""

from collections.abc import Callable
import functools
import math
from typing import NamedTuple

import dp_accounting

from dice_tf.accounting import events
from dice_tf.accounting.loss_distribution import loss_distribution_curve, supports
from dice_tf.accounting.renyi import renyi_curve, renyi_epsilon


class Account(NamedTuple):
    """What is known of the privacy of a run, between neighbours.

    Attributes:
        rounds: List of `Round`s: Renyi divergences of one move (a removal or an addition).
        curve: Function from log(delta) to epsilon.
        delta_at: Function from increasing epsilons to deltas by the loss distribution, or `None`.
        moves: Int, moves from one neighbour to the other.
        moves_of_distribution: Int, how many of them `curve` and `delta_at` know at once.
    """

    rounds: list
    curve: Callable[[float], float]
    delta_at: Callable | None
    moves: int
    moves_of_distribution: int

    def epsilon(self, delta):
        """Returns the epsilon of one example."""
        if self.moves > self.moves_of_distribution:
            return _two_moves(self.curve, math.log(delta))
        return self.curve(math.log(delta))


def account_of(mechanism, sampling, steps, delta, accountant, relation):
    """Returns the `Account` of a run that has steps and noise.

    Args:
        mechanism: As for `guarantee`, checked, like all other arguments.
        sampling: How batches are drawn.
        steps: Int > 0.
        delta: Float, near which it will be asked.
        accountant: `"rdp"` or `"pld"`.
        relation: Key of `NEIGHBOURING_RELATIONS`.
    """
    two_moves = relation == events.REPLACE_ONE and events.is_amplified(sampling)
    if relation == events.REPLACE_BY_EMPTY and mechanism.num_microbatches is not None:
        # An empty example that is drawn takes a place, so it is not the same as an absent one.
        two_moves = events.is_amplified(sampling)
    rounds = run_rounds(mechanism, sampling, steps, delta, relation)
    curve = renyi_curve(rounds)
    if accountant == "rdp":
        return Account(rounds, curve, None, 1 + two_moves, 1)
    # dp_accounting takes other rounds for what they are, and an exchange moves those twice.
    sampled = all(r.sampling_probability < 1 for r in rounds) and not events.is_unbounded(mechanism)
    # Its pair is proven for shifts that are known when a window begins, not for thresholds that
    # move within it.
    known_shifts = mechanism.num_microbatches is None and not mechanism.moves
    event, special = events.compose(rounds), dp_accounting.NeighboringRelation.REPLACE_ONE
    exchange = two_moves and sampled and known_shifts and supports(event, special)
    if exchange:
        # What it falls back on must be about the same relation.
        curve = functools.partial(_two_moves, curve)
    else:
        event = events.mixture_event(mechanism, sampling, steps)
        special = dp_accounting.NeighboringRelation.REPLACE_SPECIAL
        emptied = relation == events.REPLACE_BY_EMPTY and not two_moves
        if event is None or not emptied or not supports(event, special):
            special = None
    known, delta_at = loss_distribution_curve(rounds, curve, math.log(delta), event, special)
    return Account(rounds, known, delta_at, 1 + two_moves, 1 + exchange)


def _two_moves(curve, log_delta):
    candidates = []
    for share in (0.5, 0.9, 0.99):
        first = curve(math.log(share) + log_delta)
        second = math.inf
        if math.isfinite(first):
            second = curve(math.log(1 - share) + log_delta - first)
        candidates.append(first + second)
    return min(candidates)


def run_rounds(mechanism, sampling, steps, delta, relation=None):
    """Returns the list of `Round`s of a run; `delta` decides how to split the unbounded form."""
    rounds = _rounds_of(mechanism, sampling, steps, delta, relation)
    events.check_rounds(rounds, sampling)
    return rounds


def _rounds_of(mechanism, sampling, steps, delta, relation):
    if not events.is_unbounded(mechanism):
        return events.bounded_rounds(mechanism, sampling, steps, relation)
    if not events.is_amplified(sampling):
        return events.unbounded_rounds(mechanism, sampling, steps, relation)

    @functools.cache
    def cost(log_odds):
        share = 0.5 + 0.5 * math.tanh(log_odds / 2)
        rounds = events.unbounded_rounds(mechanism, sampling, steps, relation, share)
        return renyi_epsilon(rounds, math.log(delta))[0], rounds

    # Shares on a fixed lattice of log-odds, so that the divergences computed for one number of
    # steps serve all others. Every share is valid; the walk only looks for a good one.
    turns = sampling.rounds(steps)
    error = math.sqrt(steps) * mechanism.error_norm_clip
    gradients = math.sqrt(turns) * mechanism.noise_stddev / mechanism.noise_multiplier
    best = round(math.log(error / (gradients * sampling.sampling_probability)))
    for step in (1.0, 0.25):
        while True:
            lower = min((best - step, best, best + step), key=lambda x: cost(x)[0])
            if lower == best:
                break
            best = lower
    return cost(best)[1]
