# Copyright 2026 The dice_tf Authors.
# SPDX-License-Identifier: Apache-2.0
r"""Trains many private linear models at once, on the same draws of a sampler.

The gradient of one example of a linear model is an outer product, \(g_i = x_i \otimes e_i\)
with \(e_i\) the gradient of its loss by its outputs, so

\[\lVert g_i \rVert = \lVert x_i \rVert \, \lVert e_i \rVert, \qquad
  \sum_i a_i g_i = X^\top (a \odot E).\]

Models that differ in thresholds, noise and learning rate side by side are one wide matrix, and a
step of all of them is three products. The draws are those of the package's own samplers;
`tests/stacked_trainer_test.py` compares the result with `DiceSGDOptimizer`.

This is for searches. It has none of the package's checks, and states no guarantee.
"""

from typing import NamedTuple

import numpy as np

# Of `dice_tf.mechanism.rounding`: norms are raised by so much before they are compared.
_RAISED = 1.0 + 1e-5


class Configuration(NamedTuple):
    """What one of the models has of its own.

    Attributes:
        l2_norm_clip: Float, C1.
        error_norm_clip: Float, C2; 0 is DP-SGD.
        noise_multiplier: Float, noise on the sum of clipped gradients over C1.
        learning_rate: Float.
        momentum: Float in [0, 1).
        averaging: Float in [0, 1), momentum of the average of iterates; 0 is none.
    """

    l2_norm_clip: float
    error_norm_clip: float
    noise_multiplier: float
    learning_rate: float
    momentum: float
    averaging: float


def train(data, outputs, errors, configurations, sampling, epochs, *, feedback_steps, noise_seed):
    """Trains one linear model from zero for each configuration.

    Args:
        data: Pair of float32 inputs `[examples, inputs]` and targets `[examples]`.
        outputs: Int, number of outputs.
        errors: Function of model outputs `[rows, models, outputs]`, which it may overwrite, and
            targets `[rows]` to the gradients of the losses by the outputs, of the same shape.
        configurations: List of `Configuration`.
        sampling: `dice_tf.Sampling` that draws the batches.
        epochs: Int.
        feedback_steps: Int, over how many steps a residual is fed back.
        noise_seed: Int. All models get the same normal numbers, each scaled to its noise.

    Returns:
        Float32 `[inputs, models, outputs]`, the weights, averaged where the configuration says so.
    """
    x, y = data
    inputs, models = x.shape[1], len(configurations)
    column = lambda name: np.array([getattr(c, name) for c in configurations], np.float32)
    norms = np.linalg.norm(x, axis=1) * np.float32(_RAISED)
    c1, c2 = column("l2_norm_clip"), column("error_norm_clip")
    batch_size = np.float32(sampling.expected_batch_size)
    noise = (column("noise_multiplier") * c1 / batch_size)[:, np.newaxis]
    spread = lambda values: np.repeat(values, outputs)  # One number per column of the matrices.
    rate, momentum, averaging = map(spread, map(column, ("learning_rate", "momentum", "averaging")))
    random = np.random.default_rng(noise_seed)
    zeros = lambda: np.zeros((inputs, models * outputs), np.float32)
    weights, velocity, average = zeros(), zeros(), zeros()
    feedback = c2.any()
    slots = [zeros() for _ in range(feedback_steps)] if feedback else []
    pending = zeros()

    for step, rows in enumerate(_batches(sampling, epochs)):
        batch = x[rows]
        errors_of = errors((batch @ weights).reshape(len(rows), models, outputs), y[rows])
        lengths = np.sqrt(np.einsum("rmo,rmo->rm", errors_of, errors_of))
        lengths *= norms[rows, np.newaxis]
        np.maximum(lengths, np.float32(1e-30), out=lengths)
        head = np.minimum(1, c1 / lengths)
        weighted = lambda factor: (errors_of * (factor / batch_size)[..., np.newaxis]).reshape(
            len(rows), models * outputs
        )
        direction = batch.T @ weighted(head)
        if feedback:
            direction += pending / np.float32(feedback_steps)
            slot = slots[step % feedback_steps]
            pending -= slot
            slot[:] = batch.T @ weighted(np.minimum(1 - head, c2 / lengths))
            pending += slot
        normal = random.standard_normal((inputs, 1, outputs), np.float32)
        direction.reshape(inputs, models, outputs)[:] += normal * noise
        # The rule of Keras' SGD.
        velocity *= momentum
        direction *= rate
        velocity -= direction
        weights += velocity
        if step:
            average += (1 - averaging) * (weights - average)
        else:
            # Keras' average begins with the first iterate, not with the start.
            average[:] = weights
    return average.reshape(inputs, models, outputs)


def _batches(sampling, epochs):
    """Yields the rows that the sampler draws, step by step, without its padding."""
    begin, draw, _ = sampling.draw_plan(sampling.steps(epochs))
    for _ in range(epochs):
        iteration = begin()
        for step in range(sampling.steps_per_epoch):
            rows, shown = draw(iteration, step)
            yield rows[shown > 0]


def softmax_errors(outputs, targets):
    """Returns the gradients of cross-entropy by the logits: probabilities less one-hot targets.

    Args:
        outputs: Float32 `[rows, models, classes]`, overwritten.
        targets: Ints `[rows]`.
    """
    outputs -= outputs.max(2, keepdims=True)
    np.exp(outputs, out=outputs)
    outputs /= outputs.sum(2, keepdims=True)
    outputs[np.arange(len(targets)), :, targets] -= 1
    return outputs


def squared_errors(outputs, targets):
    """Returns the gradients of squares by the one output: twice the deviations.

    Args:
        outputs: Float32 `[rows, models, 1]`, overwritten.
        targets: Float32 `[rows]`.
    """
    outputs -= targets[:, np.newaxis, np.newaxis]
    outputs *= 2
    return outputs
