# Copyright 2026 The dice_tf Authors.
# SPDX-License-Identifier: Apache-2.0
"""Training on units of several rows: views of examples, rows of owners."""

from cut_runs import Cut
import keras
import numpy as np
from numpy_oracle import dice_sgd, sgd_rule, softmax_gradients
import pytest
from softmax_regression import CLASSES, FEATURES, flat, make_model, make_optimizer
import tensorflow as tf

import dice_tf
from dice_tf.engine import layerwise, vectorized
from dice_tf.engine.units import Units
from dice_tf.errors import AccountingError, GradientEngineError, MechanismError, SamplingError
from dice_tf.mechanism.clipping import clip_weights

RANDOM = np.random.default_rng(3)
IDS = RANDOM.permutation(np.concatenate([np.full(n, i) for i, n in enumerate([1, 2, 6] * 10)]))
N, ROWS, B, K, DELTA = 30, len(IDS), 5, 3, 1e-3
X = (RANDOM.normal(size=(ROWS, FEATURES)) * RANDOM.choice([0.1, 3.0], (ROWS, 1))).astype("float32")
Y = RANDOM.integers(0, CLASSES, ROWS)
WEIGHTS = RANDOM.choice([0.0, 0.5, 1.0, 2.0], ROWS).astype("float32")
pytestmark = pytest.mark.filterwarnings("ignore:This file holds the error")


def owners(groups=2, seed=None, **arguments):
    defaults = dict(expected_batch_size=B, rows_per_owner=K, num_groups=groups, seed=seed)
    return dice_tf.CyclicPoissonSampling.of_owners(IDS, **{**defaults, **arguments})


def trained(sampling, epochs=2, callbacks=(), views=1, **arguments):
    model = make_model(make_optimizer(**{"expected_batch_size": B, **arguments}))
    data = sampling.dataset(X, Y, WEIGHTS, views=views)
    model.fit(data, epochs=epochs, verbose=0, callbacks=list(callbacks))
    return model


@pytest.mark.parametrize("engine", ["layerwise", "vectorized"])
@pytest.mark.parametrize("feedback_steps, views", [(1, 2), (3, 1)])
def test_training_on_owners_is_dice_sgd_on_their_mean_gradients(engine, feedback_steps, views):
    groups, size = feedback_steps + 1, K * views
    arguments = dict(gradient_engine=engine, feedback_steps=feedback_steps, momentum=0.9)
    arguments.update(l2_norm_clip=0.8, error_norm_clip=0.6, rows_per_unit=size, chunk_size=4 * size)
    model = make_model(make_optimizer(**arguments, expected_batch_size=B))
    start = flat(model.trainable_variables)
    data = owners(groups, seed=1).dataset(X, Y, WEIGHTS, views=views)
    model.fit(data, epochs=2, verbose=0)

    def gradients(parameters, batch):
        x, y, weights = (part.numpy() for part in batch)
        rows = softmax_gradients(parameters, x.astype(float), y, weights, CLASSES)
        rows, live = rows.reshape(-1, size, rows.shape[1]), (weights != 0).reshape(-1, size)
        return rows.sum(1) / np.maximum(live.sum(1), 1)[:, None]

    batches = list(owners(groups, seed=1).dataset(X, Y, WEIGHTS, views=views).repeat(2))
    expected, errors = dice_sgd(
        gradients, start, batches, 0.8, 0.6, B, sgd_rule(0.5, 0.9), True, feedback_steps
    )
    np.testing.assert_allclose(flat(model.trainable_variables), expected, rtol=2e-5, atol=2e-5)
    np.testing.assert_allclose(flat(model.optimizer.errors), errors, rtol=2e-5, atol=2e-5)
    assert np.abs(errors).max() > 0.01


def test_views_that_are_alike_train_as_one_view_does():
    one, four = (
        trained(
            dice_tf.CyclicPoissonSampling(ROWS, B, seed=2), views=views, rows_per_unit=views
        )
        for views in (1, 4)
    )  # fmt: skip
    np.testing.assert_allclose(
        flat(four.weights + four.optimizer.errors), flat(one.weights + one.optimizer.errors),
        rtol=1e-5, atol=1e-6,
    )  # fmt: skip


