# Copyright 2026 The dice_tf Authors.
# SPDX-License-Identifier: Apache-2.0
"""Several worker processes: they must run the same private training, and Keras must let them.

A worker with other parameters or other data would not fail by itself: sums of different
mechanisms would be added up. So workers compare what decides epsilon before the first
step. What they compare travels between them as digests, and touches no disk.
"""

import dataclasses
import functools
import hashlib
from typing import Any
import warnings

import keras
import numpy as np
import tensorflow as tf

from dice_tf.errors import DistributionError, SamplingError

# The versions of Keras, first included and last excluded, whose `fit` fails with several workers
# for any optimizer, and works with what this module does about it; all four were tried.
REPAIRED_KERAS = ((3, 12), (3, 16))


def is_repaired():
    """Whether this version of Keras is one that this module repairs."""
    version = tuple(int(part) for part in keras.version().split(".")[:2])
    return REPAIRED_KERAS[0] <= version < REPAIRED_KERAS[1]


def count_workers(resolver=None):
    """Returns the number of worker processes in the cluster.

    Args:
        resolver: A cluster resolver, or `None` for what the variable `TF_CONFIG` says.
    """
    if resolver is None:
        resolver = tf.distribute.cluster_resolver.TFConfigClusterResolver()
    cluster = resolver.cluster_spec()
    workers = sum(cluster.num_tasks(job) for job in cluster.jobs if job in ("chief", "worker"))
    return max(1, workers)


def has_several_workers(strategy):
    """Whether `strategy` spans several processes."""
    if not isinstance(strategy, tf.distribute.MultiWorkerMirroredStrategy):
        return False
    return count_workers(strategy.cluster_resolver) > 1


def is_first(resolver):
    """Whether this process is the first worker, from which variables start.

    Args:
        resolver: A cluster resolver.
    """
    has_chief = "chief" in resolver.cluster_spec().jobs
    return resolver.task_id == 0 and resolver.task_type == ("chief" if has_chief else "worker")


def values_of_chief(strategy, values):
    """Returns the first worker's values, on every worker.

    Args:
        strategy: Strategy of several workers, all of which make this call.
        values: Int64 array, or list of ints that fit, of the same shape on every worker.

    Returns:
        Int64 array.
    """
    with strategy.scope():
        # The strategy starts every variable from the value of its first worker.
        start: Any = np.asarray(values, np.int64)
        return tf.Variable(start, trainable=False).numpy()


def check_same(strategy, facts, secrets, error):
    """Raises on every worker if some worker holds other values.

    Args:
        strategy: Strategy of several workers, all of which make this call.
        facts: Dict from name to value, which the error echoes.
        secrets: The same for values that the error must not show.
        error: Exception class to raise.
    """
    values = {**facts, **secrets}
    digest = lambda value: hashlib.sha256(repr(value).encode()).digest()[:8]
    mine = tf.constant(
        [[int.from_bytes(digest(value), "big", signed=True) for value in values.values()]], tf.int64
    )
    gather = lambda: tf.distribute.get_replica_context().all_gather(mine, axis=0)
    gathered = tf.function(lambda: strategy.run(gather))()
    rows = strategy.experimental_local_results(gathered)[0].numpy()
    different = [name for name, column in zip(values, rows.T) if len(set(column)) > 1]
    if different:
        shown = ", ".join(f"{name}={facts.get(name, '(secret)')!r}" for name in different)
        raise error(
            f"The {count_workers(strategy.cluster_resolver)} workers of this run were started "
            f"with different values of {', '.join(different)}. Received here: {shown}. Start "
            "every worker with the same program, arguments and data."
        )


def check_workers_agree(model):
    """Compares optimizer, noise key and model over all workers; nothing with one worker.

    Args:
        model: Compiled Keras model with a private optimizer.

    Raises:
        DistributionError: On every worker, if one differs.
    """
    strategy, optimizer = model.distribute_strategy, model.optimizer
    if not has_several_workers(strategy):
        return
    config = optimizer.get_config()
    del config["name"]  # Counted up in each process.
    shapes = [tuple(variable.shape) for variable in model.trainable_variables]
    with strategy.scope():
        private = optimizer._private
        keys = (private.noise_key, private.process_key)
        key = [key.read().numpy().tolist() for key in keys]
        # Zeros, unless private checkpoints are written: then what decides the draws.
        sampler = private.sampler.numpy().tolist() if optimizer.built else None
        steps = int(optimizer.iterations.numpy())
    facts = {**config, "trainable_variables": shapes, "iterations": steps}
    check_same(strategy, facts, {"noise_key": key, "sampler": sampler}, DistributionError)
    optimizer._private.workers_agree = True


