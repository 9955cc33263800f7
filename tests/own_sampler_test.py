# Copyright 2026 The dice_tf Authors.
# SPDX-License-Identifier: Apache-2.0
"""A new sampler is one class, here and nowhere else: its draws, and what they cost."""

import dataclasses
import hashlib
import math
from typing import NamedTuple

import dp_accounting
from dp_accounting import pld
import keras
import numpy as np
import pytest
from scipy import optimize, stats

import dice_tf
from dice_tf import accounting
from dice_tf.accounting import Round
from dice_tf.errors import AccountingError, SamplingError, UnaccountedStepsWarning
from dice_tf.ledger import provenance
from dice_tf.sampling import (
    CyclicPoissonSampling,
    PoissonSampling,
    RandomAllocation,
    ShuffledEpochs,
)
from dice_tf.sampling.padding import padded_draws

N, B, DELTA = 64, 8, 1e-3
RNG = np.random.default_rng(0)
X, Y = RNG.normal(size=(N, 3)).astype("float32"), RNG.normal(size=(N, 1)).astype("float32")


@dataclasses.dataclass(frozen=True)
class FixedSize(dice_tf.Sampling):
    """Each step draws exactly B examples. No amplification is claimed: every step counts."""

    seed: int | None = None

    own_coins = False

    def draw_plan(self, planned_steps, replicas=1):
        size = self.expected_batch_size
        pick = lambda pool, rng, epoch, cycle: rng.choice(pool, size, replace=False)
        return padded_draws(self, pick, planned_steps, replicas)

    def accounted_rounds(self, noise_multiplier, steps):
        return [Round(1.0, noise_multiplier, steps)]

    def description(self, steps):
        return f"Every step draws {self.expected_batch_size} examples: {steps} full releases."


