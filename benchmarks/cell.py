# Copyright 2026 The dice_tf Authors.
# SPDX-License-Identifier: Apache-2.0
"""One cell of the table, in a process of its own: dice_tf against Keras without privacy.

Started by `benchmark.py` with a specification as JSON (see `specify`).
"""

import keras
import models
import numpy as np
import protocol
import real_models

import dice_tf
from dice_tf.errors import DicePrivacyError

_OPTIMIZERS = {
    "sgd": (keras.optimizers.SGD, dice_tf.DiceSGDOptimizer),
    "adam": (keras.optimizers.Adam, dice_tf.DiceAdamOptimizer),
}
_WARM_BATCH = 16


def build(name):
    """Returns a new model by its name."""
    if name in real_models.MODELS:
        return real_models.MODELS[name].build()
    return models.build(keras, name)


def make_examples(cell):
    """Returns inputs and labels for the model of a cell."""
    source = real_models if cell["model"] in real_models.MODELS else protocol
    return source.make_examples(cell["model"], cell["batch"])


def compiled_model(cell, private):
    """Returns the model of a cell, compiled with its optimizer or its Keras counterpart."""
    plain_class, private_class = _OPTIMIZERS[cell["optimizer"]]
    if private:
        optimizer = private_class(
            learning_rate=1e-3,
            l2_norm_clip=1.0,
            error_norm_clip=1.0 if cell["method"] == "DiceSGD" else 0.0,
            noise_multiplier=1.0,
            expected_batch_size=cell["batch"],
            gradient_engine=cell["engine"],
            chunk_size=cell["chunk_size"],
        )
    else:
        optimizer = plain_class(learning_rate=1e-3)
    # With some weights the check before the first step takes longer.
    keras.utils.set_random_seed(0)
    model = build(cell["model"])
    # Unless asked otherwise, what a user gets who does not think about it.
    model.compile(
        optimizer,
        keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        jit_compile=cell.get("jit_compile", "auto"),
    )
    return model


def measure_ratio(cell):
    """Times the private and the plain model in turns.

    What else runs on the machine changes from minute to minute, so only times that were
    taken next to each other are divided. Who goes first changes from round to round.

    Args:
        cell: Specification.

    Returns:
        Dict with median times of a step in milliseconds, median and range of their ratio
        over the rounds, the same of the time that all cores spent, and seconds of a `fit` of
        one batch: the first, and later ones (in milliseconds).
    """
    x, y = make_examples(cell)
    pair, firsts = _first_steps(cell, x, y)
    laters = _later_fits(cell, pair, x, y)
    plain, private = (
        protocol.Trainer(*protocol.keras_run(keras, model, x, y, cell["batch"]), cell["seconds"])
        for model in pair
    )
    times = []
    for i in range(cell["rounds"]):
        order = (plain, private) if i % 2 else (private, plain)
        taken = {trainer: trainer.milliseconds() for trainer in order}
        times.append((taken[plain], taken[private]))
    times = np.array(times)  # [rounds, (plain, private), (wall, processor)]
    ratios = times[:, 1] / times[:, 0]
    middle = np.median(times, axis=0)
    result = {
        "plain_ms": middle[0, 0],
        "private_ms": middle[1, 0],
        "ratio": np.median(ratios[:, 0]),
        "lowest_ratio": ratios[:, 0].min(),
        "highest_ratio": ratios[:, 0].max(),
        "plain_processor_ms": middle[0, 1],
        "private_processor_ms": middle[1, 1],
        "processor_ratio": np.median(ratios[:, 1]),
        "plain_first_s": firsts[0][0],
        "private_first_s": firsts[1][0],
        "first_ratio": firsts[1][0] / firsts[0][0],
        "first_processor_ratio": firsts[1][1] / firsts[0][1],
        "plain_fit_ms": laters[0],
        "private_fit_ms": laters[1],
    }
    return {name: float(value) for name, value in result.items()}


def _first_steps(cell, x, y):
    """Returns a plain and a private model that took a step, and the seconds until then."""
    warm_up(cell)
    pair = [compiled_model(cell, private) for private in (False, True)]
    return pair, [protocol.seconds_of_fit(model, x, y, cell["batch"]) for model in pair]


def warm_up(cell):
    """Takes steps with models that are not measured: what is loaded once per process is there."""
    for private in (False, True):
        warm = compiled_model({**cell, "model": "warm_up", "batch": _WARM_BATCH}, private)
        examples = protocol.make_examples("warm_up", _WARM_BATCH)
        protocol.seconds_of_fit(warm, *examples, _WARM_BATCH)


def _later_fits(cell, pair, x, y):
    """Returns the median milliseconds of later calls of `fit` with one batch, in turns."""
    times = [
        [1e3 * protocol.seconds_of_fit(model, x, y, cell["batch"])[0] for model in pair]
        for _ in range(1 + cell["rounds"])
    ]
    return np.median(times, axis=0)


def measure_alone(cell):
    """Times and weighs the private or the plain model, with nothing else in the process.

    Args:
        cell: Specification. With an entry "weigh" that is true, time is left out.

    Returns:
        Dict with time, examples per second and memory.
    """
    x, y = make_examples(cell)
    model = compiled_model(cell, cell["private"])
    before = protocol.memory_mib(peak=False)
    if cell.get("weigh"):
        peak = protocol.keras_peak_mib(model, x, y, cell["batch"])
        return {"peak_mib": peak, "before_mib": before}
    run = protocol.keras_run(keras, model, x, y, cell["batch"])
    return {**protocol.time_alone(*run, cell), "before_mib": before}


def main():
    """Measures what the command line specifies."""
    cell = protocol.specification()
    try:
        result = measure_alone(cell) if "private" in cell else measure_ratio(cell)
    except DicePrivacyError as error:
        result = {"refused": str(error)}
    protocol.report(result)


if __name__ == "__main__":
    main()
