# Copyright 2026 The dice_tf Authors.
# SPDX-License-Identifier: Apache-2.0
r"""`AdaptiveClipping`: thresholds that follow a quantile of the norms, by a noisy count.

Every unit says, by \(b_i = \pm\frac{1}{2}\), whether its norm was within the threshold. The noisy
sum of these is released beside the gradients, and the next threshold is computed from what was
released. So each threshold is public when it is used, and noise and residuals follow it.
"""

from __future__ import annotations

import dataclasses
import math
from typing import TYPE_CHECKING, Any, ClassVar

import tensorflow as tf

from dice_tf.checks.arguments import check_number
from dice_tf.errors import MechanismError
from dice_tf.mechanism.clipping import SMALLEST_THRESHOLD, Clip, VariableGroups, thresholds
from dice_tf.mechanism.per_layer import PerLayerClipping

__all__ = ["AdaptiveClipping"]

if TYPE_CHECKING:
    from dice_tf.mechanism import DiceMechanism

# A threshold that only noise moves walks off; beyond these it is of no use.
_LARGEST_THRESHOLD = 1e12
# How far one unit moves a count, whether it is added, removed or becomes empty.
INFLUENCE = 0.5
# Noise on a count over its influence, in units per expected batch, where none is given:
# a standard deviation of B / 20, as Andrew et al. have it.
_COUNT_NOISE_PER_UNIT = 0.1


@dataclasses.dataclass(frozen=True)
class AdaptiveClipping(Clip):
    r"""Thresholds that follow a quantile of the gradients' norms, `clipping="adaptive"`.

    With norms \(n_i\), \(b_i = \frac{1}{2}\) if \(0 < n_i \le C_t\), \(-\frac{1}{2}\) if
    \(n_i > C_t\), and 0 if the unit is padding, its gradient 0 or not finite:

    \[f_t = \frac{1}{2} + \frac1B\Bigl(\sum_i b_i + N(0, \sigma_b^2)\Bigr), \qquad
      C_{t+1} = C_t\, e^{-\eta_C (f_t - q)}.\]

    \(C_0\) is `l2_norm_clip`. The other parameters are relative to it and follow:
    \(C_{2,t} = \rho\, C_t\) with \(\rho = C_2 / C_1\), and noise of standard deviation
    \(z\, C_t\) on the sum. What is stored of residuals is multiplied by
    \(\min(1, C_{t+1} / C_t)\) whenever the threshold changes, so that an example never moves a
    release by more, against its noise, than with constant thresholds.

    **Epsilon.** The count is one more coordinate of a release. With
    \(y\) = `count_noise_multiplier`, \(\sigma_b = y/2\), the effective noise multiplier is

    \[\bigl((1 + \rho^2/s)/z^2 + 1/y^2\bigr)^{-1/2},\]

    or with \((1 + \rho)^2\) where an example may meet its own residual. Calibration finds
    \(z\) at that \(y\).

    **Per layer.** Each of L layers has a threshold and a count of its own, and begins at
    \(C_0/\sqrt L\). The counts move by \(\frac{1}{2}\sqrt L\) together, so each gets
    \(\sigma_b = y \sqrt L / 2\): epsilon is that of one threshold. \(C_t\) is then
    \(\lVert (C_{t,1}, \ldots, C_{t,L}) \rVert\), and all coordinates have the noise \(z\, C_t\).

    Args:
        target_quantile: Float in (0, 1), q: the share of units whose gradient is to stay whole.
            With error feedback take small ones: it pays where most gradients are clipped.
        learning_rate: Float > 0, \(\eta_C\), of the logarithm of the threshold.
        count_noise_multiplier: Float > 0, y: noise on the count over how far one unit moves it.
            `None`: a tenth of the expected units in a batch, which costs next to nothing.
        per_layer: Whether each layer has a threshold of its own.

    Raises:
        MechanismError: If a value is out of range; with `bound_residuals=False`.

    Example:

    >>> from dice_tf import DiceMechanism
    >>> mechanism = DiceMechanism(
    ...     l2_norm_clip=1.0, error_norm_clip=0.0, noise_multiplier=1.0, expected_batch_size=500,
    ...     clipping=AdaptiveClipping(target_quantile=0.3, count_noise_multiplier=10.0))
    >>> effective = mechanism.noise_multiplier / mechanism.sensitivity(separate_entries=True)
    >>> round(effective, 6) == round((1 / 1.0**2 + 1 / 10.0**2) ** -0.5, 6)
    True

    Source: Andrew, Thakkar, McMahan, Ramaswamy, "Differentially Private Learning with Adaptive
    Clipping", NeurIPS 2021, Alg. 1; with error feedback: `docs/privacy.md` (our own proof).
    """

    target_quantile: float = 0.5
    learning_rate: float = 0.2
    count_noise_multiplier: float | None = None
    per_layer: bool = False

    name: ClassVar[str] = "adaptive"
    sets_thresholds: ClassVar[bool] = True
    # The error could not follow the thresholds.
    residuals_of: ClassVar[str | None] = "example"

    def __post_init__(self) -> None:
        store = lambda name, value: object.__setattr__(self, name, value)
        store("target_quantile", check_number("target_quantile", self.target_quantile))
        if not self.target_quantile < 1:
            raise MechanismError(
                "Argument `target_quantile` is the share of gradients that stay whole, between 0 "
                f"and 1. Received: target_quantile={self.target_quantile}. For thresholds that no "
                'gradient exceeds, take clipping="flat".'
            )
        store("learning_rate", check_number("learning_rate", self.learning_rate))
        noise = self.count_noise_multiplier
        if noise is not None:
            store("count_noise_multiplier", check_number("count_noise_multiplier", noise))
        if not isinstance(self.per_layer, bool):
            raise MechanismError(
                "Argument `per_layer` of AdaptiveClipping must be True or False. Received: "
                f"per_layer={self.per_layer!r}. All layers begin with equal shares."
            )

    def groups(self, model: Any) -> VariableGroups | None:
        """Returns one group per layer in equal shares, or `None`: all variables are one."""
        return PerLayerClipping().groups(model) if self.per_layer else None

    def count_noise(self, units: int) -> float:
        """Returns y, the noise on the counts over how far one unit moves all of them.

        Args:
            units: Int, the expected number of clipped units in a batch.
        """
        given = self.count_noise_multiplier
        return _COUNT_NOISE_PER_UNIT * units if given is None else given

    def statement(self) -> str:
        """Returns how thresholds follow the norms, and what of it costs privacy."""
        each = "Every layer has" if self.per_layer else "All gradients have"
        return (
            f"{each} a threshold that follows the {self.target_quantile:g} quantile of norms, by a "
            "noisy count of gradients within it. The counts are released with each step, and are "
            "in epsilon. Noise and residuals follow the thresholds, which are public."
        )

    def get_config(self) -> dict[str, Any]:
        """Returns the arguments."""
        return dataclasses.asdict(self)


