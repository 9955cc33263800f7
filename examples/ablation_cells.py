# Copyright 2026 The dice_tf Authors.
# SPDX-License-Identifier: Apache-2.0
"""The cells of a search: its two grids, and the file of those that are finished."""

import math
from typing import NamedTuple

from absl import app
import trial_log

L2_NORM_CLIPS = "0.01,0.03,0.1,0.3,1"
ERROR_NORM_CLIPS = f"0,{L2_NORM_CLIPS}"
# Of the default learning rate.
LEARNING_RATE_FACTORS = (0.1, 0.25, 0.5, 1.0, 2.0)

CELLS = "cells.csv"


class Cell(NamedTuple):
    """What one training run of a search has of its own."""

    l2_norm_clip: float
    error_norm_clip: float
    learning_rate: float
    seed: int


class Result(NamedTuple):
    """What came of a cell.

    Attributes:
        noise_multiplier: Float, calibrated to the thresholds of the cell.
        noise_stddev: Float, noise on the mean of clipped gradients.
        steps: Int, number of steps taken.
        epsilon: Float, of this cell alone.
        accuracy: Float in [0, 1], on held-out data.
        loss: Float, on held-out data.
        seconds: Float, for calibrating, tracing, training and evaluating.
    """

    noise_multiplier: float
    noise_stddev: float
    steps: int
    epsilon: float
    accuracy: float
    loss: float
    seconds: float


class Grid(NamedTuple):
    """One heat map.

    Attributes:
        name: Name of its file.
        title: Text.
        row: Name of the field of `Cell` on the vertical axis.
        column: The same for the horizontal axis.
        cells: List of `Cell`, of all seeds.
    """

    name: str
    title: str
    row: str
    column: str
    cells: list


def make_grids(flag_values, settings):
    """Returns the two grids; cells that are in both are equal.

    Args:
        flag_values: Parsed flags.
        settings: Settings that all cells share.
    """
    # Products such as 0.2 * 0.1 are not the floats that their decimals stand for.
    rounded = lambda value: float(f"{value:.6g}")
    fixed = rounded(settings.learning_rate)
    clips = _numbers(flag_values, "l2_norm_clips")
    error_clips = _numbers(flag_values, "error_norm_clips", smallest=0.0)
    rates = _numbers(flag_values, "learning_rates")
    rates = rates or [rounded(fixed * factor) for factor in LEARNING_RATE_FACTORS]
    seeds = range(settings.seed, settings.seed + flag_values.repeats)
    return [
        Grid(
            "thresholds",
            f"learning rate {fixed:g}",
            "error_norm_clip",
            "l2_norm_clip",
            [Cell(c1, c2, fixed, seed) for seed in seeds for c1 in clips for c2 in error_clips],
        ),
        Grid(
            "learning_rate",
            "$C_2 = C_1$",
            "learning_rate",
            "l2_norm_clip",
            [Cell(c1, c1, rate, seed) for seed in seeds for c1 in clips for rate in rates],
        ),
    ]


def _numbers(flag_values, name, smallest=1e-9):
    try:
        values = [float(value) for value in getattr(flag_values, name) or ()]
    except ValueError as error:
        raise app.UsageError(f"--{name} takes numbers with commas between them: {error}.") from None
    wrong = [value for value in values if not smallest <= value < math.inf]
    if wrong:
        raise app.UsageError(f"--{name} takes finite numbers from {smallest} on, not {wrong}.")
    return values


def read(folder):
    """Returns a dict from the finished cells of a folder to their results."""
    return trial_log.read(folder / CELLS, Cell, Result)


def append(folder, cell, result):
    """Adds a finished cell, and returns when it is on disk."""
    trial_log.append(folder / CELLS, cell, result)
