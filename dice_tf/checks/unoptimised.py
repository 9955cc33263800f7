# Copyright 2026 The dice_tf Authors.
# SPDX-License-Identifier: Apache-2.0
"""Functions that run a few times only, without the optimisations that pay over many steps.

TensorFlow rewrites a graph before its first run, and XLA compiles large Gram matrices. For a
check on a few examples that takes far longer than the run itself. What is computed stays the
same, from the same code.
"""

import contextlib
import functools
import threading

from tensorflow.core.protobuf import config_pb2
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
    context.ensure_initialized()
    before, outer = context.function_call_options, getattr(_current, "active", False)
    config = config_pb2.ConfigProto.FromString(before.config_proto_serialized)
    config.graph_options.rewrite_options.disable_meta_optimizer = True
    _current.active = True
    try:
        with overridden([(gram, "_compiled", _unless_unoptimised)]):
            context.function_call_options = eager_context.FunctionCallOptions(
                executor_type=before.executor_type, config_proto=config
            )
            yield
    finally:
        context.function_call_options = before
        _current.active = outer


def _unless_unoptimised(compiled):
    def choose(transposed):
        if getattr(_current, "active", False):
            return functools.partial(gram._from_gram_matrices, transposed=transposed)
        return compiled(transposed)

    return choose
