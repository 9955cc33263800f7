# Copyright 2026 The dice_tf Authors.
# SPDX-License-Identifier: Apache-2.0
"""Makes the figures and tables of differential_privacy.md, error_feedback.md and user_guide.md.

    python docs/make_concept_figures.py
    python docs/make_concept_figures.py --output_dir=out/concepts

It prints the tables as Markdown, each under the name that its place in a page has, and
writes the figures to --output_dir. It needs what the examples need, no data, and less than
a minute. The figures of privacy.md have a script of their own, make_privacy_figures.py.
"""

import math

from absl import app, flags
import figure_style
from figure_style import BLUE, GREEN, GREY, ORANGE, RED, markdown, style, write
from matplotlib.figure import Figure
from matplotlib.patches import Circle
import matrix_mechanism
import numpy as np
import tensorflow as tf

from dice_tf import accounting
from dice_tf.mechanism import DiceMechanism, feedback
from dice_tf.mechanism.clipping import clip_weights
from dice_tf.sampling import CyclicPoissonSampling, PoissonSampling, ShuffledEpochs

DELTA = 1e-5
# The run that the tables vary: 20 epochs of 60,000 examples in batches of 512.
NUM_EXAMPLES, BATCH_SIZE, EPOCHS, NOISE_MULTIPLIER = 60_000, 512, 20, 2.0


# --- What a guarantee promises -----------------------------------------------


def most_true_positives(epsilon, false_positives, delta=DELTA):
    r"""Returns the largest rate of right accusations that (epsilon, delta) permits.

    \(\mathrm{TPR} \le e^\varepsilon \mathrm{FPR} + \delta\), and the same for the rates of
    wrong and right acquittals.
    """
    accusing = math.exp(epsilon) * false_positives + delta
    acquitting = 1 - math.exp(-epsilon) * (1 - delta - false_positives)
    return np.clip(np.minimum(accusing, acquitting), 0.0, 1.0)


def plot_promise(path):
    """Draws what somebody who tests for one example can achieve at most."""
    rates = np.linspace(0.0, 1.0, 1001)
    figure = Figure(figsize=(7.5, 4.4), layout="constrained")
    axes = figure.subplots()
    lines = ((8.0, RED, ":"), (2.7, ORANGE, "-."), (1.0, BLUE, "-"), (0.3, GREEN, "--"))
    for epsilon, color, dashes in lines:
        label = f"$\\varepsilon$ = {epsilon:g}"
        most = most_true_positives(epsilon, rates)
        axes.plot(rates, most, color=color, linestyle=dashes, linewidth=2, label=label)
    axes.plot(rates, rates, color=GREY, linewidth=1, label="guessing ($\\varepsilon$ = 0)")
    axes.set_xlabel("rate of false accusations (the example was not there)")
    axes.set_ylabel("largest rate of right accusations")
    axes.set_xlim(-0.02, 1)
    axes.set_ylim(0, 1.02)
    axes.set_title("$\\delta$ = 1e-5", fontsize=10)
    axes.legend(frameon=False, loc="lower right")
    style(axes)
    figure.savefig(path, dpi=110)


# --- One private step --------------------------------------------------------


def example_gradients():
    """Returns float32 `[12, 2]`: made-up gradients, the last one of an unusual example."""
    random = np.random.default_rng(3)
    usual = random.normal([0.55, 0.35], [0.35, 0.35], size=(11, 2))
    return np.concatenate([usual, [[-1.0, 2.6]]]).astype("float32")


def clipped(gradients, threshold):
    """Returns the gradients, clipped by the library."""
    mechanism = DiceMechanism(
        l2_norm_clip=threshold, noise_multiplier=1.0, expected_batch_size=1, error_norm_clip=0
    )
    norms = tf.norm(tf.constant(gradients), axis=1)
    return gradients * clip_weights(norms, mechanism)[0].numpy()[:, None]


def plot_step(path, threshold=0.8, noise_multiplier=1.0):
    """Draws clipping, and the noise next to the largest possible influence of an example."""
    gradients = example_gradients()
    figure = Figure(figsize=(9.5, 4.0), layout="constrained")
    panels = figure.subplots(1, 3)
    for axes, vectors in zip(panels, (gradients, clipped(gradients, threshold))):
        for vector, color in zip(vectors, [BLUE] * (len(vectors) - 1) + [RED]):
            axes.annotate(
                "", vector, (0, 0), arrowprops=dict(arrowstyle="->", color=color, linewidth=1.4)
            )
        axes.add_patch(Circle((0, 0), threshold, fill=False, linestyle="--", color=GREY))
        axes.set_xlim(-1.4, 1.8)
        axes.set_ylim(-1.0, 2.8)
    panels[0].set_title("1. gradients, one per example", fontsize=10)
    panels[1].set_title("2. clipped to $C_1$ (dashed)", fontsize=10)
    sums = clipped(gradients, threshold)
    without, present = sums[:-1].sum(axis=0), sums.sum(axis=0)
    axes = panels[2]
    for centre, color, word in ((without, BLUE, "without"), (present, RED, "with")):
        axes.plot(*centre, "o", color=color, label=f"{word} the example")
        for radius in (1, 2):
            radius *= noise_multiplier * threshold
            axes.add_patch(Circle(centre, radius, color=color, fill=False, alpha=0.5))
    axes.legend(frameon=False, loc="lower left", fontsize=9)
    axes.set_xlim(without[0] - 2.6, without[0] + 2.2)
    axes.set_ylim(without[1] - 2.9, without[1] + 2.8)
    axes.set_title("3. sum; noise of 1 and 2 std. dev.", fontsize=10)
    for axes, what in zip(panels, ("gradient", "clipped gradient", "noisy sum")):
        axes.set_aspect("equal")
        axes.set_xlabel(f"{what}, weight 1")
        axes.set_ylabel(f"{what}, weight 2")
    style(*panels)
    figure.savefig(path, dpi=110)


