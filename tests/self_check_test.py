# Copyright 2026 The dice_tf Authors.
# SPDX-License-Identifier: Apache-2.0
"""The check of the first batch: loud when examples meet, silent otherwise."""

import logging
import warnings

import keras
import numpy as np
import pytest
import tensorflow as tf
from tensorflow.python.eager.polymorphic_function import polymorphic_function

from dice_tf.checks import rounding, self_check
from dice_tf.engine import PerExample, register_rule
from dice_tf.errors import GradientEngineError, UncheckedGradientsWarning
from dice_tf.sampling import PoissonSampling
from dice_tf.training import keras_trainer, private_step
from dice_tf.training.optimizers import DiceSGDOptimizer
from dice_tf.training.private_step import check_gradients, private_train_step

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


def correlation(y_true, y_pred):
    """Of targets and outputs over the batch; 0 / 0 for one example."""
    standardised = lambda t: (t - tf.reduce_mean(t)) / tf.math.reduce_std(t)
    return -standardised(tf.cast(y_true, tf.float32)) * standardised(y_pred[:, 0])


def mse_where_nonzero(y_true, y_pred):
    y_true = tf.cast(y_true, tf.float32)
    return tf.where(y_true == 0, 0.0, tf.square(y_true - y_pred[:, 0]))


def model(*layers, loss=None, **arguments):
    keras.utils.set_random_seed(1)
    built = keras.Sequential([keras.Input((6,)), *layers])
    arguments = {"expected_batch_size": 8, **arguments}
    optimizer = DiceSGDOptimizer(0.1, l2_norm_clip=1.0, noise_multiplier=1.0, **arguments)
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


DEVIATION = lambda t: keras.ops.std(t, axis=0)
MEAN, MIN, MAX = (lambda t, f=f: f(t, 0) for f in (keras.ops.mean, keras.ops.min, keras.ops.max))


@pytest.mark.parametrize(
    "normalise, loss",
    [
        (lambda t: (t - MEAN(t)) / DEVIATION(t), None),
        (lambda t: t / DEVIATION(t), None),
        (lambda t: (t - MIN(t)) / (MAX(t) - MIN(t)), None),
        (lambda t: t, correlation),
    ],
    ids=["standardised", "scaled", "range", "correlation_loss"],
)
def test_case_17_what_is_not_a_number_for_one_example_alone_is_refused(normalise, loss):
    trained = model(LAYERS.Lambda(normalise), LAYERS.Dense(3), loss=loss)
    with pytest.raises(GradientEngineError, match="nothing to reduce for a single example"):
        trained.fit(X, Y, batch_size=8, verbose=0)
    assert int(trained.optimizer.iterations) == 0


def test_case_17_what_is_a_number_for_one_example_alone_only_is_refused():
    alone = lambda t: keras.ops.cast(keras.ops.equal(tf.shape(t)[0], 1), "float32")
    trained = model(LAYERS.Lambda(lambda t: t / alone(t)), LAYERS.Dense(3))
    with pytest.raises(GradientEngineError, match="depend on the other examples"):
        trained.fit(X, Y, batch_size=8, verbose=0)
    assert int(trained.optimizer.iterations) == 0


def fit(trained, x, y):
    trained.fit(x, y, batch_size=8, shuffle=False, verbose=0)


def train_on_batches(trained, x, y):
    for start in range(0, len(x), 8):
        trained.train_on_batch(x[start : start + 8], y[start : start + 8])


def take_steps(trained, x, y):
    for start in range(0, len(x), 8):
        private_train_step(trained, (x[start : start + 8], y[start : start + 8]))


@pytest.mark.parametrize(
    "train, zeros, steps",
    [(fit, 3, 0), (fit, 16, 2), (train_on_batches, 8, 1), (take_steps, 8, 1)],
)
def test_gradients_of_zero_decide_nothing_and_others_are_compared(train, zeros, steps):
    """Other examples of the batch, or those of the next one."""
    y = np.where(np.arange(20) < zeros, 0, Y + 1)
    mixing = model(SubtractsBatchMean(), LAYERS.Dense(1), loss=mse_where_nonzero)
    with pytest.raises(GradientEngineError, match="depend on the other examples"):
        train(mixing, X, y)
    assert int(mixing.optimizer.iterations) == steps


