# Copyright 2026 The dice_tf Authors.
# SPDX-License-Identifier: Apache-2.0
"""What a gradient engine is: from a batch to norms, and from weights to sums.

Two of them exist: `layerwise`, the fast one, and `vectorized`, the reference. An engine knows
nothing of privacy: `clip_weights` decides how long gradients may be.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

from dice_tf.engine.gradient_sums import GradientSums
from dice_tf.engine.units import SINGLE_ROWS, Units

# From norms to the weights a and b (or `None`), both of the shape of the norms.
ClipWeights = Callable[[Any], tuple[Any, Any]]


class Engine(Protocol):
    r"""Function from a batch to \(\sum_i a_i g_i\) and \(\sum_i b_i g_i\)."""

    def __call__(
        self,
        model: Any,
        x: Any,
        y: Any,
        sample_weight: Any,
        clip_weights: ClipWeights,
        units: Units = SINGLE_ROWS,
        *,
        groups: Sequence[int] | None = None,
    ) -> GradientSums:
        r"""Computes the sums.

        Args:
            model: A built and compiled Keras model.
            x: Inputs, `[batch, ...]`.
            y: Targets, `[batch, ...]`.
            sample_weight: `None` or `[batch, ...]`.
            clip_weights: Called once, with the norms of the gradients \(g_i\) of the clipped
                units: float32 `[units]`, or `[units, groups]`. A unit with a norm that is not
                finite, in any group, must get weights of 0, and then contributes nothing.
            units: How rows make up the units that are clipped.
            groups: For every trainable variable of the model, in order, the number of the group
                whose weights it gets, from 0 on. `None`: norms over all variables at once.

        Returns:
            A `GradientSums`.
        """
        ...


def split_by_group(norms: Any, weights: Sequence[Any], groups: Sequence[int] | None) -> list[Any]:
    """Returns, for every group, its norms and the list of its weights, `[units]` each.

    Args:
        norms: Float32 `[units]`, or `[units, groups]`.
        weights: List of tensors of that shape.
        groups: As an `Engine` has them.
    """
    if groups is None:
        return [(norms, list(weights))]
    columns = range(max(groups) + 1)
    return [(norms[:, n], [weight[:, n] for weight in weights]) for n in columns]
