# Copyright 2026 The dice_tf Authors.
# SPDX-License-Identifier: Apache-2.0
"""Epsilon of a training run: `dp_event`, `guarantee` and `compute_epsilon`."""

import decimal
import math
from typing import NamedTuple

import dp_accounting

from dice_tf.accounting import events, trade_off, units
from dice_tf.accounting.account import account_of, run_rounds
from dice_tf.errors import AccountingError
from dice_tf.mechanism import DiceMechanism
from dice_tf.sampling import Sampling

__all__ = ["PrivacyGuarantee", "compute_epsilon", "dp_event", "guarantee"]

ACCOUNTANTS = ("rdp", "pld")


def up(epsilon: float) -> str:
    """Returns an epsilon as text of three decimals, never below it.

    Args:
        epsilon: Float >= 0.

    Returns:
        String; `"infinite"` for infinity.
    """
    if not math.isfinite(epsilon):
        return "infinite"
    # By the decimal that Python prints: the binary number may be a little above it.
    exact = decimal.Decimal(repr(float(epsilon)))
    context = decimal.Context(prec=400, rounding=decimal.ROUND_CEILING)
    return f"{exact.quantize(decimal.Decimal('0.001'), context=context):f}"


def delta_up(delta: float) -> str:
    """Returns a delta as text of three significant digits, never below it.

    Args:
        delta: Float > 0.

    Returns:
        String.
    """
    context = decimal.Context(prec=3, rounding=decimal.ROUND_CEILING)
    return f"{float(context.create_decimal(repr(float(delta)))):.3g}"


class PrivacyGuarantee(NamedTuple):
    """(epsilon, delta)-differential privacy, with what it is about.

    Attributes:
        epsilon: Float >= 0.
        delta: Float.
        neighbouring_relation: Key of `NEIGHBOURING_RELATIONS`: which two data sets
            cannot be told apart.
        accountant: `"rdp"` or `"pld"`.
        steps: Int, the number of optimizer steps.
        group_size: Int >= 1, how many examples the relation changes at most.
        unit: `"example"` or `"owner"`: what the relation is about.

    Example:

    >>> print(PrivacyGuarantee(1.5, 1e-5, "add_or_remove_one", "rdp", steps=1171))
    (1.500, 1e-05)-differential privacy after 1171 steps, where one example is added or removed ...
    """

    epsilon: float
    delta: float
    neighbouring_relation: str
    accountant: str
    steps: int
    group_size: int = 1
    unit: str = "example"

    def __str__(self) -> str:
        relation = events.relation_text(self.neighbouring_relation, self.group_size)
        relation = relation.replace("example", self.unit)
        return (
            f"({up(self.epsilon)}, {delta_up(self.delta)})-differential privacy after {self.steps} "
            f"steps, where {relation} ({self.accountant.upper()} accountant)"
        )


