# Copyright 2026 The dice_tf Authors.
# SPDX-License-Identifier: Apache-2.0
"""Plots of the examples, drawn without a display."""

from matplotlib.figure import Figure

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


def _style(axes, title, xlabel, ylabel):
    axes.set_title(title)
    axes.set_xlabel(xlabel)
    axes.set_ylabel(ylabel)
    axes.grid(alpha=0.3)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
