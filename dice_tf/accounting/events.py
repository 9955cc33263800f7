# Copyright 2026 The dice_tf Authors.
# SPDX-License-Identifier: Apache-2.0
r"""What a training run costs, as a composition of subsampled Gaussian rounds.

Notation: \(C_1\) = `l2_norm_clip`, \(C_2\) = `error_norm_clip`, \(\sigma\) = noise
standard deviation on the sum, \(B\) = `expected_batch_size`, \(N\) = `num_examples`,
\(p = B/N\), \(m\) = `num_groups`, \(s\) = `feedback_steps`, \(T\) = steps.

| form | sampling | rounds | probability | noise multiplier |
|---|---|---|---|---|
| bounded, \(m > s\) | cyclic Poisson | ceil(T/m) | m p | sigma / hypot(C1, C2 / sqrt(s)) |
| bounded, \(m \le s\) | cyclic Poisson | ceil(T/m) | m p | sigma / (C1 + C2) |
| bounded | Poisson | T | p | sigma / (C1 + C2) |
| bounded | shuffled epochs | epochs | 1 | sigma / (C1 + C2) |
| bounded, \(m > s\) | random allocation | epochs | see `random_allocation` | as cyclic |
| unbounded | any | see `unbounded_rounds` | | |

Adaptive thresholds add the noisy count to the sensitivity, and a schedule of noise makes rounds
of several noise multipliers (`DiceMechanism.sensitivity`, `scheduled`); their proof is in
`docs/privacy.md`.

Proof of the bounded rows. Fix every draw of all other examples: divergences are
quasi-convex, so the worst of those draws bounds their mixture. What is left is a
function of past releases, the noise and the one example's own coins. Entering at
step t moves release t by h, of norm at most C1, and each of the next s releases by
r/s, where r has norm at most C2. (a) If two entries are always more than s steps
apart, the s+1 releases that one entry touches form one Gaussian release of
sensitivity hypot(C1, C2/sqrt(s)) with one coin; rounds compose adaptively. (b) If
not, split the noise of every release into s+1 independent parts with variances in
the proportion C1 : C2/s : ... : C2/s, and give each part of an entry its own. The
releases are a function of these finer ones, and one entry then costs a Gaussian of
squared ratio C1 (C1+C2) / sigma^2 + s (C2/s) (C1+C2) / sigma^2 = ((C1+C2)/sigma)^2.
"""

from collections.abc import Sequence
import math
from typing import Any, NamedTuple

import dp_accounting
from dp_accounting import dp_event

from dice_tf.accounting import scheduled, units
from dice_tf.accounting.random_allocation import AllocatedRound
from dice_tf.checks.arguments import check_integer, check_number
from dice_tf.errors import AccountingError
from dice_tf.mechanism import DiceMechanism

__all__ = ["NEIGHBOURING_RELATIONS", "Round"]

ADD_OR_REMOVE_ONE = "add_or_remove_one"
REPLACE_ONE = "replace_one"
REPLACE_BY_EMPTY = "replace_by_empty"

NEIGHBOURING_RELATIONS = {
    ADD_OR_REMOVE_ONE: "one example is added or removed",
    REPLACE_ONE: "one example is replaced by any other example",
    REPLACE_BY_EMPTY: (
        "one example is replaced by an empty one, whose gradient is zero, "
        "all other examples keeping their places"
    ),
}

_OF_GROUPS = {
    ADD_OR_REMOVE_ONE: "up to {k} examples are added or removed",
    REPLACE_ONE: "up to {k} examples are replaced by any other examples",
    REPLACE_BY_EMPTY: (
        "up to {k} examples are replaced by empty ones, whose gradient is zero, "
        "all other examples keeping their places"
    ),
}


class Round(NamedTuple):
    """`count` adaptive rounds of one Poisson-subsampled Gaussian mechanism.

    Attributes:
        sampling_probability: Float in (0, 1]; 1 means no amplification.
        noise_multiplier: Float > 0, noise standard deviation over sensitivity.
        count: Int > 0.
    """

    sampling_probability: float
    noise_multiplier: float
    count: int

    @property
    def event(self):
        """The same as a `dp_accounting.DpEvent`."""
        event = dp_accounting.GaussianDpEvent(self.noise_multiplier)
        if self.sampling_probability < 1.0:
            event = dp_accounting.PoissonSampledDpEvent(self.sampling_probability, event)
        return dp_accounting.SelfComposedDpEvent(event, self.count)


