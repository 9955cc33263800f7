# Copyright 2026 The dice_tf Authors.
# SPDX-License-Identifier: Apache-2.0
"""What every measurement has in common: data, chunks of steps, memory, one line of result.

Imports no framework, because the peers' processes use it too. A measurement is a process
of its own: it gets its specification as JSON, and prints its result as one line.
"""

import json
import math
import os
import pathlib
import resource
import subprocess
import sys
import time

import numpy as np

# Shape of one input. Token ids are int32 below TOKENS, everything else is float32.
INPUT_SHAPES = {
    "cnn": (28, 28, 1),
    "mlp": (784,),
    "vit": (32, 32, 3),
    "transformer": (64,),
    "lstm": (64,),
    "warm_up": (8,),
}
TOKENS, CLASSES = 2000, 10

# The number of examples does not depend on the batch size, so that peaks of memory at
# different batch sizes contain the same data.
_EXAMPLES, _DATA_BYTES = 16_384, 64 * 2**20
_MOST_SECONDS = 20.0
_STEPS_WEIGHED = 3
_RESULT = "RESULT "


def make_examples(model, batch):
    """Returns random inputs and labels, at least two batches of them.

    Args:
        model: Name of a model.
        batch: Int.

    Returns:
        Pair of arrays: inputs `[examples, ...]` and int32 labels `[examples]`.
    """
    shape = INPUT_SHAPES[model]
    count = max(2 * batch, min(_EXAMPLES, _DATA_BYTES // (4 * math.prod(shape))))
    generator = np.random.default_rng(0)
    if model in ("transformer", "lstm"):
        x = generator.integers(TOKENS, size=(count, *shape), dtype=np.int32)
    else:
        x = generator.random((count, *shape), dtype=np.float32)
    return x, generator.integers(CLASSES, size=count, dtype=np.int32)


def _clock():
    """Seconds on the wall, and seconds of all cores that this process used."""
    return np.array([time.perf_counter(), time.process_time()])


class Trainer:
    """Runs chunks of training steps, sized to take about the same time.

    Args:
        run: Function of a number of steps that takes them and returns two numbers: seconds
            per step, and processor seconds per step.
        most: Int, how many steps the data lasts for.
        seconds: Float, aimed length of a chunk.
    """

    def __init__(self, run, most, seconds):
        self._run = run
        self._run(1)  # Traces, and allocates what is kept between steps.
        self.steps = 1
        for _ in range(2):  # The second estimate comes from more steps.
            self.steps = max(1, min(most, round(seconds / self._run(self.steps)[0])))
            if self.steps == 1:
                break

    def milliseconds(self):
        """Runs a chunk and returns its time per step, on the wall and of all cores."""
        return 1e3 * self._run(self.steps)


def first_rows(x, count):
    """Returns the first rows of an array, or of each in a dict of arrays."""
    return {name: v[:count] for name, v in x.items()} if isinstance(x, dict) else x[:count]


def keras_run(keras, model, x, y, batch):
    """Returns a function that takes steps with stock `fit`.

    Only steps are timed, not the start of an epoch: it is the same with and without
    privacy, and would weigh more here than it does in epochs of the usual length.

    Args:
        keras: The module.
        model: Compiled model.
        x: Inputs, an array or a dict of arrays.
        y: Labels.
        batch: Int.
    """

    class Clock(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            float(logs["loss"])  # Waits until the step is done.
            ends.append(_clock())

    ends = []

    def run(steps):
        ends.clear()
        count = (steps + 1) * batch
        model.fit(first_rows(x, count), y[:count], batch_size=batch, epochs=1, shuffle=False,
                  verbose=0, callbacks=[Clock()])  # fmt: skip
        return (ends[-1] - ends[0]) / steps

    return run, len(y) // batch - 1


def seconds_of_fit(model, x, y, batch):
    """Returns seconds of stock `fit` of one batch, on the wall and of all cores.

    To the end of training: with busy cores TensorFlow 2.21 may then wait for as long again to
    give an iterator back, see "The first step" in README.md.
    """
    from keras.callbacks import LambdaCallback

    start, ends = _clock(), []
    model.fit(
        first_rows(x, batch), y[:batch], batch_size=batch, shuffle=False, verbose=0,
        callbacks=[LambdaCallback(on_train_end=lambda logs: ends.append(_clock()))],
    )  # fmt: skip
    return ends[0] - start


def keras_peak_mib(model, x, y, batch):
    """Returns the peak of memory of this process, in MiB, after a few steps of stock `fit`."""
    count = _STEPS_WEIGHED * batch
    model.fit(first_rows(x, count), y[:count], batch_size=batch, shuffle=False, verbose=0)
    return memory_mib(peak=True)


def loop_run(step, finish, x, y, batch):
    """Returns a function that takes steps in a loop over slices of the data.

    Args:
        step: Function of inputs and labels.
        finish: Function that returns when all steps are done.
        x: Inputs.
        y: Labels.
        batch: Int.
    """

    def run(steps):
        start = _clock()
        for i in range(steps):
            rows = slice(i * batch, (i + 1) * batch)
            step(x[rows], y[rows])
        finish()
        return (_clock() - start) / steps

    return run, len(x) // batch


def memory_mib(peak):
    """Returns the memory of this process that is resident, now or at its peak, in MiB."""
    status = pathlib.Path("/proc/self/status")
    if status.exists():
        key = "VmHWM:" if peak else "VmRSS:"
        line = next(s for s in status.read_text().splitlines() if s.startswith(key))
        return int(line.split()[1]) / 1024
    # Elsewhere only the peak is known; macOS counts bytes, others KiB.
    unit = 2**20 if sys.platform == "darwin" else 2**10
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / unit if peak else math.nan


def time_alone(run, most, cell):
    """Times one way of training in a process of its own.

    Args:
        run: Function of a number of steps, see `Trainer`.
        most: Int, how many steps the data lasts for.
        cell: Specification.

    Returns:
        Dict with the median time of a step, examples per second and the peak of memory.
    """
    trainer = Trainer(run, most, cell["seconds"])
    times, start = [], time.monotonic()
    while len(times) < cell["rounds"]:
        times.append(trainer.milliseconds())
        if time.monotonic() - start > _MOST_SECONDS:
            break  # Steps of many seconds: one round more or less does not change the picture.
    milliseconds, processor = (float(t) for t in np.median(times, axis=0))
    return {
        "ms": milliseconds,
        "processor_ms": processor,
        "examples_per_second": 1e3 * cell["batch"] / milliseconds,
        "peak_mib": memory_mib(peak=True),
    }


def specification():
    """Returns the specification that this process was started with."""
    return json.loads(sys.argv[1])


def report(result):
    """Prints the result of this process."""
    print(_RESULT + json.dumps(result), flush=True)


def measure(script, specification, python=sys.executable, timeout=1800):
    """Runs a measurement in a process of its own.

    Args:
        script: File name of a script in this folder.
        specification: Dict for `specification`.
        python: Interpreter.
        timeout: Float, seconds after which the measurement counts as failed.

    Returns:
        What the script gave to `report`, with the load of the machine before the process
        started; or a dict with the entry "failed" and the end of what it printed.
    """
    load = round(os.getloadavg()[0], 2)
    environment = {
        "TF_CPP_MIN_LOG_LEVEL": "3",
        # Without settings of the user's, CPU cores: their memory is what is measured.
        "CUDA_VISIBLE_DEVICES": "-1",
        "JAX_PLATFORMS": "cpu",
        **os.environ,
    }
    command = [python, str(pathlib.Path(__file__).parent / script), json.dumps(specification)]
    try:
        process = subprocess.run(
            command,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            timeout=timeout,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return {**specification, "load": load, "failed": f"took more than {timeout:g} s"}
    output = process.stdout.decode(errors="replace")
    for line in reversed(output.splitlines()):
        if line.startswith(_RESULT):
            return {**specification, "load": load, **json.loads(line[len(_RESULT) :])}
    ending = output[-800:] or f"no output, exit status {process.returncode}"
    return {**specification, "load": load, "failed": ending}
