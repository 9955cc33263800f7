# Copyright 2026 The dice_tf Authors.
# SPDX-License-Identifier: Apache-2.0
"""`fix_model` on real models: keras.applications, keras-hub, nested models, layers of one's own."""

import inspect
import re

import keras
import keras_hub
import numpy as np
import pytest
import tensorflow as tf

import dice_tf
from dice_tf.checks.model_checks import layers_with_paths
from dice_tf.errors import ModelError

LAYERS = keras.layers

# The smallest model of each family with BatchNormalization; its other sizes are made by the same
# function with other widths and depths.
FAMILIES = {
    "DenseNet121": 32,
    "EfficientNetB0": 32,
    "EfficientNetV2B0": 32,
    "InceptionResNetV2": 75,
    "InceptionV3": 75,
    "MobileNet": 32,
    "MobileNetV2": 32,
    "MobileNetV3Small": 32,
    "NASNetMobile": 32,
    "ResNet50": 32,
    "ResNet50V2": 32,
    "Xception": 71,
}
WITHOUT = {"convnext", "vgg16", "vgg19"}


def is_batch_normalization(layer):
    return isinstance(layer, LAYERS.BatchNormalization)


def is_group_normalization(layer):
    return isinstance(layer, LAYERS.GroupNormalization)


def images(side, batch=2):
    return np.random.default_rng(0).normal(size=(batch, side, side, 3)).astype("float32")


def randomised(model):
    """Gives every weight another value than a new model would have."""
    random = np.random.default_rng(1)
    for weight in model.weights:
        weight.assign(random.uniform(0.5, 1.5, weight.shape))
    return model


def fixed_and_compared(model):
    """Fixes a model, and compares whatever was not replaced with the original."""
    fixed = dice_tf.fix_model(model)
    old, new = dict(layers_with_paths(model)), dict(layers_with_paths(fixed))
    replaced = [path for path, layer in old.items() if is_batch_normalization(layer)]
    assert replaced and all(is_group_normalization(new[path]) for path in replaced)
    for path, layer in old.items():
        assert path in new and new[path] is not layer
        assert new[path].trainable == layer.trainable
        if isinstance(layer, (keras.Model, LAYERS.BatchNormalization)):
            continue
        assert type(new[path]) is type(layer)
        assert new[path].get_config() == layer.get_config()
        for a, b in zip(layer.variables, new[path].variables, strict=True):
            np.testing.assert_array_equal(a, b)
    return fixed


def take_private_step(model, x, self_check=True, **arguments):
    optimizer = dice_tf.DiceSGDOptimizer(
        learning_rate=0.1, l2_norm_clip=1.0, noise_multiplier=1.0, expected_batch_size=len(x),
        self_check=self_check,
    )  # fmt: skip
    model.compile(optimizer, "sparse_categorical_crossentropy", **arguments)
    before = [v.numpy() for v in model.trainable_variables]
    model.fit(x, np.arange(len(x)) % 3, batch_size=len(x), verbose=0)
    assert int(optimizer.iterations) == 1
    assert all((v.numpy() != old).any() for v, old in zip(model.trainable_variables, before))


def test_every_family_of_keras_applications_is_here():
    functions = {
        name: value for name, value in vars(keras.applications).items() if inspect.isfunction(value)
    }
    modules = {value.__module__.rsplit(".", 1)[1] for value in functions.values()}
    covered = {functions[name].__module__.rsplit(".", 1)[1] for name in FAMILIES}
    assert modules == covered | WITHOUT


@pytest.mark.parametrize("name", FAMILIES)
def test_b1_fix_model_rebuilds_every_family_of_keras_applications(name):
    keras.backend.clear_session()
    side = FAMILIES[name]
    make = getattr(keras.applications, name)
    model = make(input_shape=(side, side, 3), weights=None, include_top=False, pooling="avg")
    fixed = fixed_and_compared(model)
    assert dice_tf.check_model(fixed) is fixed and not fixed.compiled
    assert np.isfinite(fixed(images(side, batch=1), training=True)).all()


def test_b1_a_fixed_mobile_net_takes_a_private_step():
    model = keras.applications.MobileNetV2((32, 32, 3), alpha=0.35, weights=None, classes=3)
    # Its graph takes longer to make than this one step.
    take_private_step(fixed_and_compared(model), images(32), self_check=False, run_eagerly=True)


