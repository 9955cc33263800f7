# Copyright 2026 The dice_tf Authors.
# SPDX-License-Identifier: Apache-2.0
"""The dispatch from Keras: every stock way to train takes the private step."""

import keras
import numpy as np
import pytest
import tensorflow as tf

from dice_tf.errors import ModelError, OptimizerArgumentError, PlainGradientsError
from dice_tf.training import keras_trainer
from dice_tf.training.optimizers import DiceSGDOptimizer
from dice_tf.training.private_step import private_train_step

BATCH = 8
RANDOM = np.random.default_rng(0)
X = RANDOM.normal(size=(20, 6)).astype("float32")
Y = RANDOM.integers(0, 3, 20)


def optimizer(**arguments):
    return DiceSGDOptimizer(
        **{
            "learning_rate": 0.5,
            "l2_norm_clip": 0.5,
            "noise_multiplier": 0.7,
            "expected_batch_size": BATCH,
            "noise_seed": 3,
            **arguments,
        }
    )


def sequential():
    return keras.Sequential([keras.layers.Dense(5, activation="tanh"), keras.layers.Dense(3)])


class Subclassed(keras.Model):
    def __init__(self):
        super().__init__()
        self.body = sequential()

    def call(self, x):
        return self.body(x)


class CallsSuper(Subclassed):
    def train_step(self, data):
        return super().train_step(data)


class OwnTrainStep(Subclassed):
    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            loss = self.compute_loss(x=x, y=y, y_pred=self(x))
        gradients = tape.gradient(loss, self.trainable_variables)
        self.optimizer.apply_gradients(zip(gradients, self.trainable_variables))
        return {"loss": loss}


def make(build=sequential, compile_arguments=(), **arguments):
    keras.utils.set_random_seed(5)
    model = build()
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(optimizer(**arguments), loss, **dict(compile_arguments))
    return model


def weights(model):
    return np.concatenate([v.numpy().ravel() for v in model.trainable_variables])


@pytest.fixture(scope="module")
def reference():
    model = make()
    model.fit(X, Y, batch_size=BATCH, epochs=2, shuffle=False, verbose=0)
    return weights(model)


@pytest.mark.parametrize("build", [Subclassed, CallsSuper])
def test_other_kinds_of_models_take_the_same_steps(reference, build):
    model = make(build)
    model.fit(X, Y, batch_size=BATCH, epochs=2, shuffle=False, verbose=0)
    np.testing.assert_allclose(weights(model), reference, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    "compile_arguments", [{"steps_per_execution": 2}, {"run_eagerly": True}], ids=str
)
def test_compile_options_change_nothing(reference, compile_arguments):
    model = make(compile_arguments=compile_arguments)
    model.fit(X, Y, batch_size=BATCH, epochs=2, shuffle=False, verbose=0)
    assert int(model.optimizer.iterations) == 6
    np.testing.assert_allclose(weights(model), reference, rtol=1e-5, atol=1e-6)


def test_tf_data_validation_and_train_on_batch(reference):
    model = make()
    data = tf.data.Dataset.from_tensor_slices((X, Y)).batch(BATCH)
    history = model.fit(data, validation_data=(X, Y), verbose=0).history
    assert set(history) == {"loss", "val_loss"}
    for start in range(0, 20, BATCH):
        model.train_on_batch(X[start : start + BATCH], Y[start : start + BATCH])
    np.testing.assert_allclose(weights(model), reference, rtol=1e-5, atol=1e-6)


def test_case_3_a_custom_loop_takes_the_steps_of_fit(reference):
    model = make()
    data = tf.data.Dataset.from_tensor_slices((X, Y)).batch(BATCH)

    @tf.function(input_signature=[data.element_spec])
    def step(batch):
        return private_train_step(model, batch)

    for _ in range(2):
        for batch in data:
            step(batch)
    # Graphs of `fit` are rewritten once, others twice, so sums may be taken in another order.
    np.testing.assert_allclose(weights(model), reference, rtol=1e-5, atol=1e-6)


