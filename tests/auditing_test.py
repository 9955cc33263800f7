# Copyright 2026 The dice_tf Authors.
# SPDX-License-Identifier: Apache-2.0
"""Audits against mechanisms whose epsilon is known exactly, and canaries for Keras."""

import math

import keras
import numpy as np
import pytest
from scipy import optimize, stats
import tensorflow as tf

from dice_tf import accounting, auditing
from dice_tf.auditing import canaries
from dice_tf.errors import AccountingError
from dice_tf.sampling import ShuffledEpochs
from dice_tf.training.optimizers import DiceSGDOptimizer

DELTA = 1e-5


def gaussian_epsilon(shift, delta):
    """Exact epsilon of a Gaussian mechanism of noise 1 whose mean moves by `shift`."""
    excess = lambda epsilon: (
        stats.norm.cdf(shift / 2 - epsilon / shift)
        - math.exp(epsilon) * stats.norm.cdf(-shift / 2 - epsilon / shift)
        - delta
    )
    return optimize.brentq(excess, 0.0, 200.0)


def allowed_failures(repetitions, rate=0.05):
    """How many failures of probability `rate` happen with probability 0.999 at most."""
    return stats.binom.ppf(0.999, repetitions, rate)


def correctness(epsilon):
    return 1 / (1 + math.exp(-epsilon))


# Many runs.


@pytest.mark.parametrize("confidence", [0.9, 0.95, 0.99])
@pytest.mark.parametrize(("hits", "false_alarms"), [(90, 3), (100, 0), (50, 1), (30, 0)])
def test_rates_are_bounded_as_scipy_does(hits, false_alarms, confidence):
    scores_in, scores_out = np.arange(100) < hits, np.arange(80) < false_alarms
    bound = auditing.epsilon_lower_bound(scores_in, scores_out, DELTA, confidence, threshold=0.5)
    interval = lambda k, n: stats.binomtest(k, n).proportion_ci(confidence, method="exact")
    tpr, fpr = interval(hits, 100).low, interval(false_alarms, 80).high
    by_hand = max(0.0, math.log((tpr - DELTA) / fpr), math.log((1 - fpr - DELTA) / (1 - tpr)))
    assert bound == pytest.approx(by_hand, rel=1e-9)
    assert by_hand > 0


def test_a_score_at_the_threshold_does_not_fire():
    bound = lambda t: auditing.epsilon_lower_bound(np.ones(99), np.zeros(99), 0.0, threshold=t)
    assert bound(1.0) == 0.0
    assert bound(0.0) == bound(0.5) > 3.0


def test_both_tails_count():
    # A canary that is noticed by never falling below 0.
    rng = np.random.default_rng(0)
    scores_out = np.where(rng.random(2000) < 0.1, -1.0, 1.0)
    bound = auditing.epsilon_lower_bound(np.ones(2000), scores_out, DELTA, threshold=0.0)
    assert 3.5 < bound < math.log(0.1 * 2000)


@pytest.mark.parametrize("epsilon", [0.5, 1.0, 3.0])
def test_many_runs_of_randomised_response_of_known_epsilon(epsilon):
    rng = np.random.default_rng(1)
    runs, repetitions = 1000, 300
    right = correctness(epsilon)
    bounds = [
        auditing.epsilon_lower_bound(
            rng.random(runs) < right, rng.random(runs) < 1 - right, 0.0, threshold=0.5
        )
        for _ in range(repetitions)
    ]
    assert np.sum(np.array(bounds) > epsilon) <= allowed_failures(repetitions)
    assert np.mean(bounds) > 0.8 * epsilon - 0.1


@pytest.mark.parametrize("shift", [0.5, 1.0, 2.0])
def test_many_runs_of_a_gaussian_mechanism_of_known_epsilon(shift):
    rng = np.random.default_rng(2)
    epsilon, repetitions = gaussian_epsilon(shift, 1e-2), 200
    bounds = [
        auditing.epsilon_lower_bound(rng.normal(shift, 1, 1500), rng.normal(0, 1, 1500), 1e-2)
        for _ in range(repetitions)
    ]
    assert np.sum(np.array(bounds) > epsilon) <= allowed_failures(repetitions)
    assert np.mean(bounds) > 0.25 * epsilon


def test_a_threshold_chosen_on_other_runs_keeps_the_bound_valid():
    # A Laplace mechanism loses exactly epsilon at every threshold in its tail. The best of
    # all thresholds, chosen on the scores that it is counted on, proves too much too often.
    rng = np.random.default_rng(3)
    epsilon, repetitions, held_out, naive = 2.0, 100, 0, 0
    for _ in range(repetitions):
        scores_in, scores_out = rng.laplace(epsilon, 1, 5000), rng.laplace(0, 1, 500)
        bound = lambda t=None: auditing.epsilon_lower_bound(scores_in, scores_out, 0.0, threshold=t)
        held_out += bound() > epsilon
        naive += any(bound(t) > epsilon for t in np.linspace(2, 4.5, 30))
    assert held_out <= 0.05 * repetitions < naive


