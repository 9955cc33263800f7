# Copyright 2026 The dice_tf Authors.
# SPDX-License-Identifier: Apache-2.0
"""DP-AdamBC: equal to its NumPy transcription, with the variance that the noise really has."""

import os
import pathlib
import subprocess
import sys

import keras
import numpy as np
import pytest
from softmax_regression import BATCH, CLASSES, FEATURES, make_model, make_optimizer, make_problem
import tensorflow as tf

import dice_tf
from dice_tf import accounting
from dice_tf.errors import OptimizerArgumentError
from dice_tf.training import bias_corrected_adam

NOISE = dict(noise_multiplier=2.0, noise_seed=7)
CORRECTED = dict(correct_noise_bias=True, learning_rate=0.1)


def adam_bc(start, directions, variance, floor, rate, beta_1=0.9, beta_2=0.999, epsilon=1e-7):
    """Alg. 1 of Tang et al. in float64, moments as sums; `floor` and `rate` are per step."""
    parameters = np.array(start, np.float64)
    for t in range(1, len(directions) + 1):
        g = np.array(directions[:t], np.float64)
        mean = lambda beta, values: np.tensordot(
            (1 - beta) * beta ** np.arange(t - 1, -1, -1) / (1 - beta**t), values, 1
        )
        second = np.maximum(mean(beta_2, g**2) - variance, floor(t))
        # Keras' own epsilon; 0 in the paper.
        denominator = np.sqrt(second) + epsilon / np.sqrt(1 - beta_2**t)
        parameters -= rate(t) * mean(beta_1, g) / denominator
    return parameters


def recorded_directions(monkeypatch):
    """The list that each direction is appended to which an update rule is given."""
    directions, update = [], bias_corrected_adam.NoiseBiasCorrection.update_step

    def spy(self, gradient, variable, learning_rate):
        directions.append(gradient.numpy())
        update(self, gradient, variable, learning_rate)

    monkeypatch.setattr(bias_corrected_adam.NoiseBiasCorrection, "update_step", spy)
    return directions


def deviation(beta, t):
    weights = (1 - beta) * beta ** np.arange(t) / (1 - beta**t)
    return np.sqrt(2 * np.sum(weights**2))


SIGMA = 2.0 * 0.5 / BATCH
CASES = {
    "by default": ({}, SIGMA, None),
    "a floor": ({"noise_bias_floor": 1e-3}, SIGMA, 1e-3),
    "a floor below everything": ({"noise_bias_floor": 1e-9}, SIGMA, 1e-9),
    "DP-SGD": ({"error_norm_clip": 0.0}, SIGMA, None),
    "feedback over three steps": ({"feedback_steps": 3, "error_norm_clip": 1.5}, SIGMA, None),
    "direction over C1": ({"rescale_to_unit_norm": True}, 2.0 / BATCH, None),
    "automatic": ({"clipping": "automatic", "l2_norm_clip": None}, 2.0 / BATCH, None),
    "other moments": ({"beta_1": 0.5, "beta_2": 0.9, "epsilon": 0.01}, SIGMA, None),
    "no memory": ({"beta_1": 0.0, "beta_2": 0.0}, SIGMA, None),
}


@pytest.mark.parametrize("case", CASES)
def test_training_equals_the_transcription(case, monkeypatch):
    arguments, sigma, floor = CASES[case]
    directions = recorded_directions(monkeypatch)
    arguments = {"l2_norm_clip": 0.5, **NOISE, **CORRECTED, **arguments}
    schedule = keras.optimizers.schedules.InverseTimeDecay(0.1, 1, 0.5)
    arguments["learning_rate"] = schedule
    model = make_model(
        make_optimizer(dice_tf.DiceAdamOptimizer, self_check=False, **arguments), run_eagerly=True
    )
    model.layers[0].kernel.regularizer = keras.regularizers.L2(0.05)
    starts = [v.numpy() for v in model.trainable_variables]
    x, y = make_problem()
    model.fit(x, y, batch_size=BATCH, shuffle=False, epochs=2, verbose=0)
    moments = {k: arguments[k] for k in ("beta_1", "beta_2", "epsilon") if k in arguments}
    beta_2 = moments.get("beta_2", 0.999)
    automatic = lambda t: sigma**2 * deviation(beta_2, t)
    floors = automatic if floor is None else lambda t: floor
    corrected = []
    for i, (variable, start) in enumerate(zip(model.trainable_variables, starts, strict=True)):
        rate = lambda t: 0.1 / (1 + 0.5 * (t - 1))
        run = lambda variance: adam_bc(start, directions[i::2], variance, floors, rate, **moments)
        expected = run(sigma**2)
        scale = np.abs(expected - start).max()
        np.testing.assert_allclose(variable.numpy(), expected, rtol=0, atol=2e-4 * scale)
        corrected.append(np.abs(expected - run(0.0)).max() / scale)
    assert max(corrected) > 0.05, "the correction made no difference"


