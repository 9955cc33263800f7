# Copyright 2026 The dice_tf Authors.
# SPDX-License-Identifier: Apache-2.0
"""Thresholds that move: the steps of NumPy, the noise of every threshold, two replicas, files."""

import functools
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

from cut_runs import Cut
import moving_thresholds
import numpy_oracle
from per_layer_model import HIDDEN, SIZE, SPLIT, make_model
from softmax_regression import BATCH, CLASSES, STEPS, flat, make_optimizer, make_problem

import dice_tf
from dice_tf import AdaptiveClipping, DiceMechanism, PiecewiseSchedule
from dice_tf.engine.units import present_units
from dice_tf.errors import (
    AccountingError,
    BudgetExhaustedError,
    MechanismError,
    OptimizerArgumentError,
)
from dice_tf.mechanism import adaptive, noise
from dice_tf.mechanism.clipping import VariableGroups
from dice_tf.training import thresholds

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


def resumed(folder, cut):
    rule = AdaptiveClipping(per_layer=True, learning_rate=1.0)
    model = make_model(make_optimizer(
        clipping=rule, l2_norm_clip=0.4, noise_multiplier=1.0, save_errors=True,
        schedule=PiecewiseSchedule([10], [1.0, 2.0])))  # fmt: skip
    model.optimizer.build(model.trainable_variables)
    x, y = make_problem(1.0)
    sampling = dice_tf.CyclicPoissonSampling(len(x), BATCH, num_groups=2)
    budget = dice_tf.EpsilonCallback(sampling, 1e-3)
    backup = keras.callbacks.BackupAndRestore(
        str(folder), double_checkpoint=True, delete_checkpoint=False
    )
    try:
        model.fit(sampling.dataset(x, y), epochs=3, verbose=0, callbacks=[budget, backup, cut])
    except KeyboardInterrupt:
        pass
    optimizer = model.optimizer
    variables = [*optimizer.variables, *optimizer.errors, optimizer._private.error_factors]
    return flat([*model.weights, *variables]), budget


@pytest.mark.filterwarnings("ignore:This file holds the error")
def test_a_private_backup_of_moving_thresholds_goes_on_bit_for_bit(tmp_path):
    copy = Cut(copy=(tmp_path / "run", tmp_path / "copy"))
    expected, budget = resumed(tmp_path / "run", copy)
    resumed(tmp_path / "copy", Cut(at=8))
    state, again = resumed(tmp_path / "copy", Cut())
    np.testing.assert_array_equal(state, expected)
    assert again.epsilon() == budget.epsilon() and again.accounted_steps() == 12


def test_released_files_hold_thresholds_and_no_error(tmp_path):
    x, y = make_problem(1.0)
    rule = AdaptiveClipping(per_layer=True, learning_rate=1.0)
    model = make_model(make_optimizer(clipping=rule, noise_multiplier=0.5))
    model.fit(x, y, batch_size=BATCH, verbose=0)
    model.save(tmp_path / "model.keras")
    again = keras.models.load_model(tmp_path / "model.keras")
    assert again.optimizer.mechanism == model.optimizer.mechanism
    assert dice_tf.clip_thresholds(again) == dice_tf.clip_thresholds(model)
    assert np.ptp(list(dice_tf.clip_thresholds(again).values())) > 1e-3
    assert not np.any(flat(again.optimizer.errors)) and np.any(flat(model.optimizer.errors))
    # A layer that is frozen takes its threshold along; the others keep theirs.
    before = dice_tf.clip_thresholds(again)
    again.get_layer("hidden").trainable = False
    with pytest.warns(UserWarning):
        again.fit(x, y, batch_size=BATCH, epochs=1, steps_per_epoch=1, verbose=0)
    after = dice_tf.clip_thresholds(again)
    # All of C1 is that layer's now, times what it had learned.
    ratio = after["output"] / (before["output"] * 2**0.5)
    assert list(after) == ["output"] and 0.3 < ratio < 3.0
    # One that is thawed begins anew.
    again.get_layer("hidden").trainable = True
    thawed = dice_tf.clip_thresholds(again)
    assert thawed == pytest.approx({"hidden": 0.5**0.5, "output": after["output"] * 0.5**0.5})


