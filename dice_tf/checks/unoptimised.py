# Copyright 2026 The dice_tf Authors.
# SPDX-License-Identifier: Apache-2.0
"""Functions without the optimisations that do not pay.

TensorFlow rewrites a graph before its first run, and XLA compiles large Gram matrices. For a
check on a few examples that takes far longer than the run itself. What is computed stays the
same, from the same code.
"""

import contextlib
import functools
import threading

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


def without_memory_plan(options):
    """Returns options of calls with which TensorFlow makes no plan to save memory.

    It takes a quarter of the time to make a private step ready, and makes sums of two slower.
    Functions run with other options are made ready anew, so all their runs must be with one.

    Args:
        options: `FunctionCallOptions` of the eager context, whose other settings stay.
    """
    return _with(options, memory_optimization=rewriter_config_pb2.RewriterConfig.NO_MEM_OPT)


def _with(options, **rewriting):
    config = config_pb2.ConfigProto.FromString(options.config_proto_serialized)
    for name, value in rewriting.items():
        setattr(config.graph_options.rewrite_options, name, value)
    return eager_context.FunctionCallOptions(
        executor_type=options.executor_type, config_proto=config
    )


def _unless_unoptimised(compiled):
    def choose(transposed):
        if getattr(_current, "active", False):
            return functools.partial(gram._from_gram_matrices, transposed=transposed)
        return compiled(transposed)

    return choose