@pytest.mark.parametrize("train", [fit, train_on_batches, take_steps])
def test_a_run_in_which_nothing_can_be_compared_warns_once(train, monkeypatch):
    assert private_step._MOST_BATCHES_TRIED == 20
    monkeypatch.setattr(private_step, "_MOST_BATCHES_TRIED", 2)
    trained = model(LAYERS.Dense(1), loss=mse_where_nonzero)
    x, y = np.tile(X[:8], (4, 1)), np.zeros(32, "int32")
    with pytest.warns(UncheckedGradientsWarning, match="Batches tried: 2") as found:
        train(trained, x, y)
    assert len([w for w in found if w.category is UncheckedGradientsWarning]) == 1


@pytest.mark.parametrize(
    "batch",
    [(X, np.zeros(20)), (X[:0], Y[:0], X[:0, 0]), (X, Y, np.zeros(20))],
    ids=["zero_gradients", "empty", "padding"],
)
def test_an_explicit_check_says_at_once_that_nothing_was_compared(batch):
    with pytest.warns(UncheckedGradientsWarning, match="Batches tried: 1"):
        check_gradients(model(LAYERS.Dense(1), loss=mse_where_nonzero), batch)


@pytest.mark.parametrize("batch_size", [1, 2])
def test_small_poisson_batches_with_their_padding_are_enough(batch_size):
    """One example and copies of it have no mean to be told apart from."""
    sampling = PoissonSampling(20, batch_size, seed=3)
    layers = SubtractsBatchMean(), LAYERS.Dense(3), LAYERS.Dense(3)
    mixing = model(*layers, loss="mse", expected_batch_size=batch_size)
    with pytest.raises(GradientEngineError, match="depend on the other examples"):
        mixing.fit(sampling.dataset(X, np.eye(3, dtype="float32")[Y]), verbose=0)


@pytest.mark.parametrize("weights", [None, [0, 0, 0, 0, 1, 1, 1, 1]])
def test_examples_that_are_alike_or_of_weight_0_are_passed_over(weights):
    x = np.repeat(X[:2], [4, 4], axis=0) if weights is None else X[:8].copy()
    if weights is not None:
        x[:4] = np.inf
        weights = np.array(weights, "float32")
    mixing = model(SubtractsBatchMean(), LAYERS.Dense(3), LAYERS.Dense(3))
    with pytest.raises(GradientEngineError, match="depend on the other examples"):
        mixing.train_on_batch(x, Y[:8], weights)


@pytest.mark.parametrize(
    "batch",
    [X[:1], np.repeat(X[:1], 8, axis=0), np.vstack([X[:2], X[:2]])],
    ids=["one", "alike", "two"],
)
def test_is_silent_for_few_different_examples(batch):
    with warnings.catch_warnings():
        warnings.simplefilter("error", UncheckedGradientsWarning)
        check_gradients(model(LAYERS.Dense(3)), (batch, Y[: len(batch)]))


class Draws(LAYERS.Layer):
    """Calls a function of `keras.random` that draws something of the shape of the inputs."""

    def __init__(self, draw):
        super().__init__()
        self.draw, self.seed_generator = draw, keras.random.SeedGenerator(1)

    def call(self, x):
        return self.draw(x, self.seed_generator)


DRAWS = {
    "randint": lambda x, s: (
        x * keras.ops.cast(keras.random.randint(keras.ops.shape(x), 1, 9, seed=s), x.dtype)
    ),
    "gamma": lambda x, s: x * keras.random.gamma(keras.ops.shape(x), 2.0, seed=s),
    "beta": lambda x, s: x * keras.random.beta(keras.ops.shape(x), 2.0, 3.0, seed=s),
    "binomial": lambda x, s: x * keras.random.binomial(keras.ops.shape(x), 4.0, 0.5, seed=s),
    "categorical": lambda x, s: x + keras.random.categorical(x, 6, "float32", seed=s),
}


@pytest.mark.parametrize("name", DRAWS)
def test_layers_that_draw_other_numbers_are_compared(name):
    with warnings.catch_warnings():
        warnings.simplefilter("error", UncheckedGradientsWarning)
        check_gradients(model(Draws(DRAWS[name]), LAYERS.Dense(3)), (X, Y))
    mixing = model(Draws(DRAWS[name]), SubtractsBatchMean(), LAYERS.Dense(3))
    with pytest.raises(GradientEngineError, match="depend on the other examples"):
        check_gradients(mixing, (X, Y))


