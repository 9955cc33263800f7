# Copyright 2026 The dice_tf Authors.
# SPDX-License-Identifier: Apache-2.0
"""Plots of the examples, drawn without a display."""

from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
import numpy as np

# Okabe and Ito's palette, which readers with colour vision deficiencies can tell apart.
BLUE, ORANGE, GREEN, RED = "#0072b2", "#e69f00", "#009e73", "#d55e00"
GREY, LIGHT_GREY = "#555555", "#cccccc"


def plot_accuracy_and_epsilon(path, steps, curves, epsilons, title, delta=None):
    """Draws accuracy against steps and, on an axis of its own, the epsilon spent.

    Args:
        path: Path of the PNG file.
        steps: Numbers of steps at which values were recorded.
        curves: Dict from label to a list of accuracies in [0, 1], one per entry of `steps`.
        epsilons: Epsilon at the same steps, or `None` for training without privacy.
        title: Title of the figure.
        delta: Float, shown in the label of the axis.
    """
    figure = Figure(figsize=(7.5, 4.5), layout="constrained")
    axes = figure.subplots()
    lines = [
        axes.plot(steps, values, color=color, marker="o", markersize=3, label=label)[0]
        for (label, values), color in zip(curves.items(), (BLUE, GREEN), strict=False)
    ]
    _style(axes, title, "optimizer steps", "accuracy")
    lowest = min(min(values) for values in curves.values())
    axes.set_ylim(max(0.0, lowest - 0.05), 1.0)
    axes.set_xlim(left=0)
    if epsilons is not None:
        right = axes.twinx()
        lines += right.plot(steps, epsilons, color=RED, linestyle="--", label="epsilon (right)")
        suffix = "" if delta is None else f" at $\\delta$ = {delta:g}"
        right.set_ylabel(f"privacy spent: $\\varepsilon${suffix}", color=RED)
        right.tick_params(axis="y", colors=RED)
        right.set_ylim(0, 1.1 * max(epsilons))
        right.spines["top"].set_visible(False)
    axes.legend(handles=lines, loc="lower right", framealpha=0.95)
    figure.savefig(path, dpi=150)


def plot_trajectories(path, trajectories, optimum, title, ylabel):
    """Draws one line per method, against the number of steps.

    Args:
        path: Path of the PNG file.
        trajectories: Dict from label to a list of values, the start included.
        optimum: Value that the methods should reach.
        title: Title of the figure.
        ylabel: Label of the vertical axis.
    """
    figure = Figure(figsize=(7.5, 4.5), layout="constrained")
    axes = figure.subplots()
    axes.axhline(optimum, color=GREY, linewidth=1, linestyle=":", label="optimum")
    # Lines that coincide stay visible: each is thinner than the one below it.
    widths = [6.0, 2.5, 2.5, 2.5, 1.5]
    styles = ["-", "-", "-", "-", (0, (4, 4))]
    colors = [LIGHT_GREY, RED, ORANGE, BLUE, "black"]
    for (label, values), color, style, width in zip(
        trajectories.items(), colors, styles, widths, strict=False
    ):
        axes.plot(values, color=color, linestyle=style, linewidth=width, label=label)
    _style(axes, title, "optimizer steps", ylabel)
    axes.set_xlim(0, max(len(values) for values in trajectories.values()) - 1)
    axes.legend(framealpha=0.95)
    figure.savefig(path, dpi=150)


def plot_convergence(path, steps, panels):
    """Draws, for each problem, mean squared norms of gradients against the number of steps.

    Args:
        path: Path of the PNG file.
        steps: Numbers of steps.
        panels: List of the name of a problem, a dict from label to values, the bound first, and a
            dict from label to the value at which that line levels off.
    """
    figure = Figure(figsize=(9.5, 4.2), layout="constrained")
    looks = [("black", ":", ""), (GREY, "-", ""), (RED, "-", "s"), (BLUE, "-", "o"),
             (ORANGE, "-", "^")]  # fmt: skip
    for axes, (name, curves, levels) in zip(
        figure.subplots(1, len(panels), squeeze=False)[0], panels, strict=True
    ):
        for (label, values), (color, dashes, marker) in zip(curves.items(), looks, strict=True):
            axes.plot(
                steps, values, color=color, linestyle=dashes, marker=marker, markersize=4,
                label=label,
            )  # fmt: skip
            if label in levels:
                axes.axhline(levels[label], color=color, linestyle="--", linewidth=1)
        axes.set_xscale("log")
        axes.set_yscale("log")
        _style(axes, name, "number of steps T", "mean of $\\|\\nabla f\\|^2$ over T steps")
    axes.legend(fontsize=8, framealpha=0.95, loc="lower left")
    figure.savefig(path, dpi=110)


