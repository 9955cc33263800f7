# Copyright 2026 The dice_tf Authors.
# SPDX-License-Identifier: Apache-2.0
"""Loops of one's own, tuners, threads: however a model is trained, the step is the same."""

import pathlib
import sys
import threading

import keras
import numpy as np
import pytest
import tensorflow as tf

sys.path.insert(0, str(pathlib.Path(__file__).parent))

from softmax_regression import BATCH, CLASSES, FEATURES, flat, make_problem

import dice_tf
from dice_tf import DiceAdamOptimizer, DiceSGDOptimizer, private_train_step
from dice_tf.ledger import provenance

X, Y = make_problem()
N = len(X)
OPTIMIZERS = {
    "adam": (DiceAdamOptimizer, {}),
    "feedback_steps": (DiceSGDOptimizer, dict(feedback_steps=3, momentum=0.9)),
    "chunks": (DiceSGDOptimizer, dict(chunk_size=3, bound_residuals=False)),
    "vectorized": (DiceSGDOptimizer, dict(gradient_engine="vectorized", use_ema=True)),
}


def build(units=5, name="feedback_steps", drops=True, **compile_arguments):
    """A build function, as tuners call it."""
    keras.utils.set_random_seed(units)
    model = keras.Sequential(
        [
            keras.Input((FEATURES,)),
            keras.layers.Dense(units, activation="tanh"),
            keras.layers.Dropout(0.25, seed=1) if drops else keras.layers.LayerNormalization(),
            keras.layers.Dense(CLASSES, kernel_regularizer="l2"),
        ]
    )
    optimizer_class, arguments = OPTIMIZERS[name]
    optimizer = optimizer_class(
        0.1, l2_norm_clip=0.5, noise_multiplier=1.0, expected_batch_size=BATCH, noise_seed=units,
        **arguments,
    )  # fmt: skip
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(optimizer, loss, metrics=["accuracy"], **compile_arguments)
    return model


def draw():
    return dice_tf.CyclicPoissonSampling(N, BATCH, seed=2).dataset(X, Y)


def fit(model, **arguments):
    return model.fit(X, Y, batch_size=BATCH, shuffle=False, verbose=0, **arguments).history


def batches():
    return [(X[i : i + BATCH], Y[i : i + BATCH]) for i in range(0, N, BATCH)]


def counts(model):
    # Who drew them, and what an epoch is, is known to `fit` alone.
    record = provenance.unpack_record(model.optimizer.sampling_record.numpy())
    of_fit = ("assignment", "sampling", "first_seeded_draw", "loop_steps")
    record.update(dict.fromkeys(of_fit))
    return [value for value in record.values() if value is not None]


def state(model):
    optimizer = model.optimizer
    others = [v for v in optimizer.variables if v is not optimizer.sampling_record]
    return np.concatenate([flat([*model.variables, *others, *optimizer.errors]), counts(model)])


@pytest.fixture(scope="module")
def reference():
    model = build()
    return fit(model, epochs=2), state(model)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_case_3_a_loop_over_a_sampler_takes_the_steps_of_fit(name):
    # The reference engine refuses dropout: every example would have the same mask.
    make = lambda: build(name=name, drops=name != "vectorized")
    expected = make()
    history = expected.fit(draw(), epochs=2, verbose=0).history
    model, data = make(), draw()

    @tf.function(input_signature=[data.element_spec])
    def step(batch):
        return private_train_step(model, batch)

    for epoch in range(2):
        model.reset_metrics()
        for batch in data:
            logs = step(batch)
    model.optimizer.finalize_variable_values(model.trainable_variables)
    # Graphs of `fit` are rewritten once, others twice, so sums may be taken in another order.
    np.testing.assert_allclose(state(model), state(expected), rtol=1e-5, atol=1e-6)
    assert counts(model) == counts(expected)
    for metric, value in logs.items():
        np.testing.assert_allclose(value, history[metric][-1], rtol=1e-5)
    assert set(logs) == set(history)


