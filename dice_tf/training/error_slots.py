# Copyright 2026 The dice_tf Authors.
# SPDX-License-Identifier: Apache-2.0
"""Where the feedback error is kept: variables beside an optimizer's own, in no released file."""

import math

import keras
import tensorflow as tf

# Entries from which one more pass over an error takes longer than operations of a branch.
_LARGE = 2**16


def add(optimizer, variables):
    """Returns new error variables, zeros: for each delay, one of each trainable variable.

    Args:
        optimizer: A private optimizer.
        variables: Trainable variables.
    """
    delays = range(1, optimizer.feedback_steps + 1)
    return [_error(optimizer, variable, delay) for delay in delays for variable in variables]


def _error(optimizer, variable, delay):
    # Not `add_variable`: Keras writes the variables it tracks into every kind of file.
    suffix = "error" if delay == 1 else f"error_{delay}"
    with optimizer._distribution_strategy.extended.colocate_vars_with(variable.value):
        return keras.Variable(
            initializer="zeros",
            shape=variable.shape,
            dtype="float32",
            trainable=False,
            name=f"{variable.path.replace('/', '_')}_{suffix}",
        )


def used_and_others(optimizer, slots):
    """Returns the error variables of the variables in `slots`, and those of all others.

    The others are to be forgotten: kept until their variables get gradients again, they
    would be released later than the accountant assumes.

    Args:
        optimizer: A private optimizer that is built.
        slots: Indices of trainable variables.
    """
    errors, count = optimizer.errors, len(optimizer._trainable_variables)
    delays = range(0, len(errors), count)
    unused = sorted(set(range(count)) - set(slots))
    return tuple([errors[d + i] for d in delays for i in chosen] for chosen in (slots, unused))


def values(optimizer, errors):
    """Returns the values of error variables, zeros if the step before was another one.

    `tf.train.Checkpoint.restore` takes weights and counts back and leaves the error: an
    example of a discarded step could then be drawn while its residual is fed back.

    Args:
        optimizer: A private optimizer that is built.
        errors: Some of its error variables.
    """
    found = [tf.convert_to_tensor(error.value) for error in errors]
    if not found:
        return found
    error_step, step = optimizer._private.error_step.value, optimizer._iterations.value
    is_next = tf.equal(error_step, tf.cast(step, tf.int64))
    zero = tf.zeros([])
    large = [i for i, error in enumerate(errors) if math.prod(error.shape) >= _LARGE]
    chosen = {i: tf.where(is_next, value, zero) for i, value in enumerate(found) if i not in large}
    if large:
        # A branch, because a choice would cost one more pass over these. They are chosen in it as
        # well, because TensorFlow would keep zeros of its own for each.
        of_branch = tf.cond(
            is_next,
            lambda: [found[i] for i in large],
            lambda: [tf.where(is_next, found[i], zero) for i in large],
        )
        chosen.update(zip(large, tf.nest.flatten(of_branch), strict=True))
    return [chosen[i] for i in range(len(found))]
