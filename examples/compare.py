# Copyright 2026 The dice_tf Authors.
# SPDX-License-Identifier: Apache-2.0
"""DP-SGD against DiceSGD at the same proven epsilon, with the same tuning budget.

What it shows: whether error feedback pays, by how much, and where it does not. Both methods get
as many draws of a random search, with the same values of C1 + C2, step length, momentum,
averaging and batch size, judged on held-out training data. The ranges extend themselves until
no best draw is at an edge. The best draws are judged with further seeds, and what is best then is
trained on all training data and tested with seeds that both methods share. The table has the
paired difference with two 95 % intervals: over seeds, and over test examples.

    python examples/compare.py                                    digits and heavy tails
    python examples/compare.py --tasks=fashion_mnist --epsilons=8,2.7,1 --epochs=3,10
    python examples/compare.py --tasks=digits --draws=8 --epochs=10
    python examples/compare.py --tasks=fashion_mnist_cnn --draws=6 --epochs=3 --batches=256
    python examples/compare.py --tasks=definitions

The searches train many linear models at once (`stacked_trainer.py`, which a test compares with
the package). The runs that are tested are made by the package itself, or some of them
(`--stacked_seeds`) by the same trainer, to save time. A network is trained by the package always,
one run at a time. Noise is calibrated by PLD.

Each method is given its best: both draw by Poisson sampling or by random allocation, whichever
needs less noise. For DiceSGD, s (`--feedback_steps`) and the share of C1 are searched as well, and
have to share the budget of draws.

NumPy's OpenBLAS may not know a new processor: the variable OPENBLAS_CORETYPE=SkylakeX made searches
five times as fast on a Sapphire Rapids, and on a Zen 4 as fast as without. With OMP_NUM_THREADS=1,
`--threads=2` uses two cores.

What it needs: as train_image_classifier.py; for fashion_mnist 3 GB of memory; for definitions what
finetune_text.py --task=classify does, and five minutes to encode them, once. It shows the time
that is left and can be killed: started again with the same flags it goes on.

On private data a search costs privacy: every trial is (epsilon, delta)-private, all of them
together are not. Seeds are fixed, so that tables can be repeated, and whoever knows a
seed can remove the noise.

It writes search.csv, noise.csv, test_package.csv, test_stacked.csv, comparison.md and
comparison.png per task to --output_dir.
"""

import pathlib
import time

from absl import app, flags, logging
import comparison_report
import comparison_runs
import comparison_search
import comparison_tasks
import keras
import plots
import tensorflow as tf
import trial_log

import dice_tf

# No search had them.
_FIRST_TEST_SEED = 100


def run_task(name, flag_values):
    """Searches, trains again and tests, for all settings of one task.

    Args:
        name: A key of `comparison_tasks.TASKS`.
        flag_values: Parsed flags, see `define_flags`.

    Returns:
        List of `comparison_report.Summary`.
    """
    options = comparison_tasks.Options(
        flag_values.data_dir,
        str(pathlib.Path(flag_values.output_dir)),
        flag_values.quick,
        flag_values.wordnet_dir,
    )
    task = comparison_tasks.TASKS[name](options)
    if flag_values.stacked_seeds and not task.linear:
        raise app.UsageError(
            f"--stacked_seeds is for linear models, and that of {name} is not linear. Received: "
            f"--stacked_seeds={flag_values.stacked_seeds}. Leave it out for this task."
        )
    folder = pathlib.Path(flag_values.output_dir) / name
    shared = {
        "data": task.source,
        "training_examples": len(task.x),
        "held_out_examples": task.held_out,
        "delta": task.delta,
        "draws": flag_values.draws,
        "repetition": flag_values.repetition,
        "feedback_steps": [int(s) for s in flag_values.feedback_steps],
        "versions": [dice_tf.__version__, keras.__version__, tf.__version__],
    }
    trial_log.claim_folder(folder, shared)
    print(f"\n{name}: {task.source}.")
    print(
        f"Privacy parameters: num_examples={len(task.x)} delta={task.delta:g} accountant=pld "
        "neighbouring_relation=add_or_remove_one; each trial's batch size, thresholds, noise, "
        "sampler and steps are in the CSV files."
    )
    print(
        f"{task.held_out} of the training examples are held out for searches, "
        f"{len(task.test[0])} for tests.",
        flush=True,
    )
    runs = comparison_runs.Runs(folder, task, flag_values.threads)
    settings = [
        comparison_search.Setting(float(epsilon), int(epochs), int(batch))
        for epochs in flag_values.epochs
        for batch in flag_values.batches
        for epsilon in flag_values.epsilons
    ]
    choices = {}
    # Those with as many epochs see the same batches, so they are trained side by side.
    for epochs in sorted({setting.epochs for setting in settings}):
        searches = {
            setting: comparison_search.search(
                setting, task, shared["draws"], shared["feedback_steps"], shared["repetition"]
            )
            for setting in settings
            if setting.epochs == epochs
        }
        choices |= comparison_search.run_searches(searches, runs.search_scores)
    for setting in [setting._replace(batch=0) for setting in settings]:
        alike = [choices[other] for other in settings if other._replace(batch=0) == setting]
        if setting not in choices and len(alike) > 1:
            choices[setting] = comparison_search.of_all_batches(alike)
            settings.append(setting)
    for setting, choice in choices.items():
        _print_choice(setting, choice)
    if not flag_values.test_seeds:
        return []
    return _test(settings, choices, runs, task, name, folder, flag_values)


