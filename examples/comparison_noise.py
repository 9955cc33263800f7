# Copyright 2026 The dice_tf Authors.
# SPDX-License-Identifier: Apache-2.0
"""How compare.py draws batches, and with how much noise: the sampler that needs less of it."""

from typing import NamedTuple

import numpy as np
import trial_log

import dice_tf
from dice_tf import accounting


class Draw(NamedTuple):
    """A way to draw, whose noise is calibrated."""

    target_epsilon: float
    num_examples: int
    batch_size: int
    groups: int
    epochs: int


class Noise(NamedTuple):
    """The sampler that needs less noise, and how much over what one example moves."""

    sampling: str
    noise: float


class Noises:
    """Calibrates by PLD what is not on disk yet: that takes seconds.

    Args:
        path: `pathlib.Path` of a CSV file.
        delta: Float.
    """

    def __init__(self, path, delta):
        self._path, self._delta = path, delta
        self._known = trial_log.read(path, Draw, Noise)

    def least(self, draw):
        """Returns the `Noise` of a `Draw`."""
        if draw not in self._known:
            self._known[draw] = _least_noise(draw, self._delta)
            trial_log.append(self._path, draw, self._known[draw])
            print(f"Noise: {draw}: {self._known[draw]}", flush=True)
        return self._known[draw]


def make_sampling(kind, num_examples, batch_size, groups, seed):
    """Returns a `dice_tf.Sampling`.

    Args:
        kind: "poisson" or "allocation".
        num_examples: Int.
        batch_size: Int, expected.
        groups: Int, how many take turns.
        seed: Int, or `None`.
    """
    if kind == "allocation":
        return dice_tf.RandomAllocation(num_examples, batch_size, groups, seed=seed)
    if groups == 1:
        return dice_tf.PoissonSampling(num_examples, batch_size, seed=seed)
    return dice_tf.CyclicPoissonSampling(num_examples, batch_size, groups, seed=seed)


def _least_noise(draw, delta):
    """Returns the `Noise` of the sampler that needs less of it for a `Draw`."""
    samplings = {
        kind: make_sampling(kind, draw.num_examples, draw.batch_size, draw.groups, None)
        for kind in ("poisson", "allocation")
    }
    steps = samplings["poisson"].steps(draw.epochs)
    # The fast accountant's answer for Poisson sampling is a good place to start from.
    noise = accounting.calibrate_noise_multiplier(
        draw.target_epsilon, delta, samplings["poisson"], steps, error_norm_clip=0.0
    )
    noises = {}
    for kind in ("allocation", "poisson"):
        epsilon = _epsilon_by_noise(samplings[kind], draw.epochs, delta)
        # Poisson sampling is calibrated only where it may need less than allocation.
        if not noises or epsilon(noise) <= draw.target_epsilon:
            noises[kind] = noise = _calibrated(epsilon, draw.target_epsilon, noise)
    kind = min(noises, key=noises.get)
    return Noise(kind, noises[kind])


def _epsilon_by_noise(sampling, epochs, delta):
    """Returns epsilon by PLD as a function of noise over what one example moves."""

    def epsilon(noise):
        mechanism = dice_tf.DiceMechanism(
            # The influence is C1 then; any other split of it into head and residual costs the same.
            l2_norm_clip=1.0,
            error_norm_clip=0.0,
            noise_multiplier=noise,
            expected_batch_size=sampling.expected_batch_size,
        )
        return accounting.compute_epsilon(
            mechanism, sampling, sampling.steps(epochs), delta, accountant="pld"
        )

    return epsilon


def _calibrated(epsilon, target, noise):
    """Returns noise whose epsilon is the target or up to 0.1 % below it."""
    slope, last = -1.3, None
    for _ in range(30):
        value = epsilon(noise)
        if 0.999 * target <= value <= target:
            return noise
        point = np.log(noise), np.log(value)
        if last is not None and abs(point[0] - last[0]) > 1e-6:
            slope = min(-0.3, (point[1] - last[1]) / (point[0] - last[0]))
        last = point
        noise = float(noise * np.exp((np.log(0.9995 * target) - point[1]) / slope))
    raise ValueError(f"No noise found for epsilon={target}.")
