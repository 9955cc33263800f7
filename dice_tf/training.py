# Copyright 2026 The dice_tf Authors.
# SPDX-License-Identifier: Apache-2.0
"""The private train step, and the one place where Keras is made to use it.

Keras hands an optimizer only gradients that are already summed over the batch. So
constructing a private optimizer wraps `train_step` of Keras' TensorFlow trainer once:
models compiled with a private optimizer take `private_train_step`, all others the
step they had.
"""

import functools
import threading
import weakref

import keras
import tensorflow as tf

from dice_tf import metrics, provenance, validation
from dice_tf.clipping import clip_weights
from dice_tf.errors import LossError, ModelError, OptimizerArgumentError, PlainGradientsError
from dice_tf.mechanism import DiceMechanism
from dice_tf.per_example import chunks, layerwise, loss, vectorized

_install_lock = threading.Lock()
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
    optimizer = model.optimizer
    if not is_private(optimizer):
        raise PlainGradientsError(
            "private_train_step needs a model compiled with a private optimizer. Received: "
            f"optimizer={type(optimizer).__name__}. Compile with DiceSGDOptimizer(...)."
        )
    x, y, sample_weight = keras.utils.unpack_x_y_sample_weight(data)
    if y is None:
        raise LossError(
            f"Model '{model.name}' received no targets (y=None). Private training takes its loss "
            "from `compile(loss=...)`, which compares outputs with targets; pass y, for an "
            "autoencoder y=x."
        )
    x, y, sample_weight = (_to_tensors(part) for part in (x, y, sample_weight))
    _prepare(model, optimizer, x, y, sample_weight)

    sums = _gradient_sums(model, optimizer, x, y, sample_weight)
    variables = model.trainable_variables
    penalty, penalty_gradients = loss.regularization_gradients(variables)
    optimizer.apply_private_update(
        sums, variables, penalty_gradients, provenance.count_marks(sample_weight)
    )
    return metrics.update_metrics(model, x, y, sums.y_pred, sample_weight, sums.losses, penalty)


def is_private(optimizer):
    """Whether `optimizer` is one of this package's."""
    return isinstance(getattr(optimizer, "mechanism", None), DiceMechanism)


def install_dispatch():
    """Makes Keras' TensorFlow trainer take private steps for private optimizers.

    Idempotent and thread-safe. A model whose optimizer is not private keeps Keras' step.

    Raises:
        OptimizerArgumentError: If Keras does not run on TensorFlow.
    """
    if keras.backend.backend() != "tensorflow":
        raise OptimizerArgumentError(
            "dice_tf trains with the TensorFlow backend of Keras. Received: "
            f"keras.backend.backend()={keras.backend.backend()!r}. Set the environment variable "
            "KERAS_BACKEND=tensorflow before importing keras."
        )
    from keras.src.backend.tensorflow.trainer import TensorFlowTrainer

    with _install_lock:
        stock_step = TensorFlowTrainer.train_step
        if getattr(stock_step, "dispatches_private_steps", False):
            return

        @functools.wraps(stock_step)
        def train_step(self, data):
            optimizer = getattr(self, "optimizer", None)
            if is_private(getattr(optimizer, "inner_optimizer", None)):
                raise OptimizerArgumentError(
                    f"{type(optimizer).__name__} wraps a private optimizer. It skips steps "
                    "depending on the data, which would tell about them. Train in float32 or "
                    "with the dtype policy 'mixed_bfloat16', which needs no loss scaling."
                )
            if is_private(optimizer):
                return private_train_step(self, data)
            return stock_step(self, data)

        train_step.dispatches_private_steps = True
        TensorFlowTrainer.train_step = train_step


def _gradient_sums(model, optimizer, x, y, sample_weight):
    mechanism = optimizer.mechanism
    weights = functools.partial(clip_weights, mechanism=mechanism)

    def run(x, y, sample_weight):
        if optimizer.gradient_engine == "vectorized" or mechanism.num_microbatches is not None:
            return vectorized.weighted_gradient_sums(
                model, x, y, sample_weight, weights, mechanism.microbatch_size
            )
        return layerwise.weighted_gradient_sums(model, x, y, sample_weight, weights)

    return chunks.sums_in_chunks(run, x, y, sample_weight, optimizer.chunk_size)


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
