# Copyright 2026 The dice_tf Authors.
# SPDX-License-Identifier: Apache-2.0
"""What the scripts behind the figures and tables of the pages share."""

import pathlib

from absl import flags

# Okabe and Ito's palette, which readers with colour vision deficiencies can tell apart.
BLUE, ORANGE, GREEN, RED, GREY = "#0072b2", "#e69f00", "#009e73", "#d55e00", "#555555"

OUTPUT_DIR = flags.DEFINE_string(
    "output_dir", str(pathlib.Path(__file__).parent / "figures"), "Folder for the figures."
)


def markdown(heads, rows):
    """Returns a Markdown table."""
    lines = [heads, ["---"] * len(heads), *rows]
    return "\n".join("| " + " | ".join(map(str, line)) + " |" for line in lines)


def style(*panels):
    """Gives axes a light grid and no box."""
    for axes in panels:
        axes.grid(alpha=0.3)
        axes.set_axisbelow(True)
        for side in ("top", "right"):
            axes.spines[side].set_visible(False)


def write(plots, tables):
    """Draws figures into `--output_dir` and prints tables as Markdown.

    Args:
        plots: Dict from a file name to a function that draws to a path.
        tables: Dict from the name of a table's place in a page to a function that makes it.
    """
    folder = pathlib.Path(OUTPUT_DIR.value)
    folder.mkdir(parents=True, exist_ok=True)
    for name, plot in plots.items():
        plot(folder / name)
        print(f"wrote {folder / name}", flush=True)
    for name, table in tables.items():
        print(f"\n<!-- table: {name} -->\n{table()}", flush=True)
