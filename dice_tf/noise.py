# Copyright 2026 The dice_tf Authors.
# SPDX-License-Identifier: Apache-2.0
"""Gaussian noise: the same on every replica, reproducible only from a secret key.

Draws are stateless functions of (key, step, variable index). Replicas and workers
that hold the same key draw the same noise without communicating, and a run that
resumes with its key continues exactly.
"""

import math
import secrets

import numpy as np
import tensorflow as tf

from dice_tf.mechanism import check_integer

_KEY_BITS = 64


class NoiseKey:
    """A 64-bit key for stateless noise draws, kept out of everything that is saved.

    A plain Python object on purpose: Keras and `tf.train.Checkpoint` track variables,
    lists and layers that are set as attributes, and would write the key to disk.

    Args:
        seed: Int, or `None` for 64 unpredictable bits from the operating system. A
            seed makes runs reproducible and the noise predictable to whoever knows it.
    """

    def __init__(self, seed=None):
        self.seed = None if seed is None else check_integer("noise_seed", seed, minimum=0)
        bits = secrets.randbits(_KEY_BITS) if seed is None else self.seed % 2**_KEY_BITS
        halves = np.frombuffer(bits.to_bytes(_KEY_BITS // 8, "little"), np.int32)
        with tf.init_scope():
            self._value = tf.Variable(halves, trainable=False, name="noise_key")

    def read(self):
        """Returns the key as an int32 tensor of shape `[2]`."""
        return tf.convert_to_tensor(self._value)

    def __deepcopy__(self, memo):
        # A copied optimizer that shared its key would draw the same noise on other data.
        return NoiseKey(self.seed)

    __copy__ = lambda self: NoiseKey(self.seed)


def gaussian_noise(key, step, index, shape, stddev):
    r"""Draws \(w \sim N(0, \sigma_1^2 I)\) for one variable at one step.

    Args:
        key: Int32 `[2]`, from `NoiseKey.read`.
        step: Integer scalar tensor, the number of noise draws made before this one.
        index: Int, position of the variable among the trainable variables.
        shape: Static shape of the variable.
        stddev: Float, standard deviation per coordinate, in units of the mean gradient.

    Returns:
        Float32 tensor of shape `shape`. Different (step, index) give independent draws.

    Source: Zhang et al., ICLR 2024, Alg. 1 line 6.
    """
    seed = tf.random.experimental.stateless_fold_in(key, tf.cast(step, tf.int32))
    seed = tf.random.experimental.stateless_fold_in(seed, index)
    return stddev * standard_normal(seed, shape)


def standard_normal(seed, shape):
    r"""Draws \(N(0, 1)\) by the Box-Muller transform of uniform draws.

    \[w_{2j} = \sqrt{-2 \ln u_j} \cos 2\pi u'_j, \qquad
      w_{2j+1} = \sqrt{-2 \ln u_j} \sin 2\pi u'_j\]

    TensorFlow's own kernel gives \(u_j\) 23 random bits, so that no draw is beyond 5.65:
    an example that shifts a release past that edge would be found out with a
    probability that may exceed delta. Here \(u_j\) has 41 bits, and the edge is at 7.6.

    Args:
        seed: Int32 `[2]`.
        shape: Static shape.

    Returns:
        Float32 tensor of shape `shape`.

    Source: Box and Muller, Ann. Math. Statist. 29 (1958).
    """
    size = math.prod(shape)
    # Philox by name: "auto" may choose another generator on another kind of device.
    bits = tf.random.stateless_uniform(
        [2, (size + 1) // 2], seed, minval=None, maxval=None, dtype=tf.uint32, alg="philox"
    )
    # The angle takes 23 bits of its word; the other 9 refine the radius where it is large.
    spare = tf.cast(tf.bitwise.bitwise_and(bits[1], np.uint32(511)), tf.float32)
    uniform = (tf.cast(bits[0], tf.float32) + (spare + 0.5) * 2.0**-9) * 2.0**-32
    radius = tf.sqrt(-2.0 * tf.math.log(uniform))
    angle = tf.cast(tf.bitwise.right_shift(bits[1], np.uint32(9)), tf.float32)
    angle *= 2.0 * math.pi * 2.0**-23
    draws = tf.concat([radius * tf.cos(angle), radius * tf.sin(angle)], 0)
    return tf.reshape(draws[:size], shape)
