# Copyright 2026 The dice_tf Authors.
# SPDX-License-Identifier: Apache-2.0
"""DP-SGD against DiceSGD at the same proven epsilon, with the same tuning budget.

What it shows: whether error feedback pays. Both methods get as many trials of a random
search, with the same draws of C1 + C2, learning rate, momentum and averaging, judged on
held-out training data. The best trial of each is then trained again with another seed (on the
same examples, without those held out) and tested once. All of this is repeated with other
draws, so that the intervals cover the luck of the search as well as noise and batches. The
table gives means, the paired difference with its 95 % confidence interval, and a plain
verdict, also where DiceSGD loses. Less noisy than tests of the best draws is what both
methods make of the same draw: the table has the median of that difference, too.

    python examples/compare.py                                    digits and heavy tails
    python examples/compare.py --tasks=fashion_mnist --epsilons=2.7,8
    python examples/compare.py --trials=4 --repeats=3 --tasks=digits

Each method is run at its best: DP-SGD (C2 = 0) draws every step from all examples,
DiceSGD from s + 1 groups that take turns, with s feedback steps of C2 = s C1. Its s is one
more thing to tune, and has to share the budget. Noise is calibrated with the same accountant.

What it needs: as train_image_classifier.py; for fashion_mnist a few GB of memory. How long it
takes on one core: 6 to 7 seconds per trial for digits and heavy_tails, so an hour for the
default; 28 seconds for Fashion-MNIST, half an hour per epsilon with --repeats=4. It shows
the time that is left and can be killed: started again with the same flags it goes on.

Intervals do not cover other training data, nor that the test set is a sample too (360 digits:
about one point). On private data a search costs privacy: every trial is (epsilon,
delta)-private, all of them together are not. Seeds are fixed, so that tables can be
repeated, and whoever knows a seed can remove the noise.

It writes settings.json, search.csv, final.csv and comparison.png per task to --output_dir.
"""

import dataclasses
import functools
import pathlib
import statistics
import time
from typing import NamedTuple

from absl import app, flags, logging
import comparison_report
import comparison_tasks
import keras
import numpy as np
import plots
import private_run
import tensorflow as tf
import trial_log

import dice_tf

# With 2, 3 or 6 groups: the batch sizes of the tasks give all of them equally many steps.
FEEDBACK_STEPS = (1, 2, 5)
AVERAGING = (0.0, 0.9, 0.98)


class Trial(NamedTuple):
    """What one training run has of its own: a row of search.csv or final.csv."""

    method: str
    target_epsilon: float
    seed: int
    clip: float  # C1 + C2
    feedback_steps: int  # 0 for DP-SGD
    learning_rate: float
    momentum: float
    averaging: float  # Momentum of the average of iterates; 0 is none.


class Result(NamedTuple):
    """What came of it; the score is on held-out data in the search, on test data after it."""

    l2_norm_clip: float
    error_norm_clip: float
    noise_multiplier: float
    steps: int
    epsilon: float
    score: float
    seconds: float


def draw_trials(method, epsilon, task, seeds):
    """Returns the trials of a search; both methods get the same draws.

    Args:
        method: One of `comparison_report.METHODS`.
        epsilon: Float.
        task: `comparison_tasks.Task`.
        seeds: Ints, one per trial.
    """
    trials = []
    for seed in seeds:
        random = np.random.default_rng(seed)
        log_uniform = lambda low, high: float(np.exp(random.uniform(np.log(low), np.log(high))))
        clip, rate = log_uniform(*task.clips), log_uniform(*task.learning_rates)
        momentum, averaging = float(random.choice((0.0, 0.9))), float(random.choice(AVERAGING))
        feedback_steps = int(random.choice(FEEDBACK_STEPS)) if method == "DiceSGD" else 0
        # With momentum, a step is the sum of many: the same rate then goes as far.
        rate *= 1 - momentum
        trials.append(Trial(method, epsilon, seed, clip, feedback_steps, rate, momentum, averaging))
    return trials


