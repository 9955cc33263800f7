# Copyright 2026 The dice_tf Authors.
# SPDX-License-Identifier: Apache-2.0
"""What `print(plan)` shows: what a `PrivacyPlan` chose, and what that costs."""

from __future__ import annotations

from collections.abc import Mapping
import functools
import math
import textwrap
from typing import TYPE_CHECKING

from dice_tf import accounting
from dice_tf.accounting.epsilon import ACCOUNTANTS, delta_up, up
from dice_tf.accounting.statement import plain_sampling
from dice_tf.accounting.units import parameters as units_of
from dice_tf.accounting.units import word

if TYPE_CHECKING:
    from dice_tf.plan import PrivacyPlan

# A warning is printed where the noise drowns the signal in a model of so many parameters.
_SMALL_MODEL = 10_000


def drowned(plan: PrivacyPlan, parameters: int) -> str:
    """Returns where the noise drowns the signal, and what to do.

    Args:
        plan: The plan.
        parameters: Int, a number of parameters whose `signal_to_noise` is below 1.
    """
    return (
        f"in {parameters} parameters: over the {plan.steps} steps of this plan it adds up to more "
        f"than gradients that all agree (signal_to_noise={plan.signal_to_noise(parameters):.2g}, "
        "below 1). Take a larger batch or more epochs, train fewer parameters, or ask for a larger "
        "epsilon."
    )


def report(plan: PrivacyPlan, why: Mapping[str, str]) -> str:
    """Returns what `print(plan)` shows.

    Args:
        plan: The plan.
        why: Reasons for values that were chosen, by the names of their arguments.
    """

    def because(name: str) -> str:
        return f" ({why[name]})" if name in why else ""

    sampling, ratio = plan.sampling, plan.error_norm_clip_ratio
    people = f", for people with up to {plan.group_size} {word(sampling)}s"
    passes = sampling.steps_per_epoch * plan.batch_size / plan.num_examples
    groups = "" if sampling.num_groups == 1 else f", {sampling.num_groups} groups taking turns"
    steps = "1 step" if plan.feedback_steps == 1 else f"{plan.feedback_steps} steps"
    feedback = f"over {steps}" if plan.feedback_steps else "none: DP-SGD"
    noise = f"{plan.noise_multiplier:.4g}"
    if plan.target_epsilon is not None:
        noise += f", calibrated for epsilon = {plan.target_epsilon:g}"
    (other,) = (name for name in ACCOUNTANTS if name != plan.accountant)
    epsilon_by_other = accounting.compute_epsilon(
        plan.mechanism(), sampling, plan.steps, plan.delta, other, group_size=plan.group_size
    )
    # In a model of so many parameters the signal of all steps is as long as their noise.
    size = plan.signal_to_noise(1) ** 2
    rows = {
        "data": f"{plan.num_examples} {word(sampling)}s, {plan.batch_size} expected in a batch",
        **units_of(plan.mechanism(), sampling),
        "sampling": f"{type(sampling).__name__}{groups}",
        "steps": f"{plan.steps} = {plan.epochs} epochs of {sampling.steps_per_epoch} steps, each "
        f"{passes:.2f} passes over the data",
        "error feedback": f"{feedback}{because('feedback_steps')}",
        "error_norm_clip": f"{ratio:.4g} x l2_norm_clip; gradients arrive in full up to "
        f"{1 + ratio:.4g} x l2_norm_clip",
        **_movement(plan),
        "noise_multiplier": noise,
        "noise on the mean": _noise_on_the_mean(plan),
        "delta": f"{delta_up(plan.delta)}{because('delta')}",
        "epsilon": f"{up(plan.epsilon())} by {plan.accountant.upper()}, the accountant of this "
        f"plan; {up(epsilon_by_other)} by {other.upper()}{people if plan.group_size > 1 else ''}",
        "noise and signal": "noise is as long as gradients that all agree in a model of "
        f"{size / plan.steps:.2g} parameters after one step, of {size:.2g} after all",
    }
    wrap = functools.partial(textwrap.fill, width=100, break_on_hyphens=False)
    lines = ["Privacy plan"]
    for name, text in rows.items():
        lines.append(wrap(text, initial_indent=f"  {name:<20}", subsequent_indent=" " * 22))
    if plan.noise_multiplier == 0:
        lines.append("WARNING: no noise is added: there is NO privacy.")
    if plan.signal_to_noise(_SMALL_MODEL) < 1:
        lines.append(wrap(f"WARNING: the noise drowns the signal {drowned(plan, _SMALL_MODEL)}"))
    return "\n".join(lines)


def _movement(plan: PrivacyPlan) -> dict[str, str]:
    """Returns rows on thresholds and noise that change."""
    mechanism, rows = plan.mechanism(), {}
    if math.isfinite(mechanism.count_noise_multiplier):
        rows["adaptive threshold"] = (
            "l2_norm_clip is the first one; noise and error_norm_clip follow it, and the count, "
            f"with a noise multiplier of {mechanism.count_noise_multiplier:g}, is in epsilon"
        )
    if plan.schedule is not None:
        rows["schedule"] = f"{plan.schedule}; the noise below is that of a factor of 1"
    return rows


def _noise_on_the_mean(plan: PrivacyPlan) -> str:
    """Returns the noise per coordinate, and that of DP-SGD with the same total threshold."""
    noise = plan.noise_multiplier / plan.batch_size
    text = f"{noise:.3g} x l2_norm_clip per coordinate"
    epsilon = plan.epsilon()
    if plan.feedback_steps == 0 or not 0 < epsilon < math.inf:
        return text
    sampling = plain_sampling(plan.sampling)
    dp_sgd = accounting.calibrate_noise_multiplier(
        epsilon,
        plan.delta,
        sampling,
        plan.steps,
        error_norm_clip=0.0,
        accountant=plan.accountant,
        group_size=plan.group_size,
    )
    total = 1 + plan.error_norm_clip_ratio
    return (
        f"{text}; DP-SGD that clips to l2_norm_clip + error_norm_clip has "
        f"{dp_sgd * total / plan.batch_size:.3g} at the same epsilon"
    )
