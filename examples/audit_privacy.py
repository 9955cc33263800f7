# Copyright 2026 The dice_tf Authors.
# SPDX-License-Identifier: Apache-2.0
r"""Attacks private training runs, and compares what the attack proves with what is claimed.

What it shows: lower bounds on epsilon, each true with 95 % confidence, against the
epsilon that is claimed for the same run:

(a) DP-SGD (error_norm_clip=0) with Poisson sampling, claimed by dice_tf;
(b) DiceSGD with bounded residuals and cyclic Poisson sampling, claimed by dice_tf;
(c) Alg. 1 of the paper to the letter (bound_residuals=False), with the noise of the
    paper's Thm 3.2, claimed by the paper and, next to it, by dice_tf.

For (a) and (b) the bounds stay below the claims. (c) breaks the paper's claim, not that of
dice_tf: one example with a huge gradient saturates the error, which then shifts every
later release by C2.

How: (a) and (b) are one run of `fit` each. All examples are canaries, whose gradients are
orthogonal; a coin decides for each whether it is in, and the attacker guesses the coins
of those whose own weights moved most and least. (c) is trained --num_runs times with the
one example and as often without, in one dimension; the attacker looks at the one weight.
The condition of the theorem, C1 <= C2 = C/B, holds with equality.

What it needs: nothing but the dependencies of the examples; no data. How long it takes:
about two minutes on two cores.

    python examples/audit_privacy.py
    python examples/audit_privacy.py --paper_epsilons=2 --num_runs=300

It prints a table and writes audit_privacy.png to --output_dir.
"""

import pathlib
from typing import NamedTuple

from absl import app, flags
import keras
from matplotlib.figure import Figure
import numpy as np
import plots
import tensorflow as tf

import dice_tf
from dice_tf import accounting, auditing
from dice_tf.auditing import canaries

DELTA = 1e-5

# (a) and (b): 40 steps, each drawing a tenth of the examples.
SAMPLING_PROBABILITY, EPOCHS = 0.1, 4
ERROR_NORM_CLIP = {"DP-SGD": 0.0, "DiceSGD": 1.0}

# (c): what makes the attack strong is N / B, once there are steps enough for the example to
# be drawn early: the sum of all releases then moves by about N epsilon / (8 B sqrt(log(1 / delta)))
# standard deviations, however many steps there are.
NUM_EXAMPLES, BATCH_SIZE, STEPS = 500, 5, 300


class Finding(NamedTuple):
    """One audited run, or set of runs.

    Attributes:
        method: Name of the algorithm.
        claimant: Who claims `claimed`.
        claimed: Epsilon that is claimed.
        lower_bound: Epsilon that the attack proves.
    """

    method: str
    claimant: str
    claimed: float
    lower_bound: float

    @property
    def refuted(self):
        """Whether the attack proves more than is claimed."""
        return self.lower_bound > self.claimed


def linear_loss(targets, outputs):
    """Minus target times output: its gradient is the same for all weights."""
    return -keras.ops.mean(targets * outputs, axis=-1)


def make_model(num_features, **optimizer_arguments):
    """Returns a linear model without bias, compiled with `DiceSGDOptimizer`.

    Args:
        num_features: Int.
        **optimizer_arguments: Of `DiceSGDOptimizer`, but for the learning rate, which is 1
            so that the weights are minus the sum of all releases.
    """
    weights = keras.layers.Dense(1, use_bias=False, kernel_initializer="zeros")
    model = keras.Sequential([keras.Input((num_features,)), weights])
    optimizer = dice_tf.DiceSGDOptimizer(learning_rate=1.0, **optimizer_arguments)
    model.compile(optimizer, loss=linear_loss)
    return model


def audit_fit(method, epsilon, num_canaries, num_guesses, seed=None):
    """Audits one call of `fit` by gradient canaries.

    Args:
        method: "DP-SGD" or "DiceSGD".
        epsilon: Float, the epsilon that the noise is calibrated to.
        num_canaries: Int, a multiple of 20.
        num_guesses: Even int.
        seed: Int or `None`, for the coins, the draws and the noise.

    Returns:
        `Finding`, whose claim is the epsilon of the steps that the optimizer made.
    """
    error_norm_clip = ERROR_NORM_CLIP[method]
    batch_size = round(SAMPLING_PROBABILITY * num_canaries)
    sampler = dice_tf.CyclicPoissonSampling if error_norm_clip else dice_tf.PoissonSampling
    plan = dice_tf.PrivacyPlan(
        sampling=sampler(num_canaries, batch_size, seed=seed),
        epochs=EPOCHS,
        target_epsilon=epsilon,
        delta=DELTA,
        error_norm_clip_ratio=error_norm_clip,
    )
    # Gradients of norm C1 + C2: the longest that have full influence.
    x = canaries.gradient_canaries(np.zeros((0, 0)), num_canaries, scale=1.0 + error_norm_clip)
    y = np.ones((num_canaries, 1), dtype=np.float32)
    # Refuses batches that the sampler did not draw, and counts the steps.
    callback = plan.callback()

    def train(included):
        model = make_model(num_canaries, l2_norm_clip=1.0, plan=plan, noise_seed=seed)
        # A canary of weight 0 has no gradient: it is left out.
        data = plan.dataset(x, y, sample_weight=included.astype(np.float32))
        model.fit(data, epochs=plan.epochs, callbacks=[callback], verbose=0)
        return canaries.canary_scores(model, x, y)

    result = auditing.audit_one_run(train, num_canaries, num_guesses, DELTA, seed=seed)
    return Finding(method, "dice_tf", callback.epsilon(), result.epsilon_lower_bound)


