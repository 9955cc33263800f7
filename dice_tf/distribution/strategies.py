# Copyright 2026 The dice_tf Authors.
# SPDX-License-Identifier: Apache-2.0
"""tf.distribute: sums over replicas, and updates that are the same on each of them.

Every replica computes the weighted gradient sums of its share of the batch; they are
added up, and from there on all replicas do the same: the same noise from the same key,
the same update. What would count an example twice, or let replicas drift apart, is
refused here.
"""

import contextlib

import tensorflow as tf

from dice_tf.distribution import multi_worker
from dice_tf.errors import DistributionError, MechanismError

_TESTED = (
    tf.distribute.OneDeviceStrategy,
    tf.distribute.MirroredStrategy,
    tf.distribute.MultiWorkerMirroredStrategy,
)


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

    def update(strategy, *values):
        for variable, value in zip(variables, values, strict=True):
            strategy.extended.update(
                variable.value, lambda v, new: v.assign(new), args=(value,), group=False
            )

    strategy = tf.distribute.get_strategy()
    tf.__internal__.distribute.interim.maybe_merge_call(update, strategy, *values)


def check_strategy():
    """Refuses a current strategy under which an update would not be the private one.

    Raises:
        DistributionError: If its workers do not step together (parameter servers), its
            devices round products (TPUs), Keras miscounts under it (central storage), or
            nothing is known about it.
    """
    strategy = tf.distribute.get_strategy()
    if tf.distribute.has_strategy() and not isinstance(strategy, _TESTED):
        raise DistributionError(
            "Private training needs replicas that take every step together and multiply float32 "
            "numbers as such. Parameter servers do not do the first, TPUs not the second, and "
            "under CentralStorageStrategy Keras counts the metrics of each replica again. "
            f"Received: {type(strategy).__name__}. Use one of "
            f"{', '.join(s.__name__ for s in _TESTED)}."
        )


def check_compilation(model):
    """Refuses XLA on several replicas.

    Args:
        model: A compiled Keras model.

    Raises:
        DistributionError: If `compile` was called with `jit_compile=True`.
    """
    replicas = model.distribute_strategy.num_replicas_in_sync
    if replicas > 1 and model.jit_compile:
        raise DistributionError(
            "Keras cannot compile a step with XLA that exchanges sums between replicas. Received: "
            f"jit_compile=True with {replicas} replicas. Call `compile` without `jit_compile`; "
            "its default leaves XLA out under a strategy."
        )


def check_replicas(model, data):
    """Refuses a step in which replicas would not each take a share of one batch.

    To be called by each replica when a step is traced.

    Args:
        model: Compiled Keras model with a private optimizer.
        data: This replica's data, as it was passed to `Strategy.run`.

    Raises:
        DistributionError: If the step runs outside the model's strategy, before what it
            needs was made, or with the same examples on several replicas.
        MechanismError: If microbatches are used on several replicas.
    """
    strategy, context = tf.distribute.get_strategy(), tf.distribute.get_replica_context()
    check_strategy()
    if context is None or model.distribute_strategy is not strategy:
        raise DistributionError(
            f"Model '{model.name}' belongs to {type(model.distribute_strategy).__name__}, and its "
            "step must run on all replicas at once. Call "
            "`strategy.run(dice_tf.private_train_step, args=(model, batch))` with batches from "
            "`strategy.experimental_distribute_dataset`."
        )
    replicas = strategy.num_replicas_in_sync
    if replicas == 1:
        return
    mechanism, metrics = model.optimizer.mechanism, model._compile_metrics
    if mechanism.num_microbatches is not None:
        # How the examples of a batch meet in microbatches would then depend on its size.
        raise MechanismError(
            "Microbatches are not accounted for on several replicas. Received: "
            f"num_microbatches={mechanism.num_microbatches} with {replicas} replicas. Leave "
            "`num_microbatches` out; use `chunk_size` to bound memory."
        )
    ready = model.optimizer.built and (metrics is None or metrics.built)
    if not ready or not multi_worker.agreed(model):
        raise DistributionError(
            f"Model '{model.name}' is not ready for a step on {replicas} replicas: its optimizer "
            "or metrics are not built, or its workers were not compared. In a loop of your own, "
            "call `dice_tf.check_gradients(model, batch)` before the first step."
        )
    leaves = [leaf for leaf in tf.nest.flatten(data) if leaf is not None]
    several_here = len(strategy.extended.worker_devices) > 1
    if several_here and context.merge_call(_any_is_shared, args=leaves):
        raise DistributionError(
            f"All replicas received the same batch, so each example would count {replicas} times. "
            "Pass `fit` arrays or a data set, or distribute the batches of a loop of your own by "
            "`strategy.experimental_distribute_dataset`; `train_on_batch` cannot share its batch "
            "out."
        )


def _any_is_shared(strategy, *leaves):
    # What differs between replicas arrives here as one `PerReplica` value.
    return not all(isinstance(leaf, tf.distribute.DistributedValues) for leaf in leaves)


def share_of_first_replica(strategy, data):
    """Returns what the first replica of this process gets of a distributed batch.

    Args:
        strategy: The `tf.distribute.Strategy`.
        data: Nest of `PerReplica` values, or of anything else, which is returned as it is.
    """
    return local_shares(strategy, data)[0]


def local_shares(strategy, data):
    """Returns the shares of a distributed batch, one for each replica of this process.

    Args:
        strategy: The `tf.distribute.Strategy`.
        data: Nest of `PerReplica` values.
    """
    leaves = [strategy.experimental_local_results(leaf) for leaf in tf.nest.flatten(data)]
    return [tf.nest.pack_sequence_as(data, share) for share in zip(*leaves)]


def spec_of_share(spec):
    """Returns the type of one replica's share of a distributed batch.

    Args:
        spec: Nest of `PerReplicaSpec`, or of anything else, which is returned as it is.
    """
    one = lambda s: s._value_specs[0] if hasattr(s, "_value_specs") else s
    return tf.nest.map_structure(one, spec)


@contextlib.contextmanager
def first_replica(strategy):
    """Context in which variables read as their copies on this process' first replica.

    Args:
        strategy: The `tf.distribute.Strategy`.
    """
    if not isinstance(strategy, _TESTED):
        yield  # No strategy.
        return
    own = lambda: tf.distribute.get_replica_context().replica_id_in_sync_group
    # A function, because TensorFlow warns of replicas that run eagerly.
    ids = tf.function(lambda: strategy.run(own))()
    number = int(strategy.experimental_local_results(ids)[0])
    with strategy.scope(), tf.distribute.ReplicaContext(strategy, number):
        yield
