# Copyright 2026 The dice_tf Authors.
# SPDX-License-Identifier: Apache-2.0
"""The private train step.

One iteration of the algorithm on a Keras model: checks, per-example gradients, the
optimizer's private update, metrics. `dice_tf.dispatch` makes `fit` use it.
"""

import functools
import weakref

import keras
import tensorflow as tf

from dice_tf import distribution, metrics, multi_worker, precision, provenance, validation
from dice_tf.clipping import clip_weights
from dice_tf.errors import LossError, ModelError, PlainGradientsError
from dice_tf.mechanism import DiceMechanism
from dice_tf.per_example import chunks, layerwise, loss, self_check, vectorized

_checked_models = weakref.WeakKeyDictionary()


@tf.autograph.experimental.do_not_convert
def private_train_step(model, data):
    """Takes one private training step: the step that `fit` takes.

    Args:
        model: A Keras model compiled with a private optimizer and a loss.
        data: A batch as `fit` gets it: `(x, y)` or `(x, y, sample_weight)`. Examples of
            weight 0 are padding.

    Returns:
        Dict from metric name to value, not private (see `dice_tf.metrics`).

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
    optimizer = _private_optimizer(model)
    distribution.check_replicas(model, data)
    x, y, sample_weight = _unpack(model, data)
    precision.check_float32_products()
    _prepare(model, optimizer, x, y, sample_weight)
    sums = _gradient_sums(model, optimizer, x, y, sample_weight)
    if all(head is None for head in sums.head):
        raise ModelError(f"The loss of model '{model.name}' depends on no trainable variable.")
    variables = model.trainable_variables
    penalty, penalty_gradients = loss.regularization_gradients(variables)
    optimizer.apply_private_update(
        sums, variables, penalty_gradients, provenance.count_marks(sample_weight)
    )
    return metrics.update_metrics(model, x, y, sums.y_pred, sample_weight, sums.losses, penalty)


def check_gradients(model, data):
    """Compares the per-example gradients of a few examples with their gradients alone.

    `fit` and `train_on_batch` do this once for every compiled model, with the first batch;
    in a custom loop, call it before the first step.

    Args:
        model: A Keras model compiled with a private optimizer and a loss.
        data: A batch as `fit` gets it: `(x, y)` or `(x, y, sample_weight)`.

    Raises:
        GradientEngineError: If they differ: a layer or loss mixes examples, or a rule for a
            layer is wrong.

    Example:

    >>> import dice_tf
    >>> model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
    >>> model.compile(dice_tf.DiceSGDOptimizer(
    ...     l2_norm_clip=1.0, noise_multiplier=1.0, expected_batch_size=8), loss="mse")
    >>> check_gradients(model, (tf.ones([8, 4]), tf.ones([8, 1])))
    """
    optimizer, strategy = _private_optimizer(model), model.distribute_strategy
    multi_worker.check_workers_agree(model)
    x, y, sample_weight = _unpack(model, distribution.share_of_first_replica(strategy, data))
    with strategy.scope():
        _prepare(model, optimizer, x, y, sample_weight)
        if strategy.num_replicas_in_sync > 1:
            # A step that replicas take together cannot make variables.
            model._symbolic_build(data_batch=(x, y, sample_weight))
    if optimizer.mechanism.num_microbatches is not None:
        return  # The reference engine runs every microbatch on its own.
    engine = functools.partial(_engine(optimizer), model)
    with distribution.first_replica(strategy):
        self_check.check_against_single_examples(model, engine, x, y)


def is_private(optimizer):
    """Whether `optimizer` is one of this package's."""
    return isinstance(getattr(optimizer, "mechanism", None), DiceMechanism)


def _private_optimizer(model):
    if not is_private(model.optimizer):
        raise PlainGradientsError(
            "A private step needs a model compiled with a private optimizer. Received: "
            f"optimizer={type(model.optimizer).__name__}. Compile with DiceSGDOptimizer(...)."
        )
    return model.optimizer


def _unpack(model, data):
    x, y, sample_weight = keras.utils.unpack_x_y_sample_weight(data)
    if y is None:
        raise LossError(
            f"Model '{model.name}' received no targets (y=None). Private training takes its loss "
            "from `compile(loss=...)`, which compares outputs with targets; pass y, for an "
            "autoencoder y=x."
        )
    return tuple(_to_tensors(part) for part in (x, y, sample_weight))


def _engine(optimizer):
    mechanism = optimizer.mechanism
    if optimizer.gradient_engine == "vectorized" or mechanism.num_microbatches is not None:
        return functools.partial(
            vectorized.weighted_gradient_sums, microbatch_size=mechanism.microbatch_size
        )
    return layerwise.weighted_gradient_sums


def _gradient_sums(model, optimizer, x, y, sample_weight):
    engine = _engine(optimizer)
    weights = functools.partial(clip_weights, mechanism=optimizer.mechanism)
    run = lambda x, y, sample_weight: engine(model, x, y, sample_weight, weights)
    return chunks.sums_in_chunks(
        run, x, y, sample_weight, optimizer.chunk_size, optimizer.mechanism.microbatch_size
    )


def _prepare(model, optimizer, x, y, sample_weight):
    """Builds what is not built and refuses what cannot be private, once per model."""
    compiled_loss = loss.compiled_loss(model)
    x, y, sample_weight = (_to_symbolic(part) for part in (x, y, sample_weight))
    if not all(layer.built for layer in model._flatten_layers()):
        keras.src.backend.compute_output_spec(model, x, training=False)
    if not model.trainable_variables:
        raise ModelError(
            f"Model '{model.name}' has no trainable variables, so there is nothing to train."
        )
    # What was checked holds until the trainable variables or the loss change.
    state = (id(compiled_loss), *(id(v) for v in model.trainable_variables))
    if _checked_models.get(model) != state:
        validation.check_model(model)
        outputs = validation.check_forward_pass(model, x)
        loss.check_losses(model, y, outputs, sample_weight)
        _checked_models[model] = state
    if not optimizer.built:
        with tf.init_scope():
            optimizer.build(model.trainable_variables)


def _to_symbolic(structure):
    return keras.tree.map_structure(
        lambda t: t
        if t is None
        else keras.KerasTensor(t.shape, keras.backend.standardize_dtype(t.dtype)),
        structure,
    )


def _to_tensors(structure):
    return keras.tree.map_structure(
        lambda t: t if t is None else tf.convert_to_tensor(t), structure
    )
