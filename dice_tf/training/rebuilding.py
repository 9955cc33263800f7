# Copyright 2026 The dice_tf Authors.
# SPDX-License-Identifier: Apache-2.0
"""An optimizer whose model trains other variables than before: one count and one record.

Layers are frozen and unfrozen between two `fit`s of one run. Keras' optimizers know the
variables they were built with for good; ours are built again and keep what epsilon needs:
the count of steps, the sampling record, the noise keys and their use. Slots of the update
rule stay with their variables, also of those that are frozen for a while.
"""

import keras
import tensorflow as tf


def is_built_for(optimizer, variables):
    """Whether an optimizer was built for exactly these variables, in any order."""
    return optimizer.built and _keys(optimizer, variables) == set(
        optimizer._trainable_variables_indices
    )


def knows(optimizer, variables):
    """Whether an optimizer was built, for these variables and perhaps others."""
    return optimizer.built and _keys(optimizer, variables) <= set(
        optimizer._trainable_variables_indices
    )


def unbuild(optimizer):
    """Takes an optimizer back to where `build` begins, and returns the errors it had.

    Args:
        optimizer: A private optimizer that is built.

    Returns:
        Dict from the key of a variable to the list of values of its errors, by delay. Of
        variables that are not trained any more they are to be forgotten.
    """
    private, variables, errors = optimizer._private, optimizer._trainable_variables, {}
    if int(private.error_step.numpy()) == int(optimizer._iterations.numpy()):
        errors = {
            optimizer._var_key(variable): [
                error.numpy() for error in private.errors[i :: len(variables)]
            ]
            for i, variable in enumerate(variables)
        }
    # Steps that were traced for the old set, in a loop of one's own, must not feed back what is
    # not of their last step: they look at this variable, the others at a new one.
    private.error_step.assign(-1)
    private.generation += 1
    first = (optimizer._iterations, optimizer._learning_rate)
    kept = [variable for variable in optimizer.variables if any(variable is v for v in first)]
    # A new list, because `tf.train.Checkpoint` refuses one from which something was removed.
    with keras.src.utils.tracking.DotNotTrackScope():
        tf.__internal__.tracking.AutoTrackable.__setattr__(optimizer, "_variables", kept)
    tracker = optimizer._tracker
    tracker.config["variables"] = (tracker.config["variables"][0], optimizer._variables)
    tracker.stored_ids["variables"] = set(map(id, kept))
    optimizer._trainable_variables_indices = {}
    optimizer.built = False
    return errors


def restore_errors(optimizer, errors):
    """Gives the errors of `unbuild` to the variables that are still trained."""
    private, variables = optimizer._private, optimizer._trainable_variables
    for i, variable in enumerate(variables):
        values = errors.get(optimizer._var_key(variable), ())
        for error, value in zip(private.errors[i :: len(variables)], values):
            error.assign(value)


def build_again(model):
    """Builds the optimizer of a model anew if the model trains other variables by now.

    Args:
        model: Compiled Keras model with a private optimizer. One that is not built is left so.
    """
    optimizer, variables = model.optimizer, model.trainable_variables
    if optimizer.built and variables and not is_built_for(optimizer, variables):
        with model.distribute_strategy.scope():
            optimizer.build(variables)


def _keys(optimizer, variables):
    return {optimizer._var_key(variable) for variable in variables}
