# Copyright 2026 The dice_tf Authors.
# SPDX-License-Identifier: Apache-2.0
"""Every Keras optimizer class has a private counterpart, or is refused with the reason."""

import inspect
import pathlib
import subprocess
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
    STEPS,
    flat,
    make_model,
    make_optimizer,
    make_problem,
)

import dice_tf
from dice_tf import make_dice_optimizer_class
from dice_tf.errors import ModelError, OptimizerArgumentError, PlainGradientsError

REFUSED = {"Optimizer", "LossScaleOptimizer", "MultiOptimizer"}
STOCK = sorted(
    name
    for name, member in vars(keras.optimizers).items()
    if inspect.isclass(member)
    and issubclass(member, keras.optimizers.Optimizer)
    and name not in REFUSED
)
# Keras 3.12's own Muon cannot train on TensorFlow: it looks its slots up by the path of the
# variable, which TensorFlow's variables do not have. Keras 3.13 mended it.
BROKEN_IN_KERAS = {"Muon"} if keras.__version__.startswith("3.12.") else set()
PRIVACY = dict(l2_norm_clip=1.0, noise_multiplier=1.0, expected_batch_size=BATCH)


def private_class(name):
    return make_dice_optimizer_class(getattr(keras.optimizers, name))


def test_the_family_is_complete():
    assert {"SGD", "Adam", "AdamW", "Nadam", "Adamax", "RMSprop", "Adagrad", "Adadelta",
            "Adafactor", "Ftrl", "Lion", "Lamb"} <= set(STOCK)  # fmt: skip
    assert make_dice_optimizer_class(keras.optimizers.SGD) is dice_tf.DiceSGDOptimizer
    assert make_dice_optimizer_class(keras.optimizers.Adam) is dice_tf.DiceAdamOptimizer


@pytest.mark.parametrize("name", STOCK)
def test_classes_are_made_once_and_named_after_their_original(name):
    made = private_class(name)
    assert made is private_class(name)
    assert made.__name__ == f"Dice{name}Optimizer" and issubclass(
        made, getattr(keras.optimizers, name)
    )
    assert keras.saving.get_registered_object(f"dice_tf>{made.__name__}") is made


def fit_two_epochs(model):
    x, y = make_problem(scale=1.0)
    if not model.optimizer.built:
        # In the step that `fit` compiles, Keras' ScheduleFreeAdamW would begin at 0.
        model.optimizer.build(model.trainable_variables)
    model.fit(x, y, batch_size=BATCH, shuffle=False, epochs=2, verbose=0)


def change_learning_rate(model):
    model.optimizer.learning_rate = 0.1 * float(model.optimizer.learning_rate)


