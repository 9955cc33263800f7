# Copyright 2026 The dice_tf Authors.
# SPDX-License-Identifier: Apache-2.0
"""The loss of each example, from whatever loss the model was compiled with.

Keras reduces losses over the batch; clipping needs one value per example that
depends on that example alone. The rule: an example's loss is what the compiled loss
gives on a batch that holds only this example. Reductions therefore mean

* `"sum_over_batch_size"`, `"mean"`, `"none"`: the mean over the example's own entries
  (time steps, pixels); entries that a Keras mask hides do not count;
* `"sum"`: the sum over the example's own entries. The update still averages over
  examples: dividing by the public batch size is what noise is calibrated to;
* `"mean_with_sample_weight"`: refused, because it divides by the weights of the others.
"""

import functools

import keras
import keras.src
import tensorflow as tf

from dice_tf.checks.assignments import Assignments
from dice_tf.engine.grouped_convolutions import natively
from dice_tf.engine.overrides import shallow_copy
from dice_tf.errors import LossError

_MEAN_REDUCTIONS = ("sum_over_batch_size", "mean", "none", None)
# Any number that no real layer width is likely to equal.
_PROBE_BATCH_SIZE = 8191


def per_example_losses(model, x, y, y_pred, sample_weight):
    r"""Returns the compiled loss of every example, sample weights included.

    \[\ell_i = \sum_{o} \lambda_o\, w_i\, \ell_o(y_i^{(o)}, \hat y_i^{(o)})\]

    over outputs \(o\) with `loss_weights` \(\lambda_o\); the gradient of \(\ell_i\) is
    what is clipped, so a sample weight scales the gradient before clipping.

    Args:
        model: A compiled and built Keras model.
        x: Inputs of the batch (unused by stock losses, named in errors only).
        y: Targets, as given to `fit`.
        y_pred: Outputs of the model for the batch.
        sample_weight: `None`, a `[batch, ...]` tensor, or a structure of them.

    Returns:
        Float32 `[batch]`, the total loss of each example.

    Raises:
        LossError: If no loss was compiled, `compute_loss` is overridden, or a loss has no
            value per example.

    The compiled loss must be built (`compiled_loss(model).built`).
    """
    del x
    return _evaluate(model, y, y_pred, sample_weight)[0]


def call_in_training(model, x):
    """Calls a model as Keras does in a training step.

    Args:
        model: A Keras model, with or without a `training` argument in its `call`.
        x: Inputs of the batch.

    Returns:
        The model's outputs.
    """
    with natively(model):
        return model(x, training=True) if model._call_has_training_arg else model(x)


def individual_losses(model, y, y_pred, sample_weight):
    """Returns each compiled loss on its own, for Keras' metrics per output.

    Args:
        model: A compiled and built Keras model.
        y: Targets of the batch.
        y_pred: Outputs of the model for the batch.
        sample_weight: As in `per_example_losses`.

    Returns:
        List of float32 `[batch]`, one per loss in the order Keras tracks them, without
        `loss_weights`.
    """
    return _evaluate(model, y, y_pred, sample_weight)[1]


def check_losses(model, y, y_pred, sample_weight):
    """Raises if a compiled loss has no value per example, before any step is taken.

    Args:
        model: A compiled Keras model.
        y: Targets of a batch, as `keras.KerasTensor`s.
        y_pred: Outputs of the model, as `keras.KerasTensor`s.
        sample_weight: `None`, or weights as `keras.KerasTensor`s.

    Raises:
        LossError: Naming the loss, what is wrong with it and what to do.
    """
    compiled = compiled_loss(model)
    for loss in keras.tree.flatten(compiled._user_loss):
        _refuse_coupled_loss(loss)
    if not compiled.built:
        # Without weights: Keras cannot multiply one per example by the mask of `ignore_class`.
        keras.src.backend.compute_output_spec(
            model._compute_loss, None, y, y_pred, sample_weight=None, training=False
        )
    scope = Assignments()

    def losses(*batch):
        with scope:
            return _evaluate(model, *batch, check=_check_one_value_per_example)[0]

    keras.src.backend.compute_output_spec(losses, y, y_pred, sample_weight)
    assigned = scope.names()
    if assigned:
        raise LossError(
            f"The loss of model '{model.name}' assigns {assigned}. What a loss keeps of one batch "
            "changes the gradients of later ones, without clipping or noise. Compute the loss of "
            "an example from its own targets and outputs alone."
        )


