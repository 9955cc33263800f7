# Copyright 2026 The dice_tf Authors.
# SPDX-License-Identifier: Apache-2.0
"""Tables, files and plots of measurements."""

import csv
import json

from matplotlib.figure import Figure

# Okabe and Ito's palette, which readers with colour vision deficiencies can tell apart.
_BLUE, _ORANGE, _GREEN, _GREY = "#0072b2", "#e69f00", "#009e73", "#555555"

_RATIO_COLUMNS = {
    "model": "model",
    "batch": "batch",
    "optimizer": "optimizer",
    "engine": "engine",
    "method": "method",
    "plain_ms": "Keras ms",
    "private_ms": "private ms",
    "ratio": "step",
    "range": "lowest to highest",
    "processor_ratio": "its processor time",
    "private_mib": "private MiB",
    "memory_ratio": "memory",
    "private_first_s": "private first step, s",
    "first_ratio": "first step",
    "first_processor_ratio": "its processor time",
    "later_ms": "later fits, ms more",
    "load": "load",
}
_REAL_COLUMNS = {
    name: title
    for name, title in _RATIO_COLUMNS.items()
    if name not in ("optimizer", "engine", "method")
}
_SWEEP_COLUMNS = {
    "batch": "batch",
    "chunk_size": "chunk_size",
    "plain_ms": "Keras ms",
    "private_ms": "private ms",
    "private_us": "private microseconds per example",
    "ratio": "step",
    "processor_ratio": "its processor time",
    "plain_mib": "Keras MiB",
    "private_mib": "private MiB",
    "load": "load",
}
_PEER_COLUMNS = {
    "model": "model",
    "batch": "batch",
    "stack": "stack",
    "mode": "mode",
    "ms": "ms",
    "processor_ms": "processor ms",
    "range": "lowest to highest",
    "examples_per_second": "examples per second",
    "ratio": "against the same stack without privacy",
    "peak_mib": "MiB",
    "load": "load",
}
_TABLES = {
    "ratios": ("Over Keras without privacy", _RATIO_COLUMNS),
    "real": ("Real models and single layers, DiceSGD over Keras SGD", _REAL_COLUMNS),
    "sweep": ("Batch sizes, on the CNN", _SWEEP_COLUMNS),
    "peers": ("Other packages", _PEER_COLUMNS),
}


def heading(environment):
    """Returns a line that says what the numbers depend on."""
    versions = ", ".join(f"{name} {v}" for name, v in environment["versions"].items())
    extensions = f"; {environment['extensions']}" if environment["extensions"] else ""
    return (
        f"{environment['date']}, {environment['cores']} cores "
        f"({environment['processor']}{extensions}), "
        f"load {environment['load']:.1f}, Python {environment['python']}, {versions}"
    )


def describe(result):
    """Returns one line about a result, for showing progress."""
    parts = [f"{result['model']} {result['batch']}"]
    for name in ("optimizer", "engine", "method", "mode"):
        if name in result:
            parts.append(str(result[name]))
    if result.get("chunk_size"):
        parts.append(f"in chunks of {result['chunk_size']}")
    text = f"{', '.join(parts)}: "
    if "ratio" in result and "private_ms" in result:
        text += f"{result['plain_ms']:.1f} ms -> {result['private_ms']:.1f} ms"
        text += f", {result['ratio']:.2f}x, processor {result['processor_ratio']:.2f}x"
        if "memory_ratio" in result:
            text += f", memory {result['memory_ratio']:.2f}x"
        if "first_ratio" in result:
            text += f", first step {result['plain_first_s']:.1f} s -> "
            text += f"{result['private_first_s']:.1f} s"
        return f"{text} (load {result['load']:.1f})"
    if "ms" in result:
        text += f"{result['ms']:.1f} ms, processor {result['processor_ms']:.1f} ms"
        return f"{text} (load {result['load']:.1f})"
    return text + why_missing(result)


