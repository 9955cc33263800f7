# Copyright 2026 The dice_tf Authors.
# SPDX-License-Identifier: Apache-2.0
"""Gaussian noise: the same on every replica, reproducible only from a secret key.

Draws are stateless functions of (key, step, variable index). Replicas and workers
that hold the same key draw the same noise without communicating, and a run that
resumes with its key continues exactly.

The random bits are those of Threefry, a block cipher of few rounds applied to a counter,
because it is made of operations that XLA fuses with the transform to one loop: less than
half the time of TensorFlow's own normal draws on a CPU (`benchmarks/noise.py`). So these
functions are compiled with XLA even where the model is not.
"""

import functools
import math
import os
import platform
import secrets
from typing import Any

import numpy as np
import tensorflow as tf

from dice_tf.checks.arguments import check_integer

_KEY_BITS = 64
_ROTATIONS = ((13, 15, 26, 6), (17, 29, 16, 24))
_PARITY = 0x1BD11BDA
# sin(pi s) = s P(s^2) on [-1/2, 1/2], to 7e-9: interpolated at the Chebyshev nodes of s^2.
_SINE = (0.07765591226793352, -0.5982904112804092, 2.550077386528565, -5.167710076668303,
         3.1415926400772025)  # fmt: skip
# ln(1 + f) = f P(f) for 1 + f in [sqrt(1/2), sqrt(2)], to 3e-8 of it: at the Chebyshev nodes of f.
_LOGARITHM = (0.08533313082996152, -0.14269258206218832, 0.14977401280127375,
              -0.16577992896798863, 0.1995593335838325, -0.2500135218549606, 0.3333419328613508,
              -0.4999999638212389, 0.9999999741310671)  # fmt: skip
# The bits of sqrt(1/2) as float32.
_ROOT_OF_HALF = 0x3F3504F3
# Entries from which a variable has a draw of its own: XLA compiles each size anew.
_LARGE = 2**18
# Entries of noise that may be drawn before there is anything to add them to: 32 MiB.
_AHEAD = 2**23
# How many forks lead from the first process to this one.
_forks = 0


def _count_fork():
    global _forks
    _forks += 1


if hasattr(os, "register_at_fork"):  # Not on Windows, which has no forks.
    # It does no more, because another thread may have held a lock of TensorFlow's.
    os.register_at_fork(after_in_child=_count_fork)


class NoiseKey:
    """A 64-bit key for stateless noise draws, kept out of everything that is saved.

    A plain Python object on purpose: Keras and `tf.train.Checkpoint` track variables,
    lists and layers that are set as attributes, and would write the key to disk.

    Two objects that held the same key would draw the same noise on other data, and the
    difference of their releases would be free of it. So a copy, what comes out of a
    pickle, and a process that was forked have keys of their own, unless a seed decides.
    (A pickle holds no seed either.)

    Args:
        seed: Int, or `None` for 64 unpredictable bits from the operating system. A
            seed makes runs reproducible and the noise predictable to whoever knows it.
    """

    def __init__(self, seed=None):
        self.seed = None if seed is None else check_integer("noise_seed", seed, minimum=0)
        bits = secrets.randbits(_KEY_BITS) if self.seed is None else self.seed % 2**_KEY_BITS
        self._forks = _forks
        with tf.init_scope():
            self._variable = tf.Variable(_halves(bits), trainable=False, name="noise_key")

    @property
    def variable(self):
        """The int32 variable of shape `[2]` that holds the key of this process."""
        self.renew_after_fork()
        return self._variable

    def renew_after_fork(self):
        """Takes a fresh key if this process was forked since; for what is compiled already."""
        if self._forks != _forks:
            self._forks = _forks
            if self.seed is None:
                with tf.init_scope():
                    self._variable.assign(_halves(secrets.randbits(_KEY_BITS)))

    def read(self):
        """Returns the key as an int32 tensor of shape `[2]`."""
        return tf.convert_to_tensor(self.variable)

    __copy__ = lambda self: NoiseKey(self.seed)
    __deepcopy__ = lambda self, memo: NoiseKey(self.seed)
    __reduce__ = lambda self: (NoiseKey, ())


