# Copyright 2026 The dice_tf Authors.
# SPDX-License-Identifier: Apache-2.0
"""Random allocation: the accountant against exact cases, simulation and an adaptive adversary."""

import math

import dp_accounting
from dp_accounting import pld, rdp
import numpy as np
import pytest

from dice_tf.accounting import random_allocation
from dice_tf.accounting.renyi import epsilon_per_order

DELTA = 1e-5
ORDERS = [1 + x / 10 for x in range(2, 100)] + list(range(11, 64))


def renyi_epsilon(cycles, noise_multiplier, epochs, delta=DELTA):
    divergences = [
        epochs * random_allocation.renyi_divergence(cycles, noise_multiplier, order)
        for order in ORDERS
    ]
    return epsilon_per_order(ORDERS, np.array(divergences), math.log(delta)).min()


def composed(cycles, noise_multiplier, epochs=1, interval=1e-3):
    one = random_allocation.loss_distribution(cycles, noise_multiplier, interval)
    return one.self_compose(epochs)


@pytest.mark.parametrize("noise_multiplier", [0.5, 1.0, 4.0])
def test_one_cycle_is_the_gaussian_mechanism(noise_multiplier):
    for order in (1.5, 2, 7, 30.25):
        exact = order / (2 * noise_multiplier**2)
        # The chord between whole orders lies a little above.
        got = random_allocation.renyi_divergence(1, noise_multiplier, order)
        assert exact * (1 - 1e-9) <= got <= exact * (1 + (0.34 if order % 1 else 1e-9))
    gaussian = pld.privacy_loss_distribution.from_gaussian_mechanism(noise_multiplier)
    assert composed(1, noise_multiplier).get_epsilon_for_delta(DELTA) == pytest.approx(
        gaussian.get_epsilon_for_delta(DELTA), rel=0.01
    )


# Noise on the sum over G = C1 + C2, N = 60000, B = 512, 10 epochs, C1 = G / (s + 1).
TABLE = [
    (0, 1.0, 1.379), (1, 1.0, 1.289), (3, 1.0, 1.240), (7, 1.0, 1.234),
    (0, 2.7, 0.852), (1, 2.7, 0.701), (3, 2.7, 0.603), (7, 2.7, 0.552),
    (0, 8.0, 0.586), (1, 8.0, 0.457), (3, 8.0, 0.364), (7, 8.0, 0.302),
]  # fmt: skip


@pytest.mark.parametrize("feedback_steps, epsilon, noise", TABLE)
def test_table_of_noise(feedback_steps, epsilon, noise):
    groups = feedback_steps + 1
    cycles, noise_multiplier = 117 // groups, noise * math.sqrt(groups)
    renyi = renyi_epsilon(cycles, noise_multiplier, epochs=10)
    assert renyi == pytest.approx(epsilon, rel=0.005)
    assert 0.7 * renyi < composed(cycles, noise_multiplier, 10).get_epsilon_for_delta(DELTA) < renyi


@pytest.mark.parametrize("cycles, noise_multiplier", [(2, 0.8), (5, 0.7), (20, 1.0), (100, 0.6)])
def test_both_directions_against_simulation(cycles, noise_multiplier):
    rng, count = np.random.default_rng(cycles), 200_000
    law = composed(cycles, noise_multiplier, interval=1e-4)
    noise = rng.normal(size=(count, cycles)) * noise_multiplier
    ratio = lambda u: np.exp((u - 0.5) / noise_multiplier**2).mean(1)
    without = ratio(noise)
    noise[np.arange(count), rng.integers(cycles, size=count)] += 1
    within = ratio(noise)
    for epsilon in (0.0, 0.3, 1.0):
        # E_P[(1 - e^epsilon / L)^+] and E_Q[(1 - e^epsilon L)^+], with three standard errors.
        for pmf, terms in (
            (law._pmf_remove, np.maximum(1 - np.exp(epsilon) / within, 0)),
            (law._pmf_add, np.maximum(1 - np.exp(epsilon) * without, 0)),
        ):
            claimed, error = pmf.get_delta_for_epsilon(epsilon), terms.std() / math.sqrt(count)
            assert terms.mean() - 3 * error - 1e-9 <= claimed
            assert claimed <= terms.mean() * 1.05 + 3 * error + 1e-4


@pytest.mark.parametrize("cycles, noise_multiplier", [(3, 1.0), (12, 0.6), (40, 1.5)])
def test_moments_against_simulation(cycles, noise_multiplier):
    rng, count = np.random.default_rng(1), 400_000
    scale = 1 / noise_multiplier
    x = np.exp(scale * rng.normal(size=(count, cycles)) - scale**2 / 2).mean(1)
    for order in (2, 3):
        exact = random_allocation._log_moments(cycles, noise_multiplier, 4)[order]
        assert np.log(np.mean(x**order)) == pytest.approx(exact, rel=0.1, abs=0.01)
    for exponent in (0.5, 2.0, 4.0):
        exact = random_allocation._log_negative_moment(cycles, noise_multiplier, exponent)
        assert np.log(np.mean(x**-exponent)) == pytest.approx(exact, rel=0.05, abs=0.01)


