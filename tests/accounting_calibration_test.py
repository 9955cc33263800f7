# Copyright 2026 The dice_tf Authors.
# SPDX-License-Identifier: Apache-2.0
"""Calibration, and how epsilon depends on each parameter."""

import dataclasses

import hypothesis
from hypothesis import strategies as st
import pytest

from dice_tf import accounting
from dice_tf.errors import AccountingError
from dice_tf.mechanism import DiceMechanism
from dice_tf.sampling import CyclicPoissonSampling, PoissonSampling, ShuffledEpochs

SAMPLINGS = [
    PoissonSampling(60_000, 512),
    CyclicPoissonSampling(60_000, 512),
    ShuffledEpochs(60_000, 512),
]


@pytest.mark.parametrize("sampling", SAMPLINGS, ids=lambda s: type(s).__name__)
@pytest.mark.parametrize("target", [0.01, 1.0, 30.0, 1000.0])
def test_calibrated_noise_is_enough_and_no_more(target, sampling):
    noise = accounting.calibrate_noise_multiplier(
        target, 1e-5, sampling, 1171, l2_norm_clip=0.3, error_norm_clip=0.1
    )

    def epsilon(noise):
        mechanism = DiceMechanism(
            l2_norm_clip=0.3,
            error_norm_clip=0.1,
            noise_multiplier=noise,
            expected_batch_size=512,
        )
        return accounting.compute_epsilon(mechanism, sampling, 1171, 1e-5)

    assert epsilon(noise) <= target < epsilon(0.999 * noise)


def test_calibration_by_pld_needs_less_noise():
    sampling = SAMPLINGS[1]
    by_rdp = accounting.calibrate_noise_multiplier(2.7, 1e-5, sampling, 1171)
    by_pld = accounting.calibrate_noise_multiplier(2.7, 1e-5, sampling, 1171, accountant="pld")
    # The table of accounting_tables_test.py: 0.685 of C1 + C2.
    assert by_pld == pytest.approx(2 * 0.685, rel=0.01)
    assert by_pld < by_rdp
    mechanism = DiceMechanism(l2_norm_clip=1.0, noise_multiplier=by_pld, expected_batch_size=512)
    assert accounting.compute_epsilon(mechanism, sampling, 1171, 1e-5, "pld") <= 2.7


def test_calibration_of_unbounded_residuals_and_of_another_relation():
    sampling = SAMPLINGS[0]
    plain = accounting.calibrate_noise_multiplier(4.0, 1e-5, sampling, 100, error_norm_clip=0.0)
    unbounded = accounting.calibrate_noise_multiplier(
        4.0, 1e-5, sampling, 100, error_norm_clip=1e-4, bound_residuals=False
    )
    exchanged = accounting.calibrate_noise_multiplier(
        4.0, 1e-5, sampling, 100, error_norm_clip=0.0, neighbouring_relation="replace_one"
    )
    assert plain < unbounded and plain < exchanged
    mechanism = DiceMechanism(
        l2_norm_clip=1.0,
        error_norm_clip=1e-4,
        bound_residuals=False,
        noise_multiplier=unbounded,
        expected_batch_size=512,
    )
    assert 3.99 < accounting.compute_epsilon(mechanism, sampling, 100, 1e-5) <= 4.0


@pytest.mark.parametrize("accountant", ["rdp", "pld"])
@pytest.mark.parametrize("sampling", SAMPLINGS, ids=lambda s: type(s).__name__)
def test_calibrated_steps_are_the_most(sampling, accountant):
    mechanism = DiceMechanism(l2_norm_clip=1.0, noise_multiplier=6.0, expected_batch_size=512)
    steps = accounting.calibrate_steps(2.0, 1e-5, mechanism, sampling, accountant)
    epsilon = lambda steps: accounting.compute_epsilon(mechanism, sampling, steps, 1e-5, accountant)
    assert epsilon(steps) <= 2.0 < epsilon(steps + 1)


@pytest.mark.parametrize("accountant", ["rdp", "pld"])
@pytest.mark.parametrize("epochs", [1, 7, 20])
def test_calibrated_noise_lets_all_steps_be_made(epochs, accountant):
    # The callback asks for the affordable steps, which must not come out as one too few.
    for sampling in SAMPLINGS:
        steps = sampling.steps(epochs)
        for target in (0.3, 3.0):
            noise = accounting.calibrate_noise_multiplier(
                target, 1e-6, sampling, steps, accountant=accountant
            )
            mechanism = DiceMechanism(
                l2_norm_clip=1.0, noise_multiplier=noise, expected_batch_size=512
            )
            affordable = accounting.calibrate_steps(target, 1e-6, mechanism, sampling, accountant)
            assert steps <= affordable


