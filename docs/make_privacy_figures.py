# Copyright 2026 The dice_tf Authors.
# SPDX-License-Identifier: Apache-2.0
r"""Makes every table and figure of docs/privacy.md, from the library's own accounting.

    python docs/make_privacy_figures.py
    python docs/make_privacy_figures.py --output_dir=out/privacy

It prints the tables as Markdown, each under the name that its place in privacy.md has,
and writes three figures to --output_dir. It needs what the examples need, no data, and
some minutes, nearly all of them for privacy loss distributions.

Notation: G = C1 + C2 is the total clipping threshold, s = `feedback_steps`, m = s + 1 the
number of groups, and noise is the standard deviation on the sum of gradients, over G.
"""

import math
from typing import NamedTuple
import warnings

from absl import app, flags
import figure_style
from figure_style import BLUE, GREEN, GREY, ORANGE, RED, markdown, style, write
from matplotlib.figure import Figure
import numpy as np
from scipy import interpolate, stats
import tensorflow as tf

from dice_tf import accounting
from dice_tf.mechanism import DiceMechanism, feedback
from dice_tf.mechanism.clipping import clip_weights
from dice_tf.sampling import CyclicPoissonSampling, PoissonSampling, ShuffledEpochs

FIGURES = ("influence.png", "noise_ratio.png", "counterexample.png")


class Run(NamedTuple):
    """Parameters of a training that the tables compare noise for."""

    num_examples: int
    batch_size: int
    steps: int
    delta: float


SPREAD_ROWS = [
    (Run(60_000, 512, 1171, 1e-5), 1.0),
    (Run(60_000, 512, 1171, 1e-5), 2.7),
    (Run(60_000, 512, 1171, 1e-5), 8.0),
    (Run(60_000, 2048, 585, 1e-5), 2.7),
    (Run(60_000, 2048, 585, 1e-5), 8.0),
]
TWO_GROUPS_ROWS = [
    (Run(50_000, 1000, 150, 1e-5), 1.0),
    (Run(50_000, 1000, 150, 1e-5), 2.0),
    (Run(50_000, 1000, 150, 1e-5), 4.0),
    (Run(50_000, 1000, 150, 1e-5), 8.0),
    (Run(42_000, 1000, 420, 8e-6), 8.0),
]

# The counterexample: N, B, T, delta, the epsilon claimed, and the test that refutes it.
PAPER_RUN = Run(50_000, 1000, 150, 1e-5)
PAPER_EPSILON = 2.0
WINDOW, THRESHOLD = 141, 6.75


def setting(run, feedback_steps):
    """Returns the sampling and the clipping arguments for G = 1; 0 steps mean DP-SGD."""
    clips = dict(
        l2_norm_clip=1.0 / (feedback_steps + 1),
        error_norm_clip=feedback_steps / (feedback_steps + 1),
        feedback_steps=max(1, feedback_steps),
    )
    sizes = run.num_examples, run.batch_size
    if feedback_steps == 0:
        return PoissonSampling(*sizes), clips
    return CyclicPoissonSampling(*sizes, num_groups=feedback_steps + 1), clips


def epsilon_at(run, feedback_steps, noise):
    """Returns the epsilon of a run with the given noise on the sum over G, by PLD."""
    sampling, clips = setting(run, feedback_steps)
    mechanism = DiceMechanism(
        noise_multiplier=noise / clips["l2_norm_clip"],
        expected_batch_size=run.batch_size,
        **clips,
    )
    return accounting.compute_epsilon(mechanism, sampling, run.steps, run.delta, "pld")


def noise_needed(run, epsilon, feedback_steps):
    """Returns the noise on the sum over G that a target epsilon needs, by PLD."""
    sampling, clips = setting(run, feedback_steps)
    noise_multiplier = accounting.calibrate_noise_multiplier(
        epsilon, run.delta, sampling, run.steps, accountant="pld", **clips
    )
    return noise_multiplier * clips["l2_norm_clip"]


def noise_table(rows, spreads):
    """Returns a Markdown table of the noise that each form needs, and its ratio to DP-SGD."""
    heads = ["N", "B", "T", "delta", "epsilon", "DP-SGD"]
    heads += [f"s = {s}, m = {s + 1}" for s in spreads] + ["best ratio"]
    body = []
    for run, epsilon in rows:
        noises = [noise_needed(run, epsilon, s) for s in (0, *spreads)]
        numbers = [f"{run.num_examples:,}", run.batch_size, run.steps, f"{run.delta:g}"]
        numbers += [f"{epsilon:g}", *(f"{noise:.3f}" for noise in noises)]
        body.append([*numbers, f"{noises[0] / noises[-1]:.2f}"])
    return markdown(heads, body)


