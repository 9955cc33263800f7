# Copyright 2026 The dice_tf Authors.
# SPDX-License-Identifier: Apache-2.0
"""What a first step consists of, with privacy and without.

Tracing is Python that makes operations, so it takes as long as there are operations. What is
neither the check nor tracing is TensorFlow making the graph ready, compiling noise, and the step.

    python benchmarks/first_step.py
    python benchmarks/first_step.py --models=cnn,ResNet50
"""

from absl import app, flags
import protocol

BATCHES = {"cnn": 256, "mlp": 256, "vit": 64, "transformer": 64, "lstm": 64,
           "embedding of 20000": 256}  # fmt: skip


def run(flag_values):
    """Measures and prints a table.

    Args:
        flag_values: Parsed flags, see `define_flags`.

    Returns:
        Dict from model to what `first_step_cell.measure` returns.
    """
    print("Seconds and operations, without and with privacy.")
    print("| model | whole | check | tracing | operations | the rest |\n|---|---|---|---|---|---|")
    found = {}
    for model in flag_values.models:
        cell = {"model": model, "batch": BATCHES.get(model, 32)}
        parts = found[model] = protocol.measure("first_step_cell.py", cell)
        if "failed" in parts:
            print(f"| {model} | failed: {parts['failed']} |", flush=True)
            continue
        rest = [
            whole - check - trace
            for whole, check, trace in zip(
                parts["whole"], parts["check"], parts["trace"], strict=True
            )
        ]
        pair = lambda values, digits: ", ".join(f"{value:,.{digits}f}" for value in values)
        print(
            f"| {model} | {pair(parts['whole'], 2)} | {parts['check'][1]:.2f} "
            f"| {pair(parts['trace'], 2)} | {pair(parts['operations'], 0)} | {pair(rest, 2)} |",
            flush=True,
        )
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