def test_case_3_an_own_train_step_with_plain_gradients_is_refused():
    model = make(OwnTrainStep)
    with pytest.raises(PlainGradientsError, match="super.*train_step"):
        model.fit(X, Y, batch_size=BATCH, verbose=0)


def test_a_private_step_needs_a_private_optimizer():
    model = make()
    model.compile("sgd", "mse")
    with pytest.raises(PlainGradientsError, match="optimizer=SGD"):
        private_train_step(model, (X, Y))


def test_stock_optimizers_keep_their_step_and_the_dispatch_is_installed_once():
    keras_trainer.install()
    step = keras.Model.train_step
    optimizer()
    assert keras.Model.train_step is step
    keras.utils.set_random_seed(5)
    model = sequential()
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.SGD(0.5), loss)
    model.build((None, 6))
    with tf.GradientTape() as tape:
        value = loss(Y[:BATCH], model(X[:BATCH]))
    gradients = tape.gradient(value, model.trainable_weights)
    expected = [v.numpy() - 0.5 * g.numpy() for v, g in zip(model.trainable_weights, gradients)]
    model.train_on_batch(X[:BATCH], Y[:BATCH])
    for variable, value in zip(model.trainable_weights, expected):
        np.testing.assert_allclose(variable.numpy(), value, rtol=1e-5, atol=1e-6)


def test_case_18_a_loss_scale_optimizer_is_refused():
    model = make()
    wrapper = keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD())
    wrapper.inner_optimizer = optimizer()  # The constructor is refused it.
    model.compile(wrapper, "mse")
    with pytest.raises(OptimizerArgumentError, match="mixed_bfloat16"):
        model.fit(X, X[:, :3], verbose=0)


def test_several_models_in_one_process_do_not_meet(reference):
    models = [make(), make()]
    for start in (0, BATCH, 2 * BATCH) * 2:
        for model in models:
            model.train_on_batch(X[start : start + BATCH], Y[start : start + BATCH])
    for model in models:
        np.testing.assert_allclose(weights(model), reference, rtol=1e-5, atol=1e-6)


def test_class_weights_scale_the_examples_of_a_class():
    results = []
    scale = np.array([0.0, 1.0, 3.0], "float32")
    for arguments in (
        {"class_weight": dict(enumerate(scale))},
        {"sample_weight": scale[Y]},
    ):
        model = make()
        model.fit(X, Y, batch_size=BATCH, shuffle=False, verbose=0, **arguments)
        results.append(weights(model))
    np.testing.assert_array_equal(*results)


def test_case_14_seeds_and_other_state_of_the_model_are_its_own():
    model = keras.Sequential(
        [
            keras.Input((6,)),
            keras.layers.Normalization(mean=0.0, variance=1.0),
            keras.layers.Dense(5),
            keras.layers.Dropout(0.5),
            keras.layers.Dense(3),
        ]
    )
    model.compile(optimizer(), keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    (seed,) = (layer.seed_generator.state for layer in model.layers if hasattr(layer, "rate"))
    others = [v for v in model.non_trainable_variables if v is not seed]
    before = seed.numpy(), [v.numpy() for v in others]
    model.fit(X, Y, batch_size=BATCH, verbose=0)
    assert np.any(seed.numpy() != before[0])
    for variable, value in zip(others, before[1]):
        np.testing.assert_array_equal(variable.numpy(), value)
    assert int(model.optimizer.iterations) == 3


def test_a_model_without_trainable_variables_is_refused():
    model = keras.Sequential([keras.Input((6,)), keras.layers.Dense(3, trainable=False)])
    model.compile(optimizer(), "mse")
    with pytest.raises(ModelError, match="no trainable variables"):
        model.fit(X, X[:, :3], verbose=0)


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__]))
