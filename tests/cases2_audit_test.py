# Copyright 2026 The dice_tf Authors.
# SPDX-License-Identifier: Apache-2.0
"""Honest mistakes across modules: draws used twice, seeds used twice, rows in another order.

Each of them gave an epsilon below the truth, or no sign that there is none.
"""

import dataclasses
import re
import warnings

import keras
import numpy as np
import pytest
import tensorflow as tf

import dice_tf
from dice_tf import accounting
from dice_tf.errors import AccountingError, SamplingError

# Not those of other tests: a process counts what it drew by these numbers.
N, B, DELTA = 84, 7, 1e-3
RANDOM = np.random.default_rng(0)
X = RANDOM.normal(size=(N, 3)).astype("float32")
Y = RANDOM.normal(size=(N, 1)).astype("float32")

pytestmark = [
    pytest.mark.filterwarnings("ignore::dice_tf.errors.UnaccountedStepsWarning"),
    pytest.mark.filterwarnings("ignore:This file holds the error"),
]


def make(**extra):
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
    optimizer = dice_tf.DiceSGDOptimizer(
        0.1, l2_norm_clip=1.0, noise_multiplier=5.0, expected_batch_size=B, **extra
    )
    model.compile(optimizer, "mse", jit_compile=False)
    return model


def take_steps(model, batches):
    for batch in batches:
        dice_tf.private_train_step(model, batch)


def fit(model, sampling, **arguments):
    return model.fit(sampling.dataset(X, Y), verbose=0, **arguments)


def planned(model, sampling, steps):
    return accounting.compute_epsilon(model.optimizer.mechanism, sampling, steps, DELTA)


# --- Draws that a loop uses twice ---------------------------------------------------------


@pytest.mark.parametrize("kept", [list, lambda data: data.cache()], ids=["list", "cache"])
@pytest.mark.parametrize("after_a_fit", [False, True])
def test_batches_that_a_loop_kept_are_no_fresh_draws(kept, after_a_fit):
    sampling, model = dice_tf.PoissonSampling(N, B), make()
    if after_a_fit:
        fit(model, sampling)
    batches = kept(sampling.dataset(X, Y))
    for _ in range(6):
        take_steps(model, batches)
    with pytest.raises(SamplingError, match="72 steps were taken outside the data of `fit`"):
        dice_tf.run_epsilon(model, sampling, DELTA)
    with pytest.raises(SamplingError, match="used again"):
        fit(model, sampling, callbacks=[dice_tf.EpsilonCallback(sampling, DELTA)])


def test_one_batch_trained_on_again_and_again_is_no_fresh_draw():
    model, sampling = make(), dice_tf.PoissonSampling(N - 1, B)  # Drawn from here alone.
    data = sampling.dataset(X[1:], Y[1:])
    model.fit(data, verbose=0)
    x, y, weights = next(iter(data))
    for _ in range(20):
        model.train_on_batch(x, y, weights)
    with pytest.raises(SamplingError, match="used again"):
        dice_tf.run_epsilon(model, sampling, DELTA)


def test_a_callback_that_trains_on_a_kept_batch_takes_no_fresh_draw():
    model, sampling = make(), dice_tf.PoissonSampling(N - 2, B)  # Drawn from here alone.
    data = sampling.dataset(X[2:], Y[2:])
    x, y, weights = next(iter(data))
    again = keras.callbacks.LambdaCallback(
        on_epoch_end=lambda *_: [model.train_on_batch(x, y, weights) for _ in range(20)]
    )
    model.fit(data, verbose=0, callbacks=[again])
    assert int(model.optimizer.iterations) == sampling.steps_per_epoch + 20
    with pytest.raises(SamplingError, match="used again"):
        dice_tf.run_epsilon(model, sampling, DELTA)


