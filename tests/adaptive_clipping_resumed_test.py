# Copyright 2026 The dice_tf Authors.
# SPDX-License-Identifier: Apache-2.0
"""Moving thresholds that are saved, loaded, assigned, and cut short."""

import functools
import pathlib
import sys

import keras
import numpy as np
import pytest
import tensorflow as tf

sys.path.insert(0, str(pathlib.Path(__file__).parent))

from adaptive_clipping_test import Thresholds
from cut_runs import Cut
from per_layer_model import make_model
from softmax_regression import BATCH, flat, make_optimizer, make_problem

import dice_tf
from dice_tf import AdaptiveClipping, PiecewiseSchedule
from dice_tf.errors import (
    AccountingError,
    BudgetExhaustedError,
)
from dice_tf.training import thresholds

pytestmark = pytest.mark.filterwarnings("ignore:self_check=False", "ignore:`fit` took")


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


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__]))