def forms():
    """Returns the forms of one training: label, mechanism, sampling, neighbouring relation.

    All have N = 60,000, B = 2048, G = 0.5 and the same noise on the mean.
    """
    sizes = 60_000, 2048
    poisson, cyclic = PoissonSampling(*sizes), CyclicPoissonSampling(*sizes)

    def mechanism(l2_norm_clip=0.25, **arguments):
        return DiceMechanism(
            l2_norm_clip=l2_norm_clip,
            noise_multiplier=0.7125 / l2_norm_clip,
            expected_batch_size=2048,
            **arguments,
        )

    spread = mechanism(0.125, error_norm_clip=0.375, feedback_steps=3)
    letter = dict(bound_residuals=False)
    return [
        ("bounded, cyclic, m = 2, s = 1", mechanism(), cyclic, None),
        (
            "bounded, cyclic, m = 4, s = 3, C1 = 1/8, C2 = 3/8",
            spread,
            CyclicPoissonSampling(*sizes, num_groups=4),
            None,
        ),
        ("bounded, Poisson", mechanism(), poisson, None),
        ("bounded, shuffled epochs", mechanism(), ShuffledEpochs(*sizes), None),
        (
            "Alg. 1 to the letter, Poisson, C2 = C1/B",
            mechanism(error_norm_clip=0.25 / 2048, **letter),
            poisson,
            None,
        ),
        ("Alg. 1 to the letter, Poisson, C2 = C1", mechanism(**letter), poisson, None),
        ("DP-SGD clipped at 1/2, Poisson", mechanism(0.5, error_norm_clip=0.0), poisson, None),
        ("DP-SGD clipped at 1/4, Poisson", mechanism(error_norm_clip=0.0), poisson, None),
        ("first row, replace one", mechanism(), cyclic, "replace_one"),
        ("first row, microbatches of 2", mechanism(num_microbatches=1024), cyclic, None),
    ]


def forms_table(steps=600, delta=1e-5):
    """Returns a Markdown table of the epsilon of every form of the same training."""
    body = []
    for label, mechanism, sampling, relation in forms():
        epsilons = [
            accounting.compute_epsilon(mechanism, sampling, steps, delta, by, relation)
            for by in ("rdp", "pld")
        ]
        body.append([label, *(f"{e:.2f}" if e < 1000 else f"{e:.1e}" for e in epsilons)])
    return markdown(["form", "epsilon (RDP)", "epsilon (PLD)"], body)


def paper_table():
    """Returns a Markdown table of what is claimed and what is true at the paper's noise."""
    noise, run = paper_noise(), PAPER_RUN
    claim = accounting.paper_epsilon(noise, run.delta, run.num_examples, run.steps)
    renyi = accounting.paper_epsilon(noise, run.delta, run.num_examples, run.steps, form="renyi")
    lower = counterexample(noise, THRESHOLD)
    # C1 = C2 = C/B, the condition of the theorem.
    literal_noise = accounting.paper_noise_stddev(
        PAPER_EPSILON,
        run.delta,
        run.num_examples,
        run.steps,
        l2_norm_clip=1 / run.batch_size,
        feedback_clip=1.0,
    )
    literal = max(counterexample(literal_noise, k).epsilon for k in np.arange(4, 9, 0.05))
    mechanism = DiceMechanism(
        l2_norm_clip=1.0,
        error_norm_clip=1 / run.batch_size,
        noise_multiplier=noise * run.batch_size,
        expected_batch_size=run.batch_size,
        bound_residuals=False,
    )
    holds = accounting.compute_epsilon(
        mechanism, PoissonSampling(run.num_examples, run.batch_size), run.steps, run.delta
    )
    return markdown(
        ["at the noise of the closed form for epsilon = 2", "epsilon"],
        [
            ["claimed by the closed form", f"{claim:.2f}"],
            ["by the Renyi sum of its own proof", f"{renyi:.2f}"],
            ["at least, by the counterexample, C1 = C", f"{lower.epsilon:.1f}"],
            ["at least, by the counterexample, C1 = C2 = C/B", f"{literal:.1f}"],
            ["at most, by form 4 (RDP), C1 = C", f"{holds:.1f}"],
        ],
    )