@pytest.mark.parametrize("exponent", [0.3, 1.0, 5.0, 40.0])
@pytest.mark.parametrize("noise_multiplier", [0.4, 1.0, 5.0])
def test_negative_moments_of_one_lognormal_are_exact(exponent, noise_multiplier):
    got = random_allocation._log_negative_moment(1, noise_multiplier, exponent)
    exact = exponent * (exponent + 1) / (2 * noise_multiplier**2)
    if exponent <= 30 * noise_multiplier:
        assert got == pytest.approx(exact, rel=1e-6, abs=1e-9)
    else:
        assert exact * (1 - 1e-9) <= got


def test_many_cycles_cost_what_poisson_rounds_cost():
    cycles, noise_multiplier = 400, 0.9
    event = dp_accounting.SelfComposedDpEvent(
        dp_accounting.PoissonSampledDpEvent(
            1 / cycles, dp_accounting.GaussianDpEvent(noise_multiplier)
        ),
        5 * cycles,
    )
    accountant = rdp.RdpAccountant(ORDERS)
    poisson = epsilon_per_order(
        ORDERS, np.array(accountant.compose(event).rdp), math.log(DELTA)
    ).min()
    assert renyi_epsilon(cycles, noise_multiplier, 5) == pytest.approx(poisson, rel=0.1)


def test_finer_grids_change_little_and_every_grid_is_above_the_truth(monkeypatch):
    arguments = (14, 0.85, 10)
    coarse = composed(*arguments).get_epsilon_for_delta(DELTA)
    monkeypatch.setattr(random_allocation, "_SPACING", 0.01)
    fine = composed(*arguments).get_epsilon_for_delta(DELTA)
    assert fine <= coarse <= 1.005 * fine
    monkeypatch.setattr(random_allocation, "_MOST_POINTS", 2**10)
    assert composed(*arguments).get_epsilon_for_delta(DELTA) >= fine * (1 - 1e-3)


def test_an_adversary_that_adapts_does_not_beat_the_pair():
    # Shifts of cycle c depend on the releases before it: small after large ones, and so on.
    cycles, noise_multiplier, count = 6, 0.8, 400_000
    law = composed(cycles, noise_multiplier, interval=1e-4)
    strategies = {
        "shrinks": lambda before: np.where(before.sum(1) > 0.5, 0.3, 1.0),
        "grows": lambda before: np.where(before.sum(1) > 0.5, 1.0, 0.3),
        "turns": lambda before: np.where(before[:, -1] > 0, -1.0, 1.0),
    }
    for name, shift in strategies.items():
        rng = np.random.default_rng(2)
        chosen = rng.integers(cycles, size=count)
        for takes_part in (True, False):
            released, log_terms = np.zeros((count, 1)), []
            for cycle in range(cycles):
                size = shift(released)
                u = rng.normal(size=count) * noise_multiplier
                u = u + np.where(takes_part & (chosen == cycle), size, 0.0)
                log_terms.append((u * size - size**2 / 2) / noise_multiplier**2)
                released = np.column_stack([released, u])
            ratio = np.exp(log_terms).mean(0)
            for epsilon in (0.2, 1.0):
                if takes_part:
                    pmf, terms = law._pmf_remove, np.maximum(1 - np.exp(epsilon) / ratio, 0)
                else:
                    pmf, terms = law._pmf_add, np.maximum(1 - np.exp(epsilon) * ratio, 0)
                error = terms.std() / math.sqrt(count)
                assert terms.mean() - 3 * error <= pmf.get_delta_for_epsilon(epsilon), name


def test_laws_of_the_ratio_keep_mass_and_mean():
    for cycles, noise_multiplier in ((2, 0.5), (7, 1.0), (30, 3.0)):
        ratio, mass, lost_ratio = random_allocation._law_of_ratio(
            cycles, noise_multiplier, large=True
        )
        assert mass.sum() == pytest.approx(1.0, abs=1e-8)
        assert (mass * ratio).sum() + lost_ratio == pytest.approx(1.0, abs=1e-6)
        assert lost_ratio < 1e-7
        ratio, mass, _ = random_allocation._law_of_ratio(cycles, noise_multiplier, large=False)
        assert mass.sum() == pytest.approx(1.0, abs=1e-9)
        # What is lowered to the end of the grid lowers the mean.
        assert (mass * ratio).sum() <= 1 + 1e-9


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__]))