def plan_trial(trial, task, accountant):
    """Returns the plan and the optimizer of a trial.

    Args:
        trial: `Trial`.
        task: `comparison_tasks.Task`.
        accountant: One of `private_run.ACCOUNTANTS`.
    """
    s = trial.feedback_steps
    plan = _calibrated(
        trial.target_epsilon,
        feedback_steps=s,
        num_examples=len(task.train[0]),
        batch_size=task.batch_size,
        epochs=task.epochs,
        delta=task.delta,
        accountant=accountant,
    )
    # The same noise for draws of its own.
    plan = dataclasses.replace(
        plan, sampling=dataclasses.replace(plan.sampling, seed=trial.seed), target_epsilon=None
    )
    optimizer = dice_tf.DiceSGDOptimizer(
        learning_rate=trial.learning_rate,
        momentum=trial.momentum,
        use_ema=trial.averaging > 0,
        ema_momentum=trial.averaging or 0.99,
        l2_norm_clip=trial.clip / (s + 1),
        plan=plan,
        noise_seed=trial.seed,
    )
    return plan, optimizer


@functools.cache
def _calibrated(epsilon, feedback_steps, **arguments):
    return dice_tf.PrivacyPlan(
        target_epsilon=epsilon,
        feedback_steps=feedback_steps,
        error_norm_clip_ratio=feedback_steps,
        **arguments,
    )


def train(trial, task, accountant, data, self_check):
    """Trains and scores one trial.

    Args:
        trial: `Trial`.
        task: `comparison_tasks.Task`.
        accountant: One of `private_run.ACCOUNTANTS`.
        data: Pair of arrays to score on.
        self_check: Whether the gradients of the model are checked with its first batch.

    Returns:
        `Result`.
    """
    keras.backend.clear_session()
    keras.utils.set_random_seed(trial.seed)
    start = time.monotonic()
    plan, optimizer = plan_trial(trial, task, accountant)
    optimizer.self_check = self_check
    model = task.make_model()
    model.compile(optimizer, task.loss, metrics=[task.metric])
    budget = plan.callback()
    model.fit(plan.dataset(*task.train), epochs=plan.epochs, callbacks=[budget], verbose=0)
    assert budget.accounted_steps() == plan.steps, (budget.accounted_steps(), plan.steps)
    found = model.evaluate(*data, batch_size=1000, verbose=0, return_dict=True)
    mechanism = optimizer.mechanism
    return Result(
        mechanism.l2_norm_clip,
        mechanism.error_norm_clip,
        mechanism.noise_multiplier,
        plan.steps,
        budget.epsilon(),
        found[task.metric],
        time.monotonic() - start,
    )


def run_task(name, flag_values):
    """Searches, trains again and tests, for all epsilons of one task.

    Args:
        name: A key of `comparison_tasks.TASKS`.
        flag_values: Parsed flags, see `define_flags`.

    Returns:
        List of `comparison_report.Summary`.
    """
    task = comparison_tasks.TASKS[name](flag_values.data_dir, quick=flag_values.quick)
    folder = pathlib.Path(flag_values.output_dir) / name
    shared = {
        "data": task.source,
        "training_examples": len(task.train[0]),
        "held_out_examples": len(task.held_out[0]),
        "batch_size": task.batch_size,
        "epochs": task.epochs,
        "delta": task.delta,
        "accountant": flag_values.accountant,
        "trials": flag_values.trials,
        "versions": [dice_tf.__version__, keras.__version__, tf.__version__],
    }
    trial_log.claim_folder(folder, shared)
    print(f"\n{name}: {task.source}.")
    print(
        f"Privacy parameters: num_examples={shared['training_examples']} "
        f"expected_batch_size={task.batch_size} epochs={task.epochs} delta={task.delta:g} "
        f"accountant={flag_values.accountant} neighbouring_relation=add_or_remove_one; each "
        "trial's thresholds, noise and epsilon are in search.csv and final.csv."
    )
    print(f"{len(task.held_out[0])} held-out examples for searches, {len(task.test[0])} for tests.")
    runs = _Runs(
        folder, task, len(comparison_report.METHODS) * len(flag_values.epsilons), flag_values
    )
    summaries = []
    for epsilon in map(float, flag_values.epsilons):
        scores, search_scores = {}, {}
        for method in comparison_report.METHODS:
            scores[method], search_scores[method] = [], []
            for repeat in range(flag_values.repeats):
                first = repeat * flag_values.trials
                trials = draw_trials(
                    method, epsilon, task, range(first, first + flag_values.trials)
                )
                found = [runs.result("search", trial, task.held_out).score for trial in trials]
                search_scores[method] += found
                best = trials[int(np.argmax(found))]
                # A seed that no trial had.
                final = runs.result("final", best._replace(seed=100_000 + repeat), task.test)
                scores[method].append(final.score)
                _print_choice(best, max(found), final.score)
        summaries.append(comparison_report.summarise(epsilon, scores, search_scores))
    table = comparison_report.format_table(summaries, task.score)
    print(f"\n{table}\n")
    title = f"{name}, $\\delta$ = {task.delta:g}"
    plots.plot_comparison(
        folder / "comparison.png", summaries, comparison_report.METHODS, title, task.score
    )
    print(f"Wrote {folder / 'comparison.png'}", flush=True)
    return summaries