def test_fresh_draws_in_loops_and_fits_in_any_order_are_accounted(tmp_path):
    """Objects of equal parameters, loaded models, validation draws: nothing rightful is refused."""
    first, second = (dice_tf.PoissonSampling(N, B) for _ in range(2))
    model = make()
    take_steps(model, first.dataset(X, Y))
    fit(model, second, validation_data=second.dataset(X, Y))
    take_steps(model, first.dataset(X, Y).repeat(2))
    equal = dice_tf.PoissonSampling(N, B)
    assert dice_tf.run_epsilon(model, equal, DELTA) == planned(model, equal, 48)
    model.save(tmp_path / "model.keras")
    loaded = keras.models.load_model(tmp_path / "model.keras")
    take_steps(loaded, first.dataset(X, Y))
    assert dice_tf.run_epsilon(loaded, first, DELTA) == planned(model, equal, 60)


def test_a_cyclic_sampler_for_each_epoch_of_a_loop_is_refused():
    model = make()
    for _ in range(3):
        sampling = dice_tf.CyclicPoissonSampling(N, B)
        take_steps(model, sampling.dataset(X, Y))
    with pytest.raises(SamplingError, match="36 steps of a loop by this object"):
        dice_tf.run_epsilon(model, sampling, DELTA)
    # The remedy: one object, made before the loop.
    model, sampling = make(), dice_tf.CyclicPoissonSampling(N, B)
    for _ in range(3):
        take_steps(model, sampling.dataset(X, Y))
    assert dice_tf.run_epsilon(model, sampling, DELTA) == planned(model, sampling, 36)
    # `fit` begins anew where groups are others; a loop that goes on after it does not.
    other = dice_tf.CyclicPoissonSampling(N, B)
    fit(model, other)
    assert dice_tf.run_epsilon(model, other, DELTA) == planned(model, sampling, 48)
    take_steps(model, other.dataset(X, Y))
    assert dice_tf.run_epsilon(model, other, DELTA) == planned(model, sampling, 60)
    take_steps(model, sampling.dataset(X, Y))
    with pytest.raises(SamplingError, match="other groups"):
        dice_tf.run_epsilon(model, sampling, DELTA)


# --- Seeds --------------------------------------------------------------------------------


def test_a_second_object_with_the_seed_of_the_first_is_refused():
    """A cell of a notebook, run twice."""
    model, sampling = make(), dice_tf.PoissonSampling(N, B, seed=1)
    fit(model, sampling)
    with pytest.raises(SamplingError, match="another object with this seed"):
        fit(model, dice_tf.PoissonSampling(N, B, seed=1))
    assert int(model.optimizer.iterations) == 12
    # The remedies: that object, another seed, none.
    for further in (
        sampling,
        dice_tf.PoissonSampling(N, B, seed=2),
        dice_tf.PoissonSampling(N, B),
    ):
        fit(model, further)
    assert int(model.optimizer.iterations) == 48
    # Steps that were discarded do not count.
    model, untrained = make(), make()
    untrained.optimizer.build(untrained.trainable_variables)
    for _ in range(2):
        fit(model, dice_tf.PoissonSampling(N, B, seed=1))
        model.optimizer.load_own_variables(
            {str(i): v.numpy() for i, v in enumerate(untrained.optimizer.variables)}
        )


def test_a_seed_that_may_come_again_after_loading_is_warned_of(tmp_path):
    model = make()
    fit(model, dice_tf.PoissonSampling(N, B, seed=1))
    model.save(tmp_path / "model.keras")
    load = lambda: keras.models.load_model(tmp_path / "model.keras")
    with pytest.warns(UserWarning, match="begins with the first draws of its seed"):
        fit(load(), dice_tf.PoissonSampling(N, B, seed=1))
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*first draws of its seed")
        fit(load(), dice_tf.PoissonSampling(N, B))


def test_runs_with_the_same_draws_do_not_compose():
    mechanism = make().optimizer.mechanism
    run = lambda **seed: (mechanism, dice_tf.PoissonSampling(N, B, **seed), 12)
    larger = dataclasses.replace(mechanism, expected_batch_size=B + 1)
    other_size = larger, dice_tf.PoissonSampling(N, B + 1, seed=1), 12
    for runs in ([run(seed=1), run(seed=1)], [run(seed=1), other_size]):
        with pytest.raises(AccountingError, match="draw alike, from one seed"):
            accounting.compose_epsilon(runs, DELTA)
    expected = accounting.compose_epsilon([run(), run()], DELTA)
    one = run(seed=1)
    for runs in ([one, one], [one, run(seed=2)], [one, run()]):
        assert accounting.compose_epsilon(runs, DELTA) == expected


