# Copyright 2026 The dice_tf Authors.
# SPDX-License-Identifier: Apache-2.0
"""What the best of a random number of runs costs, and statements of several runs."""

import math

import dp_accounting
from dp_accounting import rdp
import numpy as np
import pytest
from scipy import integrate, optimize, special, stats

from dice_tf import accounting
from dice_tf.accounting import renyi, repeated_selection
from dice_tf.errors import AccountingError
from dice_tf.mechanism import DiceMechanism
from dice_tf.sampling import (
    CyclicPoissonSampling,
    PoissonSampling,
    RandomAllocation,
    ShuffledEpochs,
)

N, B, STEPS, DELTA = 10_000, 100, 300, 1e-5
SHAPES = (0.0, 0.3, 1.0, 4.0, math.inf)


def mechanism(noise=2.0, **arguments):
    return DiceMechanism(
        l2_norm_clip=1.0, noise_multiplier=noise, expected_batch_size=B, **arguments
    )


def gaussian_run(noise_multiplier):
    """One release of a Gaussian mechanism: one epoch in a single batch, without feedback."""
    one = DiceMechanism(
        l2_norm_clip=1.0, error_norm_clip=0.0, noise_multiplier=noise_multiplier,
        expected_batch_size=100,
    )  # fmt: skip
    return one, ShuffledEpochs(100, 100), 1


def law(gamma, shape, most=4000):
    """Returns the probabilities of 1 to `most` trials, by Definition 1 of the paper."""
    k = np.arange(1, most + 1)
    if shape == 0:
        return (1 - gamma) ** k / (k * math.log(1 / gamma))
    factors = np.cumprod((np.arange(most) + shape) / (np.arange(most) + 1))
    return (1 - gamma) ** k / (gamma**-shape - 1) * factors


def gamma_of(mean, shape):
    """Returns gamma by the paper's formula of the mean, inverted here."""
    if shape == 0:
        of = lambda gamma: (1 / gamma - 1) / math.log(1 / gamma)
    else:
        of = lambda gamma: shape * (1 - gamma) / (gamma * (1 - gamma**shape))
    return optimize.brentq(lambda gamma: of(gamma) - mean, 1e-9, 1 - 1e-9)


# --- the law of the number of trials ------------------------------------------------


@pytest.mark.parametrize("shape", SHAPES[:-1])
@pytest.mark.parametrize("mean", [1.2, 3.0, 25.0])
def test_gamma_gives_the_law_with_that_mean(mean, shape):
    gamma = math.exp(-repeated_selection.log_inverse_gamma(mean, shape))
    probabilities = law(gamma, shape)
    assert probabilities.sum() == pytest.approx(1, abs=1e-9)
    assert probabilities @ np.arange(1, len(probabilities) + 1) == pytest.approx(mean, rel=1e-8)


@pytest.mark.parametrize("shape", SHAPES)
def test_the_number_of_trials_follows_the_law(shape):
    mean, draws = 3.0, 4000
    if math.isinf(shape):
        probabilities = stats.poisson.pmf(np.arange(200), mean)
    else:
        probabilities = np.concatenate([[0], law(gamma_of(mean, shape), shape)])
    numbers = [repeated_selection.draw_number_of_trials(mean, shape) for _ in range(draws)]
    # A chi-squared test on cells of at least ten draws; it fails by chance once in 100,000.
    last = int(np.flatnonzero(np.cumsum(probabilities) < 1 - 10 / draws)[-1])
    cells = [*range(int(probabilities[0] == 0), last + 1)]
    expected = [*probabilities[cells], 1 - probabilities[: last + 1].sum()]
    counts = [*(numbers.count(k) for k in cells), sum(k > last for k in numbers)]
    assert numbers.count(0) == 0 or math.isinf(shape)
    assert stats.chisquare(counts, draws * np.array(expected)).pvalue > 1e-5


def test_the_number_of_trials_has_entropy_of_its_own(monkeypatch):
    np.random.seed(0)
    first = [repeated_selection.draw_number_of_trials(1e5, 1.0) for _ in range(4)]
    np.random.seed(0)
    assert first != [repeated_selection.draw_number_of_trials(1e5, 1.0) for _ in range(4)]


