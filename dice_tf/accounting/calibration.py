# Copyright 2026 The dice_tf Authors.
# SPDX-License-Identifier: Apache-2.0
"""The noise, the number of steps or the batch size that a privacy budget allows."""

import dataclasses
import functools
import math
from typing import Any

from scipy import optimize

from dice_tf.accounting import events
from dice_tf.accounting.epsilon import compute_epsilon
from dice_tf.checks.arguments import check_integer, check_number
from dice_tf.errors import AccountingError
from dice_tf.mechanism import PRIVACY_ARGUMENTS, DiceMechanism, PiecewiseSchedule
from dice_tf.mechanism.clipping import Clip
from dice_tf.sampling import Sampling

__all__ = ["calibrate_batch_size", "calibrate_noise_multiplier", "calibrate_steps"]

# Noise is found to this relative precision, from above.
_PRECISION = 1e-4
_LARGEST_NOISE = 1e9
_MOST_STEPS = 2**40


def calibrate_noise_multiplier(
    target_epsilon: float,
    delta: float,
    sampling: Sampling,
    steps: int,
    l2_norm_clip: float = 1.0,
    error_norm_clip: float | None = None,
    bound_residuals: bool = True,
    feedback_steps: int = 1,
    accountant: str = "rdp",
    *,
    num_microbatches: int | None = None,
    clipping: str | Clip = "flat",
    schedule: PiecewiseSchedule | None = None,
    neighbouring_relation: str | None = None,
    group_size: int = 1,
) -> float:
    r"""Returns the smallest noise multiplier that keeps a run within a privacy budget.

    \[\min\{z : \varepsilon(z, T, B) \le \varepsilon_{\mathrm{target}}\},\]

    with \(\varepsilon\) of `compute_epsilon`.

    Args:
        target_epsilon: Float > 0.
        delta: Float in (0, 1/N).
        sampling: `PoissonSampling`, `CyclicPoissonSampling` or `ShuffledEpochs`.
        steps: Int > 0, number of optimizer steps, for example `sampling.steps(epochs)`.
        l2_norm_clip: As for the optimizer, like the next three.
        error_norm_clip: Float >= 0 or `None`.
        bound_residuals: Bool.
        feedback_steps: Int >= 1.
        accountant: `"rdp"` or `"pld"` (less noise, slower).
        num_microbatches: Int or `None`.
        clipping: Adaptive thresholds cost noise, all other rules cost the same.
        schedule: Of noise, which is scaled as a whole, or `None`.
        neighbouring_relation: As for `guarantee`.
        group_size: Int in [1, N]: the budget is for people with up to so many examples.

    Returns:
        Float, relative to `l2_norm_clip`; epsilon at this noise is at most
        `target_epsilon`, and with 0.1 % less noise it would be above.

    Raises:
        AccountingError: If the arguments are out of range, or no noise up to 1e9 is enough.
        MechanismError: If a parameter of the mechanism is out of range.

    Example:

    >>> from dice_tf.sampling import CyclicPoissonSampling
    >>> sampling = CyclicPoissonSampling(num_examples=60_000, expected_batch_size=2048)
    >>> round(calibrate_noise_multiplier(2.7, 1e-5, sampling, sampling.steps(epochs=20)), 2)
    3.05
    """
    # All arguments of the mechanism that are arguments here; the sampling has two more.
    parameters = {name: value for name, value in locals().items() if name in PRIVACY_ARGUMENTS}
    target_epsilon, steps = _check_target(target_epsilon, steps)
    events.check_sampling(sampling)
    parameters["expected_batch_size"] = sampling.expected_batch_size
    # However many views an optimizer clips besides: they cost nothing.
    parameters["rows_per_unit"] = sampling.rows_per_unit

    def epsilon_of(accountant, noise_multiplier):
        mechanism = DiceMechanism(noise_multiplier=noise_multiplier, **parameters)
        run = mechanism, sampling, steps, delta
        return compute_epsilon(*run, accountant, neighbouring_relation, group_size=group_size)

    # The fast accountant's answer is a good place to start from.
    by_rdp = functools.partial(epsilon_of, "rdp")
    noise_multiplier = _smallest_noise(by_rdp, target_epsilon, 1.0, 2.0)
    if accountant == "rdp":
        return noise_multiplier
    by_chosen = functools.partial(epsilon_of, accountant)
    return _smallest_noise(by_chosen, target_epsilon, noise_multiplier, 1.15)


def calibrate_steps(
    target_epsilon: float,
    delta: float,
    mechanism: DiceMechanism,
    sampling: Sampling,
    accountant: str = "rdp",
    *,
    neighbouring_relation: str | None = None,
    group_size: int = 1,
) -> int:
    r"""Returns the largest number of optimizer steps within a privacy budget.

    \[\max\{T : \varepsilon(z, T, B) \le \varepsilon_{\mathrm{target}}\},\]

    with \(\varepsilon\) of `compute_epsilon`.

    Args:
        target_epsilon: Float > 0.
        delta: Float in (0, 1/N).
        mechanism: `DiceMechanism` with its noise.
        sampling: As for `compute_epsilon`.
        accountant: `"rdp"` or `"pld"` (more steps, slower).
        neighbouring_relation: As for `guarantee`.
        group_size: Int in [1, N]: the budget is for people with up to so many examples.

    Returns:
        Int > 0.

    Raises:
        AccountingError: If the arguments are out of range, the budget does not allow one
            step, or it allows more than 2**40.

    Example:

    >>> from dice_tf.sampling import PoissonSampling
    >>> calibrate_steps(
    ...     2.0, 1e-5,
    ...     DiceMechanism(l2_norm_clip=1.0, noise_multiplier=2.0, expected_batch_size=512),
    ...     PoissonSampling(num_examples=60_000, expected_batch_size=512))
    1292
    """
    target_epsilon, _ = _check_target(target_epsilon, 1)

    def fits(accountant, steps):
        run = mechanism, sampling, steps, delta
        epsilon = compute_epsilon(*run, accountant, neighbouring_relation, group_size=group_size)
        return epsilon <= target_epsilon

    # The fast accountant's answer is a good place to start from.
    by_rdp, by_chosen = functools.partial(fits, "rdp"), functools.partial(fits, accountant)
    try:
        start = _largest(by_rdp, _MOST_STEPS, target_epsilon, "optimizer step")
    except AccountingError:
        if accountant == "rdp":
            raise
        start = 1
    if accountant == "rdp":
        return start
    return _largest(by_chosen, _MOST_STEPS, target_epsilon, "optimizer step", start)