def test_b2_models_within_models_are_fixed_and_named_by_path(tmp_path):
    block = keras.Sequential(
        [LAYERS.Conv2D(4, 3, name="conv"), LAYERS.BatchNormalization(name="norm")], name="block"
    )
    inputs = keras.Input((8, 8, 3))
    backbone = keras.Model(inputs, LAYERS.Activation("tanh")(block(inputs)), name="backbone")
    layers = [backbone, LAYERS.Dropout(0.5), LAYERS.GlobalAveragePooling2D(), LAYERS.Dense(3)]
    model = keras.Sequential([keras.Input((8, 8, 3)), *layers, LAYERS.Softmax()])
    with pytest.raises(ModelError, match="'backbone/block/norm' .BatchNormalization.*fix_model"):
        dice_tf.check_model(model)
    fixed = fixed_and_compared(randomised(model))
    take_private_step(fixed, images(8))
    fixed.save(tmp_path / "fixed.keras")
    loaded = keras.models.load_model(tmp_path / "fixed.keras", compile=False)
    np.testing.assert_allclose(loaded(images(8)), fixed(images(8)), rtol=1e-5)


def test_b2_layers_and_models_that_are_called_twice_stay_shared():
    norm = LAYERS.BatchNormalization(name="norm")
    dense = LAYERS.Dense(4, name="dense")
    tower = keras.Sequential([keras.Input((4,)), dense, norm], name="tower")
    a, b = keras.Input((4,), name="a"), keras.Input((4,), name="b")
    difference = LAYERS.Subtract()([norm(tower(a)), norm(tower(b))])
    model = randomised(keras.Model({"a": a, "b": b}, {"out": difference, "dense": dense(b)}))
    fixed = fixed_and_compared(model)
    assert len(fixed.weights) == 4
    x = images(2)[:, 0, :, :].reshape(2, -1)[:, :4]
    there, back = fixed({"a": x, "b": 2 * x}), fixed({"a": 2 * x, "b": x})
    np.testing.assert_allclose(there["out"], -back["out"], rtol=1e-5)
    np.testing.assert_allclose(back["dense"], model({"a": 2 * x, "b": x})["dense"], rtol=1e-6)


def test_b2_what_is_frozen_stays_frozen_and_frozen_statistics_stay():
    base = keras.Sequential(
        [keras.Input((6,)), LAYERS.Dense(5, name="d"), LAYERS.BatchNormalization(name="n")],
        name="base",
    )
    base.trainable = False
    base.get_layer("d").trainable = True
    layers = [base, LAYERS.Dense(4, name="head"), LAYERS.BatchNormalization(name="norm")]
    model = randomised(keras.Sequential([keras.Input((6,)), *layers]))
    model.get_layer("head").bias.trainable = False
    fixed = dice_tf.fix_model(model)
    names = lambda model: [v.path.split("/")[-2:] for v in model.trainable_variables]
    assert names(fixed) == names(model)
    assert ["d", "kernel"] in names(fixed) and ["head", "bias"] not in names(fixed)
    assert names(fixed.get_layer("base")) == names(base)
    for path, layer in layers_with_paths(model):
        assert dict(layers_with_paths(fixed))[path].trainable == layer.trainable, path
    kept = fixed.get_layer("base").get_layer("n")
    assert is_batch_normalization(kept)
    for old, new in zip(base.weights, fixed.get_layer("base").weights, strict=True):
        np.testing.assert_array_equal(old, new)
    x = np.ones((2, 6), "float32")
    np.testing.assert_allclose(fixed.get_layer("base")(x, training=True), base(x), rtol=1e-6)


class OwnNormalization(LAYERS.BatchNormalization):
    """A BatchNormalization of one's own."""


def named_activation(x):
    return keras.ops.tanh(x)


