# Copyright 2026 The dice_tf Authors.
# SPDX-License-Identifier: Apache-2.0
"""The rules that clip the gradient of an example as a whole: `"flat"` and `"automatic"`."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any, ClassVar

import tensorflow as tf

from dice_tf.errors import MechanismError
from dice_tf.mechanism import rounding
from dice_tf.mechanism.clipping import Clip

if TYPE_CHECKING:
    from dice_tf.mechanism import DiceMechanism

# Keeps a normalised gradient smooth at 0, where it has no direction (Bu et al., gamma).
STABILITY = 0.01


@dataclasses.dataclass(frozen=True)
class FlatClipping(Clip):
    r"""One pair of thresholds for the whole gradient, `clipping="flat"`.

    \[h_i = \mathrm{clip}(g_i, C_1), \qquad r_i = \mathrm{clip}(g_i - h_i, C_2)\]

    Source: Zhang et al., ICLR 2024, Alg. 1.
    """

    name: ClassVar[str] = "flat"


@dataclasses.dataclass(frozen=True)
class AutomaticClipping(Clip):
    r"""Every gradient over its own norm, `clipping="automatic"`: no thresholds to choose.

    With \(n_i = \lVert g_i \rVert\) and \(\gamma\) = `STABILITY`,

    \[a_i = \frac{1}{n_i + \gamma}, \qquad b_i = \min(1 - a_i, a_i) \text{ (bounded)}, \qquad
      b_i = 1 - a_i \text{ (unbounded)}.\]

    So the head is the normalised gradient, and the residual is what normalising took away,
    but not longer than the head; where it added (\(n_i + \gamma < 1\)) the residual is
    negative and takes it back. Both are below \(C_1 = C_2 = 1\), whatever the norm:
    \(a_i n_i = n_i / (n_i + \gamma) < 1\); a positive \(b_i\) is at most \(a_i\); a negative
    one is \(1 - a_i \ge -a_i\). They add up to \((a_i + b_i) g_i = \min(1, 2 a_i) g_i\), the
    gradient itself up to a norm of nearly 2.

    Example:

    >>> from dice_tf import DiceMechanism
    >>> from dice_tf.mechanism.clipping import clip_weights
    >>> automatic = DiceMechanism(
    ...     clipping="automatic", noise_multiplier=1.0, expected_batch_size=4)
    >>> head, residual = clip_weights(tf.constant([0.49, 1.59, 4.99]), automatic)
    >>> [round(float(a), 3) for a in head], [round(float(b), 3) for b in residual]
    ([2.0, 0.625, 0.2], [-1.0, 0.375, 0.2])

    Source: Zhang et al., ICLR 2024, appendix, automatic DiceSGD, which normalises gradients
    and error. Bu et al., "Automatic Clipping: Differentially Private Deep Learning Made Easier
    and Stronger", NeurIPS 2023 (gamma).
    """

    name: ClassVar[str] = "automatic"
    threshold: ClassVar[float | None] = 1.0
    sets_thresholds: ClassVar[bool] = True

    def check(self, mechanism: DiceMechanism) -> None:
        """Refuses thresholds."""
        thresholds = mechanism.l2_norm_clip, mechanism.error_norm_clip
        if thresholds not in ((1.0, 1.0), (1.0, 0.0)):
            raise MechanismError(
                'With clipping="automatic" every gradient is divided by its own norm, so there is '
                "no threshold to set: `l2_norm_clip` is 1, and `error_norm_clip` 1, or 0 for no "
                f"error feedback. Received: l2_norm_clip={thresholds[0]}, "
                f"error_norm_clip={thresholds[1]}. Leave them out, and set the size of "
                "steps by the learning rate."
            )

    def weights(self, norms: Any, c1: Any, c2: Any, bound_residuals: bool) -> tuple[Any, Any]:
        """Returns the weights of the formula above; both thresholds are 1."""
        head = 1.0 / (norms + STABILITY)
        residual = 1.0 - head
        return head, tf.minimum(residual, head) if bound_residuals else residual

    def bounded_error(self, errors: list[Any], c2: float) -> list[Any]:
        r"""Returns \(e / (\lVert e \rVert + \gamma)\), of a norm below \(C_2 = 1\)."""
        norm = rounding.RAISED * rounding.global_norm(errors)
        return [e / (norm + STABILITY) for e in errors]

    def statement(self) -> str:
        """Returns why the thresholds hold."""
        return (
            "Each gradient is divided by its own norm, and what is fed back is not longer than "
            "the result: the thresholds hold by construction."
        )
