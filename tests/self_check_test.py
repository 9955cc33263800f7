# Copyright 2026 The dice_tf Authors.
# SPDX-License-Identifier: Apache-2.0
"""The check of the first batch: loud when examples meet, silent otherwise."""

import keras
import numpy as np
import pytest
import tensorflow as tf

from dice_tf import dispatch
from dice_tf.errors import GradientEngineError
from dice_tf.optimizers import DiceSGDOptimizer
from dice_tf.per_example import PerExample, register_rule
from dice_tf.training import check_gradients

LAYERS = keras.layers
RANDOM = np.random.default_rng(0)
X = RANDOM.normal(size=(20, 6)).astype("float32")
Y = RANDOM.integers(0, 3, 20)


class SubtractsBatchMean(LAYERS.Layer):
    def call(self, x):
        return x - keras.ops.mean(x, axis=0, keepdims=True)


class Scale(LAYERS.Layer):
    def build(self, shape):
        self.scale = self.add_weight(shape=(shape[-1],), initializer="ones", name="scale")

    def call(self, x):
        return x * self.scale


class WronglyRuledScale(Scale):
    pass


def coupled_loss(y_true, y_pred):
    """One value per example, as demanded, but each depends on all examples."""
    values = tf.square(y_true - y_pred[:, 0])
    return values * tf.reduce_mean(values)


def model(*layers, loss=None, **arguments):
    keras.utils.set_random_seed(1)
    built = keras.Sequential([keras.Input((6,)), *layers])
    optimizer = DiceSGDOptimizer(
        0.1, l2_norm_clip=1.0, noise_multiplier=1.0, expected_batch_size=8, **arguments
    )
    loss = loss or keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    built.compile(optimizer, loss)
    return built


@pytest.mark.parametrize(
    "layers, loss",
    [
        ([LAYERS.Dense(5), SubtractsBatchMean(), LAYERS.Dense(3)], None),
        ([LAYERS.Dense(5), SubtractsBatchMean(), LAYERS.Dense(3, use_bias=False)], None),
        ([LAYERS.Dense(3)], coupled_loss),
    ],
    ids=["layer", "layer_hidden_from_single_examples", "loss"],
)
def test_case_17_examples_that_meet_are_refused_before_the_first_step(layers, loss):
    trained = model(*layers, loss=loss)
    before = [v.numpy() for v in trained.variables]
    with pytest.raises(GradientEngineError, match="depend on the other examples"):
        trained.fit(X, Y.astype("float32"), batch_size=8, verbose=0)
    for variable, value in zip(trained.variables, before):
        np.testing.assert_array_equal(variable.numpy(), value)
    with pytest.raises(GradientEngineError, match="depend on the other examples"):
        trained.train_on_batch(X[:8], Y[:8].astype("float32"))


def test_a_wrong_rule_of_a_user_is_refused():
    register_rule(
        WronglyRuledScale, lambda layer, call: [(layer.scale, PerExample(2.0 * call.cotangents))]
    )
    with pytest.raises(GradientEngineError, match="rule registered for a layer is wrong"):
        model(LAYERS.Dense(4), WronglyRuledScale(), LAYERS.Dense(3)).fit(X, Y, verbose=0)


@pytest.mark.parametrize("engine", ["layerwise", "vectorized"])
def test_is_silent_for_random_layers(engine):
    trained = model(
        LAYERS.GaussianNoise(0.5),
        LAYERS.Dense(5),
        LAYERS.Dropout(0.5),
        Scale(),
        LAYERS.GaussianDropout(0.3),
        LAYERS.Dense(3),
        gradient_engine=engine,
    )
    trained.fit(X, Y, batch_size=8, verbose=0)
    assert int(trained.optimizer.iterations) == 3


@pytest.mark.parametrize("steps_per_execution, steps", [(1, 5), (2, 5), (3, 6), (8, 5)])
def test_the_checked_batch_is_trained_on_like_any_other(steps_per_execution, steps):
    """Same weights as without the check, and no step lost or repeated."""
    results = []
    for self_check in (True, False):
        keras.utils.set_random_seed(0)
        trained = model(LAYERS.Dense(3), noise_seed=1, self_check=self_check)
        trained.compile(
            trained.optimizer, trained.loss, steps_per_execution=steps_per_execution
        )
        data = tf.data.Dataset.from_tensor_slices((np.tile(X, (2, 1)), np.tile(Y, 2)))
        trained.fit(data.batch(8).take(steps), epochs=2, verbose=0)
        assert int(trained.optimizer.iterations) == 2 * 5
        results.append(np.concatenate([v.numpy().ravel() for v in trained.trainable_variables]))
    np.testing.assert_array_equal(*results)


@pytest.mark.parametrize(
    ("batch", "shapes"),
    [
        (tf.ones([4, 3]), [None, 3]),
        ((tf.ones([4, 3]), tf.ones([4])), ([None, None], [4])),
        (({"a": tf.ones([4, 3])}, tf.ones([4]), tf.ones([4])), ({"a": [None, 3]}, [None], [4])),
        ({"a": tf.ones([4, 3])}, {"a": [4, 3]}),
    ],
)
def test_batches_that_were_taken_are_given_back_with_the_type_that_the_step_is_traced_for(
    batch, shapes
):
    spec = tf.nest.pack_sequence_as(
        batch, [tf.TensorSpec(s) for s in tf.__internal__.nest.flatten_up_to(batch, shapes)]
    )
    data = dispatch._dataset_of([batch, batch], spec)
    assert data.element_spec == spec
    found = list(data)
    assert len(found) == 2
    for got, expected in zip(tf.nest.flatten(found[1]), tf.nest.flatten(batch), strict=True):
        np.testing.assert_array_equal(got, expected)


def test_can_be_called_in_a_custom_loop_and_switched_off():
    mixing = model(LAYERS.Dense(5), SubtractsBatchMean(), LAYERS.Dense(3), self_check=False)
    mixing.fit(X, Y, batch_size=8, verbose=0)
    assert int(mixing.optimizer.iterations) == 3
    with pytest.raises(GradientEngineError, match="depend on the other examples"):
        check_gradients(mixing, (X, Y))
    check_gradients(model(LAYERS.Dense(3)), (X, Y))


def test_examples_without_a_finite_gradient_decide_nothing():
    broken = X.copy()
    broken[0] = np.nan
    trained = model(LAYERS.Dense(3))
    trained.fit(broken, Y, batch_size=8, verbose=0)
    assert np.isfinite(trained.trainable_variables[0].numpy()).all()


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__]))