def _print_choice(trial, held_out_score, test_score):
    print(
        f"{trial.method} at epsilon {trial.target_epsilon:g} chose C1+C2={trial.clip:.3g} "
        f"feedback_steps={trial.feedback_steps} learning_rate={trial.learning_rate:.3g} "
        f"momentum={trial.momentum:g} averaging={trial.averaging:g}: held-out "
        f"{held_out_score:.4f}, test {test_score:.4f}",
        flush=True,
    )


class _Runs:
    """Trains what is not on disk yet, and says how long the rest will take."""

    def __init__(self, folder, task, searches, flag_values):
        self._folder, self._task, self._accountant = folder, task, flag_values.accountant
        self._known = {
            stage: trial_log.read(folder / f"{stage}.csv", Trial, Result)
            for stage in ("search", "final")
        }
        self._left = searches * flag_values.repeats * (flag_values.trials + 1)
        self._seconds = []

    def result(self, stage, trial, data):
        """Returns the result of a trial, from disk or by training."""
        self._left -= 1
        if trial in self._known[stage]:
            return self._known[stage][trial]
        # All trials have the same model: checking its gradients once will do.
        check = not self._seconds
        result = train(trial, self._task, self._accountant, data, self_check=check)
        trial_log.append(self._folder / f"{stage}.csv", trial, result)
        self._seconds.append(result.seconds)
        minutes = statistics.fmean(self._seconds[-10:]) * self._left / 60
        print(
            f"[{self._left} left, {minutes:.0f} min] {stage}, {trial.method}, "
            f"epsilon={result.epsilon:.4f} noise_multiplier={result.noise_multiplier:.4f} "
            f"seed={trial.seed}: {result.score:.4f} ({result.seconds:.1f} s)",
            flush=True,
        )
        return result


def define_flags(flag_values):
    """Defines the flags of this script.

    Args:
        flag_values: `absl.flags.FlagValues` to define them in.
    """
    options = {"flag_values": flag_values}
    flags.DEFINE_multi_enum(
        "tasks", ["digits", "heavy_tails"], list(comparison_tasks.TASKS), "Tasks.", **options
    )
    flags.DEFINE_list("epsilons", ["1", "2.7", "8"], "Privacy budgets.", **options)
    private_run.define_accountant(flag_values)
    flags.DEFINE_integer("trials", 8, "Trials of a search.", lower_bound=1, **options)
    flags.DEFINE_integer("repeats", 5, "Searches per method.", lower_bound=2, **options)
    flags.DEFINE_bool(
        "quick", False, "Few examples, to see it work; the digits are few anyway.", **options
    )
    flags.DEFINE_string("data_dir", None, "Folder of TFDS; default: that of TFDS.", **options)
    flags.DEFINE_string("output_dir", "out/compare", "Folder of the results.", **options)


def main(argv):
    """Runs the script with the flags of the command line."""
    del argv
    logging.set_verbosity(logging.WARNING)
    for name in flags.FLAGS.tasks:
        run_task(name, flags.FLAGS)


if __name__ == "__main__":
    define_flags(flags.FLAGS)
    app.run(main)
