# Copyright 2026 The dice_tf Authors.
# SPDX-License-Identifier: Apache-2.0
"""What the statements of several runs, and of the best of them, say."""

import math

from accounting_selection_test import DELTA, STEPS, B, N, gaussian_run, mechanism
import pytest
from scipy import optimize, special, stats

from dice_tf import accounting
from dice_tf.errors import AccountingError
from dice_tf.sampling import (
    CyclicPoissonSampling,
    PoissonSampling,
    RandomAllocation,
)


def test_ten_runs_of_epsilon_1_are_about_three_and_a_half():
    # Ten Gaussian releases are one with a noise multiplier sqrt(10) times smaller: exact.
    def noise_of(epsilon, delta):
        def excess(noise):
            upper = stats.norm.cdf(0.5 / noise - epsilon * noise)
            lower = math.exp(epsilon) * special.ndtr(-0.5 / noise - epsilon * noise)
            return upper - lower - delta

        return optimize.brentq(excess, 0.1, 100)

    noise = noise_of(1.0, DELTA)
    together = optimize.brentq(lambda e: noise_of(e, DELTA) - noise / math.sqrt(10), 1, 10)
    run = gaussian_run(noise)
    assert accounting.compute_epsilon(*run, DELTA, "pld") == pytest.approx(1.0, rel=2e-3)
    total = accounting.compose_epsilon([run] * 10, DELTA, "pld")
    assert total == pytest.approx(together, rel=2e-3) and 3.4 < total < 3.8
    text = accounting.compose_statement([run] * 10, DELTA, "pld")
    assert "All 10 runs below, taken together" in text
    assert f"epsilon = {accounting.epsilon.up(total)} (PLD accountant)" in " ".join(text.split())
    added = accounting.epsilon.up(10 * accounting.compute_epsilon(*run, DELTA, "pld"))
    assert f"gives {added}, and their deltas 0.0001." in " ".join(text.split())
    assert len([line for line in text.splitlines() if "ShuffledEpochs" in line]) == 10
    assert "(replace_by_empty)" in text


def test_a_statement_of_runs_of_several_kinds():
    runs = [
        (mechanism(), PoissonSampling(N, B), 100),
        (mechanism(3.0), CyclicPoissonSampling(N, B), 200),
        (mechanism(3.0), RandomAllocation(N, B, num_groups=2), 100),
    ]
    text = " ".join(accounting.compose_statement(runs, DELTA).split())
    total = accounting.compose_epsilon(runs, DELTA)
    assert f"epsilon = {accounting.epsilon.up(total)} (RDP accountant)" in text
    for run in runs:
        assert accounting.epsilon.up(accounting.compute_epsilon(*run, DELTA, "pld")) in text
    assert "(add_or_remove_one)" in text and "NOT secret" not in text
    seeded = [(mechanism(noise_is_secret=False), PoissonSampling(N, B, seed=3), 100)]
    text = " ".join(accounting.compose_statement(seeded, DELTA).split())
    assert "The one run below is" in text and text.count("NOT secret") == 2
    free = [*runs, (mechanism(0.0), PoissonSampling(N, B), 1)]
    text = accounting.compose_statement(free, DELTA)
    assert "epsilon = infinite" in " ".join(text.split()) and "NO privacy" in text
    with pytest.raises(AccountingError, match="at least one run"):
        accounting.compose_statement([], DELTA)
    with pytest.raises(AccountingError, match="accountant"):
        accounting.compose_statement(runs, DELTA, "gdp")


@pytest.mark.parametrize("shape, name", [(1.0, "geometric"), (0.0, "logarithmic"),
                                         (0.5, "of shape 0.5"), (math.inf, "Poisson")])  # fmt: skip
def test_the_statement_of_a_selection(shape, name):
    run = mechanism(), CyclicPoissonSampling(N, B), STEPS
    text = accounting.selection_statement(*run, DELTA, 6.0, "held_out", shape)
    words = " ".join(text.split())
    epsilon = accounting.epsilon.up(accounting.selection_epsilon(*run, DELTA, 6.0, shape))
    assert f"with epsilon = {epsilon} (RDP accountant)" in words and name in text
    assert "NOT covered by this guarantee" in words and "table of its trials" in words
    assert ("by the PLD accountant" in text) == math.isfinite(shape)
    assert "NOT covered" not in accounting.selection_statement(*run, DELTA, 6.0, "public", shape)


@pytest.mark.parametrize("score_data", ["private", "training", None, "Public", 1])
def test_scores_of_private_data_are_refused(score_data):
    run = mechanism(), CyclicPoissonSampling(N, B), STEPS
    with pytest.raises(AccountingError, match="score"):
        accounting.selection_statement(*run, DELTA, 6.0, score_data)


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__]))