def edge_table():
    """Returns a Markdown table: chance that a release passes the largest possible noise.

    Box-Muller draws from k random bits end at sqrt(2 log(2^k)) standard deviations. An
    example whose clipped gradient lies along one coordinate may push a release beyond.
    The smallest uniform number of `dice_tf.mechanism.noise` is half a step of 2^-41.
    """
    edges = [math.sqrt(2 * bits * math.log(2)) for bits in (23, 42)]
    examples = [
        ("the worked example", 300, 4096 / 60_000, (2.85, 2.85)),
        ("DP-SGD, N = 60,000, B = 512, T = 1171, epsilon = 8", 1171, 512 / 60_000, (0.573,)),
    ]
    body = []
    for label, rounds, probability, multipliers in examples:
        chances = [
            rounds * probability * sum(stats.norm.sf(edge - 1 / z) for z in multipliers)
            for edge in edges
        ]
        body.append([label, multipliers[0], *(f"{chance:.0e}" for chance in chances), "1e-05"])
    return markdown(["run", "noise_multiplier", "23 bits", "here", "delta"], body)


def paper_noise():
    """Returns the noise on the mean that the closed form asks for, with C1 = C = 1."""
    return accounting.paper_noise_stddev(
        PAPER_EPSILON, PAPER_RUN.delta, PAPER_RUN.num_examples, PAPER_RUN.steps
    )


def counterexample(noise_stddev, threshold):
    """Returns the `Counterexample` of the paper's run with C2 = C/B, C = 1."""
    run = PAPER_RUN
    return accounting.counterexample_epsilon_lower_bound(
        noise_stddev,
        run.delta,
        run.num_examples,
        run.batch_size,
        run.steps,
        error_norm_clip=1 / run.batch_size,
        window=WINDOW,
        threshold=threshold,
    )


def influence(draws, steps, gradient, **arguments):
    """Returns by how much an example drawn at `draws` moves each release of the sum.

    One dimension, B = 1, no other example, no noise: the library's own clipping and
    feedback, with and without the example.
    """
    mechanism = DiceMechanism(noise_multiplier=1.0, expected_batch_size=1, **arguments)
    slots = mechanism.feedback_steps if mechanism.error_norm_clip else 0
    error, shifts = [tf.zeros([1])] * slots, []
    for step in range(steps):
        present = gradient if step in draws else 0.0
        head, residual = clip_weights(tf.constant([present]), mechanism)
        residuals = [] if residual is None else [residual * present]
        direction, error = feedback.direction_and_errors(
            [head * present], residuals, error, mechanism
        )
        shifts.append(float(direction[0][0]))
    return shifts


def plot_influence(path):
    """Draws how far one example moves the releases, for three forms."""
    steps, draws = 16, (2, 8)
    lines = {
        "DP-SGD clipped at G": dict(l2_norm_clip=2.0, error_norm_clip=0.0),
        "bounded residuals, C1 = C2 = G/2": dict(l2_norm_clip=1.0),
        "Alg. 1 to the letter, C1 = C2 = G/2": dict(l2_norm_clip=1.0, bound_residuals=False),
    }
    figure = Figure(figsize=(7.5, 4.2), layout="constrained")
    panels = figure.subplots(3, sharex=True, sharey=True)
    for axes, (label, arguments), color in zip(panels, lines.items(), (GREY, BLUE, RED)):
        shifts = influence(draws, steps, gradient=100.0, **arguments)
        axes.bar(range(steps), np.array(shifts) / 2, color=color, width=0.7)
        axes.set_title(label, fontsize=10, loc="left")
        axes.set_ylim(0, 1.15)
        for draw in draws:
            axes.axvline(draw, color="black", linewidth=0.8, linestyle=":")
    panels[1].set_ylabel("shift of the released sum, over G")
    panels[2].set_xlabel("optimizer step (dotted: the example is drawn; its gradient is 50 G)")
    style(*panels)
    figure.savefig(path, dpi=110)


def noise_ratios(epsilons, spreads, run=SPREAD_ROWS[0][0], points=14):
    """Returns the noise of DP-SGD over that of each spread, at the given epsilons.

    The noise is interpolated between the epsilons of a fixed set of noises.
    """
    noises = np.geomspace(0.2, 3.0, points)

    def needed(feedback_steps):
        spent = [epsilon_at(run, feedback_steps, noise) for noise in noises]
        curve = interpolate.PchipInterpolator(np.log(spent[::-1]), np.log(noises[::-1]))
        return np.exp(curve(np.log(epsilons)))

    plain = needed(0)
    return {s: plain / needed(s) for s in spreads}


