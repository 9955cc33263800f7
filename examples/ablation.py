# Copyright 2026 The dice_tf Authors.
# SPDX-License-Identifier: Apache-2.0
r"""How accuracy depends on the two clipping thresholds and on the learning rate.

What it shows: the two ablation figures of the paper, here with a proven epsilon. One heat
map is over C1 and C2 at one learning rate, one over C1 and the learning rate with C2 = C1.
Directions are divided by C1 (`--rescale_to_unit_norm`), so that a row of the second map
compares like with like. The noise of every cell is calibrated to its own thresholds: all
cells have the same epsilon. C2 = 0 is DP-SGD, drawn like the other cells from groups that
take turns; on its own it would draw from all examples and need a little less noise.

    python examples/ablation.py
    python examples/ablation.py --dataset=fashion_mnist
    python examples/ablation.py --dataset=cifar10 --model=vit      # as in the paper
    python examples/ablation.py --l2_norm_clips=0.1,1 --learning_rates=0.1,0.2 --repeats=5

What it needs: as train_image_classifier.py, all flags of which it takes. How long it takes
on two cores: five to ten minutes for digits, the default; hours for Fashion-MNIST. It
shows the time that is left, and can be killed: started again with the same flags it goes
on with the first cell that is missing in --output_dir. More values or --repeats can be
added later; anything else that cells depend on must stay, and is checked.

Accuracy is on held-out training images (`--validation_fraction`), never on the test images,
so the best cell may be used to train with. On private data such a search costs
privacy too: each cell is (epsilon, delta)-private, all of them together are not. The seeds
are fixed, so that the maps can be repeated; whoever knows a seed can remove the noise.

It writes settings.json, cells.csv (one row per cell and seed), ablation_thresholds.png and
ablation_learning_rate.png to --output_dir.

Source: Zhang et al., "Differentially Private SGD Without Clipping Bias: An Error-Feedback
Approach", ICLR 2024, section on experiments and appendix.
"""

from collections.abc import Callable
import functools
import math
import pathlib
import statistics
import time
from typing import NamedTuple

import ablation_cells
from absl import app, flags, logging
import image_classifier_flags
import image_datasets
import keras
import plots
import private_run
import tensorflow as tf
import train_image_classifier
import trial_log

import dice_tf

VALIDATION_FRACTION = 0.2


class Task(NamedTuple):
    """What cells train, and on what.

    Attributes:
        train: Pair of inputs and targets.
        held_out: Pair of inputs and targets that are not trained on, but of the training data.
        source: Text, where the data comes from.
        title: Text for the heat maps.
        make_model: Function from an optimizer to a compiled model with the metric accuracy.
    """

    train: tuple
    held_out: tuple
    source: str
    title: str
    make_model: Callable


class Trainer(NamedTuple):
    """A script whose runs are searched over.

    Attributes:
        settings_from: Function from parsed flags to settings, a tuple with names.
        make_optimizer: Function from settings and a `dice_tf.PrivacyPlan` to an optimizer.
        load_task: Function from settings to a `Task`.
    """

    settings_from: Callable
    make_optimizer: Callable
    load_task: Callable


def load_images(settings):
    """Returns the `Task` of train_image_classifier.py."""
    data = image_datasets.load_images(settings.dataset, settings.data_dir)
    data = image_datasets.hold_out(data, settings.validation_fraction)

    def make_model(optimizer):
        model = train_image_classifier.make_model(settings, data)
        train_image_classifier.compile_model(model, optimizer)
        return model

    return Task(
        (data.x_train, data.y_train),
        (data.x_test, data.y_test),
        data.source,
        f"{settings.dataset}, {settings.model}",
        make_model,
    )


IMAGES = Trainer(
    image_classifier_flags.settings_from, train_image_classifier.make_optimizer, load_images
)


@functools.cache
def _calibrated(settings, num_examples, ratio):
    clips = {"l2_norm_clip": 1.0, "error_norm_clip": ratio}
    return private_run.make_plan(settings._replace(**clips), num_examples).noise_multiplier


def plan_cell(cell, settings, num_examples):
    """Returns the settings of a cell, and its plan, with noise for its own thresholds.

    Args:
        cell: `ablation_cells.Cell`.
        settings: Settings that all cells share.
        num_examples: Int, number of training examples.

    Returns:
        Pair of settings and `dice_tf.PrivacyPlan`. Epsilon of the plan is at most
        `settings.epsilon`.
    """
    # In units of C1 the noise depends on C2 / C1 alone, so it is calibrated once for each
    # ratio. Rounded up, which errs on the side of more noise.
    ratio = math.ceil(cell.error_norm_clip / cell.l2_norm_clip * 1e9) / 1e9
    noise_multiplier = _calibrated(settings, num_examples, ratio)
    settings = settings._replace(epsilon=None, noise_multiplier=noise_multiplier, **cell._asdict())
    return settings, private_run.make_plan(settings, num_examples)