@pytest.mark.parametrize(
    "arguments",
    [
        {},
        {"rescale_to_unit_norm": True},
        {"clipping": "automatic", "l2_norm_clip": None},
        {"num_microbatches": 2},
        {"error_norm_clip": 0.0, "expected_batch_size": 3},
        {"feedback_steps": 2},
    ],
    ids=str,
)
def test_the_variance_is_that_of_the_noise(arguments, monkeypatch):
    directions = recorded_directions(monkeypatch)
    arguments = {"l2_norm_clip": 0.3, **NOISE, **CORRECTED, **arguments}
    layers = [keras.layers.Dense(400), keras.layers.Dense(CLASSES)]
    model = keras.Sequential([keras.Input((FEATURES,)), *layers])
    optimizer = make_optimizer(dice_tf.DiceAdamOptimizer, self_check=False, **arguments)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(optimizer, loss, run_eagerly=True)
    x, y = make_problem()
    # Examples of weight 0 have no gradient, so that the direction is noise alone.
    model.fit(x, y, sample_weight=np.zeros(len(x)), batch_size=BATCH, verbose=0)
    draws = np.concatenate([d.ravel() for d in directions])
    assert len(draws) == 5 * model.count_params() > 20_000
    # The standard error of a variance of n Gaussians is sqrt(2 / n) of it.
    assert np.mean(draws**2) == pytest.approx(
        model.optimizer._noise_variance(), rel=5 * np.sqrt(2 / len(draws))
    )


def test_the_default_floor_is_the_deviation_of_what_noise_adds():
    rng = np.random.default_rng(0)
    beta, second = 0.9, np.zeros(200_000)
    for t in range(1, 31):
        second = beta * second + (1 - beta) * rng.standard_normal(len(second)) ** 2
        if t in (1, 2, 5, 30):
            seen = np.std(second / (1 - beta**t))
            stated = float(bias_corrected_adam._relative_deviation(beta, np.float32(beta**t)))
            assert stated == pytest.approx(seen, rel=0.02)


@pytest.mark.parametrize("signal", [2.0, 0.5])
def test_signal_below_the_noise_is_normalised_as_if_there_were_no_noise(signal):
    """Adam divides a constant gradient by its length; under noise DP-Adam does not."""
    sizes = {}
    for corrected in (True, False):
        optimizer = dice_tf.DiceAdamOptimizer(
            1.0, beta_1=0.0, beta_2=0.998, l2_norm_clip=1.0, noise_multiplier=1.0,
            expected_batch_size=1, correct_noise_bias=corrected,
        )  # fmt: skip
        variable = keras.Variable(np.zeros(2000, "float32"))
        optimizer.build([variable])
        rng = np.random.default_rng(1)

        @tf.function
        def update(direction):
            optimizer.update_step(direction, variable, 1.0)
            optimizer.iterations.assign_add(1)

        for step in range(1500):
            if step == 1300:
                before = variable.numpy()
            update(tf.constant(signal + rng.standard_normal(2000), tf.float32))
        sizes[corrected] = np.mean(before - variable.numpy()) / 200
    assert sizes[True] == pytest.approx(1.0, rel=0.05)
    assert sizes[False] == pytest.approx(signal / np.hypot(signal, 1), rel=0.05)


@pytest.mark.parametrize("floor", [None, 10.0])
def test_without_noise_it_is_plain_adam(floor):
    x, y = make_problem()
    ends = []
    for arguments in ({}, {"correct_noise_bias": True, "noise_bias_floor": floor}):
        optimizer = make_optimizer(dice_tf.DiceAdamOptimizer, l2_norm_clip=0.5, **arguments)
        model = make_model(optimizer)
        model.fit(x, y, batch_size=BATCH, shuffle=False, epochs=2, verbose=0)
        ends.append(model.get_weights())
    for one, other in zip(*ends, strict=True):
        np.testing.assert_array_equal(one, other)


def trained(**compiling):
    arguments = {"l2_norm_clip": 0.5, **NOISE, **CORRECTED}
    model = make_model(make_optimizer(dice_tf.DiceAdamOptimizer, **arguments), **compiling)
    x, y = make_problem()
    model.fit(x, y, batch_size=BATCH, shuffle=False, epochs=2, verbose=0)
    return model