def regularization_gradients(variables):
    """Returns the summed weight penalty and its gradient for every variable.

    Args:
        variables: Trainable Keras variables, with or without a `regularizer`.

    Returns:
        Pair of the scalar penalty and a list with a tensor or `None` per variable. The
        penalty depends on no example, so its gradient is added after clipping, un-noised.
    """
    penalised = [v for v in variables if v.regularizer is not None]
    if not penalised:
        return tf.zeros([]), [None] * len(variables)
    with tf.GradientTape(watch_accessed_variables=False) as tape:
        tape.watch([v.value for v in penalised])
        penalty = tf.add_n([tf.cast(v.regularizer(v), tf.float32) for v in penalised])
    gradients = dict(
        zip(map(id, penalised), tape.gradient(penalty, [v.value for v in penalised]), strict=True)
    )
    return penalty, [gradients.get(id(v)) for v in variables]


def compiled_loss(model):
    """Returns the loss a model was compiled with.

    Args:
        model: A compiled Keras model.

    Returns:
        Keras' container of the compiled losses.

    Raises:
        LossError: If there is none, or the model computes its loss itself.
    """
    if type(model).compute_loss is not keras.Model.compute_loss:
        raise LossError(
            f"Model '{model.name}' ({type(model).__name__}) overrides `compute_loss`, which "
            "returns one number for the batch, so its gradient cannot be clipped per example. "
            "Pass the loss to `compile(loss=...)` instead."
        )
    compiled = getattr(model, "_compile_loss", None)
    if compiled is None:
        raise LossError(
            f"Model '{model.name}' was compiled without a loss (received: loss=None). Private "
            "training needs one loss value per example: pass `loss=...` to `compile`."
        )
    return compiled


def _evaluate(model, y, y_pred, sample_weight, check=None):
    compiled = compiled_loss(model)
    recorded = []
    per_example = shallow_copy(compiled)
    per_example._flat_losses = [
        flat._replace(loss=functools.partial(_record, recorded, flat.loss, check))
        for flat in compiled._flat_losses
    ]
    # The copy keeps Keras' matching of targets to outputs, but must not feed a vector
    # to metrics that expect the batch mean.
    per_example._metrics = [None] * len(compiled._flat_losses)
    try:
        total = per_example.call(y, y_pred, sample_weight)
    except (KeyError, IndexError, TypeError) as error:
        if not isinstance(sample_weight, (dict, list, tuple)):
            raise
        raise LossError(
            "Argument `sample_weight` must have an entry for every output with a loss of model "
            f"'{model.name}', in the structure of its outputs. Received: "
            f"{_shape_of(sample_weight)}, which gives {type(error).__name__}: {error}. An entry "
            "`None` is weight 1."
        ) from error
    return tf.cast(total, tf.float32), recorded


def _shape_of(structure):
    if isinstance(structure, dict):
        return f"a dict with entries {sorted(structure)}"
    return f"a {type(structure).__name__} of {len(structure)} entries"


def _record(recorded, loss, check, y_true, y_pred, sample_weight):
    convert = lambda t: keras.ops.convert_to_tensor(t, dtype=loss.dtype)
    mask = getattr(y_pred, "_keras_mask", None)
    y_pred = keras.tree.map_structure(convert, y_pred)
    y_true = keras.tree.map_structure(convert, y_true)
    if check is not None:
        check(loss, y_true, y_pred)
    values = tf.cast(loss.call(y_true, y_pred), tf.float32)
    out_mask = getattr(values, "_keras_mask", None)
    if out_mask is not None:
        mask = out_mask if mask is None else tf.logical_and(mask, out_mask)
    recorded.append(_reduce_entries(values, sample_weight, mask, sums=loss.reduction == "sum"))
    return recorded[-1]


