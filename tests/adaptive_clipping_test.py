# Copyright 2026 The dice_tf Authors.
# SPDX-License-Identifier: Apache-2.0
"""Thresholds that move: the steps of NumPy, the noise of every threshold, two replicas, files."""

import os
import pathlib
import subprocess
import sys

import keras
import numpy as np
import pytest
from scipy import stats
import tensorflow as tf

sys.path.insert(0, str(pathlib.Path(__file__).parent))

import moving_thresholds
import numpy_oracle
from per_layer_model import HIDDEN, SIZE, SPLIT, make_model
from softmax_regression import BATCH, CLASSES, STEPS, flat, make_optimizer, make_problem

import dice_tf
from dice_tf import AdaptiveClipping, DiceMechanism, PiecewiseSchedule
from dice_tf.engine.units import present_units
from dice_tf.errors import (
    MechanismError,
)
from dice_tf.mechanism import adaptive, noise
from dice_tf.mechanism.clipping import VariableGroups

sys.path.insert(0, str(pathlib.Path(__file__).parent))

pytestmark = pytest.mark.filterwarnings("ignore:self_check=False", "ignore:`fit` took")
FLAT, LAYERS = [slice(0, SIZE)], [slice(0, SPLIT), slice(SPLIT, SIZE)]
RULE = dict(target_quantile=0.3, learning_rate=0.5, count_noise_multiplier=1.5)
SCHEDULE = PiecewiseSchedule([2, 5, 7], [1.0, 0.5, 2.0, 0.7], [1.0, 0.3, 1.2, 0.6])


class Thresholds(keras.callbacks.Callback):
    """Writes down the thresholds after each step."""

    def __init__(self):
        super().__init__()
        self.found = []

    def on_train_batch_end(self, batch, logs=None):
        self.found.append(list(dice_tf.clip_thresholds(self.model).values()))


@pytest.mark.parametrize(
    "parts, arguments",
    [
        (FLAT, dict(clipping=AdaptiveClipping(**RULE), feedback_steps=2)),
        (LAYERS, dict(clipping=AdaptiveClipping(per_layer=True, **RULE), feedback_steps=3,
                      chunk_size=3, rescale_to_unit_norm=True)),
        (LAYERS, dict(clipping=AdaptiveClipping(per_layer=True, **RULE), error_norm_clip=0.0,
                      gradient_engine="vectorized", schedule=PiecewiseSchedule([4], [1.0, 3.0]))),
        (FLAT, dict(schedule=SCHEDULE, feedback_steps=3)),
        (LAYERS, dict(schedule=SCHEDULE, clipping="per_layer", error_norm_clip=0.3)),
    ],
    ids=["flat", "per_layer", "dp_sgd_and_noise", "schedule", "schedule_per_layer"],
)  # fmt: skip
def test_equals_numpy_transcription(parts, arguments, monkeypatch):
    monkeypatch.setattr(noise, "gaussian_noise", moving_thresholds.fake_noise)
    x, y = make_problem(1.0)
    weights = np.ones(len(x), np.float32)
    # Units that are not there, units whose gradient is 0, and broken ones.
    weights[1::7] = 0.0
    x[4], weights[9] = np.nan, np.inf
    model = make_model(make_optimizer(l2_norm_clip=0.4, noise_multiplier=0.3, **arguments))
    start, shapes = flat(model.trainable_variables), [v.shape for v in model.trainable_variables]

    def gradients(parameters, rows):
        rows = rows[weights[rows] != 0]
        return numpy_oracle.two_layer_gradients(
            parameters, x[rows].astype(np.float64), y[rows], weights[rows], HIDDEN, CLASSES
        )

    clip = arguments.get("clipping")
    adaptive_rule = (RULE["target_quantile"], RULE["learning_rate"], 1.5)
    schedule = arguments.get("schedule")
    piece = lambda step: sum(step >= b for b in schedule.boundaries)
    with np.errstate(invalid="ignore"):
        expected, history = moving_thresholds.train(
            gradients,
            start,
            list(np.arange(len(x)).reshape(-1, BATCH)) * 2,
            parts=parts,
            shapes=shapes,
            c1=0.4,
            ratio=arguments.get("error_norm_clip", 0.4) / 0.4,
            z=0.3,
            divisor=BATCH,
            learning_rate=0.5,
            feedback_steps=arguments.get("feedback_steps", 1),
            adaptive=adaptive_rule if isinstance(clip, AdaptiveClipping) else None,
            noise_factors=None if schedule is None else lambda t: schedule.noise_factors[piece(t)],
            clip_factors=None if schedule is None else lambda t: schedule.clip_factors[piece(t)],
            rescale=arguments.get("rescale_to_unit_norm", False),
        )
    seen = Thresholds()
    logs = model.fit(
        x, y, sample_weight=weights, batch_size=BATCH, shuffle=False, epochs=2, verbose=0,
        callbacks=[seen],
    )  # fmt: skip
    assert np.ptp(history) > 0.1 and (np.diff(history, axis=0) > 0).any()
    np.testing.assert_allclose(seen.found, history[1:], rtol=1e-5)
    np.testing.assert_allclose(flat(model.trainable_variables), expected, rtol=2e-5, atol=5e-6)
    total = np.linalg.norm(history, axis=1)[[STEPS, 2 * STEPS]]
    np.testing.assert_allclose(logs.history["l2_norm_clip"], total, rtol=1e-5)


