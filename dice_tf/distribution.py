# Copyright 2026 The dice_tf Authors.
# SPDX-License-Identifier: Apache-2.0
"""tf.distribute: sums over replicas, and updates that are the same on each of them."""

import tensorflow as tf


def sum_over_replicas(tensors):
    """Adds up each tensor over all replicas.

    Args:
        tensors: List of tensors, one list per replica.

    Returns:
        List of tensors, the same on every replica. With one replica, the input.
    """
    context = tf.distribute.get_replica_context()
    if not tensors or context is None or context.num_replicas_in_sync == 1:
        return list(tensors)
    return context.all_reduce(tf.distribute.ReduceOp.SUM, list(tensors))


def assign_on_every_replica(variables, values):
    """Assigns each value to each copy of its variable.

    Args:
        variables: List of Keras variables.
        values: List of tensors, the same on every replica: nothing is reduced here.
    """

    def update(strategy, variables, values):
        for variable, value in zip(variables, values, strict=True):
            strategy.extended.update(
                variable.value, lambda v, new: v.assign(new), args=(value,), group=False
            )

    tf.__internal__.distribute.interim.maybe_merge_call(
        lambda strategy, *values: update(strategy, variables, values),
        tf.distribute.get_strategy(),
        *values,
    )
