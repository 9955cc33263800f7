# Copyright 2026 The dice_tf Authors.
# SPDX-License-Identifier: Apache-2.0
"""Epsilon: other accountants, the forms of the algorithm, relations, refusals."""

import importlib.metadata
import importlib.util
import math
import re
import sys
import warnings

import dp_accounting
from dp_accounting import pld, rdp
import pytest
from scipy import optimize, stats

from dice_tf import accounting
from dice_tf.accounting import events, loss_distribution, renyi
from dice_tf.errors import AccountingError
from dice_tf.mechanism import DiceMechanism
from dice_tf.sampling import CyclicPoissonSampling, PoissonSampling, ShuffledEpochs

DP_ACCOUNTING_VERSION = tuple(
    int(part) for part in importlib.metadata.version("dp-accounting").split(".")[:3]
)


def make_mechanism(noise_multiplier=2.0, batch=512, **overrides):
    arguments = dict(l2_norm_clip=1.0, noise_multiplier=noise_multiplier, expected_batch_size=batch)
    return DiceMechanism(**{**arguments, **overrides})


SAMPLINGS = [
    PoissonSampling(60_000, 512),
    CyclicPoissonSampling(60_000, 512),
    CyclicPoissonSampling(60_000, 512, num_groups=4),
    ShuffledEpochs(60_000, 512),
]


@pytest.mark.parametrize("sampling", SAMPLINGS, ids=repr)
@pytest.mark.parametrize("feedback_steps", [1, 3])
@pytest.mark.parametrize("noise_multiplier", [0.8, 3.0])
def test_rdp_equals_dp_accounting(sampling, feedback_steps, noise_multiplier):
    mechanism = make_mechanism(noise_multiplier, feedback_steps=feedback_steps)
    event = accounting.dp_event(mechanism, sampling, 1171)
    epsilon, order = renyi.renyi_epsilon(
        events.bounded_rounds(mechanism, sampling, 1171), math.log(1e-5)
    )
    theirs = rdp.RdpAccountant([order]).compose(event).get_epsilon(1e-5)
    assert accounting.compute_epsilon(mechanism, sampling, 1171, 1e-5) == epsilon
    assert epsilon == pytest.approx(theirs, rel=1e-12)
    assert epsilon <= rdp.RdpAccountant().compose(event).get_epsilon(1e-5) * (1 + 1e-12)


@pytest.mark.parametrize("q, z", [(1e-3, 0.8), (0.02, 4.0), (0.3, 60.0), (0.97, 1000.0)])
def test_high_orders_equal_dp_accounting(q, z):
    for block in range(3, len(renyi.ORDERS)):
        order = renyi.ORDERS[block][1]
        event = dp_accounting.PoissonSampledDpEvent(q, dp_accounting.GaussianDpEvent(z))
        theirs = rdp.RdpAccountant([order]).compose(event).rdp[0]
        assert renyi.renyi_divergences(q, z, block)[1] == pytest.approx(theirs, rel=1e-9, abs=1e-13)


def test_the_table_of_forms():
    def rounds(sampling, steps=1171, **overrides):
        mechanism = make_mechanism(2.0, error_norm_clip=0.5, **overrides)
        (round_,) = events.bounded_rounds(mechanism, sampling, steps)
        return round_

    p = 512 / 60_000
    poisson, two, four, shuffled = SAMPLINGS
    assert rounds(two) == pytest.approx((2 * p, 2 / math.hypot(1, 0.5), 586))
    assert rounds(two, feedback_steps=2) == pytest.approx((2 * p, 2 / 1.5, 586))
    assert rounds(four) == pytest.approx((4 * p, 2 / math.hypot(1, 0.5), 293))
    spread = math.sqrt(1 + 0.25 / 3)
    assert rounds(four, feedback_steps=3) == pytest.approx((4 * p, 2 / spread, 293))
    assert rounds(poisson) == pytest.approx((p, 2 / 1.5, 1171))
    assert rounds(shuffled, steps=119) == pytest.approx((1.0, 2 / 1.5, 2))