# --- How epsilon grows -------------------------------------------------------


def mechanism_of(
    l2_norm_clip=0.5, batch_size=BATCH_SIZE, noise_multiplier=NOISE_MULTIPLIER, **arguments
):
    """Returns the mechanism of the run that the tables vary."""
    return DiceMechanism(
        l2_norm_clip=l2_norm_clip,
        noise_multiplier=noise_multiplier,
        expected_batch_size=batch_size,
        **arguments,
    )


def over(mechanism):
    """Returns the noise on the mean gradient, as a fraction of C1."""
    return f"C1 / {mechanism.l2_norm_clip / mechanism.noise_stddev:.0f}"


def epsilons_of_epochs(sampling, epochs):
    """Returns the epsilon after every number of epochs."""
    mechanism = mechanism_of()
    return [
        accounting.compute_epsilon(mechanism, sampling, sampling.steps(int(e)), DELTA)
        for e in epochs
    ]


SAMPLERS = {
    "shuffled epochs": (ShuffledEpochs(NUM_EXAMPLES, BATCH_SIZE), RED, ":"),
    "Poisson sampling": (PoissonSampling(NUM_EXAMPLES, BATCH_SIZE), ORANGE, "-."),
    "cyclic Poisson sampling": (CyclicPoissonSampling(NUM_EXAMPLES, BATCH_SIZE), BLUE, "-"),
}


def plot_budget(path):
    """Draws epsilon against epochs for the three samplers."""
    epochs = [1, 2, 3, 5, 8, 12, 20, 30, 40]
    figure = Figure(figsize=(7.5, 4.2), layout="constrained")
    axes = figure.subplots()
    for label, (sampling, color, dashes) in SAMPLERS.items():
        spent = epsilons_of_epochs(sampling, epochs)
        axes.plot(epochs, spent, color=color, linestyle=dashes, linewidth=2, label=label)
    axes.set_yscale("log")
    ticks = [0.3, 1, 3, 10, 30]
    axes.set_yticks(ticks, [f"{tick:g}" for tick in ticks])
    axes.minorticks_off()
    axes.set_xlim(0, 40)
    axes.set_xlabel("epochs")
    axes.set_ylabel("$\\varepsilon$ at $\\delta$ = 1e-5")
    axes.set_title("N = 60,000, B = 512, noise_multiplier = 2, $C_1$ = $C_2$", fontsize=10)
    axes.legend(frameon=False)
    style(axes)
    figure.savefig(path, dpi=110)


