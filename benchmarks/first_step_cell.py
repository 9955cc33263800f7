# Copyright 2026 The dice_tf Authors.
# SPDX-License-Identifier: Apache-2.0
"""The parts of a first step, in a process of its own; `first_step.py` starts one per model."""

import time

from cell import compiled_model, make_examples, warm_up
from protocol import first_rows, report, seconds_of_fit, specification
import tensorflow as tf

from dice_tf import check_gradients, private_train_step

_OPTIONS = {
    "optimizer": "sgd", "engine": "layerwise", "method": "DiceSGD", "chunk_size": "auto",
}  # fmt: skip


def measure(cell):
    """Takes a first step whole, then makes its parts once more, of other models.

    Args:
        cell: Dict with the name of a model and a batch size.

    Returns:
        Dict with lists of what the plain and the private model take: seconds of the whole, of the
        check and of tracing, and the number of operations of the traced step.
    """
    cell = {**_OPTIONS, **cell}
    x, y = make_examples(cell)
    warm_up(cell)
    batch = first_rows(x, cell["batch"]), y[: cell["batch"]]
    result = {"whole": [], "check": [], "trace": [], "operations": []}
    for private in (False, True):
        whole, _ = seconds_of_fit(compiled_model(cell, private), x, y, cell["batch"])
        model = compiled_model(cell, private)
        check = _seconds(lambda: check_gradients(model, batch)) if private else 0.0
        model.optimizer.build(model.trainable_variables)
        traced = []
        trace = _seconds(lambda: traced.append(_trace(model, batch, private)))
        values = {"whole": whole, "check": check, "trace": trace, "operations": _count(traced[0])}
        for name, value in values.items():
            result[name].append(value)
    return result


def _trace(model, batch, private):
    step = (lambda data: private_train_step(model, data)) if private else model.train_step
    specs = tf.nest.map_structure(lambda t: tf.TensorSpec((None, *t.shape[1:]), t.dtype), batch)
    return tf.function(step, autograph=False).get_concrete_function(specs)


def _count(traced):
    graph = traced.graph.as_graph_def()
    return len(graph.node) + sum(len(f.node_def) for f in graph.library.function)


def _seconds(action):
    start = time.perf_counter()
    action()
    return time.perf_counter() - start


if __name__ == "__main__":
    report(measure(specification()))
