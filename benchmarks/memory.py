# Copyright 2026 The dice_tf Authors.
# SPDX-License-Identifier: Apache-2.0
"""What a row of a batch takes of memory, and what `chunk_size="auto"` thinks that it takes.

Per model two processes, with a batch of one size and of four times this size: the difference of
the peaks of TensorFlow's allocator, over the difference of rows, is what a row takes.

    python benchmarks/memory.py
    python benchmarks/memory.py --models=cnn,LSTM
"""

from absl import app, flags
import protocol

# The smaller batch of each: so large that its rows show beside weights and sums.
BATCHES = {"cnn": 512, "mlp": 2048, "transformer": 64, "lstm": 256, "MobileNetV2": 16,
           "EfficientNetB0": 16, "ResNet50": 16}  # fmt: skip


def measure(model, batch):
    """Returns KiB that a row takes, and that it is thought to take."""
    small, large = (
        protocol.measure("memory_cell.py", {"model": model, "batch": size})
        for size in (batch, 4 * batch)
    )
    row = (large["peak_mib"] - small["peak_mib"]) * 1024 / (3 * batch)
    return row, small["estimated_kib"]


def run(flag_values):
    """Measures and prints a table.

    Args:
        flag_values: Parsed flags, see `define_flags`.

    Returns:
        Dict from model to what `measure` returns.
    """
    print("| model | a row, KiB | estimated, KiB | estimate over row |\n|---|---|---|---|")
    found = {}
    for model in flag_values.models:
        row, estimated = found[model] = measure(model, BATCHES.get(model, 32))
        print(f"| {model} | {row:.0f} | {estimated:.0f} | {estimated / row:.2f} |", flush=True)
    return found


def define_flags(flag_values):
    """Defines the flags of this script.

    Args:
        flag_values: `absl.flags.FlagValues` to define them in.
    """
    flags.DEFINE_list("models", list(BATCHES), "Names of models.", flag_values=flag_values)


def main(argv):
    """Runs the script with the flags of the command line."""
    del argv
    run(flags.FLAGS)


if __name__ == "__main__":
    define_flags(flags.FLAGS)
    app.run(main)
