# Copyright 2026 The dice_tf Authors.
# SPDX-License-Identifier: Apache-2.0
"""Models that mix examples or remember data are refused by layer, with the remedy."""

import keras
import numpy as np
import pytest
import tensorflow as tf

from dice_tf.checks.model_checks import check_model
from dice_tf.checks.model_repair import fix_model
from dice_tf.errors import LossError, ModelError
from dice_tf.training.optimizers import DiceSGDOptimizer

LAYERS = keras.layers


class RunningMean(LAYERS.Layer):
    """Stores the mean of what it saw: state computed from data."""

    def build(self, shape):
        self.mean = self.add_weight(shape=(shape[-1],), trainable=False, name="mean")

    def call(self, x):
        self.mean.assign(keras.ops.mean(x, axis=0))
        return x


def with_layers(*layers, shape=(8, 8, 4)):
    return keras.Sequential([keras.Input(shape), *layers])


@pytest.mark.parametrize(
    "make, match",
    [
        (
            lambda: with_layers(LAYERS.Conv2D(2, 3), LAYERS.BatchNormalization(name="norm")),
            "norm' .*BatchNormalization.*fix_model",
        ),
        (
            lambda: with_layers(keras.Sequential([LAYERS.BatchNormalization()], name="inner")),
            "batch_normalization.*fix_model",
        ),
        (
            lambda: with_layers(
                LAYERS.Dense(2, activity_regularizer="l2", name="penalised"), shape=(3,)
            ),
            "penalised' .*activity regularizer",
        ),
        (
            lambda: keras.Sequential(
                [
                    keras.Input(batch_shape=(4, 3, 2)),
                    LAYERS.GRU(2, stateful=True, name="carrying"),
                ]
            ),
            "carrying' .*stateful=False",
        ),
        (lambda: with_layers(LAYERS.MixUp(name="mix")), "mix' .*MixUp.*with others"),
        (
            lambda: with_layers(LAYERS.Pipeline([LAYERS.RandomFlip(), LAYERS.CutMix(name="cut")])),
            "cut' .*CutMix.*with others",
        ),
        (lambda: with_layers(LAYERS.RandAugment(), shape=(8, 8, 3)), "RandAugment.*by the others"),
        (lambda: with_layers(LAYERS.AugMix(), shape=(8, 8, 3)), "AugMix.*by the others"),
    ],
)
def test_case_17_layers_that_mix_examples_are_refused(make, match):
    with pytest.raises(ModelError, match=match):
        check_model(make())


def test_case_17_refusal_happens_in_fit_before_any_step():
    model = with_layers(LAYERS.BatchNormalization(name="norm"), LAYERS.Flatten(), LAYERS.Dense(1))
    model.compile(
        DiceSGDOptimizer(l2_norm_clip=1.0, noise_multiplier=1.0, expected_batch_size=4), "mse"
    )
    before = [v.numpy() for v in model.variables]
    with pytest.raises(ModelError, match="norm'"):
        model.fit(np.ones((4, 8, 8, 4)), np.ones((4, 1)), verbose=0)
    for variable, value in zip(model.variables, before):
        np.testing.assert_array_equal(variable.numpy(), value)
    assert int(model.optimizer.iterations) == 0


def test_case_17_state_computed_from_data_is_refused_by_variable():
    model = keras.Sequential([keras.Input((3,)), RunningMean(name="running"), LAYERS.Dense(1)])
    model.compile(
        DiceSGDOptimizer(l2_norm_clip=1.0, noise_multiplier=1.0, expected_batch_size=4), "mse"
    )
    with pytest.raises(ModelError, match="running/mean"):
        model.fit(np.ones((4, 3)), np.ones((4, 1)), verbose=0)


class Remembers(LAYERS.Layer):
    """Changes a variable or table that no attribute shows, so Keras does not know it."""

    def __init__(self, variable, change):
        super().__init__()
        self.remember = lambda x: change(variable, x)

    def call(self, x, training=False):
        if training:
            self.remember(x)
        return x


def scatter(variable, x):
    return variable.scatter_nd_add([[0]], tf.reduce_mean(x, 0)[:1])


def in_a_branch(variable, x):
    keep = lambda: variable.assign(tf.reduce_mean(x, 0))
    return tf.cond(tf.reduce_sum(x) > 0, keep, lambda: variable + 0.0)


def insert(table, x):
    return table.insert(tf.constant([0], tf.int64), tf.reduce_sum(x)[None])


CHANGES = {
    "tensorflow": (lambda: tf.Variable(tf.zeros(3)), lambda v, x: v.assign(x[0]), "AssignVariable"),
    "scatter": (lambda: tf.Variable(tf.zeros(3)), scatter, "ResourceScatter"),
    "branch": (lambda: tf.Variable(tf.zeros(3)), in_a_branch, "AssignVariable"),
    "table": (
        lambda: tf.lookup.experimental.MutableHashTable(tf.int64, tf.float32, 0.0),
        insert,
        "LookupTableInsert",
    ),
    "keras": (lambda: keras.Variable(tf.zeros(3), name="of"), lambda v, x: v.assign(x[0]), "'of'"),
}


def private(*layers, loss="mse", **arguments):
    model = keras.Sequential([keras.Input((3,)), *layers])
    optimizer = DiceSGDOptimizer(l2_norm_clip=1.0, noise_multiplier=1.0, expected_batch_size=4)
    model.compile(optimizer, loss, **arguments)
    return model


DATA = np.random.default_rng(0).normal(size=(4, 3)).astype("float32"), np.ones((4, 1), "float32")


