# Copyright 2026 The dice_tf Authors.
# SPDX-License-Identifier: Apache-2.0
"""`RandomAllocation`: what it draws, and that its epsilon is of the epochs that were begun."""

import math

import keras
import numpy as np
import pytest
from scipy import stats

import dice_tf
from dice_tf import accounting
from dice_tf.accounting import random_allocation
from dice_tf.errors import AccountingError, SamplingError

N, B, DELTA = 60, 6, 1e-3
RNG = np.random.default_rng(0)
X, Y = RNG.normal(size=(N, 3)).astype("float32"), RNG.normal(size=(N, 1)).astype("float32")


def drawn(sampling, rows, epochs=1):
    """Returns the step at which each row took part, for each epoch; each takes part once."""
    data = sampling.dataset(np.arange(rows), np.arange(rows), planned_epochs=epochs)
    steps = np.full((epochs, rows), -1)
    for epoch in range(epochs):
        for step, (x, y, weights) in enumerate(data):
            present = x.numpy()[weights.numpy() > 0]
            np.testing.assert_array_equal(x, y)
            assert (steps[epoch, present] == -1).all() and len(set(present)) == len(present)
            steps[epoch, present] = step
    assert (steps >= 0).all()
    return steps


@pytest.mark.parametrize("num_groups", [1, 2, 5])
def test_every_example_comes_once_in_every_epoch_in_a_turn_of_its_group(num_groups):
    sampling = dice_tf.RandomAllocation(1000, 20, num_groups, seed=1)
    steps = drawn(sampling, 1000, epochs=4)
    assert sampling.steps_per_epoch == 50 and sampling.cycles_per_epoch == 50 // num_groups
    assert (steps % num_groups == steps[0] % num_groups).all()
    sizes = np.array([np.bincount(epoch, minlength=50) for epoch in steps])
    assert abs(sizes.mean() - 20) < 1e-9 and 5 < sizes.min() and sizes.max() < 45


def test_cycles_are_uniform_and_drawn_anew_for_every_epoch():
    sampling = dice_tf.RandomAllocation(6000, 300, 2)
    cycles = drawn(sampling, 6000, epochs=2) // 2
    table = np.zeros((10, 10))
    np.add.at(table, tuple(cycles), 1)
    # Of pairs of cycles; a table of one and the same cycle, or of neighbours, is far off.
    assert stats.chisquare(table.ravel()).pvalue > 1e-4
    assert stats.chisquare(np.diag(np.diag(table)).ravel() + 1e-9, table.sum() / 100,
                           sum_check=False).pvalue < 1e-9  # fmt: skip


def test_a_seed_decides_the_draws_and_none_does_not():
    draws = lambda seed: drawn(dice_tf.RandomAllocation(500, 25, seed=seed), 500).tolist()
    assert draws(3) == draws(3) != draws(4)
    assert draws(None) != draws(None)


def make_model(**arguments):
    keras.utils.set_random_seed(0)
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
    arguments = dict(l2_norm_clip=1.0, noise_multiplier=2.0, expected_batch_size=B) | arguments
    model.compile(dice_tf.DiceSGDOptimizer(0.1, **arguments), "mse")
    return model


def expected_epsilon(model, sampling, epochs, accountant="rdp"):
    mechanism = model.optimizer.mechanism
    return accounting.compute_epsilon(
        mechanism, sampling, sampling.steps(epochs), DELTA, accountant
    )


@pytest.mark.parametrize("accountant", ["rdp", "pld"])
def test_fit_reports_the_epsilon_of_whole_epochs(accountant):
    sampling, model = dice_tf.RandomAllocation(N, B), make_model()
    callback = dice_tf.EpsilonCallback(sampling, DELTA, accountant=accountant)
    history = model.fit(sampling.dataset(X, Y), epochs=3, verbose=0, callbacks=[callback]).history[
        "epsilon"
    ]
    assert history == [expected_epsilon(model, sampling, k, accountant) for k in (1, 2, 3)]
    # By hand: five cycles, S = sqrt(2), noise 2.
    event = random_allocation.AllocatedRound(5, 2 / math.sqrt(2), 3)
    mechanism = model.optimizer.mechanism
    assert accounting.dp_event(mechanism, sampling, 30, accountant) == event.event
    poisson = accounting.compute_epsilon(
        mechanism, dice_tf.CyclicPoissonSampling(N, B), 30, DELTA, accountant
    )
    assert history[-1] < poisson
    assert "once per epoch, at one of 5 steps" in " ".join(callback.statement().split())


def test_a_budget_ends_training_before_the_epoch_that_exceeds_it():
    sampling, model = dice_tf.RandomAllocation(N, B), make_model()
    target = expected_epsilon(model, sampling, 2)
    callback = dice_tf.EpsilonCallback(sampling, DELTA, target_epsilon=target)
    model.fit(sampling.dataset(X, Y), epochs=5, verbose=0, callbacks=[callback])
    assert int(model.optimizer.iterations) == 20 and callback.epsilon() == target


class Cut(keras.callbacks.Callback):
    """Ends each epoch of `fit` after two steps, and lets the next one begin."""

    def on_train_batch_end(self, batch, logs=None):
        self.model.stop_training = batch == 1

    def on_epoch_end(self, epoch, logs=None):
        self.model.stop_training = False


