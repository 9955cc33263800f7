# Copyright 2026 The dice_tf Authors.
# SPDX-License-Identifier: Apache-2.0
"""What a gradient engine returns: two weighted sums of per-example gradients."""

from typing import Any, NamedTuple

import tensorflow as tf


class GradientSums(NamedTuple):
    r"""Weighted sums of per-example gradients of one batch (or one replica's share).

    Attributes:
        head: List with one entry per trainable variable of the model, in the order of
            `model.trainable_variables`: the float32 tensor \(\sum_i a_i g_i\), of the
            variable's shape, or `None` if the loss does not depend on the variable.
        residual: The same for \(\sum_i b_i g_i\), or `None` when no residual is wanted.
        losses: Float32 `[batch]`, the per-example losses, sample weights included.
        y_pred: The model's outputs for the batch, for metrics.
        norms: Float32 `[units]`, the norms of the per-example gradients over all
            trainable variables, or `[units, groups]`, over those of each group. Private:
            never logged or stored.
    """

    head: list[tf.Tensor | None]
    residual: list[tf.Tensor | None] | None
    losses: tf.Tensor
    y_pred: Any
    norms: tf.Tensor
