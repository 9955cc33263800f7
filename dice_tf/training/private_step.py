# Copyright 2026 The dice_tf Authors.
# SPDX-License-Identifier: Apache-2.0
"""The private train step.

One iteration of the algorithm on a Keras model: checks, per-example gradients, the
optimizer's private update, metrics. `dice_tf.training.keras_trainer` makes `fit` use it.
"""

import functools
from typing import Any
import weakref

import keras
import keras.src
from keras.src.utils import io_utils
import tensorflow as tf

from dice_tf.checks import model_checks, precision, self_check
from dice_tf.distribution import multi_worker, strategies
from dice_tf.engine import chunks, layerwise, loss, memory, units, vectorized
from dice_tf.engine.engine import Engine
from dice_tf.errors import LossError, ModelError
from dice_tf.ledger import provenance
from dice_tf.mechanism.clipping import clip_weights
from dice_tf.training import dense, metrics, own_train_steps, rebuilding, thresholds
from dice_tf.training.run import Checks, private_optimizer, run_of

__all__ = ["check_gradients", "private_train_step"]

_NEED = "private step to take or to check"
# A gradient of 0 in so many batches is no accident of the first.
_MOST_BATCHES_TRIED = 20


@tf.autograph.experimental.do_not_convert
def private_train_step(model: keras.Model, data: Any) -> dict[str, Any]:
    """Takes one private training step: the step that `fit` takes.

    Args:
        model: A Keras model compiled with a private optimizer and a loss.
        data: A batch as `fit` gets it: `(x, y)` or `(x, y, sample_weight)`. Give all three
            elements of a sampler's batch: examples of weight 0 are padding.

    Returns:
        Dict from metric name to value, not private.

    Raises:
        DicePrivacyError: If the optimizer is not private, or the model or its loss cannot
            be trained privately.

    Example:

    >>> import dice_tf
    >>> model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
    >>> model.compile(dice_tf.DiceSGDOptimizer(
    ...     l2_norm_clip=1.0, noise_multiplier=1.0, expected_batch_size=8), loss="mse")
    >>> logs = private_train_step(model, (tf.ones([8, 4]), tf.ones([8, 1])))
    >>> sorted(logs), int(model.optimizer.iterations)
    (['loss'], 1)

    Source: Zhang et al., ICLR 2024, Alg. 1, one iteration.
    """
    optimizer = private_optimizer(model, _NEED)
    own_train_steps.note(model, data)
    strategies.check_replicas(model, data)
    x, y, sample_weight = unpack(model, data)
    precision.check_float32_products()
    units.check_whole(x, _units(optimizer.mechanism))
    _prepare(model, optimizer, x, y, sample_weight)
    if tf.executing_eagerly() and not tf.distribute.has_strategy():
        own_train_steps.check_first_marks(model, sample_weight)
        if run_of(model).needs_comparison(optimizer):
            _compare_until_settled(model, data)
    groups = optimizer.mechanism.clip.groups(model)
    sums = _mean_gradients(model, optimizer, x, y, sample_weight, groups)
    if all(head is None for head in sums.head):
        raise ModelError(f"The loss of model '{model.name}' depends on no trainable variable.")
    _check_same_gradients(model, sums)
    variables = model.trainable_variables
    penalty, penalty_gradients = loss.regularization_gradients(variables)
    rows_per_unit = optimizer.mechanism.rows_per_unit
    marks = provenance.count_marks(sample_weight, rows_per_unit)
    number = tf.shape(sums.losses)[0]
    rows = units.count_present(sample_weight, number, rows_per_unit)
    present = units.present_units(sample_weight, number, optimizer.mechanism.rows_clipped_together)
    optimizer.apply_private_update(sums, variables, penalty_gradients, marks, rows, groups, present)
    return metrics.update_metrics(model, x, y, sums.y_pred, sample_weight, sums.losses, penalty)


def check_gradients(model: keras.Model, data: Any) -> None:
    """Compares the per-example gradients of a few examples with their gradients alone.

    `fit`, `train_on_batch` and steps that are not compiled do this for every compiled model,
    before the first step, with the first batch that has something to compare. In a compiled
    loop of your own, call it before the first step.

    Args:
        model: A Keras model compiled with a private optimizer and a loss.
        data: A batch as `fit` gets it: `(x, y)` or `(x, y, sample_weight)`.

    Raises:
        GradientEngineError: If they differ: a layer or loss mixes examples, or a rule for a
            layer is wrong.
        ModelError: If the model has a layer that cannot be private, such as BatchNormalization.
        LossError: If the loss has no value per example.
        PlainGradientsError: If the optimizer is not private.

    Example:

    >>> import dice_tf
    >>> model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
    >>> model.compile(dice_tf.DiceSGDOptimizer(
    ...     l2_norm_clip=1.0, noise_multiplier=1.0, expected_batch_size=8), loss="mse")
    >>> check_gradients(model, (tf.ones([8, 4]), tf.ones([8, 1])))
    """
    private_optimizer(model, _NEED)
    multi_worker.check_workers_agree(model)
    if not _compare(*received_by_step(model, data)):
        self_check.warn_unchecked(model, batches=1)