def _halves(bits) -> Any:
    return np.frombuffer(bits.to_bytes(_KEY_BITS // 8, "little"), np.int32)


def gaussian_noise(key, step, shapes, stddev):
    r"""Draws \(w \sim N(0, \sigma_1^2 I)\) for all variables at one step.

    Args:
        key: Int32 `[2]`, from `NoiseKey.read`.
        step: Integer scalar tensor, the number of noise draws made before this one.
        shapes: Dict from a variable's index among the trainable variables to its shape.
        stddev: Float or float32 scalar, standard deviation per coordinate, in units of the mean
            gradient.

    Returns:
        Dict from the same indices to float32 tensors of these shapes. Different steps and
        different variables get independent draws.

    Source: Zhang et al., ICLR 2024, Alg. 1 line 6.
    """
    sizes = {index: math.prod(shape) for index, shape in shapes.items()}
    draws = lambda index, size: _draws(key, step, index, size, stddev)
    large = [index for index, size in sizes.items() if size >= _LARGE]
    noise = {index: draws(index, sizes[index]) for index in large}
    # All small variables share the draw of the first of them, of a size that other models
    # have as well.
    small = [index for index in sizes if index not in noise]
    pooled = sum(sizes[index] for index in small)
    if pooled:
        eighth = 1 << max((pooled - 1).bit_length() - 4, 10)
        pool = draws(small[0], -(-pooled // eighth) * eighth)[:pooled]
        noise.update(zip(small, tf.split(pool, [sizes[index] for index in small]), strict=True))
    # Most variables of a deep model are vectors already.
    shaped = lambda draw, shape: draw if len(shape) == 1 else tf.reshape(draw, shape)
    return {index: shaped(noise[index], shape) for index, shape in shapes.items()}


def add_noise(tensors, key, step, stddev):
    """Returns tensors plus the noise that `gaussian_noise` draws for them.

    Args:
        tensors: Dict from a variable's index among the trainable variables to a float32 tensor.
        key, step, stddev: As for `gaussian_noise`.

    Returns:
        Dict from the same indices to tensors of the same shapes.
    """
    sizes = {index: math.prod(tensor.shape) for index, tensor in tensors.items()}
    # All small ones in one call, because they share a draw.
    small = [index for index, size in sizes.items() if size < _LARGE]
    calls = [small, *([index] for index in tensors if index not in small)]
    drawn, entries = {}, 0
    for called in filter(None, calls):
        entries += sum(sizes[index] for index in called)
        # TensorFlow runs what is ready: noise that waits for nothing is drawn beside the forward
        # pass, which saves time, and lies in memory until the sums are there.
        waits_for = [] if entries <= _AHEAD else [tensors[index] for index in called]
        with tf.control_dependencies(waits_for):
            of_call = tf.identity(key)
        shapes = {index: tensors[index].shape for index in called}
        drawn.update(gaussian_noise(of_call, step, shapes, stddev))
    return {index: tensor + drawn[index] for index, tensor in tensors.items()}


def _draws(key, step, index, size, stddev):
    """Returns float32 `[size]`, the draws of one variable, or of all small ones."""
    counter = tf.stack([tf.cast(step, tf.int32), index])
    stddev = tf.convert_to_tensor(stddev, tf.float32)
    # A tensor, which is a number by the time XLA compiles: TensorFlow traces once for all sizes.
    return tf.ensure_shape(_compiled()(key, counter, stddev, tf.constant(size)), [size])


@functools.cache
def _compiled():
    def draw(key, counter, stddev, size):
        # A cipher is one-to-one: no two (step, index) of a run share a seed.
        seed = tf.concat(_threefry()(key, counter[:1], counter[1:]), 0)
        return stddev * standard_normal(seed, size)

    arguments = (([2], tf.int32), ([2], tf.int32), ([], tf.float32), ([], tf.int32))
    signature = [tf.TensorSpec(*argument) for argument in arguments]
    return tf.function(draw, signature, jit_compile=xla_is_available(), autograph=False)


def xla_is_available():
    """Whether TensorFlow can compile for the devices of this machine; not for Apple's GPUs."""
    apple = platform.system() == "Darwin" and "arm" in platform.processor().lower()
    return not (apple and tf.config.list_physical_devices("GPU"))


def standard_normal(seed, size):
    r"""Draws \(N(0, 1)\) by the Box-Muller transform of uniform draws.

    \[w_j = \sqrt{-2 \ln u_j} \sin(\pi s_j), \qquad
      u_j \in (0, 1),\quad s_j \in (-\tfrac12, \tfrac12)\]

    Half a turn is enough, because the sine takes the same values on the other half.
    TensorFlow's own kernel gives \(u_j\) 23 random bits, so that no draw is beyond 5.65:
    an example that shifts a release past that edge would be found out with a
    probability that may exceed delta. Here \(u_j\) has 41 bits, and the edge is at 7.6.

    Args:
        seed: Int32 or uint32 `[2]`.
        size: Int or int32 scalar, number of draws, below 2**31.

    Returns:
        Float32 `[size]`.

    Source: Box and Muller, Ann. Math. Statist. 29 (1958).
    """
    entry = tf.range(size)
    first, second = _threefry()(tf.bitcast(seed, tf.int32), entry, tf.zeros_like(entry))
    # The angle takes 23 bits of its word; the other 9 refine the radius where it is large.
    shift = lambda word, bits: _to_float(tf.bitwise.right_shift(word, np.uint32(bits)))
    low = lambda word, bits: _to_float(tf.bitwise.bitwise_and(word, np.uint32(2**bits - 1)))
    fine = low(first, 8) + (low(second, 9) + 0.5) * 2.0**-9
    uniform = (shift(first, 8) * 2.0**8 + fine) * 2.0**-32
    half_turns = (shift(second, 9) + 0.5) * 2.0**-23 - 0.5
    sine = half_turns * tf.math.polyval(list(_SINE), tf.square(half_turns))
    return tf.sqrt(-2.0 * _log(uniform)) * sine


def _log(number):
    """Natural logarithms of positive float32 numbers. XLA's, of all numbers, take longer."""
    bits = tf.bitcast(number, tf.int32)
    exponent = tf.bitwise.right_shift(bits - _ROOT_OF_HALF, 23)
    above_1 = tf.bitcast(bits - tf.bitwise.left_shift(exponent, 23), tf.float32) - 1.0
    of_rest = above_1 * tf.math.polyval(list(_LOGARITHM), above_1)
    return tf.cast(exponent, tf.float32) * math.log(2) + of_rest


def _to_float(word):
    # Through int32, for which processors have an instruction; no word here has its high bit.
    return tf.cast(tf.cast(word, tf.int32), tf.float32)


@functools.cache
def _threefry():
    # Most operations of a draw, traced once for the seed and for the entries.
    signature = [tf.TensorSpec([size], tf.int32) for size in (2, None, None)]
    return tf.function(threefry, signature, autograph=False)


def threefry(key, first, second):
    """Encrypts counters with Threefry-2x32 of 20 rounds.

    Args:
        key: Int32 or uint32 `[2]`.
        first: Int32 or uint32 `[size]`, the first words of the counters.
        second: Int32 or uint32 `[size]`, the second words.

    Returns:
        Pair of uint32 `[size]`: both words of every block. Different counters give
        different blocks.

    Source: Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011.
    """
    key, first, second = (tf.bitcast(t, tf.uint32) for t in (key, first, second))
    xor = tf.bitwise.bitwise_xor
    keys = [key[0], key[1], xor(xor(key[0], key[1]), np.uint32(_PARITY))]
    first, second = first + keys[0], second + keys[1]
    for group in range(5):
        for bits in _ROTATIONS[group % 2]:
            first += second
            left = tf.bitwise.left_shift(second, np.uint32(bits))
            second = xor(left | tf.bitwise.right_shift(second, np.uint32(32 - bits)), first)
        first += keys[(group + 1) % 3]
        second += keys[(group + 2) % 3] + np.uint32(group + 1)
    return first, second