def _test(settings, choices, runs, task, name, folder, flag_values):
    seeds = flag_values.test_seeds
    first_seed = comparison_search.SEEDS_APART * flag_values.repetition + _FIRST_TEST_SEED
    runs.train_stacked_tests(
        [
            trial._replace(seed=first_seed + number)
            for setting in settings
            for trial in choices[setting].trials.values()
            for number in range(min(seeds, flag_values.stacked_seeds))
        ]
    )
    left = len(settings) * len(comparison_search.METHODS) * seeds
    start, done, summaries = time.monotonic(), 0, []
    for setting in settings:
        scores, results = {}, {}
        for method, trial in choices[setting].trials.items():
            scores[method] = []
            for number in range(seeds):
                trial = trial._replace(seed=first_seed + number)
                by_package = number >= flag_values.stacked_seeds
                scores[method].append(runs.test_scores(trial, by_package, self_check=not done))
                done, left = done + 1, left - 1
                minutes = (time.monotonic() - start) / done * left / 60
                results[method] = runs.test_result(trial, by_package)
                print(
                    f"[test: {left} left, {minutes:.0f} min] {method}, {setting}, "
                    f"seed={trial.seed}, {'package' if by_package else 'stacked'}: "
                    f"{results[method].score:.4f}, epsilon={results[method].epsilon:.4f}, "
                    f"{results[method].seconds:.0f} s",
                    flush=True,
                )
        summaries.append(comparison_report.summarise(setting, choices[setting], scores, results))
        table = comparison_report.format_table(summaries, task.score)
        (folder / "comparison.md").write_text(table + "\n", encoding="utf-8")
    print(f"\n{table}\n")
    path = folder / "comparison.png"
    plots.plot_comparison(path, summaries, f"{name}, $\\delta$ = {task.delta:g}", task.score)
    print(f"Wrote {path}", flush=True)
    return summaries


def _print_choice(setting, choice):
    for method, trial in choice.trials.items():
        print(
            f"{method}, {setting}: held-out {choice.scores[method]:.4f} with "
            f"B={trial.batch_size} s={trial.feedback_steps} C1/(C1+C2)={trial.share:.3g} "
            f"C1+C2={trial.clip:.3g} step_length={trial.step_length:.3g} "
            f"momentum={trial.momentum:g} averaged_part={trial.averaged_part:g}; "
            f"{choice.draws} draws; at an edge: {', '.join(choice.at_edge) or 'nothing'}",
            flush=True,
        )


def define_flags(flag_values):
    """Defines the flags of this script.

    Args:
        flag_values: `absl.flags.FlagValues` to define them in.
    """
    options = {"flag_values": flag_values}
    flags.DEFINE_multi_enum(
        "tasks", ["digits", "heavy_tails"], list(comparison_tasks.TASKS), "Tasks.", **options
    )
    flags.DEFINE_list("epsilons", ["8", "2.7", "1"], "Privacy budgets.", **options)
    flags.DEFINE_list("epochs", ["10"], "Numbers of epochs.", **options)
    flags.DEFINE_list(
        "batches", ["0"], "Batch sizes; 0 draws them, too. Of several, each method is also "
        "compared at that which is best for it.", **options,
    )  # fmt: skip
    flags.DEFINE_list("feedback_steps", ["1", "3", "7"], "Values of s to search.", **options)
    flags.DEFINE_integer("draws", 24, "First draws per method.", lower_bound=1, **options)
    flags.DEFINE_integer(
        "repetition", 0, "Each has other draws, batches and noise, in searches and tests.",
        lower_bound=0, **options,
    )  # fmt: skip
    flags.DEFINE_integer("test_seeds", 5, "Tested runs per choice; 0: none.", **options)
    flags.DEFINE_integer(
        "stacked_seeds", 0, "So many of them are trained by the stacked trainer, to save time; the "
        "package trains the others.", lower_bound=0, **options
    )  # fmt: skip
    flags.DEFINE_integer(
        "threads", 1, "Stacks of the search that are trained at the same time.", **options
    )
    flags.DEFINE_bool(
        "quick", False, "Few examples, to see it work; the digits are few anyway.", **options
    )
    flags.DEFINE_string("data_dir", None, "Folder of TFDS; default: that of TFDS.", **options)
    flags.DEFINE_string(
        "wordnet_dir", "/usr/share/wordnet", "Folder of WordNet's database files.", **options
    )
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
