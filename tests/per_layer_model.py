# Copyright 2026 The dice_tf Authors.
# SPDX-License-Identifier: Apache-2.0
"""A model of two layers whose thresholds differ, for several tests."""

import keras
from keras import layers as L
from softmax_regression import CLASSES, FEATURES

from dice_tf import PerLayerClipping
from dice_tf.mechanism import DiceMechanism

HIDDEN = 5
SPLIT = (FEATURES + 1) * HIDDEN
SIZE = SPLIT + (HIDDEN + 1) * CLASSES
UNEVEN = PerLayerClipping({"hidden": 1.0, "output": 3.0})
PARTS = {
    "per_layer": [(slice(SPLIT), 0.5**0.5), (slice(SPLIT, SIZE), 0.5**0.5)],
    UNEVEN: [(slice(SPLIT), 0.1**0.5), (slice(SPLIT, SIZE), 0.9**0.5)],
}


def make_model(optimizer, name="model"):
    keras.utils.set_random_seed(3)
    inputs = keras.Input((FEATURES,))
    hidden = L.Dense(HIDDEN, activation="tanh", name="hidden")(inputs)
    model = keras.Model(inputs, L.Dense(CLASSES, name="output")(hidden), name=name)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(optimizer, loss)
    return model


def mechanism(clipping="per_layer", **arguments):
    defaults = dict(l2_norm_clip=0.5, noise_multiplier=2.0, expected_batch_size=4)
    return DiceMechanism(**{**defaults, "clipping": clipping, **arguments})
