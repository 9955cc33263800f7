# Copyright 2026 The dice_tf Authors.
# SPDX-License-Identifier: Apache-2.0
r"""How much of each per-example gradient is released now, and how much later.

A per-example gradient \(g_i\) is only ever multiplied by two scalars, both functions of its
norm: the head \(h_i = a_i g_i\) enters this step, the residual \(r_i = b_i g_i\) enters the
error that is fed back at the next ones. With groups of variables that is so for every group,
with the norm of the gradient of its variables. What is said here of an example holds for any
clipped unit, such as a microbatch.

A rule of clipping is a class derived from `Clip`. Its bound, which privacy rests
on, comes in two parts. The rule keeps head and residual of group \(l\) within the thresholds
\(p_l C_1\) and \(p_l C_2\) that `clip_weights` gives it, and the shares have
\(\sum_l p_l^2 = 1\). So over all variables they are at most \(C_1\) and \(C_2\) long, whatever
the groups.
"""

from __future__ import annotations

from collections.abc import Sequence
import math
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

import tensorflow as tf

from dice_tf.errors import MechanismError
from dice_tf.mechanism import rounding

if TYPE_CHECKING:
    from dice_tf.mechanism import DiceMechanism

# Smaller norms are not told from 0: in float32 their squares underflow.
SMALLEST_THRESHOLD = 1e-12
# Squares of shares may add up to more than 1 by this much, which is rounding in float64.
_SHARES_TOLERANCE = 1e-12


class VariableGroups(NamedTuple):
    r"""Which trainable variables are clipped together, and how the thresholds are shared out.

    Attributes:
        of_variables: The number of its group for every trainable variable of the model, in
            order, from 0 on.
        shares: One \(p_l > 0\) per group: its thresholds are \(p_l C_1\) and \(p_l C_2\). The
            sum of their squares is 1.
    """

    of_variables: tuple[int, ...]
    shares: tuple[float, ...]


class Clip:
    """A rule of clipping, and what most of them do: clip all variables as one, to thresholds.

    `dice_tf.mechanism.clip_rules` lists the rules that a mechanism takes: privacy rests on
    the bounds that `weights` and `bounded_error` promise, and nobody can see from outside
    whether a class keeps them.

    Attributes:
        name: What `clipping=` takes for the rule with its defaults.
        threshold: The only value that `l2_norm_clip` may have, or `None` for any.
        sets_thresholds: Whether the rule decides how thresholds change, so that no schedule may.
        residuals_of: Of what the residuals must be bounded, `None` if they need not be.
    """

    name: ClassVar[str]
    threshold: ClassVar[float | None] = None
    sets_thresholds: ClassVar[bool] = False
    residuals_of: ClassVar[str | None] = None

    def check(self, mechanism: DiceMechanism) -> None:
        """Refuses a mechanism whose parameters do not go with the rule.

        Raises:
            MechanismError: If they do not.
        """
        unbounded = mechanism.error_norm_clip > 0 and not mechanism.bound_residuals
        if unbounded and self.residuals_of is not None:
            raise MechanismError(
                f'clipping="{self.name}" bounds the residual of every {self.residuals_of}, so it '
                "needs bound_residuals=True, the default. Received: bound_residuals=False. Leave "
                'it out, or take clipping="flat".'
            )

    def groups(self, model: Any) -> VariableGroups | None:
        """Returns the groups of a model's trainable variables, `None` if all are one.

        Args:
            model: A built Keras model.

        Raises:
            MechanismError: If the rule does not fit the model.
        """
        return None

    def weights(self, norms: Any, c1: Any, c2: Any, bound_residuals: bool) -> tuple[Any, Any]:
        r"""Returns the head weights a and the residual weights b.

        They must have \(0 \le a n \le C_1\), and a = 0 where n is infinite. With
        `bound_residuals`, \(|b| n \le C_2\). Norms are raised already, so rounding is cared for.

        Args:
            norms: Float32 `[units]` or `[units, groups]`, n, at least 0, perhaps infinite.
            c1: Thresholds of heads: float, or float32 `[groups]`.
            c2: Thresholds of residuals, the same. 0 if there is no feedback.
            bound_residuals: Whether residuals are bounded.

        Returns:
            A pair of tensors like `norms`. Where n is infinite b may be anything.
        """
        return weights_at_thresholds(norms, c1, c2, bound_residuals)

    def bounded_error(self, errors: list[Any], c2: float) -> list[Any]:
        r"""Returns the part of an unbounded error that is fed back, at most \(C_2\) long.

        Args:
            errors: List of float32 tensors, the error e of all variables, as one vector.
            c2: Float > 0.
        """
        return clip_by_global_norm(errors, c2)

    def statement(self) -> str | None:
        """Returns what the privacy statement says of the rule, `None` for nothing."""
        return None

    def get_config(self) -> dict[str, Any]:
        """Returns the arguments of the class, as JSON has them."""
        return {}


