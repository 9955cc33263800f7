# Copyright 2026 The dice_tf Authors.
# SPDX-License-Identifier: Apache-2.0
"""One measurement of Keras 2: plain SGD ("sgd"), or TF-Privacy ("model" or "optimizer")."""

import functools
import importlib.metadata
import os
import sys

# TensorFlow Privacy is written for Keras 2.
os.environ["TF_USE_LEGACY_KERAS"] = "1"

import models
import protocol
import tensorflow as tf

# Its own switch: the package as a whole imports an estimator that TensorFlow dropped.
sys.skip_tf_privacy_import = True
from tensorflow_privacy.privacy.fast_gradient_clipping import layer_registry
from tensorflow_privacy.privacy.keras_models import dp_keras_model
from tensorflow_privacy.privacy.optimizers import dp_optimizer_keras_vectorized


def main():
    """Measures what the command line specifies."""
    cell = protocol.specification()
    batch, way = cell["batch"], cell["way"]
    model_class, optimizer, reduction = None, tf.keras.optimizers.SGD(1e-3), "auto"
    if way == "model":
        model_class = functools.partial(
            dp_keras_model.DPModel,
            l2_norm_clip=1.0,
            noise_multiplier=1.0,
            use_xla=False,
            # Used where all layers with weights are in it: dense and embedding ones.
            layer_registry=layer_registry.make_default_layer_registry(),
        )
    elif way == "optimizer":
        reduction = "none"  # The optimizer takes a loss per example.
        optimizer = dp_optimizer_keras_vectorized.VectorizedDPKerasSGDOptimizer(
            l2_norm_clip=1.0, noise_multiplier=1.0, num_microbatches=batch, learning_rate=1e-3
        )
    model = models.build(tf.keras, cell["model"], model_class)
    loss = tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True, reduction=reduction)
    model.compile(optimizer, loss)
    x, y = protocol.make_examples(cell["model"], batch)

    run = protocol.keras_run(tf.keras, model, x, y, batch)
    result = protocol.time_alone(*run, cell)
    names = ("tensorflow", "tf-keras", "tensorflow-privacy")
    versions = {name: importlib.metadata.version(name) for name in names}
    protocol.report({**result, "versions": versions})


if __name__ == "__main__":
    main()
