# Copyright 2026 The dice_tf Authors.
# SPDX-License-Identifier: Apache-2.0
"""tf.distribute in one process: the number of replicas changes nothing."""

import json
import os
import pathlib
import subprocess
import sys

import numpy as np
from numpy_oracle import dice_sgd, sgd_rule, softmax_gradients
import pytest
from scipy import stats
from softmax_regression import BATCH, CLASSES
import tensorflow as tf

from dice_tf.checks import precision
from dice_tf.distribution import strategies
from dice_tf.errors import DistributionError, GradientEngineError
from dice_tf.training.optimizers import DiceSGDOptimizer

TESTS = pathlib.Path(__file__).parent
QUIET_ON_CPU = {"CUDA_VISIBLE_DEVICES": "-1", "TF_CPP_MIN_LOG_LEVEL": "2"}


@pytest.fixture(scope="module")
def seen():
    """What `replica_scenarios.py` saw, by scenario."""
    path = os.pathsep.join([str(TESTS.parent), os.environ.get("PYTHONPATH", "")])
    process = subprocess.run(
        [sys.executable, str(TESTS / "replica_scenarios.py")],
        env={**os.environ, "PYTHONPATH": path, **QUIET_ON_CPU},
        capture_output=True,
        text=True,
        check=False,
    )
    lines = [line for line in process.stdout.splitlines() if line.startswith("RESULT ")]
    assert lines, process.stderr[-3000:]
    results = json.loads(lines[-1].removeprefix("RESULT "))
    return {**results, "log": process.stderr[-3000:]}


def get(seen, scenario):
    assert "error" not in seen[scenario], (seen[scenario], seen["log"])
    return seen[scenario]


def oracle(seen, result, bounded, feedback_steps=1):
    x, y = np.array(seen["problem"]["x"]), np.array(seen["problem"]["y"])
    ones, batches = np.ones(BATCH), np.split(np.arange(len(x)), range(BATCH, len(x), BATCH))
    gradients = lambda parameters, rows: softmax_gradients(
        parameters, x[rows], y[rows], ones[: len(rows)], CLASSES
    )
    return dice_sgd(
        gradients,
        result["initial"],
        batches * 2,
        c1=0.5,
        c2=0.4,
        divisor=BATCH,
        update=sgd_rule(0.5, momentum=0.9),
        bounded=bounded,
        feedback_steps=feedback_steps,
    )


@pytest.mark.parametrize(
    "scenario",
    ["bounded 1", "bounded one_device", "bounded 2", "bounded 4", "unbounded 2", "unbounded 4"],
)
def test_replicas_take_the_steps_of_numpy(seen, scenario):
    result = get(seen, scenario)
    weights, errors = oracle(seen, result, scenario.startswith("bounded"))
    np.testing.assert_allclose(result["weights"], weights, atol=1e-6, rtol=1e-6)
    np.testing.assert_allclose(result["errors"], errors, atol=1e-6, rtol=1e-6)
    assert np.abs(errors).max() > 0.01
    assert result["iterations"] == result["compared_steps"] == 12
    assert result["differences"] == 0


def test_errors_of_several_steps_are_fed_back_on_replicas(seen):
    result = get(seen, "feedback_steps=2 2")
    weights, errors = oracle(seen, result, True, feedback_steps=2)
    np.testing.assert_allclose(result["weights"], weights, atol=1e-6, rtol=1e-6)
    np.testing.assert_allclose(result["errors"], np.ravel(errors), atol=1e-6, rtol=1e-6)
    assert result["differences"] == 0


@pytest.mark.parametrize("replicas", [2, 4])
def test_thresholds_per_layer_hold_on_replicas(seen, replicas):
    """One replica takes the steps of NumPy: see `per_layer_test`."""
    one, several = get(seen, "per_layer 1"), get(seen, f"per_layer {replicas}")
    for name in ("weights", "errors"):
        np.testing.assert_allclose(several[name], one[name], atol=1e-6, rtol=1e-6)
    assert np.abs(one["errors"]).max() > 0.001
    assert several["iterations"] == several["compared_steps"] == 12
    assert several["differences"] == 0


def test_loss_evaluate_and_predict_do_not_depend_on_replicas(seen):
    one, two = get(seen, "bounded 1"), get(seen, "bounded 2")
    for name in ("loss", "evaluated", "predicted"):
        np.testing.assert_allclose(two[name], one[name], atol=1e-5, rtol=1e-5)
    np.testing.assert_allclose(get(seen, "bounded 4")["loss"], one["loss"], rtol=1e-5)


@pytest.mark.parametrize("replicas", [2, 4])
def test_noise_has_the_same_law_on_any_number_of_replicas(seen, replicas):
    result = get(seen, f"noise {replicas}")
    stddev = 3.0 * 0.5 / 4
    p_value = lambda scale: (
        stats.kstest(result["updates"], stats.norm(scale=scale * stddev).cdf).pvalue
    )
    assert p_value(1) > 0.01
    # Also far from the scales of noise that was drawn by each replica, or divided among them.
    for wrong in (2 / 3, 3 / 2, replicas**0.5, replicas**-0.5):
        assert p_value(wrong) < 1e-6
    assert result["differences"] == 0