def test_compiled_with_xla_and_in_files(tmp_path):
    model = trained(jit_compile=False)
    for one, other in zip(
        model.get_weights(), trained(jit_compile=True).get_weights(), strict=True
    ):
        np.testing.assert_allclose(one, other, atol=1e-4)
    model.save(tmp_path / "model.keras")
    loaded = keras.models.load_model(tmp_path / "model.keras").optimizer
    assert loaded.correct_noise_bias and loaded.noise_bias_floor is None
    assert int(loaded.iterations) == 10
    given = dict(CORRECTED, noise_bias_floor=1e-4, l2_norm_clip=0.5, **NOISE)
    config = make_optimizer(dice_tf.DiceAdamOptimizer, **given).get_config()
    assert config["correct_noise_bias"] is True and config["noise_bias_floor"] == 1e-4
    again = dice_tf.DiceAdamOptimizer.from_config(config)
    assert again.get_config() == config
    # Files of before have neither.
    del config["correct_noise_bias"], config["noise_bias_floor"]
    assert dice_tf.DiceAdamOptimizer.from_config(config).correct_noise_bias is False


def test_bfloat16_layers_keep_float32_moments():
    keras.config.set_dtype_policy("mixed_bfloat16")
    try:
        rounded = trained()
    finally:
        keras.config.set_dtype_policy("float32")
    assert {v.dtype for v in rounded.optimizer._velocities} == {"float32"}
    for one, other in zip(rounded.get_weights(), trained().get_weights(), strict=True):
        np.testing.assert_allclose(one, other, atol=0.05)


def test_epsilon_is_that_without_the_correction():
    mechanisms = [
        make_optimizer(
            dice_tf.DiceAdamOptimizer, noise_multiplier=2.0, correct_noise_bias=corrected
        ).mechanism
        for corrected in (True, False)
    ]
    assert mechanisms[0] == mechanisms[1]
    sampling = dice_tf.CyclicPoissonSampling(1000, BATCH)
    one, other = (accounting.compute_epsilon(m, sampling, 100, 1e-4) for m in mechanisms)
    assert one == other


def test_every_class_with_the_rule_of_adam_has_it():
    for name in ("Adam", "AdamW"):
        made = dice_tf.make_dice_optimizer_class(getattr(keras.optimizers, name))
        assert make_optimizer(made, **NOISE, correct_noise_bias=True).correct_noise_bias
    lion = dice_tf.make_dice_optimizer_class(keras.optimizers.Lion)
    for made in (dice_tf.DiceSGDOptimizer, lion):
        with pytest.raises((TypeError, ValueError), match="correct_noise_bias"):
            make_optimizer(made, **NOISE, correct_noise_bias=True)


@pytest.mark.parametrize("floor", [0.0, -1.0, float("nan"), "small"])
def test_floors_are_checked(floor):
    with pytest.raises(OptimizerArgumentError, match="noise_bias_floor"):
        make_optimizer(dice_tf.DiceAdamOptimizer, **NOISE, **CORRECTED, noise_bias_floor=floor)


def test_contradictions_are_refused():
    with pytest.raises(OptimizerArgumentError, match="with correct_noise_bias=False"):
        make_optimizer(dice_tf.DiceAdamOptimizer, **NOISE, noise_bias_floor=1e-3)
    with pytest.raises(OptimizerArgumentError, match="AMSGrad"):
        make_optimizer(dice_tf.DiceAdamOptimizer, **NOISE, **CORRECTED, amsgrad=True)


TWO_DEVICES = """
import sys
import numpy as np, tensorflow as tf
cpu = tf.config.list_physical_devices("CPU")[0]
tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * 2)
sys.path.insert(0, sys.argv[1])
from bias_corrected_adam_test import trained
two = tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"])
with two.scope():
    shared = trained().get_weights()
for one, other in zip(shared, trained(jit_compile=False).get_weights(), strict=True):
    np.testing.assert_allclose(one, other, atol=1e-4)
print("equal")
"""


def test_two_replicas_train_as_one():
    tests = pathlib.Path(__file__).parent
    path = os.pathsep.join([str(tests.parent), os.environ.get("PYTHONPATH", "")])
    process = subprocess.run(
        [sys.executable, "-c", TWO_DEVICES, str(tests)],
        env={**os.environ, "PYTHONPATH": path, "CUDA_VISIBLE_DEVICES": "-1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert process.stdout.endswith("equal\n"), process.stderr[-3000:]


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__]))
