# Copyright 2026 The dice_tf Authors.
# SPDX-License-Identifier: Apache-2.0
"""Epsilon against independent calculations: integration, simulation, enumeration."""

import itertools
import math

import numpy as np
import pytest
from scipy import integrate, stats

from dice_tf import accounting
from dice_tf.accounting import renyi
from dice_tf.mechanism import DiceMechanism
from dice_tf.sampling import CyclicPoissonSampling, PoissonSampling, ShuffledEpochs


def integrated_divergence(q, z, order):
    """Renyi divergence of (1-q) N(0, z^2) + q N(1, z^2) from N(0, z^2), by quadrature."""

    def integrand(x):
        log_ratio = np.logaddexp(math.log1p(-q), math.log(q) + (2 * x - 1) / (2 * z * z))
        return math.exp(order * log_ratio - x * x / (2 * z * z)) / (z * math.sqrt(2 * math.pi))

    points = (-10 * z, 0.0, 1.0, order, order + 10 * z)
    pieces = (
        integrate.quad(integrand, a, b, epsabs=0, epsrel=1e-12, limit=200)[0]
        for a, b in itertools.pairwise(points)
    )
    return math.log(math.fsum(pieces)) / (order - 1)


@pytest.mark.parametrize("q, z", [(0.02, 1.2), (0.07, 0.8), (0.3, 2.0)])
def test_renyi_divergences_equal_numerical_integration(q, z):
    orders, values = renyi.ORDERS[2], renyi.renyi_divergences(q, z, 2)
    for order in (2, 3, 5, 8, 16):
        value = values[orders.index(order)]
        assert value == pytest.approx(integrated_divergence(q, z, order), rel=1e-7)
    for order in (2.5, 4.5, 9.5):
        # Some releases of dp_accounting bound fractional orders from above.
        value, exact = values[orders.index(order)], integrated_divergence(q, z, order)
        assert exact * (1 - 1e-7) < value < exact * 1.1


def hockey_stick(log_density_p, log_density_q, epsilon, reach):
    """Integral of max(0, p - e^epsilon q) over the line, by a fine Riemann sum."""
    x = np.linspace(-reach, reach, 400_001)
    p, q = np.exp(log_density_p(x)), np.exp(log_density_q(x))
    return np.maximum(0, p - math.exp(epsilon) * q).sum() * (x[1] - x[0])


def mixture(probability, shift, stddev):
    """Log density of (1-p) N(0, stddev^2) + p N(shift, stddev^2)."""
    return lambda x: np.logaddexp(
        math.log1p(-probability) + stats.norm.logpdf(x, 0, stddev),
        math.log(probability) + stats.norm.logpdf(x, shift, stddev),
    )


@pytest.mark.parametrize("relation", ["add_or_remove_one", "replace_one"])
@pytest.mark.parametrize("accountant", ["rdp", "pld"])
@pytest.mark.parametrize("noise_multiplier", [0.5, 1.0, 2.0])
def test_one_round_against_integration(relation, accountant, noise_multiplier):
    delta, batch = 1e-4, 100
    sampling = PoissonSampling(1000, batch)
    mechanism = DiceMechanism(
        l2_norm_clip=1.0,
        error_norm_clip=0.0,
        noise_multiplier=noise_multiplier,
        expected_batch_size=batch,
    )
    epsilon = accounting.compute_epsilon(mechanism, sampling, 1, delta, accountant, relation)
    nothing = lambda x: stats.norm.logpdf(x, 0, noise_multiplier)
    drawn, opposite = (mixture(0.1, shift, noise_multiplier) for shift in (1.0, -1.0))
    pairs = [(drawn, nothing), (nothing, drawn)]
    if relation == "replace_one":
        pairs = [(drawn, opposite)]
    true_delta = lambda e: max(hockey_stick(p, q, e, 12 * noise_multiplier + 2) for p, q in pairs)
    assert true_delta(epsilon) <= delta * (1 + 1e-6)
    if relation == "add_or_remove_one":
        slack = 0.99 if accountant == "pld" else 0.6
        assert true_delta(slack * epsilon) > delta, "The bound should be nearly tight."


# Simulation of the worst case: one example whose head and residual always have the largest
# norms and one direction, in a data set of zero gradients.

STEPS, SAMPLES, EXAMPLES, BATCH, DELTA = 24, 60_000, 100, 10, 5e-3
C1, C2, STDDEV = 1.0, 0.8, 2.0