@pytest.mark.parametrize("owned", [False, True])
def test_fit_refuses_units_that_are_not_those_of_the_data(owned):
    sampling = owners() if owned else dice_tf.CyclicPoissonSampling(ROWS, B)
    size = (K if owned else 1) * 2
    for wrong in (1, 2 * size, size + 1, 3):
        model = make_model(make_optimizer(noise_multiplier=1.0, rows_per_unit=wrong,
                                          expected_batch_size=B))  # fmt: skip
        with pytest.raises(SamplingError, match=f"{size} rows.*rows_per_unit={wrong} .*={size}"):
            model.fit(sampling.dataset(X, Y, views=2), verbose=0)
        assert int(model.optimizer.iterations) == 0
    for data in ((X, Y), (tf.data.Dataset.from_tensor_slices((X, Y)).batch(6),)):
        with pytest.raises(SamplingError, match="rows_per_unit=3 and data of no sampler"):
            model.fit(*data, verbose=0)
    means = make_model(make_optimizer(noise_multiplier=1.0, num_microbatches=1,
                                      expected_batch_size=B))  # fmt: skip
    with pytest.raises(SamplingError, match="without `num_microbatches`"):
        means.fit(sampling.dataset(X, Y, views=2), verbose=0)


@pytest.mark.parametrize(
    "name, views, wrong",
    [("cyclic", 3, 1), ("cyclic", 1, 2), ("poisson", 1, 2), ("poisson", 4, 2), ("cyclic", 2, 4)],
)
def test_loops_on_units_that_are_not_those_of_the_data_have_no_epsilon(name, views, wrong):
    samplings = {"cyclic": dice_tf.CyclicPoissonSampling, "poisson": dice_tf.PoissonSampling}
    for size, fails in ((wrong, True), (views, False)):
        sampling = samplings[name](ROWS, B)
        model = make_model(make_optimizer(noise_multiplier=1.0, rows_per_unit=size,
                                          expected_batch_size=B, self_check=False))  # fmt: skip
        data = sampling.dataset(X, Y, views=views)
        dice_tf.check_gradients(model, next(iter(data)))
        step = tf.function(
            lambda *batch, model=model: dice_tf.private_train_step(model, batch),
            input_signature=data.element_spec, autograph=False,
        )  # fmt: skip
        for batch in sampling.dataset(X, Y, views=views):
            if batch[0].shape[0] % size == 0:
                step(*batch)
        if not fails:
            assert dice_tf.run_epsilon(model, sampling, DELTA) > 0
            continue
        with pytest.raises(SamplingError, match="rows_per_unit"):
            dice_tf.run_epsilon(model, sampling, DELTA)


def test_steps_on_rows_that_nobody_drew_have_no_epsilon():
    model = make_model(make_optimizer(noise_multiplier=1.0, rows_per_unit=2, expected_batch_size=4))
    dice_tf.private_train_step(model, (tf.constant(X[:8]), tf.constant(Y[:8])))
    with pytest.raises(SamplingError, match="1 steps outside `fit`.*rows_per_unit=2"):
        dice_tf.run_epsilon(model, dice_tf.ShuffledEpochs(4, 4), DELTA)
    with pytest.raises(GradientEngineError, match="7 rows with rows_per_unit=2"):
        dice_tf.private_train_step(model, (tf.constant(X[:7]), tf.constant(Y[:7])))


def test_a_first_step_on_views_that_are_not_declared_is_refused():
    model = make_model(make_optimizer(noise_multiplier=1.0, expected_batch_size=B))
    batch = next(iter(dice_tf.PoissonSampling(ROWS, B).dataset(X, Y, views=2)))
    with pytest.raises(SamplingError, match="rows_per_unit"):
        dice_tf.private_train_step(model, batch)


def test_arguments_that_cut_units_in_two_are_refused():
    with pytest.raises(GradientEngineError, match="multiple of the 3 rows.*chunk_size=4"):
        make_optimizer(noise_multiplier=1.0, rows_per_unit=3, chunk_size=4)
    optimizer = make_optimizer(noise_multiplier=1.0, rows_per_unit=3, chunk_size=6)
    again = type(optimizer).from_config(optimizer.get_config())
    assert again.rows_per_unit == 3 and again.mechanism == optimizer.mechanism