def letter_model(epsilon, noise_seed=None):
    """Returns the model of (c): one weight, Alg. 1 to the letter, noise as in Thm 3.2.

    Spelled out: a plan bounds residuals, and its noise follows from a proven epsilon.

    Args:
        epsilon: Float, the epsilon that the theorem claims for this noise.
        noise_seed: Int or `None`.
    """
    clip = 1.0
    noise_stddev = accounting.paper_noise_stddev(
        epsilon, DELTA, NUM_EXAMPLES, STEPS, l2_norm_clip=clip, feedback_clip=BATCH_SIZE * clip
    )
    return make_model(
        1,
        l2_norm_clip=clip,
        error_norm_clip=clip,
        bound_residuals=False,
        noise_multiplier=noise_stddev * BATCH_SIZE / clip,
        expected_batch_size=BATCH_SIZE,
        noise_seed=noise_seed,
    )


def letter_run(model, seed=None):
    """Returns a function that trains the model of (c) from scratch and returns its weight.

    Runs are independent: the weight and the error start from 0 in each, while the
    optimizer's step counter goes on, so that every run has noise of its own.

    Args:
        model: From `letter_model`.
        seed: Int or `None`, for the draws.

    Returns:
        Function from a bool, whether to include the example, to a float.
    """
    mechanism = model.optimizer.mechanism
    model.optimizer.build(model.trainable_variables)
    rng = np.random.default_rng(seed)
    x, y = np.ones((2, NUM_EXAMPLES, 1), dtype=np.float32)
    # All gradients are 0 but that of the first example, which is huge.
    y[1:] = 0.0
    y[0] = mechanism.l2_norm_clip + STEPS * BATCH_SIZE * mechanism.error_norm_clip

    # Compiled as a whole, because a step on its own takes longer to call than to compute.
    @tf.function(jit_compile=True)
    def steps(draws):
        for draw in draws:
            dice_tf.private_train_step(model, (x, y, draw))

    def train(include):
        model.set_weights([np.zeros((1, 1))])
        for error in model.optimizer.errors:
            error.assign(tf.zeros(error.shape))
        draws = rng.random((STEPS, NUM_EXAMPLES), np.float32) < BATCH_SIZE / NUM_EXAMPLES
        draws[:, 0] &= include
        steps(tf.constant(draws, tf.float32))
        return float(model.get_weights()[0].item())

    return train


def audit_letter(epsilon, num_runs, seed=None, progress=False):
    """Audits Alg. 1 to the letter by many runs.

    Args:
        epsilon: Float, the epsilon that the paper claims.
        num_runs: Int, number of runs with the example, and as many without.
        seed: Int or `None`.
        progress: Whether to show a progress bar.

    Returns:
        Pair of `Finding`s: the paper's claim and dice_tf's, for the same runs.
    """
    model = letter_model(epsilon, seed)
    train = letter_run(model, seed)
    bar = keras.utils.Progbar(2 * num_runs, unit_name="run", verbose=int(progress))

    def train_and_show(include):
        score = train(include)
        bar.add(1)
        return score

    result = auditing.audit(train_and_show, num_runs, DELTA)
    sampling = dice_tf.PoissonSampling(NUM_EXAMPLES, BATCH_SIZE)
    reported = accounting.compute_epsilon(
        model.optimizer.mechanism, sampling, STEPS, DELTA, accountant="pld"
    )
    name, bound = "Alg. 1 to the letter", result.epsilon_lower_bound
    return Finding(name, "the paper", epsilon, bound), Finding(name, "dice_tf", reported, bound)


def exact_letter_bound(epsilon):
    """Returns what the attack on (c) would prove with infinitely many runs.

    Args:
        epsilon: Float, the epsilon that the paper claims.
    """
    mechanism = letter_model(epsilon).optimizer.mechanism
    return max(
        accounting.counterexample_epsilon_lower_bound(
            mechanism.noise_stddev,
            DELTA,
            NUM_EXAMPLES,
            BATCH_SIZE,
            STEPS,
            mechanism.error_norm_clip,
            window=STEPS,
            threshold=threshold,
        ).epsilon
        for threshold in np.arange(0.5, 12, 0.25)
    )


def format_table(findings):
    """Returns the findings as text.

    Args:
        findings: List of `Finding`.
    """
    lines = [f"{'method':<22}{'claimed by':<12}{'claimed':>9}{'proven >=':>11}"]
    for finding in findings:
        verdict = "   CLAIM REFUTED" if finding.refuted else ""
        numbers = f"{finding.claimed:>9.2f}{finding.lower_bound:>11.2f}"
        lines.append(f"{finding.method:<22}{finding.claimant:<12}{numbers}{verdict}")
    return "\n".join(lines)


