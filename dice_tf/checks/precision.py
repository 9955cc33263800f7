# Copyright 2026 The dice_tf Authors.
# SPDX-License-Identifier: Apache-2.0
"""Products of float32 numbers must be products of float32 numbers.

By default TensorFlow multiplies float32 matrices on recent GPUs in TensorFloat-32, with
10 bits of mantissa instead of 23; on recent processors it can be told to take bfloat16, with
7. The norm of a per-example gradient comes from such products, and where their terms cancel
it could come out far too small: the example would then be clipped too little, and move the
update by more than the mechanism assumes.
"""

import functools
import os
import re
import warnings

import tensorflow as tf
from tensorflow.python.eager import context

from dice_tf.errors import GradientEngineError

# What tells oneDNN and the Arm Compute Library to round, before TensorFlow is imported.
_ENVIRONMENT = (
    "TF_SET_ONEDNN_FPMATH_MODE",
    "ONEDNN_DEFAULT_FPMATH_MODE",
    "DNNL_DEFAULT_FPMATH_MODE",
    "DNNL_ACL_ENABLE_FAST_MATH",
)
_IGNORES_NANS = re.compile("fast_math_honor_(nans|infs)=(false|0)", re.IGNORECASE)


def use_float32_products():
    """Turns TensorFloat-32 off, for the whole process, if there is a GPU that may use it."""
    if _gpu_rounds_products():
        tf.config.experimental.enable_tensor_float_32_execution(False)
        warnings.warn(
            "TensorFloat-32 is now off in this process: it rounds the products from which "
            "gradient norms are computed, and clipping must not underestimate a norm. To say so "
            "yourself, call tf.config.experimental.enable_tensor_float_32_execution(False).",
            stacklevel=4,
        )


def check_float32_products():
    """Refuses to take a private step with products that are rounded.

    Raises:
        GradientEngineError: If TensorFloat-32 was turned on again and there is a GPU, if
            TensorFlow or the processor is told to compute float32 products in half precision, or
            if XLA is told that there is neither nan nor inf.
    """
    if _gpu_rounds_products():
        raise GradientEngineError(
            "TensorFloat-32 was turned on again after the private optimizer was made, and norms of "
            "gradients would be underestimated. Received: "
            "tf.config.experimental.tensor_float_32_execution_enabled()=True. Call "
            "tf.config.experimental.enable_tensor_float_32_execution(False); for speed use the "
            "dtype policy 'mixed_bfloat16', whose norms are computed in float32."
        )
    # The public function makes a whole configuration for it, at every step.
    options = getattr(context.context(), "_optimizer_experimental_options", None)
    if options is None:
        options = tf.config.optimizer.get_experimental_options()
    rewrites = [n for n, on in options.items() if on and n.startswith("auto_mixed_precision")]
    if rewrites:
        raise GradientEngineError(
            "TensorFlow is to rewrite float32 products to half precision, and norms of gradients "
            f"would be underestimated. Received: tf.config.optimizer options {rewrites}. Set them "
            "to False; for speed use the dtype policy 'mixed_bfloat16', whose norms are computed "
            "in float32."
        )
    _check_xla_flags()
    if _host_rounds_products():
        given = {name: os.environ[name] for name in _ENVIRONMENT if name in os.environ}
        raise GradientEngineError(
            "This process computes products of float32 matrices in half precision, and norms of "
            f"gradients would be underestimated. Received: environment variables {given}. Start "
            "Python without them; for speed use the dtype policy 'mixed_bfloat16', whose norms are "
            "computed in float32."
        )


def _check_xla_flags():
    flags = [flag for flag in os.environ.get("XLA_FLAGS", "").split() if _IGNORES_NANS.search(flag)]
    if flags:
        raise GradientEngineError(
            "XLA is told that there are no numbers like nan and inf, and would leave out the tests "
            "by which a gradient that is not finite contributes nothing. Received: environment "
            f"variable XLA_FLAGS with {flags}. Start Python without them."
        )


@functools.cache
def _host_rounds_products():
    """Whether the processor does; measured, because that depends on its instructions as well."""
    with tf.init_scope(), tf.device("CPU:0"):
        # 13 bits of mantissa. Several matrices, because oneDNN is not asked for a small one.
        entries = tf.fill([2, 8, 8], 1.0 + 2.0**-12)
        return bool(tf.reduce_any(tf.linalg.matmul(entries, tf.ones_like(entries)) != 8 * entries))


def _gpu_rounds_products():
    enabled = tf.config.experimental.tensor_float_32_execution_enabled()
    return enabled and bool(tf.config.get_visible_devices("GPU"))