def clip_weights(
    norms, mechanism: DiceMechanism, groups: VariableGroups | None = None, factors=None
):
    r"""Returns the head and residual weight of every per-example gradient.

    With \(n_i = \lVert g_i \rVert\) and flat clipping:

    \[a_i = \min(1, C_1 / n_i), \qquad
      b_i = \min(1 - a_i, C_2 / n_i) \text{ (bounded residuals)}, \qquad
      b_i = 1 - a_i \text{ (unbounded)}.\]

    Other rules have formulas of their own, see `AutomaticClipping` and `PerLayerClipping`.
    What they have in common is here.

    In place of \(n_i\) stands \((1 + 10^{-5}) n_i\) (`dice_tf.mechanism.rounding`), more than
    rounding can have taken off a norm and can add to a weight and its products: whatever the
    processor, the exact norms of the weighted gradients are at most \(C_1\) and \(C_2\).

    Args:
        norms: Float32 `[units]`, norms over all trainable variables at once, or, with groups,
            float32 `[units, groups]`, norms over the variables of each.
        mechanism: The thresholds \(C_1\), \(C_2\) and the form of the algorithm.
        groups: What `mechanism.clip.groups` returned for the model.
        factors: Float32 `[groups]`, what the thresholds of this step are those of the mechanism
            times, where they change (`[1]` without groups). `None`: 1.

    Returns:
        A pair of tensors like `norms`: head weights, and residual weights or `None` if
        `error_norm_clip` is 0. Both are 0 where a norm is not finite, and then in all groups
        of the example: a broken example contributes nothing, and so reveals nothing.

    Raises:
        MechanismError: If the threshold of a group is below 1e-12.

    Example:

    >>> from dice_tf import DiceMechanism
    >>> mechanism = DiceMechanism(
    ...     l2_norm_clip=1.0, error_norm_clip=0.5, noise_multiplier=1.0,
    ...     expected_batch_size=4)
    >>> head, residual = clip_weights(tf.constant([0.5, 1.25, 4.0, float("inf")]), mechanism)
    >>> [round(float(a), 3) for a in head], [round(float(b), 3) for b in residual]
    ([1.0, 0.8, 0.25, 0.0], [0.0, 0.2, 0.125, 0.0])

    Source: Zhang et al., ICLR 2024, Alg. 1 line 5, the first term of v (head) and
    line 7, the per-example part of the error (residual).
    """
    norms = tf.cast(norms, tf.float32)
    finite = tf.math.is_finite(norms)
    if groups is not None:
        finite = tf.reduce_all(finite, -1, keepdims=True)
    # Infinity makes all quotients 0 without a special case; NaN would survive.
    norms = tf.where(finite, rounding.RAISED * norms, float("inf"))
    c1, c2 = thresholds(mechanism, groups, factors)
    head, residual = mechanism.clip.weights(norms, c1, c2, mechanism.bound_residuals)
    if mechanism.error_norm_clip == 0:
        return head, None
    return head, tf.where(finite, residual, tf.zeros_like(residual))


def thresholds(mechanism: DiceMechanism, groups: VariableGroups | None, factors=None):
    """Returns C1 and C2, as numbers or as one number per group, times the factors of a step.

    Args:
        mechanism: The thresholds of the whole.
        groups: As for `clip_weights`, like `factors`.
        factors: Float32 `[groups]` or `None`.

    Raises:
        MechanismError: As `clip_weights`.
    """
    totals = mechanism.l2_norm_clip, mechanism.error_norm_clip
    if groups is None:
        return totals if factors is None else tuple(total * factors for total in totals)
    if math.fsum(share**2 for share in groups.shares) > 1 + _SHARES_TOLERANCE:
        raise MechanismError(
            "The squares of the shares of thresholds must add up to 1: otherwise one example moves "
            f"a release by more than C1 and C2. Received: shares={groups.shares}."
        )
    smallest = min(groups.shares) * min(total for total in totals if total > 0)
    if mechanism.schedule is not None:
        smallest *= min(mechanism.schedule.clip_factors)
    if not smallest >= SMALLEST_THRESHOLD:
        raise MechanismError(
            f"The threshold of a group of variables must be at least {SMALLEST_THRESHOLD:g}, for "
            f"smaller norms are not told from 0. Received: {smallest:g} with "
            f"clipping={mechanism.clipping!r}, l2_norm_clip={totals[0]}, "
            f"error_norm_clip={totals[1]}. Take larger thresholds or more even proportions."
        )
    each = (tf.constant([p * total for p in groups.shares], tf.float32) for total in totals)
    return tuple(each if factors is None else (values * factors for values in each))


def clip_by_global_norm(tensors: Sequence[Any], threshold: float) -> list[Any]:
    r"""Scales tensors so that their joint norm is at most `threshold`.

    \[\mathrm{clip}(e, C) = \min(1, C / \lVert e \rVert)\, e\]

    The norm is raised by `dice_tf.mechanism.rounding.MARGIN`, so that rounding never makes the
    result longer than the threshold.

    Args:
        tensors: List of float32 tensors, taken as one vector.
        threshold: Float > 0.

    Returns:
        List of tensors of the same shapes.

    Source: Zhang et al., ICLR 2024, Alg. 1, the operator clip.
    """
    norm = rounding.RAISED * rounding.global_norm(tensors)
    factor = tf.where(norm > threshold, tf.math.divide_no_nan(threshold, norm), tf.ones_like(norm))
    return [factor * t for t in tensors]


def weights_at_thresholds(norms, c1, c2, bound_residuals):
    r"""Returns the weights of clipping to thresholds, those of `clip_weights` above.

    Since \(\lVert g_i - a_i g_i \rVert = (1 - a_i) n_i\), the bounded \(b_i g_i\) is
    exactly \(\mathrm{clip}(g_i - \mathrm{clip}(g_i, C_1), C_2)\).

    Args:
        norms: As `Clip.weights` has them, like the other arguments.
        c1: Thresholds of heads.
        c2: Thresholds of residuals.
        bound_residuals: Whether residuals are bounded.
    """
    head = tf.minimum(1.0, tf.math.divide_no_nan(c1, norms))
    head = tf.where(norms > 0, head, tf.ones_like(head))
    residual = 1.0 - head
    if bound_residuals:
        within = tf.math.divide_no_nan(c2, norms)
        residual = tf.where(norms > 0, tf.minimum(residual, within), tf.zeros_like(residual))
    return head, residual