def train_cell(trainer, cell, settings, task, self_check=True):
    """Trains one model and evaluates it on the held-out examples.

    Args:
        trainer: `Trainer`.
        cell: `ablation_cells.Cell`.
        settings: Settings that all cells share.
        task: `Task`.
        self_check: Whether the gradients of the model are checked with its first batch.

    Returns:
        `ablation_cells.Result`.
    """
    keras.backend.clear_session()
    keras.utils.set_random_seed(cell.seed)
    start = time.monotonic()
    settings, plan = plan_cell(cell, settings, len(task.train[1]))
    optimizer = trainer.make_optimizer(settings, plan)
    optimizer.self_check = self_check
    model = task.make_model(optimizer)
    budget = plan.callback()
    model.fit(plan.dataset(*task.train), epochs=plan.epochs, callbacks=[budget], verbose=0)
    found = model.evaluate(*task.held_out, batch_size=64, verbose=0, return_dict=True)
    return ablation_cells.Result(
        noise_multiplier=plan.noise_multiplier,
        noise_stddev=optimizer.mechanism.noise_stddev,
        steps=budget.accounted_steps(),
        epsilon=budget.epsilon(),
        accuracy=found["accuracy"],
        loss=found["loss"],
        seconds=time.monotonic() - start,
    )


def run(flag_values, trainer=IMAGES):
    """Trains the cells that are missing, and draws the heat maps.

    Args:
        flag_values: Parsed flags, see `define_flags`.
        trainer: `Trainer`.

    Returns:
        Dict from `ablation_cells.Cell` to `ablation_cells.Result`.
    """
    _check(flag_values)
    settings = trainer.settings_from(flag_values)
    task = trainer.load_task(settings)
    grids = ablation_cells.make_grids(flag_values, settings)
    cells = list(dict.fromkeys(cell for grid in grids for cell in grid.cells))
    folder = pathlib.Path(settings.output_dir)
    trial_log.claim_folder(folder, shared_parameters(settings, task))
    results = ablation_cells.read(folder)
    missing = [cell for cell in cells if cell not in results]

    print(f"Data: {task.source}; {len(task.train[1])} training examples.")
    print(f"Accuracy is on {len(task.held_out[1])} other training examples, never on test data.")
    _print_privacy(cells[0], settings, len(task.train[1]))
    print(f"{len(cells)} cells, {len(cells) - len(missing)} of them finished before.", flush=True)
    seconds = []
    for number, cell in enumerate(missing, start=1):
        # All cells have the same model: checking its gradients once will do.
        result = train_cell(trainer, cell, settings, task, self_check=number == 1)
        ablation_cells.append(folder, cell, result)
        results[cell] = result
        seconds.append(result.seconds)
        left = statistics.fmean(seconds[-10:]) * (len(missing) - number)
        print(
            f"[{number}/{len(missing)}] C1={cell.l2_norm_clip:g} C2={cell.error_norm_clip:g} "
            f"learning_rate={cell.learning_rate:g} seed={cell.seed}: "
            f"noise_multiplier={result.noise_multiplier:.4f} epsilon={result.epsilon:.4f} "
            f"accuracy={result.accuracy:.4f} ({result.seconds:.1f} s; {left / 60:.0f} min left)",
            flush=True,
        )
    for grid in grids:
        _draw(grid, results, settings, task.title, folder)
    best = max((results[cell].accuracy, cell) for cell in cells)
    error = math.sqrt(best[0] * (1 - best[0]) / len(task.held_out[1]))
    print(f"Best: {best[0]:.4f} by {best[1]}. Its standard error is {error:.4f} by the data alone.")
    return results


def shared_parameters(settings, task):
    """Returns everything that every cell depends on, by name, as JSON has it.

    Args:
        settings: Settings that all cells share.
        task: `Task`.
    """
    shared = settings._asdict()
    # Cells have their own, and the folders only say where things are.
    for name in (*ablation_cells.Cell._fields, "noise_multiplier", "data_dir", "output_dir"):
        shared.pop(name, None)
    return {
        **shared,
        "data": task.source,
        "training_examples": len(task.train[1]),
        "held_out_examples": len(task.held_out[1]),
        "dice_tf": dice_tf.__version__,
        "keras": keras.__version__,
        "tensorflow": tf.__version__,
    }