def variations_table():
    """Returns a Markdown table of what each choice of a run does to its epsilon."""
    cyclic = CyclicPoissonSampling
    rows = [
        ("the run above", cyclic(NUM_EXAMPLES, BATCH_SIZE), {}, EPOCHS, DELTA),
        ("twice the noise", cyclic(NUM_EXAMPLES, BATCH_SIZE), {"noise_multiplier": 4.0}, EPOCHS,
         DELTA),
        ("half the epochs", cyclic(NUM_EXAMPLES, BATCH_SIZE), {}, EPOCHS // 2, DELTA),
        ("twice the batch", cyclic(NUM_EXAMPLES, 2 * BATCH_SIZE), {"batch_size": 2 * BATCH_SIZE},
         EPOCHS, DELTA),
        ("twice the batch, half the `noise_multiplier`", cyclic(NUM_EXAMPLES, 2 * BATCH_SIZE),
         {"batch_size": 2 * BATCH_SIZE, "noise_multiplier": 1.0}, EPOCHS, DELTA),
        ("ten times the data, as many steps, delta = 1e-6",
         cyclic(10 * NUM_EXAMPLES, BATCH_SIZE), {}, EPOCHS / 10, DELTA / 10),
        ("`PoissonSampling`", PoissonSampling(NUM_EXAMPLES, BATCH_SIZE), {}, EPOCHS, DELTA),
        ("arrays to `fit` (`ShuffledEpochs`)", ShuffledEpochs(NUM_EXAMPLES, BATCH_SIZE), {},
         EPOCHS, DELTA),
        ("C1 = C2 = 5 in place of 0.5", cyclic(NUM_EXAMPLES, BATCH_SIZE), {"l2_norm_clip": 5.0},
         EPOCHS, DELTA),
        ("C2 = 0, so DP-SGD", cyclic(NUM_EXAMPLES, BATCH_SIZE), {"error_norm_clip": 0.0}, EPOCHS,
         DELTA),
        ("C2 = 2 C1", cyclic(NUM_EXAMPLES, BATCH_SIZE), {"error_norm_clip": 1.0}, EPOCHS, DELTA),
    ]  # fmt: skip
    body = []
    for label, sampling, changes, epochs, delta in rows:
        mechanism, steps = mechanism_of(**changes), sampling.steps(1)
        epsilon = accounting.compute_epsilon(mechanism, sampling, round(epochs * steps), delta)
        body.append([label, f"{epsilon:.2f}", over(mechanism)])
    return markdown(["what changes", "epsilon", "noise on the mean"], body)


def batches_table():
    """Returns a Markdown table of the noise that a target epsilon needs, by batch size."""
    body = []
    for batch_size in (128, 512, 2048, 8192):
        sampling = CyclicPoissonSampling(NUM_EXAMPLES, batch_size)
        steps = sampling.steps(EPOCHS)
        needed = accounting.calibrate_noise_multiplier(3.0, DELTA, sampling, steps)
        mechanism = mechanism_of(batch_size=batch_size, noise_multiplier=needed)
        body.append([batch_size, steps, f"{needed:.2f}", over(mechanism)])
    return markdown(["B", "steps", "noise_multiplier", "noise on the mean"], body)


# --- What clipping loses -----------------------------------------------------


def descend(targets, steps, learning_rate, **arguments):
    """Returns the iterates of full-batch descent on the mean of (w - target)^2 / 2, from 0.

    The library's own clipping and feedback, in one dimension and without noise.

    Args:
        targets: Float32 `[n]`.
        steps: Int.
        learning_rate: Float.
        **arguments: Of `DiceMechanism`; none for plain gradients.

    Returns:
        List of `steps + 1` floats.
    """
    weight, path = 0.0, [0.0]
    arguments = arguments or dict(l2_norm_clip=1e6, error_norm_clip=0.0)
    mechanism = DiceMechanism(noise_multiplier=1.0, expected_batch_size=len(targets), **arguments)
    errors = [tf.zeros([1])] if mechanism.error_norm_clip else []
    for _ in range(steps):
        gradients = tf.constant(weight - targets, tf.float32)
        head, residual = clip_weights(tf.abs(gradients), mechanism)
        mean = lambda weights: [tf.reduce_mean(weights * gradients, keepdims=True)]
        residuals = [] if residual is None else mean(residual)
        direction, errors = feedback.direction_and_errors(mean(head), residuals, errors, mechanism)
        weight -= learning_rate * float(direction[0][0])
        path.append(weight)
    return path


# Nine examples at 0 and one at 4: the mean, where the loss is least, is 0.4.
TARGETS = np.array([0.0] * 9 + [4.0], dtype="float32")
DESCENTS = {
    "no clipping": ({}, GREY, "-"),
    "DP-SGD, $C_1$ = 1": (dict(l2_norm_clip=1.0, error_norm_clip=0.0), RED, ":"),
    "DiceSGD, $C_1$ = 1, $C_2$ = 1": (dict(l2_norm_clip=1.0, error_norm_clip=1.0), ORANGE, "-."),
    "DiceSGD, $C_1$ = 1, $C_2$ = 3": (dict(l2_norm_clip=1.0, error_norm_clip=3.0), BLUE, "--"),
}


def plot_bias(path):
    """Draws where descent with clipped gradients goes, with and without error feedback."""
    figure = Figure(figsize=(7.5, 4.2), layout="constrained")
    axes = figure.subplots()
    for label, (arguments, color, dashes) in DESCENTS.items():
        iterates = descend(TARGETS, 40, 0.15, **arguments)
        axes.plot(iterates, color=color, linestyle=dashes, linewidth=2, label=label)
    axes.axhline(TARGETS.mean(), color=GREY, linewidth=0.8)
    axes.text(0.3, TARGETS.mean() + 0.008, "least loss", color=GREY, fontsize=9)
    axes.set_xlim(0, 40)
    axes.set_ylim(0, 0.45)
    axes.set_xlabel("step")
    axes.set_ylabel("weight")
    axes.legend(frameon=False, loc="upper right", bbox_to_anchor=(1.0, 0.84))
    style(axes)
    figure.savefig(path, dpi=110)


# Name of the place in a page, and what makes the table there.
TABLES = {
    "variations": variations_table,
    "batches": batches_table,
    "matrix": matrix_mechanism.table,
}
PLOTS = {
    "promise.png": plot_promise,
    "private_step.png": plot_step,
    "budget.png": plot_budget,
    "bias.png": plot_bias,
    "matrix_mechanism.png": matrix_mechanism.plot,
}


def main(argv):
    """Prints the tables and draws the figures."""
    if len(argv) > 1:
        raise app.UsageError(f"Unexpected arguments: {argv[1:]}.")
    write(PLOTS, TABLES)


if __name__ == "__main__":
    flags.adopt_module_key_flags(figure_style)  # For --help.
    app.run(main)