def simulate(rng, feedback_steps, num_groups, present):
    """Returns releases [samples, steps] of the sum, with or without the example."""
    releases = STDDEV * rng.standard_normal((SAMPLES, STEPS))
    if present:
        probability = num_groups * BATCH / EXAMPLES
        coins = rng.random((SAMPLES, STEPS)) < probability
        coins[:, np.arange(STEPS) % num_groups != 0] = False
        releases += C1 * coins
        for delay in range(1, feedback_steps + 1):
            releases[:, delay:] += C2 / feedback_steps * coins[:, :-delay]
    return releases


def log_likelihood_ratio(releases, feedback_steps, num_groups):
    """Returns log P(releases | present) / P(releases | absent), by the forward recursion.

    The hidden state is which of the last `feedback_steps` coins came up.
    """
    states = list(itertools.product((0, 1), repeat=feedback_steps))
    weights = np.zeros((len(releases), len(states)))
    weights[:, 0] = 1.0
    total = np.zeros(len(releases))
    for step in range(STEPS):
        turn = step % num_groups == 0
        probability = num_groups * BATCH / EXAMPLES if turn else 0.0
        updated = np.zeros_like(weights)
        for index, past in enumerate(states):
            for coin, chance in ((0, 1 - probability), (1, probability)):
                if chance == 0:
                    continue
                shift = C1 * coin + C2 / feedback_steps * sum(past)
                ratio = np.exp((shift * releases[:, step] - shift**2 / 2) / STDDEV**2)
                updated[:, states.index((coin, *past[:-1]))] += weights[:, index] * chance * ratio
        scale = updated.sum(axis=1)
        total += np.log(scale)
        weights = updated / scale[:, None]
    return total


def simulated_deltas(feedback_steps, num_groups):
    """Returns a function: epsilon to (lower, upper) bounds on the larger true delta.

    Each bound is an average of independent numbers in [0, 1] plus or minus five standard
    errors, so it is wrong with a probability of about 3e-7.
    """
    rng = np.random.default_rng(7)
    losses = [
        log_likelihood_ratio(
            simulate(rng, feedback_steps, num_groups, True), feedback_steps, num_groups
        ),
        -log_likelihood_ratio(
            simulate(rng, feedback_steps, num_groups, False), feedback_steps, num_groups
        ),
    ]

    def bounds(epsilon):
        values = [np.maximum(0.0, -np.expm1(np.minimum(0.0, epsilon - loss))) for loss in losses]
        errors = [5 * value.std() / math.sqrt(SAMPLES) for value in values]
        lower = max(value.mean() - error for value, error in zip(values, errors))
        return lower, max(value.mean() + error for value, error in zip(values, errors))

    return bounds


@pytest.mark.parametrize(
    "feedback_steps, num_groups",
    [(1, 2), (3, 4), (1, 1), (2, 1)],
    ids=["form1", "form1b", "form2", "form2_spread"],
)
def test_simulated_worst_case_never_exceeds_the_reported_epsilon(feedback_steps, num_groups):
    mechanism = DiceMechanism(
        l2_norm_clip=C1,
        error_norm_clip=C2,
        noise_multiplier=STDDEV / C1,
        expected_batch_size=BATCH,
        feedback_steps=feedback_steps,
    )
    if num_groups > 1:
        sampling = CyclicPoissonSampling(EXAMPLES, BATCH, num_groups=num_groups)
    else:
        sampling = PoissonSampling(EXAMPLES, BATCH)
    by_rdp, by_pld = (
        accounting.compute_epsilon(mechanism, sampling, STEPS, DELTA, accountant)
        for accountant in ("rdp", "pld")
    )
    bounds = simulated_deltas(feedback_steps, num_groups)
    assert by_pld <= by_rdp
    assert bounds(by_pld)[0] <= DELTA
    assert bounds(by_rdp)[0] <= DELTA
    # The simulation can tell: it refutes a claim that is too small. Form 1 is exact, so a fifth
    # is enough; form 2 is refuted without the residual's share of the sensitivity.
    if num_groups > 1:
        too_small = 0.8 * by_pld
    else:
        without = DiceMechanism(
            l2_norm_clip=C1,
            error_norm_clip=0.0,
            noise_multiplier=STDDEV / C1,
            expected_batch_size=BATCH,
        )
        too_small = accounting.compute_epsilon(without, sampling, STEPS, DELTA, "pld")
    assert bounds(too_small)[0] > DELTA


