# Copyright 2026 The dice_tf Authors.
# SPDX-License-Identifier: Apache-2.0
"""Rates of an attacker, against exact trade-offs, and what neighbours dp_accounting knows."""

import math
import re

import dp_accounting
from dp_accounting import pld
import numpy as np
import pytest
from scipy import special, stats

from dice_tf import accounting
from dice_tf.accounting import events, loss_distribution
from dice_tf.errors import AccountingError
from dice_tf.mechanism import DiceMechanism
from dice_tf.sampling import (
    CyclicPoissonSampling,
    PoissonSampling,
    RandomAllocation,
    ShuffledEpochs,
)

RATES = (1e-5, 0.001, 0.01, 0.1, 0.5, 0.9)


def make_mechanism(batch, noise_multiplier, **overrides):
    arguments = dict(l2_norm_clip=1.0, error_norm_clip=0.0)
    return DiceMechanism(
        noise_multiplier=noise_multiplier, expected_batch_size=batch, **{**arguments, **overrides}
    )


@pytest.mark.parametrize("noise_multiplier", [0.4, 2.0, 30.0])
@pytest.mark.parametrize("draw", [PoissonSampling, ShuffledEpochs])
def test_one_full_batch_is_the_gaussian_mechanism(noise_multiplier, draw):
    run = make_mechanism(1000, noise_multiplier), draw(1000, 1000), 1
    found = accounting.true_positive_rates(*run, RATES)
    exact = special.ndtr(special.ndtri(RATES) + 1 / noise_multiplier)
    assert np.all(found >= exact * (1 - 1e-9))
    np.testing.assert_allclose(found, exact, rtol=2e-3)


@pytest.mark.parametrize("probability, noise_multiplier", [(0.02, 0.5), (0.3, 1.5)])
def test_one_drawn_batch_has_the_larger_rate_of_both_directions(probability, noise_multiplier):
    mu = 1 / noise_multiplier
    thresholds = np.linspace(-12, 12 + mu, 400_001)
    absent = special.ndtr(-thresholds)
    present = (1 - probability) * absent + probability * special.ndtr(mu - thresholds)
    # Most powerful tests: "there" above a threshold, "not there" below one.
    exact = np.maximum(
        np.interp(RATES, absent[::-1], present[::-1]),
        np.interp(RATES, 1 - present, 1 - absent),
    )
    run = make_mechanism(int(1000 * probability), noise_multiplier)
    sampling = PoissonSampling(1000, int(1000 * probability))
    found = accounting.true_positive_rates(run, sampling, 1, RATES)
    assert np.all(found >= exact * (1 - 1e-6))
    # Between both directions lies the concave hull, which no test need reach.
    np.testing.assert_allclose(found, exact, rtol=0.03)


@pytest.mark.parametrize(
    "mechanism, sampling, steps, relation",
    [
        (make_mechanism(512, 0.8), PoissonSampling(60_000, 512), 1171, None),
        (
            make_mechanism(512, 2, error_norm_clip=1.0),
            CyclicPoissonSampling(60_000, 512),
            500,
            None,
        ),
        (make_mechanism(100, 3.0, error_norm_clip=1.0), RandomAllocation(1000, 100), 50, None),
        (make_mechanism(100, 9.0, error_norm_clip=1.0), ShuffledEpochs(1000, 100), 50, None),
        (make_mechanism(100, 3.0), PoissonSampling(5000, 100), 60, "replace_one"),
        (
            make_mechanism(100, 9.0, bound_residuals=False, error_norm_clip=1e-3),
            PoissonSampling(5000, 100),
            60,
            None,
        ),
    ],
    ids=lambda value: type(value).__name__,
)
def test_no_rate_exceeds_what_epsilon_and_delta_permit(mechanism, sampling, steps, relation):
    rates = sorted((1e-7, 1e-4, *RATES))
    found = accounting.true_positive_rates(mechanism, sampling, steps, rates, relation)
    assert all(np.diff(found) > 0) and found[-1] <= 1
    for delta in (1.6e-5, 1e-6, 1e-8):
        run = mechanism, sampling, steps, delta
        epsilon = accounting.compute_epsilon(*run, "pld", relation)
        for false, true in zip(rates, found):
            assert false < true <= 1.001 * (math.exp(epsilon) * false + delta)