def load_tf_privacy():
    """Its accounting library, or `None` where it cannot be installed (Python 3.12 and later)."""
    if importlib.util.find_spec("tensorflow_privacy") is None:
        return None
    # Its top-level import fails inside tensorflow_estimator; this switch is its own.
    sys.skip_tf_privacy_import = True
    try:
        from tensorflow_privacy.privacy.analysis import compute_dp_sgd_privacy_lib
    finally:
        del sys.skip_tf_privacy_import
    return compute_dp_sgd_privacy_lib


@pytest.mark.parametrize(
    "n, batch, noise_multiplier, epochs", [(60_000, 256, 1.1, 10), (29_404, 32, 1.3, 40)]
)
def test_dp_sgd_agrees_with_tf_privacy(n, batch, noise_multiplier, epochs):
    library = load_tf_privacy()
    steps = math.ceil(epochs * n / batch)
    if library is None:
        event = dp_accounting.PoissonSampledDpEvent(
            batch / n, dp_accounting.GaussianDpEvent(noise_multiplier)
        )
        accountant = rdp.RdpAccountant().compose(event, steps)
        theirs, order = accountant.get_epsilon_and_optimal_order(1e-5)
    else:
        theirs, order = library.compute_dp_sgd_privacy(n, batch, noise_multiplier, epochs, 1e-5)
    assert 5 < order < 64, "The two grids of orders must share the best one."
    for bound_residuals in (True, False):
        mechanism = make_mechanism(
            noise_multiplier, batch, error_norm_clip=0.0, bound_residuals=bound_residuals
        )
        ours = accounting.compute_epsilon(mechanism, PoissonSampling(n, batch), steps, 1e-5)
        assert ours == pytest.approx(theirs, rel=1e-6)
    if library is not None:
        text = library.compute_dp_sgd_privacy_statement(
            n, batch, epochs, noise_multiplier, 1e-5, used_microbatching=False
        )
        printed = [float(x) for x in re.findall(r"^\s*Epsilon [^\d]*?:?\s+([\d.]+)$", text, re.M)]
        shuffled = ShuffledEpochs(n, batch)
        once = accounting.compute_epsilon(mechanism, shuffled, shuffled.steps(epochs), 1e-5)
        assert printed == pytest.approx([once, theirs], rel=1e-3)


def test_case_08_shuffling_is_not_amplified():
    mechanism = make_mechanism(1.5)
    _, two, _, shuffled = SAMPLINGS
    steps = shuffled.steps(10)
    result = accounting.guarantee(mechanism, shuffled, steps, 1e-5, accountant="pld")
    assert result.neighbouring_relation == "replace_by_empty"
    assert "keeping their places" in str(result)

    # Ten Gaussian releases of sensitivity C1 + C2 = 2 are one with sqrt(10) times the ratio.
    ratio = math.sqrt(10) * 2 / 1.5
    exact = optimize.brentq(
        lambda e: (
            stats.norm.cdf(ratio / 2 - e / ratio)
            - math.exp(e) * stats.norm.cdf(-ratio / 2 - e / ratio)
            - 1e-5
        ),
        0,
        100,
    )
    assert exact <= result.epsilon * (1 + 1e-9) < exact * 1.001
    assert result.epsilon > 3 * accounting.compute_epsilon(mechanism, two, steps, 1e-5)


@pytest.mark.parametrize(
    "noise_multiplier, steps, delta", [(60.0, 1000, 1e-5), (0.15, 1000, 1e-5), (3.0, 200, 1e-9)]
)
def test_case_10_best_order_outside_the_default_grid_is_found(noise_multiplier, steps, delta):
    sampling = PoissonSampling(50_000, 1000)
    mechanism = make_mechanism(noise_multiplier, 1000, error_norm_clip=0.0)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        by_rdp = accounting.compute_epsilon(mechanism, sampling, steps, delta)
        by_pld = accounting.compute_epsilon(mechanism, sampling, steps, delta, accountant="pld")
    assert 0.8 * by_rdp < by_pld < by_rdp
    rounds = events.bounded_rounds(mechanism, sampling, steps)
    epsilon, order = renyi.renyi_epsilon(rounds, math.log(delta))
    for nearby in (1 + (order - 1) * 0.7, 1 + (order - 1) * 1.4):
        event = accounting.dp_event(mechanism, sampling, steps)
        nearby = round(nearby) if nearby > 11 else nearby
        assert rdp.RdpAccountant([nearby]).compose(event).get_epsilon(delta) > epsilon