def test_a_loop_without_tf_function_takes_the_same_steps(reference):
    model = build()
    for batch in batches() * 2:
        private_train_step(model, batch)
    np.testing.assert_allclose(state(model), reference[1], rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(
    "arguments",
    [
        {"jit_compile": True},
        {"jit_compile": True, "steps_per_execution": 3},
        {"run_eagerly": True, "steps_per_execution": 2},
    ],
    ids=str,
)
def test_compile_options_change_nothing(arguments):
    # XLA draws other dropout masks.
    expected, model = build(drops=False), build(drops=False, **arguments)
    for each in (expected, model):
        fit(each, epochs=2)
    np.testing.assert_allclose(state(model), state(expected), rtol=1e-4, atol=1e-5)


def test_validation_does_not_touch_training(reference):
    model = build()
    history = fit(model, epochs=2, validation_data=(X[:10], Y[:10]), validation_freq=1)
    np.testing.assert_array_equal(state(model), reference[1])
    assert history["loss"] == reference[0]["loss"] and len(history["val_accuracy"]) == 2


def test_train_on_batch_takes_class_and_sample_weights_as_fit_does():
    class_weight = {0: 0.0, 1: 2.0, 2: 0.5, 3: 1.0}
    weights = np.array([class_weight[label] for label in Y], "float32")
    expected, by_class, by_example, loop = (build() for _ in range(4))
    fit(expected, class_weight=class_weight)
    for i, (x, y) in enumerate(batches()):
        weight = weights[i * BATCH : (i + 1) * BATCH]
        by_class.train_on_batch(x, y, class_weight=class_weight)
        by_example.train_on_batch(x, y, sample_weight=weight)
        private_train_step(loop, (x, y, weight))
    for model in (by_class, by_example, loop):
        np.testing.assert_allclose(state(model), state(expected), rtol=1e-4, atol=1e-6)


def test_a_tuner_may_build_many_models_in_one_process(reference):
    """Trials of other sizes, sessions cleared between them, and a winner that is built again."""
    for units in (3, 5, 4, 5):
        model = build(units=units)
        fit(model, epochs=2)
        if units == 5:
            np.testing.assert_array_equal(state(model), reference[1])
        keras.backend.clear_session()


def test_a_cloned_model_trains_like_the_original(reference):
    original = build()
    clone = keras.models.clone_model(original)
    clone.set_weights(original.get_weights())
    optimizer = type(original.optimizer).from_config(
        {**original.optimizer.get_config(), "noise_seed": 5}
    )
    clone.compile(optimizer, original.loss, metrics=["accuracy"])
    for model in (original, clone):
        fit(model, epochs=2)
        np.testing.assert_array_equal(state(model), reference[1])
    # To compile again is to start again, from the weights as they are.
    clone.compile(type(optimizer).from_config(original.optimizer.get_config()), original.loss)
    fit(clone)
    assert int(clone.optimizer.iterations) == N // BATCH


def test_models_trained_in_threads_do_not_meet(reference):
    """Hooks, masks and keys of one model must not reach another, private or not."""
    builders = [build, lambda: build(name="adam"), lambda: build(units=4)]

    def stock():
        model = build(units=6)
        model.compile("sgd", model.loss)
        return model

    def train(model):
        model.fit(X, Y, batch_size=BATCH, epochs=2, shuffle=False, verbose=0)
        # Keras counts the seeds of dropout in the model: all variables.
        return flat(model.variables)

    expected = [train(make()) for make in (*builders, stock)]
    models, results = [make() for make in (*builders, stock)], [None] * 4
    barrier = threading.Barrier(len(models))

    def run(index):
        barrier.wait()
        results[index] = train(models[index])

    threads = [threading.Thread(target=run, args=(i,)) for i in range(len(models))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for result, value in zip(results, expected, strict=True):
        np.testing.assert_array_equal(result, value)


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__]))