def unclipped_counts(
    norms: Any, present: Any, mechanism: DiceMechanism, groups: VariableGroups | None, factors: Any
) -> Any:
    r"""Returns \(\sum_i b_i\) for every group.

    Sums of halves are exact, so that a unit moves each by at most 1/2 in float32, too.

    Args:
        norms: Float32 `[at least units]` or `[at least units, groups]`, as the engine has them.
            The rows after `units` are padding.
        present: Float32 `[units]`, 0 for units of padding.
        mechanism: Thresholds before they moved.
        groups: What `mechanism.clip.groups` returned, like `norms`.
        factors: Float32 `[groups]`, what thresholds are multiplied by.

    Returns:
        Float32 `[groups]`, `[1]` without groups.
    """
    norms = norms[: tf.shape(present)[0]]
    norms = norms[:, tf.newaxis] if groups is None else norms
    c1 = thresholds(mechanism, groups, factors)[0]
    finite = tf.reduce_all(tf.math.is_finite(norms), -1, keepdims=True)
    counts = finite & (norms > 0) & (present[:, tf.newaxis] > 0)
    halves = tf.where(norms <= c1, INFLUENCE, -INFLUENCE)
    return tf.reduce_sum(tf.where(counts, halves, tf.zeros_like(halves)), 0)


def count_stddev(mechanism: DiceMechanism, groups: VariableGroups | None) -> float:
    r"""Returns \(\sigma_b = y \sqrt L / 2\), of the noise on each of L counts.

    Args:
        mechanism: One with adaptive thresholds.
        groups: What `mechanism.clip.groups` returned.
    """
    number = 1 if groups is None else len(groups.shares)
    return mechanism.count_noise_multiplier * INFLUENCE * math.sqrt(number)


def next_factors(
    factors: Any, noisy_counts: Any, mechanism: DiceMechanism, groups: VariableGroups | None
) -> Any:
    r"""Returns what thresholds are multiplied by at the next step, a function of releases.

    \[c_{t+1} = c_t\, e^{-\eta_C (f_t - q)}\]

    within limits that keep every threshold between 1e-12 and 1e12.

    Args:
        factors: Float32 `[groups]`, \(c_t\).
        noisy_counts: Float32 `[groups]`, with noise.
        mechanism: One with adaptive thresholds.
        groups: What `mechanism.clip.groups` returned.

    Returns:
        Float32 `[groups]`.

    Source: Andrew et al., NeurIPS 2021, Alg. 1, the geometric update.
    """
    rule: Any = mechanism.clip
    totals = mechanism.l2_norm_clip, mechanism.error_norm_clip
    share = 1.0 if groups is None else min(groups.shares)
    # A little above, so that the product in float32 is not below.
    lowest = 1.001 * SMALLEST_THRESHOLD / (share * min(total for total in totals if total > 0))
    highest = _LARGEST_THRESHOLD / max(totals)
    fraction = 0.5 + noisy_counts / mechanism.divisor
    moved = factors * tf.exp(-rule.learning_rate * (fraction - rule.target_quantile))
    return tf.clip_by_value(moved, min(lowest, 1.0), max(highest, 1.0))