def test_two_runs_from_one_private_file_do_not_compose(tmp_path):
    model, runs = make(save_errors=True), []
    fit(model, dice_tf.PoissonSampling(N, B))
    model.save_weights(tmp_path / "private.weights.h5")
    for _ in range(2):
        resumed, sampling = make(save_errors=True), dice_tf.PoissonSampling(N, B)
        resumed.load_weights(tmp_path / "private.weights.h5")
        fit(resumed, sampling)
        runs.append(dice_tf.accounted_run(resumed, sampling))
    assert accounting.compose_epsilon(runs[:1], DELTA) == planned(model, sampling, 24)
    with pytest.raises(AccountingError, match="or one private file"):
        accounting.compose_epsilon(runs, DELTA)


# --- Rows in another order, behind a private file -----------------------------------------


class FirstErrors(keras.callbacks.Callback):
    """Notes whether there is an error to feed back when the first step of a `fit` begins."""

    async_safe = True

    def on_train_batch_begin(self, batch, logs=None):
        if batch == 0:
            errors = self.model.optimizer.errors
            self.there = any(np.abs(error.numpy()).max() > 0 for error in errors)


@pytest.mark.parametrize("as_tf_checkpoint", [False, True])
def test_nothing_is_fed_back_to_rows_that_changed_places_in_a_restart(tmp_path, as_tf_checkpoint):
    model, sampling = make(save_errors=True), dice_tf.CyclicPoissonSampling(N, B)
    fit(model, sampling)
    path = str(tmp_path / ("checkpoint" if as_tf_checkpoint else "private.weights.h5"))
    if as_tf_checkpoint:
        tf.train.Checkpoint(model=model, optimizer=model.optimizer).write(path)
    else:
        model.save_weights(path)
    for order, expected in [(np.arange(N), True), (np.arange(N)[::-1], False)]:
        resumed, again, first = make(save_errors=True), dice_tf.CyclicPoissonSampling(N, B), None
        if as_tf_checkpoint:
            resumed.optimizer.build(resumed.trainable_variables)
            tf.train.Checkpoint(model=resumed, optimizer=resumed.optimizer).read(path)
        else:
            resumed.load_weights(path)
        first = FirstErrors()
        resumed.fit(again.dataset(X[order], Y[order]), verbose=0, callbacks=[first])
        assert again.assignment == sampling.assignment and first.there is expected
        assert dice_tf.run_epsilon(resumed, again, DELTA) == planned(model, again, 24)


def test_a_list_that_was_shuffled_between_two_fits_on_one_data_set_is_seen():
    model, sampling, first = make(), dice_tf.CyclicPoissonSampling(N, B), FirstErrors()
    pairs = list(zip(X, Y))
    data = sampling.dataset(pairs)
    for change, expected in [(list, False), (list, True), (list.reverse, False)]:
        change(pairs)
        model.fit(data, verbose=0, callbacks=[first])
        assert first.there is expected


# --- Order of batches, plain steps, remedies ----------------------------------------------


def not_deterministic(data):
    options = tf.data.Options()
    options.deterministic = False
    return data.map(lambda *batch: batch, num_parallel_calls=2).with_options(options)


@pytest.mark.parametrize(
    "kind", [dice_tf.PoissonSampling, dice_tf.CyclicPoissonSampling], ids=lambda k: k.__name__
)
def test_batches_that_may_overtake_each_other_are_refused_before_the_first_step(kind):
    model, sampling = make(), kind(N, B)
    data = sampling.dataset(X, Y)
    parallel = dict(num_parallel_calls=tf.data.AUTOTUNE)
    for altered in (
        data.map(lambda *batch: batch, deterministic=False, **parallel),
        not_deterministic(data),
    ):
        with pytest.raises(SamplingError, match="Leave `deterministic=False` out"):
            model.fit(altered, verbose=0)
    assert int(model.optimizer.iterations) == 0
    in_order = data.map(lambda *batch: batch, **parallel).prefetch(tf.data.AUTOTUNE)
    model.fit(in_order, verbose=0, callbacks=[dice_tf.EpsilonCallback(sampling, DELTA)])
    assert dice_tf.run_epsilon(model, sampling, DELTA) == planned(model, sampling, 12)


