# Copyright 2026 The dice_tf Authors.
# SPDX-License-Identifier: Apache-2.0
"""Stock layers that mix the images of a batch: all are refused, and the remedy mixes nothing."""

import inspect
import re

import keras
import numpy as np
import pytest
import tensorflow as tf

import dice_tf
from dice_tf.errors import ModelError

LAYERS = keras.layers


def image_layers():
    """Returns all stock layers that change images, by name."""
    base = inspect.getmro(LAYERS.RandomFlip)[1]
    return {
        name: value for name, value in vars(LAYERS).items()
        if inspect.isclass(value) and issubclass(value, base)
    }  # fmt: skip


def made(kind):
    """Returns a layer, with the arguments that it requires."""
    required = {
        "factor": 4 if kind is LAYERS.RandomPosterization else 0.5,
        "height_factor": 0.5, "width_factor": 0.5, "height": 6, "width": 6, "max_number": 2,
    }  # fmt: skip
    parameters = inspect.signature(kind).parameters.values()
    return kind(**{p.name: required[p.name] for p in parameters if p.name in required})


def first_image(kind, batch):
    """Returns what a layer makes of the first image of a batch, in four random draws."""
    keras.utils.set_random_seed(0)
    layer = made(kind)
    return np.stack([np.asarray(layer(batch, training=True))[0] for _ in range(4)])


@pytest.mark.parametrize("kind", image_layers().values(), ids=image_layers())
def test_a7_every_stock_image_layer_that_mixes_is_refused_and_no_other(kind):
    batch, others = 255 * np.random.default_rng(0).random((2, 3, 16, 16, 3), dtype="float32")
    others[0] = batch[0]
    others[1:] /= 4
    mixes = np.abs(first_image(kind, batch) - first_image(kind, others)).max() > 1e-3
    assert mixes == (kind.__name__ in ("AugMix", "CutMix", "Equalization", "MixUp", "RandAugment"))
    model = keras.Sequential([keras.Input((16, 16, 3)), made(kind), LAYERS.Rescaling(1 / 255)])
    if not mixes:
        assert dice_tf.check_model(model) is model
        return
    with pytest.raises(
        ModelError, match=f"\\({kind.__name__}\\).*an example does not bound"
    ) as error:
        dice_tf.check_model(model)
    assert len(str(error.value).split()) <= 60


@pytest.mark.parametrize("kind", ["AugMix", "Equalization", "RandAugment"])
def test_a7_the_remedy_treats_each_image_alone(kind):
    augment = getattr(LAYERS, kind)()
    layers = [LAYERS.Rescaling(1 / 255), LAYERS.Flatten(), LAYERS.Dense(3, "softmax")]
    with pytest.raises(ModelError, match="one image at a time") as error:
        dice_tf.check_model(keras.Sequential([keras.Input((8, 8, 3)), augment, *layers]))
    (code,) = re.findall(r"`(data\.map\(.*\))`", str(error.value))
    x = np.random.default_rng(0).integers(0, 256, (12, 8, 8, 3)).astype("uint8")
    sampling = dice_tf.PoissonSampling(num_examples=12, expected_batch_size=6)
    data = eval(code, {"data": sampling.dataset(x, np.arange(12)), "augment": augment, "tf": tf})
    images, rows, _ = next(iter(data))
    assert images.dtype == tf.float32 and images.shape[1:] == (8, 8, 3)
    if kind == "Equalization":  # nothing random
        alone = [augment(x[row])[None] for row in rows.numpy()]
        np.testing.assert_array_equal(images, np.concatenate(alone))
    model = keras.Sequential([keras.Input((8, 8, 3)), *layers])
    optimizer = dice_tf.DiceSGDOptimizer(
        l2_norm_clip=1.0, error_norm_clip=0.0, noise_multiplier=1.0, expected_batch_size=6
    )
    model.compile(optimizer, "sparse_categorical_crossentropy")
    budget = dice_tf.EpsilonCallback(sampling, delta=1e-3)
    model.fit(data.map(lambda x, y, w: (x, y % 3, w)), verbose=0, callbacks=[budget])
    assert int(optimizer.iterations) == sampling.steps_per_epoch and budget.epsilon() > 0


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__]))