def test_calibrated_batch_size_is_the_most():
    sampling = CyclicPoissonSampling(60_000, 100)
    mechanism = DiceMechanism(
        l2_norm_clip=1.0, noise_multiplier=4.0, expected_batch_size=100, num_microbatches=10
    )

    def epsilon(batch):
        return accounting.compute_epsilon(
            dataclasses.replace(mechanism, expected_batch_size=batch),
            CyclicPoissonSampling(60_000, batch),
            100,
            1e-5,
        )

    batch = accounting.calibrate_batch_size(2.0, 1e-5, mechanism, sampling, 100)
    assert batch % 10 == 0
    assert epsilon(batch) <= 2.0 < epsilon(batch + 10)
    silent = dataclasses.replace(mechanism, noise_multiplier=1e4, num_microbatches=None)
    assert accounting.calibrate_batch_size(2.0, 1e-5, silent, sampling, 100) == 30_000


def test_budgets_that_cannot_be_met_are_refused():
    sampling = SAMPLINGS[0]
    silent = DiceMechanism(l2_norm_clip=1.0, noise_multiplier=0.0, expected_batch_size=512)
    with pytest.raises(AccountingError, match="does not allow one optimizer step"):
        accounting.calibrate_steps(2.0, 1e-5, silent, sampling)
    with pytest.raises(AccountingError, match="does not allow one batch"):
        accounting.calibrate_batch_size(2.0, 1e-5, silent, sampling, 10)
    for target in (0.0, -1.0, float("inf"), "2"):
        with pytest.raises(AccountingError, match="target_epsilon"):
            accounting.calibrate_noise_multiplier(target, 1e-5, sampling, 10)
    with pytest.raises(AccountingError, match="steps"):
        accounting.calibrate_noise_multiplier(1.0, 1e-5, sampling, 0)
    with pytest.raises(AccountingError, match="sampling"):
        accounting.calibrate_noise_multiplier(1.0, 1e-5, 0.01, 10)


# Few distinct values: the divergences of a value are computed once.
NOISES = st.sampled_from([0.8, 1.0, 1.5, 2.5, 4.0])
ERROR_CLIPS = st.sampled_from([0.0, 0.25, 0.5, 1.0])
BATCHES = st.sampled_from([8, 16, 64])
DELTAS = st.sampled_from([1e-9, 1e-7, 1e-5, 9e-4])
STEPS = st.integers(1, 5000)
KINDS = st.sampled_from([PoissonSampling, CyclicPoissonSampling, ShuffledEpochs])


def epsilon_of(kind, noise, error_clip, batch, delta, steps, **overrides):
    mechanism = DiceMechanism(
        l2_norm_clip=1.0,
        error_norm_clip=error_clip,
        noise_multiplier=noise,
        expected_batch_size=batch,
        **overrides,
    )
    return accounting.compute_epsilon(mechanism, kind(1000, batch), steps, delta)


@hypothesis.given(KINDS, NOISES, ERROR_CLIPS, BATCHES, DELTAS, STEPS, st.data())
@hypothesis.settings(max_examples=60)
def test_epsilon_is_monotone(kind, noise, error_clip, batch, delta, steps, data):
    start = (kind, noise, error_clip, batch, delta, steps)
    position, values, sign = data.draw(
        st.sampled_from(
            [
                (1, NOISES, -1),
                (2, ERROR_CLIPS, 1),
                (3, BATCHES, 1),
                (4, DELTAS, -1),
                (5, STEPS, 1),
            ]
        )
    )
    other = list(start)
    other[position] = data.draw(values)
    first, second = epsilon_of(*start), epsilon_of(*other)
    if other[position] == start[position]:
        assert first == second
    else:
        grew = (other[position] > start[position]) == (sign > 0)
        smaller, larger = (first, second) if grew else (second, first)
        assert smaller <= larger * (1 + 1e-12)


@hypothesis.given(st.sampled_from([0.0, 1e-7, 1e-5, 1e-3]), STEPS, STEPS)
@hypothesis.settings(max_examples=15)
def test_epsilon_of_unbounded_residuals_is_monotone(error_clip, steps, more):
    smaller, larger = (
        epsilon_of(PoissonSampling, 2.0, error_clip, 8, 1e-5, s, bound_residuals=False)
        for s in sorted((steps, more))
    )
    assert smaller <= larger * (1 + 1e-3)


@hypothesis.given(KINDS, st.integers(1, 40), NOISES)
@hypothesis.settings(max_examples=20)
def test_case_12_steps_and_epochs_mean_the_same_everywhere(kind, epochs, noise):
    sampling = kind(1000, 64)
    mechanism = DiceMechanism(l2_norm_clip=1.0, noise_multiplier=noise, expected_batch_size=64)
    steps = sampling.steps(epochs)
    event = accounting.dp_event(mechanism, sampling, steps)
    assert event.count == sampling.rounds(steps)
    assert getattr(event.event, "sampling_probability", 1.0) == sampling.sampling_probability
    # Each way to ask about the budget of these epochs gives the same answer.
    epsilon = accounting.compute_epsilon(mechanism, sampling, steps, 1e-5)
    affordable = accounting.calibrate_steps(epsilon, 1e-5, mechanism, sampling)
    assert steps <= affordable < steps + sampling.steps_per_round
    # An epoch is one expected use of each example, whatever the sampling.
    uses = sampling.rounds(steps) * sampling.sampling_probability
    assert uses == pytest.approx(epochs, rel=0.15)


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__]))
