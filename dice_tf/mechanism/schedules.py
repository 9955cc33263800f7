# Copyright 2026 The dice_tf Authors.
# SPDX-License-Identifier: Apache-2.0
"""`PiecewiseSchedule`: noise and thresholds that change at steps fixed before the run."""

from __future__ import annotations

import bisect
from collections.abc import Sequence
import dataclasses
from typing import TYPE_CHECKING, Any

import tensorflow as tf

from dice_tf.checks.arguments import check_integer, check_number
from dice_tf.errors import MechanismError
from dice_tf.mechanism.clipping import SMALLEST_THRESHOLD

__all__ = ["PiecewiseSchedule"]

if TYPE_CHECKING:
    from dice_tf.mechanism import DiceMechanism

# Less would be rounded to none at all, as float32.
SMALLEST_NOISE = 1e-30
# Default of factors. `Any`, because nobody reads `None` there.
_ONES: Any = None


@dataclasses.dataclass(frozen=True)
class PiecewiseSchedule:
    r"""Noise multiplier and thresholds, constant between steps that are known beforehand.

    At step t of piece j, \(b_{j-1} \le t < b_j\), with factors \(a_j\) and \(c_j\):

    \[z_t = a_j z, \qquad C_{1,t} = c_j C_1, \qquad C_{2,t} = c_j C_2, \qquad
      \sigma_t = z_t\, C_{1,t}.\]

    `noise_multiplier` and `l2_norm_clip` of the optimizer are \(z\) and \(C_1\), so calibration
    scales the schedule as a whole. **Thresholds cost nothing:** what is stored of residuals is
    multiplied by \(\min(1, C_{1,t} / C_{1,t-1})\), so that no example moves a release by more,
    against its own noise, than with constant thresholds. Noise costs what it is: each round is
    accounted at its own noise, and a residual at the smallest noise of the steps that release it.

    Steps are those that epsilon counts, from 0 on. The steps that a pass lacks which was cut
    short are counted, so the schedule leaves them out, too.

    Args:
        boundaries: Ints \(b_1 < b_2 < \dots\), above 0: the first step of each piece but the first.
        noise_factors: One float > 0 more than boundaries, the \(a_j\). Left out: all 1.
        clip_factors: The same for thresholds, the \(c_j\). Left out: all 1.

    Raises:
        MechanismError: If boundaries do not grow, or factors are not above 0 or not as many as
            pieces.

    Example:

    >>> schedule = PiecewiseSchedule([100, 200], noise_factors=[1.2, 1.0, 0.8])
    >>> [schedule.smallest_noise(step, step) for step in (99, 100, 500)]
    [1.2, 1.0, 0.8]

    Source: as `keras.optimizers.schedules.PiecewiseConstantDecay`; Yu et al., "Differentially
    Private Model Publishing for Deep Learning", S&P 2019 (noise that falls); accounting and
    feedback: `docs/privacy.md` (our own proof).
    """

    boundaries: Sequence[int]
    noise_factors: Sequence[float] = _ONES
    clip_factors: Sequence[float] = _ONES

    def __post_init__(self) -> None:
        boundaries = self._numbers("boundaries", self.boundaries, check_integer)
        if not boundaries or any(a >= b for a, b in zip(boundaries, boundaries[1:], strict=False)):
            raise MechanismError(
                "Argument `boundaries` of PiecewiseSchedule must be growing numbers of steps above "
                f"0, the first steps of its pieces. Received: boundaries={self.boundaries!r}. "
                "Without a change leave `schedule` out."
            )
        object.__setattr__(self, "boundaries", boundaries)
        for name in ("noise_factors", "clip_factors"):
            given = getattr(self, name)
            pieces = len(boundaries) + 1
            factors = (1.0,) * pieces if given is None else self._numbers(name, given, check_number)
            if len(factors) != pieces:
                raise MechanismError(
                    f"Argument `{name}` of PiecewiseSchedule must have one number for each of its "
                    f"{pieces} pieces, one more than boundaries. Received: {name}={given!r} with "
                    f"boundaries={boundaries}."
                )
            object.__setattr__(self, name, factors)

    @staticmethod
    def _numbers(name: str, values: Any, check: Any) -> tuple[Any, ...]:
        try:
            values = tuple(values)
        except TypeError:
            raise MechanismError(
                f"Argument `{name}` of PiecewiseSchedule must be a list of numbers. Received: "
                f"{name}={values!r} (of type {type(values).__name__})."
            ) from None
        return tuple(check(f"{name}[{i}]", value) for i, value in enumerate(values))

    def check(self, mechanism: DiceMechanism) -> None:
        """Refuses a mechanism whose cost under the schedule is not known.

        Raises:
            MechanismError: If residuals are unbounded, thresholds are set by another rule, or
                the smallest noise or threshold is too small.
        """
        if mechanism.error_norm_clip > 0 and not mechanism.bound_residuals:
            raise MechanismError(
                "A `schedule` needs bound_residuals=True, the default: an error that is clipped as "
                "a whole has no known cost under changing noise. Received: bound_residuals=False. "
                "Leave it out."
            )
        if set(self.clip_factors) != {1.0} and mechanism.clip.sets_thresholds:
            raise MechanismError(
                f'With clipping="{mechanism.clip.name}" thresholds are not for a schedule to set. '
                f"Received: clip_factors={self.clip_factors}. Leave `clip_factors` out, or take "
                'clipping="flat" or "per_layer".'
            )
        thresholds = mechanism.l2_norm_clip, mechanism.error_norm_clip
        smallest = {
            "l2_norm_clip": (min(t for t in thresholds if t), "clip", SMALLEST_THRESHOLD),
            "noise_multiplier": (mechanism.noise_multiplier, "noise", SMALLEST_NOISE),
        }
        for name, (value, kind, least) in smallest.items():
            factor = min(getattr(self, f"{kind}_factors"))
            if 0 < value * factor < least:
                raise MechanismError(
                    f"Argument `{kind}_factors` makes `{name}` too small: below {least:g} float32 "
                    f"does not tell it from 0. Received: a factor of {factor:g} with "
                    f"{value:g}. Take larger factors."
                )

    def smallest_noise(self, first: int, last: int) -> float:
        """Returns the smallest noise factor of the steps from `first` to `last`.

        Args:
            first: Int >= 0.
            last: Int >= `first`, included.
        """
        start, end = (bisect.bisect_right(self.boundaries, step) for step in (first, last))
        return min(self.noise_factors[start : end + 1])

    def factors_at(self, step: Any) -> tuple[Any, Any]:
        """Returns the factors of one step, as float32 scalar tensors: of noise, of thresholds.

        Args:
            step: Integer scalar tensor.
        """
        passed = tf.cast(step, tf.int64) >= tf.constant(self.boundaries, tf.int64)
        piece = tf.reduce_sum(tf.cast(passed, tf.int32))
        tables = self.noise_factors, self.clip_factors
        noise, clip = (tf.gather(tf.constant(table, tf.float32), piece) for table in tables)
        return noise, clip

    def get_config(self) -> dict[str, Any]:
        """Returns the arguments of the class, as JSON has them."""
        return {name: list(value) for name, value in dataclasses.asdict(self).items()}


def schedule_of(value: Any) -> PiecewiseSchedule | None:
    """Returns the schedule that a value of the argument `schedule` is, or was written from.

    Args:
        value: `PiecewiseSchedule`, its `get_config()`, or `None`.

    Raises:
        MechanismError: If it is none of them.
    """
    names = {field.name for field in dataclasses.fields(PiecewiseSchedule)}
    if isinstance(value, dict) and set(value) == names:
        return PiecewiseSchedule(**value)
    # The exact type: a derived class may have other factors.
    if value is None or type(value) is PiecewiseSchedule:
        return value
    raise MechanismError(
        "Argument `schedule` must be a `dice_tf.PiecewiseSchedule` or None: epsilon has to know "
        f"the noise of every step. Received: schedule={value!r} (of type {type(value).__name__})."
    )
