# Copyright 2026 The dice_tf Authors.
# SPDX-License-Identifier: Apache-2.0
"""A text classifier with LoRA from raw strings, as docs/recipes.md has it."""

import pathlib
import sys

import keras
import keras_hub
import numpy as np
import pytest

sys.path.insert(0, str(pathlib.Path(__file__).parent))

from recipes import recipe

import dice_tf


@pytest.fixture(scope="module")
def names():
    keras.utils.set_random_seed(0)
    found = {}
    exec(recipe("lora"), found)  # The reader's own lines, from our own page.
    return found


def test_the_recipe_trains_the_adapters_and_the_head_alone(names):
    model, sampling = names["model"], names["sampling"]
    assert int(model.optimizer.iterations) == 2 * sampling.steps_per_epoch
    trained = [variable.path for variable in model.trainable_variables]
    others = [path for path in trained if "lora_kernel" not in path]
    assert len(trained) - len(others) == 4  # Two factors, in queries and in values.
    assert sorted(path.split("/", 1)[-1] for path in others) == [
        "bias",
        "kernel",
        "self_attention_layer/query/bias",
        "self_attention_layer/value/bias",
    ]
    accountant = dice_tf.EpsilonCallback(sampling, delta=1e-5)
    accountant.set_model(model)
    assert 0 < accountant.epsilon() < np.inf


def test_a_classifier_that_holds_its_preprocessor_needs_no_map(names):
    keras.utils.set_random_seed(0)
    model = keras_hub.models.BertTextClassifier(
        names["backbone"], num_classes=2, preprocessor=names["preprocessor"]
    )
    model.compile(
        dice_tf.DiceSGDOptimizer(
            0.5, l2_norm_clip=0.5, noise_multiplier=1.0, expected_batch_size=32
        ),
        keras.losses.SparseCategoricalCrossentropy(from_logits=True),
    )
    sampling = dice_tf.PoissonSampling(num_examples=256, expected_batch_size=32)
    accountant = dice_tf.EpsilonCallback(sampling, delta=1e-5)
    data = sampling.dataset(names["texts"], names["labels"])
    model.fit(data, verbose=0, callbacks=[accountant])
    assert accountant.epsilon() > 0


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__]))