def test_sorted_scores_are_no_trap():
    rng = np.random.default_rng(4)
    scores_in, scores_out = rng.normal(3, 1, 1000), rng.normal(0, 1, 1000)
    bound = auditing.epsilon_lower_bound(np.sort(scores_in), np.sort(scores_out), DELTA)
    assert 2.5 < bound < gaussian_epsilon(3, DELTA)


def test_a_claim_three_times_too_small_is_caught_by_many_runs():
    rng = np.random.default_rng(5)
    true, claim = gaussian_epsilon(2.0, 1e-2), gaussian_epsilon(2.0, 1e-2) / 3
    bounds = [
        auditing.audit(lambda include: 2 * include + rng.normal(), 1500, 1e-2).epsilon_lower_bound
        for _ in range(40)
    ]
    assert np.mean(np.array(bounds) > claim) >= 0.95
    assert max(bounds) <= true


def test_audit_calls_the_training_and_keeps_the_scores():
    calls = []

    def train(include):
        calls.append(include)
        return float(include) + len(calls) / 1000

    result = auditing.audit(train, num_runs=20, delta=DELTA, confidence=0.9, threshold=0.5)
    assert sum(calls) == 20 and len(calls) == 40
    assert result.scores_in.min() > 1 > result.scores_out.max()
    assert (result.delta, result.confidence) == (DELTA, 0.9)
    assert result.epsilon_lower_bound == auditing.epsilon_lower_bound(
        np.ones(20), np.zeros(20), DELTA, 0.9, threshold=0.5
    )
    assert str(result).startswith("epsilon >= 1.8")


# One run.


def test_one_run_without_delta_is_the_bound_of_clopper_and_pearson():
    for right, guesses in ((100, 100), (80, 100), (600, 1000)):
        bound = auditing.one_run_epsilon_lower_bound(right, guesses, 2000, delta=0.0)
        q = stats.binomtest(right, guesses).proportion_ci(0.9, method="exact").low
        assert bound == pytest.approx(math.log(q / (1 - q)), rel=1e-6)
    assert auditing.one_run_epsilon_lower_bound(50, 100, 100, delta=0.0) == 0.0
    assert auditing.one_run_epsilon_lower_bound(0, 100, 100, delta=0.0) == 0.0


def test_p_value_is_the_theorem_or_the_simpler_bound():
    # The theorem's sum over i, term by term, where it is the smaller of the two.
    v, r, m, epsilon, delta = 38, 50, 100, 0.2, 1e-4
    q = correctness(epsilon)
    tail = lambda k: stats.binom.sf(k - 1, r, q)
    alpha = max(2 / i * (tail(v - i) - tail(v)) for i in range(1, m + 1))
    assert auditing.one_run_p_value(v, r, m, epsilon, delta) == pytest.approx(
        tail(v) + delta * m * alpha, rel=1e-9
    )
    v, epsilon = 50, 4.0
    simple = correctness(epsilon) ** 50 + m * delta / (1 + math.exp(epsilon))
    assert auditing.one_run_p_value(v, r, m, epsilon, delta) == pytest.approx(simple, rel=1e-9)


@pytest.mark.parametrize("delta", [0.0, 1e-5, 1e-3])
def test_p_value_grows_with_epsilon_and_delta(delta):
    values = [auditing.one_run_p_value(80, 100, 1000, e, delta) for e in np.linspace(0, 5, 101)]
    assert np.all(np.diff(values) >= 0) and values[-1] == pytest.approx(1.0, abs=1e-6)
    assert values[5] <= auditing.one_run_p_value(80, 100, 1000, 0.25, 2 * delta)


def leaky_mechanisms(v, r, epsilon, delta):
    """Exact Pr[W >= v] of (epsilon, delta)-private mechanisms that use up their delta."""
    q = correctness(epsilon)
    yield "all coins told at once", delta + (1 - delta) * stats.binom.sf(v - 1, r, q)
    yield "each coin told by itself", stats.binom.sf(v - 1, r, q + (1 - q) * delta)
    # The last coin is told when it decides, or as often as delta permits.
    decisive = stats.binom.pmf(v - 1, r - 1, q)
    told = min(decisive, delta)
    yield (
        "the last coin told when it matters",
        stats.binom.sf(v - 1, r - 1, q) + decisive * q + told * (1 - q),
    )


