# Copyright 2026 The dice_tf Authors.
# SPDX-License-Identifier: Apache-2.0
"""`group_size`: epsilon for people with several examples, against exact pairs and attacks."""

import dataclasses
import math
import warnings

import numpy as np
import pytest
from scipy import optimize, special, stats

from dice_tf import accounting
from dice_tf.accounting import loss_distribution
from dice_tf.errors import AccountingError
from dice_tf.mechanism import DiceMechanism
from dice_tf.sampling import (
    CyclicPoissonSampling,
    PoissonSampling,
    RandomAllocation,
    ShuffledEpochs,
)

DELTA = 1e-5


def make_mechanism(batch, noise_multiplier, **overrides):
    arguments = dict(l2_norm_clip=1.0, error_norm_clip=0.0)
    return DiceMechanism(
        noise_multiplier=noise_multiplier, expected_batch_size=batch, **{**arguments, **overrides}
    )


def gaussian_epsilon(mu, delta=DELTA):
    """Epsilon of N(0, 1) against N(mu, 1), by Balle and Wang's formula."""

    def excess(epsilon):
        low = special.log_ndtr(-epsilon / mu - mu / 2) + epsilon
        return special.ndtr(-epsilon / mu + mu / 2) - math.exp(low) - delta

    return optimize.brentq(excess, 0, 50 * mu * (mu + 1))


