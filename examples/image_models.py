# Copyright 2026 The dice_tf Authors.
# SPDX-License-Identifier: Apache-2.0
"""Small stock Keras models for the image data sets of the examples."""

import keras
from keras import layers


def build_model(dataset, image_shape, num_classes):
    """Returns a small stock Keras model; it knows nothing about privacy.

    No BatchNormalization: it mixes the examples of a batch. Small, because the noise
    that a gradient gets grows with the number of weights.

    Args:
        dataset: Name of the data set.
        image_shape: Tuple (height, width, channels).
        num_classes: Int.

    Returns:
        `keras.Model` from uint8 images to logits.
    """
    conv = lambda filters, size, **options: layers.Conv2D(
        filters, size, activation="tanh", **options
    )
    if dataset == "digits":
        hidden = [conv(16, 3, padding="same"), layers.MaxPooling2D(2)]
    elif image_shape[0] == 28:
        hidden = [
            conv(16, 8, strides=2, padding="same"),
            layers.MaxPooling2D(2, 1),
            conv(32, 4, strides=2),
            layers.MaxPooling2D(2, 1),
            layers.Flatten(),
            layers.Dense(32, activation="tanh"),
        ]
    else:
        hidden = []
        for filters in (32, 64, 128):
            hidden += [conv(filters, 3, padding="same"), layers.MaxPooling2D(2)]
    return keras.Sequential(
        [
            keras.Input(image_shape, dtype="uint8"),
            layers.Rescaling(1 / 255),
            *hidden,
            layers.Flatten(),
            layers.Dense(num_classes),
        ]
    )
