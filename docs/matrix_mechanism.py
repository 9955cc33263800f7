# Copyright 2026 The dice_tf Authors.
# SPDX-License-Identifier: Apache-2.0
"""Error feedback as a matrix mechanism: its noise, and that of the best one of as many diagonals.

`make_concept_figures.py` draws and prints it, for docs/error_feedback.md.
"""

import math

from figure_style import BLUE, GREEN, GREY, ORANGE, RED, markdown, style
from matplotlib.figure import Figure
import numpy as np
from scipy import optimize, signal

from dice_tf.mechanism import DiceMechanism

# Steps of the runs that are compared, and releases that an example has a part in.
STEPS, SPREADS = 1168, (2, 4, 8, 16)


def noise_of_spread(releases):
    """Returns the noise of a step, where DP-SGD that clips to the same total has 1.

    The library's own sensitivity, with even shares: C1 = 1 / m, C2 = 1 - C1, s = m - 1.

    Args:
        releases: Int m >= 1, how many releases an example has a part in; 1 is DP-SGD.
    """
    mechanism = DiceMechanism(
        l2_norm_clip=1 / releases,
        error_norm_clip=1 - 1 / releases,
        feedback_steps=max(1, releases - 1),
        noise_multiplier=1.0,
        expected_batch_size=1,
    )
    return mechanism.sensitivity(separate_entries=True)


def noise_of_sums(step_noise, steps=STEPS):
    """Returns the standard deviations of the sums of independent noise, `[steps]`."""
    return step_noise * np.sqrt(np.arange(1, steps + 1))


def root_mean_square(values):
    """Returns the root of the mean of squares."""
    return math.sqrt(np.mean(np.square(values)))


def banded_factorization(bands, steps=STEPS):
    """Returns the best banded Toeplitz strategy C for the sums, and the noise that it leaves.

    What is released is x + inv(C) z. The sums have the noise A inv(C) z, with A the matrix of
    sums. C has columns of length 1, so that an example with one entry in a band moves C x by 1.

    Args:
        bands: Int, how many diagonals of C are not 0.
        steps: Int T.

    Returns:
        Triple of float64 arrays: `[bands]`, the first column of C; `[steps]`, standard deviations
        of the noise of the steps; `[steps]`, those of their sums.
    """

    def noises(column):
        # The first column of inv(C): the coefficients of the power series 1 / c(x).
        impulse = np.eye(1, steps)[0]
        of_steps = signal.lfilter([1.0], column / np.linalg.norm(column), impulse)
        of_sums = np.cumsum(of_steps)
        return tuple(np.sqrt(np.cumsum(each**2)) for each in (of_steps, of_sums))

    def objective(rest):
        # Where c has a zero inside the unit circle, the noise grows without end.
        with np.errstate(over="ignore", invalid="ignore"):
            return np.nan_to_num(
                root_mean_square(noises(np.concatenate([[1.0], rest]))[1]), nan=1e9
            )

    # From the square root of A, whose coefficients are binomial.
    rest = np.cumprod([(2 * k - 1) / (2 * k) for k in range(1, bands)])
    for method in ("Nelder-Mead", "BFGS", "Nelder-Mead"):
        found = optimize.minimize(objective, rest, method=method)
        rest = found.x if found.fun <= objective(rest) else rest
    column = np.concatenate([[1.0], rest])
    return column / np.linalg.norm(column), *noises(column)


def plot(path):
    """Draws the noise of single steps, and of the sums of all steps up to one."""
    figure = Figure(figsize=(9.5, 4.2), layout="constrained")
    left, right = figure.subplots(1, 2)
    steps = np.arange(1, STEPS + 1)
    lines = zip((1, *SPREADS), (RED, ORANGE, GREEN, BLUE, "black"))
    for releases, color in lines:
        label = "DP-SGD" if releases == 1 else f"m = {releases}"
        noise = noise_of_spread(releases)
        left.plot(steps, np.full(STEPS, noise), color=color, linewidth=2)
        right.plot(steps, noise_of_sums(noise), color=color, linewidth=2, label=label)
        if releases > 1:
            _, of_steps, of_sums = banded_factorization(releases)
            left.plot(steps, of_steps, color=color, linestyle=":", linewidth=2)
            right.plot(steps, of_sums, color=color, linestyle=":", linewidth=2)
    right.plot([], [], color=GREY, linestyle=":", linewidth=2, label="banded factorization")
    left.set_yscale("log")
    ticks = [0.25, 0.5, 1, 2]
    left.set_yticks(ticks, [f"{tick:g}" for tick in ticks])
    left.minorticks_off()
    left.set_ylabel("noise of a step, in that of DP-SGD")
    right.set_ylabel("noise of the sum of all steps so far")
    right.set_ylim(0, 48)
    right.legend(frameon=False, loc="upper left")
    for axes in (left, right):
        axes.set_xlim(0, STEPS)
        axes.set_xlabel("step")
    style(left, right)
    figure.savefig(path, dpi=110)


def table():
    """Returns a Markdown table of the noise of steps and of sums."""
    body = [["DP-SGD", "1", f"{root_mean_square(noise_of_sums(1.0)):.1f}", "", ""]]
    for releases in SPREADS:
        noise = noise_of_spread(releases)
        _, of_steps, of_sums = banded_factorization(releases)
        own = [f"{noise:.2f}", f"{root_mean_square(noise_of_sums(noise)):.1f}"]
        theirs = [f"{root_mean_square(each):.{n}f}" for each, n in ((of_steps, 2), (of_sums, 1))]
        body.append([f"m = {releases}", *own, *theirs])
    heads = ["", "noise of a step", "of the sums", "factorization: of a step", "of the sums"]
    return markdown(heads, body)
