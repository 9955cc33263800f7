# Copyright 2026 The dice_tf Authors.
# SPDX-License-Identifier: Apache-2.0
"""DiceSGD whose thresholds and noise move, in NumPy and float64, for several tests.

Written from `docs/privacy.md`, form 8, not from the package: every residual is kept by itself with
the step at which it was formed, and weighed anew when it is released.
"""

import numpy as np
import numpy_oracle
import tensorflow as tf


def pattern(step, index, shape):
    """Stands for standard normal noise: a function of the step and the variable."""
    return tf.random.stateless_normal(shape, tf.stack([tf.cast(step, tf.int32), index + 7]))


def fake_noise(key, step, shapes, stddev):
    """Takes the place of `noise.gaussian_noise`."""
    del key
    return {i: stddev * pattern(step, i, shape) for i, shape in shapes.items()}


def train(
    gradients,
    parameters,
    batches,
    *,
    parts,
    shapes,
    c1,
    ratio,
    z,
    divisor,
    learning_rate,
    feedback_steps=1,
    adaptive=None,
    noise_factors=None,
    clip_factors=None,
    rescale=False,
):
    """Runs the algorithm; returns the parameters and the thresholds of every step and after it.

    Args:
        gradients: Function from parameters and a batch to one gradient per unit that is present.
        parameters: Vector.
        batches: List of what `gradients` takes.
        parts: Slices of the vector, each with a threshold of its own.
        shapes: Shapes of the variables that make up the vector, for their noise.
        c1: First threshold of the whole.
        ratio: C2 over C1.
        z: Noise multiplier.
        divisor: Public batch size.
        learning_rate: Of plain SGD.
        feedback_steps: s.
        adaptive: `None`, or (quantile, learning rate, count noise multiplier).
        noise_factors: Function from the step to a factor, or `None`.
        clip_factors: The same for thresholds.
        rescale: Whether directions are divided by the threshold of their step.
    """
    parameters = np.array(parameters, np.float64)
    first = np.full(len(parts), c1 / len(parts) ** 0.5)
    adapted, formed, history = first.copy(), [], []
    for step, batch in enumerate(batches):
        now = adapted * (1.0 if clip_factors is None else clip_factors(step))
        history.append(now.copy())
        for earlier in formed:
            earlier["weight"] *= np.minimum(1.0, now / earlier["threshold"])
            earlier["threshold"] = now
        head, residual = np.zeros_like(parameters), np.zeros_like(parameters)
        counts = np.zeros(len(parts))
        for g in gradients(parameters, batch):
            norms = [np.linalg.norm(g[part]) for part in parts]
            if not np.all(np.isfinite(norms)):
                continue
            for layer, part in enumerate(parts):
                h = numpy_oracle.clip(g[part], now[layer])
                head[part] += h
                if ratio:
                    residual[part] += numpy_oracle.clip(g[part] - h, ratio * now[layer])
                if norms[layer] > 0:
                    counts[layer] += 0.5 if norms[layer] <= now[layer] else -0.5
        v = head.copy()
        for earlier in formed[-feedback_steps:]:
            for layer, part in enumerate(parts):
                v[part] += earlier["weight"][layer] * earlier["residual"][part] / feedback_steps
        formed.append(
            {"residual": residual, "weight": np.ones(len(parts)), "threshold": now.copy()}
        )
        stddev = z * np.linalg.norm(now)
        stddev *= 1.0 if noise_factors is None else noise_factors(step)
        noise = [pattern(step, i, shape).numpy().ravel() for i, shape in enumerate(shapes)]
        v = (v + stddev * np.concatenate(noise).astype(np.float64)) / divisor
        parameters = parameters - learning_rate * v / (np.linalg.norm(now) if rescale else 1.0)
        if adaptive is not None:
            quantile, rate, y = adaptive
            sigma = y * len(parts) ** 0.5 / 2
            noisy = counts + sigma * pattern(step, -1, [len(parts)]).numpy()
            adapted = adapted * np.exp(-rate * (0.5 + noisy / divisor - quantile))
    factor = 1.0 if clip_factors is None else clip_factors(len(batches))
    history.append(adapted * factor)
    return parameters, np.array(history)
