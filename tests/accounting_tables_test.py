# Copyright 2026 The dice_tf Authors.
# SPDX-License-Identifier: Apache-2.0
"""The published tables of noise against epsilon come out of the API within one percent."""

import pytest

from dice_tf import accounting
from dice_tf.mechanism import DiceMechanism
from dice_tf.sampling import CyclicPoissonSampling, PoissonSampling

# Noise standard deviation on the sum over G = C1 + C2, by PLD. Columns: DP-SGD,
# then (feedback steps s, groups m) = (1, 2), (3, 4), (7, 8), with C1 = G / (s + 1).
SPREAD_TABLE = [
    (512, 1171, 1.0, (1.335, 1.243, 1.191, 1.164)),
    (512, 1171, 2.7, (0.819, 0.685, 0.599, 0.547)),
    (512, 1171, 8.0, (0.573, 0.451, 0.363, 0.300)),
    (2048, 585, 2.7, (1.494, 1.412, 1.363, 1.335)),
    (2048, 585, 8.0, (0.831, 0.708, 0.629, 0.577)),
]
TWO_GROUPS_TABLE = [
    (50_000, 1000, 150, 1e-5, 1.0, (1.269, 1.158)),
    (50_000, 1000, 150, 1e-5, 2.0, (0.927, 0.786)),
    (50_000, 1000, 150, 1e-5, 4.0, (0.719, 0.580)),
    (50_000, 1000, 150, 1e-5, 8.0, (0.561, 0.439)),
    (42_000, 1000, 420, 8e-6, 8.0, (0.680, 0.555)),
]
TABLE_CELLS = [
    (60_000, batch, steps, 1e-5, epsilon, feedback_steps, noise)
    for batch, steps, epsilon, noises in SPREAD_TABLE
    for feedback_steps, noise in zip((0, 1, 3, 7), noises)
] + [
    (*row, feedback_steps, noise)
    for *row, noises in TWO_GROUPS_TABLE
    for feedback_steps, noise in zip((0, 1), noises)
]


@pytest.mark.parametrize("n, batch, steps, delta, epsilon, feedback_steps, noise", TABLE_CELLS)
def test_noise_tables_hold_within_one_percent(
    n, batch, steps, delta, epsilon, feedback_steps, noise
):
    clip = 1.0 / (feedback_steps + 1)
    if feedback_steps:
        sampling = CyclicPoissonSampling(n, batch, num_groups=feedback_steps + 1)
    else:
        sampling = PoissonSampling(n, batch)

    def epsilon_at(noise):
        mechanism = DiceMechanism(
            noise_multiplier=noise / clip,
            expected_batch_size=batch,
            l2_norm_clip=clip,
            error_norm_clip=1.0 - clip,
            feedback_steps=max(1, feedback_steps),
        )
        return accounting.compute_epsilon(mechanism, sampling, steps, delta, accountant="pld")

    assert epsilon_at(1.01 * noise) < epsilon < epsilon_at(0.99 * noise)


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__]))
