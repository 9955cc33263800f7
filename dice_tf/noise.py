# Copyright 2026 The dice_tf Authors.
# SPDX-License-Identifier: Apache-2.0
"""Gaussian noise: the same on every replica, reproducible only from a secret key.

Draws are stateless functions of (key, step, variable index). Replicas and workers
that hold the same key draw the same noise without communicating, and a run that
resumes with its key continues exactly.
"""

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
        with tf.init_scope():
            self._value = tf.Variable(self._bits(), trainable=False, name="noise_key")

    def _bits(self):
        bits = secrets.randbits(_KEY_BITS) if self.seed is None else self.seed % 2**_KEY_BITS
        return np.frombuffer(bits.to_bytes(_KEY_BITS // 8, "little"), np.int32)

    def read(self):
        """Returns the key as an int32 tensor of shape `[2]`."""
        return tf.convert_to_tensor(self._value)

    def renew(self):
        """Draws a new key, unless it came from a seed.

        Needed whenever the step counter may have gone back (weights were loaded): the
        same key and step with other data would release two outputs whose difference is
        free of noise.
        """
        self._value.assign(self._bits())

    def __deepcopy__(self, memo):
        # A copied optimizer that shared its key would draw the same noise on other data.
        return NoiseKey(self.seed)

    __copy__ = lambda self: NoiseKey(self.seed)


def gaussian_noise(key, step, index, shape, stddev):
    r"""Draws \(w \sim N(0, \sigma_1^2 I)\) for one variable at one step.

    Args:
        key: Int32 `[2]`, from `NoiseKey.read`.
        step: Integer scalar tensor, the number of steps taken before this one.
        index: Int, position of the variable among the trainable variables.
        shape: Static shape of the variable.
        stddev: Float, standard deviation per coordinate, in units of the mean gradient.

    Returns:
        Float32 tensor of shape `shape`. Different (step, index) give independent draws.

    Source: Zhang et al., ICLR 2024, Alg. 1 line 6.
    """
    seed = tf.random.experimental.stateless_fold_in(key, tf.cast(step, tf.int32))
    seed = tf.random.experimental.stateless_fold_in(seed, index)
    # Philox by name: "auto" may choose another generator on another kind of device.
    draws = tf.random.stateless_normal(shape, seed, dtype=tf.float32, alg="philox")
    return stddev * draws