def test_training_on_without_privacy_is_warned_of():
    model, sampling = make(), dice_tf.PoissonSampling(N, B)
    private = model.optimizer
    fit(model, sampling)
    model.compile("sgd", "mse")
    with pytest.warns(UserWarning, match="now trains without privacy, by SGD"):
        model.fit(X, Y, verbose=0)
    model.compile(private, "mse")
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*without privacy")
        fit(model, sampling)
        plain = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
        plain.compile("sgd", "mse")
        plain.fit(X, Y, verbose=0)


def test_a_callback_keeps_the_epsilon_of_the_optimizer_that_it_watched():
    """After `compile` with a new optimizer it showed the epsilon of that one."""
    model, sampling = make(), dice_tf.PoissonSampling(N, B)
    first, second = (dice_tf.EpsilonCallback(sampling, DELTA) for _ in range(2))
    fit(model, sampling, epochs=3, callbacks=[first])
    expected = planned(model, sampling, 36)
    model.compile(make().optimizer, "mse")
    fit(model, sampling, callbacks=[second])
    assert first.epsilon() == expected and first.accounted_steps() == 36
    assert "after 36 steps" in first.statement()
    assert second.epsilon() == planned(model, sampling, 12)
    # The same callback in both: it shows the last training, as before.
    fit(model, sampling, callbacks=[first])
    assert first.epsilon() == planned(model, sampling, 24)
    first.set_model(make())
    assert first.epsilon() == 0


def test_the_remedy_for_fewer_steps_in_an_epoch_works():
    model, sampling = make(), dice_tf.CyclicPoissonSampling(N, B)
    callback = dice_tf.EpsilonCallback(sampling, DELTA)
    with pytest.raises(SamplingError, match=r"use `repeat\(\)` and pass `steps_per_epoch`"):
        model.fit(sampling.dataset(X, Y).take(5), verbose=0, callbacks=[callback])
    data = sampling.dataset(X, Y).repeat()
    model.fit(data, steps_per_epoch=5, epochs=3, verbose=0, callbacks=[callback])
    assert callback.epsilon() == planned(model, sampling, 15)


def test_a_plan_with_a_ratio_feeds_back_however_few_the_steps():
    for sampling in (None, dice_tf.PoissonSampling(1000, 100)):
        sizes = {} if sampling else dict(num_examples=1000, batch_size=100)
        plan = dice_tf.PrivacyPlan(
            epochs=3, noise_multiplier=3.0, error_norm_clip_ratio=1.0, sampling=sampling, **sizes
        )
        assert plan.feedback_steps == 1 and "error_norm_clip_ratio is above 0" in str(plan)


@pytest.mark.parametrize("rows", [B, 2 * B])
def test_steps_outside_fit_have_a_remedy_that_works_or_none(rows):
    model = make()
    for _ in range(3):
        model.train_on_batch(X[:rows], Y[:rows])
    with pytest.raises(SamplingError, match="made outside `fit`") as error:
        dice_tf.run_epsilon(model, dice_tf.ShuffledEpochs(N, B), DELTA)
    remedy = re.search(r"`(ShuffledEpochs\(.*?\))`", str(error.value))
    if rows > B:
        assert remedy is None and "have no epsilon" in str(error.value)
    else:
        each_step = eval(remedy[1], vars(dice_tf))
        once = dice_tf.ShuffledEpochs(N, N)
        every = dice_tf.DiceMechanism(l2_norm_clip=1.0, noise_multiplier=5.0, expected_batch_size=N)
        expected = accounting.compute_epsilon(every, once, 3, DELTA)
        assert dice_tf.run_epsilon(model, each_step, DELTA) == expected


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__]))
