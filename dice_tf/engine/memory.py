# Copyright 2026 The dice_tf Authors.
# SPDX-License-Identifier: Apache-2.0
r"""How many rows' gradients are computed at a time, so that they fit into memory.

An estimate from above, made before the first step from shapes alone: so it is the same on every
machine, and tells nothing about the data.
"""

import math
from typing import Any

import keras

from dice_tf.engine.contributions import gram_is_cheaper

# Bytes for the gradients of one chunk.
MEMORY_BUDGET = 4 * 2**30
# Of a layer that the engine is busy with: its output, cotangents and what becomes of them.
_COPIES = 6
# What a row takes, over the bytes of its forward pass, where not enough is known of layers.
PEAK_OVER_FORWARD_PASS = 5.0
_TRANSPOSED = (
    keras.layers.Conv1DTranspose, keras.layers.Conv2DTranspose, keras.layers.Conv3DTranspose,
)  # fmt: skip
_CONVOLUTIONS = (keras.layers.Conv1D, keras.layers.Conv2D, keras.layers.Conv3D, *_TRANSPOSED)
# Batches of random size exceed the expected one, hardly ever by more.
_LARGER_BATCHES = 1.25


def bytes_of_forward_pass(graph, rows):
    """Returns the bytes, per row, of all outputs of operations of a traced forward pass.

    The largest counts some times more, because a step makes copies of one at a time.

    Args:
        graph: `tf.Graph` in which the model was called.
        rows: Int, the static batch size, or `None` if it is not known there.

    Returns:
        Int. What has no static shape is left out.
    """
    sizes = [0, *_sizes(graph, rows)]
    return sum(sizes) + _COPIES * max(sizes)


def _sizes(graph, rows):
    """Yields the bytes, per row, of the outputs of all operations."""
    for operation in graph.get_operations():
        if operation.type in ("While", "StatelessWhile"):
            body = graph._get_function(operation.get_attr("body").name).graph
            yield from _steps(operation) * list(_sizes(body, rows))
        if operation.type == "ReadVariableOp":
            continue  # By chance its first axis may be as long as several batches.
        for output in operation.outputs:
            shape = output.shape
            if shape.rank and shape[1:].is_fully_defined() and _is_batch_axis(shape[0], rows):
                of_row = math.prod(shape[1:]) * (1 if rows is None else shape[0] // rows)
                yield of_row * output.dtype.size


def _steps(loop):
    """Returns the steps of the longest sequence that a loop reads, as recurrent layers do."""
    lists = [tensor.op for tensor in loop.inputs if tensor.op.type == "TensorListFromTensor"]
    return max((of_list.inputs[0].shape[0] or 1 for of_list in lists), default=1)


def _is_batch_axis(size, rows):
    return size is None if rows is None else bool(size and rows) and size % rows == 0


def bytes_of_row(model, forward_bytes, engine="auto"):
    """Returns the bytes that a gradient engine takes for a row at most.

    Inputs and cotangents of all layers are less than what a forward pass computes. What comes
    to them, in the layer-wise engine, are products that are written down for every example, and
    patches of convolutions.

    Args:
        model: A built Keras model.
        forward_bytes: Int from `bytes_of_forward_pass`.
        engine: `gradient_engine` of the optimizer.

    Returns:
        Int.
    """
    if engine == "vectorized":
        gradient = 4 * sum(math.prod(v.shape) for v in model.trainable_variables)
        return math.ceil(PEAK_OVER_FORWARD_PASS * (forward_bytes + gradient))
    added = sum(map(_added, model._flatten_layers()))
    if math.isinf(added):
        return math.ceil(PEAK_OVER_FORWARD_PASS * forward_bytes)
    return forward_bytes + added


def _added(layer):
    """Bytes per row of written-down products and patches of a layer; infinite if not known."""
    # Of the rows of a table that were looked up no products are made.
    if not layer._trainable_variables or isinstance(layer, keras.layers.Embedding):
        return 0
    positions = _positions(layer)
    total = 0
    for variable in layer._trainable_variables:
        f = variable.shape[-1] if variable.shape else 1
        k = math.prod(variable.shape) // max(f, 1)
        if k == 1 or positions is None or (positions > 1 and not gram_is_cheaper(positions, k, f)):
            total += 4 * math.prod(variable.shape)
    if isinstance(layer, _CONVOLUTIONS) and math.prod(layer.kernel_size) > 1:
        if positions is None:
            return math.inf
        # Patches, and a copy of them; of a transposed one they are of the cotangents.
        groups = getattr(layer, "groups", 1)
        if isinstance(layer, _TRANSPOSED):
            positions = math.ceil(positions / math.prod(layer.strides))
        kernel: Any = layer.kernel
        total += 2 * 4 * positions * math.prod(kernel.shape[:-1]) * groups
    return total


def _positions(layer):
    """Number of places at which a layer uses its weights; `None` if that is not known.

    Of layers within layers nobody has noted what they were called with.
    """
    total = 0
    for node in layer._inbound_nodes:
        for output in node.outputs:
            first = getattr(layer, "data_format", None) == "channels_first"
            places = output.shape[2:] if first else output.shape[1:-1]
            if None in places:
                return None
            total += math.prod(places)
    return total or None


def rows_at_a_time(row_bytes, expected_rows, multiple=1):
    """Returns the chunk size for `chunk_size="auto"`.

    Args:
        row_bytes: Number, bytes that a row takes.
        expected_rows: Int, rows that a step of one device is expected to get.
        multiple: Int, rows that are clipped together.

    Returns:
        Int, a multiple of `multiple`; `None` if all rows fit into `MEMORY_BUDGET`.
    """
    fitting = int(MEMORY_BUDGET / max(row_bytes, 1.0))
    if expected_rows * _LARGER_BATCHES <= fitting:
        return None
    return max(fitting // multiple, 1) * multiple