def test_the_renyi_bound_stands_in_where_there_is_no_distribution(monkeypatch):
    run = make_mechanism(512, 0.8), PoissonSampling(60_000, 512), 1171
    by_loss = accounting.true_positive_rates(*run)
    monkeypatch.setattr(loss_distribution, "loss_interval", lambda *_: None)
    with pytest.warns(UserWarning, match="too wide a range"):
        by_renyi = accounting.true_positive_rates(*run)
    assert all(one < other < 6 * one for one, other in zip(by_loss, by_renyi))


def test_without_steps_nothing_is_learned_and_without_noise_everything():
    run = make_mechanism(512, 0.8), PoissonSampling(60_000, 512)
    assert accounting.true_positive_rates(*run, 0) == (0.001, 0.01, 0.1)
    silent = make_mechanism(512, 0.0)
    assert accounting.true_positive_rates(silent, run[1], 10) == (1.0, 1.0, 1.0)


@pytest.mark.parametrize("rate", [0.0, 1.0, -0.1, math.nan, "one"])
def test_rates_that_are_none_are_refused(rate):
    with pytest.raises(AccountingError, match="false_positive_rates"):
        accounting.true_positive_rates(
            make_mechanism(512, 0.8), PoissonSampling(60_000, 512), 10, [0.1, rate]
        )


def test_the_statement_rounds_rates_up():
    run = make_mechanism(1000, 0.7), ShuffledEpochs(1000, 1000), 1
    text = " ".join(accounting.privacy_statement(*run, 1e-4).split())
    (listed,) = re.findall(r"accuses at most (\S+) %, (\S+) % or (\S+) % of those that were", text)
    for printed, false in zip(listed, (0.001, 0.01, 0.1)):
        exact = 100 * stats.norm.cdf(stats.norm.ppf(false) + 1 / 0.7)
        assert exact <= float(printed) <= exact + 0.15
    text = accounting.privacy_statement(make_mechanism(1000, 0.0), *run[1:], 1e-4)
    assert "accuses at most 100 %, 100 % or 100 %" in " ".join(text.split())


@pytest.mark.parametrize("draw", [ShuffledEpochs, PoissonSampling])
def test_replace_by_empty_is_replace_special_of_dp_accounting(draw):
    # "Special" is the example whose contribution is zero.
    relation = dp_accounting.NeighboringRelation.REPLACE_SPECIAL
    run = make_mechanism(500, 6.0, error_norm_clip=1.0), draw(5000, 500), 40
    event = accounting.dp_event(*run)
    interval = 1e-4
    own = pld.PLDAccountant(relation, interval)
    if not own.supports(event):  # Draws are known from dp_accounting 0.5 on.
        own = pld.PLDAccountant(value_discretization_interval=interval)
    found = accounting.guarantee(*run, 1e-5, "pld", "replace_by_empty")
    assert found.epsilon == pytest.approx(own.compose(event).get_epsilon(1e-5), rel=1e-3)
    # Emptying one example is half of replacing it.
    assert found.epsilon < accounting.compute_epsilon(*run, 1e-5, "pld", "replace_one")


def test_replace_special_reaches_the_accountant(monkeypatch):
    asked = []
    accountant = pld.PLDAccountant

    def spy(relation=dp_accounting.NeighboringRelation.ADD_OR_REMOVE_ONE, *arguments):
        asked.append(relation.name)
        return accountant(relation, *arguments)

    monkeypatch.setattr(loss_distribution.pld, "PLDAccountant", spy)
    run = make_mechanism(500, 6.0), ShuffledEpochs(5000, 500), 40, 1e-5
    accounting.compute_epsilon(*run, "pld")
    assert not asked  # The distributions of rounds are our own: an empty example shifts nothing.
    mixture = dp_accounting.GaussianDpEvent(2.0)
    with monkeypatch.context() as patch:
        patch.setattr(events, "mixture_event", lambda *_: mixture)
        epsilon = accounting.compute_epsilon(*run, "pld")
    assert set(asked) == {"REPLACE_SPECIAL"}
    assert epsilon == pytest.approx(accountant().compose(mixture).get_epsilon(run[3]), rel=1e-3)
    del asked[:]
    # Where every step shows an example, an exchange is one Gaussian shift, twice as long.
    epsilon = accounting.compute_epsilon(*run, "pld", "replace_one")
    assert not {"REPLACE_SPECIAL", "REPLACE_ONE"} & set(asked)
    rounds = run[1].rounds(run[2])
    event = dp_accounting.GaussianDpEvent(run[0].noise_multiplier / 2 / rounds**0.5)
    assert epsilon == pytest.approx(accountant().compose(event).get_epsilon(run[3]), rel=1e-3)


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__]))
