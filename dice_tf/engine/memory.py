# Copyright 2026 The dice_tf Authors.
# SPDX-License-Identifier: Apache-2.0
r"""How many rows' gradients are computed at a time, so that they fit into memory.

An estimate from above, made before the first step from shapes alone: so it is the same on every
machine, and tells nothing about the data.
"""

import math

# Bytes for the gradients of one chunk.
MEMORY_BUDGET = 4 * 2**30
# Peak memory per row over the bytes of all that a forward pass computes for a row. Measured: 0.8
# to 4.2 (benchmarks/README.md).
PEAK_OVER_FORWARD_PASS = 5.0
# Batches of random size exceed the expected one, hardly ever by more.
_LARGER_BATCHES = 1.25


def bytes_of_forward_pass(graph, rows):
    """Returns the bytes, per row, of all outputs of operations of a traced forward pass.

    Args:
        graph: `tf.Graph` in which the model was called.
        rows: Int, the static batch size, or `None` if it is not known there.

    Returns:
        Int. What has no static shape is left out.
    """
    total = 0
    for operation in graph.get_operations():
        if operation.type in ("While", "StatelessWhile"):
            body = graph._get_function(operation.get_attr("body").name).graph
            total += _steps(operation) * bytes_of_forward_pass(body, rows)
        for output in operation.outputs:
            shape = output.shape
            if shape.rank and shape[1:].is_fully_defined() and _is_batch_axis(shape[0], rows):
                of_row = math.prod(shape[1:]) * (1 if rows is None else shape[0] // rows)
                total += of_row * output.dtype.size
    return total


def _steps(loop):
    """Returns the steps of the longest sequence that a loop reads, as recurrent layers do."""
    lists = [tensor.op for tensor in loop.inputs if tensor.op.type == "TensorListFromTensor"]
    return max((of_list.inputs[0].shape[0] or 1 for of_list in lists), default=1)


def _is_batch_axis(size, rows):
    return size is None if rows is None else bool(size and rows) and size % rows == 0


def rows_at_a_time(forward_bytes, expected_rows, multiple=1):
    """Returns the chunk size for `chunk_size="auto"`.

    Args:
        forward_bytes: Int from `bytes_of_forward_pass`, with what else is kept per row.
        expected_rows: Int, rows that a step of one device is expected to get.
        multiple: Int, rows that are clipped together.

    Returns:
        Int, a multiple of `multiple`; `None` if all rows fit into `MEMORY_BUDGET`.
    """
    fitting = int(MEMORY_BUDGET / max(PEAK_OVER_FORWARD_PASS * forward_bytes, 1.0))
    if expected_rows * _LARGER_BATCHES <= fitting:
        return None
    return max(fitting // multiple, 1) * multiple