@pytest.mark.parametrize("r", [50, 400])
@pytest.mark.parametrize("epsilon", [0.1, 1.0, 4.0])
@pytest.mark.parametrize("delta", [1e-5, 1e-3])
def test_p_value_covers_mechanisms_that_use_up_their_delta(r, epsilon, delta):
    mean, spread = r * correctness(epsilon), math.sqrt(r * correctness(epsilon)) / 2
    matters = 0
    for v in {min(r, math.ceil(mean + z * spread)) for z in (0, 1, 2, 3, 4, 6)}:
        bound = auditing.one_run_p_value(v, r, r, epsilon, delta)
        for name, exact in leaky_mechanisms(v, r, epsilon, delta):
            assert exact <= bound * (1 + 1e-9), (name, v)
            matters += exact > 1.2 * stats.binom.sf(v - 1, r, correctness(epsilon))
    # So that the term in delta is really put to the test.
    assert matters or delta < 1e-3 or epsilon > 1


@pytest.mark.parametrize("epsilon", [0.5, 1.0, 3.0])
@pytest.mark.parametrize("abstain", [0.0, 0.8])
def test_one_run_of_randomised_response_of_known_epsilon(epsilon, abstain):
    rng = np.random.default_rng(6)
    repetitions, m = 400, 1000
    r = round((1 - abstain) * m)
    bounds = np.array(
        [
            auditing.one_run_epsilon_lower_bound(
                int(rng.binomial(r, correctness(epsilon))), r, m, DELTA
            )
            for _ in range(repetitions)
        ]
    )
    assert np.sum(bounds > epsilon) <= allowed_failures(repetitions)
    # Close to the 5 % that are allowed, so nothing is given away.
    assert np.sum(bounds > 1.02 * epsilon) < np.sum(bounds > 0.98 * epsilon)
    assert np.mean(bounds) > epsilon - (0.25 if abstain == 0 else 0.6)


def test_a_claim_three_times_too_small_is_caught_by_one_run():
    rng = np.random.default_rng(7)
    noisy = lambda included: included + rng.normal(scale=0.5, size=2000)
    assert gaussian_epsilon(2.0, DELTA) > 3 * 1.2
    bounds = [
        auditing.audit_one_run(noisy, 2000, 200, DELTA, seed=s).epsilon_lower_bound
        for s in range(40)
    ]
    assert np.mean(np.array(bounds) > 1.2) >= 0.95
    assert max(bounds) < gaussian_epsilon(2.0, DELTA)


def test_guesses_are_the_extremes():
    scores = np.array([3.0, -2.0, 0.0, 5.0, 1.0, -7.0])
    assert auditing.membership_guesses(scores, 4).tolist() == [1, -1, 0, 1, 0, -1]
    assert auditing.membership_guesses(scores, 6).tolist() == [1, -1, -1, 1, 1, -1]
    # Equal scores tell nothing, and the number of guesses stays as it was fixed.
    assert np.abs(auditing.membership_guesses(np.zeros(10), 4)).sum() == 4


def test_audit_one_run_flips_fair_and_reproducible_coins():
    seen = []

    def train(included):
        seen.append(included.copy())
        scores = included.astype(float)
        included[:] = True  # What training does to its argument must not change the truth.
        return scores

    first, second = (auditing.audit_one_run(train, 1000, 100, DELTA, seed=8) for _ in range(2))
    assert np.array_equal(*seen) and 430 < seen[0].sum() < 570
    assert first.epsilon_lower_bound == second.epsilon_lower_bound
    assert first.epsilon_lower_bound == auditing.one_run_epsilon_lower_bound(100, 100, 1000, DELTA)
    assert (first.scores_in == 1).all() and (first.scores_out == 0).all()
    assert len(first.scores_in) == seen[0].sum()
    auditing.audit_one_run(train, 1000, 100, DELTA)
    auditing.audit_one_run(train, 1000, 100, DELTA)
    assert not np.array_equal(seen[-1], seen[-2])


# Canaries.


def test_gradient_canaries_share_no_gradient_with_others():
    rng = np.random.default_rng(9)
    x = canaries.gradient_canaries(rng.normal(size=(3, 4)), num_canaries=2, scale=5.0)
    model = keras.Sequential(
        [keras.Input((6,)), keras.layers.Dense(3, use_bias=False), keras.layers.Dense(1)]
    )
    kernel, gradients = model.layers[0].kernel, []
    for example in x:
        with tf.GradientTape() as tape:
            output = model(example[np.newaxis])
        gradients.append(np.ravel(tape.gradient(output, kernel.value)))
    products = np.array(gradients) @ np.array(gradients).T
    assert np.all(products[3:, :3] == 0) and products[3, 4] == 0
    assert np.all(np.diag(products) > 0)
    assert np.count_nonzero(x[3:]) == 2 and x[3:].max() == 5.0