@pytest.mark.parametrize("units", [dict(rows_per_unit=2), dict(num_microbatches=2)])
def test_a_layer_that_mixes_units_is_found(units):
    class SubtractsMean(keras.layers.Layer):
        def call(self, x):
            return x - keras.ops.mean(x, 0, keepdims=True)

    keras.utils.set_random_seed(0)
    model = keras.Sequential([keras.Input((FEATURES,)), SubtractsMean(), keras.layers.Dense(2)])
    model.compile(make_optimizer(noise_multiplier=1.0, expected_batch_size=4, **units), "mse")
    with pytest.raises(GradientEngineError, match="depend on the other"):
        dice_tf.check_gradients(model, (X[:8], RANDOM.normal(size=(8, 2)).astype("float32")))


def resumed(folder, sampling, cut):
    optimizer = make_optimizer(noise_multiplier=1.0, expected_batch_size=B, rows_per_unit=K,
                               save_errors=True)  # fmt: skip
    model = make_model(optimizer)
    optimizer.build(model.trainable_variables)
    budget = dice_tf.EpsilonCallback(sampling, DELTA)
    backup = keras.callbacks.BackupAndRestore(
        str(folder), double_checkpoint=True, delete_checkpoint=False
    )
    try:
        model.fit(sampling.dataset(X, Y), epochs=3, verbose=0, callbacks=[budget, backup, cut])
    except KeyboardInterrupt:
        pass
    return flat([*model.weights, *optimizer.variables, *optimizer.errors]), budget


def test_a_private_backup_of_owners_goes_on_bit_for_bit(tmp_path):
    copy = Cut(copy=(tmp_path / "run", tmp_path / "copy"))
    expected, budget = resumed(tmp_path / "run", owners(), copy)
    # As another process would: another object, which takes over draws and groups of the first.
    resumed(tmp_path / "copy", owners(), Cut(at=10))
    state, again = resumed(tmp_path / "copy", owners(), Cut())
    np.testing.assert_array_equal(state, expected)
    assert again.epsilon() == budget.epsilon() and again.accounted_steps() == 18


C1, C2 = 0.4, 0.3


@pytest.mark.parametrize("feedback_steps", [1, 3])
def test_all_rows_of_an_owner_move_a_window_of_releases_by_no_more_than_is_claimed(feedback_steps):
    """Runs with and without one owner, all draws alike, on rows that were made to hurt."""
    groups = feedback_steps + 1
    mechanism = dict(l2_norm_clip=C1, error_norm_clip=C2, feedback_steps=feedback_steps)
    claimed = dice_tf.DiceMechanism(
        **mechanism, noise_multiplier=1.0, expected_batch_size=B
    ).sensitivity(separate_entries=True)
    x, largest, met = X.copy(), 0.0, 0
    model = make_model(make_optimizer(learning_rate=1.0, rows_per_unit=K, expected_batch_size=B,
                                      self_check=False, **mechanism))  # fmt: skip
    start, begin = [v.numpy() for v in model.trainable_variables], flat(model.trainable_variables)
    dice_tf.check_gradients(model, (x[: 2 * K], Y[: 2 * K]))
    step = tf.function(lambda *batch: dice_tf.private_train_step(model, batch), autograph=False,
                       reduce_retracing=True)  # fmt: skip

    def releases(owner_is_there, owner):
        weights = np.where((IDS == owner) & (not owner_is_there), 0, 1)
        for error in model.optimizer.errors:
            error.assign(tf.zeros(error.shape))
        found = []
        for batch in owners(groups, seed=9).dataset(x, Y, weights).repeat(4):
            step(*batch)
            found.append(begin - flat(model.trainable_variables))
            for variable, value in zip(model.trainable_variables, start, strict=True):
                variable.assign(value)
        return B * np.array(found)

    for owner, size in ((2, 1.0), (5, 1e3), (8, 1e-1)):
        rows = IDS == owner
        x[rows] = RANDOM.normal(size=(rows.sum(), FEATURES)) * size
        moved = releases(True, owner) - releases(False, owner)
        entries = np.flatnonzero(np.abs(moved).max(1) > 1e-6)
        met += len(entries)
        for first in range(len(moved) - groups + 1):
            window = np.linalg.norm(moved[first : first + groups])
            if first in entries and not np.abs(moved[max(0, first - feedback_steps) : first]).any():
                largest = max(largest, window)
                assert window <= claimed * (1 + 1e-4)
    assert met > 5 and largest > 0.95 * claimed  # The claim is no larger than it must be.