# What a sampling asks for a run: rounds that compose adaptively.
Rounds = Sequence[Round | AllocatedRound]


def check_sampling(sampling: Any) -> None:
    """Refuses a sampling whose privacy cost is not known.

    Args:
        sampling: `PoissonSampling`, `CyclicPoissonSampling`, `RandomAllocation`,
            `ShuffledEpochs`, or another sampler whose class defines `accounted_rounds`.

    Raises:
        AccountingError: For any other type: how it draws decides what it costs.
    """
    # In the class itself: a subclass may draw in another way, which costs something else.
    if "accounted_rounds" not in vars(type(sampling)):
        raise AccountingError(
            "Argument `sampling` must be a `PoissonSampling`, `CyclicPoissonSampling`, "
            "`RandomAllocation`, `ShuffledEpochs` or your own that defines `accounted_rounds`, not "
            "of a class derived from them, whose draws may cost more. Received: "
            f"sampling={sampling!r} (of type {type(sampling).__name__}). Use `ShuffledEpochs` for "
            "data in any order in which each example comes once per epoch."
        )


def check_run(mechanism, sampling, steps):
    """Refuses parameters that contradict each other.

    Args:
        mechanism: The run's `DiceMechanism`.
        sampling: The run's sampling.
        steps: Number of optimizer steps (not epochs, not examples).

    Returns:
        `steps` as an int.

    Raises:
        AccountingError: If a type is wrong, `steps` is not a whole number that is at
            least 0, or is the counter of an optimizer, or the mechanism divides by another
            batch size than is drawn.
    """
    if not isinstance(mechanism, DiceMechanism):
        raise AccountingError(
            "Argument `mechanism` must be a `DiceMechanism`, for example `optimizer.mechanism`. "
            f"Received: mechanism={mechanism!r} (of type {type(mechanism).__name__})."
        )
    check_sampling(sampling)
    if mechanism.expected_batch_size != sampling.expected_batch_size:
        raise AccountingError(
            "The mechanism and the sampling must have the same `expected_batch_size`: one divides "
            "by it, the other draws it. Received: "
            f"mechanism.expected_batch_size={mechanism.expected_batch_size}, "
            f"sampling.expected_batch_size={sampling.expected_batch_size}."
        )
    units.check_units(mechanism, sampling)
    if hasattr(steps, "assign"):
        raise AccountingError(
            "Argument `steps` is a variable, the step counter of an optimizer: it does not know of "
            "passes over the data that were cut short, which count in full. Received: "
            f"steps={steps!r}. For a run that was made, ask "
            "`dice_tf.run_epsilon(model, sampling, delta)`; for a plan, give an int."
        )
    sampling.check_mechanism(mechanism)
    scheduled.check_schedule(mechanism, sampling)
    return check_integer("steps", steps, minimum=0, error=AccountingError)


def check_delta(delta: Any, num_examples: int) -> float:
    """Refuses a delta that permits publishing somebody's record outright.

    Args:
        delta: Float in (0, 1/N).
        num_examples: N.

    Returns:
        `delta` as a float.

    Raises:
        AccountingError: If `delta` is out of range.
    """
    delta = check_number("delta", delta, error=AccountingError)
    if delta * num_examples >= 1:
        raise AccountingError(
            f"Argument `delta` must be below 1/N = 1/{num_examples}: with a larger one, releasing "
            f"a random record in full counts as private. Received: delta={delta!r}."
        )
    return delta


def check_rounds(rounds: Any, sampling: Any) -> None:
    """Refuses rounds whose privacy loss is not known.

    Args:
        rounds: What `sampling.accounted_rounds` returned.
        sampling: The sampler.

    Raises:
        AccountingError: If one is neither a `Round` nor an `AllocatedRound`; a derived class may
            mean something else.
    """
    for one in rounds:
        if type(one) not in (Round, AllocatedRound):
            raise AccountingError(
                f"`{type(sampling).__name__}.accounted_rounds` must return "
                "`dice_tf.accounting.Round`s, whose privacy loss is known. Received: "
                f"{one!r} (of type {type(one).__name__}). Describe the draws by rounds that cost "
                "at least as much."
            )