def test_input_canaries_are_wrong_in_every_way():
    labels = np.repeat(np.arange(4), 500)
    wrong = canaries.input_canaries(labels, num_classes=4, seed=0)
    assert wrong.dtype == labels.dtype and not np.any(wrong == labels)
    counts = np.histogram2d(labels, wrong, bins=4)[0]
    assert np.all(counts[~np.eye(4, dtype=bool)] > 120)


def test_scores_are_minus_the_loss_of_each_canary():
    rng = np.random.default_rng(10)
    x, y = rng.normal(size=(8, 3)).astype(np.float32), rng.integers(0, 4, 8)
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(4, activation="softmax")])
    model.compile("sgd", loss="sparse_categorical_crossentropy")
    probabilities = model.predict(x, verbose=0)
    expected = np.log(probabilities[np.arange(8), y])
    np.testing.assert_allclose(canaries.canary_scores(model, x, y), expected, rtol=1e-5)


def memorisation_audit(optimizer, epochs=15, batch_size=100):
    """Audits logistic regression with more features than examples by wrong labels."""
    rng = np.random.default_rng(11)
    m, classes = 600, 10
    x = rng.normal(size=(m, 700)).astype(np.float32) / math.sqrt(700)
    y = canaries.input_canaries(rng.integers(0, classes, m), classes, seed=0)

    def train(included):
        layer = keras.layers.Dense(classes, activation="softmax", kernel_initializer="zeros")
        model = keras.Sequential([keras.Input((700,)), layer])
        model.compile(optimizer, loss="sparse_categorical_crossentropy")
        weight = included.astype(np.float32)
        model.fit(x, y, sample_weight=weight, epochs=epochs, batch_size=batch_size, verbose=0)
        return canaries.canary_scores(model, x, y)

    return auditing.audit_one_run(train, m, 120, DELTA, seed=12).epsilon_lower_bound


def test_input_canaries_catch_training_without_privacy_only():
    assert memorisation_audit(keras.optimizers.SGD(20.0)) > 3.0
    private = DiceSGDOptimizer(
        20.0, l2_norm_clip=1.0, noise_multiplier=20.0, expected_batch_size=100, noise_seed=13
    )
    # A canary of weight 0 is an empty example: the relation that shuffled epochs account for.
    claimed = accounting.compute_epsilon(
        private.mechanism, ShuffledEpochs(600, 100), 15 * 6, DELTA, accountant="pld"
    )
    assert memorisation_audit(private) <= claimed < 2.0


# Refusals.


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: auditing.epsilon_lower_bound([1.0], [0.0, 1.0], DELTA), "scores_in"),
        (lambda: auditing.epsilon_lower_bound([1.0, 2.0], [math.nan, 1.0], DELTA), "1 NaN"),
        (lambda: auditing.epsilon_lower_bound([1.0, 2.0], [0.0, 1.0], 1.0), "below 1"),
        (lambda: auditing.epsilon_lower_bound([1.0, 2.0], [0.0, 1.0], DELTA, 0), "confidence=0"),
        (lambda: auditing.one_run_epsilon_lower_bound(11, 10, 20, DELTA), "num_correct=11"),
        (lambda: auditing.one_run_epsilon_lower_bound(5, 30, 20, DELTA), "num_guesses=30"),
        (lambda: auditing.one_run_p_value(5, 10, 20, -1.0, DELTA), "epsilon=-1.0"),
        (lambda: auditing.membership_guesses(np.ones(5), 3), "even"),
        (lambda: auditing.membership_guesses(np.ones(5), 6), "5 canaries"),
        (lambda: auditing.audit(lambda include: 1.0, 1, DELTA), "num_runs=1"),
        (lambda: auditing.audit(lambda include: math.nan, 5, DELTA), "diverged"),
        (lambda: auditing.audit_one_run(lambda s: np.ones(3), 10, 2, DELTA), "10 canaries"),
        (lambda: canaries.gradient_canaries(np.ones((2, 3, 3)), 1), r"\(2, 3, 3\)"),
        (lambda: canaries.gradient_canaries(np.ones((2, 3)), 1, scale=0.0), "scale=0.0"),
        (lambda: canaries.input_canaries([0, 5], 5), "from 0 to 4"),
        (lambda: canaries.input_canaries([0.5, 1.0], 5), "whole numbers"),
    ],
)
def test_refusals(call, message):
    with pytest.raises(AccountingError, match=message):
        call()


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__]))
