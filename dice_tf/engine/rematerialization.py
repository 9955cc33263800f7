# Copyright 2026 The dice_tf Authors.
# SPDX-License-Identifier: Apache-2.0
"""Runs what is wrapped in `keras.remat` as it is, where every layer call must be seen.

A rematerialised function runs again in the backward pass, with its weights out of sight of
any tape around it. For a while it is therefore called without that wrapper. The values
and gradients are the same; memory is what remat would have saved.
"""

import inspect

from tensorflow.python.ops import custom_gradient

# How `tf.recompute_grad`, of which `keras.remat` is a form, names the function it returns.
_RECOMPUTED = "recompute_grad.<locals>.inner"
_DECORATORS = ("_graph_mode_decorator", "_eager_mode_decorator")


def interceptions():
    """Returns replacements for `overridden` by which rematerialised functions run as they are.

    A function may have been wrapped long ago, so that its calls are replaced, not `keras.remat`.
    With a TensorFlow that has other names nothing is replaced: the gradient engines refuse
    weights whose gradient they lose.
    """

    def make(decorator):
        def decorated(function, args, kwargs):
            if getattr(function, "__qualname__", None) != _RECOMPUTED:
                return decorator(function, args, kwargs)
            return inspect.getclosurevars(function).nonlocals["f"](*args, **kwargs)

        return decorated

    return [(custom_gradient, n, make) for n in _DECORATORS if hasattr(custom_gradient, n)]