@pytest.mark.parametrize("replicas", [2, 4])
@pytest.mark.parametrize("kind", ["poisson", "cyclic", "allocation", "shuffled"])
def test_replicas_share_out_the_batches_that_one_device_draws(seen, kind, replicas):
    batches = get(seen, f"batches {kind} {replicas}")
    assert batches == seen[f"batches {kind} 1"]
    assert all(len(rows) == len(set(rows)) for rows, _ in batches)
    if kind in ("allocation", "shuffled"):
        rows_of_epoch = sorted(row for rows, _ in batches for row in rows)
        assert rows_of_epoch == list(range(len(seen["problem"]["y"])))
    groups = {"shuffled": [0, 0], "poisson": [1, 1], "cyclic": [1, 2], "allocation": [1, 2]}[kind]
    assert [marks for _, marks in batches][:2] == groups


@pytest.mark.parametrize(
    "first, others",
    [
        ("sampled 1 1", ("sampled mirrored_1 1", "sampled 2 1", "sampled 2 4")),
        ("allocated 1 1", ("allocated 2 1",)),
    ],
)
def test_a_sampled_noisy_run_is_the_same_on_replicas_and_with_several_steps_per_execution(
    seen, first, others
):
    one = get(seen, first)
    for scenario in others:
        two = get(seen, scenario)
        np.testing.assert_allclose(two["weights"], one["weights"], atol=1e-6, rtol=1e-6)
        assert two["iterations"] == one["iterations"] == two["draws"] == one["draws"]
        for name, values in one["history"].items():
            np.testing.assert_allclose(two["history"][name], values, rtol=1e-5, err_msg=name)


def test_a_loop_of_ones_own_takes_the_steps_of_fit(seen):
    weights = get(seen, "bounded 1")["weights"]
    np.testing.assert_allclose(get(seen, "loop")["weights"], weights, atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize(
    "scenario, error, message",
    [
        ("not ready", "DistributionError", "check_gradients"),
        ("same batch", "DistributionError", "each example would count 2 times"),
        ("outside", "DistributionError", "strategy.run"),
        ("train_on_batch", "DistributionError", "each example would count 2 times"),
        ("jit_compile", "DistributionError", "jit_compile=True"),
        ("microbatches", "MechanismError", "num_microbatches=4"),
        ("mixing examples", "GradientEngineError", "depend on the other examples"),
    ],
)
def test_what_would_not_be_private_on_replicas_is_refused(seen, scenario, error, message):
    assert seen[scenario].get("error") == error, (seen[scenario], seen["log"])
    assert message in seen[scenario]["message"]


@pytest.mark.parametrize(
    "strategy_class",
    [
        tf.distribute.ParameterServerStrategy,
        tf.distribute.TPUStrategy,
        tf.distribute.experimental.CentralStorageStrategy,
    ],
)
def test_strategies_that_break_the_mechanism_are_refused(monkeypatch, strategy_class):
    # Without its constructor, which would look for a cluster or a TPU.
    strategy = object.__new__(strategy_class)
    monkeypatch.setattr(tf.distribute, "get_strategy", lambda: strategy)
    monkeypatch.setattr(tf.distribute, "has_strategy", lambda: True)
    with pytest.raises(DistributionError, match=strategy_class.__name__):
        strategies.check_strategy()


def test_tensor_float_32_is_turned_off_where_there_is_a_gpu(monkeypatch):
    monkeypatch.setattr(tf.config, "get_visible_devices", lambda kind=None: ["GPU:0"])
    make = lambda: DiceSGDOptimizer(l2_norm_clip=1.0, noise_multiplier=1.0, expected_batch_size=4)
    switch = tf.config.experimental.enable_tensor_float_32_execution
    before = tf.config.experimental.tensor_float_32_execution_enabled()
    try:
        switch(True)
        with pytest.raises(GradientEngineError, match="TensorFloat-32"):
            precision.check_float32_products()
        with pytest.warns(UserWarning, match="TensorFloat-32"):
            make()
        assert not tf.config.experimental.tensor_float_32_execution_enabled()
        precision.check_float32_products()
    finally:
        switch(before)


def test_replicas_get_whole_units(seen):
    one, several = (get(seen, f"owners {name}") for name in ("1", "2"))
    for name in ("weights", "errors"):
        np.testing.assert_allclose(several[name], one[name], rtol=1e-5, atol=1e-6)
    assert np.abs(one["errors"]).max() > 0.01
    assert several["differences"] == 0 and several["epsilon"] == one["epsilon"]
    assert several["iterations"] == one["iterations"] == 4


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__]))
