# Copyright 2026 The dice_tf Authors.
# SPDX-License-Identifier: Apache-2.0
"""Models that people train, and layers that are slow or hard: random weights, random data.

In groups: `applications` (keras.applications on images of 64 x 64), `layers` (one kind of
layer, three times in a row), `recurrent` (with masks, and over images), `table` (a column of
20,000 categories) and `hub` (small backbones of keras-hub, if that is installed).
"""

import functools
import importlib.util
from typing import Any, NamedTuple

import keras
import numpy as np

import dice_tf

CLASSES = 10
CATEGORIES, NUMBERS = 20_000, 8
_LENGTH, _TOKENS = 64, 2000


class RealModel(NamedTuple):
    """A model, and what it is measured on.

    Attributes:
        group: Name of its group.
        batch: Int.
        build: Function without arguments; the outputs of the model are logits.
        inputs: Function from a generator and a count to inputs.
    """

    group: str
    batch: int
    build: Any
    inputs: Any


def _images(generator, count, shape=(64, 64, 3)):
    return generator.normal(size=(count, *shape)).astype("float32")


def _sequences(generator, count):
    """Token ids with up to half of the positions masked."""
    ids = generator.integers(1, _TOKENS, (count, _LENGTH)).astype("int32")
    lengths = generator.integers(_LENGTH // 2, _LENGTH + 1, (count, 1))
    return np.where(np.arange(_LENGTH) < lengths, ids, 0).astype("int32")


def _rows_of_table(generator, count):
    return {
        "numbers": generator.normal(size=(count, NUMBERS)).astype("float32"),
        "category": generator.integers(0, CATEGORIES, (count, 1)).astype("int32"),
    }


def _texts(names, generator, count):
    ids = _sequences(generator, count)
    return {name: value for name, value in {
        "token_ids": ids,
        "segment_ids": np.zeros_like(ids),
        "padding_mask": (ids > 0).astype("int32"),
    }.items() if name in names}  # fmt: skip


def _application(name):
    """A model of keras.applications; GroupNormalization takes the place of batch statistics."""
    model = getattr(keras.applications, name)(
        weights=None, input_shape=(64, 64, 3), classes=CLASSES, classifier_activation=None
    )
    mixes = any(isinstance(layer, keras.layers.BatchNormalization) for layer in model.layers)
    return dice_tf.fix_model(model) if mixes else model


def _three(make, shape=(32, 32, 32)):
    layers = keras.layers
    stack = [make() for _ in range(3)]
    return keras.Sequential([keras.Input(shape), *stack, layers.Flatten(), layers.Dense(CLASSES)])


def _inverted_residuals():
    """Six blocks of MobileNetV2, with a skip connection each."""
    layers = keras.layers
    inputs = x = keras.Input((32, 32, 32))
    for _ in range(6):
        block = keras.Sequential([
            layers.Conv2D(96, 1, use_bias=False), layers.GroupNormalization(6), layers.ReLU(6),
            layers.DepthwiseConv2D(3, padding="same", use_bias=False),
            layers.GroupNormalization(6), layers.ReLU(6),
            layers.Conv2D(32, 1, use_bias=False), layers.GroupNormalization(2),
        ])  # fmt: skip
        x = x + block(x)
    return keras.Model(inputs, layers.Dense(CLASSES)(layers.GlobalAveragePooling2D()(x)))


def _bidirectional():
    layers = keras.layers
    return keras.Sequential([
        keras.Input((_LENGTH,), dtype="int32"),
        layers.Embedding(_TOKENS, 64, mask_zero=True),
        layers.Bidirectional(layers.LSTM(64, return_sequences=True)),
        layers.Bidirectional(layers.GRU(64)),
        layers.Dense(CLASSES),
    ])  # fmt: skip


def _conv_lstm():
    layers = keras.layers
    return keras.Sequential([
        keras.Input((8, 16, 16, 3)),
        layers.ConvLSTM2D(16, 3, padding="same"),
        layers.Flatten(),
        layers.Dense(CLASSES),
    ])  # fmt: skip


def _table():
    layers = keras.layers
    numbers = keras.Input((NUMBERS,), name="numbers")
    category = keras.Input((1,), dtype="int32", name="category")
    embedded = layers.Flatten()(layers.Embedding(CATEGORIES, 16)(category))
    x = layers.Concatenate()([numbers, embedded])
    for _ in range(2):
        x = layers.Dense(64, activation="relu")(x)
    inputs = {"numbers": numbers, "category": category}
    return keras.Model(inputs, layers.Dense(CLASSES)(x))


def _backbone(name):
    """A small backbone of keras-hub and a dense layer on its outputs."""
    # Only some install it, and it has no types.
    import keras_hub  # type: ignore

    text = {"vocabulary_size": _TOKENS, "num_layers": 2, "hidden_dim": 128,
            "intermediate_dim": 256}  # fmt: skip
    heads, length = {"num_heads": 4}, {"max_sequence_length": _LENGTH}
    queries = {"num_query_heads": 4, "num_key_value_heads": 2}
    arguments = {
        "BertBackbone": {**text, **heads, **length},
        "RobertaBackbone": {**text, **heads, **length},
        "GPT2Backbone": {**text, **heads, **length},
        "GemmaBackbone": {**text, **queries, "head_dim": 32},
        "LlamaBackbone": {**text, **queries},
        "ViTBackbone": {
            "image_shape": (64, 64, 3), "patch_size": (8, 8), "num_layers": 2, "hidden_dim": 128,
            "mlp_dim": 256, **heads,
        },
    }[name]  # fmt: skip
    backbone = getattr(keras_hub.models, name)(**arguments)
    outputs = backbone(backbone.input)
    if isinstance(outputs, dict):
        outputs = outputs["sequence_output"]
    pooled = keras.layers.GlobalAveragePooling1D()(outputs)
    return keras.Model(backbone.input, keras.layers.Dense(CLASSES)(pooled))


_TEXT_INPUTS = {
    "BertBackbone": ("token_ids", "segment_ids", "padding_mask"),
    "RobertaBackbone": ("token_ids", "padding_mask"),
    "GPT2Backbone": ("token_ids", "padding_mask"),
    "GemmaBackbone": ("token_ids", "padding_mask"),
    "LlamaBackbone": ("token_ids", "padding_mask"),
}


def _models():
    layers = keras.layers
    maps = functools.partial(_images, shape=(32, 32, 32))
    for name in ("MobileNetV2", "EfficientNetB0", "ResNet50", "DenseNet121", "ConvNeXtTiny"):
        build = functools.partial(_application, name)
        yield name, RealModel("applications", 32, build, _images)
    for name, make in {
        "Conv2D": lambda: layers.Conv2D(32, 3, padding="same", activation="relu"),
        "DepthwiseConv2D": lambda: layers.DepthwiseConv2D(3, padding="same"),
        "SeparableConv2D": lambda: layers.SeparableConv2D(32, 3, padding="same"),
        "LayerNormalization": layers.LayerNormalization,
        "GroupNormalization": lambda: layers.GroupNormalization(8),
    }.items():
        yield f"{name} x 3", RealModel("layers", 32, functools.partial(_three, make), maps)
    yield "inverted residual x 6", RealModel("layers", 32, _inverted_residuals, maps)
    yield "BiLSTM + BiGRU with masks", RealModel("recurrent", 32, _bidirectional, _sequences)
    videos = functools.partial(_images, shape=(8, 16, 16, 3))
    yield "ConvLSTM2D", RealModel("recurrent", 32, _conv_lstm, videos)
    yield "embedding of 20000", RealModel("table", 256, _table, _rows_of_table)
    if importlib.util.find_spec("keras_hub") is None:
        return
    for name, inputs in _TEXT_INPUTS.items():
        texts = functools.partial(_texts, inputs)
        yield name, RealModel("hub", 32, functools.partial(_backbone, name), texts)
    yield "ViTBackbone", RealModel("hub", 32, functools.partial(_backbone, "ViTBackbone"), _images)


GROUPS = ("applications", "layers", "recurrent", "table", "hub")
MODELS = dict(_models())
_BATCHES = 12


def make_examples(name, batch):
    """Returns random inputs and labels, some batches of them.

    Args:
        name: A key of `MODELS`.
        batch: Int.

    Returns:
        Pair: inputs, an array or a dict of arrays, and int32 labels `[examples]`.
    """
    generator, count = np.random.default_rng(0), _BATCHES * batch
    labels = generator.integers(CLASSES, size=count, dtype=np.int32)
    return MODELS[name].inputs(generator, count), labels
