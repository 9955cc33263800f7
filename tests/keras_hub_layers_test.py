# Copyright 2026 The dice_tf Authors.
# SPDX-License-Identifier: Apache-2.0
"""Models of keras-hub go through the layer-wise engine exactly, each layer by a closed form."""

import keras
import keras_hub
import numpy as np
import pytest
import tensorflow as tf

from dice_tf.engine import layerwise, local_gradients

BATCH, LENGTH, VOCABULARY, IGNORED = 4, 6, 11, -1
SIZES = {
    "vocabulary_size": VOCABULARY,
    "num_layers": 2,
    "num_heads": 2,
    "hidden_dim": 8,
    "intermediate_dim": 12,
    "max_sequence_length": 9,
    "dropout": 0.0,
}
INPUTS = ("token_ids", "padding_mask")


def gpt2(lora_rank=0):
    backbone = keras_hub.models.GPT2Backbone(**SIZES)
    if lora_rank:
        backbone.enable_lora(lora_rank)
    return keras_hub.models.GPT2CausalLM(backbone=backbone, preprocessor=None)


def bert(lora_rank=0):
    backbone = keras_hub.models.BertBackbone(**SIZES)
    if lora_rank:
        backbone.enable_lora(lora_rank)
    inputs = {key: keras.Input((None,), dtype="int32", name=key) for key in INPUTS}
    segments = keras.ops.zeros_like(inputs["token_ids"])
    outputs = backbone({**inputs, "segment_ids": segments})["sequence_output"]
    return keras.Model(inputs, keras.layers.Dense(VOCABULARY)(outputs))


def translator():
    """An encoder and a decoder that looks at it; its embeddings are not tied."""
    inputs = {key: keras.Input((None,), dtype="int32", name=key) for key in INPUTS}
    embedding = keras_hub.layers.TokenAndPositionEmbedding(VOCABULARY, 9, 8, tie_weights=False)
    positions = keras_hub.layers.PositionEmbedding(9)
    embedded = embedding(inputs["token_ids"])
    encoded = keras_hub.layers.TransformerEncoder(12, 2)(
        embedded, padding_mask=inputs["padding_mask"]
    )
    # The same table at two places, once shifted: a gradient is that of both together.
    shifted = positions(embedded, start_index=3) + positions(encoded)
    decoded = keras_hub.layers.TransformerDecoder(12, 2)(embedded + shifted, encoded)
    return keras.Model(inputs, embedding.token_embedding(decoded, reverse=True))


MODELS = {
    "gpt2": gpt2,
    "gpt2 with lora": lambda: gpt2(lora_rank=2),
    "bert": bert,
    "bert with lora": lambda: bert(lora_rank=2),
    "translator": translator,
}


def example_data():
    rng = np.random.RandomState(0)
    lengths = np.array([6, 4, 5, 2])
    mask = (np.arange(LENGTH) < lengths[:, None]).astype("int32")
    # Few tokens, so that one occurs several times in a text.
    x = {"token_ids": rng.randint(0, 4, (BATCH, LENGTH)).astype("int32"), "padding_mask": mask}
    return x, np.where(mask == 1, rng.randint(0, VOCABULARY, (BATCH, LENGTH)), IGNORED)


def gradients_alone(model, x, y):
    """Gradients of every example in a batch of its own; the loss written out."""
    variables = [v.value for v in model.trainable_variables]
    found = []
    for i in range(BATCH):
        with tf.GradientTape() as tape:
            logits = model({key: value[i : i + 1] for key, value in x.items()}, training=False)[0]
            own = np.flatnonzero(y[i] != IGNORED)
            chosen = tf.gather_nd(tf.nn.log_softmax(logits), np.stack([own, y[i][own]], 1))
            loss = -tf.reduce_mean(chosen)
        gradients = tape.gradient(loss, variables, unconnected_gradients="zero")
        found.append([tf.convert_to_tensor(g).numpy().astype("float64") for g in gradients])
    return found


@pytest.mark.parametrize("name", MODELS)
def test_gradients_equal_those_of_each_example_alone(name, monkeypatch):
    def differentiated(call, batch):
        raise AssertionError(f"{call.path} ({type(call.layer).__name__}) has no closed form")

    monkeypatch.setattr(local_gradients, "contributions", differentiated)
    keras.utils.set_random_seed(0)
    model = MODELS[name]()
    model.compile(
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True, ignore_class=IGNORED),
        weighted_metrics=[],
    )
    x, y = example_data()
    model._compile_loss.build(tf.constant(y), tf.zeros([BATCH, LENGTH, VOCABULARY]))
    rng = np.random.RandomState(1)
    for v in model.trainable_variables:  # zeros and ones would hide mistakes
        v.assign(v + 0.1 * rng.randn(*v.shape))
    expected = gradients_alone(model, x, y)
    a, b = np.float32([0.5, 2.0, 0.0, 1.0]), np.float32([1.0, 0.25, 3.0, 0.5])

    sums = layerwise.weighted_gradient_sums(
        model, tf.nest.map_structure(tf.constant, x), tf.constant(y), None, lambda norms: (a, b)
    )
    norms = [np.sqrt(sum((g**2).sum() for g in each)) for each in expected]
    np.testing.assert_allclose(sums.norms, norms, rtol=1e-5)
    for got, weights in ((sums.head, a), (sums.residual, b)):
        of_variable = zip(*expected, strict=True)
        want = [sum(w * g for w, g in zip(weights, gs, strict=True)) for gs in of_variable]
        scale = max(np.abs(w).max() for w in want)
        for v, g, w in zip(model.trainable_variables, got, want, strict=True):
            g = np.zeros(w.shape) if g is None else g
            np.testing.assert_allclose(g, w, atol=1e-5 * scale, err_msg=v.path)


def test_adapters_in_a_frozen_model_are_all_that_is_trained():
    model = gpt2(lora_rank=2)
    names = {v.path.split("/")[-1] for v in model.trainable_variables}
    assert {"lora_kernel_a", "lora_kernel_b"} <= names <= {"lora_kernel_a", "lora_kernel_b", "bias"}


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__]))
