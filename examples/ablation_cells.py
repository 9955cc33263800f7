# Copyright 2026 The dice_tf Authors.
# SPDX-License-Identifier: Apache-2.0
"""The cells of a search: its two grids, and files that outlive a kill at any moment."""

import csv
import json
import math
import os
from typing import NamedTuple

from absl import app

L2_NORM_CLIPS = "0.01,0.03,0.1,0.3,1"
ERROR_NORM_CLIPS = f"0,{L2_NORM_CLIPS}"
# Of the default learning rate.
LEARNING_RATE_FACTORS = (0.1, 0.25, 0.5, 1.0, 2.0)

SETTINGS, CELLS = "settings.json", "cells.csv"


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


def claim_folder(folder, shared):
    """Makes a folder belong to one search, or checks that it does.

    Args:
        folder: `pathlib.Path`.
        shared: Dict of what all cells depend on, in types that JSON has.

    Raises:
        ValueError: If the folder has cells of another search, or of an unknown one.
    """
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / SETTINGS
    remedy = "Name another --output_dir, or remove this one."
    if not path.exists():
        if (folder / CELLS).exists():
            raise ValueError(f"{folder} has {CELLS} but no {SETTINGS} to check it by. {remedy}")
        # Renamed when complete: there is never half a file of this name.
        part = path.with_suffix(".part")
        _write(part, "w", json.dumps(shared, indent=1))
        os.replace(part, path)
        return
    known = json.loads(path.read_text(encoding="utf-8"))
    different = [
        f"{name} was {known.get(name)!r} and is {shared.get(name)!r}"
        for name in sorted({*known, *shared})
        if known.get(name) != shared.get(name)
    ]
    if different:
        raise ValueError(
            f"{folder} has the cells of another search: {'; '.join(different)}. {remedy}"
        )


def read(folder):
    """Returns the finished cells, and removes a row that a kill cut short.

    Args:
        folder: `pathlib.Path`.

    Returns:
        Dict from `Cell` to `Result`.

    Raises:
        ValueError: If the file has other columns.
    """
    path = folder / CELLS
    header = ",".join((*Cell._fields, *Result._fields)) + "\n"
    content = path.read_bytes() if path.exists() else b""
    complete = content[: content.rfind(b"\n") + 1].decode("utf-8")
    if complete and not complete.startswith(header):
        raise ValueError(f"{path} does not start with {header!r}. Name another --output_dir.")
    if len(complete) < len(content):
        os.truncate(path, len(complete))
    if not complete:
        _write(path, "a", header)
    rows = csv.DictReader(complete.splitlines())
    return {_parse(Cell, row): _parse(Result, row) for row in rows}


def append(folder, cell, result):
    """Adds a finished cell, and returns when it is on disk.

    Args:
        folder: `pathlib.Path`.
        cell: `Cell`.
        result: `Result`.
    """
    # The `repr` of a float is read back as the same float; that of NumPy's is not one.
    values = [*_typed(Cell, cell), *_typed(Result, result)]
    _write(folder / CELLS, "a", ",".join(map(repr, values)) + "\n")


def _typed(kind, values):
    """Returns `values` in the types that the fields of `kind` have."""
    types = kind.__annotations__.values()
    return kind(*(to_type(value) for to_type, value in zip(types, values, strict=True)))


def _parse(kind, row):
    return _typed(kind, [row[name] for name in kind._fields])


def _write(path, mode, text):
    with open(path, mode, encoding="utf-8", newline="") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
