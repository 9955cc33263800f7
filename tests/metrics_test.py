# Copyright 2026 The dice_tf Authors.
# SPDX-License-Identifier: Apache-2.0
"""What Keras shows during training counts examples, not padding."""

import keras
import numpy as np
import pytest

from dice_tf.training.optimizers import DiceSGDOptimizer

RANDOM = np.random.default_rng(0)
X = RANDOM.normal(size=(12, 4)).astype("float32")
Y = RANDOM.integers(0, 3, 12)


def train(x, y, weights=None, private=True, outputs=1, **compile_arguments):
    keras.utils.set_random_seed(1)
    inputs = keras.Input((4,))
    heads = [keras.layers.Dense(3, name=f"head_{i}")(inputs) for i in range(outputs)]
    model = keras.Model(inputs, heads if outputs > 1 else heads[0])
    optimizer = (
        DiceSGDOptimizer(0.0, l2_norm_clip=1.0, noise_multiplier=1.0, expected_batch_size=12)
        if private
        else keras.optimizers.SGD(0.0)
    )
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(optimizer, loss, **compile_arguments)
    y = [y] * outputs if outputs > 1 else y
    history = model.fit(x, y, sample_weight=weights, batch_size=16, verbose=0).history
    return {name: value for name, (value,) in history.items()}


@pytest.mark.parametrize("outputs", [1, 2])
def test_padding_counts_in_no_metric(outputs):
    metrics = ["accuracy", keras.metrics.SparseTopKCategoricalAccuracy(2)]
    metrics = [metrics] * outputs if outputs > 1 else metrics
    expected = train(X, Y, private=False, outputs=outputs, metrics=metrics)
    padded = np.concatenate([X, 9 * X[:4]]), np.concatenate([Y, (Y[:4] + 1) % 3])
    weights = np.r_[np.ones(12), np.zeros(4)].astype("float32")
    metrics = ["accuracy", keras.metrics.SparseTopKCategoricalAccuracy(2)]
    metrics = [metrics] * outputs if outputs > 1 else metrics
    shown = train(*padded, weights, outputs=outputs, metrics=metrics)
    assert shown.keys() == expected.keys() and len(shown) == (3 if outputs == 1 else 7)
    for name in expected:
        np.testing.assert_allclose(shown[name], expected[name], rtol=1e-5, err_msg=name)


def test_without_weights_metrics_are_those_of_keras():
    arguments = {"metrics": ["accuracy"], "weighted_metrics": ["accuracy"]}
    assert train(X, Y, **arguments) == pytest.approx(train(X, Y, private=False, **arguments))


def test_weighted_metrics_use_the_weights():
    weights = RANDOM.uniform(0.5, 2, 12).astype("float32")
    expected = train(X, Y, weights, private=False, weighted_metrics=["accuracy"])
    shown = train(X, Y, weights, weighted_metrics=["accuracy"])
    assert shown == pytest.approx(expected)


def test_a_batch_of_padding_alone_shows_finite_numbers():
    shown = train(X, Y, np.zeros(12, "float32"), metrics=["accuracy"])
    assert np.isfinite(list(shown.values())).all()


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__]))
