# Copyright 2026 The dice_tf Authors.
# SPDX-License-Identifier: Apache-2.0
"""What Keras hands out of a private model, for files and copies.

A copy has the private optimizer, and nothing holds the state of metrics: sums of losses and
counts of right answers over the training data, without noise.
"""

import keras

from dice_tf.training.run import has_private_optimizer


def _get_compile_config(stock, self):
    config = stock(self)
    if config and has_private_optimizer(self):
        # Keras hands out what `compile` received. Its writer of the .h5 format takes that
        # away, and then copies train with RMSprop; and optimizers may be assigned later.
        config["optimizer"] = keras.saving.serialize_keras_object(self.optimizer)
    return config


def _get_state_tree(stock, self, *args, **kwargs):
    tree = stock(self, *args, **kwargs)
    if has_private_optimizer(self):
        # `OrbaxCheckpoint` writes all of it. `set_state_tree` does without.
        tree["metrics_variables"] = {}
    return tree


# Methods of `keras.Model`, and what `keras_trainer` calls in their place.
METHODS = {"get_compile_config": _get_compile_config, "get_state_tree": _get_state_tree}
