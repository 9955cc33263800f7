# Copyright 2026 The dice_tf Authors.
# SPDX-License-Identifier: Apache-2.0
"""Noise keys that are good for one direction only: why, see `private_checkpoints`."""

import functools

import numpy as np
import tensorflow as tf

from dice_tf.distribution import strategies
from dice_tf.mechanism import noise

# Keeps the key's use for binding apart from its use for noise.
_BINDING = 0x62696E64


def bind_key(key, tensors):
    r"""Derives a noise key that only the same tensors give again.

    Args:
        key: Int32 `[2]`, from `NoiseKey.read`.
        tensors: List of float32 tensors, the un-noised direction v. Of several replicas the
            first one's counts, so that their keys agree whatever their kernels do.

    Returns:
        Int32 `[2]`: a function of the key and of every bit of the tensors that nobody can
        tell from random without the key. Different tensors collide with probability 2^-64.

    Example:

    >>> key = noise.NoiseKey(seed=1).read()
    >>> one, same, other = (bind_key(key, [tf.constant([v])]) for v in (1.0, 1.0, 2.0))
    >>> bool(tf.reduce_all(one == same)), bool(tf.reduce_any(one == other))
    (True, False)

    Source: the sum of Bellare, Guérin and Rogaway, "XOR MACs", CRYPTO 1995.
    """
    bound = _compiled_binding()(key, [tf.reshape(t, [-1]) for t in tensors])
    context = tf.distribute.get_replica_context()
    if context is None or context.num_replicas_in_sync == 1:
        return bound
    is_first = tf.equal(context.replica_id_in_sync_group, 0)
    return strategies.sum_over_replicas([tf.where(is_first, bound, tf.zeros_like(bound))])[0]


@functools.cache
def _compiled_binding():
    return tf.function(_bind, jit_compile=noise.xla_is_available(), autograph=False)


def _bind(key, vectors):
    bits = tf.bitcast(tf.concat(vectors, 0), tf.int32)
    secret = tf.bitwise.bitwise_xor(tf.bitcast(key, tf.uint32), np.uint32(_BINDING))
    words = noise.threefry(secret, bits, tf.range(tf.size(bits)))
    # Modulo 2^32, whatever the order of summation.
    sums = [tf.cast(tf.reduce_sum(tf.cast(w, tf.int64)), tf.uint32) for w in words]
    derived = noise.threefry(secret, *(tf.expand_dims(s, 0) for s in sums))
    return tf.bitcast(tf.concat(derived, 0), tf.int32)
