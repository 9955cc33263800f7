# Copyright 2026 The dice_tf Authors.
# SPDX-License-Identifier: Apache-2.0
"""Products of float32 numbers must be products of float32 numbers.

By default TensorFlow multiplies float32 matrices on recent GPUs in TensorFloat-32, with
10 bits of mantissa instead of 23. The norm of a per-example gradient comes from such
products, and where their terms cancel it could come out far too small: the example would
then be clipped too little, and move the update by more than the mechanism assumes.
"""

import warnings

import tensorflow as tf

from dice_tf.errors import GradientEngineError


def use_float32_products():
    """Turns TensorFloat-32 off, for the whole process, if there is a GPU that may use it."""
    if _rounds_products():
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
        GradientEngineError: If TensorFloat-32 was turned on again and there is a GPU.
    """
    if _rounds_products():
        raise GradientEngineError(
            "TensorFloat-32 was turned on again after the private optimizer was made, and norms of "
            "gradients would be underestimated. Received: "
            "tf.config.experimental.tensor_float_32_execution_enabled()=True. Call "
            "tf.config.experimental.enable_tensor_float_32_execution(False); for speed use the "
            "dtype policy 'mixed_bfloat16', whose norms are computed in float32."
        )


def _rounds_products():
    enabled = tf.config.experimental.tensor_float_32_execution_enabled()
    return enabled and bool(tf.config.get_visible_devices("GPU"))