def why_missing(result):
    """Returns the first sentence of a refusal, or the last line of a failure."""
    if "refused" in result:
        return f"refused: {result['refused'].split('. ')[0]}"
    lines = result.get("failed", "not measured").strip().splitlines()
    return f"failed: {lines[-1] if lines else 'no output'}"


def format_tables(results):
    """Returns all tables as Markdown.

    Args:
        results: Dict of what was measured.
    """
    tables = []
    for name, (title, columns) in _TABLES.items():
        if results.get(name):
            tables.append(f"{title}:\n\n{_markdown(columns, results[name])}\n")
    return "\n".join(tables)


def _markdown(columns, rows):
    lines = ["| " + " | ".join(columns.values()) + " |", "|" + "---|" * len(columns)]
    notes = []
    for row in rows:
        row = _with_derived(row)
        lines.append("| " + " | ".join(_cell(row, name) for name in columns) + " |")
        if "refused" in row or "failed" in row:
            notes.append(describe(row))
    return "\n".join([*lines, *(["", *notes] if notes else [])])


def _with_derived(row):
    derived = dict(row)
    if "lowest_ratio" in row:
        derived["range"] = f"{row['lowest_ratio']:.2f} to {row['highest_ratio']:.2f}"
        derived["private_us"] = 1e3 * row["private_ms"] / row["batch"]
    if "private_fit_ms" in row:
        # What a later call of `fit` takes besides its step.
        start = {side: row[f"{side}_fit_ms"] - row[f"{side}_ms"] for side in ("plain", "private")}
        derived["later_ms"] = start["private"] - start["plain"]
    if "lowest_ms" in row:
        derived["range"] = f"{row['lowest_ms']:.1f} to {row['highest_ms']:.1f}"
    return derived


def _cell(row, name):
    value = row.get(name)
    if value is None:
        return "none" if name == "chunk_size" else "-"
    if not isinstance(value, float):
        return str(value)
    if name.endswith("ratio"):
        return f"{value:.2f}"
    return f"{value:,.0f}" if value >= 1000 or name.endswith("mib") else f"{value:.1f}"


def write_results(folder, results):
    """Writes results.json, a CSV file per table, and plots.

    Args:
        folder: `pathlib.Path` of an existing folder.
        results: Dict of what was measured.

    Returns:
        List of the paths written.
    """
    paths = [folder / "results.json"]
    paths[0].write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    for name in _TABLES:
        if results.get(name):
            paths.append(folder / f"{name}.csv")
            rows = [_with_derived(row) for row in results[name]]
            columns = list(dict.fromkeys(key for row in rows for key in row))
            with paths[-1].open("w", newline="", encoding="utf-8") as file:
                writer = csv.DictWriter(file, columns)
                writer.writeheader()
                writer.writerows(rows)
    measured = lambda name: [row for row in results.get(name, ()) if "ms" in row or "ratio" in row]
    for name, plot in (("ratios", plot_ratios), ("sweep", plot_sweep), ("peers", plot_peers)):
        if measured(name):
            paths.append(folder / f"{name}.png")
            plot(paths[-1], measured(name), heading(results["environment"]))
    return paths


