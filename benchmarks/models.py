# Copyright 2026 The dice_tf Authors.
# SPDX-License-Identifier: Apache-2.0
"""The measured models, as any version of Keras builds them.

The `keras` module is an argument: Keras 3 with TensorFlow, Keras 3 with JAX, and the
Keras 2 that TensorFlow Privacy needs build the same layers.
"""

from protocol import CLASSES, INPUT_SHAPES, TOKENS


def build(keras, name, model_class=None):
    """Builds a model.

    Args:
        keras: The module.
        name: A key of `INPUT_SHAPES`.
        model_class: Class to call with `inputs` and `outputs` instead of `keras.Model`.

    Returns:
        The model; its outputs are logits.
    """
    integer = name in ("transformer", "lstm")
    inputs = keras.Input(INPUT_SHAPES[name], dtype="int32" if integer else "float32")
    outputs = _BODIES[name](keras, inputs)
    return (model_class or keras.Model)(inputs=inputs, outputs=outputs)


def _cnn(keras, x):
    """The network of TensorFlow Privacy's MNIST tutorial: 26 thousand parameters."""
    layers = keras.layers
    x = layers.Conv2D(16, 8, strides=2, padding="same", activation="relu")(x)
    x = layers.MaxPooling2D(2, 1)(x)
    x = layers.Conv2D(32, 4, strides=2, activation="relu")(x)
    x = layers.Flatten()(layers.MaxPooling2D(2, 1)(x))
    return layers.Dense(CLASSES)(layers.Dense(32, activation="relu")(x))


def _mlp(keras, x):
    """1.9 million parameters, next to no positions: noise and updates weigh most."""
    for _ in range(2):
        x = keras.layers.Dense(1024, activation="relu")(x)
    return keras.layers.Dense(CLASSES)(x)


def _encoder_block(keras, x, width, hidden):
    layers = keras.layers
    attention = layers.MultiHeadAttention(num_heads=4, key_dim=width // 4)
    x = layers.LayerNormalization(epsilon=1e-6)(x + attention(x, x))
    hidden = layers.Dense(hidden, activation="relu")(x)
    return layers.LayerNormalization(epsilon=1e-6)(x + layers.Dense(width)(hidden))


def _transformer(keras, x):
    """A text classifier of two encoder blocks: 655 thousand parameters."""
    x = keras.layers.Embedding(TOKENS, 128)(x)
    for _ in range(2):
        x = _encoder_block(keras, x, width=128, hidden=512)
    return keras.layers.Dense(CLASSES)(keras.layers.GlobalAveragePooling1D()(x))


def _vit(keras, x):
    """A vision transformer on 8 x 8 patches: 108 thousand parameters."""

    # No stock layer: dice_tf has no rule for it and differentiates it example by example.
    class AddPositions(keras.layers.Layer):
        def build(self, shape):
            self.positions = self.add_weight(
                shape=tuple(shape[1:]), initializer="random_normal", name="positions"
            )

        def call(self, x):
            return x + self.positions

    x = keras.layers.Reshape((64, 64))(keras.layers.Conv2D(64, 4, strides=4)(x))
    x = AddPositions()(x)
    for _ in range(2):
        x = _encoder_block(keras, x, width=64, hidden=256)
    return keras.layers.Dense(CLASSES)(keras.layers.GlobalAveragePooling1D()(x))


def _lstm(keras, x):
    """A text classifier with a recurrent layer, which has no rule: 389 thousand parameters."""
    x = keras.layers.Embedding(TOKENS, 128)(x)
    return keras.layers.Dense(CLASSES)(keras.layers.LSTM(128)(x))


def _warm_up(keras, x):
    """Not measured: its first step loads what every process loads once."""
    return keras.layers.Dense(CLASSES)(x)


_BODIES = {
    "cnn": _cnn,
    "mlp": _mlp,
    "vit": _vit,
    "transformer": _transformer,
    "lstm": _lstm,
    "warm_up": _warm_up,
}