def plot_noise_ratio(path):
    """Draws how much more noise DP-SGD needs, against epsilon."""
    epsilons = np.geomspace(0.5, 10.0, 40)
    figure = Figure(figsize=(7.5, 4.2), layout="constrained")
    axes = figure.subplots()
    axes.axhline(1.0, color=GREY, linewidth=1, linestyle="--", label="DP-SGD")
    styles = (BLUE, "-"), (ORANGE, (0, (6, 2))), (GREEN, "-.")
    for (spread, ratios), (color, dashes) in zip(noise_ratios(epsilons, (1, 3, 7)).items(), styles):
        label = f"s = {spread}, m = {spread + 1}"
        axes.plot(epsilons, ratios, color=color, linestyle=dashes, linewidth=2, label=label)
    axes.set_xscale("log")
    ticks = [0.5, 1, 2, 4, 8]
    axes.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
    axes.minorticks_off()
    axes.set_xlim(0.5, 10)
    axes.set_xlabel("$\\varepsilon$ at $\\delta$ = 1e-5")
    axes.set_ylabel("noise of DP-SGD / noise of DiceSGD")
    axes.set_title("Equal total clipping threshold: N = 60,000, B = 512, T = 1171", fontsize=10)
    axes.legend(frameon=False)
    style(axes)
    figure.savefig(path, dpi=110)


def plot_counterexample(path):
    """Draws the rates of the test that refutes the closed form, and what they imply."""
    noise, thresholds = paper_noise(), np.arange(0.05, 8.5, 0.05)
    results = [counterexample(noise, k) for k in thresholds]
    present = np.array([r.true_positive_rate for r in results])
    absent = np.array([r.false_positive_rate for r in results])
    most = np.minimum(1.0, math.exp(PAPER_EPSILON) * absent + PAPER_RUN.delta)

    figure = Figure(figsize=(9.5, 4.2), layout="constrained")
    left, right = figure.subplots(1, 2)
    left.fill_between(thresholds, most, present, where=present > most, color=RED, alpha=0.12)
    left.plot(thresholds, present, color=RED, linewidth=2, label="with the example (at least)")
    left.plot(
        thresholds,
        most,
        color="black",
        linestyle="--",
        label="the most that (2, 1e-5) permits",
    )
    left.plot(thresholds, absent, color=BLUE, linewidth=2, label="without the example")
    left.set_yscale("log")
    left.set_ylim(1e-15, 3)
    left.set_ylabel("probability that the test fires")
    left.legend(frameon=False, loc="lower left")
    right.plot(thresholds, [r.epsilon for r in results], color=RED, linewidth=2)
    right.plot([THRESHOLD], [counterexample(noise, THRESHOLD).epsilon], "o", color=RED)
    right.axhline(PAPER_EPSILON, color="black", linestyle="--")
    right.text(4.0, PAPER_EPSILON + 0.3, "claimed: $\\varepsilon$ = 2")
    right.set_ylabel("$\\varepsilon$ is at least")
    right.set_ylim(0, 15.5)
    for axes in (left, right):
        axes.set_xlim(0, 8.5)
        axes.set_xlabel(f"threshold on the sum of the last {WINDOW} releases, in std. dev.")
    style(left, right)
    figure.savefig(path, dpi=110)


# Name of the place in privacy.md, and what makes the table there.
TABLES = {
    "forms": forms_table,
    "noise-spread": lambda: noise_table(SPREAD_ROWS, (1, 3, 7)),
    "noise-two-groups": lambda: noise_table(TWO_GROUPS_ROWS, (1,)),
    "paper": paper_table,
    "noise-edge": edge_table,
}
PLOTS = dict(zip(FIGURES, (plot_influence, plot_noise_ratio, plot_counterexample)))


def main(argv):
    """Prints the tables and draws the figures."""
    if len(argv) > 1:
        raise app.UsageError(f"Unexpected arguments: {argv[1:]}.")
    # One row has an epsilon of millions: no loss distribution, no order for that.
    for message in ('accountant="pld"', "The best Renyi order"):
        warnings.filterwarnings("ignore", message=message)
    write(PLOTS, TABLES)


if __name__ == "__main__":
    flags.adopt_module_key_flags(figure_style)  # For --help.
    app.run(main)
