# Copyright 2026 The dice_tf Authors.
# SPDX-License-Identifier: Apache-2.0
"""The optimizer against float64 NumPy, against Keras, and against its own refusals."""

import pathlib
import sys

import keras
import numpy as np
import pytest
import tensorflow as tf

sys.path.insert(0, str(pathlib.Path(__file__).parent))

import numpy_oracle
from softmax_regression import (
    BATCH,
    CLASSES,
    FEATURES,
    flat,
    make_model,
    make_optimizer,
    make_problem,
)

from dice_tf.errors import (
    GradientEngineError,
    MechanismError,
    OptimizerArgumentError,
    PlainGradientsError,
)
from dice_tf.training.optimizers import DiceSGDOptimizer

ENGINES = ("layerwise", "vectorized")


def oracle(model, x, y, c1, c2, bounded, divisor=BATCH, weights=None, **rule):
    weights = np.ones(len(x)) if weights is None else weights
    x = x.astype(np.float64)
    batches = [np.arange(i, min(i + BATCH, len(x))) for i in range(0, len(x), BATCH)]

    def gradients(parameters, rows):
        return numpy_oracle.softmax_gradients(parameters, x[rows], y[rows], weights[rows], CLASSES)

    update = numpy_oracle.sgd_rule(**{"learning_rate": 0.5, **rule})
    return numpy_oracle.dice_sgd(
        gradients, flat(model.trainable_variables), batches, c1, c2, divisor, update, bounded
    )


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("bounded", [True, False])
@pytest.mark.parametrize(
    "rule", [{}, {"momentum": 0.9}, {"momentum": 0.9, "nesterov": True}], ids=str
)
def test_equals_numpy_transcription(engine, bounded, rule):
    x, y = make_problem()
    model = make_model(
        make_optimizer(
            l2_norm_clip=0.8,
            error_norm_clip=0.5,
            bound_residuals=bounded,
            gradient_engine=engine,
            **rule,
        )
    )
    expected, expected_error = oracle(model, x, y, 0.8, 0.5, bounded, **rule)
    assert np.linalg.norm(expected - flat(model.trainable_variables)) > 0.1
    model.fit(x, y, batch_size=BATCH, shuffle=False, verbose=0)
    np.testing.assert_allclose(flat(model.trainable_variables), expected, rtol=2e-5, atol=2e-6)
    np.testing.assert_allclose(flat(model.optimizer.errors), expected_error, rtol=2e-5, atol=2e-6)


def test_forms_differ_when_a_gradient_exceeds_the_thresholds():
    x, y = make_problem()
    results = []
    for bounded in (True, False):
        model = make_model(make_optimizer(error_norm_clip=0.1, bound_residuals=bounded))
        model.fit(x, y, batch_size=BATCH, shuffle=False, verbose=0)
        results.append(flat(model.trainable_variables))
    assert np.abs(results[0] - results[1]).max() > 1e-3


def test_bounded_form_is_algorithm_1_when_no_gradient_exceeds_the_thresholds():
    x, y = make_problem(scale=1.0)
    largest = 2 * np.sqrt((x.astype(float) ** 2).sum(1) + 1).max()  # |delta| <= sqrt(2)
    c1 = 0.3 * largest
    c2 = 0.7 * largest
    results = []
    for bounded in (True, False):
        model = make_model(
            make_optimizer(l2_norm_clip=c1, error_norm_clip=c2, bound_residuals=bounded)
        )
        model.fit(x, y, batch_size=BATCH, shuffle=False, epochs=2, verbose=0)
        results.append(
            np.concatenate([flat(model.trainable_variables), flat(model.optimizer.errors)])
        )
    np.testing.assert_allclose(results[0], results[1], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    "rule",
    [
        {},
        {"momentum": 0.9, "nesterov": True},
        {"weight_decay": 0.1},
        {"use_ema": True, "ema_overwrite_frequency": 2},
    ],
    ids=str,
)
def test_without_clipping_and_noise_equals_keras_sgd_over_20_steps(rule):
    x, y = make_problem(scale=1.0)
    private = make_model(make_optimizer(learning_rate=0.1, l2_norm_clip=1e6, **rule))
    stock = make_model(keras.optimizers.SGD(0.1, **rule))
    for model in (private, stock):
        model.fit(x, y, batch_size=BATCH, shuffle=False, epochs=4, verbose=0)
    assert int(private.optimizer.iterations) == 20
    np.testing.assert_allclose(
        flat(private.trainable_variables), flat(stock.trainable_variables), rtol=1e-6, atol=1e-6
    )


