# Copyright 2026 The dice_tf Authors.
# SPDX-License-Identifier: Apache-2.0
"""The vision transformer of the image example: exact gradients, presets, clear errors."""

import pathlib
import sys

import keras
import keras_hub
import numpy as np
import pytest
import tensorflow as tf

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1] / "examples"))

import image_models

from dice_tf.engine import layerwise, local_gradients
from dice_tf.mechanism import DiceMechanism
from dice_tf.mechanism.clipping import clip_weights

MECHANISM = DiceMechanism(
    l2_norm_clip=0.5, error_norm_clip=0.3, noise_multiplier=1.0, expected_batch_size=8
)
TINY = dict(patch_size=4, num_layers=2, num_heads=2, hidden_dim=8, mlp_dim=16)


@pytest.fixture(scope="module", name="preset")
def tiny_preset(tmp_path_factory):
    keras.utils.set_random_seed(1)
    folder = tmp_path_factory.mktemp("preset")
    keras_hub.models.ViTBackbone(image_shape=(8, 8, 3), **TINY).save_to_preset(str(folder))
    return str(folder)


def make_batch(image_shape):
    random = np.random.default_rng(0)
    images = random.integers(0, 256, (5, *image_shape)).astype("uint8")
    return tf.constant(images), tf.constant(random.integers(0, 3, 5))


def sums_of_batches_of_one(model, loss, x, y):
    """Norms and both weighted sums, in float64 from gradients of the stock model."""
    per_example = []
    for i in range(len(y)):
        with tf.GradientTape() as tape:
            value = loss(y[i : i + 1], model(x[i : i + 1]))
        gradients = tape.gradient(value, [v.value for v in model.trainable_variables])
        per_example.append([tf.convert_to_tensor(g).numpy().astype("float64") for g in gradients])
    norms = np.sqrt([sum((g**2).sum() for g in gradients) for gradients in per_example])
    weights = clip_weights(tf.constant(norms, tf.float32), MECHANISM)
    sums = [
        [np.tensordot(w.numpy(), np.stack(g), axes=1) for g in zip(*per_example, strict=True)]
        for w in weights
    ]
    return norms, *sums


# The second one is grey and of half the size that the transformer wants.
@pytest.mark.parametrize("image_shape", [(8, 8, 3), (4, 4, 1)])
def test_gradients_equal_those_of_batches_of_one(preset, image_shape, monkeypatch):
    keras.utils.set_random_seed(0)
    model = image_models.build_vit(preset, image_shape, 3)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(loss=loss)
    model._compile_loss.build(tf.zeros([2]), tf.zeros([2, 3]))  # the train step does this
    random = np.random.RandomState(1)
    for v in model.trainable_variables:  # zeros and ones would hide mistakes
        v.assign(v + 0.1 * random.randn(*v.shape))
    x, y = make_batch(image_shape)
    norms, *sums = sums_of_batches_of_one(model, loss, x, y)
    one_by_one, contributions = [], local_gradients.contributions

    def spy(call, batch):
        one_by_one.append((type(call.layer).__name__, [v.name for v in call.variables]))
        return contributions(call, batch)

    monkeypatch.setattr(local_gradients, "contributions", spy)
    weights = lambda norms: clip_weights(norms, MECHANISM)
    step = lambda x, y: layerwise.weighted_gradient_sums(model, x, y, None, weights)
    signature = [tf.TensorSpec([None, *t.shape[1:]], t.dtype) for t in (x, y)]
    traced = tf.function(step, input_signature=signature, autograph=False)
    found = traced(x, y)
    np.testing.assert_allclose(found.norms, norms, rtol=1e-5)
    for got, expected in zip((found.head, found.residual), sums, strict=True):
        scale = np.sqrt(sum((e**2).sum() for e in expected))
        for g, e in zip(got, expected, strict=True):
            np.testing.assert_allclose(g, e, rtol=1e-5, atol=1e-5 * scale)
    # All else has a closed form.
    assert one_by_one == [("ViTPatchingAndEmbedding", ["class_token", "embeddings"])]


def test_preset_starts_from_its_weights_and_a_head_of_zeros(preset):
    model = image_models.build_vit(preset, (4, 4, 1), 3)
    saved = keras_hub.models.ViTBackbone.from_preset(preset)
    backbone = next(layer for layer in model.layers if isinstance(layer, type(saved)))
    for loaded, stored in zip(backbone.weights, saved.weights, strict=True):
        np.testing.assert_array_equal(loaded, stored)
    x, _ = make_batch((4, 4, 1))
    assert not model(x).numpy().any()


def test_images_reach_the_transformer_as_it_was_trained(preset):
    model = image_models.build_vit(preset, (4, 4, 1), 3)
    backbone = next(layer for layer in model.layers if hasattr(layer, "save_to_preset"))
    grey = np.zeros((2, 4, 4, 1), dtype="uint8")
    grey[1] = 255
    entry = keras.Model(model.inputs[0], backbone._inbound_nodes[-1].input_tensors[0])
    np.testing.assert_allclose(entry(grey), [np.full((8, 8, 3), -1), np.ones((8, 8, 3))], rtol=1e-6)


def test_unknown_preset_is_refused_with_the_remedy():
    with pytest.raises(ValueError, match="--preset=vit_of_nobody could not be loaded") as refused:
        image_models.build_vit("vit_of_nobody", (32, 32, 3), 10)
    assert "save_to_preset" in str(refused.value) and "--preset=random" in str(refused.value)
    assert "vit_base_patch16_224_imagenet" in str(refused.value)


def test_preset_out_of_reach_is_not_replaced_by_random_weights(monkeypatch):
    def unreachable(preset):
        raise ConnectionError(f"no route to the host of {preset}")

    monkeypatch.setattr(keras_hub.models.ViTBackbone, "from_preset", unreachable)
    with pytest.raises(ValueError, match="no route to the host.*need a network the first time"):
        image_models.build_vit("vit_base_patch16_224_imagenet", (32, 32, 3), 10)


def test_missing_keras_hub_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "keras_hub", None)
    with pytest.raises(ImportError, match="pip install keras-hub"):
        image_models.build_vit("random", (32, 32, 3), 10)


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__]))