@pytest.mark.parametrize("engine", [layerwise, vectorized])
def test_no_unit_moves_a_clipped_sum_by_more_than_c1_whatever_its_rows_are(engine):
    keras.utils.set_random_seed(0)
    layers = keras.layers
    model = keras.Sequential([keras.Input((6, 8)), layers.Dense(8, use_bias=False),
                              layers.GlobalAveragePooling1D(), layers.Dense(2)])  # fmt: skip
    model.compile(loss="mae")
    model._compile_loss.build(tf.zeros([2, 2]), tf.zeros([2, 2]))
    mechanism = dice_tf.DiceMechanism(l2_norm_clip=C1, error_norm_clip=0.0, noise_multiplier=1.0,
                                      expected_batch_size=2)  # fmt: skip
    run = tf.function(
        lambda x, y, w: (
            engine.weighted_gradient_sums(
                model, x, y, w, lambda n: clip_weights(n, mechanism), Units(4)
            ).head
        )
    )
    y = np.full((8, 2), 50, "float32")
    for trial in range(40):
        x = np.ones([8, 6, 8], "float32") * 1e-3
        # Rows of very different sizes, pairs that cancel, and single numbers that overflow.
        x[4:] = RANDOM.normal(size=(4, 6, 8)) * 10.0 ** RANDOM.uniform(-20, 12, (4, 1, 1))
        x[6] = -x[7] * (trial % 2) + x[6] * (1 - trial % 2)
        weight = np.r_[np.ones(4), 10.0 ** RANDOM.uniform(-10, 10, 4)].astype("float32")
        weight[4 + trial % 4] *= trial % 3 > 0
        sums = [
            np.concatenate([h.numpy().ravel().astype(float) for h in run(x, y, tf.constant(w))])
            for w in (weight, weight * (np.arange(8) < 4).astype("float32"))
        ]
        assert np.linalg.norm(sums[0] - sums[1]) <= C1 * (1 + 1e-3), trial


def test_a_plan_has_views_and_owners():
    plan = dice_tf.PrivacyPlan(
        sampling=owners(), epochs=2, target_epsilon=4.0, delta=DELTA, views=2
    )
    same = dice_tf.PrivacyPlan(
        num_examples=N, batch_size=B, epochs=2, target_epsilon=4.0, delta=DELTA, feedback_steps=1
    )
    assert plan.noise_multiplier == same.noise_multiplier
    text = str(plan)
    assert "30 owners" in text and "3 at most" in text and "views of each row   2" in text
    optimizer = dice_tf.DiceSGDOptimizer(1.0, l2_norm_clip=0.5, plan=plan)
    assert optimizer.rows_per_unit == 2 * K
    model = make_model(optimizer)
    augment = lambda x: x + tf.random.normal(tf.shape(x), stddev=0.1)
    model.fit(plan.dataset(X, Y, augment=augment), epochs=2, verbose=0, callbacks=[plan.callback()])
    assert "owner" in plan.statement(model)
    with pytest.raises(MechanismError, match="rows_per_unit=1 .plan: 6"):
        dice_tf.DiceSGDOptimizer(1.0, l2_norm_clip=0.5, plan=plan, rows_per_unit=1)
    with pytest.raises(SamplingError, match="views=0"):
        dice_tf.PrivacyPlan(sampling=owners(), epochs=2, target_epsilon=4.0, views=0)
    by_hand = make_optimizer(noise_multiplier=1.0, expected_batch_size=B)
    with pytest.raises(AccountingError, match="does not clip these as one"):
        dice_tf.run_epsilon(make_model(by_hand), owners(), DELTA)


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__]))