@pytest.mark.parametrize("name", CHANGES)
def test_case_17_state_that_keras_does_not_know_of_is_refused(name):
    make, change, match = CHANGES[name]
    model = private(Remembers(make(), change), LAYERS.Dense(1))
    with pytest.raises(ModelError, match=f"assigns .*{match}"):
        model.fit(*DATA, verbose=0)
    assert int(model.optimizer.iterations) == 0


@pytest.mark.parametrize("name", ["tensorflow", "keras"])
def test_case_17_state_of_a_loss_is_refused(name):
    make, change, match = CHANGES[name]
    variable = make()

    def loss(y_true, y_pred):
        change(variable, tf.tile(y_pred, [1, 3]))
        return tf.square(y_true - y_pred)[:, 0] / (1.0 + tf.square(variable[0]))

    with pytest.raises(LossError, match=f"assigns .*{match}"):
        private(LAYERS.Dense(1), loss=loss).fit(*DATA, verbose=0)


class Counts(LAYERS.Layer):
    """Updates a metric of its own, and draws with a seed that Keras does not know of."""

    def __init__(self):
        super().__init__()
        self.mean = keras.metrics.Mean()
        self.draw = lambda x, seed=keras.random.SeedGenerator(1): keras.random.dropout(
            x, 0.5, seed=seed
        )

    def call(self, x):
        self.mean.update_state(x)
        return self.draw(x)


def test_random_seeds_and_metrics_are_no_state_of_the_data():
    layers = LAYERS.Dropout(0.5), LAYERS.GaussianNoise(0.1), LAYERS.Normalization(), Counts()
    model = private(*layers, LAYERS.Dense(1), metrics=["mae"])
    model.fit(*DATA, verbose=0)
    assert int(model.optimizer.iterations) == 1


def batch_statistics(**arguments):
    return LAYERS.BatchNormalization(scale=False, center=False, name="norm", **arguments)


@pytest.mark.parametrize("run_eagerly", [True, False])
def test_layers_that_changed_since_the_first_fit_are_refused_without_compile(run_eagerly):
    unfrozen = private(batch_statistics(trainable=False), LAYERS.Dense(1), run_eagerly=run_eagerly)
    appended = private(LAYERS.Dense(1), LAYERS.Activation("tanh"), run_eagerly=run_eagerly)
    for model in (unfrozen, appended):
        model.fit(*DATA, verbose=0)
    unfrozen.layers[0].trainable = True
    appended.pop()
    appended.add(batch_statistics())
    for model in (unfrozen, appended):
        before = [v.numpy() for v in model.variables]
        with pytest.raises(ModelError, match="norm'.*statistics of the whole batch"):
            model.fit(*DATA, verbose=0)
        for variable, value in zip(model.variables, before):
            np.testing.assert_array_equal(variable.numpy(), value)


def test_frozen_batch_normalization_is_allowed():
    layer = LAYERS.BatchNormalization()
    layer.trainable = False
    model = with_layers(layer, LAYERS.Flatten(), LAYERS.Dense(1))
    model.compile(
        DiceSGDOptimizer(l2_norm_clip=1.0, noise_multiplier=1.0, expected_batch_size=4), "mse"
    )
    model.fit(np.ones((4, 8, 8, 4)), np.ones((4, 1)), verbose=0)
    assert int(model.optimizer.iterations) == 1


def test_case_17_fix_model_replaces_batch_normalization_and_keeps_other_weights():
    model = with_layers(
        LAYERS.Conv2D(12, 3, name="conv"),
        LAYERS.BatchNormalization(name="norm", epsilon=0.01),
        LAYERS.Flatten(),
        LAYERS.Dense(2, name="dense"),
    )
    fixed = fix_model(model)
    norm = fixed.get_layer("norm")
    assert isinstance(norm, LAYERS.GroupNormalization)
    assert (norm.groups, norm.epsilon) == (1, 0.01)
    for name in ("conv", "dense"):
        for old, new in zip(model.get_layer(name).weights, fixed.get_layer(name).weights):
            np.testing.assert_array_equal(old.numpy(), new.numpy())
    # Group normalization of one example does not depend on the others.
    x = np.random.default_rng(0).normal(size=(4, 8, 8, 4)).astype("float32")
    np.testing.assert_allclose(
        fixed(x, training=True)[:1], fixed(x[:1], training=True), rtol=1e-5, atol=1e-6
    )


@pytest.mark.parametrize(
    "make_layers, groups",
    [
        *((lambda n=n: [keras.layers.Dense(n)], 1) for n in (1, 8, 16, 32, 64)),
        *(
            (lambda n=n: [keras.layers.Reshape((2, 2, 2)), keras.layers.Conv2D(n, 1)], g)
            for n, g in ((3, 1), (16, 1), (32, 2), (48, 3), (50, 2), (1024, 32))
        ),
    ],
)
def test_fixed_model_still_tells_its_inputs_apart(make_layers, groups):
    keras.utils.set_random_seed(0)
    model = keras.Sequential(
        [keras.Input((8,)), *make_layers(), keras.layers.BatchNormalization(name="norm")]
    )
    fixed = fix_model(model)
    assert fixed.get_layer("norm").groups == groups
    outputs = fixed(np.random.default_rng(0).normal(size=(16, 8)).astype("float32")).numpy()
    if outputs.ndim == 4:
        outputs = outputs.mean((1, 2))
    # One unit alone cannot be normalised and tell anything.
    assert (outputs.std(0).min() > 1e-3) == (outputs.shape[-1] > 1)


def test_fix_model_says_when_it_cannot():
    class Own(keras.Model):
        def __init__(self):
            super().__init__()
            self.norm = LAYERS.BatchNormalization()

        def call(self, x):
            return self.norm(x)

    model = Own()
    model(np.ones((2, 3)))
    with pytest.raises(ModelError, match="Own.*cannot be copied"):
        fix_model(model)


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__]))