@dataclasses.dataclass(frozen=True)
class TwoSpeeds(dice_tf.Sampling):
    """Two groups take turns; in every second cycle of an epoch, coins are `rarer` times as rare."""

    num_groups: int = 2
    rarer: int = 4
    seed: int | None = None

    own_coins = True

    def _probability(self, cycle):
        return self.sampling_probability / (self.rarer if cycle % 2 else 1)

    def draw_plan(self, planned_steps, replicas=1):
        pick = lambda pool, rng, epoch, cycle: np.flatnonzero(
            rng.random(pool) < self._probability(cycle)
        )
        return padded_draws(self, pick, planned_steps, replicas)

    def accounted_rounds(self, noise_multiplier, steps):
        cycles = range(0, steps, self.num_groups)
        rare = sum(step % self.steps_per_epoch // self.num_groups % 2 for step in cycles)
        counts = {0: len(cycles) - rare, 1: rare}
        return [Round(self._probability(c), noise_multiplier, n) for c, n in counts.items() if n]

    def description(self, steps):
        return f"Every example has a coin in each cycle, every second time {self.rarer} x rarer."


class ADerivedOne(PoissonSampling):
    """Draws as its parent does, which nobody has looked at."""


@dataclasses.dataclass(frozen=True)
class DerivedFromOwn(FixedSize):
    def draw_plan(self, planned_steps, replicas=1):
        first = lambda pool, rng, epoch, cycle: np.arange(2 * self.expected_batch_size)
        return padded_draws(self, first, planned_steps, replicas)


class WithAPrice(ADerivedOne):
    """A derived class that says itself what it costs: twice its parent."""

    def accounted_rounds(self, noise_multiplier, steps):
        return 2 * super().accounted_rounds(noise_multiplier, steps)


def make_model(plan=None, **arguments):
    keras.utils.set_random_seed(0)
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
    if plan is None:
        arguments = dict(noise_multiplier=4.0, expected_batch_size=B, **arguments)
    model.compile(dice_tf.DiceSGDOptimizer(0.1, l2_norm_clip=0.1, plan=plan, **arguments), "mse")
    return model


def make_mechanism(noise_multiplier=4.0, **arguments):
    return dice_tf.DiceMechanism(
        l2_norm_clip=0.1,
        noise_multiplier=noise_multiplier,
        expected_batch_size=B,
        **arguments,
    )


def gaussian_epsilon(shift_over_noise, delta):
    """Returns epsilon of one Gaussian release, from the exact curve (Balle and Wang, 2018)."""
    m = shift_over_noise
    excess = lambda e: (
        stats.norm.cdf(m / 2 - e / m) - math.exp(e) * stats.norm.cdf(-m / 2 - e / m) - delta
    )
    return optimize.brentq(excess, 0, 100)


# An example may be back at the next step, so one entry moves C1 + C2 = 2 C1.
FIXED_SHIFT = lambda steps, noise=4.0: 2 * math.sqrt(steps) / noise


def test_a_sampler_without_amplification_trains_and_has_an_epsilon():
    sampling, model = FixedSize(N, B, seed=1), make_model()
    callback = dice_tf.EpsilonCallback(sampling, DELTA, accountant="pld")
    history = model.fit(sampling.dataset(X, Y), epochs=2, verbose=0, callbacks=[callback])
    assert callback.accounted_steps() == 16 and sampling.steps_per_epoch == 8
    expected = gaussian_epsilon(FIXED_SHIFT(16), DELTA)
    assert callback.epsilon() == pytest.approx(expected, rel=5e-3)
    assert dice_tf.run_epsilon(model, sampling, DELTA, "pld") == callback.epsilon()
    # After half of the steps it was less: nothing is taken from another number of steps.
    half = gaussian_epsilon(FIXED_SHIFT(8), DELTA)
    assert history.history["epsilon"] == pytest.approx([half, expected], rel=5e-3)
    weights = np.concatenate([w for _, _, w in sampling.dataset(X, Y)])
    assert weights.sum() == N and set(weights) == {0.0, 1.0}


class FullReleases(NamedTuple):
    """A round of a user's own, which costs more than a `Round` of the same fields."""

    sampling_probability: float
    noise_multiplier: float
    count: int

    @property
    def event(self):
        event = dp_accounting.GaussianDpEvent(self.noise_multiplier)
        return dp_accounting.SelfComposedDpEvent(event, self.count)


class DerivedRound(Round):
    event = FullReleases.event


@pytest.mark.parametrize("accountant", ["rdp", "pld"])
@pytest.mark.parametrize("kind", [FullReleases, DerivedRound])
def test_rounds_of_ones_own_are_refused(monkeypatch, kind, accountant):
    """Nobody would look at what they say of themselves: 0.6 for 7.6 here."""
    rounds = lambda self, noise_multiplier, steps: [kind(0.1, noise_multiplier, steps)]
    monkeypatch.setattr(FixedSize, "accounted_rounds", rounds)
    run = make_mechanism(), FixedSize(N, B), 16
    for ask in (
        lambda: accounting.compute_epsilon(*run, DELTA, accountant),
        lambda: accounting.compose_epsilon([run], DELTA, accountant),
        lambda: accounting.selection_epsilon(*run, DELTA, 5.0, accountant=accountant),
    ):
        with pytest.raises(
            AccountingError, match=rf"`FixedSize.accounted_rounds`.*{kind.__name__}"
        ):
            ask()


def test_its_statement_names_its_draws_and_its_neighbours():
    text = accounting.privacy_statement(make_mechanism(), FixedSize(N, B), 16, DELTA)
    squeezed = " ".join(text.split())
    assert "Every step draws 8 examples: 16 full releases." in squeezed
    assert "sampling FixedSize" in squeezed and "(replace_by_empty)" in squeezed
    assert "draws are secret not needed" in squeezed and "drawn as here" in squeezed


def test_its_noise_and_steps_are_calibrated():
    target = gaussian_epsilon(FIXED_SHIFT(16, 9.0), DELTA)
    noise = accounting.calibrate_noise_multiplier(
        target, DELTA, FixedSize(N, B), 16, l2_norm_clip=0.1, accountant="pld"
    )
    assert noise == pytest.approx(9.0, rel=5e-3)
    steps = accounting.calibrate_steps(
        1.005 * target, DELTA, make_mechanism(9.0), FixedSize(N, B), "pld"
    )
    assert steps == 16
    # No amplification: the batch size has no part in it.
    arguments = 2 * target, DELTA, make_mechanism(9.0), FixedSize(N, B), 16
    assert accounting.calibrate_batch_size(*arguments) == N


def test_an_exchange_moves_twice_as_far():
    by = lambda noise, *relation: accounting.compute_epsilon(
        make_mechanism(noise), FixedSize(N, B), 16, DELTA, "rdp", *relation
    )
    assert by(8.0, "replace_one") == by(4.0)
    with pytest.raises(AccountingError, match="`FixedSize`: adding one example moves the others"):
        by(8.0, "add_or_remove_one")


def test_runs_of_it_compose_with_others():
    fixed, shuffled = FixedSize(N, B), ShuffledEpochs(N, B)
    runs = [(make_mechanism(), fixed, 16), (make_mechanism(), shuffled, 16)]
    # Two epochs of the second are two rounds.
    expected = gaussian_epsilon(FIXED_SHIFT(18), DELTA)
    assert accounting.compose_epsilon(runs, DELTA, "pld") == pytest.approx(expected, rel=5e-3)


def test_a_plan_takes_it():
    sampling = FixedSize(N, B)
    plan = dice_tf.PrivacyPlan(sampling=sampling, epochs=2, target_epsilon=3.0, delta=DELTA)
    model = make_model(plan)
    model.fit(plan.dataset(X, Y), epochs=2, verbose=0, callbacks=[plan.callback()])
    # DP-SGD, so one entry moves C1.
    exact = gaussian_epsilon(4 / plan.noise_multiplier, DELTA)
    assert plan.epsilon() == pytest.approx(exact, rel=5e-3) and plan.epsilon() <= 3.0
    assert "FixedSize" in str(plan)


def test_what_its_price_is_not_proven_for_is_refused():
    for arguments in (dict(bound_residuals=False), dict(num_microbatches=4)):
        with pytest.raises(AccountingError, match="`FixedSize` is accounted with bounded"):
            accounting.compute_epsilon(make_mechanism(**arguments), FixedSize(N, B), 8, DELTA)
    with pytest.raises(AccountingError, match="`FixedSize` is accounted with bounded"):
        accounting.calibrate_noise_multiplier(
            2.0, DELTA, FixedSize(N, B), 8, error_norm_clip=0.01, bound_residuals=False
        )


def test_its_batches_are_not_accounted_by_other_samplers():
    sampling, model = FixedSize(N, B), make_model()
    for claim in (ShuffledEpochs(N, B), PoissonSampling(N, B)):
        with pytest.raises(SamplingError):
            callback = dice_tf.EpsilonCallback(claim, DELTA)
            model.fit(sampling.dataset(X, Y), verbose=0, callbacks=[callback])
    with pytest.warns(UnaccountedStepsWarning):
        model.fit(sampling.dataset(X, Y), verbose=0)
    assert dice_tf.run_epsilon(model, sampling, DELTA) > 0
    for claim in (ShuffledEpochs(N, B), PoissonSampling(N, B), FixedSize(N, B // 2)):
        with pytest.raises((SamplingError, AccountingError)):
            dice_tf.run_epsilon(model, claim, DELTA)


# --- Another structure, amplified: a price of two kinds of rounds ------------------------


def test_a_price_of_two_kinds_of_rounds_is_composed():
    sampling, mechanism = TwoSpeeds(N, B), make_mechanism()
    q = 2 * B / N
    # C1 and C2 = C1 in quadrature: m = 2 separates entries by more than one step of feedback.
    noise = 4.0 / math.sqrt(2)
    rounds = dp_accounting.ComposedDpEvent(
        [
            dp_accounting.SelfComposedDpEvent(
                dp_accounting.PoissonSampledDpEvent(p, dp_accounting.GaussianDpEvent(noise)), 4
            )
            for p in (q, q / 4)
        ]
    )
    theirs = pld.PLDAccountant(value_discretization_interval=1e-4).compose(rounds)
    ours = accounting.compute_epsilon(mechanism, sampling, 16, DELTA, "pld")
    assert ours == pytest.approx(theirs.get_epsilon(DELTA), rel=2e-3)
    # Below the same sampler with all coins as often, above the one with all as rare.
    usual = CyclicPoissonSampling(N, B)
    often = accounting.compute_epsilon(mechanism, usual, 16, DELTA, "pld")
    assert ours < 0.99 * often


def test_it_trains_and_every_number_of_steps_has_its_own_epsilon():
    sampling, model = TwoSpeeds(N, B), make_model()
    callback = dice_tf.EpsilonCallback(sampling, DELTA)
    data = sampling.dataset(X, Y)
    model.fit(data, epochs=2, verbose=0, callbacks=[callback])
    # Asked before for others, by the same callback.
    for steps in (16, 2, 4, 8):
        expected = accounting.compute_epsilon(model.optimizer.mechanism, sampling, steps, DELTA)
        assert callback._epsilon_after(steps) == expected
    text = callback.statement()
    assert "every second time 4 x rarer" in " ".join(text.split())
    with pytest.raises(SamplingError, match="other parameters"):
        dice_tf.run_epsilon(model, TwoSpeeds(N, B, rarer=100), DELTA)


def test_its_coins_are_as_rare_as_its_price_says():
    sampling = TwoSpeeds(2000, 200, seed=3)
    _, draw, _ = sampling.draw_plan(20)
    begin = sampling.draw_plan(20)[0]
    drawn = {0: 0.0, 1: 0.0}
    for _ in range(10):
        iteration = begin()
        for step in range(sampling.steps_per_epoch):
            drawn[step // 2 % 2] += draw(iteration, step)[1].sum()
    # Ten steps an epoch: cycles 0, 2, 4 and cycles 1, 3, of 2,000 coins each.
    for parity, cycles in ((0, 3), (1, 2)):
        coins, p = 10 * cycles * 2000, 0.2 / (4 if parity else 1)
        assert abs(drawn[parity] - coins * p) < 5 * math.sqrt(coins * p * (1 - p))


def test_an_exchange_is_a_removal_and_an_addition_where_coins_are_drawn():
    one, exchange = (
        accounting.compute_epsilon(make_mechanism(), TwoSpeeds(N, B), 16, DELTA, "rdp", relation)
        for relation in (None, "replace_one")
    )
    assert 1.5 * one < exchange < 3 * one


# --- What is no sampler, or has no price -------------------------------------------------


@pytest.mark.parametrize("sampling", [ADerivedOne(N, B), DerivedFromOwn(N, B)], ids=["", "own"])
def test_a_derived_class_has_no_price(sampling):
    model = make_model()
    refused = pytest.raises(AccountingError, match="not of a class derived from them")
    for ask in (
        lambda: accounting.compute_epsilon(make_mechanism(), sampling, 8, DELTA),
        lambda: accounting.privacy_statement(make_mechanism(), sampling, 8, DELTA),
        lambda: accounting.calibrate_noise_multiplier(2.0, DELTA, sampling, 8),
        lambda: accounting.compose_epsilon([(make_mechanism(), sampling, 8)], DELTA),
        lambda: dice_tf.EpsilonCallback(sampling, DELTA),
        lambda: dice_tf.PrivacyPlan(sampling=sampling, epochs=2, noise_multiplier=4.0),
        lambda: model.fit(sampling.dataset(X, Y), verbose=0),
    ):
        with refused:
            ask()
    assert int(model.optimizer.iterations) == 0


def test_a_derived_class_with_a_price_of_its_own_has_that():
    by = lambda sampling, steps: accounting.compute_epsilon(
        make_mechanism(), sampling, steps, DELTA
    )
    assert by(WithAPrice(N, B), 8) == pytest.approx(by(PoissonSampling(N, B), 16), rel=1e-12)


@pytest.mark.parametrize("left_out", sorted(dice_tf.Sampling.__abstractmethods__))
def test_a_class_without_one_of_the_parts_cannot_be_made(left_out):
    parts = {name: vars(FixedSize)[name] for name in dice_tf.Sampling.__abstractmethods__}
    whole = type("Whole", (dice_tf.Sampling,), parts)
    assert whole(N, B).steps_per_epoch == 8
    del parts[left_out]
    with pytest.raises(TypeError, match=left_out):
        type("Part", (dice_tf.Sampling,), parts)(N, B)


def test_names_in_records_tell_samplers_apart():
    impostor = dataclasses.make_dataclass(
        "PoissonSampling", [("seed", int, None)], bases=(FixedSize,), frozen=True
    )
    samplings = [
        PoissonSampling(N, B), CyclicPoissonSampling(N, B), RandomAllocation(N, B),
        ShuffledEpochs(N, B), FixedSize(N, B), TwoSpeeds(N, B), TwoSpeeds(N, B, rarer=3),
        ADerivedOne(N, B), impostor(N, B),
    ]  # fmt: skip
    names = [provenance.sampling_name(sampling) for sampling in samplings]
    assert len(set(names)) == len(names)
    # A seed says nothing of the cost. Files of before hold these very names.
    assert provenance.sampling_name(TwoSpeeds(N, B, seed=7)) == names[5]
    digest = hashlib.sha256(repr(("CyclicPoissonSampling", N, B, 2)).encode()).digest()
    assert names[1] == int.from_bytes(digest[:4], "little") >> 2


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__]))