def compare_gradients(model, data):
    """Does what `check_gradients` does, without a warning until many batches compared nothing.

    Args:
        model: A Keras model compiled with a private optimizer and a loss.
        data: A batch as `fit` gets it. All workers must make this call.
    """
    stepping, received = received_by_step(model, data)
    run_of(model).steps_others |= stepping is not model
    _compare_until_settled(stepping, received)


def _compare_until_settled(model, data):
    if _compare(model, data):
        return
    checks = run_of(model).checks
    checks.batches_tried += 1
    if checks.batches_tried == _MOST_BATCHES_TRIED:
        self_check.warn_unchecked(model, checks.batches_tried)
        checks.compared = True


def forget_outdated_checks(model):
    """Makes a model be checked anew if its loss, layers, variables or engine are others."""
    run = run_of(model)
    if run.checks is not None and not _still_holds(run.checks, model):
        run.checks = None


def received_by_step(model, data):
    """Returns the model and the batch of the private step that `fit` takes for a batch."""
    strategy = model.distribute_strategy
    with strategy.scope():
        share = strategies.share_of_first_replica(strategy, data)
        return own_train_steps.received(model, share)


def _compare(model, data):
    """Compares gradients; returns whether there was something to compare."""
    optimizer, strategy = model.optimizer, model.distribute_strategy
    x, y, sample_weight = unpack(model, strategies.share_of_first_replica(strategy, data))
    with strategy.scope():
        _prepare(model, optimizer, x, y, sample_weight)
        if strategy.num_replicas_in_sync > 1:
            # A step that replicas take together cannot make variables.
            model._symbolic_build(data_batch=(x, y, sample_weight))
    engine = functools.partial(engine_of(optimizer), model)
    # Without XLA the reference engine may corrupt memory where it is allowed with it only.
    traced = optimizer.gradient_engine == "vectorized"
    compiled = bool(model.jit_compile) and traced
    # Replicas share variables in a way that only their graphs know.
    traced = traced or strategy.num_replicas_in_sync > 1
    together = optimizer.mechanism.rows_clipped_together
    with strategies.first_replica(strategy):
        compared = self_check.check_against_single_examples(
            model, engine, x, y, sample_weight, compiled, together, traced
        )
    if multi_worker.has_several_workers(strategy):
        # They must go on alike: whether the next batch is compared, too.
        compared = bool(multi_worker.values_of_chief(strategy, [compared])[0])
    run_of(model).checks.compared |= compared
    return compared


def unpack(model, data):
    """Returns `(x, y, sample_weight)` of a batch as dense tensors; refuses one without targets."""
    x, y, sample_weight = keras.utils.unpack_x_y_sample_weight(data)
    if y is None:
        raise LossError(
            f"Model '{model.name}' received no targets (y=None). Private training takes its loss "
            "from `compile(loss=...)`, which compares outputs with targets; pass y, for an "
            "autoencoder y=x."
        )
    x, y = dense.to_dense("x", x), dense.to_dense("y", y)
    sample_weight = dense.to_dense("sample_weight", sample_weight)
    if sample_weight is not None:
        ones = tf.ones(tf.shape(tf.nest.flatten(x)[0])[:1])
        # An output without weights, next to others that have them.
        fill = lambda weight: ones if weight is None else weight
        sample_weight = tf.nest.map_structure(fill, sample_weight)
    return x, y, sample_weight


def engine_of(optimizer) -> Engine:
    """Returns the function that computes the gradients which a private optimizer clips."""
    engine = vectorized if optimizer.gradient_engine == "vectorized" else layerwise
    return functools.partial(engine.weighted_gradient_sums, units=_units(optimizer.mechanism))


def _units(mechanism):
    return units.Units(mechanism.rows_clipped_together, mechanism.num_microbatches is not None)