@pytest.mark.parametrize("engine", ENGINES)
def test_case_1_short_last_batch_is_divided_by_the_public_batch_size(engine):
    x, y = make_problem()
    x, y = x[: 2 * BATCH + 3], y[: 2 * BATCH + 3]
    model = make_model(make_optimizer(gradient_engine=engine))
    expected, _ = oracle(model, x, y, 1.0, 1.0, True)
    model.fit(x, y, batch_size=BATCH, shuffle=False, verbose=0)
    np.testing.assert_allclose(flat(model.trainable_variables), expected, rtol=2e-5, atol=2e-6)


@pytest.mark.parametrize("engine", ENGINES)
def test_case_19_sample_weights_scale_gradients_before_clipping(engine):
    x, y = make_problem()
    weights = np.ones(len(x))
    weights[::5], weights[1::5] = 0.0, 1e6
    model = make_model(make_optimizer(gradient_engine=engine))
    expected, _ = oracle(model, x, y, 1.0, 1.0, True, weights=weights)
    model.fit(x, y, sample_weight=weights, batch_size=BATCH, shuffle=False, verbose=0)
    np.testing.assert_allclose(flat(model.trainable_variables), expected, rtol=2e-5, atol=2e-6)


@pytest.mark.parametrize("engine", ENGINES)
def test_padding_of_weight_0_changes_nothing(engine):
    x, y = make_problem()
    padded = np.concatenate([x[:BATCH], x[:5] * 1e3])
    results = []
    for inputs, labels, weights in (
        (x[:BATCH], y[:BATCH], np.ones(BATCH)),
        (padded, np.concatenate([y[:BATCH], y[:5]]), np.r_[np.ones(BATCH), np.zeros(5)]),
    ):
        model = make_model(make_optimizer(gradient_engine=engine))
        model.train_on_batch(inputs, labels, sample_weight=weights)
        results.append(flat(model.trainable_variables + model.optimizer.errors))
    np.testing.assert_allclose(results[0], results[1], rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("bounded", [True, False])
def test_case_18_chunks_change_nothing_to_rounding_errors_included(engine, bounded):
    x, y = make_problem()
    results = []
    for chunk_size in (None, 4, 3, 100):
        model = make_model(
            make_optimizer(
                chunk_size=chunk_size,
                bound_residuals=bounded,
                expected_batch_size=12,
                gradient_engine=engine,
            ),
            metrics=["accuracy"],
        )
        history = model.fit(x, y, batch_size=12, shuffle=False, epochs=2, verbose=0).history
        results.append(
            np.concatenate(
                [
                    flat(model.trainable_variables),
                    flat(model.optimizer.errors),
                    history["loss"],
                    history["accuracy"],
                ]
            )
        )
    for result in results[1:]:
        np.testing.assert_allclose(result, results[0], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("engine", ENGINES)
def test_case_7_microbatches_clip_the_mean_gradient_of_a_microbatch(engine):
    x, y = make_problem()
    model = make_model(
        make_optimizer(
            num_microbatches=4, l2_norm_clip=0.8, error_norm_clip=0.5, gradient_engine=engine
        )
    )
    start = flat(model.trainable_variables)
    gradients = numpy_oracle.softmax_gradients(
        start, x[:BATCH].astype(float), y[:BATCH], np.ones(BATCH), CLASSES
    )
    means = gradients.reshape(4, 2, -1).mean(1)
    heads = np.array([numpy_oracle.clip(g, 0.8) for g in means])
    residuals = np.array([numpy_oracle.clip(g - h, 0.5) for g, h in zip(means, heads)])
    model.train_on_batch(x[:BATCH], y[:BATCH])
    np.testing.assert_allclose(
        flat(model.trainable_variables), start - 0.5 * heads.mean(0), rtol=2e-5, atol=2e-6
    )
    np.testing.assert_allclose(
        flat(model.optimizer.errors), residuals.mean(0), rtol=2e-5, atol=2e-6
    )


def test_error_norm_clip_0_is_dp_sgd_without_error_slots():
    x, y = make_problem()
    model = make_model(make_optimizer(error_norm_clip=0.0))
    expected, _ = oracle(model, x, y, 1.0, 0.0, True)
    model.fit(x, y, batch_size=BATCH, shuffle=False, verbose=0)
    np.testing.assert_allclose(flat(model.trainable_variables), expected, rtol=2e-5, atol=2e-6)
    assert model.optimizer.errors == []


def test_errors_are_float32_slots_of_the_variables_shapes():
    model = make_model(make_optimizer())
    model.optimizer.build(model.trainable_variables)
    assert [e.shape for e in model.optimizer.errors] == [v.shape for v in model.trainable_variables]
    assert {e.dtype for e in model.optimizer.errors} == {"float32"}
    assert len({e.path for e in model.optimizer.errors}) == len(model.trainable_variables)


@pytest.mark.parametrize("engine", ENGINES)
def test_an_example_with_a_non_finite_gradient_contributes_nothing(engine):
    x, y = make_problem()
    broken = x[:BATCH].copy()
    broken[2] = np.nan
    broken[5] = np.inf
    results = []
    for inputs, weights in ((broken, None), (x[:BATCH], [1, 1, 0, 1, 1, 0, 1, 1])):
        model = make_model(make_optimizer(gradient_engine=engine))
        weights = None if weights is None else np.array(weights, "float32")
        model.train_on_batch(inputs, y[:BATCH], sample_weight=weights)
        results.append(flat(model.trainable_variables + model.optimizer.errors))
    assert np.isfinite(results[0]).all()
    np.testing.assert_allclose(results[0], results[1], rtol=1e-6, atol=1e-7)


def test_regularizers_are_added_after_clipping_case_20():
    x, y = make_problem()

    def build(optimizer):
        keras.utils.set_random_seed(3)
        model = keras.Sequential(
            [
                keras.Input((FEATURES,)),
                keras.layers.Dense(CLASSES, kernel_regularizer=keras.regularizers.L2(50.0)),
            ]
        )
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(optimizer, loss)
        return model

    private = build(make_optimizer(l2_norm_clip=1e-3, error_norm_clip=0.0))
    plain = make_model(make_optimizer(l2_norm_clip=1e-3, error_norm_clip=0.0))
    kernel = private.layers[0].kernel.numpy()
    loss = private.train_on_batch(x[:BATCH], y[:BATCH])
    plain_loss = plain.train_on_batch(x[:BATCH], y[:BATCH])
    np.testing.assert_allclose(
        private.layers[0].kernel.numpy(),
        plain.layers[0].kernel.numpy() - 0.5 * 2 * 50.0 * kernel,
        rtol=1e-5,
        atol=1e-6,
    )
    np.testing.assert_allclose(loss, plain_loss + 50.0 * (kernel**2).sum(), rtol=1e-5)


def test_case_6_frozen_layers_and_unused_heads_get_no_update_and_no_noise():
    keras.utils.set_random_seed(0)
    inputs = keras.Input((FEATURES,))
    frozen = keras.layers.Dense(5, name="frozen")
    frozen.trainable = False
    hidden = frozen(inputs)
    used = keras.layers.Dense(1, name="used")(hidden)
    unused = keras.layers.Dense(1, name="unused")(hidden)
    model = keras.Model(inputs, [used, unused])
    model.compile(make_optimizer(noise_multiplier=1.0), loss=["mse", None])
    before = {v.path: v.numpy() for v in model.variables}
    x, _ = make_problem()
    model.fit(x, np.ones((len(x), 1)), batch_size=BATCH, verbose=0)
    changed = {v.path for v in model.variables if np.any(v.numpy() != before[v.path])}
    assert changed == {"used/kernel", "used/bias"}


def test_trainable_false_after_build_trains_the_rest():
    keras.utils.set_random_seed(0)
    model = keras.Sequential(
        [keras.Input((FEATURES,)), keras.layers.Dense(5), keras.layers.Dense(CLASSES)]
    )
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    optimizer = make_optimizer(noise_multiplier=1.0)
    model.compile(optimizer, loss)
    x, y = make_problem()
    model.fit(x, y, batch_size=BATCH, verbose=0)
    model.layers[0].trainable = False
    model.compile(optimizer, loss)
    before = [v.numpy() for v in model.variables]
    model.fit(x, y, batch_size=BATCH, verbose=0)
    changed = [bool(np.any(v.numpy() != b)) for v, b in zip(model.variables, before)]
    assert changed == [False, False, True, True]


@pytest.mark.parametrize("jit_compile", [False, True])
@pytest.mark.parametrize("engine", ENGINES)
def test_jit_and_eager_give_the_same_update(engine, jit_compile):
    x, y = make_problem()
    results = []
    for arguments in ({"jit_compile": jit_compile}, {"run_eagerly": True}):
        model = make_model(make_optimizer(gradient_engine=engine), **arguments)
        model.fit(x[:20], y[:20], batch_size=BATCH, shuffle=False, verbose=0)
        results.append(flat(model.trainable_variables))
    np.testing.assert_allclose(results[0], results[1], rtol=1e-5, atol=1e-6)


def test_case_3_plain_gradients_are_refused():
    model = make_model(make_optimizer())
    x, y = make_problem()
    with tf.GradientTape() as tape:
        loss = model.compute_loss(y=tf.constant(y), y_pred=model(x))
    gradients = tape.gradient(loss, model.trainable_variables)
    before = flat(model.trainable_variables)
    with pytest.raises(PlainGradientsError, match=r"private_train_step.*\(x, y, weights\)"):
        model.optimizer.apply_gradients(zip(gradients, model.trainable_variables))
    with pytest.raises(PlainGradientsError, match="private_train_step"):
        model.optimizer.apply(gradients, model.trainable_variables)
    np.testing.assert_array_equal(flat(model.trainable_variables), before)


@pytest.mark.parametrize(
    "name, value",
    [
        ("l2_norm_clip", 0.0),
        ("l2_norm_clip", -1.0),
        ("l2_norm_clip", float("inf")),
        ("l2_norm_clip", "1.0"),
        ("error_norm_clip", -0.1),
        ("error_norm_clip", float("nan")),
        ("noise_multiplier", -1.0),
        ("noise_multiplier", float("nan")),
        ("expected_batch_size", 0),
        ("expected_batch_size", 2.5),
        ("expected_batch_size", True),
        ("clipping", "per-layer"),
        ("num_microbatches", 3),
        ("num_microbatches", 0),
    ],
)
def test_bad_privacy_parameters_are_refused_by_name_and_value(name, value):
    with pytest.raises(MechanismError, match=f"{name}=.*{value}"):
        make_optimizer(**{"noise_multiplier": 1.0, name: value})


@pytest.mark.parametrize(
    "arguments, match",
    [
        ({"gradient_engine": "fast"}, "gradient_engine='fast'"),
        ({"chunk_size": 0}, "chunk_size=0"),
        ({"num_microbatches": 2, "chunk_size": 6}, "multiple of the 4"),
    ],
)
def test_bad_engine_arguments_are_refused(arguments, match):
    with pytest.raises(GradientEngineError, match=match):
        make_optimizer(noise_multiplier=1.0, **arguments)


@pytest.mark.parametrize(
    "name, value",
    [
        ("l2_norm_clip", 0.01),
        ("noise_multiplier", 100.0),
        ("expected_batch_size", 10**6),
        ("error_norm_clip", 0.0),
        ("bound_residuals", False),
        ("clipping", "automatic"),
        ("feedback_steps", 4),
        ("num_microbatches", 2),
        ("noise_seed", 3),
    ],
)
def test_privacy_parameters_can_be_read_and_not_set(name, value):
    optimizer = make_optimizer(noise_multiplier=1.5, l2_norm_clip=2.0)
    with pytest.raises(OptimizerArgumentError, match=f"fixed when.*{name}={value!r}"):
        setattr(optimizer, name, value)
    if name == "noise_seed":
        assert not hasattr(optimizer, name)
    else:
        assert getattr(optimizer, name) == getattr(optimizer.mechanism, name) != value


def test_positional_arguments_are_refused():
    with pytest.raises(OptimizerArgumentError, match="keyword-only.*Received: 0.5, 1.0, 1.1"):
        DiceSGDOptimizer(0.5, 1.0, 1.1)


def test_no_noise_warns_that_training_is_not_private():
    with pytest.warns(UserWarning, match="not private"):
        DiceSGDOptimizer(l2_norm_clip=1.0, noise_multiplier=0.0, expected_batch_size=4)


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__]))
