# Copyright 2026 The dice_tf Authors.
# SPDX-License-Identifier: Apache-2.0
"""Functions without the optimisations that do not pay.

TensorFlow rewrites a graph before its first run, and XLA compiles large Gram matrices. For a
check on a few examples that takes far longer than the run itself. A step is rewritten, but not
twice. What is computed stays the same, from the same code.
"""

import contextlib
import functools
import threading
from typing import Any

import tensorflow as tf
from tensorflow.core.protobuf import config_pb2, rewriter_config_pb2
from tensorflow.python.eager import context as eager_context

from dice_tf.engine import gram
from dice_tf.engine.overrides import overridden

_current = threading.local()


@contextlib.contextmanager
def unoptimised():
    """Context in which this thread runs new functions as they were traced, and no XLA for norms.

    Both are settings of one thread: others that train at the same time keep theirs.
    """
    context = eager_context.context()
    before, outer = context.function_call_options, getattr(_current, "active", False)
    _current.active = True
    try:
        with overridden([(gram, "_compiled", _unless_unoptimised)]):
            context.function_call_options = _with(before, disable_meta_optimizer=True)
            yield
    finally:
        context.function_call_options = before
        _current.active = outer


def rewritten_once(options):
    """Returns options of calls with which TensorFlow makes a private step ready sooner.

    * It makes no plan to save memory, which takes a quarter of the time, and makes sums of two
      slower.
    * It rewrites the graph once. A second round takes more than half the time of the first, and
      steps of no model that was measured became faster by it.
    * It looks for no better layout of images where there is none to be had, without a GPU.

    Functions run with other options are made ready anew, so all their runs must be with one.

    Args:
        options: `FunctionCallOptions` of the eager context, whose other settings stay.
    """
    config = rewriter_config_pb2.RewriterConfig
    before = _rewriting(config_pb2.ConfigProto.FromString(options.config_proto_serialized))
    chosen: dict[str, Any] = {"memory_optimization": config.NO_MEM_OPT}
    if before.meta_optimizer_iterations == config.DEFAULT_NUM_ITERS:
        chosen["meta_optimizer_iterations"] = config.ONE
    on_cpu = all(device.device_type == "CPU" for device in tf.config.list_physical_devices())
    if on_cpu and before.layout_optimizer == config.DEFAULT:
        chosen["layout_optimizer"] = config.OFF
    return _with(options, **chosen)


def _with(options, **rewriting):
    config = config_pb2.ConfigProto.FromString(options.config_proto_serialized)
    for name, value in rewriting.items():
        setattr(_rewriting(config), name, value)
    return eager_context.FunctionCallOptions(
        executor_type=options.executor_type, config_proto=config
    )


def _rewriting(config):
    return config.graph_options.rewrite_options


def _unless_unoptimised(compiled):
    def choose(transposed):
        if getattr(_current, "active", False):
            return functools.partial(gram._from_gram_matrices, transposed=transposed)
        return compiled(transposed)

    return choose