def test_b1_settings_of_the_normalisation_and_of_other_layers_are_kept():
    norm = dict(epsilon=0.1, beta_regularizer="l2", gamma_initializer="zeros", scale=True)
    inputs = keras.Input((4, 8), dtype="float16")
    x = LAYERS.Dense(8, activation=named_activation, dtype="mixed_float16", name="dense")(inputs)
    x = OwnNormalization(dtype="mixed_float16", name="own", **norm)(x)
    x = LAYERS.BatchNormalization(synchronized=True, axis=1, center=False, name="sync")(x)
    x = LAYERS.Lambda(lambda t: t + 1.0, name="plus")(keras.ops.abs(x))
    model = keras.Model(inputs, x)
    model.compile("sgd", "mse")
    fixed = dice_tf.fix_model(model)
    own, sync = fixed.get_layer("own"), fixed.get_layer("sync")
    assert type(own) is type(sync) is LAYERS.GroupNormalization
    assert (own.axis, own.epsilon, own.dtype_policy.name) == (-1, 0.1, "mixed_float16")
    assert own.gamma.numpy().max() == 0 and own.beta.regularizer is not None
    assert (sync.axis, sync.beta, sync.groups) == (1, None, 1)
    assert fixed.get_layer("dense").activation is named_activation and not fixed.compiled
    assert fixed(np.zeros((2, 4, 8)), training=True).shape == (2, 4, 8)


def test_b1_what_layers_learned_by_adapt_is_kept():
    words, numbers = keras.Input((), dtype="string", name="w"), keras.Input((2,), name="n")
    bags = LAYERS.TextVectorization(output_mode="tf_idf")
    ids = LAYERS.StringLookup(output_mode="one_hot")
    scaled, bins = LAYERS.Normalization(), LAYERS.Discretization(num_bins=3, output_mode="one_hot")
    texts, table = ["a b", "b c c"], np.array([[1.0, 7.0], [3.0, 2.0]], "float32")
    for layer, data in ((bags, texts), (ids, ["a b", "d"]), (scaled, table), (bins, table)):
        layer.adapt(data)
    before = [bags(words), ids(words), scaled(numbers), LAYERS.Flatten()(bins(numbers))]
    model = keras.Model([words, numbers], [*before, LAYERS.BatchNormalization()(before[2])])
    fixed = dice_tf.fix_model(model)
    inputs = [tf.constant(texts), tf.constant(table)]
    for old, new in zip(model(inputs)[:4], fixed(inputs)[:4], strict=True):
        assert np.ptp(old) > 0
        np.testing.assert_array_equal(old, new)


def test_b1_a_masked_sequence_stays_masked():
    inputs = keras.Input((5,), dtype="int32")
    x = LAYERS.Embedding(7, 4, mask_zero=True)(inputs)
    x = LAYERS.BatchNormalization(name="norm")(x)
    model = keras.Model(inputs, LAYERS.GRU(3, name="gru")(x))
    fixed = fixed_and_compared(model)
    tokens = np.array([[1, 2, 0, 0, 0], [1, 2, 3, 4, 5]])
    assert fixed.get_layer("norm").supports_masking
    encoded = keras.Model(fixed.input, fixed.get_layer("norm").output)
    np.testing.assert_array_equal(encoded(tokens)._keras_mask, tokens != 0)


def test_b2_the_backbones_of_keras_hub():
    backbone = keras_hub.models.ResNetBackbone(
        [64], [3], [64], [1], [1], "basic_block", image_shape=(16, 16, 3)
    )
    model = keras_hub.models.ImageClassifier(backbone, num_classes=3, activation="softmax")
    with pytest.raises(ModelError, match="'res_net_backbone[_0-9]*/conv1_bn' "):
        dice_tf.check_model(model)
    take_private_step(fixed_and_compared(model), images(16), run_eagerly=True)


class Block(LAYERS.Layer):
    """Makes normalisations in its constructor, in a list, in a model and when it is built."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        layers = [LAYERS.Conv2D(4, 3), LAYERS.BatchNormalization(name="in_model")]
        self.convolution = keras.Sequential([keras.Input((8, 8, 3)), *layers])
        self.more = [LAYERS.BatchNormalization(name="kept"), LAYERS.BatchNormalization()]
        self.unused = LAYERS.BatchNormalization(name="unused")

    def build(self, shape):
        self.late = LAYERS.BatchNormalization(name="late")
        self.late.build(self.convolution.compute_output_shape(shape))

    def call(self, x, training=None):
        x = self.convolution(x, training=training)
        x = self.more[1](self.more[0](x), training=training)
        return self.late(x, training=training)


class Fuse(LAYERS.Layer):
    """Takes two inputs, and a mask."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.norm = LAYERS.BatchNormalization()

    def call(self, x, skip, mask=None):
        return self.norm(x + skip)


