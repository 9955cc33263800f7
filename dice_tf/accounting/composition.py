# Copyright 2026 The dice_tf Authors.
# SPDX-License-Identifier: Apache-2.0
"""`compose_epsilon`: what several runs on the same data cost together."""

from collections.abc import Sequence
import math

from dice_tf.accounting import events, units
from dice_tf.accounting.account import run_rounds
from dice_tf.accounting.epsilon import check_accountant
from dice_tf.accounting.loss_distribution import loss_distribution_curve
from dice_tf.accounting.renyi import renyi_curve
from dice_tf.errors import AccountingError
from dice_tf.mechanism import DiceMechanism
from dice_tf.sampling import Sampling

__all__ = ["compose_epsilon"]


def compose_epsilon(
    runs: Sequence[tuple[DiceMechanism, Sampling, int]], delta: float, accountant: str = "rdp"
) -> float:
    r"""Returns the epsilon of several runs on the same data, taken together.

    A second training with another optimizer, every trial of a search, a model that is trained
    on after its noise was changed: all that saw the data counts. Their events compose, which
    costs less than adding up epsilons and deltas. If one run draws shuffled epochs, the
    neighbours of the whole are its own: one example is replaced by an empty one.

    Args:
        runs: List of `(mechanism, sampling, steps)`, one for each run: from
            `dice_tf.accounted_run(model, sampling)`, or as planned.
        delta: Float in (0, 1/N), for every N.
        accountant: `"rdp"` or `"pld"` (tighter).

    Returns:
        Float >= 0, for `delta` in all.

    Raises:
        AccountingError: If the arguments are out of range or contradict each other, or if
            runs with microbatches are Poisson-sampled in one and shuffled in another, or two
            objects draw the same batches, from one seed or one private file.

    Example:

    >>> from dice_tf.mechanism import DiceMechanism
    >>> from dice_tf.sampling import CyclicPoissonSampling
    >>> from dice_tf.accounting import compute_epsilon
    >>> run = (DiceMechanism(l2_norm_clip=1.0, noise_multiplier=2.0, expected_batch_size=512),
    ...        CyclicPoissonSampling(num_examples=60_000, expected_batch_size=512), 1171)
    >>> [round(epsilon, 2) for epsilon in (compute_epsilon(*run, 1e-5),
    ...                                    compose_epsilon([run] * 10, 1e-5))]
    [1.51, 5.14]

    Source: as `guarantee`; Mironov, CSF 2017, Prop. 1 (composition).
    """
    return composed_curve(runs, delta, accountant)(math.log(events.check_delta(delta, 1)))


def composed_curve(runs, delta, accountant):
    """Returns epsilon of several runs as a function of log(delta).

    Args:
        runs: As for `compose_epsilon`, like all other arguments.
        delta: Float in (0, 1/N), where the curve will mainly be asked.
        accountant: `"rdp"` or `"pld"`.

    Returns:
        Function from a float below 0 to a float >= 0, which may be infinite.

    Raises:
        AccountingError: As `compose_epsilon`.
    """
    check_accountant(accountant)
    runs = [_checked(run, delta) for run in runs]
    units.check_same_units([sampling for _, sampling, _ in runs])
    _check_draws([sampling for _, sampling, steps in runs if steps])
    delta = float(delta) if runs else events.check_delta(delta, 1)
    shuffled = any(not sampling.own_coins for _, sampling, _ in runs)
    known = all(isinstance(r, events.Round) for _, s, n in runs for r in s.accounted_rounds(1.0, n))
    rounds, parts, mixed = [], [], False
    for mechanism, sampling, steps in runs:
        if shuffled and mechanism.num_microbatches is not None and events.is_amplified(sampling):
            raise AccountingError(
                "Runs with `num_microbatches` that draw Poisson samples compose with others of "
                "their kind alone: their neighbours are not those of shuffled epochs. Received: "
                f"num_microbatches={mechanism.num_microbatches} with {sampling!r}. Compose the "
                "two kinds apart, and add up epsilons and deltas."
            )
        if steps == 0:
            continue
        if mechanism.noise_multiplier == 0:
            return lambda log_delta: math.inf
        new = run_rounds(mechanism, sampling, steps, delta)
        rounds += new
        # dp_accounting composes it, but not with an event that it does not know.
        mixture = events.mixture_event(mechanism, sampling, steps) if known else None
        mixed = mixed or mixture is not None
        parts.append(mixture or events.compose(new))
    if not rounds:
        return lambda log_delta: 0.0
    curve = renyi_curve(rounds)
    if accountant == "pld":
        event = events.compose_events(parts) if mixed else None
        curve, _ = loss_distribution_curve(rounds, curve, math.log(delta), event)
    return curve


def _check_draws(samplings):
    # One object makes no draw twice.
    drawn = {id(sampling): sampling for sampling in samplings if events.is_amplified(sampling)}
    if len({sampling.entropy for sampling in drawn.values()}) < len(drawn):
        raise AccountingError(
            "Two samplers of these runs draw alike, from one seed or one private file: an example "
            "entered both runs at once, and their events do not compose. Give each run a seed of "
            f"its own or none, or one object to all runs. Received: {[*drawn.values()]!r}."
        )


def _checked(run, delta):
    if not isinstance(run, (tuple, list)) or len(run) != 3:
        raise AccountingError(
            "Argument `runs` must be a list of `(mechanism, sampling, steps)`, for example from "
            f"`dice_tf.accounted_run(model, sampling)`. Received as one of them: {run!r}."
        )
    mechanism, sampling, steps = run
    steps = events.check_run(mechanism, sampling, steps)
    events.check_delta(delta, sampling.num_examples)
    return mechanism, sampling, steps
