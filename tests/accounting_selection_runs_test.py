# Copyright 2026 The dice_tf Authors.
# SPDX-License-Identifier: Apache-2.0
"""Which runs cost at most what another one does, as `private_search` asks of its trials."""

from accounting_selection_test import DELTA, STEPS, B, N, mechanism
import numpy as np
import pytest

from dice_tf import accounting
from dice_tf.accounting import renyi, repeated_selection
from dice_tf.mechanism import DiceMechanism
from dice_tf.sampling import (
    CyclicPoissonSampling,
    PoissonSampling,
)


def test_runs_are_compared_at_every_order():
    declared = mechanism(), CyclicPoissonSampling(N, B), STEPS
    most = lambda run: repeated_selection.costs_at_most(run, declared, DELTA)
    own = CyclicPoissonSampling(N, B)
    assert (
        most(declared)
        and most((mechanism(), own, STEPS - 2))
        and most((mechanism(2.1), own, STEPS))
    )
    scaled = DiceMechanism(l2_norm_clip=0.1, noise_multiplier=2.0, expected_batch_size=B)
    assert most((scaled, own, STEPS)) and most((mechanism(), own, 0))
    assert not most((mechanism(), own, STEPS + 2))
    assert not most((mechanism(1.99), own, STEPS))
    assert not most((mechanism(0.0), own, 1))
    assert not most((mechanism(error_norm_clip=1.2), own, STEPS))
    # A smaller epsilon at this delta is not enough: curves may cross.
    crossing = mechanism(4.0), CyclicPoissonSampling(N, B), 4 * STEPS
    assert accounting.compute_epsilon(*crossing, DELTA) < accounting.compute_epsilon(
        *declared, DELTA
    )
    assert most(crossing) == bool(
        np.all(
            renyi.divergences_of(accounting.account.run_rounds(*crossing, DELTA))[1]
            <= renyi.divergences_of(accounting.account.run_rounds(*declared, DELTA))[1]
        )
    )
    assert not most((mechanism(), PoissonSampling(N, B), 2))
    assert not most((mechanism(), CyclicPoissonSampling(2 * N, B), 2))
    assert not most((mechanism(num_microbatches=B), own, 2))


def test_by_loss_distributions_rounds_are_compared_one_by_one():
    declared = mechanism(), CyclicPoissonSampling(N, B), STEPS
    most = lambda run: repeated_selection.costs_at_most(run, declared, DELTA, "pld")
    own = CyclicPoissonSampling(N, B)
    assert most(declared) and most((mechanism(2.1), own, STEPS - 2))
    # With much more noise, Renyi divergences of more steps are smaller at every order.
    many = mechanism(20.0), own, 4 * STEPS
    assert repeated_selection.costs_at_most(many, declared, DELTA) and not most(many)
    assert not most((mechanism(1.99), own, 1))


def test_unbounded_runs_of_fewer_steps_cost_less():
    declared = mechanism(bound_residuals=False), PoissonSampling(N, B), 50
    shorter = (*declared[:2], 31)
    assert repeated_selection.costs_at_most(shorter, declared, DELTA)
    assert not repeated_selection.costs_at_most((*declared[:2], 51), declared, DELTA)


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__]))