def dp_event(
    mechanism: DiceMechanism, sampling: Sampling, steps: int, accountant: str = "rdp"
) -> dp_accounting.DpEvent:
    r"""Returns what a run costs, as an event that dp_accounting's accountants take.

    Args:
        mechanism: `DiceMechanism`, for example `optimizer.mechanism`.
        sampling: `PoissonSampling`, `CyclicPoissonSampling` or `ShuffledEpochs`.
        steps: Int >= 0, number of optimizer steps.
        accountant: `"rdp"` or `"pld"`, which will take the event. They differ only for
            unbounded residuals: `"pld"` gets the tight mixture of Gaussians where
            dp_accounting has it (0.4.4), `"rdp"` a split of the noise chosen for
            \(\delta = 1/(10 N)\).

    Returns:
        A `dp_accounting.DpEvent`, for dp_accounting's add-or-remove-one relation. What
        the neighbours are in terms of examples is `neighbouring_relation_of(sampling)`.

    Raises:
        AccountingError: If the arguments are out of range or contradict each other.

    Example:

    >>> from dice_tf.mechanism import DiceMechanism
    >>> from dice_tf.sampling import CyclicPoissonSampling
    >>> composed = dp_event(
    ...     DiceMechanism(l2_norm_clip=3.0, error_norm_clip=4.0, noise_multiplier=2.0,
    ...                   expected_batch_size=500),
    ...     CyclicPoissonSampling(num_examples=50_000, expected_batch_size=500), steps=99)
    >>> composed.count, composed.event.sampling_probability, composed.event.event
    (50, 0.02, GaussianDpEvent(noise_multiplier=1.2))

    Source: `docs/privacy.md`, section 2 (our own proofs).
    """
    steps = events.check_run(mechanism, sampling, steps)
    check_accountant(accountant)
    if steps == 0:
        return dp_accounting.NoOpDpEvent()
    if mechanism.noise_multiplier == 0:
        return dp_accounting.NonPrivateDpEvent()
    relation = events.neighbouring_relation_of(sampling)
    mixture = events.mixture_event(mechanism, sampling, steps) if accountant == "pld" else None
    return mixture or events.compose(
        run_rounds(mechanism, sampling, steps, 0.1 / sampling.num_examples, relation)
    )


def guarantee(
    mechanism: DiceMechanism,
    sampling: Sampling,
    steps: int,
    delta: float,
    accountant: str = "rdp",
    neighbouring_relation: str | None = None,
    *,
    group_size: int = 1,
) -> PrivacyGuarantee:
    r"""Returns the privacy of a run together with the relation that it is about.

    Under `"replace_one"`, where each example has its own coin, "pld" uses
    dp_accounting's loss distribution for that relation if it has one. Otherwise the
    exchange is a removal and an addition: with \(\delta_1\) spent on the first, and
    \(\delta_2 = (\delta - \delta_1) e^{-\varepsilon(\delta_1)}\) left for the second,

    \[P(S) \le e^{\varepsilon_1} R(S) + \delta_1
      \le e^{\varepsilon_1}(e^{\varepsilon_2} Q(S) + \delta_2) + \delta_1
      = e^{\varepsilon_1 + \varepsilon_2} Q(S) + \delta.\]

    For a group of k examples, let g(x) be a bound of the true-positive rate of every test of
    neighbours at a false-positive rate x. Along k neighbours rates go from x to at most
    \(g^{(k)}(x)\), the k-th iterate, whatever the form of the run and the sampling, and

    \[\varepsilon_k = \sup_x \log\frac{g^{(k)}(x) - \delta}{x}.\]

    Args:
        mechanism: `DiceMechanism`, for example `optimizer.mechanism`.
        sampling: `PoissonSampling`, `CyclicPoissonSampling` or `ShuffledEpochs`.
        steps: Int >= 0, number of optimizer steps (a part of a cycle or of an epoch is
            rounded up to a whole one).
        delta: Float in (0, 1/N).
        accountant: `"rdp"` (Renyi, fast) or `"pld"` (privacy loss distribution, tighter).
        neighbouring_relation: `None` for the natural one: `"add_or_remove_one"`, or
            `"replace_by_empty"` with `ShuffledEpochs`. Or `"replace_one"`.
        group_size: Int in [1, N], k: epsilon for people with up to k examples. Where owners can
            be drawn as a whole, that costs much less.

    Returns:
        A `PrivacyGuarantee`. Epsilon is 0 after 0 steps and infinite without noise.

    Raises:
        AccountingError: If the arguments are out of range or contradict each other.

    Example:

    >>> from dice_tf.mechanism import DiceMechanism
    >>> from dice_tf.sampling import ShuffledEpochs
    >>> found = guarantee(
    ...     DiceMechanism(l2_norm_clip=1.0, noise_multiplier=20.0, expected_batch_size=500),
    ...     ShuffledEpochs(num_examples=10_000, expected_batch_size=500), steps=100, delta=1e-5)
    >>> round(found.epsilon, 2), found.neighbouring_relation
    (0.9, 'replace_by_empty')
    >>> round(guarantee(
    ...     DiceMechanism(l2_norm_clip=1.0, noise_multiplier=20.0, expected_batch_size=500),
    ...     ShuffledEpochs(num_examples=10_000, expected_batch_size=500), steps=100, delta=1e-5,
    ...     group_size=3).epsilon, 2)
    3.01

    Source: `docs/privacy.md`, section 2 (our own proofs); Mironov, "Renyi differential
    privacy", CSF 2017 (RDP); Doroshenko et al., "Connect the dots: Tighter discrete
    approximations of privacy loss distributions", PoPETs 2022 (PLD, by dp_accounting); Dong,
    Roth, Su, "Gaussian differential privacy", 2022, Thm 2.14 (groups).
    """
    steps = events.check_run(mechanism, sampling, steps)
    delta = events.check_delta(delta, sampling.num_examples)
    check_accountant(accountant)
    relation = events.neighbouring_relation_of(sampling, neighbouring_relation)
    group_size = events.check_group_size(group_size, sampling.num_examples)
    if steps == 0:
        epsilon = 0.0
    elif mechanism.noise_multiplier == 0:
        epsilon = math.inf
    else:
        account = account_of(mechanism, sampling, steps, delta, accountant, relation)
        if group_size == 1:
            epsilon = account.epsilon(delta)
        else:
            power = trade_off.log_power(account, math.log(delta), group_size)
            epsilon = trade_off.epsilon_of(power, math.log(delta))
    unit = units.word(sampling)
    return PrivacyGuarantee(epsilon, delta, relation, accountant, steps, group_size, unit)