def plot_heat_map(path, values, columns, rows, *, xlabel, ylabel, title, value_label):
    """Draws a table of numbers as colours, with the numbers in it and the largest framed.

    All that is more than 30 below the largest has the darkest colour.

    Args:
        path: Path of the PNG file.
        values: List of rows of floats, the first row at the bottom.
        columns: Labels of the columns.
        rows: Labels of the rows.
        xlabel: Label of the horizontal axis.
        ylabel: Label of the vertical axis.
        title: Title of the figure.
        value_label: Label of the colours.
    """
    values = np.asarray(values, dtype=float)
    width, height = 2.6 + 0.75 * len(columns), 1.6 + 0.55 * len(rows)
    figure = Figure(figsize=(max(width, 6.0), max(height, 3.4)), layout="constrained")
    axes = figure.subplots()
    largest = values.max()
    lowest = max(values.min(), largest - 30)
    # Light where much is right, so that the eye goes there; readable in grey, too.
    image = axes.imshow(
        values, cmap="cividis", origin="lower", aspect="auto", vmin=lowest, vmax=largest
    )
    for (row, column), value in np.ndenumerate(values):
        color = "black" if value > (lowest + largest) / 2 else "white"
        weight = "bold" if value == largest else "normal"
        centred = {"ha": "center", "va": "center"}
        axes.text(column, row, f"{value:.1f}", color=color, fontweight=weight, **centred)
        if value == largest:
            frame = {"fill": False, "edgecolor": RED, "linewidth": 2.5}
            axes.add_patch(Rectangle((column - 0.47, row - 0.47), 0.94, 0.94, **frame))
    axes.set_xticks(range(len(columns)), columns)
    axes.set_yticks(range(len(rows)), rows)
    axes.tick_params(length=0)
    for side in axes.spines.values():
        side.set_visible(False)
    axes.set_title(title)
    axes.set_xlabel(xlabel)
    axes.set_ylabel(ylabel)
    figure.colorbar(image, label=value_label, extend="min" if lowest > values.min() else "neither")
    figure.savefig(path, dpi=150)


def plot_comparison(path, summaries, title, ylabel):
    """Draws, per setting, the scores of both methods, and below them their difference.

    Args:
        path: Path of the PNG file.
        summaries: List of `comparison_report.Summary`.
        title: Title of the figure.
        ylabel: Text, what was scored.
    """
    figure = Figure(figsize=(max(6.5, 1.2 * len(summaries)), 6.4), layout="constrained")
    above, below = figure.subplots(2, sharex=True, height_ratios=(3, 2))
    for place, summary in enumerate(summaries):
        for i, (method, scores) in enumerate(summary.scores.items()):
            x, color = place + 0.24 * (i - 0.5), (ORANGE, BLUE)[i]
            mean, half = summary.intervals[method]
            scores = [100 * score for score in scores]
            above.plot([x - 0.07] * len(scores), scores, ".", color=color, alpha=0.5, markersize=5)
            above.errorbar(x, 100 * mean, yerr=100 * half, color=color, marker="so"[i], capsize=4,
                           markersize=6, label=None if place else method)  # fmt: skip
        for x, half, color, label in (
            (place - 0.08, summary.over_seeds, BLUE, "95 % over seeds"),
            (place + 0.08, summary.over_examples, GREY, "95 % over test examples"),
        ):
            below.errorbar(x, 100 * summary.difference, yerr=100 * half, color=color, marker="o",
                           capsize=4, label=None if place else label)  # fmt: skip
    below.axhline(0, color=GREY, linewidth=1)
    names = [
        f"{s.setting.epochs} epochs\n$\\varepsilon$ = {s.setting.target_epsilon:g}\n"
        f"B {s.setting.batch or 'free'}"
        for s in summaries
    ]
    below.set_xticks(range(len(summaries)), names)
    below.set_xlim(-0.6, len(summaries) - 0.4)
    _style(above, title, None, f"{ylabel} in %")
    _style(below, None, None, "DiceSGD less DP-SGD")
    for axes in (above, below):
        axes.legend(loc="best", framealpha=0.95)
    # Scores do not exceed 1, but intervals of two scores may.
    above.set_ylim(top=min(above.get_ylim()[1], 100))
    figure.savefig(path, dpi=150)


def _style(axes, title, xlabel, ylabel):
    axes.set_title(title or "")
    axes.set_xlabel(xlabel or "")
    axes.set_ylabel(ylabel)
    axes.grid(alpha=0.3)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
