# Copyright 2026 The dice_tf Authors.
# SPDX-License-Identifier: Apache-2.0
"""Float64 NumPy transcriptions of the algorithm, independent of the package.

Parameters are one flat vector. A problem is softmax regression, whose per-example
gradient is written out by hand.
"""

import numpy as np


def clip(vector, threshold):
    norm = np.linalg.norm(vector)
    return vector if norm <= threshold else vector * (threshold / norm)


def softmax_gradients(parameters, x, y, weights, classes):
    """Per-example gradients [batch, features * classes + classes] of cross-entropy."""
    features = x.shape[1]
    kernel = parameters[: features * classes].reshape(features, classes)
    bias = parameters[features * classes :]
    logits = x @ kernel + bias
    probabilities = np.exp(logits - logits.max(1, keepdims=True))
    probabilities /= probabilities.sum(1, keepdims=True)
    delta = (probabilities - np.eye(classes)[y]) * weights[:, None]
    kernel_part = x[:, :, None] * delta[:, None, :]
    return np.concatenate([kernel_part.reshape(len(x), -1), delta], axis=1)


def sgd_rule(learning_rate, momentum=0.0, nesterov=False):
    """The Keras SGD rule: returns a function (parameters, direction) -> parameters."""
    state = {"m": 0.0}

    def update(parameters, direction):
        if momentum == 0:
            return parameters - learning_rate * direction
        state["m"] = momentum * state["m"] - learning_rate * direction
        if nesterov:
            return parameters + momentum * state["m"] - learning_rate * direction
        return parameters + state["m"]

    return update


def dice_sgd(gradients, parameters, batches, c1, c2, divisor, update, bounded):
    """Runs noiseless DiceSGD; returns the parameters and the final error.

    Bounded: v = mean h + e, e' = mean clip(g - h, C2). To the letter (Alg. 1):
    v = mean h + clip(e, C2), e' = e + mean g - v. Means divide by the public constant.
    """
    parameters = np.array(parameters, np.float64)
    error = np.zeros_like(parameters)
    for batch in batches:
        head, residual, total = (np.zeros_like(parameters) for _ in range(3))
        for g in gradients(parameters, batch):
            h = clip(g, c1)
            head += h
            residual += clip(g - h, c2)
            total += g
        if bounded:
            v = head / divisor + error
            error = residual / divisor
        else:
            v = head / divisor + clip(error, c2)
            error = error + total / divisor - v
        parameters = update(parameters, v)
    return parameters, error