def compute_epsilon(
    mechanism: DiceMechanism,
    sampling: Sampling,
    steps: int,
    delta: float,
    accountant: str = "rdp",
    neighbouring_relation: str | None = None,
    *,
    group_size: int = 1,
) -> float:
    r"""Returns the epsilon of a run.

    A number for which every two neighbouring data sets D and D', and every set S of sequences
    of models, have

    \[\Pr[M(D) \in S] \le e^\varepsilon \Pr[M(D') \in S] + \delta.\]

    Args:
        mechanism: As for `guarantee`, like all other arguments.
        sampling: How batches are drawn.
        steps: Int >= 0, number of optimizer steps.
        delta: Float in (0, 1/N).
        accountant: `"rdp"` or `"pld"`.
        neighbouring_relation: `None`, `"replace_one"`, or another relation.
        group_size: Int in [1, N], for people with up to so many examples.

    Returns:
        Float >= 0, the epsilon of `guarantee(...)`.

    Raises:
        AccountingError: If the arguments are out of range or contradict each other.

    Example:

    >>> from dice_tf.mechanism import DiceMechanism
    >>> from dice_tf.sampling import CyclicPoissonSampling
    >>> epsilon = compute_epsilon(
    ...     DiceMechanism(l2_norm_clip=1.0, noise_multiplier=2.0, expected_batch_size=512),
    ...     CyclicPoissonSampling(num_examples=60_000, expected_batch_size=512),
    ...     steps=1171, delta=1e-5)
    >>> round(epsilon, 2)
    1.51

    Source: as `guarantee`.
    """
    terms = delta, accountant, neighbouring_relation
    return guarantee(mechanism, sampling, steps, *terms, group_size=group_size).epsilon


def check_accountant(accountant: str) -> None:
    """Refuses the name of an accountant that there is not.

    Args:
        accountant: One of `ACCOUNTANTS`.

    Raises:
        AccountingError: If it is not.
    """
    if accountant not in ACCOUNTANTS:
        raise AccountingError(
            f"Argument `accountant` must be one of {ACCOUNTANTS}. "
            f"Received: accountant={accountant!r}."
        )
