# Copyright 2026 The dice_tf Authors.
# SPDX-License-Identifier: Apache-2.0
"""What privacy costs: time and memory of dice_tf against Keras and against other packages.

For every cell of the table the private model and the same Keras model without privacy are
trained by stock `fit`, in turns, in one process; the ratio of their times is reported.
Peaks of memory come from separate processes. `--peers` adds TensorFlow Privacy, Opacus,
FastDP and JAX-Privacy on the same models, each in an environment that is created on first use.

    python benchmarks/benchmark.py                       everything of dice_tf, over an hour
    python benchmarks/benchmark.py --quick               some models, DiceSGD alone, ten minutes
    python benchmarks/benchmark.py --models=cnn,sweep    some models; sweep: batch sizes
    python benchmarks/benchmark.py --models=ResNet50     one of `real_models.py`, or a group
    python benchmarks/benchmark.py --peers               the other packages as well
    python benchmarks/benchmark.py --peers --noratios    the other packages alone

It shows what was measured and how much time is left, prints tables and writes results.json, a
CSV file per table and plots to --output_dir.
"""

import concurrent.futures
import importlib.metadata
import os
import pathlib
import platform
import time

from absl import app, flags
import peers
from progress import Progress, in_words, weight
import protocol
import real_models
import report

import dice_tf

MODELS = {"cnn": (256, 1024), "mlp": (256,), "vit": (64,), "transformer": (64,), "lstm": (64,)}
SWEEP = (64, 128, 256, 512, 1024, 2048, 4096)
QUICK_SWEEP = (256, 1024)
SWEEP_CHUNK = 256
METHODS = ("DP-SGD", "DiceSGD")
# What --quick measures unless --models says otherwise: some of every family.
QUICK = (*MODELS, "MobileNetV2", "ResNet50", "BertBackbone", "Conv2D x 3", "DepthwiseConv2D x 3",
         "inverted residual x 6", "ConvLSTM2D", "embedding of 20000")  # fmt: skip

# Of processors whose names say little.
_NUMBERS = {"cpu family": "family", "model": "model"}
_EXTENSIONS = {
    "avx": "AVX", "avx2": "AVX2", "fma": "FMA", "avx512f": "AVX-512", "avx512_vnni": "VNNI",
    "avx512_bf16": "AVX-512 bfloat16", "amx_tile": "AMX", "asimd": "NEON", "sve": "SVE",
}  # fmt: skip

# Without it, the reference engine needs gigabytes for the larger models.
_VECTORIZED_CHUNK = 32


def ratio_cells(models):
    """Returns the cells of the table of ratios.

    Args:
        models: Names of models.

    Returns:
        List of specifications.
    """
    cells = []
    for model in models:
        for batch in MODELS[model]:
            for optimizer in ("sgd", "adam") if model == "transformer" else ("sgd",):
                common = {"model": model, "batch": batch, "optimizer": optimizer}
                for method in METHODS:
                    cells.append(
                        {**common, "engine": "layerwise", "method": method, "chunk_size": None}
                    )
                if optimizer == "sgd" and batch == MODELS[model][0]:
                    cells.append(
                        {
                            **common,
                            "engine": "vectorized",
                            "method": "DiceSGD",
                            "chunk_size": _VECTORIZED_CHUNK,
                        }
                    )
    return cells


def real_cells(names):
    """Returns the cells of real models and single layers, DiceSGD each.

    Args:
        names: Names of models or groups of `real_models`.

    Returns:
        List of specifications, in the order of the models.
    """
    common = {"optimizer": "sgd", "engine": "layerwise", "method": "DiceSGD", "chunk_size": None}
    return [
        {"model": name, "batch": model.batch, **common}
        for name, model in real_models.MODELS.items()
        if name in names or model.group in names
    ]


def sweep_cells(batches):
    """Returns the cells of the sweep over batch sizes: in one piece, and in chunks."""
    common = {"model": "cnn", "optimizer": "sgd", "engine": "layerwise", "method": "DiceSGD"}
    return [
        {**common, "batch": batch, "chunk_size": chunk_size}
        for batch in batches
        for chunk_size in (None, SWEEP_CHUNK)
    ]


def run_cells(cells, options, progress, measure=protocol.measure):
    """Measures cells: first time, then memory.

    Args:
        cells: List of specifications.
        options: Dict with "rounds" and "seconds".
        progress: Function that is called with a line of text.
        measure: Function of a script and a specification.

    Yields:
        Results, one per cell. Ratios of memory are added where both were measured.
    """
    plain_memory = {}
    for cell in cells:
        result = measure("cell.py", {**cell, **options})
        if "ratio" in result:
            key = cell["model"], cell["batch"], cell["optimizer"]
            weigh = lambda private, cell=cell: measure(
                "cell.py", {**cell, **options, "weigh": True, "private": private}
            )
            # Other work changes no peak, so these two may run side by side.
            with concurrent.futures.ThreadPoolExecutor() as pool:
                if key not in plain_memory:
                    plain_memory[key] = pool.submit(weigh, False)
                private = pool.submit(weigh, True).result()
            plain = plain_memory[key].result()
            if "peak_mib" in plain and "peak_mib" in private:
                result |= {
                    "plain_mib": plain["peak_mib"],
                    "private_mib": private["peak_mib"],
                    "before_mib": private["before_mib"],
                    "memory_ratio": private["peak_mib"] / plain["peak_mib"],
                }
        progress(report.describe(result))
        yield result