def test_residuals_are_kept_below_thresholds_that_anybody_assigned():
    """Whoever sets them, as loading a file does, makes no residual too long for its noise."""
    model = make_model(make_optimizer(clipping="adaptive", l2_norm_clip=0.4, self_check=False))
    x, y = make_problem(5.0)
    dice_tf.private_train_step(model, (x[:BATCH], y[:BATCH]))
    optimizer = model.optimizer
    slots = list(range(4))
    stored = [tf.convert_to_tensor(e.value) for e in optimizer.errors]
    optimizer._threshold_factors.assign([1e-3])
    now = thresholds.current(optimizer, None, None)
    values = thresholds.rescaled(optimizer, stored, slots, now, None, slots)
    assert 0 < np.linalg.norm(flat(stored)) <= 0.4
    np.testing.assert_allclose(flat(values), 1e-3 * flat(stored), rtol=1e-6)
    assert np.all(np.abs(flat(values)) <= 1e-3 * np.abs(flat(stored)))
    # Larger thresholds leave them as they are.
    optimizer._threshold_factors.assign([7.0])
    now = thresholds.current(optimizer, None, None)
    values = thresholds.rescaled(optimizer, stored, slots, now, None, slots)
    np.testing.assert_array_equal(flat(values), flat(stored))


def test_a_layer_that_is_thawed_in_part_keeps_residuals_below_its_threshold():
    """Its variables have factors of their own in the state, and are clipped to one of them."""
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    rule = AdaptiveClipping(
        target_quantile=0.1, learning_rate=2.0, count_noise_multiplier=1e-3, per_layer=True
    )
    optimizer = dice_tf.DiceSGDOptimizer(
        learning_rate=0.0, l2_norm_clip=1.0, noise_multiplier=1e-6, expected_batch_size=4,
        clipping=rule, self_check=False)  # fmt: skip
    model.compile(optimizer, loss="mse", run_eagerly=True)
    layer, x = model.layers[0], tf.fill((4, 2), 1e-3)
    layer.kernel.assign(tf.zeros((2, 1)))
    layer.kernel.trainable = False
    for _ in range(3):
        dice_tf.private_train_step(model, (x, tf.fill((4, 1), 1e-9)))
    (learned,) = optimizer._threshold_factors.numpy()
    layer.kernel.trainable = True
    dice_tf.private_train_step(model, (x, tf.constant([[1e-9], [1e-9], [1e-9], [50.0]])))
    variables, groups = model.trainable_variables, optimizer.mechanism.clip.groups(model)
    now = thresholds.current(optimizer, groups, variables)
    slots = [optimizer._get_variable_index(v) for v in variables]
    stored = [tf.convert_to_tensor(e.value) for e in optimizer.errors]
    values = thresholds.rescaled(optimizer, stored, slots, now, groups, variables)
    assert learned < 0.01 and 0.1 < now.factors.numpy() < 0.5
    # One example's, so no longer than C2 of the step that releases it.
    assert 0.2 < 4 * np.linalg.norm(flat(stored))
    assert 4 * np.linalg.norm(flat(values)) <= float(now.factors[0])


def test_a_schedule_goes_on_where_epsilon_counts_after_a_cycle_that_was_cut_short():
    schedule = PiecewiseSchedule([5], [1.0, 0.5], [1.0, 0.25])
    model = make_model(make_optimizer(
        schedule=schedule, l2_norm_clip=0.4, noise_multiplier=1.0, feedback_steps=3))  # fmt: skip
    x, y = make_problem(5.0)
    sampling = dice_tf.CyclicPoissonSampling(len(x), BATCH, num_groups=4)
    data, budget = sampling.dataset(x, y), dice_tf.EpsilonCallback(sampling, 1e-3)
    at = lambda: list(dice_tf.clip_thresholds(model).values())
    model.fit(data, epochs=1, steps_per_epoch=3, verbose=0, callbacks=[budget])
    assert at() == pytest.approx([0.4]) and np.any(flat(model.optimizer.errors))
    seen = Thresholds()
    model.fit(data, epochs=2, steps_per_epoch=1, verbose=0, callbacks=[budget, seen])
    # Step 3 was counted, not made: the fourth that was made is step 4, and step 5 comes next.
    assert seen.found[0] == pytest.approx([0.1])
    record = dice_tf.ledger.provenance.read_record(model.optimizer)
    assert record["unfinished_steps"] >= 1
    run = model.optimizer.mechanism
    counted = budget.accounted_steps()
    cost = functools.partial(dice_tf.accounting.compute_epsilon, run, sampling, counted, 1e-3)
    assert budget.epsilon() == cost()
    # People with two examples have a budget of their own.
    two = dice_tf.EpsilonCallback(sampling, 1e-3, group_size=2)
    two.set_model(model)
    assert two.epsilon() == cost(group_size=2) > 1.5 * budget.epsilon()
    assert dice_tf.run_epsilon(model, sampling, 1e-3, group_size=2) == two.epsilon()
    assert "person with up to 2 examples" in " ".join(two.statement().split())
    small = dict(delta=1e-3, target_epsilon=0.9 * two.epsilon())
    with pytest.raises(BudgetExhaustedError):
        model.fit(data, verbose=0,
                  callbacks=[dice_tf.EpsilonCallback(sampling, group_size=2, **small)])  # fmt: skip
    with pytest.raises(AccountingError, match="group_size"):
        dice_tf.EpsilonCallback(sampling, 1e-3, group_size=0)


