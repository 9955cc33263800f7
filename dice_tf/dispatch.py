# Copyright 2026 The dice_tf Authors.
# SPDX-License-Identifier: Apache-2.0
"""The one place where Keras is made to take private steps.

Keras hands an optimizer only gradients that are already summed over the batch. So
constructing a private optimizer wraps two methods of Keras' TensorFlow trainer once:
`train_step`, to take `private_train_step` instead, and `make_train_function`, to check
the gradients of the first batch. Models whose optimizer is not private keep Keras' own.
"""

import functools
import itertools
import threading

import keras
import tensorflow as tf

from dice_tf.errors import OptimizerArgumentError
from dice_tf.training import check_gradients, is_private, private_train_step

_lock = threading.Lock()


def install():
    """Makes Keras' TensorFlow trainer take private steps for private optimizers.

    Idempotent and thread-safe.

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

    with _lock:
        if getattr(TensorFlowTrainer.train_step, "dispatches_private_steps", False):
            return
        TensorFlowTrainer.train_step = _train_step(TensorFlowTrainer.train_step)
        TensorFlowTrainer.make_train_function = _make_train_function(
            TensorFlowTrainer.make_train_function
        )


def _train_step(stock_step):
    @functools.wraps(stock_step)
    def train_step(self, data):
        optimizer = getattr(self, "optimizer", None)
        if is_private(getattr(optimizer, "inner_optimizer", None)):
            raise OptimizerArgumentError(
                f"{type(optimizer).__name__} wraps a private optimizer. It skips steps depending "
                "on the data, which would tell about them. Train in float32 or with the dtype "
                "policy 'mixed_bfloat16', which needs no loss scaling."
            )
        return private_train_step(self, data) if is_private(optimizer) else stock_step(self, data)

    train_step.dispatches_private_steps = True
    return train_step


def _make_train_function(stock_make):
    @functools.wraps(stock_make)
    def make_train_function(self, force=False):
        stock_make(self, force)
        function = self.train_function
        optimizer = getattr(self, "optimizer", None)
        wanted = is_private(optimizer) and optimizer.self_check
        if wanted and not hasattr(function, "checks_gradients"):
            self.train_function = _checking_first(self, function)
        return self.train_function

    return make_train_function


def _checking_first(model, function):
    """Wraps a train function so that its first call checks the gradients beforehand."""
    pending = [True]

    @functools.wraps(function)
    def train_function(iterator):
        # Replicas get shares of a batch that cannot be put back together here.
        if pending and not isinstance(iterator, tf.distribute.DistributedIterator):
            batches = list(itertools.islice(iterator, model.steps_per_execution))
            if batches:
                check_gradients(model, batches[0])
                pending.clear()
                return function(_iterator_over(batches, iterator))
        return function(iterator)

    train_function.checks_gradients = True
    return train_function


def _iterator_over(batches, iterator):
    if not isinstance(iterator, tf.data.Iterator):
        return iter(batches)
    spec = iterator.element_spec
    return iter(tf.data.Dataset.from_generator(lambda: batches, output_signature=spec))
