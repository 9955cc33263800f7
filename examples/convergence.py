# Copyright 2026 The dice_tf Authors.
# SPDX-License-Identifier: Apache-2.0
r"""How near to the optimum training gets, against the number of steps and the paper's bound.

What it shows: with noise and clipping, on problems whose smoothness and optimum are known, the
mean over T steps of the squared norm of the gradient, for

* SGD, without clipping and noise;
* DP-SGD clipped at C1, which levels off: clipped gradients vanish elsewhere;
* DiceSGD as the paper has it (`bound_residuals=False`), which goes on, below the bound of the
  paper's convergence theorem, 2 sqrt(2 L D (2 C1^2 + 3 C2^2 + d sigma1^2) / T);
* DiceSGD with bounded residuals, the default, which levels off where SGD does that clips at
  C1 + C2, so lower than DP-SGD.

All take the theorem's step size for the T in question, so every point is a training of its own.

Problems, both with a tenth of the examples far from the rest, and so with skewed gradients:

* quadratic: half the mean squared distance from N points; L = 1, the optimum is their mean;
* logistic regression; L is the largest eigenvalue of X'X / (4 N), and the optimum is found
  by Newton's method.

It is about optimization. The noise is the same for all methods, so that they have different
privacy: the paper's form would need far more for the same epsilon (docs/privacy.md).

What it needs: nothing but the dependencies of the examples; no data. How long it takes:
about three minutes on two cores.

    python examples/convergence.py
    python examples/convergence.py --steps=1000 --seeds=1

It prints a table for each problem and writes convergence.png to --output_dir.

Source: Zhang et al., ICLR 2024, convergence theorem of DiceSGD.
"""

import math
import pathlib
from typing import NamedTuple

from absl import app, flags
import numpy as np
import plots
import tensorflow as tf

from dice_tf import accounting
from dice_tf.mechanism import DiceMechanism, feedback
from dice_tf.mechanism.clipping import clip_weights

NUM_EXAMPLES, DIMENSION, BATCH_SIZE = 100, 10, 16
# sigma1 as a part of C1.
NOISE = 0.5
METHODS = ("SGD", "DP-SGD", "DiceSGD, as in the paper", "DiceSGD, bounded residuals")
SEED = 0


class Problem(NamedTuple):
    """A mean of N losses of which all is known that the theorem asks for.

    Attributes:
        name: Text.
        inputs: Float64 `[N, d]`.
        targets: Float64 `[N]`, labels of -1 and 1, or `None` for the quadratic problem.
        smoothness: Float, L.
        optimum: Float64 `[d]`.
        l2_norm_clip: Float, C1.
    """

    name: str
    inputs: np.ndarray
    targets: np.ndarray | None
    smoothness: float
    optimum: np.ndarray
    l2_norm_clip: float

    def gradients(self, weights, inputs, targets, ops=np):
        """Returns the gradients of examples, `[rows, d]`, by NumPy or TensorFlow."""
        if targets is None:
            return weights - inputs
        margins = targets * ops.tensordot(inputs, weights, 1)
        return -(targets / (1 + ops.exp(margins)))[:, None] * inputs

    def gradient(self, weights):
        """Returns the mean of all gradients, `[d]`."""
        return self.gradients(weights, self.inputs, self.targets).mean(0)

    def loss(self, weights):
        """Returns the mean of all losses."""
        if self.targets is None:
            return float(((weights - self.inputs) ** 2).sum(1).mean() / 2)
        return float(np.logaddexp(0, -self.targets * (self.inputs @ weights)).mean())

    @property
    def loss_gap(self):
        """Float, D: by how much the loss at the start, 0, is above the least."""
        return self.loss(np.zeros(DIMENSION)) - self.loss(self.optimum)

    @property
    def gradient_deviation(self):
        """Float, the paper's sigma: the larger one of those at the start and at the optimum."""
        found = []
        for weights in (np.zeros(DIMENSION), self.optimum):
            gradients = self.gradients(weights, self.inputs, self.targets)
            found.append(math.sqrt(((gradients - gradients.mean(0)) ** 2).sum(1).mean()))
        return max(found)

    @property
    def noise_stddev(self):
        """Float, sigma1, on the mean."""
        return NOISE * self.l2_norm_clip

    @property
    def error_norm_clip(self):
        """Float, C2: the least that the theorem permits."""
        return 3 * self.l2_norm_clip + self.gradient_deviation / BATCH_SIZE