def agreed(model):
    """Whether `check_workers_agree` has passed, or there is one worker."""
    several = has_several_workers(model.distribute_strategy)
    return not several or model.optimizer._private.workers_agree


def align_samplers(model, x, samplings):
    """Makes the samplers of several workers begin at the same place.

    How far a run before this one prefetched, and so began passes over the data, was up to each
    worker: they would draw different batches, and an example could enter a step twice.

    Args:
        model: Compiled Keras model with a private optimizer.
        x: What `fit` received as `x`.
        samplings: Objects of `dice_tf.sampling` that draw it.

    Raises:
        SamplingError: If there are several workers, and `x` is not from a sampler: each may then
            take more than its share.
    """
    strategy = model.distribute_strategy
    if not has_several_workers(strategy):
        return
    if not samplings:
        raise SamplingError(
            "With several workers each must take its share of the same batch, and shuffling or "
            "sharding on their own could show an example to several of them. Pass `fit` the data "
            "set of a sampler, made within `strategy.scope()`: for data in any order "
            f"`ShuffledEpochs(num_examples, batch_size).dataset(x, y)`. Received: x={type(x)}."
        )

    for sampling in samplings:
        state = sampling._state
        begun = int(values_of_chief(strategy, [state.iterations])[0])
        with state.lock:
            state.iterations = begun


def join_workers(sampling):
    """Makes all workers of the cluster draw alike.

    Args:
        sampling: Object of `dice_tf.sampling`.

    Returns:
        Int, the number of replicas that share a batch.

    Raises:
        SamplingError: If several workers would draw different batches.
    """
    strategy, workers = tf.distribute.get_strategy(), count_workers()
    if not has_several_workers(strategy):
        if workers > 1:
            raise SamplingError(
                f"The cluster has {workers} workers, and each would draw batches of its own: one "
                "example could enter a step several times. Call `dataset` on every worker within "
                "the `scope()` of a `tf.distribute.MultiWorkerMirroredStrategy`. Received: "
                f"{sampling!r}, current strategy {type(strategy).__name__}."
            )
        return strategy.num_replicas_in_sync
    facts = {field.name: getattr(sampling, field.name) for field in dataclasses.fields(sampling)}
    owners = facts.pop("owners")
    secret = {"seed": facts.pop("seed", None), "owner_ids": owners and owners.digest}
    facts.update(sampling=type(sampling).__name__, rows_per_unit=sampling.rows_per_unit)
    check_same(strategy, facts, secret, SamplingError)
    state = sampling._state
    if not state.shared:
        words = [state.entropy >> shift & 0xFFFFFFFF for shift in range(0, 128, 32)]
        *words, assignment = values_of_chief(strategy, [*words, state.assignment]).tolist()
        if sampling.seed is None:
            state.entropy = sum(word << 32 * i for i, word in enumerate(words))
        state.assignment, state.shared = assignment, True
    return strategy.num_replicas_in_sync


def with_vector_logs(model, step_function):
    """Wraps a step of `fit` or `evaluate` so that Keras can average its logs over workers.

    Keras averages over the first axis of the logs, which scalars do not have.

    Args:
        model: Compiled Keras model with a private optimizer.
        step_function: Function of a batch that returns logs.
    """
    if not has_several_workers(model.distribute_strategy):
        return step_function
    if not is_repaired():
        warnings.warn(
            f"`fit` with several workers was tested with Keras {_dotted(REPAIRED_KERAS[0])} up to, "
            f"and not with, {_dotted(REPAIRED_KERAS[1])}. This is {keras.version()}: what was "
            "wrong in Keras may be repaired, or go wrong in another way.",
            stacklevel=2,
        )
        return step_function

    @functools.wraps(step_function)
    def step(data):
        return tf.nest.map_structure(lambda log: tf.reshape(log, [1]), step_function(data))

    return step


def _dotted(version):
    return ".".join(str(part) for part in version)