def _mean_gradients(model, optimizer, x, y, sample_weight, groups):
    """Returns `GradientSums` of weights that are divided by the divisor of the mechanism."""
    engine, mechanism = engine_of(optimizer), optimizer.mechanism
    now = thresholds.current(optimizer, groups, model.trainable_variables)
    factors = None if now is None else now.factors
    engine = functools.partial(engine, groups=None if groups is None else groups.of_variables)

    def weights(norms):
        # By so much smaller weights sums are means, without a pass over all parameters.
        head, residual = clip_weights(norms, mechanism, groups, factors)
        divisor = mechanism.divisor
        return head / divisor, None if residual is None else residual / divisor

    run = lambda x, y, sample_weight: engine(model, x, y, sample_weight, weights)
    return chunks.sums_in_chunks(
        run, x, y, sample_weight, _chunk_size(model, optimizer), mechanism.rows_clipped_together
    )


def _chunk_size(model, optimizer):
    """Returns the chunk size as a number or `None`; says what "auto" chose."""
    if optimizer.chunk_size != "auto":
        return optimizer.chunk_size
    mechanism, run = optimizer.mechanism, run_of(model)
    rows = mechanism.expected_batch_size * (mechanism.rows_per_unit or 1)
    rows = -(-rows // model.distribute_strategy.num_replicas_in_sync)
    row_bytes = memory.bytes_of_row(model, run.checks.forward_bytes, optimizer.gradient_engine)
    fitting = memory.rows_at_a_time(row_bytes, rows, mechanism.rows_clipped_together)
    if fitting is not None and run.talks:
        io_utils.print_msg(
            f"dice_tf: computes the gradients of {fitting} rows of a batch at a time, to keep "
            f"within about {memory.MEMORY_BUDGET / 2**30:.0f} GiB (`chunk_size`)."
        )
    return fitting


def _prepare(model, optimizer, x, y, sample_weight):
    """Builds what is not built and refuses what cannot be private."""
    symbolic = build_and_check_layers(model, x, y, sample_weight)
    forget_outdated_checks(model)
    if run_of(model).checks is None:
        forward_bytes = check_calls(model, *symbolic)
        optimizer.mechanism.clip.groups(model)  # Refuses a model that it does not fit.
        parts = list(map(weakref.ref, _parts(model)))
        run_of(model).checks = Checks(parts, _settings(model), forward_bytes)
        if not optimizer.self_check:
            self_check.warn_switched_off(model)
    if not rebuilding.knows(optimizer, model.trainable_variables):
        with tf.init_scope():
            optimizer.build(model.trainable_variables)


def build_and_check_layers(model, x, y, sample_weight):
    """Builds a model and refuses layers that cannot be private; returns the batch as symbols."""
    loss.compiled_loss(model)  # Refuses a loss of its own.
    x, y, sample_weight = (_to_symbolic(part) for part in (x, y, sample_weight))
    if not all(layer.built for layer in model._flatten_layers()):
        keras.src.backend.compute_output_spec(model, x, training=False)
    if not model.trainable_variables:
        raise ModelError(
            f"Model '{model.name}' has no trainable variables, so there is nothing to train."
        )
    model_checks.check_model(model)
    return x, y, sample_weight


def check_calls(model, x, y, sample_weight):
    """Refuses a forward pass that stores data, and losses without a value per example.

    Args:
        model: A model that `build_and_check_layers` was called with.
        x, y, sample_weight: What it returned.

    Returns:
        Int, the bytes of one row in a forward pass.
    """
    outputs, forward_bytes = model_checks.check_forward_pass(model, x)
    loss.check_losses(model, y, outputs, sample_weight)
    return forward_bytes


def _check_same_gradients(model, sums):
    """Refuses a step in which other variables have gradients: only those get noise."""
    checks, now = run_of(model).checks, [head is not None for head in sums.head]
    before = now if checks.with_gradients is None else checks.with_gradients
    changed = [
        variable.path
        for variable, was, has in zip(model.trainable_variables, before, now, strict=True)
        if was != has
    ]
    if changed:
        raise ModelError(
            f"Variables {changed} of model '{model.name}' have gradients in some batches and none "
            "in others. A variable gets noise with its gradient, so whether it moves would tell "
            "about a batch. Let every step use them: multiply a part by 0 in place of leaving it "
            "out."
        )
    checks.with_gradients = now


def _parts(model):
    return [loss.compiled_loss(model), *model.trainable_variables, *model._flatten_layers()]


def _settings(model):
    engine = model.optimizer.gradient_engine
    return engine, [layer.trainable for layer in model._flatten_layers()]


def _still_holds(checks, model):
    parts = _parts(model)
    # By identity, of what is alive: an `id` is given to another object after a time.
    same = len(parts) == len(checks.parts) and all(
        reference() is part for reference, part in zip(checks.parts, parts, strict=True)
    )
    return same and checks.settings == _settings(model)


def _to_symbolic(structure):
    return keras.tree.map_structure(
        lambda t: (
            t if t is None else keras.KerasTensor(t.shape, keras.backend.standardize_dtype(t.dtype))
        ),
        structure,
    )