# --- Renyi divergence ---------------------------------------------------------------


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("mean", [1.0, 4.0, 30.0])
@pytest.mark.parametrize("sampling", [PoissonSampling(N, B), CyclicPoissonSampling(N, B)])
def test_divergences_are_those_of_dp_accounting(sampling, mean, shape):
    run = mechanism(), sampling, STEPS
    event = dp_accounting.dp_event.RepeatAndSelectDpEvent(accounting.dp_event(*run), mean, shape)
    # Above 1.01, where both convert divergences of Poisson selection alike.
    orders = [1 + x / 10 for x in range(1, 100)] + [*range(11, 64), 128, 256]
    theirs = rdp.RdpAccountant(orders).compose(event).rdp
    single = rdp.RdpAccountant(orders).compose(accounting.dp_event(*run)).rdp
    ours = repeated_selection.selection_divergences(np.array(orders), single, mean, shape)
    if math.isinf(shape):
        # dp_accounting also bounds delta by the Kullback-Leibler divergence, and does not make
        # divergences grow with the order.
        theirs = np.minimum.accumulate(theirs[::-1])[::-1]
        assert np.all(ours >= theirs * (1 - 1e-9))
        np.testing.assert_allclose(ours[-40:], theirs[-40:], rtol=1e-6)
    else:
        np.testing.assert_allclose(ours, theirs, rtol=1e-6)


@pytest.mark.parametrize("shape", SHAPES)
def test_epsilon_is_that_of_dp_accounting(shape):
    run = mechanism(), CyclicPoissonSampling(N, B), STEPS
    event = dp_accounting.dp_event.RepeatAndSelectDpEvent(accounting.dp_event(*run), 8.0, shape)
    accountant = rdp.RdpAccountant([1 + x / 20 for x in range(1, 400)] + [*range(21, 130)])
    theirs = accountant.compose(event).get_epsilon(DELTA)
    ours = accounting.selection_epsilon(*run, DELTA, 8.0, shape)
    assert ours == pytest.approx(theirs, rel=4e-3)  # Other orders.


@pytest.mark.parametrize("shape", SHAPES[:-1])
def test_divergences_are_theorem_2_of_the_paper(shape):
    # A Gaussian mechanism: the best lambda-hat by a loop, gamma by its own equation.
    noise, mean, orders = 3.0, 12.0, np.concatenate(renyi.ORDERS)
    gamma = gamma_of(mean, shape)
    constants = []
    for order in orders:
        single = order / (2 * noise**2)
        constants.append((1 + shape) * ((1 - 1 / order) * single + math.log(1 / gamma) / order))
    expected = [
        min(o / (2 * noise**2) + math.log(mean) / (o - 1) for o in orders if o >= order)
        + min(constants)
        for order in orders
    ]
    found = repeated_selection.selection_divergences(orders, orders / (2 * noise**2), mean, shape)
    np.testing.assert_allclose(found, expected, rtol=1e-9)


# --- against the selection itself ---------------------------------------------------


def selected_gaussian(mean, shape, noise, upwards):
    """Returns the density of the best of K Gaussian scores, without and with an example.

    The output of a trial is a number that the example shifts by 1; the larger (or smaller)
    one wins, so the shift works for or against selection.
    """
    sign = 1 if upwards else -1

    gamma = None if math.isinf(shape) else gamma_of(mean, shape)

    def density(shift):
        def at(y):
            below = special.ndtr(sign * (y - shift) / noise)
            if math.isinf(shape):
                factor = mean * np.exp(mean * (below - 1))
            else:
                factor = mean * (gamma / (1 - (1 - gamma) * below)) ** (1 + shape)
            return stats.norm.pdf(y, shift, noise) * factor

        return at

    return density(0.0), density(1.0)


def delta_of(densities, epsilon, noise):
    """Returns the hockey-stick divergence of two densities, by numerical integration."""
    y = np.linspace(-12 * noise, 12 * noise, 20_001)
    first, second = (density(y) for density in densities)
    return integrate.trapezoid(np.maximum(0, first - math.exp(epsilon) * second), y)