def test_only_present_finite_gradients_count_and_each_by_half():
    run = DiceMechanism(
        clipping="adaptive", l2_norm_clip=1.0, noise_multiplier=1.0, expected_batch_size=8
    )
    two = VariableGroups((0, 1), (0.6, 0.8))
    norms = np.array([[0.1, 2.0], [0.0, 0.5], [np.inf, 0.1], [np.nan, 0.1], [3.0, 3.0], [9.0, 9.0]])
    present = tf.constant([1.0, 1, 1, 1, 1])  # The last row was added by a chunk.
    both = adaptive.unclipped_counts(tf.constant(norms, tf.float32), present, run, two, tf.ones(2))
    assert both.numpy().tolist() == [0.5 - 0.5, -0.5 + 0.5 - 0.5]
    absent = tf.constant([1.0, 1, 1, 1, 0])
    without = adaptive.unclipped_counts(
        tf.constant(norms, tf.float32), absent, run, two, tf.ones(2)
    )
    assert (both - without).numpy().tolist() == [-0.5, -0.5]
    one = adaptive.unclipped_counts(
        tf.constant([0.0, 1.0, 3.0, 2.0]), tf.ones(4), run, None, tf.constant([2.0])
    )
    assert one.numpy().tolist() == [0.5 - 0.5 + 0.5]


def test_units_of_padding_are_those_without_a_weight_in_any_row():
    weights = tf.constant([0.0, 1.0, 0.0, -0.0, 0.0, 0.0, 2.0])
    assert present_units(weights, 7, 2).numpy().tolist() == [1, 0, 0, 1]


