# Copyright 2026 The dice_tf Authors.
# SPDX-License-Identifier: Apache-2.0
"""Keras' `BackupAndRestore` with several workers: one backup, that of the first worker.

The callback knows nothing of workers. In a shared folder all of them write the same file
at once; in folders of their own a kill leaves backups of different epochs. So only the
first worker writes and reads the backup, and when `fit` begins the others take over its
state, private part included, through the connections of the cluster.
"""

import keras
import numpy as np
import tensorflow as tf

from dice_tf.checkpoints import private_checkpoints
from dice_tf.distribution import multi_worker
from dice_tf.errors import DistributionError


def share_backups(model, callbacks):
    """Returns the callbacks of `fit`, with backups that all workers share.

    Args:
        model: Compiled Keras model with a private optimizer.
        callbacks: List of Keras callbacks.

    Returns:
        The same, if there is one worker or no `BackupAndRestore`; otherwise a list with each
        `BackupAndRestore` followed by (first worker) or replaced by (others) a callback that
        passes the restored state on.

    Raises:
        DistributionError: If there is something to share and `fit` was called within the
            strategy's scope.
    """
    strategy = model.distribute_strategy
    is_backup = lambda callback: isinstance(callback, keras.callbacks.BackupAndRestore)
    if not multi_worker.has_several_workers(strategy) or not any(map(is_backup, callbacks)):
        return callbacks
    if tf.distribute.has_strategy():
        # Keras makes variables when it writes a file, in a scope of all workers on all of them.
        raise DistributionError(
            "With several workers, the first one alone writes the backup of `BackupAndRestore`, "
            "and cannot do so within `strategy.scope()`. Make model and data set within the "
            f"scope, and call `fit` outside. Received: {type(strategy).__name__} as the current "
            "strategy."
        )
    shared, is_first = [], multi_worker.is_first(strategy.cluster_resolver)
    for callback in callbacks:
        if is_first or not is_backup(callback):
            shared.append(callback)
        if is_backup(callback):
            shared.append(_TakeOverFromFirstWorker())
    return shared


class _TakeOverFromFirstWorker(keras.callbacks.Callback):
    """Gives every worker the state and the epoch that the first one has when `fit` begins."""

    def on_train_begin(self, logs=None):
        model, optimizer = self.model, self.model.optimizer
        private = private_checkpoints.private_variables(optimizer._private, optimizer.mechanism)
        variables = [*model.variables, *optimizer.variables, *optimizer.errors, *private.values()]
        values = [variable.numpy() for variable in variables]
        # As bytes, so that every bit arrives, whatever the type.
        packed = b"".join(value.tobytes() for value in values)
        words = np.frombuffer(packed + bytes(-len(packed) % 8), np.int64)
        draws = int(optimizer._private.process_draws.numpy())
        words = np.append(words, [model._initial_epoch or 0, draws])
        received = multi_worker.values_of_chief(model.distribute_strategy, words)
        model._initial_epoch, rest = int(received[-2]), received.tobytes()
        optimizer._private.go_to_draw(int(received[-1]))
        for variable, value in zip(variables, values, strict=True):
            own, rest = rest[: value.nbytes], rest[value.nbytes :]
            variable.assign(np.frombuffer(own, value.dtype).reshape(value.shape))