@pytest.mark.parametrize(
    "shape, accountant",
    [(0.0, "rdp"), (1.0, "rdp"), (math.inf, "rdp"), (0.0, "pld"), (1.0, "pld")],
)
def test_the_best_of_gaussian_scores_costs_no_more(shape, accountant):
    noise, mean, delta = 2.0, 5.0, 1e-3
    epsilon = accounting.selection_epsilon(*gaussian_run(noise), delta, mean, shape, accountant)
    deltas = []
    for upwards in (True, False):
        pair = selected_gaussian(mean, shape, noise, upwards)
        if not math.isinf(shape):
            y = np.linspace(-24, 24, 4001)
            assert integrate.trapezoid(pair[0](y), y) == pytest.approx(1, abs=1e-6)
        deltas += [delta_of(order, epsilon, noise) for order in (pair, pair[::-1])]
    assert 0 < max(deltas) <= delta
    # The single run would not be enough: the test can fail.
    alone = accounting.compute_epsilon(*gaussian_run(noise), delta, accountant)
    pair = selected_gaussian(mean, shape, noise, True)
    assert max(delta_of(order, alone, noise) for order in (pair, pair[::-1])) > delta


def worst_pure_pair(epsilon, share):
    """A trial that is pure epsilon-private, whose rare best result is what gives away most."""
    rare = share
    return np.array([1 - rare, rare]), np.array(
        [1 - rare * math.exp(epsilon), rare * math.exp(epsilon)]
    )


@pytest.mark.parametrize("shape", [0.0, 1.0])
def test_a_trial_with_rare_outcomes_shows_that_the_bound_is_needed(shape):
    # Release the best of K results that are 0 or 1, with 1 the worse one: exact, by the
    # generating function. The ratio passes the epsilon of one trial, and stays below the bound.
    mean, single = 50.0, 1.0
    gamma = gamma_of(mean, shape)
    if shape:
        generate = lambda x: ((1 - (1 - gamma) * x) ** -shape - 1) / (gamma**-shape - 1)
    else:
        generate = lambda x: np.log(1 - (1 - gamma) * x) / math.log(gamma)
    ratios = []
    for share in np.geomspace(1e-6, 0.3, 60):
        for pair in (worst_pure_pair(single, share), worst_pure_pair(single, share)[::-1]):
            # All K trials give the worse result with probability generate(P[worse]).
            worse, other = (generate(p[1]) for p in pair), (generate(p[0]) for p in pair)
            for first, second in (worse, other):
                ratios += [abs(math.log(first / second))]
                ratios += [abs(math.log((1 - first) / (1 - second)))]
    # Pure privacy, Corollary of the theorem: (2 + shape) times epsilon.
    assert single * 1.2 < max(ratios) <= (2 + shape) * single + 1e-9
    # The pld bound with a curve that is epsilon at every delta.
    curve = lambda log_delta: single
    bound = repeated_selection._loss_epsilon(curve, math.log(1e-12), mean, shape)
    assert bound == pytest.approx((2 + shape) * single, rel=1e-6)


def test_pld_by_its_formula_with_the_exact_gaussian_curve():
    noise, mean, shape, delta = 3.0, 10.0, 1.0, 1e-4

    def curve(delta):
        # Balle and Wang, "Improving the Gaussian mechanism", 2018, Theorem 8.
        def excess(epsilon):
            lower = stats.norm.cdf(0.5 / noise - epsilon * noise)
            upper = stats.norm.logcdf(-0.5 / noise - epsilon * noise)
            return lower - math.exp(epsilon + upper) - delta

        return optimize.brentq(excess, 0, 50) if excess(0.0) > 0 else 0.0

    gamma = gamma_of(mean, shape)
    cost = lambda d: math.log(math.exp(curve(d)) + (1 - gamma) / gamma * d)
    best = min(cost(d) for d in np.geomspace(delta / mean, 0.9, 400))
    expected = curve(delta / mean) + (1 + shape) * best
    found = accounting.selection_epsilon(*gaussian_run(noise), delta, mean, shape, "pld")
    assert found == pytest.approx(expected, rel=5e-3)
    assert found < accounting.selection_epsilon(*gaussian_run(noise), delta, mean, shape, "rdp")