def test_b2_normalisations_within_layers_of_ones_own(tmp_path):
    inputs = keras.Input((8, 8, 3))
    block = Block(name="block")
    x = block(inputs)
    x = LAYERS.TimeDistributed(LAYERS.BatchNormalization())(Fuse(name="fuse")(x, x))
    outputs = LAYERS.Dense(3, "softmax")(LAYERS.GlobalAveragePooling2D()(x))
    model = randomised(keras.Model(inputs, outputs))
    with pytest.raises(ModelError, match="'block/kept' "):
        dice_tf.check_model(model)
    block.more[0].trainable = False
    fixed = dice_tf.fix_model(model)
    kinds = [type(layer).__name__ for layer in fixed._flatten_layers()]
    assert kinds.count("GroupNormalization") == 6 and kinds.count("BatchNormalization") == 1
    (kept,) = [layer for layer in fixed._flatten_layers() if is_batch_normalization(layer)]
    for old, new in zip(block.more[0].weights, kept.weights, strict=True):
        np.testing.assert_array_equal(old, new)
    kernel = fixed.get_layer("block").layer.convolution.layers[0].kernel
    np.testing.assert_array_equal(kernel, block.convolution.layers[0].kernel)
    take_private_step(fixed, images(8), self_check=False, run_eagerly=True)
    fixed.save(tmp_path / "fixed.keras")
    with keras.saving.custom_object_scope({"Block": Block, "Fuse": Fuse}):
        loaded = keras.models.load_model(tmp_path / "fixed.keras", compile=False)
    np.testing.assert_allclose(loaded(images(8)), fixed(images(8)), rtol=1e-5)


class Needs(LAYERS.Layer):
    """Cannot be made from its configuration, because its argument is not in it."""

    def __init__(self, norm, **kwargs):
        super().__init__(**kwargs)
        self.norm = norm

    def call(self, x):
        return self.norm(x)


class Own(keras.Model):
    """A model with a `call` of its own."""

    def __init__(self, norm):
        super().__init__()
        self.norm, self.dense = norm, LAYERS.Dense(3, "softmax")

    def call(self, x):
        return self.dense(self.norm(x))


def with_needs(norm):
    return keras.Sequential([keras.Input((4,)), Needs(norm), LAYERS.Dense(3, "softmax")])


def built_own(norm):
    model = Own(norm)
    model(np.ones((2, 4)))
    return model


@pytest.mark.parametrize("make", [with_needs, built_own])
def test_b2_what_cannot_be_copied_is_refused_with_a_remedy_that_works(make):
    model = make(LAYERS.BatchNormalization())
    with pytest.raises(ModelError, match="cannot be copied") as error:
        dice_tf.fix_model(model)
    text = str(error.value)
    assert "fix_model" not in text and len(text.split()) <= 60
    if make is built_own:
        with pytest.raises(ModelError, match="Own") as refusal:
            dice_tf.check_model(model)
        assert "fix_model" not in str(refusal.value) and "GroupNorm" in str(refusal.value)
    (code,) = re.findall(r"`(keras\.layers\.GroupNormalization\(.*?\))`", text)
    take_private_step(make(eval(code)), images(1)[:, 0].repeat(2, -1)[:, 0, :4])
    layer = LAYERS.BatchNormalization(trainable=False)
    take_private_step(make(layer), images(1)[:, 0].repeat(2, -1)[:, 0, :4])


def test_b2_a_model_without_shapes_and_a_normalised_batch_axis_are_refused():
    layers = [LAYERS.Dense(3), LAYERS.BatchNormalization()]
    with pytest.raises(ModelError, match="keras.Input"):
        dice_tf.fix_model(keras.Sequential(layers))
    fixed_and_compared(keras.Sequential([keras.Input((4,)), *layers]))
    over_batch = LAYERS.BatchNormalization(axis=0)
    with pytest.raises(ModelError, match="axis=0 is that of the batch"):
        dice_tf.fix_model(keras.Sequential([keras.Input(batch_shape=(4, 3)), over_batch]))


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__]))