def mixture_epsilons(probability, noise_multiplier, group_size, rounds, delta=DELTA):
    """Lower bounds of epsilon, both directions, of the rounds of a group of equal gradients.

    A round adds j to noise, where j examples of k were drawn. The law of its loss is put on a
    grid, rounded down.
    """
    grid, spacing = np.linspace(-14, 14 + group_size / noise_multiplier, 100_001), 4e-5
    j = np.arange(group_size + 1)
    weights = stats.binom.pmf(j, group_size, probability)
    shifts = j / noise_multiplier
    losses = special.logsumexp(grid[:, None] * shifts - shifts**2 / 2, axis=1, b=weights)
    found = []
    for mass, loss in (
        (np.diff(special.ndtr(grid[:, None] - shifts) @ weights), losses[:-1]),
        (np.diff(special.ndtr(grid)), -losses[1:]),
    ):
        index = np.floor(loss / spacing).astype(int)
        lowest = index.min()
        size = 2**20
        # Sums of losses stay within 20, or wrap around with a probability far below delta.
        law = np.bincount((index - lowest), weights=mass, minlength=size)[:size]
        total = np.fft.irfft(np.fft.rfft(law) ** rounds, size)
        values = (np.arange(size) + rounds * lowest) % size
        values = np.where(values > size // 2, values - size, values) * spacing
        above = lambda e: np.sum(total * np.maximum(0, -np.expm1(e - values))) - delta
        found.append(optimize.brentq(above, 0, 20))
    return found


@pytest.mark.parametrize("group_size", [2, 3, 5])
def test_gaussian_groups_are_exact(group_size):
    # One epoch without amplification: a Gaussian mechanism with mu = 1/2.
    run = make_mechanism(500, 2.0), ShuffledEpochs(1000, 500), 2, DELTA
    exact = gaussian_epsilon(group_size / 2)
    by_loss = accounting.compute_epsilon(*run, "pld", group_size=group_size)
    assert exact <= by_loss <= 1.002 * exact
    # Renyi: never below the truth, and as if the noise were that of the whole group.
    by_renyi = accounting.compute_epsilon(*run, "rdp", group_size=group_size)
    whole = make_mechanism(500, 2.0 / group_size), *run[1:]
    assert exact <= by_renyi <= 1.001 * accounting.compute_epsilon(*whole, "rdp")


@pytest.mark.parametrize("group_size, most", [(2, 1.02), (4, 1.04)])
def test_groups_in_poisson_batches_are_close_above_the_exact_mixture(group_size, most):
    run = make_mechanism(500, 1.5), PoissonSampling(20_000, 500), 200, DELTA
    lower = max(mixture_epsilons(500 / 20_000, 1.5, group_size, 200))
    one = max(mixture_epsilons(500 / 20_000, 1.5, 1, 200))
    assert one <= accounting.compute_epsilon(*run, "pld") <= 1.01 * one
    assert lower <= accounting.compute_epsilon(*run, "pld", group_size=group_size) <= most * lower


@pytest.mark.parametrize(
    "mechanism, sampling, steps",
    [
        (make_mechanism(512, 0.8), PoissonSampling(60_000, 512), 1171),
        (make_mechanism(512, 1.6, error_norm_clip=1.0), CyclicPoissonSampling(60_000, 512), 500),
        (make_mechanism(100, 3.0, error_norm_clip=1.0), RandomAllocation(1000, 100), 50),
        (make_mechanism(100, 20.0), ShuffledEpochs(1000, 100), 50),
    ],
    ids=lambda value: type(value).__name__,
)
@pytest.mark.parametrize("accountant", ["rdp", "pld"])
def test_never_worse_than_the_textbook_conversion(mechanism, sampling, steps, accountant):
    run = mechanism, sampling, steps
    group_size, target = 3, DELTA
    found = accounting.compute_epsilon(*run, target, accountant, group_size=group_size)

    def textbook(epsilon):
        share = target / sum(math.exp(i * epsilon) for i in range(group_size))
        return accounting.compute_epsilon(*run, share, accountant) - epsilon

    single = optimize.brentq(textbook, 0.0, 60.0, xtol=1e-4)
    assert accounting.compute_epsilon(*run, target, accountant) < found
    assert found <= group_size * (single + 1e-4)


def releases_of(group, draws, noise, l2_norm_clip, error_norm_clip):
    """Releases of two-group cyclic sampling where all gradients point the same way.

    `group` are the groups of the examples, `draws` coins of shape [runs, cycles, examples].
    """
    runs, cycles, _ = draws.shape
    shifts = np.zeros([runs, 2 * cycles + 1])
    for index, which in enumerate(group):
        for cycle in range(cycles):
            entered = draws[:, cycle, index]
            shifts[:, 2 * cycle + which] += l2_norm_clip * entered
            shifts[:, 2 * cycle + which + 1] += error_norm_clip * entered
    return shifts[:, : 2 * cycles] + noise


@pytest.mark.parametrize("group", [(0, 0, 0), (0, 1, 0)])
def test_attacks_on_groups_with_feedback_stay_below(group):
    # A person's rows may be in one group of the sampler or in several, with overlapping windows.
    rng = np.random.default_rng(3)
    runs, cycles, probability, noise_multiplier = 200_000, 10, 0.2, 3.0
    mechanism = make_mechanism(100, noise_multiplier, error_norm_clip=1.0)
    run = mechanism, CyclicPoissonSampling(1000, 100), 2 * cycles
    noise = lambda: noise_multiplier * rng.standard_normal([runs, 2 * cycles])
    draws = rng.random([runs, cycles, len(group)]) < probability
    with_group = releases_of(group, draws, noise(), 1.0, 1.0).sum(axis=1)
    without = noise().sum(axis=1)
    violated = []
    for threshold in np.quantile(without, [0.9, 0.99, 0.999]):
        # Upper and lower confidence bounds, wrong once in 10,000.
        false = stats.beta.ppf(0.9999, (without > threshold).sum() + 1, runs)
        true = stats.beta.ppf(0.0001, (with_group > threshold).sum(), runs)
        (bound,) = accounting.true_positive_rates(*run, [false], group_size=len(group))
        (of_one,) = accounting.true_positive_rates(*run, [false])
        assert true <= bound
        violated.append(true > of_one)
    # The attack is a real one: what holds for one example does not hold for three.
    assert any(violated)


@pytest.mark.parametrize(
    "mechanism, sampling, relation",
    [
        (make_mechanism(100, 3.0), PoissonSampling(5000, 100), "replace_one"),
        (make_mechanism(100, 3.0, num_microbatches=50), PoissonSampling(5000, 100), None),
        (
            make_mechanism(100, 9.0, bound_residuals=False, error_norm_clip=1e-3),
            PoissonSampling(5000, 100),
            None,
        ),
        (make_mechanism(100, 6.0), ShuffledEpochs(5000, 100), "replace_one"),
    ],
)
@pytest.mark.parametrize("accountant", ["rdp", "pld"])
def test_every_form_and_relation_grows_with_the_group(mechanism, sampling, relation, accountant):
    epsilons = [
        accounting.compute_epsilon(
            mechanism, sampling, 60, 1e-5, accountant, relation, group_size=group_size
        )
        for group_size in (1, 2, 3, 6)
    ]
    assert 0 < 1.5 * epsilons[0] < epsilons[1] and all(np.diff(epsilons) > 0)
    assert math.isfinite(epsilons[-1])


def test_a_group_of_one_is_the_example():
    run = make_mechanism(2048, 2.0), CyclicPoissonSampling(60_000, 2048), 585, DELTA
    for accountant in ("rdp", "pld"):
        assert accounting.guarantee(*run, accountant, group_size=1) == accounting.guarantee(
            *run, accountant
        )
    assert accounting.privacy_statement(*run, group_size=1) == accounting.privacy_statement(*run)
    silent = dataclasses.replace(run[0], noise_multiplier=0.0), *run[1:]
    assert accounting.compute_epsilon(*silent, group_size=2) == math.inf
    assert accounting.compute_epsilon(*run[:2], 0, DELTA, group_size=2) == 0.0


@pytest.mark.parametrize("accountant", ["rdp", "pld"])
def test_noise_for_groups_keeps_their_budget(accountant):
    sampling = PoissonSampling(20_000, 500)
    arguments = dict(error_norm_clip=0.0, accountant=accountant, group_size=4)
    noise = accounting.calibrate_noise_multiplier(3.0, DELTA, sampling, 200, **arguments)
    at = lambda factor: accounting.compute_epsilon(
        make_mechanism(500, factor * noise), sampling, 200, DELTA, accountant, group_size=4
    )
    assert at(1.0) <= 3.0 < at(0.999)
    # The exact mixture keeps it, too, and nearly needs that noise.
    assert max(mixture_epsilons(500 / 20_000, noise, 4, 200)) <= 3.0
    assert accountant == "rdp" or max(mixture_epsilons(0.025, 0.97 * noise, 4, 200)) > 3.0


def test_statement_says_what_holds_for_a_person_or_that_nothing_does():
    run = make_mechanism(2048, 4.0), PoissonSampling(60_000, 2048), 585, DELTA
    text = " ".join(accounting.privacy_statement(*run, "pld", group_size=2).split())
    epsilon = accounting.compute_epsilon(*run, "pld", group_size=2)
    assert f"with up to 2 examples epsilon = {math.ceil(1000 * epsilon) / 1000:.3f} (PLD" in text
    assert "VACUOUS" not in text and "with more examples than the group size" in text
    # Epsilon of the example itself stays the guarantee.
    alone = accounting.compute_epsilon(*run, "pld")
    assert f"epsilon = {math.ceil(1000 * alone) / 1000:.3f} (PLD accountant) and delta" in text
    assert "VACUOUS" in accounting.privacy_statement(*run, "pld", group_size=60)
    shown = str(accounting.guarantee(*run, group_size=5))
    assert "where up to 5 examples are added or removed" in shown


@pytest.mark.filterwarnings("error::RuntimeWarning")
@pytest.mark.parametrize("noise_multiplier", [1e-3, 0.1, 1e4])
def test_numbers_at_the_ends_of_the_range_are_numbers(noise_multiplier):
    run = make_mechanism(1000, noise_multiplier), ShuffledEpochs(1000, 1000), 1, DELTA
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # Where the accountant falls back.
        found = accounting.compute_epsilon(*run, "pld", group_size=3)
        rates = accounting.true_positive_rates(*run[:3], group_size=3)
    mu = 3 / noise_multiplier
    # The mean of the loss, and a little more than its deviations at delta.
    assert 0.99 * mu**2 / 2 - 5 * mu <= found <= 1.01 * mu**2 / 2 + 5 * mu
    exact = special.ndtr(special.ndtri([0.001, 0.01, 0.1]) + mu)
    assert all(rates >= exact * (1 - 1e-9)) and rates == pytest.approx(exact, rel=0.01)


@pytest.mark.parametrize("group_size", [0, -1, 1.5, "two", True, 60_001])
def test_sizes_that_no_group_has_are_refused(group_size):
    run = make_mechanism(2048, 4.0), PoissonSampling(60_000, 2048), 585, DELTA
    for function in (
        accounting.guarantee,
        accounting.compute_epsilon,
        accounting.privacy_statement,
    ):
        with pytest.raises(AccountingError, match="group_size"):
            function(*run, group_size=group_size)
    with pytest.raises(AccountingError, match="group_size"):
        accounting.true_positive_rates(*run[:3], group_size=group_size)
    with pytest.raises(AccountingError, match="group_size"):
        accounting.calibrate_noise_multiplier(
            2.0, DELTA, run[1], 585, error_norm_clip=0.0, group_size=group_size
        )


@pytest.mark.parametrize("group_size", [1, 3])
def test_an_exchange_without_a_distribution_falls_back_on_both_moves(monkeypatch, group_size):
    # As with a dp_accounting that knows "replace one", where the losses span too wide a range.
    monkeypatch.setattr("dice_tf.accounting.account.supports", lambda event, relation: True)
    monkeypatch.setattr(loss_distribution, "loss_interval", lambda *_: None)
    run = make_mechanism(500, 1.5), PoissonSampling(20_000, 500), 200, DELTA
    renyi, loss = (
        accounting.compute_epsilon(*run, accountant, "replace_one", group_size=group_size)
        for accountant in ("rdp", "pld")
    )
    assert loss == pytest.approx(renyi)


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__]))