def test_noise_follows_the_thresholds_and_counts_have_their_own():
    """Batches of padding alone: releases are noise, and counts are too."""
    rule = AdaptiveClipping(per_layer=True, count_noise_multiplier=3.0, learning_rate=0.3)
    schedule = PiecewiseSchedule([200], [1.0, 0.25])
    model = make_model(make_optimizer(
        learning_rate=1.0, l2_norm_clip=5.0, noise_multiplier=2.0, clipping=rule,
        schedule=schedule, noise_seed=3, self_check=False, feedback_steps=2))  # fmt: skip
    x, y = make_problem(1.0)
    batch = x[:BATCH], y[:BATCH], np.zeros(BATCH, np.float32)
    step = tf.function(lambda *data: dice_tf.private_train_step(model, data), autograph=False)
    gradients, counts, moved = [], [], []
    names = model.optimizer, [v.name for v in model.trainable_variables]
    before, old = flat(model.trainable_variables), np.full(2, 5 / 2**0.5)
    for number in range(500):
        step(*batch)
        new = np.array(list(dice_tf.clip_thresholds(model).values()))
        after = flat(model.trainable_variables)
        total = np.linalg.norm(old) * (1.0 if number < 200 else 0.25)
        gradients.append((before - after) * BATCH / (2.0 * total))
        counts.append(-np.log(new / old) * BATCH / 0.3)
        moved.append(total)
        before, old = after, new
    assert len(names[1]) == 4 and max(moved) > 5 * min(moved)
    deviation = 3.0 * 2**0.5 / 2
    for values, scale in ((np.concatenate(gradients[:60]), 1.0), (np.ravel(counts), deviation)):
        assert stats.kstest(values / scale, "norm").pvalue > 1e-3
        for wrong in (2 / 3, 3 / 2):
            assert stats.kstest(values / scale / wrong, "norm").pvalue < 1e-6
    late = np.concatenate(gradients[-60:])
    assert stats.kstest(late, "norm").pvalue > 1e-3
    # The noise of the counts is no part of the noise on the weights, nor of each other's.
    pairs = [np.array(counts)[:, 0], np.array(counts)[:, 1], np.array(gradients)[:, 0]]
    assert np.abs(np.corrcoef(pairs) - np.eye(3)).max() < 0.2


def test_thresholds_stay_where_float32_tells_them_from_0():
    run = DiceMechanism(
        l2_norm_clip=1e-6, error_norm_clip=1e-7, noise_multiplier=1.0, expected_batch_size=1,
        clipping=AdaptiveClipping(learning_rate=1e6),
    )  # fmt: skip
    low = adaptive.next_factors(tf.ones([1]), tf.constant([1e3]), run, None)
    high = adaptive.next_factors(tf.ones([1]), tf.constant([-1e3]), run, None)
    assert 1e-12 <= float(low[0]) * 1e-7 < 1.01e-12 and float(high[0]) * 1e-6 == pytest.approx(1e12)
    with pytest.raises(MechanismError, match="threshold of a group of variables"):
        dice_tf.mechanism.clipping.thresholds(
            DiceMechanism(l2_norm_clip=1e-9, noise_multiplier=1.0, expected_batch_size=1,
                          clipping="per_layer", schedule=PiecewiseSchedule([1], None, [1, 1e-3])),
            VariableGroups((0, 1), (0.1, 0.99**0.5)),
        )  # fmt: skip


def trained(**compile_arguments):
    """Weights, errors and thresholds after three epochs of a run whose thresholds move."""
    rule = AdaptiveClipping(per_layer=True, learning_rate=1.0, count_noise_multiplier=1.0)
    model = make_model(make_optimizer(
        clipping=rule, l2_norm_clip=0.4, noise_multiplier=0.5, noise_seed=5,
        schedule=PiecewiseSchedule([4], [1.0, 2.0])))  # fmt: skip
    x, y = make_problem(1.0)
    model.fit(x, y, batch_size=BATCH, shuffle=False, epochs=3, verbose=0)
    found = list(dice_tf.clip_thresholds(model).values())
    return [*model.get_weights(), *(e.numpy() for e in model.optimizer.errors), np.array(found)]


TWO_DEVICES = """
import sys
import numpy as np, tensorflow as tf
cpu = tf.config.list_physical_devices("CPU")[0]
tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * 2)
sys.path.insert(0, sys.argv[1])
from adaptive_clipping_test import trained
with tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"]).scope():
    shared = trained()
alone = trained()
assert np.ptp(alone[-1]) > 1e-3
for one, other in zip(shared, alone, strict=True):
    np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6)
print("equal")
"""


def test_two_replicas_move_thresholds_as_one():
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