def test_a_layer_that_shuffles_is_warned_of():
    trained = model(Draws(lambda x, s: keras.random.shuffle(x, axis=0, seed=s)), LAYERS.Dense(3))
    with pytest.warns(UncheckedGradientsWarning, match="keras.random.shuffle") as found:
        trained.fit(X, Y, batch_size=8, verbose=0)
    assert len([w for w in found if w.category is UncheckedGradientsWarning]) == 1


def test_is_done_once_per_compiled_model_and_again_for_other_layers(monkeypatch):
    calls = []
    check = self_check.check_against_single_examples
    monkeypatch.setattr(
        self_check,
        "check_against_single_examples",
        lambda *arguments: (calls.append(arguments), check(*arguments))[1],
    )
    trained = model(LAYERS.Dense(4), LAYERS.Dense(3))
    check_gradients(trained, (X, Y))
    fit(trained, X, Y)
    train_on_batches(trained, X, Y)
    take_steps(trained, X[:8], Y[:8])
    assert len(calls) == 1
    trained.compile(trained.optimizer, trained.loss)
    take_steps(trained, X, Y)
    fit(trained, X, Y)
    assert len(calls) == 2
    trained.layers[0].trainable = False
    fit(trained, X, Y)
    assert len(calls) == 3
    trained.optimizer.gradient_engine = "vectorized"
    take_steps(trained, X, Y)
    assert len(calls) == 4


def test_many_models_in_one_process_make_tensorflow_warn_of_nothing(monkeypatch):
    # TensorFlow warns twice per process: of nothing more, if another test had it warn.
    detectors = polymorphic_function._FrequentTracingDetectorManager()
    monkeypatch.setattr(polymorphic_function, "_frequent_tracing_detector_manager", detectors)
    seen = []
    handler = logging.Handler()
    handler.emit = lambda record: seen.append(record.getMessage())
    tf.get_logger().addHandler(handler)
    try:
        for _ in range(7):
            check_gradients(model(LAYERS.Dense(3)), (X, Y))
    finally:
        tf.get_logger().removeHandler(handler)
    assert seen == []


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
    for checked in (True, False):
        keras.utils.set_random_seed(0)
        trained = model(LAYERS.Dense(3), noise_seed=1, self_check=checked)
        trained.compile(trained.optimizer, trained.loss, steps_per_execution=steps_per_execution)
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
    data = keras_trainer._dataset_of([batch, batch], spec)
    # Its thread may hold up the end of the iterator.
    assert not data.options().autotune.enabled
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


def as_vectors(values):
    """One of them is empty, as the kernel of a layer without inputs is."""
    return [tf.constant(values[:0]), tf.constant(values[:7]), tf.constant(values[7:])]


@pytest.mark.parametrize("scale", [1e-36, 1.0, 1e30])
def test_norms_of_gradients_are_those_of_float64(scale):
    first, second = np.random.default_rng(0).standard_normal((2, 2**20), "float32")
    first, second = first * np.float32(scale), second * np.float32(scale)
    norm = lambda values: np.linalg.norm(values.astype(np.float64))
    got = rounding.norm(as_vectors(first))
    np.testing.assert_allclose(got, norm(first), rtol=1e-5)
    got = rounding.distance(as_vectors(first), as_vectors(second))
    np.testing.assert_allclose(got, norm(first - second), rtol=1e-5)
    got = rounding.norm(rounding.difference(as_vectors(first), as_vectors(second), 0.5))
    np.testing.assert_allclose(got, norm(first - second / 2), rtol=1e-5)


@pytest.mark.parametrize("broken", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("position", [0, 6, 7, 11])
def test_norms_of_broken_gradients_are_not_finite(position, broken):
    values = np.zeros(12, np.float32)
    whole = as_vectors(values)
    values[position] = broken
    assert not np.isfinite(rounding.norm(as_vectors(values)))
    assert rounding.distance(whole, as_vectors(values)) == np.inf
    assert rounding.distance(as_vectors(values), as_vectors(values)) == 0


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__]))