def neighbouring_relation_of(sampling, neighbouring_relation=None):
    """Returns the name of the neighbouring relation that a guarantee is about.

    Args:
        sampling: The run's sampling.
        neighbouring_relation: `None` for the natural one, or `"add_or_remove_one"`,
            `"replace_one"`, `"replace_by_empty"`.

    Returns:
        A key of `NEIGHBOURING_RELATIONS`. The natural one is `"add_or_remove_one"`
        where every example has its own coins, and `"replace_by_empty"` elsewhere, as for
        shuffled epochs: adding an example would move the others to other batches.

    Raises:
        AccountingError: If the relation is unknown, or is `"add_or_remove_one"` where
            an added example would move the others.
    """
    if neighbouring_relation is None:
        return ADD_OR_REMOVE_ONE if sampling.own_coins else REPLACE_BY_EMPTY
    if neighbouring_relation not in NEIGHBOURING_RELATIONS:
        raise AccountingError(
            f"Argument `neighbouring_relation` must be one of {tuple(NEIGHBOURING_RELATIONS)} or "
            f"None. Received: neighbouring_relation={neighbouring_relation!r}."
        )
    if neighbouring_relation == ADD_OR_REMOVE_ONE and not sampling.own_coins:
        raise AccountingError(
            'neighbouring_relation="add_or_remove_one" cannot be claimed for '
            f"`{type(sampling).__name__}`: adding one example moves the others to other batches. "
            'Use "replace_by_empty" (the default there) or "replace_one".'
        )
    return neighbouring_relation


def relation_text(neighbouring_relation, group_size=1):
    """Returns in words what two data sets differ in that cannot be told apart."""
    if group_size == 1:
        return NEIGHBOURING_RELATIONS[neighbouring_relation]
    return _OF_GROUPS[neighbouring_relation].format(k=group_size)


def check_group_size(group_size: Any, num_examples: int) -> int:
    """Refuses a size that no group of examples has.

    Args:
        group_size: Int in [1, N].
        num_examples: N.

    Returns:
        `group_size` as an int.

    Raises:
        AccountingError: If `group_size` is not such a number.
    """
    group_size = check_integer("group_size", group_size, error=AccountingError)
    if group_size > num_examples:
        raise AccountingError(
            f"Argument `group_size` must be at most N = {num_examples}, the number of examples: it "
            f"is how many belong to one person. Received: group_size={group_size}."
        )
    return group_size


def is_unbounded(mechanism):
    """Whether one example can move every later release (form 4)."""
    return not mechanism.bound_residuals and mechanism.error_norm_clip > 0


def is_amplified(sampling):
    """Whether an example may stay out of its turn, which lowers the cost of the turn."""
    rounds = sampling.accounted_rounds(1.0, sampling.steps_per_epoch)
    return any(r.sampling_probability < 1.0 for r in rounds)


def _extra_factor(mechanism, sampling, relation):
    # With microbatches, a Poisson draw that holds one more example moves another one to the
    # end (a uniform order of n+1 arises from one of n by taking a place and sending its owner
    # last): two clipped means change, where a fixed order changes one.
    if mechanism.num_microbatches is not None:
        return 2.0 if sampling.own_coins else 1.0
    # Without amplification, exchanging an example moves the sum twice as far as emptying it;
    # with it, the accountant takes the exchange into account.
    return 2.0 if relation == REPLACE_ONE and not is_amplified(sampling) else 1.0


def _head_shift(mechanism, sampling, relation):
    # How far the mean of clipped gradients moves at one entry of an example.
    units = 1.0 if mechanism.num_microbatches is None else 2.0
    units *= _extra_factor(mechanism, sampling, relation)
    return units * mechanism.l2_norm_clip / mechanism.divisor


def bounded_rounds(mechanism, sampling, steps, relation=None):
    """Returns the rounds of a run with bounded residuals (forms 1, 1b, 2, 3 and 6).

    Args:
        mechanism: `DiceMechanism` for which `is_unbounded` is false.
        sampling: The run's sampling.
        steps: Int > 0.
        relation: A key of `NEIGHBOURING_RELATIONS`. `"replace_one"` doubles the
            sensitivity where there is no amplification; elsewhere it is left to
            the accountant.

    Returns:
        What `sampling.accounted_rounds` says; see the table at the top of this module.
    """
    factor = _extra_factor(mechanism, sampling, relation)
    if mechanism.schedule is not None:
        return scheduled.scheduled_rounds(mechanism, sampling, steps, factor)
    separate = sampling.separates_entries(mechanism.feedback_steps)
    sensitivity = factor * mechanism.sensitivity(separate_entries=separate)
    return sampling.accounted_rounds(mechanism.noise_stddev_of_sum / sensitivity, steps)


