# Copyright 2026 The dice_tf Authors.
# SPDX-License-Identifier: Apache-2.0
r"""Where clipped SGD stops, and how error feedback gets it going again.

What it shows: with one outlier, SGD with clipped gradients converges to the wrong point
and stays there, however long it runs. DiceSGD feeds back what clipping cut off, and
reaches the optimum. There is no noise here: the bias is that of clipping alone.

The problem has one weight w and G + 1 examples. G of them sit at x_i = 1, one at
x_i = -G, and each pays the Huber loss (threshold G) of w - x_i. The G examples pull w up
with force 1 each at w = 0, and the outlier pulls it down with force G, so the optimum is
0. Clipped at C, the outlier pulls only with force C: the sum of clipped gradients is
G (w - 1) + C, which vanishes at

    w = 1 - C / G = C' / (C' + C),    where C' = G - C is what clipping cuts off.

DiceSGD with bounded residuals passes on C1 + C2 of every gradient, so that it stops where
SGD clipped at C1 + C2 stops: at the optimum if C1 + C2 >= G. To the letter of the paper
(bound_residuals=False) nothing is cut off for good, and C2 >= C1 is enough.

What it needs: nothing but the dependencies of the examples; no data. How long it takes:
under half a minute, most of it starting TensorFlow.

    python examples/clipping_bias.py
    python examples/clipping_bias.py --outlier_gradient=30 --l2_norm_clip=1 --steps=500

It prints a table of limits and writes clipping_bias.png to --output_dir.

Source: after Zhang et al., "Differentially Private SGD Without Clipping Bias: An
Error-Feedback Approach", ICLR 2024, appendix, "Example of constant clipping bias".
"""

import pathlib
from typing import NamedTuple
import warnings

from absl import app, flags
import keras
import numpy as np
import plots

import dice_tf

# Where the outlier pulls with its full force, and clipping has the most to cut off.
START = 2.0


class Method(NamedTuple):
    """One way of training the weight.

    Attributes:
        label: Text for the table and the plot.
        l2_norm_clip: C1; `None` for SGD without clipping.
        error_norm_clip: C2.
        bound_residuals: Form of the algorithm.
        limit: Where theory says that it stops, or `None` where theory is silent.
    """

    label: str
    l2_norm_clip: float | None
    error_norm_clip: float
    bound_residuals: bool
    limit: float | None


def clipped_limit(threshold, outlier_gradient):
    """Returns where SGD stops if gradients are clipped at `threshold`.

    Args:
        threshold: Float > 0.
        outlier_gradient: Int G >= 1, number of inliers and gradient of the outlier.

    Returns:
        `1 - threshold / G`, or 0 if nothing is cut off at the optimum.
    """
    return max(0.0, 1.0 - threshold / outlier_gradient)


def methods(outlier_gradient, l2_norm_clip):
    """Returns the methods compared: SGD, SGD clipped at C1, and three of DiceSGD.

    Args:
        outlier_gradient: Int G.
        l2_norm_clip: Float, C1.

    Returns:
        List of `Method`.
    """
    clip, rest = l2_norm_clip, outlier_gradient - l2_norm_clip
    bounded = lambda error_norm_clip: Method(
        f"DiceSGD, C1 + C2 = {clip + error_norm_clip:g}",
        clip,
        error_norm_clip,
        True,
        clipped_limit(clip + error_norm_clip, outlier_gradient),
    )
    return [
        Method("SGD without clipping", None, 0.0, True, 0.0),
        Method(
            f"SGD clipped at C1 = {clip:g}", clip, 0.0, True, clipped_limit(clip, outlier_gradient)
        ),
        bounded(rest / 2),
        bounded(rest),
        Method(f"Alg. 1 to the letter, C2 = {clip:g}", clip, clip, False, 0.0),
    ]


def make_examples(outlier_gradient):
    """Returns inputs (all 1) and targets: G times 1, and once -G.

    Args:
        outlier_gradient: Int G.

    Returns:
        A pair of float32 arrays `[G + 1, 1]`.
    """
    targets = np.ones((outlier_gradient + 1, 1), dtype=np.float32)
    targets[-1] = -outlier_gradient
    return np.ones_like(targets), targets