def test_case_10_order_at_the_end_of_the_grid_warns():
    sampling = ShuffledEpochs(1000, 10)
    with pytest.warns(UserWarning, match="end of the grid of orders"):
        accounting.compute_epsilon(make_mechanism(1e-4, 10), sampling, 100, 1e-4)


@pytest.mark.parametrize("accountant", ["rdp", "pld"])
def test_epsilon_is_never_negative_and_0_without_steps(accountant):
    sampling = PoissonSampling(100, 1)
    compute = lambda *args: accounting.compute_epsilon(*args, accountant=accountant)
    assert 0 <= compute(make_mechanism(1e6, 1), sampling, 1, 9e-3) < 1e-3
    assert compute(make_mechanism(1.0, 1), sampling, 0, 1e-3) == 0.0
    assert compute(make_mechanism(0.0, 1), sampling, 0, 1e-3) == 0.0
    assert compute(make_mechanism(0.0, 1), sampling, 1, 1e-3) == math.inf


def test_rdp_does_not_round_a_small_epsilon_to_zero():
    # dp_accounting's bound by the Kullback-Leibler divergence answers 0 here or nearly so.
    mechanism = make_mechanism(1.0, 1, error_norm_clip=0.0)
    sampling = PoissonSampling(10**6, 1)
    by_rdp = accounting.compute_epsilon(mechanism, sampling, 1000, 1e-7)
    by_pld = accounting.compute_epsilon(mechanism, sampling, 1000, 1e-7, accountant="pld")
    assert by_rdp >= by_pld > 0


@pytest.mark.filterwarnings("ignore:The best Renyi order")
def test_pld_of_kept_rounds_is_what_dp_accounting_says_and_grows_with_every_step():
    sampling = CyclicPoissonSampling(60_000, 512, num_groups=4)
    mechanism = make_mechanism(error_norm_clip=1.0, feedback_steps=3, expected_batch_size=512)
    epsilons = []
    # Across several grids: epsilon grows by a factor of 6.
    for steps in (*range(4, 400, 44), *range(4, 400, 44)):
        epsilons.append(accounting.compute_epsilon(mechanism, sampling, steps, 1e-6, "pld"))
        event = accounting.dp_event(mechanism, sampling, steps)
        oracle = pld.PLDAccountant(value_discretization_interval=1e-4).compose(event)
        assert oracle.get_epsilon(1e-6) * (1 - 1e-6) <= epsilons[-1]
        assert epsilons[-1] <= oracle.get_epsilon(1e-6) * (1 + 1e-3)
    assert epsilons[:9] == sorted(epsilons[:9]) == epsilons[9:]


def test_pld_falls_back_on_rdp_with_a_warning():
    sampling = PoissonSampling(60_000, 512)
    mechanism = make_mechanism(0.01)
    by_rdp = accounting.compute_epsilon(mechanism, sampling, 10, 1e-5)
    with pytest.warns(UserWarning, match="too wide a range"):
        assert accounting.compute_epsilon(mechanism, sampling, 10, 1e-5, "pld") == by_rdp
    # A delta below the mass that dp_accounting cuts off cannot be resolved.
    mechanism = make_mechanism(2.0)
    by_rdp = accounting.compute_epsilon(mechanism, sampling, 100, 1e-25)
    with pytest.warns(UserWarning, match="does not resolve"):
        assert accounting.compute_epsilon(mechanism, sampling, 100, 1e-25, "pld") == by_rdp


