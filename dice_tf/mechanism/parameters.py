# Copyright 2026 The dice_tf Authors.
# SPDX-License-Identifier: Apache-2.0
"""`DiceMechanism`: the parameters that decide what privacy a run has.

Everything that enters epsilon and is not about how data is drawn lives here,
validated once, so that the optimizer that trains and the accountant that
reports cannot hold different values.
"""

import dataclasses
import math
from typing import Any

from dice_tf.checks.arguments import check_integer, check_number
from dice_tf.errors import MechanismError
from dice_tf.mechanism import clip_rules
from dice_tf.mechanism.adaptive import AdaptiveClipping
from dice_tf.mechanism.clipping import SMALLEST_THRESHOLD, Clip
from dice_tf.mechanism.schedules import SMALLEST_NOISE, PiecewiseSchedule, schedule_of

__all__ = ["DiceMechanism"]

# Default of numbers that follow from others. `Any`, because nobody reads `None` there.
_FOLLOWS: Any = None
# How to choose what has no default.
_ADVICE = {
    "l2_norm_clip": "`l2_norm_clip` bounds the norm of the gradient of one example (0.1 to 1 "
    'suits many models); clipping="automatic" needs none.',
    "noise_multiplier": "`noise_multiplier` follows from a privacy budget: "
    "`accounting.calibrate_noise_multiplier(target_epsilon, delta, sampling, steps)`.",
    "expected_batch_size": "`expected_batch_size` is that of the sampling object, or the "
    "`batch_size` of `fit`.",
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class DiceMechanism:
    r"""The differential privacy parameters of one DiceSGD optimizer.

    With \(C_1\) = `l2_norm_clip`, \(C_2\) = `error_norm_clip`, \(z\) =
    `noise_multiplier` and \(B\) = `expected_batch_size`, the noise added to the
    mean of clipped gradients has standard deviation \(\sigma_1 = z C_1 / B\) per
    coordinate.

    Args:
        l2_norm_clip: Float >= 1e-12, the clipping threshold \(C_1\) of a per-example
            gradient, over all trainable variables at once, in units of the gradient. With
            `clipping="automatic"` it is 1 and need not be given.
        noise_multiplier: Float >= 1e-30 or 0, noise standard deviation on the sum of clipped
            gradients divided by `l2_norm_clip`, as in TF-Privacy. 0 gives no privacy.
        expected_batch_size: Int > 0, the public constant that sums are divided by;
            never the number of examples that a batch happens to hold.
        error_norm_clip: Float >= 1e-12 or 0, the threshold \(C_2\) of the residual (bounded
            form) or of the fed-back error (unbounded form). `None` means
            `l2_norm_clip`; 0 means no error feedback, which is plain DP-SGD.
        bound_residuals: Whether each example's residual is clipped to
            `error_norm_clip` before it enters the error (`True`), or the error itself
            is clipped when it is fed back (`False`, Alg. 1 to the letter).
        clipping: `"flat"`, one threshold for the whole gradient; `"automatic"`, the
            gradient over its own norm: \(C_1 = 1\) whatever its units, and \(C_2\) is 1,
            or 0 for no error feedback; `"per_layer"`, equal shares of both thresholds for
            every layer, or `PerLayerClipping(proportions)`; `"adaptive"` or an
            `AdaptiveClipping`, thresholds that begin at these and follow a quantile of norms.
            See `docs/error_feedback.md` and `docs/adaptive_clipping.md`.
        feedback_steps: Int >= 1, over how many later steps a residual is fed back.
        num_microbatches: Int or `None`. If given, the clipped unit is the mean
            gradient of one of `num_microbatches` equal microbatches, as in TF-Privacy.
        rows_per_unit: Int >= 1, the number of consecutive rows of a batch that are one unit:
            views of an example, or rows of one person. The unit's mean gradient is clipped, and
            `expected_batch_size` counts units.
        schedule: `PiecewiseSchedule` of noise and thresholds, or `None` for constant ones.
        noise_is_secret: Whether the noise key is unpredictable. `False` when it came
            from a seed; the privacy statement then says so.

    Raises:
        MechanismError: If a value is out of range or values contradict each other.

    Example:

    >>> mechanism = DiceMechanism(
    ...     l2_norm_clip=0.25, noise_multiplier=2.0, expected_batch_size=500)
    >>> mechanism.noise_stddev
    0.001
    >>> round(mechanism.sensitivity(separate_entries=True), 4)
    0.3536

    Source: Zhang et al., ICLR 2024, Alg. 1 (`l2_norm_clip`, `error_norm_clip`,
    `noise_stddev` are its C1, C2, sigma_1).
    """

    l2_norm_clip: float = _FOLLOWS
    noise_multiplier: float
    expected_batch_size: int
    error_norm_clip: float = _FOLLOWS
    bound_residuals: bool = True
    clipping: str | Clip = "flat"
    feedback_steps: int = 1
    num_microbatches: int | None = None
    rows_per_unit: int = 1
    schedule: PiecewiseSchedule | None = None
    noise_is_secret: bool = True

    def __post_init__(self) -> None:
        store = lambda name, value: object.__setattr__(self, name, value)
        store("clipping", clip_rules.canonical(self.clipping))
        if self.l2_norm_clip is None:
            store("l2_norm_clip", self.clip.threshold)
        missing = [name for name in _ADVICE if getattr(self, name) is None]
        if missing:
            raise MechanismError(
                "Privacy depends on every one of the arguments that are missing, and no default "
                f"suits all data. Received: {', '.join(f'{name}=None' for name in missing)}. "
                + " ".join(_ADVICE[name] for name in missing)
            )
        smallest = {"minimum": SMALLEST_THRESHOLD, "exclusive": False}
        store("l2_norm_clip", check_number("l2_norm_clip", self.l2_norm_clip, **smallest))
        if self.error_norm_clip is None:
            store("error_norm_clip", self.l2_norm_clip)
        for name in ("error_norm_clip", "noise_multiplier"):
            store(name, check_number(name, getattr(self, name), exclusive=False))
        if self.error_norm_clip > 0:
            check_number("error_norm_clip", self.error_norm_clip, **smallest)
        if self.noise_multiplier > 0:
            smallest["minimum"] = SMALLEST_NOISE
            check_number("noise_multiplier", self.noise_multiplier, **smallest)
        for name in ("expected_batch_size", "feedback_steps", "rows_per_unit"):
            store(name, check_integer(name, getattr(self, name)))
        store("bound_residuals", bool(self.bound_residuals))
        self.clip.check(self)
        store("schedule", schedule_of(self.schedule))
        if self.schedule is not None:
            self.schedule.check(self)
        if self.feedback_steps > 1 and not self.bound_residuals:
            raise MechanismError(
                "Argument `feedback_steps` above 1 needs `bound_residuals=True`: only bounded "
                "residuals can be fed back in parts with a known sensitivity. Received: "
                f"feedback_steps={self.feedback_steps}, bound_residuals={self.bound_residuals!r}."
            )
        if self.num_microbatches is not None and self.rows_per_unit > 1:
            raise MechanismError(
                "Arguments `num_microbatches` and `rows_per_unit` exclude each other: the rows of "
                "a unit are one example's or one person's, those of a microbatch are anybody's. "
                f"Received: num_microbatches={self.num_microbatches}, "
                f"rows_per_unit={self.rows_per_unit}. Leave one of them out."
            )
        if self.num_microbatches is not None:
            store("num_microbatches", check_integer("num_microbatches", self.num_microbatches))
            if self.expected_batch_size % self.num_microbatches:
                raise MechanismError(
                    "Argument `num_microbatches` must divide `expected_batch_size`. Received: "
                    f"num_microbatches={self.num_microbatches}, "
                    f"expected_batch_size={self.expected_batch_size}."
                )

    @property
    def clip(self) -> Clip:
        """The rule of clipping that `clipping` names."""
        return clip_rules.rule_of(self.clipping)

    @property
    def moves(self) -> bool:
        """Whether thresholds or noise change from step to step."""
        return self.schedule is not None or isinstance(self.clip, AdaptiveClipping)

    @property
    def count_noise_multiplier(self) -> float:
        """Noise on the counts of adaptive thresholds, over how far one unit moves them.

        Infinite if nothing is counted.
        """
        clip = self.clip
        return clip.count_noise(self.divisor) if isinstance(clip, AdaptiveClipping) else math.inf

    @property
    def microbatch_size(self) -> int:
        """Number of examples whose mean gradient is clipped as one unit."""
        if self.num_microbatches is None:
            return 1
        return self.expected_batch_size // self.num_microbatches

    @property
    def rows_clipped_together(self) -> int:
        """Number of rows whose mean gradient is clipped: of a unit, or of a microbatch."""
        return max(self.rows_per_unit, self.microbatch_size)

    @property
    def divisor(self) -> int:
        """The public constant that sums over clipped units are divided by."""
        return self.expected_batch_size // self.microbatch_size

    @property
    def noise_stddev_of_sum(self) -> float:
        """Noise standard deviation per coordinate, on the sum of clipped gradients."""
        return self.noise_multiplier * self.l2_norm_clip

    @property
    def noise_stddev(self) -> float:
        """Noise standard deviation per coordinate, on the mean (Alg. 1 line 6, sigma_1)."""
        return self.noise_stddev_of_sum / self.divisor

    def sensitivity(
        self, *, separate_entries: bool, noise_factors: tuple[float, float] | None = None
    ) -> float:
        r"""How far one example can move the released sums, in the l2 norm.

        One entry of an example moves the release of its own step by at most
        \(C_1\) and each of the next \(s\) = `feedback_steps` releases by at most
        \(C_2 / s\). If the example cannot enter again within those steps, the
        whole window moves by at most \(\sqrt{C_1^2 + C_2^2 / s}\). If it can, the
        parts may add up in one release, and only \(C_1 + C_2\) is certain.

        With adaptive thresholds the noisy counts are released, too. In units of the noise of
        gradients they add \(z C_1 / y\) in quadrature. With a schedule, heads meet \(a\) times
        the noise, residuals at least \(a'\) times:

        \[S^2 = \frac{C_1^2}{a^2} + \frac{C_2^2}{s\, a'^2} + \frac{(z C_1)^2}{y^2}
          \quad\text{or}\quad
          (C_1 + C_2)\Bigl(\frac{C_1}{a^2} + \frac{C_2}{a'^2}\Bigr) + \frac{(z C_1)^2}{y^2}.\]

        Args:
            separate_entries: Whether two entries of one example are always more than
                `feedback_steps` steps apart, as `CyclicPoissonSampling` guarantees.
            noise_factors: Pair of floats, \(a\) and \(a'\). `None`: the smallest of the schedule.

        Returns:
            Float, in units of the gradient, on the scale of the sum (so
            `noise_stddev_of_sum / sensitivity` is the effective noise multiplier).
            Doubled when `num_microbatches` is set, because exchanging one example
            turns one clipped mean into any other; with Poisson sampling the accountant
            doubles it once more.

        Raises:
            MechanismError: If residuals are unbounded: one example then moves the
                clipped error by up to `2 * error_norm_clip` at every later step, and
                `dice_tf.accounting` treats that case separately.

        Example:

        >>> mechanism = DiceMechanism(
        ...     l2_norm_clip=3.0, error_norm_clip=4.0, noise_multiplier=1.0,
        ...     expected_batch_size=500)
        >>> [mechanism.sensitivity(separate_entries=separate) for separate in (True, False)]
        [5.0, 7.0]
        """
        if not self.bound_residuals and self.error_norm_clip > 0:
            raise MechanismError(
                "The sensitivity of one entry is not finite in time with bound_residuals=False and "
                f"error_norm_clip={self.error_norm_clip}: one example can move every later step. "
                "Use `accounting.compute_epsilon`, which accounts for it step by step."
            )
        units = 1.0 if self.num_microbatches is None else 2.0
        head, residual = self.l2_norm_clip, self.error_norm_clip
        if self.moves:
            return units * self._moving_sensitivity(separate_entries, noise_factors)
        if separate_entries:
            return units * math.hypot(head, residual / math.sqrt(self.feedback_steps))
        return units * (head + residual)

    def _moving_sensitivity(self, separate_entries, noise_factors):
        head, residual = self.l2_norm_clip, self.error_norm_clip
        if noise_factors is None:
            schedule = self.schedule
            noise_factors = (1.0 if schedule is None else min(schedule.noise_factors),) * 2
        of_head, of_residual = noise_factors
        if separate_entries:
            parts = head / of_head, residual / (math.sqrt(self.feedback_steps) * of_residual)
        else:
            total = head + residual
            parts = math.sqrt(total * head) / of_head, math.sqrt(total * residual) / of_residual
        return math.hypot(*parts, self.noise_stddev_of_sum / self.count_noise_multiplier)


# The arguments of an optimizer that decide its privacy; its seed decides the remaining field.
PRIVACY_ARGUMENTS = tuple(
    field.name for field in dataclasses.fields(DiceMechanism) if field.name != "noise_is_secret"
)