def _print_privacy(cell, settings, num_examples):
    _, plan = plan_cell(cell, settings, num_examples)
    print(f"\nAll cells have epsilon = {settings.epsilon}. The first one:\n{plan}")
    print("Each cell has thresholds and noise of its own: cells.csv has them.")
    print(
        "Epsilon is that of one cell. On private data, choosing among cells costs more. And the "
        "seeds are known here, so the noise could be removed.\n"
    )


def _draw(grid, results, settings, title, folder):
    rows, columns = (
        sorted({getattr(cell, name) for cell in grid.cells}) for name in (grid.row, grid.column)
    )
    values = {}
    for cell in grid.cells:
        place = rows.index(getattr(cell, grid.row)), columns.index(getattr(cell, grid.column))
        values.setdefault(place, []).append(100 * results[cell].accuracy)
    labels = {
        "l2_norm_clip": "threshold of gradients, $C_1$",
        "error_norm_clip": "threshold of residuals, $C_2$",
        "learning_rate": "learning rate, for directions divided by $C_1$"
        if getattr(settings, "rescale_to_unit_norm", False)
        else "learning rate",
    }
    seeds = len({cell.seed for cell in grid.cells})
    path = folder / f"ablation_{grid.name}.png"
    plots.plot_heat_map(
        path,
        [[statistics.fmean(values[i, j]) for j in range(len(columns))] for i in range(len(rows))],
        [f"{value:g}" for value in columns],
        [f"{value:g}" for value in rows],
        xlabel=labels[grid.column],
        ylabel=labels[grid.row],
        title=f"{title}: {grid.title}, $\\varepsilon$ = {settings.epsilon:g}, "
        f"$\\delta$ = {settings.delta:g}, {seeds} seed{'s' * (seeds > 1)}",
        value_label="accuracy on held-out\ntraining data in %",
    )
    print(f"Wrote {path}")


def _check(flag_values):
    given = lambda name: getattr(flag_values, name) is not None
    for name, instead in (
        ("l2_norm_clip", "Use --l2_norm_clips"),
        ("error_norm_clip", "Use --error_norm_clips; the other map has C2 = C1"),
        ("noise_multiplier", "Every cell has its own, calibrated to --epsilon"),
    ):
        if given(name):
            raise app.UsageError(f"--{name} is not a flag of this search. {instead}.")
    if not flag_values.optimizer.startswith("dice"):
        raise app.UsageError(
            f"This search is about error feedback. Received: --optimizer={flag_values.optimizer}. "
            "The cells with C2 = 0 have none, as DP-SGD: --error_norm_clips=0."
        )
    if getattr(flag_values, "strategy", "default") != "default":
        raise app.UsageError(
            f"Cells run on one device. Received: --strategy={flag_values.strategy}. Leave it out."
        )
    if not flag_values.validation_fraction:
        raise app.UsageError(
            "The cells are compared on held-out data. Received: --validation_fraction=0. Leave "
            "it out, or hold some out: test data is for the model that is chosen."
        )


def define_flags(flag_values):
    """Defines the flags of the grids.

    Args:
        flag_values: `absl.flags.FlagValues` that has those of the trainer. Some get other defaults.
    """
    for name, value in (
        ("validation_fraction", VALIDATION_FRACTION),
        ("seed", 0),
        ("output_dir", "out/ablation"),
    ):
        flag_values.set_default(name, value)
    options = {"flag_values": flag_values}
    for name, value, text in (
        ("l2_norm_clips", ablation_cells.L2_NORM_CLIPS, "Values of C1."),
        ("error_norm_clips", ablation_cells.ERROR_NORM_CLIPS, "Values of C2; 0 is DP-SGD."),
        ("learning_rates", None, "Default: around that of the trainer."),
    ):
        flags.DEFINE_list(name, value, text, **options)
    flags.DEFINE_integer("repeats", 1, "Seeds per cell, from --seed on.", lower_bound=1, **options)


def define_image_flags(flag_values):
    """Defines the flags of train_image_classifier.py, and those of the grids.

    Args:
        flag_values: `absl.flags.FlagValues` to define them in.
    """
    image_classifier_flags.define_flags(flag_values)
    flag_values.set_default("rescale_to_unit_norm", True)
    define_flags(flag_values)


def main(argv):
    """Runs the script with the flags of the command line."""
    del argv
    logging.set_verbosity(logging.WARNING)
    run(flags.FLAGS)


if __name__ == "__main__":
    define_image_flags(flags.FLAGS)
    flags.adopt_module_key_flags(image_classifier_flags)  # For --help.
    app.run(main)
