# Copyright 2026 The dice_tf Authors.
# SPDX-License-Identifier: Apache-2.0
"""Stock Keras models for the image data sets of the examples.

No BatchNormalization: it mixes the examples of a batch.
"""

import keras
from keras import layers

RANDOM = "random"
# A transformer for images of 32 x 32, and for training on two cores: half a million weights.
RANDOM_VIT = dict(patch_size=4, num_layers=4, num_heads=4, hidden_dim=128, mlp_dim=256)


def build_model(dataset, image_shape, num_classes):
    """Returns a small stock Keras model; it knows nothing about privacy.

    Small, because the noise that a gradient gets grows with the number of weights.

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


def build_vit(preset, image_shape, num_classes):
    """Returns keras-hub's vision transformer with a new linear head on its class token.

    Images become what the transformer was trained on: values in [-1, 1], three
    channels, its own height and width. That happens inside the model, so that with
    `chunk_size` only the images of one chunk are ever enlarged.

    Args:
        preset: What `keras_hub.models.ViTBackbone.from_preset` takes (a name such as
            "vit_base_patch16_224_imagenet", or a folder), or "random" for a small
            transformer with random weights.
        image_shape: Tuple (height, width, channels).
        num_classes: Int.

    Returns:
        `keras.Model` from uint8 images to logits.

    Raises:
        ImportError: If keras-hub is not installed.
        ValueError: If the preset cannot be loaded.

    Source: Dosovitskiy et al., "An Image is Worth 16x16 Words", ICLR 2021.
    """
    backbone = _backbone(preset, image_shape)
    _, height, width, channels = backbone.input_shape
    images = keras.Input(image_shape, dtype="uint8")
    x = layers.Rescaling(1 / 127.5, offset=-1.0)(images)
    if image_shape[-1] != channels:
        x = layers.Concatenate()([x] * channels)
    if image_shape[:2] != (height, width):
        x = layers.Resizing(height, width, interpolation="bicubic")(x)
    # A head of zeros says nothing at first, and so cannot push the backbone about.
    head = layers.Dense(num_classes, kernel_initializer="zeros", name="head")
    return keras.Model(images, head(backbone(x)[:, 0]))


def _backbone(preset, image_shape):
    try:
        # Imported late: it takes seconds, and only this model needs it.
        import keras_hub
    except ImportError as error:
        raise ImportError(
            "--model=vit needs keras-hub, which cannot be imported here: install it with "
            "`pip install keras-hub`, or use --model=cnn."
        ) from error
    if preset == RANDOM:
        return keras_hub.models.ViTBackbone(image_shape=image_shape, **RANDOM_VIT)
    try:
        return keras_hub.models.ViTBackbone.from_preset(preset)
    # Of keras-hub, of the hubs that it downloads from, and of their HTTP clients.
    except Exception as error:
        known = ", ".join(keras_hub.models.ViTBackbone.presets)
        raise ValueError(
            f"--preset={preset} could not be loaded ({type(error).__name__}: {error}). "
            "Pretrained weights need a network the first time. Without one, copy them from a "
            "machine that has: save them there by `backbone.save_to_preset(FOLDER)` and pass "
            f"--preset=FOLDER. --preset={RANDOM} trains a small transformer from random weights, "
            f"which is no replacement for a pretrained one. Known presets: {known}."
        ) from error