def quadratic(rng):
    """Returns points of which a tenth is far away, on one side."""
    points = rng.normal(0, 0.3, (NUM_EXAMPLES, DIMENSION))
    points[: NUM_EXAMPLES // 10, 0] += 15.0
    return Problem("quadratic", points, None, 1.0, points.mean(0), l2_norm_clip=1.0)


def logistic(rng):
    """Returns a classification with a tenth of long inputs that contradict the others."""
    inputs = rng.normal(0, 1.0, (NUM_EXAMPLES, DIMENSION))
    targets = np.where(inputs[:, 0] + rng.normal(0, 1.0, NUM_EXAMPLES) > 0, 1.0, -1.0)
    outliers = slice(0, NUM_EXAMPLES // 10)
    inputs[outliers] *= 0.3
    inputs[outliers, 0] += 6.0
    targets[outliers] = np.where(np.arange(NUM_EXAMPLES // 10) < 1, 1.0, -1.0)
    smoothness = np.linalg.eigvalsh(inputs.T @ inputs)[-1] / (4 * NUM_EXAMPLES)
    problem = Problem("logistic", inputs, targets, float(smoothness), np.zeros(DIMENSION), 0.5)
    weights = np.zeros(DIMENSION)
    for _ in range(100):
        chances = 1 / (1 + np.exp(inputs @ weights))
        hessian = (inputs * (chances * (1 - chances))[:, None]).T @ inputs / NUM_EXAMPLES
        step = np.linalg.solve(hessian, problem.gradient(weights))
        # Damped, so that it cannot overshoot from where the losses are flat.
        weights = weights - step / max(1.0, np.linalg.norm(step))
    return problem._replace(optimum=weights)


def problems():
    """Returns the problems, always the same."""
    return [make(np.random.default_rng(SEED)) for make in (quadratic, logistic)]


def mechanism_of(method, problem):
    """Returns the `DiceMechanism` of a method. Its noise is added by `train`."""
    arguments = {
        "SGD": dict(l2_norm_clip=1e6, error_norm_clip=0.0),
        "DP-SGD": dict(l2_norm_clip=problem.l2_norm_clip, error_norm_clip=0.0),
    }.get(
        method,
        dict(
            l2_norm_clip=problem.l2_norm_clip,
            error_norm_clip=problem.error_norm_clip,
            bound_residuals=method != "DiceSGD, as in the paper",
        ),
    )
    return DiceMechanism(noise_multiplier=1.0, expected_batch_size=BATCH_SIZE, **arguments)


def theorem(problem, steps):
    """Returns the step size and the bound of the paper's theorem."""
    arguments = dict(
        loss_gap=problem.loss_gap,
        smoothness=problem.smoothness,
        num_parameters=DIMENSION,
        steps=steps,
        l2_norm_clip=problem.l2_norm_clip,
        error_norm_clip=problem.error_norm_clip,
        noise_stddev=problem.noise_stddev,
        gradient_deviation=problem.gradient_deviation,
        expected_batch_size=BATCH_SIZE,
    )
    return accounting.paper_step_size(**arguments), accounting.paper_gradient_bound(**arguments)


def make_trainer(problem, mechanism):
    """Returns a function (rows `[T, B]`, noise `[T, d]`, step size, steps) -> mean squared norm.

    Plain SGD from 0 with the package's own clipping and error feedback. The norm is that of the
    gradient of the whole loss, before each of the first `steps` steps.
    """
    inputs = tf.constant(problem.inputs, tf.float32)
    targets = None if problem.targets is None else tf.constant(problem.targets, tf.float32)

    # By XLA, because operations are so small that starting them would be all that it costs.
    @tf.function(jit_compile=True, reduce_retracing=True)
    def train(rows, noise, step_size, steps):
        weights = tf.zeros([DIMENSION])
        errors = [tf.zeros([DIMENSION])] if mechanism.error_norm_clip else []
        total = tf.zeros([], tf.float64)
        for step in tf.range(steps):
            whole = problem.gradients(weights, inputs, targets, TF)
            total += tf.cast(tf.reduce_sum(tf.reduce_mean(whole, 0) ** 2), tf.float64)
            gradients = tf.gather(whole, rows[step])
            head, residual = clip_weights(tf.norm(gradients, axis=1), mechanism)
            mean = lambda each: [
                tf.linalg.matvec(gradients, each, transpose_a=True) / mechanism.divisor
            ]
            direction, errors = feedback.direction_and_errors(
                mean(head), [] if residual is None else mean(residual), errors, mechanism
            )
            weights -= step_size * (direction[0] + noise[step])
        return total / tf.cast(steps, tf.float64)

    return train


class TF:
    """What `Problem.gradients` needs of TensorFlow, under NumPy's names."""

    exp, tensordot = staticmethod(tf.exp), staticmethod(tf.tensordot)


def draws(steps, seed):
    """Returns the rows of the batches and the noise of standard deviation 1."""
    rng = np.random.default_rng([SEED, seed])
    rows = rng.integers(NUM_EXAMPLES, size=(steps, BATCH_SIZE), dtype="int32")
    return rows, rng.standard_normal((steps, DIMENSION), dtype="float32")


def clipped_level(problem, threshold):
    """Returns the squared norm of the gradient where gradients clipped at `threshold` add up to 0.

    By descent in float64, without noise and feedback.
    """
    weights = np.zeros(DIMENSION)
    for _ in range(50_000):
        gradients = problem.gradients(weights, problem.inputs, problem.targets)
        norms = np.maximum(np.linalg.norm(gradients, axis=1), 1e-300)
        step = (gradients * np.minimum(1, threshold / norms)[:, None]).mean(0)
        weights = weights - step / problem.smoothness
        if np.linalg.norm(step) < 1e-10:
            break
    return float((problem.gradient(weights) ** 2).sum())


def levels(problem):
    """Returns where DP-SGD and DiceSGD with bounded residuals level off, by name of the method."""
    return {
        METHODS[1]: clipped_level(problem, problem.l2_norm_clip),
        METHODS[3]: clipped_level(problem, problem.l2_norm_clip + problem.error_norm_clip),
    }


def measure(problem, grid, seeds):
    """Returns a dict from the name of a method to `[T in grid]`, means over seeds."""
    found = {method: np.zeros(len(grid)) for method in METHODS}
    for method in METHODS:
        train = make_trainer(problem, mechanism_of(method, problem))
        noise_stddev = np.float32(0.0 if method == "SGD" else problem.noise_stddev)
        print(f"  {method} ...", flush=True)
        for seed in range(seeds):
            rows, noise = draws(grid[-1], seed)
            for place, steps in enumerate(grid):
                step_size = tf.constant(theorem(problem, steps)[0], tf.float32)
                of_run = train(rows, noise_stddev * noise, step_size, tf.constant(steps))
                found[method][place] += float(of_run) / seeds
    return found


def format_table(problem, grid, found, level):
    """Returns the measured means, the bound, and the levels as text."""
    bounds = [theorem(problem, steps)[1] for steps in grid]
    heads = ["bound", *METHODS]
    lines = ["".join([f"{'T':>8}", *(f"{head:>28}" for head in heads)])]
    for place, steps in enumerate(grid):
        values = [bounds[place], *(found[method][place] for method in METHODS)]
        lines.append("".join([f"{steps:>8}", *(f"{value:>28.4g}" for value in values)]))
    last = [f"{level[head]:.4g}" if head in level else "" for head in heads]
    lines.append("".join([f"{'level':>8}", *(f"{text:>28}" for text in last)]))
    return "\n".join(lines)


def run(flag_values):
    """Trains, prints the tables and draws the figure.

    Args:
        flag_values: Parsed flags, see `define_flags`.

    Returns:
        Dict from the name of a problem to what `measure` found.
    """
    count = 1 + round(2 * math.log10(flag_values.steps / 10))
    grid = [round(steps) for steps in np.geomspace(10, flag_values.steps, count)]
    panels, results = [], {}
    for problem in problems():
        print(
            f"{problem.name}: L = {problem.smoothness:.4g}, D = {problem.loss_gap:.4g}, "
            f"sigma = {problem.gradient_deviation:.4g}, C1 = {problem.l2_norm_clip:g}, "
            f"C2 = {problem.error_norm_clip:.4g}, sigma1 = {problem.noise_stddev:g}",
            flush=True,
        )
        found = measure(problem, grid, flag_values.seeds)
        level = levels(problem)
        print(f"\n{format_table(problem, grid, found, level)}\n", flush=True)
        bounds = [theorem(problem, steps)[1] for steps in grid]
        panels.append((problem.name, {"bound of the paper": bounds, **found}, level))
        results[problem.name] = found
    folder = pathlib.Path(flag_values.output_dir)
    folder.mkdir(parents=True, exist_ok=True)
    plots.plot_convergence(folder / "convergence.png", grid, panels)
    print(f"Wrote {folder / 'convergence.png'}")
    return results


def define_flags(flag_values):
    """Defines the flags of this script.

    Args:
        flag_values: `absl.flags.FlagValues` to define them in.
    """
    options = {"flag_values": flag_values}
    flags.DEFINE_integer("steps", 100_000, "Largest number of steps T.", lower_bound=32, **options)
    flags.DEFINE_integer("seeds", 3, "Trainings to average over.", lower_bound=1, **options)
    flags.DEFINE_string("output_dir", "out/convergence", "Folder of the figure.", **options)


def main(argv):
    """Runs the script with the flags of the command line."""
    del argv
    run(flags.FLAGS)


if __name__ == "__main__":
    define_flags(flags.FLAGS)
    app.run(main)