@pytest.mark.parametrize("schedule", [None, PiecewiseSchedule([5], [1.0, 0.5])])
def test_a_schedule_forgets_residuals_of_an_epoch_that_was_cut_short(schedule):
    """Later steps have noise of which the round of those residuals knows nothing."""
    x, y = make_problem(5.0)
    model = make_model(make_optimizer(schedule=schedule, l2_norm_clip=0.4, noise_multiplier=1.0))
    sampling, found = dice_tf.ShuffledEpochs(len(x), BATCH), []
    budget = dice_tf.EpsilonCallback(sampling, 1e-3)

    class Look(keras.callbacks.Callback):
        def on_train_batch_begin(self, batch, logs=None):
            found.append(np.any(flat(self.model.optimizer.errors)))

    with pytest.raises(KeyboardInterrupt):
        model.fit(x, y, batch_size=BATCH, verbose=0, callbacks=[budget, Cut(at=2)])
    assert np.any(flat(model.optimizer.errors))
    model.fit(x, y, batch_size=BATCH, verbose=0, callbacks=[budget, Look()])
    assert found[0] == (schedule is None) and all(found[1:])
    assert budget.accounted_steps() == 2 * sampling.steps_per_epoch


@pytest.mark.parametrize(
    "rule",
    [
        dict(target_quantile=0.0),
        dict(target_quantile=1.0),
        dict(target_quantile=float("nan")),
        dict(learning_rate=0.0),
        dict(learning_rate=-1.0),
        dict(count_noise_multiplier=0.0),
        dict(count_noise_multiplier=-2.0),
        dict(count_noise_multiplier="much"),
        dict(per_layer="yes"),
    ],
    ids=str,
)
def test_rules_out_of_range_are_refused(rule):
    with pytest.raises(MechanismError, match=next(iter(rule))):
        AdaptiveClipping(**rule)


@pytest.mark.parametrize(
    "schedule, what",
    [
        (dict(boundaries=[]), "boundaries"),
        (dict(boundaries=3), "boundaries"),
        (dict(boundaries=[5, 5]), "boundaries"),
        (dict(boundaries=[0]), "boundaries"),
        (dict(boundaries=[2.5]), "boundaries"),
        (dict(boundaries=[2], noise_factors=[1.0]), "noise_factors"),
        (dict(boundaries=[2], noise_factors=[1.0, 0.0]), "noise_factors"),
        (dict(boundaries=[2], clip_factors=[1.0, -1.0]), "clip_factors"),
    ],
    ids=str,
)
def test_schedules_out_of_range_are_refused(schedule, what):
    with pytest.raises(MechanismError, match=what):
        PiecewiseSchedule(**schedule)


SMALLER = PiecewiseSchedule([2], None, [1.0, 0.5])


@pytest.mark.parametrize(
    "arguments, message",
    [
        (dict(clipping="adaptive", bound_residuals=False), "needs bound_residuals=True"),
        (dict(schedule=SMALLER, bound_residuals=False), "needs bound_residuals=True"),
        (dict(schedule=SMALLER, clipping="adaptive"), "not for a schedule to set"),
        (dict(schedule=SMALLER, clipping="automatic", l2_norm_clip=1.0), "not for a schedule"),
        (dict(schedule="cosine"), "must be a `dice_tf.PiecewiseSchedule`"),
        (dict(schedule=PiecewiseSchedule([2], None, [1.0, 1e-12])), "too small"),
        (dict(schedule=PiecewiseSchedule([2], [1.0, 1e-30])), "too small"),
        (dict(clipping="adaptive", l2_norm_clip=0.0), "l2_norm_clip"),
    ],
    ids=str,
)
def test_contradictions_are_refused(arguments, message):
    given = dict(l2_norm_clip=0.5, noise_multiplier=0.9, expected_batch_size=8, **{})
    with pytest.raises(MechanismError, match=message):
        DiceMechanism(**{**given, **arguments})


def test_a_variance_that_changes_is_not_subtracted():
    arguments = dict(l2_norm_clip=0.5, noise_multiplier=1.0, expected_batch_size=8)
    corrected = dict(correct_noise_bias=True, **arguments)
    moving = [dict(clipping="adaptive"), dict(schedule=PiecewiseSchedule([3], [1.0, 2.0]),
                                              rescale_to_unit_norm=True)]  # fmt: skip
    for moves in moving:
        with pytest.raises(OptimizerArgumentError, match="no one variance"):
            dice_tf.DiceAdamOptimizer(**corrected, **moves)
    steady = dict(clipping="adaptive", rescale_to_unit_norm=True)
    assert dice_tf.DiceAdamOptimizer(**corrected, **steady)._noise_variance() == (1 / 8) ** 2


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__]))
