# Copyright 2026 The dice_tf Authors.
# SPDX-License-Identifier: Apache-2.0
"""Float64 NumPy transcriptions of the algorithm, independent of the package.

Parameters are one flat vector. A problem is softmax regression, whose per-example
gradient is written out by hand.
"""

import numpy as np

# What norms are raised by for the sake of rounding; docs/privacy.md says so.
RAISED = 1 + 1e-5


def clip(vector, threshold):
    norm = RAISED * np.linalg.norm(vector)
    return vector if norm <= threshold else vector * (threshold / norm)


def clip_parts(vector, threshold, parts):
    """Clips the entries `rows` of a vector to `share * threshold`, for every part."""
    result = np.full_like(vector, np.nan)
    for rows, share in parts:
        result[rows] = clip(vector[rows], share * threshold)
    return result


def two_layer_gradients(parameters, x, y, weights, hidden, classes):
    """The same for tanh units before the softmax: kernel, bias, kernel, bias, one after another."""
    split = (x.shape[1] + 1) * hidden
    kernel, bias = (
        parameters[: split - hidden].reshape(-1, hidden),
        parameters[split - hidden : split],
    )
    units = np.tanh(x @ kernel + bias)
    second = softmax_gradients(parameters[split:], units, y, weights, classes)
    # The gradient of the second bias is that of the logits.
    back = second[:, -classes:] @ parameters[split:-classes].reshape(hidden, classes).T
    back *= 1 - units**2
    first = x[:, :, None] * back[:, None, :]
    return np.concatenate([first.reshape(len(x), -1), back, second], axis=1)


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


def adam_rule(learning_rate, beta_1=0.9, beta_2=0.999, epsilon=1e-7):
    """The Keras Adam rule: returns a function (parameters, direction) -> parameters."""
    state = {"t": 0, "m": 0.0, "v": 0.0}

    def update(parameters, direction):
        state["t"] += 1
        state["m"] = beta_1 * state["m"] + (1 - beta_1) * direction
        state["v"] = beta_2 * state["v"] + (1 - beta_2) * direction**2
        correction = np.sqrt(1 - beta_2 ** state["t"]) / (1 - beta_1 ** state["t"])
        return parameters - learning_rate * correction * state["m"] / (
            np.sqrt(state["v"]) + epsilon
        )

    return update


def normalised(vector, stability=0.01):
    return vector / (RAISED * np.linalg.norm(vector) + stability)


def dice_sgd(
    gradients,
    parameters,
    batches,
    c1,
    c2,
    divisor,
    update,
    bounded,
    feedback_steps=1,
    automatic=False,
    parts=None,
):
    """Runs noiseless DiceSGD; returns the parameters and the final error.

    Bounded: v = mean h + (e_1 + ... + e_s) / s, with e_k = mean clip(g - h, C2) of k steps
    ago; the errors come back one after the other. To the letter (Alg. 1):
    v = mean h + clip(e, C2), e' = e + mean g - v. Means divide by the public constant.

    Automatic: normalised vectors in the place of clipped ones, and residuals that are not
    longer than the head.

    Parts: pairs of indices and a share of both thresholds, to which these entries are clipped.
    """
    parts = [(slice(None), 1.0)] if parts is None else parts
    parameters = np.array(parameters, np.float64)
    error = np.zeros_like(parameters)
    history = [np.zeros_like(parameters) for _ in range(feedback_steps)]
    for batch in batches:
        head, residual, total = (np.zeros_like(parameters) for _ in range(3))
        for g in gradients(parameters, batch):
            h = normalised(g) if automatic else clip_parts(g, c1, parts)
            head += h
            residual += clip_parts(g - h, np.linalg.norm(h) if automatic else c2, parts)
            total += g
        if bounded:
            v = head / divisor + (c2 > 0) * sum(history[-feedback_steps:]) / feedback_steps
            history.append(residual / divisor)
        else:
            v = head / divisor + (normalised(error) if automatic else clip(error, c2))
            error = error + total / divisor - v
        parameters = update(parameters, v)
    return parameters, np.concatenate(history[: -feedback_steps - 1 : -1]) if bounded else error
