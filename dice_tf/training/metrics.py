# Copyright 2026 The dice_tf Authors.
# SPDX-License-Identifier: Apache-2.0
"""Keras' training metrics for padded batches: rows of weight 0 do not count."""

import functools
import types

import keras
import tensorflow as tf

from dice_tf.engine.loss import individual_losses
from dice_tf.engine.overrides import shallow_copy
from dice_tf.engine.units import present_rows


def update_metrics(model, x, y, y_pred, sample_weight, losses, penalty):
    """Updates the model's loss and metrics, and returns what Keras shows.

    Samplers pad batches with examples of weight 0. Keras gives `metrics` (as opposed
    to `weighted_metrics`) no weights at all, so padding would count as data; here they
    get weight 1 for examples that are present and 0 for padding.

    Args:
        model: The model being trained.
        x: Inputs of the batch.
        y: Targets of the batch.
        y_pred: Outputs of the model.
        sample_weight: `None` or weights as given to `fit`.
        losses: Float32 `[batch]`, loss per example.
        penalty: Scalar, weight regularization, shown as part of the loss.

    Returns:
        Dict from metric name to value. These numbers are computed from the data without
        noise: they are for the person who trains, and not part of what is released.
    """
    present = present_rows(sample_weight, tf.shape(losses)[0])
    count = tf.reduce_sum(present)
    mean = lambda values: tf.math.divide_no_nan(tf.reduce_sum(values * present), count)
    model._loss_tracker.update_state(mean(losses) + penalty, sample_weight=count)
    if model._compile_loss.metrics:
        values = individual_losses(model, y, y_pred, sample_weight)
        for metric, value in zip(model._compile_loss.metrics, values, strict=True):
            metric.update_state(mean(value), sample_weight=count)
    if type(model).compute_metrics is not keras.Model.compute_metrics or sample_weight is None:
        return model.compute_metrics(x, y, y_pred, sample_weight=sample_weight)
    if model._compile_metrics is not None:
        _weight_unweighted(model._compile_metrics, y, y_pred, present).update_state(
            y, y_pred, sample_weight
        )
    return model.get_metrics_result()


def _weight_unweighted(compiled, y, y_pred, present):
    if not compiled.built:
        compiled.build(y, y_pred)
    duplicate = shallow_copy(compiled)
    # With the one method that Keras calls of them, without a weight.
    weighted = lambda metrics: types.SimpleNamespace(
        update_state=functools.partial(metrics.update_state, sample_weight=present)
    )
    duplicate.__dict__["_flat_metrics"] = [m and weighted(m) for m in compiled._flat_metrics]
    return duplicate
