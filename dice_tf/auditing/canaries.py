# Copyright 2026 The dice_tf Authors.
# SPDX-License-Identifier: Apache-2.0
"""Canaries for audits: examples made to be recognisable in a model trained with them."""

from typing import Any

import keras
import numpy as np
from numpy.typing import ArrayLike, NDArray
import tensorflow as tf

from dice_tf.checks.arguments import check_integer, check_number
from dice_tf.engine import loss
from dice_tf.errors import AccountingError


def gradient_canaries(x: ArrayLike, num_canaries: int, scale: float = 1.0) -> NDArray[Any]:
    """Appends canaries whose gradients are orthogonal to those of all other examples.

    Each canary is alone in having a feature of its own and has no other. In a layer that
    multiplies features by a kernel, such as `Dense`, the gradient of a canary then lies in
    one row of the kernel, which no other example touches. (A bias is shared by all.)

    Args:
        x: Floats `[n, f]`, features of the ordinary examples; n may be 0.
        num_canaries: Int m >= 1.
        scale: Float > 0, value of a canary's feature. The larger, the larger its gradient:
            clipping does not let it grow beyond what an ordinary example may have.

    Returns:
        Float32 `[n + m, f + m]`: ordinary examples, then canaries.

    Raises:
        AccountingError: If an argument is out of range.

    Example:

    >>> gradient_canaries([[0.5, 0.25]], num_canaries=2, scale=9.0).tolist()
    [[0.5, 0.25, 0.0, 0.0], [0.0, 0.0, 9.0, 0.0], [0.0, 0.0, 0.0, 9.0]]

    Source: Nasr et al., "Tight auditing of differentially private machine learning",
    USENIX Security 2023 (Dirac canaries, there set as gradients).
    """
    x = np.asarray(x, dtype=np.float32)
    if x.ndim != 2:
        raise AccountingError(
            "Argument `x` must hold one row of features per example. Received: an array of shape "
            f"{x.shape}. Flatten the features first."
        )
    check_integer("num_canaries", num_canaries, error=AccountingError)
    scale = check_number("scale", scale, error=AccountingError)
    result = np.zeros((len(x) + num_canaries, x.shape[1] + num_canaries), dtype=np.float32)
    result[: len(x), : x.shape[1]] = x
    result[len(x) :, x.shape[1] :] = scale * np.eye(num_canaries)
    return result


def input_canaries(labels: ArrayLike, num_classes: int, seed: int | None = None) -> NDArray[Any]:
    """Gives examples wrong labels, so that a model can only fit them by memorising them.

    Args:
        labels: Ints `[m]` in [0, num_classes), the right labels of m real examples.
        num_classes: Int >= 2.
        seed: Int or `None`.

    Returns:
        Array like `labels`: for each example one of the other classes, at random.

    Raises:
        AccountingError: If an argument is out of range.

    Example:

    >>> labels = np.array([0, 1, 2, 3])
    >>> bool(np.any(input_canaries(labels, num_classes=4) == labels))
    False
    """
    labels = np.asarray(labels)
    check_integer("num_classes", num_classes, minimum=2, error=AccountingError)
    in_range = np.issubdtype(labels.dtype, np.integer) and labels.size
    if not in_range or labels.min() < 0 or labels.max() >= num_classes:
        raise AccountingError(
            f"Argument `labels` must hold whole numbers from 0 to {num_classes - 1}. "
            f"Received: labels={labels!r}."
        )
    offsets = np.random.default_rng(seed).integers(1, num_classes, size=labels.shape)
    return ((labels + offsets) % num_classes).astype(labels.dtype)


def canary_scores(model: keras.Model, x: Any, y: Any) -> NDArray[Any]:
    """Returns minus the loss of each canary: what a released model was trained on fits best.

    Args:
        model: A Keras model compiled with a loss.
        x: Features of the canaries, as for `fit`.
        y: Their targets.

    Returns:
        Float64 array `[num_canaries]`. Where canaries differ in how hard they are, subtract
        the scores that the model had before training.

    Raises:
        LossError: If the compiled loss has no value per example.

    Example:

    >>> model = keras.Sequential(
    ...     [keras.Input((2,)), keras.layers.Dense(1, kernel_initializer="ones")])
    >>> model.compile(loss="mse")
    >>> canary_scores(model, np.eye(2), np.array([[2.0], [3.0]])).tolist()
    [-1.0, -4.0]
    """
    x, y = keras.tree.map_structure(tf.convert_to_tensor, (x, y))
    y_pred = model(x, training=False)
    symbolic = lambda t: keras.KerasTensor(t.shape, keras.backend.standardize_dtype(t.dtype))
    loss.check_losses(model, *keras.tree.map_structure(symbolic, (y, y_pred)), None)
    return -np.asarray(loss.per_example_losses(model, x, y, y_pred, None), dtype=np.float64)