def environment():
    """Returns what the numbers depend on: processor, versions, date."""
    packages = ("keras", "tensorflow", "numpy")
    versions = {name: importlib.metadata.version(name) for name in packages}
    return {
        "date": time.strftime("%Y-%m-%d %H:%M"),
        "machine": platform.machine(),
        "processor": _processor(),
        "extensions": vector_extensions(),
        "cores": os.cpu_count(),
        "load": round(os.getloadavg()[0], 1),
        "python": platform.python_version(),
        "versions": {"dice_tf": dice_tf.__version__, **versions},
    }


def _cpuinfo():
    """Returns what Linux says of the first core, by name; nothing elsewhere."""
    information = pathlib.Path("/proc/cpuinfo")
    text = information.read_text() if information.exists() else ""
    pairs = [line.split(":", 1) for line in text.split("\n\n")[0].splitlines() if ":" in line]
    return {name.strip(): value.strip() for name, value in pairs}


def _processor():
    core = _cpuinfo()
    numbers = [f"{n} {core[k]}" for k, n in _NUMBERS.items() if k in core]
    return ", ".join([core.get("model name", platform.processor()), *numbers])


def vector_extensions(known=None):
    """Returns the vector extensions of this processor that decide how fast products are.

    Args:
        known: Flags as `/proc/cpuinfo` has them; `None` for those of this processor.

    Returns:
        String, such as `"AVX2, FMA, AVX-512"`; empty where Linux does not tell.
    """
    known = _cpuinfo().get("flags", _cpuinfo().get("Features", "")) if known is None else known
    return ", ".join(label for flag, label in _EXTENSIONS.items() if flag in known.split())


def run(flag_values):
    """Measures, prints tables and writes files.

    Args:
        flag_values: Parsed flags, see `define_flags`.

    Returns:
        Dict of what results.json contains.
    """
    quick = flag_values.quick
    options = {
        "rounds": flag_values.rounds or (2 if quick else 7),
        "seconds": 0.2 if quick else 1.0,
    }
    if flag_values.jit_compile:
        options["jit_compile"] = True
    folder = pathlib.Path(flag_values.output_dir)
    folder.mkdir(parents=True, exist_ok=True)
    show = lambda line: print(line, flush=True)
    names = flag_values.models or (QUICK if quick else _every_name())
    models = [name for name in names if name in MODELS]
    results = {"environment": environment(), "options": options}
    show(report.heading(results["environment"]))
    if not any(model.group == "hub" for model in real_models.MODELS.values()):
        show("keras-hub is not installed, so its models are left out: pip install keras-hub")

    parts = {}
    if models:
        title = f"Time and memory against Keras without privacy, {options['rounds']} rounds:"
        cells = ratio_cells(models)
        if quick:
            cells = [c for c in cells if (c["method"], c["engine"]) == ("DiceSGD", "layerwise")]
        parts["ratios"] = title, cells
    real = real_cells(names)
    if real:
        parts["real"] = f"Real models and single layers, {options['rounds']} rounds:", real
    if "sweep" in names:
        title = f"Batch sizes, on the CNN; chunk_size={SWEEP_CHUNK}:"
        parts["sweep"] = title, sweep_cells(QUICK_SWEEP if quick else SWEEP)
    if not flag_values.ratios:
        parts = {}
    start = time.monotonic()
    progress = Progress([weight(cell) for _, cells in parts.values() for cell in cells], show)
    for part, (title, cells) in parts.items():
        show(f"\n{title}")
        results[part] = []
        for result in run_cells(cells, options, progress):
            results[part].append(result)
            report.write_results(folder, results)  # An interruption loses nothing.
    if flag_values.peers:
        show("\nOther packages, in turns with dice_tf:")
        passes = flag_values.passes or (1 if quick else 3)
        batches = [(name, batch) for name in models for batch in MODELS[name]]
        results["peers"] = peers.run_passes(batches, passes, options, folder / "envs", show)
    show("\n" + report.format_tables(results))
    show(f"It took {in_words(time.monotonic() - start)}.")
    for path in report.write_results(folder, results):
        show(f"Wrote {path}")
    return results


def _every_name():
    return [*MODELS, "sweep", *real_models.GROUPS]


def define_flags(flag_values):
    """Defines the flags of this script.

    Args:
        flag_values: `absl.flags.FlagValues` to define them in.
    """
    options = {"flag_values": flag_values}
    every = _every_name()
    flags.DEFINE_list(
        "models",
        None,
        f"What to measure, out of {','.join(every)}, or a model of one of the last groups; "
        f"all of them, with --quick {','.join(QUICK)}.",
        **options,
    )
    flags.register_validator(
        "models",
        lambda names: names is None or (names and set(names) <= {*every, *real_models.MODELS}),
        message=f"must be names out of {','.join(every)}, or of their models, with commas between",
        flag_values=flag_values,
    )
    flags.DEFINE_integer(
        "rounds", None, "Rounds per cell; 7, with --quick 2.", lower_bound=1, **options
    )
    flags.DEFINE_integer(
        "passes", None, "Processes per peer; 3, with --quick 1.", lower_bound=1, **options
    )
    flags.DEFINE_bool("quick", False, "Some models, DiceSGD alone, few rounds.", **options)
    flags.DEFINE_bool("peers", False, "Measure other packages as well.", **options)
    flags.DEFINE_bool("ratios", True, "Measure against Keras without privacy.", **options)
    flags.DEFINE_bool(
        "jit_compile",
        False,
        "Compile all Keras models with XLA, which Keras leaves out where there is no GPU.",
        **options,
    )
    flags.DEFINE_string("output_dir", "out/benchmarks", "Folder of tables and plots.", **options)


def main(argv):
    """Runs the script with the flags of the command line."""
    del argv
    run(flags.FLAGS)


if __name__ == "__main__":
    define_flags(flags.FLAGS)
    app.run(main)
