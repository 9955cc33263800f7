# Copyright 2026 The dice_tf Authors.
# SPDX-License-Identifier: Apache-2.0
"""The paper's closed form, and the two defects that make it no guarantee."""

import math

from dp_accounting import rdp
import numpy as np
import pytest

from dice_tf import accounting
from dice_tf.errors import AccountingError
from dice_tf.mechanism import DiceMechanism
from dice_tf.sampling import PoissonSampling

N, B, T, DELTA = 50_000, 1000, 150, 1e-5


def counterexample(noise_stddev, **overrides):
    arguments = dict(
        num_examples=N,
        expected_batch_size=B,
        steps=T,
        error_norm_clip=1 / B,
        window=141,
        threshold=6.75,
    )
    return accounting.counterexample_epsilon_lower_bound(
        noise_stddev, DELTA, **{**arguments, **overrides}
    )


def test_closed_form():
    by_hand = math.sqrt(32 * T * 3.0 * math.log(1e5)) / (N * 2.0)
    assert accounting.paper_noise_stddev(2.0, DELTA, N, T) == pytest.approx(by_hand, rel=1e-12)
    # G' = 0.7 + 0.4 - 0.5 is below C = 1.
    g_tilde = 0.5**2 + 2 * 0.6**2
    noise_stddev = accounting.paper_noise_stddev(
        2.0,
        DELTA,
        N,
        T,
        l2_norm_clip=0.5,
        feedback_clip=1.0,
        gradient_bound=0.7,
        gradient_deviation=0.4,
    )
    assert noise_stddev == pytest.approx(by_hand * math.sqrt(g_tilde / 3.0), rel=1e-12)
    assert accounting.paper_epsilon(by_hand, DELTA, N, T) == pytest.approx(2.0, rel=1e-12)


def test_first_defect_the_papers_own_sum_gives_3_instead_of_2():
    noise_stddev = accounting.paper_noise_stddev(2.0, DELTA, N, T)
    epsilon = accounting.paper_epsilon(noise_stddev, DELTA, N, T, form="renyi")
    assert epsilon == pytest.approx(math.sqrt(2) * 2 + 4 / (2 * math.log(1e5)), rel=1e-12)
    assert round(epsilon, 2) == 3.0
    # The same by brute force over orders, and even the better conversion stays above 2.
    orders = np.linspace(1.01, 60, 20_000)
    divergences = 16 * orders * T * 3.0 / (noise_stddev**2 * N**2)
    assert (divergences + math.log(1e5) / (orders - 1)).min() == pytest.approx(epsilon, rel=1e-5)
    better, _ = rdp.compute_epsilon(list(orders), list(divergences), DELTA)
    assert 2.5 < better < epsilon


def test_second_defect_the_counterexample():
    noise_stddev = accounting.paper_noise_stddev(2.0, DELTA, N, T)
    result = counterexample(noise_stddev)
    assert result.true_positive_rate == pytest.approx(1.99e-5, rel=2e-3)
    assert result.false_positive_rate == pytest.approx(7.4e-12, rel=2e-3)
    assert 14.1 <= result.epsilon < 14.2
    # Under the condition C1 <= C2 = C/B of the theorem it is worse: C1 = C/B needs less noise.
    literal = accounting.paper_noise_stddev(2.0, DELTA, N, T, l2_norm_clip=1 / B, feedback_clip=1.0)
    assert counterexample(literal).epsilon > result.epsilon


def test_the_counterexample_agrees_with_simulation():
    # Noise so small and a window so short that the rates can be counted.
    noise_stddev, steps, window, threshold = 2e-3, 30, 12, 2.0
    result = counterexample(noise_stddev, steps=steps, window=window, threshold=threshold)
    rng = np.random.default_rng(3)
    runs = 200_000
    drawn = rng.random((runs, steps)) < B / N
    shifted = (np.cumsum(drawn, axis=1) - drawn > 0).sum(axis=1)
    shifted = np.minimum(shifted, window)
    total = shifted / B + noise_stddev * math.sqrt(window) * rng.standard_normal(runs)
    fired = (total > threshold * noise_stddev * math.sqrt(window)).mean()
    error = 5 * math.sqrt(fired / runs)
    assert abs(fired - result.true_positive_rate) < error < 0.1 * fired


def test_the_guarantee_of_the_same_mechanism_is_above_the_lower_bound():
    noise_stddev = accounting.paper_noise_stddev(2.0, DELTA, N, T)
    mechanism = DiceMechanism(
        l2_norm_clip=1.0,
        error_norm_clip=1 / B,
        noise_multiplier=noise_stddev * B,
        expected_batch_size=B,
        bound_residuals=False,
    )
    epsilon = accounting.compute_epsilon(mechanism, PoissonSampling(N, B), T, DELTA, "pld")
    assert epsilon > counterexample(noise_stddev).epsilon


def test_a_hopeless_test_shows_nothing():
    assert counterexample(1.0).epsilon == 0.0


def test_docstrings_say_that_it_is_no_guarantee():
    for function in (accounting.paper_noise_stddev, accounting.paper_epsilon):
        assert "not a guarantee" in function.__doc__


def test_refusals():
    with pytest.raises(AccountingError, match="delta"):
        accounting.paper_noise_stddev(2.0, 1e-3, N, T)
    with pytest.raises(AccountingError, match="epsilon=-1.0"):
        accounting.paper_noise_stddev(-1.0, DELTA, N, T)
    with pytest.raises(AccountingError, match="noise_stddev=0.0"):
        accounting.paper_epsilon(0.0, DELTA, N, T)
    with pytest.raises(AccountingError, match="form='exact'"):
        accounting.paper_epsilon(1.0, DELTA, N, T, form="exact")
    with pytest.raises(AccountingError, match="window=151"):
        counterexample(1.0, window=151)


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__]))