@pytest.mark.parametrize("accountant", ["rdp", "pld"])
def test_unbounded_worst_case_by_integration(accountant):
    # The error differs by 2 C2 at every step; in one step that is exact in one dimension.
    mechanism = DiceMechanism(
        l2_norm_clip=C1,
        error_norm_clip=0.05,
        noise_multiplier=STDDEV,
        expected_batch_size=BATCH,
        bound_residuals=False,
    )
    sampling = PoissonSampling(EXAMPLES, BATCH)
    epsilon = accounting.compute_epsilon(mechanism, sampling, 1, 1e-4, accountant)
    # On the scale of the sum; the drawn example moves the mean by 2 C2 + C1 / B.
    error = 2 * 0.05 * BATCH
    nothing = lambda x: stats.norm.logpdf(x, 0, STDDEV)
    present = lambda x: mixture(BATCH / EXAMPLES, C1, STDDEV)(x - error)
    deltas = [hockey_stick(p, q, epsilon, 30) for p, q in ((present, nothing), (nothing, present))]
    assert max(deltas) <= 1e-4
    assert hockey_stick(present, nothing, 0.6 * epsilon, 30) > 1e-4


def test_shuffled_epochs_bound_every_placement():
    # Sum of squared shifts over all places that one example can take in three epochs.
    steps_per_epoch, epochs = 4, 3
    for feedback_steps in (1, 2):
        worst = 0.0
        for places in itertools.product(range(steps_per_epoch), repeat=epochs):
            shifts = np.zeros(steps_per_epoch * epochs + feedback_steps)
            for epoch, place in enumerate(places):
                step = epoch * steps_per_epoch + place
                shifts[step] += C1
                shifts[step + 1 : step + 1 + feedback_steps] += C2 / feedback_steps
            worst = max(worst, float((shifts**2).sum()))
        mechanism = DiceMechanism(
            l2_norm_clip=C1,
            error_norm_clip=C2,
            noise_multiplier=1.0,
            expected_batch_size=25,
            feedback_steps=feedback_steps,
        )
        composed = accounting.dp_event(mechanism, ShuffledEpochs(100, 25), 12)
        accounted = composed.count / composed.event.noise_multiplier**2
        assert worst <= accounted
        # In quadrature, as for cyclic sampling, it would not hold.
        assert worst > epochs * (C1**2 + C2**2 / feedback_steps)


def clipped_mean_sum(order, gradients, size):
    """Sum of clipped microbatch means, one dimension, threshold 1."""
    total = 0.0
    for start in range(0, len(order), size):
        mean = sum(gradients[i] for i in order[start : start + size]) / size
        total += min(1.0, max(-1.0, mean))
    return total


def test_microbatches_of_poisson_draws_have_four_times_the_sensitivity():
    # A uniform order of n+1 examples arises from one of n: the new example takes a place and
    # its owner goes last. So two microbatches change, not one.
    gradients, size, new = [8.0, -9.0, 7.0, -8.0, 50.0], 2, 4
    seen, largest = [], 0.0
    for order in itertools.permutations(range(new)):
        for place in range(new + 1):
            inserted = [*order, new]
            inserted[place], inserted[new] = inserted[new], inserted[place]
            seen.append(tuple(inserted))
            before = clipped_mean_sum(order, gradients, size)
            shift = clipped_mean_sum(inserted, gradients, size) - before
            largest = max(largest, abs(shift))
    assert sorted(seen) == sorted(itertools.permutations(range(new + 1)))
    assert 2.0 < largest <= 4.0

    plain, grouped = (
        DiceMechanism(
            l2_norm_clip=1.0,
            noise_multiplier=z,
            expected_batch_size=20,
            num_microbatches=microbatches,
        )
        for z, microbatches in ((1.0, None), (4.0, 10))
    )
    sampling = PoissonSampling(1000, 20)
    assert accounting.dp_event(plain, sampling, 9) == accounting.dp_event(grouped, sampling, 9)
    # An order that does not depend on the draw changes one microbatch only.
    shuffled = ShuffledEpochs(1000, 20)
    event = accounting.dp_event(grouped, shuffled, 50)
    assert event.event.noise_multiplier == pytest.approx(4.0 / (2 * 2))


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__]))