def unbounded_rounds(mechanism, sampling, steps, relation=None, error_share: Any = None):
    r"""Returns the rounds of a run with unbounded residuals (form 4, Alg. 1 to the letter).

    Once an example has been drawn, the error may differ for good, so the clipped error
    of every later release may differ by up to \(2 C_2\), on the mean scale, whatever is
    drawn. That part gets no amplification:

    * without amplification: at its own K steps an example moves the release by at most
      \(2 C_2 + C_1/B\), at the other \(T - K\) by at most \(2 C_2\);
    * with it: split the noise variance into a share q for the error and 1-q for the
      gradients: T rounds of a Gaussian with multiplier \(\sqrt q\,\sigma_1 / (2 C_2)\)
      and the rounds of the sampling with \(\sqrt{1-q}\,\sigma_1 B / C_1\). Every share is
      valid.

    Proof of the second: given the example's earlier coins, the two parts of a release
    are independent, the first a Gaussian shifted by at most 2 C2, the second a
    subsampled Gaussian with a fresh coin. Its law given only what was released is a
    mixture over those coins against a fixed law, so (convexity) no worse.

    Args:
        mechanism: `DiceMechanism` for which `is_unbounded` is true.
        sampling: The run's sampling.
        steps: Int > 0.
        relation: A key of `NEIGHBOURING_RELATIONS`.
        error_share: Float in (0, 1), the share q; not used without amplification.

    Returns:
        List of `Round`s.
    """
    error = 2.0 * mechanism.error_norm_clip
    head = _head_shift(mechanism, sampling, relation)
    noise = mechanism.noise_stddev
    if not is_amplified(sampling):
        turns = sampling.accounted_rounds(noise / head, steps)
        rounds = [Round(1.0, noise / (error + noise / r.noise_multiplier), r.count) for r in turns]
        others = steps - sum(r.count for r in turns)
        return rounds + [Round(1.0, noise / error, others)] * (others > 0)
    turns = sampling.accounted_rounds(noise * math.sqrt(1 - error_share) / head, steps)
    return [Round(1.0, noise * math.sqrt(error_share) / error, steps), *turns]


def mixture_event(mechanism, sampling, steps):
    r"""Returns the tight event of form 4, if the installed dp_accounting knows it.

    At its turns the example shifts a release by at most \(2 C_2\) with probability
    1 - q and \(2 C_2 + C_1/B\) with probability q, that of the rounds of the sampling;
    at the other steps by at most \(2 C_2\). A turn costs more than another step, so
    rounding the number of turns up is safe.

    Args:
        mechanism: The run's `DiceMechanism`.
        sampling: The run's sampling.
        steps: Int > 0.

    Returns:
        A `dp_accounting.DpEvent`, or `None` with bounded residuals, without amplification and
        before dp_accounting 0.4.4.

    Source: Choquette-Choo et al., "Privacy amplification for matrix mechanisms", 2023
    (mixture of Gaussians).
    """
    mixture_class = getattr(dp_event, "MixtureOfGaussiansDpEvent", None)
    if mixture_class is None or not (is_unbounded(mechanism) and is_amplified(sampling)):
        return None
    error = 2.0 * mechanism.error_norm_clip
    head = _head_shift(mechanism, sampling, ADD_OR_REMOVE_ONE)
    noise, others = mechanism.noise_stddev, steps
    events: list[dp_accounting.DpEvent] = []
    for q, noise_multiplier, turns in sampling.accounted_rounds(noise / head, steps):
        mixture = mixture_class(noise, [error, error + noise / noise_multiplier], [1.0 - q, q])
        events.append(dp_accounting.SelfComposedDpEvent(mixture, turns))
        others -= turns
    if others > 0:
        events.append(Round(1.0, noise / error, others).event)
    return dp_accounting.ComposedDpEvent(events)


def compose(rounds):
    """Returns a `dp_accounting.DpEvent` for a list of `Round`s."""
    return compose_events([r.event for r in rounds])


def compose_events(events):
    """Returns one `dp_accounting.DpEvent` for a list of them that is not empty."""
    return events[0] if len(events) == 1 else dp_accounting.ComposedDpEvent(events)