def plot_ratios(path, rows, title):
    """Draws the ratios of time and memory as bars, one group per model."""
    kinds = {
        "DP-SGD, layerwise": _BLUE,
        "DiceSGD, layerwise": _GREEN,
        "DiceSGD, vectorized": _ORANGE,
    }
    name_of = lambda row: f"{row['model']} {row['batch']}\n{row['optimizer']}"
    groups = list(dict.fromkeys(name_of(row) for row in rows))
    figure = Figure(figsize=(10, 7), layout="constrained")
    for axes, quantity, label in zip(
        figure.subplots(2, 1, sharex=True),
        ("ratio", "memory_ratio"),
        ("time of a step", "peak memory"),
        strict=True,
    ):
        for i, (kind, color) in enumerate(kinds.items()):
            chosen = [r for r in rows if f"{r['method']}, {r['engine']}" == kind and quantity in r]
            where = [groups.index(name_of(row)) + 0.27 * (i - 1) for row in chosen]
            values = [row[quantity] for row in chosen]
            bars = axes.bar(where, values, 0.25, color=color, label=kind)
            axes.bar_label(bars, [f"{value:.2f}" for value in values], fontsize=7)
        axes.axhline(1.0, color=_GREY, linewidth=1)
        if quantity == "ratio":
            # From half to at least double, so that bars near 1 do not look far apart.
            axes.set_yscale("log", base=2)
            axes.set_ylim(0.5, max(2.0, 1.3 * max(row["ratio"] for row in rows)))
            axes.yaxis.set_major_formatter("{x:g}")
            axes.legend(loc="lower left", bbox_to_anchor=(0, 1), ncols=3, fontsize=8)
        axes.set_xticks(range(len(groups)), groups)
        _style(axes, f"{label}, over Keras")
    figure.suptitle(f"Private training over the same Keras optimizer\n{title}", fontsize=9)
    figure.savefig(path, dpi=150)


def plot_sweep(path, rows, title):
    """Draws time and memory against batch size."""
    figure = Figure(figsize=(10, 4.5), layout="constrained")
    whole = [row for row in rows if row["chunk_size"] is None]
    chunked = [row for row in rows if row["chunk_size"] is not None]
    lines = [("Keras", whole, "plain", _GREY), ("DiceSGD", whole, "private", _BLUE)]
    if chunked:
        label = f"DiceSGD, chunk_size={chunked[0]['chunk_size']}"
        lines.append((label, chunked, "private", _GREEN))
    units = {"ms": "milliseconds per step", "mib": "peak memory in MiB"}
    for axes, (unit, label) in zip(figure.subplots(1, 2), units.items(), strict=True):
        for name, chosen, side, color in lines:
            points = [(r["batch"], r[f"{side}_{unit}"]) for r in chosen if f"{side}_{unit}" in r]
            if points:
                axes.plot(*zip(*points, strict=True), color=color, marker="o", label=name)
        axes.set_xscale("log", base=2)
        axes.xaxis.set_major_formatter("{x:g}")
        if unit == "ms":
            axes.set_yscale("log", base=2)
            axes.yaxis.set_major_formatter("{x:g}")
        else:
            axes.set_ylim(bottom=0)
        axes.set_xlabel("batch size")
        _style(axes, label)
        axes.legend(fontsize=8)
    figure.suptitle(f"Batch sizes, on the CNN\n{title}", fontsize=9)
    figure.savefig(path, dpi=150)


def plot_peers(path, rows, title):
    """Draws examples per second of every package, one panel per model."""
    groups = list(dict.fromkeys((row["model"], row["batch"]) for row in rows))
    figure = Figure(figsize=(4.2 * len(groups), 4.5), layout="constrained")
    panels = figure.subplots(1, len(groups), squeeze=False)[0]
    for axes, group in zip(panels, groups, strict=True):
        chosen = [row for row in rows if (row["model"], row["batch"]) == group][::-1]
        colors = [
            _GREY if not row["private"] else _BLUE if row["stack"] == "dice_tf" else _ORANGE
            for row in chosen
        ]
        values = [row["examples_per_second"] for row in chosen]
        bars = axes.barh([row["mode"] for row in chosen], values, color=colors)
        axes.bar_label(bars, [f"{value:,.0f}" for value in values], fontsize=7, padding=2)
        axes.set_title(f"{group[0]}, batch {group[1]}", fontsize=9)
        axes.set_xlabel("examples per second")
        axes.margins(x=0.2)
        _style(axes, "")
    figure.suptitle(f"Training speed; grey: without privacy\n{title}", fontsize=9)
    figure.savefig(path, dpi=150)


def _style(axes, ylabel):
    axes.set_ylabel(ylabel)
    axes.grid(alpha=0.3)
    axes.set_axisbelow(True)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