@pytest.mark.parametrize("name", [name for name in STOCK if name not in BROKEN_IN_KERAS])
@pytest.mark.parametrize("with_schedule_decay_and_average", [False, True])
def test_without_clipping_and_noise_equals_the_original_over_20_steps(
    name, with_schedule_decay_and_average
):
    def arguments():
        learning_rate = 1.0 if name == "Adadelta" else 0.03
        if not with_schedule_decay_and_average:
            return dict(learning_rate=learning_rate)
        schedule = keras.optimizers.schedules.ExponentialDecay(learning_rate, 3, 0.9)
        average = dict(use_ema=True, ema_momentum=0.7, ema_overwrite_frequency=6)
        return dict(learning_rate=schedule, weight_decay=0.1, **average)

    private = make_optimizer(private_class(name), l2_norm_clip=1e6, self_check=False, **arguments())
    stock = getattr(keras.optimizers, name)(**arguments())
    ends = []
    for optimizer in (private, stock):
        model = make_model(optimizer, jit_compile=False)
        start = flat(model.trainable_variables)
        fit_two_epochs(model)
        if not with_schedule_decay_and_average:
            change_learning_rate(model)
        fit_two_epochs(model)
        assert int(optimizer.iterations) == 4 * STEPS == 20
        ends.append(flat(model.trainable_variables))
    assert np.abs(ends[1] - start).max() > 3e-3
    np.testing.assert_allclose(ends[0], ends[1], rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("bounded", [True, False])
def test_dice_adam_equals_its_numpy_transcription(bounded):
    x, y = make_problem()
    model = make_model(
        make_optimizer(
            dice_tf.DiceAdamOptimizer,
            learning_rate=0.1,
            l2_norm_clip=0.8,
            error_norm_clip=0.5,
            bound_residuals=bounded,
        )
    )
    batches = np.arange(len(x)).reshape(-1, BATCH)
    gradients = lambda parameters, rows: numpy_oracle.softmax_gradients(
        parameters, x[rows].astype(np.float64), y[rows], np.ones(BATCH), CLASSES
    )
    start = flat(model.trainable_variables)
    expected, error = numpy_oracle.dice_sgd(
        gradients, start, batches, 0.8, 0.5, BATCH, numpy_oracle.adam_rule(0.1), bounded
    )
    model.fit(x, y, batch_size=BATCH, shuffle=False, verbose=0)
    np.testing.assert_allclose(flat(model.trainable_variables), expected, rtol=2e-5, atol=2e-5)
    np.testing.assert_allclose(flat(model.optimizer.errors), error, rtol=2e-5, atol=2e-5)


def test_moments_are_of_the_noised_direction_and_errors_of_the_other():
    x, y = make_problem()
    noised, silent = (
        make_model(make_optimizer(dice_tf.DiceAdamOptimizer, l2_norm_clip=0.5, **noise))
        for noise in ({"noise_multiplier": 10.0}, {})
    )
    for model in (noised, silent):
        model.train_on_batch(x[:BATCH], y[:BATCH])
    np.testing.assert_array_equal(flat(noised.optimizer.errors), flat(silent.optimizer.errors))
    noise = flat(noised.optimizer._momentums) - flat(silent.optimizer._momentums)
    # (1 - beta_1) z C1 / B
    assert np.std(noise) == pytest.approx(0.1 * 10.0 * 0.5 / BATCH, rel=0.5)


@pytest.mark.parametrize("name", STOCK)
def test_config_round_trip(name):
    schedule = keras.optimizers.schedules.PiecewiseConstantDecay([2], [0.5, 0.1])
    optimizer = private_class(name)(
        learning_rate=schedule,
        weight_decay=0.01,
        use_ema=True,
        feedback_steps=3,
        rescale_to_unit_norm=True,
        **PRIVACY,
    )
    config = optimizer.get_config()
    clone = private_class(name).from_config(optimizer.get_config())
    assert clone.get_config() == config and clone.mechanism == optimizer.mechanism
    again = keras.optimizers.deserialize(keras.optimizers.serialize(optimizer))
    assert type(again) is private_class(name) and again.get_config() == config


LOADING_PROGRAM = """
import pathlib, sys
import dice_tf, keras
for path in sorted(pathlib.Path(sys.argv[1]).glob("*")):
    optimizer = keras.models.load_model(path).optimizer
    print(path.stem, type(optimizer).__name__, int(optimizer.iterations), optimizer.mechanism)
"""


def test_case_4_files_of_every_class_load_in_a_fresh_process(tmp_path):
    expected = []
    for name in STOCK:
        optimizer = private_class(name)(feedback_steps=2, **PRIVACY)
        model = make_model(optimizer)
        optimizer.build(model.trainable_variables)
        optimizer.iterations.assign(7)
        model.save(tmp_path / f"{name}.keras")
        expected.append(f"{name} Dice{name}Optimizer 7 {optimizer.mechanism}")
    model.save(tmp_path / "legacy.h5")
    expected.append(f"legacy Dice{name}Optimizer 7 {optimizer.mechanism}")
    output = subprocess.run(
        [sys.executable, "-c", LOADING_PROGRAM, tmp_path],
        check=True, capture_output=True, text=True,
        cwd=pathlib.Path(__file__).absolute().parents[1],
    ).stdout  # fmt: skip
    assert output.splitlines() == expected


def test_a_class_of_ones_own_is_made_private_and_loads_when_it_is_known(tmp_path):
    class SignDescent(keras.optimizers.Optimizer):
        def update_step(self, gradient, variable, learning_rate):
            self.assign_sub(variable, learning_rate * keras.ops.sign(gradient))

    made = make_dice_optimizer_class(SignDescent)
    x, y = make_problem()
    model = make_model(make_optimizer(made, learning_rate=0.25, noise_multiplier=1.0))
    before = flat(model.trainable_variables)
    model.train_on_batch(x[:BATCH], y[:BATCH])
    moved = np.abs(flat(model.trainable_variables) - before)
    np.testing.assert_allclose(moved, 0.25, rtol=1e-5)
    model.save(tmp_path / "model.keras")
    assert type(keras.models.load_model(tmp_path / "model.keras").optimizer) is made
    # A class of the same name from another module is another class.
    other = make_dice_optimizer_class(type("Adam", (keras.optimizers.Adam,), {}))
    assert other.__name__ == "DiceAdamOptimizer" and other is not dice_tf.DiceAdamOptimizer
    registered = keras.saving.get_registered_object("dice_tf>DiceAdamOptimizer")
    assert registered is dice_tf.DiceAdamOptimizer


class TakesGradients(keras.optimizers.SGD):
    def apply(self, grads, trainable_variables=None):
        return super().apply([keras.ops.sign(g) for g in grads], trainable_variables)


@pytest.mark.parametrize(
    "argument, match",
    [
        (keras.optimizers.LossScaleOptimizer, "skips steps depending on the data"),
        (keras.optimizers.Optimizer, "no update rule"),
        (dice_tf.DiceSGDOptimizer, "private already"),
        (TakesGradients, "overrides apply"),
        ("adam", "keras_optimizer_class='adam'"),
        (int, "not a class derived from"),
        *(
            [(keras.optimizers.MultiOptimizer, "other optimizers")]
            if hasattr(keras.optimizers, "MultiOptimizer")
            else []
        ),
    ],
)
def test_what_has_no_private_counterpart_is_refused_with_the_reason(argument, match):
    with pytest.raises(OptimizerArgumentError, match=match):
        make_dice_optimizer_class(argument)


REFUSED_VALUES = [
    ("clipnorm", 1.0),
    ("clipvalue", 1.0),
    ("global_clipnorm", 1.0),
    ("loss_scale_factor", 2.0),
    ("gradient_accumulation_steps", 2),
]


@pytest.mark.parametrize("name, value", REFUSED_VALUES)
def test_case_18_what_cannot_be_right_is_refused_wherever_it_is_set(name, value):
    optimizer = dice_tf.DiceAdamOptimizer(**PRIVACY)
    with pytest.raises(OptimizerArgumentError, match=f"{name}={value}"):
        dice_tf.DiceAdamOptimizer(**PRIVACY, **{name: value})
    with pytest.raises(OptimizerArgumentError, match=f"{name}={value}"):
        setattr(optimizer, name, value)
    with pytest.raises(OptimizerArgumentError, match=f"{name}={value}"):
        dice_tf.DiceAdamOptimizer.from_config({**optimizer.get_config(), name: value})
    assert getattr(optimizer, name) is None


def test_wrapping_a_private_optimizer_is_refused():
    x, y = make_problem()
    # By the wrapper's constructor, with older versions of Keras at the first step.
    with pytest.raises(OptimizerArgumentError, match="mixed_bfloat16"):
        wrapper = keras.optimizers.LossScaleOptimizer(dice_tf.DiceSGDOptimizer(**PRIVACY))
        make_model(wrapper).train_on_batch(x[:BATCH], y[:BATCH])
    if hasattr(keras.optimizers, "MultiOptimizer"):
        chosen = keras.optimizers.OptimizerMap(dice_tf.DiceSGDOptimizer(**PRIVACY))
        with pytest.raises(OptimizerArgumentError, match="MultiOptimizer"):
            keras.optimizers.MultiOptimizer(chosen)


@pytest.mark.parametrize("name", ["Nadam", "Muon", "ScheduleFreeAdamW"])
def test_case_3_plain_gradients_are_refused_by_every_class(name):
    if name not in STOCK:
        name = "Adam"
    model = make_model(private_class(name)(**PRIVACY))
    gradients = [tf.ones(v.shape) for v in model.trainable_variables]
    with pytest.raises(PlainGradientsError, match=f"Dice{name}Optimizer"):
        model.optimizer.apply_gradients(zip(gradients, model.trainable_variables))


def test_variables_that_are_overwritten_with_their_gradient_are_refused():
    model = make_model(dice_tf.DiceAdamOptimizer(**PRIVACY))
    model.layers[0].bias.overwrite_with_gradient = True
    x, y = make_problem()
    with pytest.raises(ModelError, match="bias.*overwrite_with_gradient=True"):
        model.train_on_batch(x[:BATCH], y[:BATCH])


def test_weight_decay_exclusion():
    x = np.zeros((BATCH, FEATURES), "float32")
    model = make_model(make_optimizer(private_class("AdamW"), weight_decay=0.5, learning_rate=0.1))
    model.layers[0].bias.assign(np.ones(CLASSES))
    model.optimizer.exclude_from_weight_decay(var_names=["bias"])
    kernel = model.layers[0].kernel.numpy()
    # Of weight 0: only the decay is left.
    model.train_on_batch(x, np.zeros(BATCH), sample_weight=np.zeros(BATCH))
    np.testing.assert_allclose(model.layers[0].kernel.numpy(), kernel * 0.95, rtol=1e-6)
    np.testing.assert_array_equal(model.layers[0].bias.numpy(), np.ones(CLASSES))


def test_rescaled_steps_do_not_depend_on_the_clipping_threshold():
    x, y = make_problem(scale=1.0)
    ends = []
    for rescale, clip in ((True, 1e-3), (True, 1e-5), (False, 1e-5)):
        model = make_model(
            make_optimizer(
                learning_rate=0.01,
                momentum=0.9,
                l2_norm_clip=clip,
                rescale_to_unit_norm=rescale,
                noise_multiplier=1.0,
                noise_seed=5,
            )
        )
        start = flat(model.trainable_variables)
        model.fit(x, y, batch_size=BATCH, shuffle=False, epochs=2, verbose=0)
        ends.append(flat(model.trainable_variables) - start)
    assert np.abs(ends[0]).max() > 0.01
    np.testing.assert_allclose(ends[1], ends[0], rtol=1e-3, atol=1e-6)
    assert np.abs(ends[2]).max() < 0.01 * np.abs(ends[0]).max()


def test_penalties_are_not_rescaled():
    penalty = keras.regularizers.L2(0.5)
    keras.utils.set_random_seed(3)
    model = keras.Sequential(
        [keras.Input((FEATURES,)), keras.layers.Dense(CLASSES, kernel_regularizer=penalty)]
    )
    optimizer = make_optimizer(learning_rate=0.1, l2_norm_clip=1e-4, rescale_to_unit_norm=True)
    model.compile(optimizer, keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    kernel = model.layers[0].kernel.numpy()
    x, y = make_problem()
    model.train_on_batch(x[:BATCH], y[:BATCH], sample_weight=np.zeros(BATCH))
    np.testing.assert_allclose(model.layers[0].kernel.numpy(), kernel * 0.9, rtol=1e-6)


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__]))