# --- all ways of drawing, and what epsilon depends on -------------------------------


@pytest.mark.parametrize(
    "sampling",
    [PoissonSampling(N, B), CyclicPoissonSampling(N, B), ShuffledEpochs(N, B),
     RandomAllocation(N, B, num_groups=2)],
    ids=lambda sampling: type(sampling).__name__,
)  # fmt: skip
@pytest.mark.parametrize("accountant", ["rdp", "pld"])
def test_selection_costs_more_than_one_run_and_less_than_all(sampling, accountant):
    run = mechanism(8.0 if isinstance(sampling, ShuffledEpochs) else 2.0), sampling, 100
    one = accounting.compute_epsilon(*run, DELTA, accountant)
    assert accounting.selection_epsilon(*run, DELTA, 1.0, 1.0, accountant) == pytest.approx(
        one, rel=2e-3
    )
    costs = [
        accounting.selection_epsilon(*run, DELTA, mean, 1.0, accountant) for mean in (3.0, 30.0)
    ]
    assert one < costs[0] < costs[1] < 3 * one + 2
    assert costs[1] < accounting.compose_epsilon([run] * 30, DELTA)


def test_random_allocation_by_hand():
    sampling = RandomAllocation(N, B, num_groups=2)
    run = mechanism(), sampling, STEPS
    from dice_tf.accounting import random_allocation

    noise = 2.0 / math.sqrt(2)
    orders = range(2, 65)
    single = [
        sampling.rounds(STEPS)
        * random_allocation.renyi_divergence(sampling.cycles_per_epoch, noise, order)
        for order in orders
    ]
    constant = min(
        2 * ((1 - 1 / order) * value + math.log(6) / order) for order, value in zip(orders, single)
    )
    epsilon = min(
        value + constant + math.log(6) / (order - 1) + math.log1p(-1 / order)
        - math.log(DELTA * order) / (order - 1)
        for order, value in zip(orders, single)
    )  # fmt: skip
    assert accounting.selection_epsilon(*run, DELTA, 6.0) == pytest.approx(epsilon, rel=1e-2)
    assert accounting.selection_epsilon(*run, DELTA, 6.0) <= epsilon + 1e-9


def test_unbounded_residuals_and_extremes():
    run = mechanism(bound_residuals=False), PoissonSampling(N, B), 20
    assert accounting.selection_epsilon(*run, DELTA, 4.0) > accounting.compute_epsilon(*run, DELTA)
    assert accounting.selection_epsilon(mechanism(), PoissonSampling(N, B), 0, DELTA, 4.0) == 0
    free = mechanism(0.0), PoissonSampling(N, B), 5
    assert accounting.selection_epsilon(*free, DELTA, 4.0) == math.inf


@pytest.mark.parametrize(
    "arguments, message",
    [
        ({"mean_trials": 0.5}, "mean_trials"),
        ({"mean_trials": math.inf}, "mean_trials"),
        ({"mean_trials": 1e7}, "mean_trials"),
        ({"mean_trials": "ten"}, "mean_trials"),
        ({"mean_trials": True}, "mean_trials"),
        ({"shape": -0.1}, "shape"),
        ({"shape": math.nan}, "shape"),
        ({"shape": "geometric"}, "shape"),
        ({"delta": 1e-3}, "below 1/N"),
        ({"accountant": "gdp"}, "accountant"),
        ({"shape": math.inf, "accountant": "pld"}, "Poisson"),
        ({"steps": 2.5}, "steps"),
        ({"sampling": "poisson"}, "sampling"),
    ],
)
def test_bad_arguments_are_refused(arguments, message):
    usual = {"mechanism": mechanism(), "sampling": PoissonSampling(N, B), "steps": STEPS,
             "delta": DELTA, "mean_trials": 4.0}  # fmt: skip
    with pytest.raises(AccountingError, match=message):
        accounting.selection_epsilon(**{**usual, **arguments})


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__]))