def plot(path, findings):
    """Draws the proven epsilon against the claimed one.

    Args:
        path: Path of the PNG file.
        findings: List of `Finding`.
    """
    letter = "Alg. 1 to the letter"
    styles = {
        ("DP-SGD", "dice_tf"): ("(a) DP-SGD", "o", plots.BLUE, plots.BLUE),
        ("DiceSGD", "dice_tf"): ("(b) DiceSGD, bounded, cyclic", "s", plots.GREEN, plots.GREEN),
        (letter, "the paper"): (f"(c) {letter}, claim of the paper", "D", plots.RED, plots.RED),
        (letter, "dice_tf"): ("(c) the same runs, claim of dice_tf", "D", plots.RED, "white"),
    }
    claims = [f.claimed for f in findings]
    left, right = 0.6 * min(claims), 1.5 * max(claims)
    lowest, highest = 0.1, 3.0 * max(f.lower_bound for f in findings)
    figure = Figure(figsize=(7.5, 5.0), layout="constrained")
    axes = figure.subplots()
    axes.set(xscale="log", yscale="log", xlim=(left, right), ylim=(lowest, highest))
    ends = [min(left, lowest), max(right, highest)]
    axes.plot(ends, ends, color=plots.GREY, linewidth=1)
    axes.fill_between(ends, ends, ends[1], color=plots.RED, alpha=0.08, linewidth=0)
    text = "claim refuted:\nmore is proven than is claimed"
    axes.text(0.02, 0.9, text, color=plots.RED, transform=axes.transAxes)
    for key, (label, marker, edge, face) in styles.items():
        chosen = [f for f in findings if (f.method, f.claimant) == key]
        # A bound of 0 has no place on a logarithmic axis.
        bounds = [max(f.lower_bound, 1.1 * lowest) for f in chosen]
        claims = [f.claimed for f in chosen]
        axes.plot(claims, bounds, marker, color=edge, markerfacecolor=face, label=label)
    axes.set_xlabel(f"claimed $\\varepsilon$ at $\\delta$ = {DELTA:g}")
    axes.set_ylabel("proven lower bound on $\\varepsilon$ (95 % confidence)")
    axes.set_title("What attacks prove against what is claimed")
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_formatter("{x:g}")
    axes.grid(alpha=0.3)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    axes.legend(loc="lower right", framealpha=0.95)
    figure.savefig(path, dpi=150)


def run(flag_values):
    """Runs all audits, prints the table and draws the plot.

    Args:
        flag_values: Parsed flags, see `define_flags`.

    Returns:
        List of `Finding`.
    """
    findings = []
    for method in ERROR_NORM_CLIP:
        for epsilon in map(float, flag_values.epsilons):
            print(f"Auditing one run of {method} at epsilon = {epsilon:g} ...", flush=True)
            findings.append(
                audit_fit(
                    method,
                    epsilon,
                    flag_values.num_canaries,
                    2 * (flag_values.num_canaries // 20),
                    flag_values.seed,
                )
            )
    for epsilon in map(float, flag_values.paper_epsilons):
        exact = exact_letter_bound(epsilon)
        print(
            f"Auditing Alg. 1 to the letter, for which the paper claims epsilon = {epsilon:g} "
            f"(infinitely many runs would prove {exact:.1f}) ...",
            flush=True,
        )
        findings += audit_letter(epsilon, flag_values.num_runs, flag_values.seed, progress=True)
    print(f"\nEpsilon at delta = {DELTA:g}; bounds with 95 % confidence:")
    print(f"{format_table(findings)}\n")

    folder = pathlib.Path(flag_values.output_dir)
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "audit_privacy.png"
    plot(path, findings)
    print(f"Wrote {path}")
    return findings


def define_flags(flag_values):
    """Defines the flags of this script.

    Args:
        flag_values: `absl.flags.FlagValues` to define them in.
    """
    options = {"flag_values": flag_values}
    flags.DEFINE_list("epsilons", "1,2,4,8", "Claims to audit for (a) and (b).", **options)
    flags.DEFINE_list("paper_epsilons", "1,2,4", "Claims to audit for (c).", **options)
    flags.DEFINE_integer(
        "num_canaries", 2000, "Number of canaries in (a) and (b).", lower_bound=100, **options
    )
    flags.DEFINE_integer(
        "num_runs", 1000, "Runs in (c) with the example, and without.", lower_bound=10, **options
    )
    flags.DEFINE_integer("seed", None, "Makes the audit reproducible.", **options)
    flags.DEFINE_string("output_dir", "out/audit_privacy", "Folder of the plot.", **options)


def main(argv):
    """Runs the script with the flags of the command line."""
    del argv
    run(flags.FLAGS)


if __name__ == "__main__":
    define_flags(flags.FLAGS)
    app.run(main)