@pytest.mark.parametrize("target", [0.01, 1000.0])
def test_pld_keeps_its_grid_small_from_epsilon_001_to_1000(target):
    sampling = PoissonSampling(60_000, 512)
    noise = accounting.calibrate_noise_multiplier(target, 1e-5, sampling, 1171)
    mechanism = make_mechanism(noise)
    (round_,) = events.bounded_rounds(mechanism, sampling, 1171)
    interval = loss_distribution.loss_interval(round_.noise_multiplier, target)
    loss_range = (1 + 20 * round_.noise_multiplier) / round_.noise_multiplier**2
    assert loss_range / interval < 200_000
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        by_pld = accounting.compute_epsilon(mechanism, sampling, 1171, 1e-5, accountant="pld")
    assert 0.85 * target < by_pld < target


def test_a_thousand_queries_change_nothing_and_reuse_the_divergences():
    mechanism = make_mechanism(2.0)
    sampling = CyclicPoissonSampling(60_000, 512)
    first = accounting.compute_epsilon(mechanism, sampling, 1171, 1e-5)
    before = renyi.renyi_divergences.cache_info().misses
    again = [accounting.compute_epsilon(mechanism, sampling, s, 1e-5) for s in range(171, 1172)]
    assert again[-1] == first
    assert again == sorted(again)
    assert renyi.renyi_divergences.cache_info().misses == before


def test_unbounded_residuals_cost_every_step():
    sampling = PoissonSampling(60_000, 512)
    plain = make_mechanism(2.0, error_norm_clip=0.0)
    tiny, small = (
        make_mechanism(2.0, error_norm_clip=c, bound_residuals=False) for c in (1e-7, 1e-4)
    )
    dp_sgd, with_tiny, with_small = (
        accounting.compute_epsilon(m, sampling, 1171, 1e-5) for m in (plain, tiny, small)
    )
    assert dp_sgd < with_tiny < 1.1 * dp_sgd
    assert with_small > 5 * dp_sgd
    # Every split of the noise is valid; the one that was found is nearly the best one.
    shares = [i / 400 for i in range(1, 400)]
    best = min(
        renyi.renyi_epsilon(
            events.unbounded_rounds(small, sampling, 1171, error_share=share), math.log(1e-5)
        )[0]
        for share in shares[::20]
    )
    assert with_small <= best * 1.001


def test_unbounded_residuals_tight_form_where_dp_accounting_has_it():
    mechanism = make_mechanism(2.0, error_norm_clip=1e-4, bound_residuals=False)
    for sampling in SAMPLINGS[:3]:
        event = events.mixture_event(mechanism, sampling, 1171)
        by_rdp = accounting.compute_epsilon(mechanism, sampling, 1171, 1e-5)
        by_pld = accounting.compute_epsilon(mechanism, sampling, 1171, 1e-5, accountant="pld")
        assert by_pld < by_rdp
        if DP_ACCOUNTING_VERSION < (0, 4, 4):
            assert event is None
            continue
        assert accounting.dp_event(mechanism, sampling, 1171, accountant="pld") == event
        split = accounting.dp_event(mechanism, sampling, 1171, accountant="rdp")
        by_split = pld.PLDAccountant(value_discretization_interval=1e-3).compose(split)
        assert by_pld < by_split.get_epsilon(1e-5)
        # At least what the shift of 2 C2 in every step costs alone.
        ratio = math.sqrt(1171) * 2e-4 / mechanism.noise_stddev
        gaussian = pld.PLDAccountant().compose(dp_accounting.GaussianDpEvent(1 / ratio))
        assert by_pld > gaussian.get_epsilon(1e-5)


def test_unbounded_residuals_in_shuffled_epochs_are_gaussian():
    sampling = ShuffledEpochs(1000, 100)
    mechanism = make_mechanism(3.0, 100, error_norm_clip=0.001, bound_residuals=False)
    rounds = events.unbounded_rounds(mechanism, sampling, 25)
    assert [r.count for r in rounds] == [3, 22]
    assert rounds[0].noise_multiplier == pytest.approx(0.03 / (0.002 + 0.01))
    assert rounds[1].noise_multiplier == pytest.approx(0.03 / 0.002)