def train(method, outlier_gradient, learning_rate, steps, start=START):
    """Trains the weight with full batches.

    Args:
        method: `Method`.
        outlier_gradient: Int G.
        learning_rate: Float.
        steps: Int.
        start: Float, first value of the weight.

    Returns:
        Float64 `[steps + 1]`, the weight before the first and after every step.
    """
    x, y = make_examples(outlier_gradient)
    initializer = keras.initializers.Constant(start)
    # Its output is its weight, because the input is 1.
    weight = keras.layers.Dense(1, use_bias=False, kernel_initializer=initializer)
    model = keras.Sequential([keras.Input((1,)), weight])
    if method.l2_norm_clip is None:
        optimizer = keras.optimizers.SGD(learning_rate)
    else:
        with warnings.catch_warnings():
            # No noise, no privacy, on purpose: this is about the bias of clipping.
            warnings.filterwarnings("ignore", message="noise_multiplier=0")
            optimizer = dice_tf.DiceSGDOptimizer(
                learning_rate=learning_rate,
                l2_norm_clip=method.l2_norm_clip,
                error_norm_clip=method.error_norm_clip,
                bound_residuals=method.bound_residuals,
                noise_multiplier=0.0,
                expected_batch_size=len(x),
            )
    model.compile(optimizer, loss=keras.losses.Huber(delta=float(outlier_gradient)))
    trajectory = [start]
    for _ in range(steps):
        model.train_on_batch(x, y)
        trajectory.append(float(model.get_weights()[0].item()))
    return np.asarray(trajectory)


def format_table(rows):
    """Returns the table of limits as text.

    Args:
        rows: List of (`Method`, last value of the weight).
    """
    lines = [f"{'method':<34}{'predicted limit':>16}{'reached':>10}"]
    for method, reached in rows:
        lines.append(f"{method.label:<34}{method.limit:>16.4f}{reached:>10.4f}")
    return "\n".join(lines)


def run(flag_values):
    """Runs all methods, prints the table and draws the plot.

    Args:
        flag_values: Parsed flags, see `define_flags`.

    Returns:
        Dict from the label of a method to its trajectory.
    """
    outlier, clip = flag_values.outlier_gradient, flag_values.l2_norm_clip
    if clip >= outlier:
        raise app.UsageError(
            f"--l2_norm_clip={clip:g} must be below --outlier_gradient={outlier}: nothing would be "
            "clipped at the optimum."
        )
    print(
        f"{outlier} examples at 1, one at -{outlier}; Huber loss, optimum 0. No noise: not private."
    )
    trajectories, rows = {}, []
    for method in methods(outlier, clip):
        print(f"Training with {method.label} ...", flush=True)
        trajectory = train(method, outlier, flag_values.learning_rate, flag_values.steps)
        trajectories[method.label] = trajectory
        rows.append((method, trajectory[-1]))
    print(f"\nThe weight after {flag_values.steps} steps:\n{format_table(rows)}\n")

    folder = pathlib.Path(flag_values.output_dir)
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "clipping_bias.png"
    plots.plot_trajectories(
        path,
        trajectories,
        optimum=0.0,
        title=f"Clipping bias: {outlier} inliers, one outlier of gradient {outlier}",
        ylabel="weight w",
    )
    print(f"Wrote {path}")
    return trajectories


def define_flags(flag_values):
    """Defines the flags of this script.

    Args:
        flag_values: `absl.flags.FlagValues` to define them in.
    """
    options = {"flag_values": flag_values}
    flags.DEFINE_integer(
        "outlier_gradient", 9, "Gradient G of the outlier.", lower_bound=2, **options
    )
    flags.DEFINE_float(
        "l2_norm_clip", 3.0, "Clipping threshold C1, below G.", lower_bound=1e-3, **options
    )
    flags.DEFINE_float("learning_rate", 0.1, "Learning rate.", lower_bound=1e-6, **options)
    flags.DEFINE_integer("steps", 150, "Number of full-batch steps.", lower_bound=1, **options)
    flags.DEFINE_string("output_dir", "out/clipping_bias", "Folder of the plot.", **options)


def main(argv):
    """Runs the script with the flags of the command line."""
    del argv
    run(flags.FLAGS)


if __name__ == "__main__":
    define_flags(flags.FLAGS)
    app.run(main)
