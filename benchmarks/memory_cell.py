# Copyright 2026 The dice_tf Authors.
# SPDX-License-Identifier: Apache-2.0
"""The peak of memory of private steps; `memory.py` starts one process per batch size."""

from cell import compiled_model, make_examples
from protocol import report, specification
import tensorflow as tf

from dice_tf.engine import memory
from dice_tf.training.run import run_of

_OPTIONS = {"optimizer": "sgd", "engine": "layerwise", "method": "DiceSGD", "chunk_size": None}


def measure(cell):
    """Takes steps on whole batches, after a first one, which checks and compiles.

    Args:
        cell: Dict with the name of a model and a batch size.

    Returns:
        Dict with the peak of TensorFlow's allocator in MiB, and the estimate of a row in KiB.
    """
    cell = {**_OPTIONS, **cell}
    x, y = make_examples(cell)
    model = compiled_model(cell, private=True)
    take_steps = lambda number: model.fit(
        x, y, batch_size=cell["batch"], steps_per_epoch=number, verbose=0
    )
    take_steps(1)
    tf.config.experimental.reset_memory_stats("CPU:0")
    take_steps(2)
    return {
        "peak_mib": tf.config.experimental.get_memory_info("CPU:0")["peak"] / 2**20,
        "estimated_kib": memory.bytes_of_row(model, run_of(model).checks.forward_bytes) / 2**10,
    }


if __name__ == "__main__":
    report(measure(specification()))