@pytest.mark.parametrize("with_callback", [True, False])
def test_epochs_that_were_cut_count_whole(with_callback):
    sampling, model = dice_tf.RandomAllocation(N, B), make_model()
    callbacks = [dice_tf.EpsilonCallback(sampling, DELTA)] if with_callback else []
    model.fit(sampling.dataset(X, Y), epochs=3, verbose=0, callbacks=[*callbacks, Cut()])
    assert int(model.optimizer.iterations) == 6
    assert dice_tf.run_epsilon(model, sampling, DELTA) == expected_epsilon(model, sampling, 3)
    model.fit(sampling.dataset(X, Y), verbose=0, callbacks=callbacks)
    assert dice_tf.run_epsilon(model, sampling, DELTA) == expected_epsilon(model, sampling, 4)


def test_epochs_of_fit_that_are_not_those_of_the_sampler_are_refused():
    sampling = dice_tf.RandomAllocation(N, B)
    with pytest.raises(SamplingError, match="takes 4 steps per epoch"):
        make_model().fit(
            sampling.dataset(X, Y), steps_per_epoch=4, verbose=0,
            callbacks=[dice_tf.EpsilonCallback(sampling, DELTA)],
        )  # fmt: skip


def test_loops_which_may_cut_epochs_unseen_are_refused():
    sampling, model = dice_tf.RandomAllocation(N, B), make_model()
    for _ in range(3):
        for batch in sampling.dataset(X, Y).take(2):
            model.train_on_batch(*batch)
    with pytest.raises(SamplingError, match="6 of 6 steps were made outside `fit`"):
        dice_tf.run_epsilon(model, sampling, DELTA)
    # The remedy of the message.
    sampling, model = dice_tf.CyclicPoissonSampling(N, B), make_model()
    for _ in range(3):
        for batch in sampling.dataset(X, Y).take(2):
            model.train_on_batch(*batch)
    assert dice_tf.run_epsilon(model, sampling, DELTA) > 0


@pytest.mark.parametrize(
    "arguments, num_groups, message",
    [
        (dict(bound_residuals=False), 2, "bound_residuals=False"),
        (dict(num_microbatches=3), 2, "num_microbatches=3"),
        (dict(), 1, "num_groups=2 or more"),
        (dict(feedback_steps=3), 2, "num_groups=4 or more"),
    ],
)
def test_what_is_not_proven_is_refused_before_the_first_step(arguments, num_groups, message):
    sampling = dice_tf.RandomAllocation(N, B, num_groups)
    model = make_model(**arguments)
    with pytest.raises(AccountingError, match=message):
        model.fit(sampling.dataset(X, Y), verbose=0)
    with pytest.raises(AccountingError, match=message):
        accounting.compute_epsilon(model.optimizer.mechanism, sampling, 10, DELTA)


def test_dp_sgd_needs_no_groups_and_feedback_over_more_steps_more_of_them():
    assert accounting.compute_epsilon(
        make_model(error_norm_clip=0.0).optimizer.mechanism,
        dice_tf.RandomAllocation(N, B, 1), 10, DELTA,
    ) > 0  # fmt: skip
    mechanism = make_model(feedback_steps=3).optimizer.mechanism
    event = accounting.dp_event(mechanism, dice_tf.RandomAllocation(N, B, 4), 12)
    assert event.event.noise_multiplier == pytest.approx(2 / math.sqrt(1 + 1 / 3))
    assert event.event.cycles == 2


@pytest.mark.parametrize("accountant", ["rdp", "pld"])
def test_exchanging_an_example_costs_a_removal_and_an_addition(accountant):
    mechanism, sampling = make_model().optimizer.mechanism, dice_tf.RandomAllocation(N, B)
    one = accounting.compute_epsilon(mechanism, sampling, 20, DELTA, accountant)
    both = accounting.compute_epsilon(mechanism, sampling, 20, DELTA, accountant, "replace_one")
    assert 1.5 * one < both < 4 * one


def test_runs_compose_with_runs_of_other_kinds():
    mechanism = make_model().optimizer.mechanism
    runs = [(mechanism, dice_tf.RandomAllocation(N, B), 20),
            (mechanism, dice_tf.CyclicPoissonSampling(N, B), 20),
            (mechanism, dice_tf.ShuffledEpochs(N, B), 10)]  # fmt: skip
    for accountant in ("rdp", "pld"):
        alone = [accounting.compute_epsilon(*run, DELTA / 3, accountant) for run in runs]
        together = accounting.compose_epsilon(runs, DELTA, accountant)
        assert max(alone) * 0.8 < together < sum(alone)


def test_a_plan_takes_it():
    sampling = dice_tf.RandomAllocation(20_000, 500, num_groups=4)
    plan = dice_tf.PrivacyPlan(sampling=sampling, epochs=10, target_epsilon=2.0)
    assert plan.feedback_steps == 3 and 1.99 < plan.epsilon() <= 2.0
    other = dice_tf.PrivacyPlan(
        num_examples=20_000, batch_size=500, epochs=10, target_epsilon=2.0, feedback_steps=3
    )
    assert plan.noise_multiplier < 0.97 * other.noise_multiplier


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__]))
