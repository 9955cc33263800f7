# Copyright 2026 The dice_tf Authors.
# SPDX-License-Identifier: Apache-2.0
"""The peak of memory of three private steps; `memory.py` starts one process per batch size."""

from cell import compiled_model, make_examples
from protocol import memory_mib, report, specification

from dice_tf.engine import memory
from dice_tf.training.run import run_of

_OPTIONS = {"optimizer": "sgd", "engine": "layerwise", "method": "DiceSGD", "chunk_size": None}


def measure(cell):
    """Takes three steps on whole batches.

    Args:
        cell: Dict with the name of a model and a batch size.

    Returns:
        Dict with the peak of this process in MiB, and what the estimate says of a row, in KiB.
    """
    cell = {**_OPTIONS, **cell}
    x, y = make_examples(cell)
    model = compiled_model(cell, private=True)
    model.fit(x, y, batch_size=cell["batch"], steps_per_epoch=3, verbose=0)
    return {
        "peak_mib": memory_mib(peak=True),
        "estimated_kib": memory.bytes_of_row(model, run_of(model).checks.forward_bytes) / 2**10,
    }


if __name__ == "__main__":
    report(measure(specification()))