def _refuse_coupled_loss(loss):
    """Refuses losses that are known to couple examples, or that hide their values."""
    if not isinstance(loss, keras.losses.Loss):
        return
    if loss.reduction not in (*_MEAN_REDUCTIONS, "sum"):
        raise LossError(
            f"Loss '{loss.name}' has reduction={loss.reduction!r}, which divides by a total over "
            "the batch and so couples examples. Use reduction='sum_over_batch_size' or 'sum'."
        )
    if type(loss).__call__ is not keras.losses.Loss.__call__:
        raise LossError(
            f"Loss '{loss.name}' ({type(loss).__name__}) overrides `__call__`. dice_tf evaluates "
            "losses through `call`, which must return one value per example: override that."
        )
    if isinstance(loss, keras.losses.Circle):
        raise LossError(
            f"Loss '{loss.name}' (Circle) compares the examples of a batch with each other, so "
            "one example cannot be clipped on its own. Use a loss that looks at each alone."
        )


def _check_one_value_per_example(loss, y_true, y_pred):
    """Refuses losses that return one number, or another axis, instead of the batch axis."""

    def probe(tensor):
        return keras.KerasTensor((_PROBE_BATCH_SIZE, *tensor.shape[1:]), dtype=tensor.dtype)

    spec = keras.src.backend.compute_output_spec(
        loss.call,
        keras.tree.map_structure(probe, y_true),
        keras.tree.map_structure(probe, y_pred),
    )
    if not spec.shape or spec.shape[0] != _PROBE_BATCH_SIZE:
        shape = tuple("batch" if d == _PROBE_BATCH_SIZE else d for d in spec.shape)
        raise LossError(
            f"Loss '{loss.name}' must return one value per example, with shape (batch, ...). "
            f"Received shape {shape}: a value for the whole batch cannot be clipped per example. "
            "Return the unreduced values and let `reduction` do the rest."
        )


def _reduce_entries(values, sample_weight, mask, *, sums):
    """Reduces `[batch, ...]` values to `[batch]` over each example's own entries."""
    entries = list(range(1, values.shape.rank))
    count = tf.cast(tf.reduce_prod(tf.shape(values)[1:]), tf.float32)
    if sample_weight is not None:
        values = values * _align(tf.cast(sample_weight, tf.float32), values)
    if mask is not None:
        # A loss of whole sequences, such as CTC, has one entry: hidden if all steps are.
        steps = list(range(max(1, values.shape.rank), mask.shape.rank))
        mask = tf.reduce_any(tf.cast(mask, tf.bool), steps) if steps else mask
        mask = _align(tf.cast(mask, tf.float32), values) * tf.ones_like(values)
        # where, not multiplication: a hidden entry may be infinite.
        values = tf.where(mask > 0, values, tf.zeros_like(values))
        count = tf.reduce_sum(mask, entries)
    total = tf.reduce_sum(values, entries) if entries else values
    return total if sums else tf.math.divide_no_nan(total, count)


def _align(weights, values):
    """Gives `[batch]`, `[batch, 1]` or `[batch, time]` weights the rank of `values`."""
    while weights.shape.rank > values.shape.rank and weights.shape[-1] == 1:
        weights = tf.squeeze(weights, -1)
    if weights.shape.rank > values.shape.rank:
        raise LossError(
            f"Argument `sample_weight` has shape {tuple(weights.shape)}, which has more dimensions "
            f"than the loss values, {tuple(values.shape)}. Give one weight per example."
        )
    while weights.shape.rank < values.shape.rank:
        weights = tf.expand_dims(weights, -1)
    return weights
