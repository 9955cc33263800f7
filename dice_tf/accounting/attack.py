# Copyright 2026 The dice_tf Authors.
# SPDX-License-Identifier: Apache-2.0
"""`true_positive_rates`: how many members an attacker can find, given its false accusations."""

from collections.abc import Sequence
import math

import numpy as np

from dice_tf.accounting import events, trade_off
from dice_tf.accounting.account import account_of
from dice_tf.checks.arguments import check_number
from dice_tf.errors import AccountingError
from dice_tf.mechanism import DiceMechanism
from dice_tf.sampling import Sampling

__all__ = ["true_positive_rates"]

FALSE_POSITIVE_RATES = (0.001, 0.01, 0.1)


def true_positive_rates(
    mechanism: DiceMechanism,
    sampling: Sampling,
    steps: int,
    false_positive_rates: Sequence[float] = FALSE_POSITIVE_RATES,
    neighbouring_relation: str | None = None,
    *,
    group_size: int = 1,
) -> tuple[float, ...]:
    r"""Returns how often an attacker can be right that an example was used.

    The attacker sees all models, knows all other examples and chose the gradients. It accuses
    if what it sees lies in a set S. Where \(\delta(\varepsilon)\) is the privacy loss
    distribution's, in the worse of both directions, its rate x of false accusations leaves at
    most

    \[g(x) = \min_{\varepsilon \in R} e^\varepsilon x + \delta(\varepsilon).\]

    Args:
        mechanism: `DiceMechanism`, for example `optimizer.mechanism`.
        sampling: `PoissonSampling`, `CyclicPoissonSampling`, `RandomAllocation` or
            `ShuffledEpochs`.
        steps: Int >= 0, number of optimizer steps.
        false_positive_rates: Floats in (0, 1): of those who were not there, the share accused.
        neighbouring_relation: As for `guarantee`.
        group_size: Int in [1, N]: what is looked for is a person with up to so many examples.

    Returns:
        Tuple of floats, an upper bound for each rate: of those who were there, the share found.

    Raises:
        AccountingError: If the arguments are out of range or contradict each other.

    Example:

    >>> from dice_tf.mechanism import DiceMechanism
    >>> from dice_tf.sampling import CyclicPoissonSampling
    >>> rates = true_positive_rates(
    ...     DiceMechanism(l2_norm_clip=1.0, noise_multiplier=2.0, expected_batch_size=512),
    ...     CyclicPoissonSampling(num_examples=60_000, expected_batch_size=512), steps=1171)
    >>> [f"{math.ceil(1000 * rate) / 10}%" for rate in rates]
    ['0.4%', '2.4%', '17.3%']

    Source: Dong, Roth, Su, "Gaussian differential privacy", 2022, Sec. 2; the privacy loss
    distribution is `guarantee`'s.
    """
    steps = events.check_run(mechanism, sampling, steps)
    relation = events.neighbouring_relation_of(sampling, neighbouring_relation)
    group_size = events.check_group_size(group_size, sampling.num_examples)
    rates = [_rate(rate) for rate in false_positive_rates]
    if steps == 0:
        return tuple(rates)
    if mechanism.noise_multiplier == 0:
        return (1.0,) * len(rates)
    delta = 0.1 / sampling.num_examples
    account = account_of(mechanism, sampling, steps, delta, "pld", relation)
    power = trade_off.log_power(account, math.log(delta), group_size)
    return tuple(float(rate) for rate in np.exp(power(np.log(rates))))


def _rate(rate):
    rate = check_number("false_positive_rates", rate, error=AccountingError)
    if rate >= 1:
        raise AccountingError(
            "Argument `false_positive_rates` must hold shares between 0 and 1, for example "
            f"[0.001, 0.01, 0.1]. Received one of them: {rate!r}."
        )
    return rate