def calibrate_batch_size(
    target_epsilon: float,
    delta: float,
    mechanism: DiceMechanism,
    sampling: Sampling,
    steps: int,
    accountant: str = "rdp",
    *,
    neighbouring_relation: str | None = None,
    group_size: int = 1,
) -> int:
    r"""Returns the largest expected batch size with which a run stays within a budget.

    \[\max\{B : \varepsilon(z, T, B) \le \varepsilon_{\mathrm{target}}\},\]

    with \(\varepsilon\) of `compute_epsilon`.

    The noise multiplier and the number of steps are kept, so a larger batch means less
    noise on the mean and more passes over the data.

    Args:
        target_epsilon: Float > 0.
        delta: Float in (0, 1/N).
        mechanism: `DiceMechanism`; its `expected_batch_size` is replaced.
        sampling: As for `compute_epsilon`; its `expected_batch_size` is replaced.
        steps: Int > 0, number of optimizer steps.
        accountant: `"rdp"` or `"pld"`.
        neighbouring_relation: As for `guarantee`.
        group_size: Int in [1, N]: the budget is for people with up to so many examples.

    Returns:
        Int > 0, a multiple of `num_microbatches` if those are used, at most
        N / `num_groups`.

    Raises:
        AccountingError: If the arguments are out of range or no batch size is small enough.

    Example:

    >>> from dice_tf.sampling import PoissonSampling
    >>> calibrate_batch_size(
    ...     2.0, 1e-5,
    ...     DiceMechanism(l2_norm_clip=1.0, noise_multiplier=2.0, expected_batch_size=512),
    ...     PoissonSampling(num_examples=60_000, expected_batch_size=512), steps=2000)
    424
    """
    target_epsilon, steps = _check_target(target_epsilon, steps)
    events.check_run(mechanism, sampling, steps)
    unit = mechanism.num_microbatches or 1

    def fits(units):
        batch = {"expected_batch_size": units * unit}
        run = dataclasses.replace(mechanism, **batch), dataclasses.replace(sampling, **batch)
        epsilon = compute_epsilon(
            *run, steps, delta, accountant, neighbouring_relation, group_size=group_size
        )
        return epsilon <= target_epsilon

    most = sampling.num_examples // (sampling.num_groups * unit)
    return unit * _largest(fits, most, target_epsilon, "batch")


def _check_target(target_epsilon, steps):
    target_epsilon = check_number("target_epsilon", target_epsilon, error=AccountingError)
    return target_epsilon, check_integer("steps", steps, error=AccountingError)


def _smallest_noise(epsilon_of, target_epsilon, start, factor):
    """Returns a noise multiplier, from above, at which `epsilon_of` crosses the target."""

    @functools.cache
    def excess(log_noise):
        # Infinite and zero epsilons would stall the root finder.
        epsilon = min(max(epsilon_of(math.exp(log_noise)), 1e-9), 1e9)
        return math.log(epsilon / target_epsilon)

    high = low = math.log(start)
    step = math.log(factor)
    if excess(high) > 0:
        while excess(high) > 0:
            low, high = high, high + step
            if high > math.log(_LARGEST_NOISE):
                raise AccountingError(
                    f"No noise multiplier up to {_LARGEST_NOISE:g} gives an epsilon of at most "
                    f"{target_epsilon}. Ask for a larger epsilon, fewer steps or, with adaptive "
                    "thresholds, a larger `count_noise_multiplier`."
                )
    else:
        while excess(low) <= 0:
            low, high = low - step, low
    root: Any = optimize.brentq(excess, low, high, xtol=_PRECISION / 2)
    while epsilon_of(math.exp(root)) > target_epsilon:
        root += _PRECISION / 2
    return math.exp(root)


def _largest(fits, most, target_epsilon, what, start=1):
    """Returns the largest int in [1, most] that fits, for a property that fails for good.

    A `start` above 1 is a guess, from below, that is expected to be close.
    """
    if start > 1 and fits(start):
        low, high = start, start + max(1, start // 4)
    elif fits(1):
        low, high = 1, 2
    else:
        raise AccountingError(
            f"The budget target_epsilon={target_epsilon} does not allow one {what}. Ask for a "
            "larger epsilon or raise `noise_multiplier`."
        )
    while high <= most and fits(high):
        low, high = high, 2 * high
    high = min(high, most + 1)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    if what == "optimizer step" and low == most:
        raise AccountingError(
            f"The budget target_epsilon={target_epsilon} allows more than {most} steps: it does "
            "not limit this run."
        )
    return low
