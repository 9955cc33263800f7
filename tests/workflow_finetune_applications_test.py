# Copyright 2026 The dice_tf Authors.
# SPDX-License-Identifier: Apache-2.0
"""Fine-tuning a model of keras.applications, as docs/user_guide.md says, word for word."""

import pathlib
import re

import keras
import numpy as np
import pytest

import dice_tf
from dice_tf.errors import ModelError

PAGE = (pathlib.Path(__file__).absolute().parents[1] / "docs" / "user_guide.md").read_text("utf-8")
SECTION = PAGE[
    PAGE.index("## Fine-tuning a pretrained model") : PAGE.index("\n## Loops of your own")
]
FROZEN, UNFROZEN, AUGMENTED = re.findall(r"```python\n(.*?)```", SECTION, flags=re.DOTALL)


def values(layer):
    return {v.path: v.numpy() for v in layer.weights}


def changed(layer, before):
    return {path for path, value in values(layer).items() if (value != before[path]).any()}


@pytest.fixture(scope="module", name="names")
def names_of_the_guide():
    keras.utils.set_random_seed(0)
    names = {"keras": keras, "np": np, "dice_tf": dice_tf, "random": np.random.default_rng(0)}
    first_fit = FROZEN.index("head_budget =")
    exec(FROZEN[:first_fit], names)
    before = values(names["classifier"])
    exec(FROZEN[first_fit:], names)
    names["changed_by_head"] = changed(names["classifier"], before)
    return names


def test_with_a_frozen_base_only_the_head_is_trained(names):
    head = names["classifier"].layers[-1]
    assert names["changed_by_head"] == {weight.path for weight in head.weights}
    assert int(names["classifier"].optimizer.iterations) == names["drawing"].steps_per_epoch
    assert names["head_budget"].epsilon() > 0


def test_unfrozen_layers_are_trained_and_their_statistics_stay(names):
    base = names["base"]
    before = values(base)
    of_the_head = names["head_budget"].epsilon()
    exec(UNFROZEN, names)
    trained = {weight.path for layer in base.layers[-6:] for weight in layer.trainable_weights}
    assert trained and changed(base, before) == trained
    frozen = [v for v in base.layers if isinstance(v, keras.layers.BatchNormalization)]
    assert frozen and not any(layer.trainable for layer in frozen)
    steps = 2 * names["drawing"].steps_per_epoch
    assert int(names["classifier"].optimizer.iterations) == steps
    mechanism = names["classifier"].optimizer.mechanism
    expected = dice_tf.accounting.compute_epsilon(mechanism, names["drawing"], steps, 1e-3)
    assert 0 < of_the_head < names["head_budget"].epsilon() == expected


def test_unfreezing_all_is_refused_by_name_and_fix_model_makes_it_trainable(names):
    classifier, base = names["classifier"], names["base"]
    base.trainable = True
    batch = names["images"][:2], names["labels"][:2]
    steps = int(classifier.optimizer.iterations)
    with pytest.raises(ModelError, match=f"'{base.name}/bn_Conv1' .*`dice_tf.fix_model"):
        classifier.fit(names["images"][:20], names["labels"][:20], batch_size=20, verbose=0)
    assert int(classifier.optimizer.iterations) == steps
    fixed = dice_tf.fix_model(classifier)
    fixed_base = fixed.get_layer(base.name)
    np.testing.assert_array_equal(
        fixed_base.get_layer("Conv1").kernel, base.get_layer("Conv1").kernel
    )
    optimizer = dice_tf.DiceSGDOptimizer(
        0.1, l2_norm_clip=0.5, noise_multiplier=4.0, expected_batch_size=2, self_check=False
    )
    fixed.compile(optimizer, "sparse_categorical_crossentropy", run_eagerly=True)
    before = values(fixed)
    fixed.fit(*batch, verbose=0)
    assert changed(fixed, before) == {weight.path for weight in fixed.trainable_weights}


def test_the_augmentation_of_the_guide_keeps_the_batches_of_the_sampler(names):
    exec(AUGMENTED, names)
    x, _, weights = next(iter(names["data"]))
    assert x.dtype == "float32" and x.shape[1:] == (32, 32, 3) and len(weights) == len(x)


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__]))
