# Copyright 2026 The dice_tf Authors.
# SPDX-License-Identifier: Apache-2.0
"""How batches are drawn, and what that draw is worth to the accountant."""

from dice_tf.sampling.base import Sampling
from dice_tf.sampling.padding import padded_draws
from dice_tf.sampling.poisson import CyclicPoissonSampling, PoissonSampling
from dice_tf.sampling.random_allocation import RandomAllocation
from dice_tf.sampling.shuffled import ShuffledEpochs

__all__ = [
    "CyclicPoissonSampling",
    "PoissonSampling",
    "RandomAllocation",
    "Sampling",
    "ShuffledEpochs",
    "padded_draws",
]