def test_dp_event_is_taken_by_both_accountants():
    for sampling in SAMPLINGS:
        for overrides in ({}, {"bound_residuals": False, "error_norm_clip": 1e-4}):
            mechanism = make_mechanism(**overrides)
            for accountant in (rdp.RdpAccountant(), pld.PLDAccountant()):
                assert accountant.supports(accounting.dp_event(mechanism, sampling, 10))
    assert accounting.dp_event(mechanism, sampling, 0) == dp_accounting.NoOpDpEvent()
    silent = make_mechanism(0.0)
    assert accounting.dp_event(silent, sampling, 1) == dp_accounting.NonPrivateDpEvent()


def test_neighbouring_relations_are_named_and_refused():
    mechanism = make_mechanism(2.0)
    poisson, _, _, shuffled = SAMPLINGS
    result = accounting.guarantee(mechanism, poisson, 100, 1e-5)
    assert result.neighbouring_relation == "add_or_remove_one"
    assert "added or removed" in str(result)
    replaced = accounting.guarantee(
        mechanism, poisson, 100, 1e-5, neighbouring_relation="replace_one"
    )
    assert replaced.neighbouring_relation == "replace_one"
    assert result.epsilon < replaced.epsilon
    with pytest.raises(AccountingError, match="`ShuffledEpochs`: adding one example moves"):
        accounting.guarantee(
            mechanism, shuffled, 100, 1e-5, neighbouring_relation="add_or_remove_one"
        )
    with pytest.raises(AccountingError, match="'swap'"):
        accounting.guarantee(mechanism, poisson, 100, 1e-5, neighbouring_relation="swap")
    # Two moves of about 1000 each: the delta left for the second is too small for a float.
    exposed = accounting.compute_epsilon(
        make_mechanism(0.5), poisson, 1171, 1e-5, neighbouring_relation="replace_one"
    )
    assert 500 < exposed < math.inf
    # Exchanging an example doubles the sensitivity where nothing is amplified.
    half = make_mechanism(1.0)
    assert accounting.compute_epsilon(
        mechanism, shuffled, 100, 1e-5, neighbouring_relation="replace_one"
    ) == accounting.compute_epsilon(half, shuffled, 100, 1e-5)


def test_case_11_delta_not_below_one_over_n_is_refused():
    mechanism, sampling = make_mechanism(2.0, 10), PoissonSampling(1000, 10)
    for delta in (1e-3, 0.5, 0.0, -1e-5, math.nan, "1e-5"):
        with pytest.raises(AccountingError, match="delta"):
            accounting.compute_epsilon(mechanism, sampling, 10, delta)
    accounting.compute_epsilon(mechanism, sampling, 10, 0.999e-3)


def test_contradictions_are_refused():
    mechanism, sampling = make_mechanism(2.0, 10), PoissonSampling(1000, 10)
    with pytest.raises(AccountingError, match="expected_batch_size=11"):
        accounting.compute_epsilon(make_mechanism(2.0, 11), sampling, 10, 1e-5)
    for steps in (-1, 1.5, "10", True):
        with pytest.raises(AccountingError, match="steps"):
            accounting.compute_epsilon(mechanism, sampling, steps, 1e-5)
    with pytest.raises(AccountingError, match="accountant='prv'"):
        accounting.compute_epsilon(mechanism, sampling, 10, 1e-5, accountant="prv")
    with pytest.raises(AccountingError, match="mechanism=2.0"):
        accounting.compute_epsilon(2.0, sampling, 10, 1e-5)

    class Lookalike:
        num_examples, expected_batch_size, num_groups = 1000, 10, 1
        sampling_probability = 0.01

    with pytest.raises(AccountingError, match="Lookalike"):
        accounting.compute_epsilon(mechanism, Lookalike(), 10, 1e-5)


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__]))
