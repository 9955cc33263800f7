# Copyright 2026 The dice_tf Authors.
# SPDX-License-Identifier: Apache-2.0
"""Other packages for private training, each in a virtual environment of its own."""

import json
import statistics
import subprocess
import sys
from typing import NamedTuple

from progress import Progress
import protocol
import report

# Exact versions, because numbers are compared across runs.
REQUIREMENTS = {
    "opacus": ("torch==2.13.0", "opacus==1.6.0"),
    # Not on the package index: a commit of its repository. It draws on Opacus' attention
    # layer here, and imports transformers.
    "fastdp": (
        "torch==2.13.0",
        "opacus==1.6.0",
        "transformers==5.24.0",
        "fastDP @ git+https://github.com/awslabs/fast-differential-privacy"
        "@3d5cc561aa337c72f79873ccc4fe8b900b5493b5",
    ),
    "jax_privacy": ("jax==0.10.2", "jax-privacy==2.0.0", "keras==3.15.1"),
    "tensorflow_privacy": (
        "tensorflow==2.21.0",
        "tf-keras==2.21.0",
        "tensorflow-privacy==0.9.0",
    ),
}


_SHOWN = ("model", "batch", "mode", "ms", "processor_ms", "load", "failed", "refused")


class Mode(NamedTuple):
    """One way of training.

    Attributes:
        stack: A key of `REQUIREMENTS`, or "dice_tf" for the environment that runs this.
        name: Text for tables.
        script: File in this folder.
        options: Entries of its specification.
        private: Whether it is private; if not, the ratios of its script refer to it.
        only: Models that it is measured on, as names or as pairs with a batch size, or `None`
            for all.
    """

    stack: str
    name: str
    script: str
    options: dict
    private: bool = True
    only: tuple | None = None


def _dice_tf(name, method, private=True):
    options = {
        "optimizer": "sgd",
        "engine": "layerwise",
        "method": method,
        "chunk_size": None,
        "private": private,
    }
    return Mode("dice_tf", name, "cell.py", options, private)


def _peer(stack, name, script, way, private=True, only=None):
    return Mode(stack, name, script, {"way": way}, private, only)


# Stacks take turns, so that a busy minute does not hit all the cells of one of them.
MODES = (
    _dice_tf("Keras SGD", "DiceSGD", private=False),
    _peer("opacus", "PyTorch SGD", "peer_torch.py", "sgd", private=False),
    _peer("jax_privacy", "JAX SGD", "peer_jax.py", "sgd", private=False),
    _peer("tensorflow_privacy", "Keras 2 SGD", "peer_tf_privacy.py", "sgd", private=False),
    _dice_tf("dice_tf DP-SGD", "DP-SGD"),
    _peer("opacus", "Opacus hooks", "peer_torch.py", "hooks"),
    _peer("jax_privacy", "JAX-Privacy", "peer_jax.py", "clipped_grad"),
    _peer("tensorflow_privacy", "TF-Privacy DPModel", "peer_tf_privacy.py", "model"),
    _peer(
        "fastdp",
        "FastDP",
        "peer_torch.py",
        "fastdp",
        only=("cnn", "mlp", "vit", "transformer"),  # It has no rule for an LSTM.
    ),
    _dice_tf("dice_tf DiceSGD", "DiceSGD"),
    _peer("opacus", "Opacus ghost", "peer_torch.py", "ghost"),
    _peer(
        "tensorflow_privacy",
        "TF-Privacy VectorizedDPKerasSGD",
        "peer_tf_privacy.py",
        "optimizer",
        only=(("cnn", 256),),  # A minute per step on larger models.
    ),
)


def ensure_environment(folder, stack, progress):
    """Creates the virtual environment of a stack, unless it is there already.

    Args:
        folder: `pathlib.Path` under which environments are kept.
        stack: A key of `REQUIREMENTS`.
        progress: Function that is called with a line of text.

    Returns:
        Path of its interpreter, or `None` if the packages cannot be installed here.
    """
    requirements = REQUIREMENTS[stack]
    python = folder / stack / "bin" / "python"
    stamp = folder / stack / "installed.json"
    wanted = json.dumps([sys.version_info[:2], *requirements])
    if stamp.exists() and stamp.read_text() == wanted:
        return python
    progress(f"Installing {', '.join(requirements)} into {folder / stack}.")
    pip = [python, "-m", "pip", "install", "--disable-pip-version-check", "--quiet"]
    try:
        subprocess.run([sys.executable, "-m", "venv", "--clear", folder / stack], check=True)
        # Before 25.1, pip's search among the pins of tensorflow-privacy can take hours.
        subprocess.run([*pip, "--upgrade", "pip>=25.1"], check=True)
        subprocess.run([*pip, *requirements], check=True)
    except subprocess.CalledProcessError:
        progress(f"{stack} cannot be installed on Python {sys.version.split()[0]}: left out.")
        return None
    stamp.write_text(wanted)
    return python


def run_passes(batches, passes, options, folder, progress, measure=protocol.measure):
    """Measures every mode in several processes, in turns.

    Args:
        batches: List of pairs of a model's name and a batch size.
        passes: Int, processes per mode and model.
        options: Dict with "rounds" and "seconds".
        folder: `pathlib.Path` under which environments are kept.
        progress: Function that is called with a line of text.
        measure: Function of a script, a specification and an interpreter.

    Returns:
        List of results: medians over the passes.
    """
    pythons = {stack: ensure_environment(folder, stack, progress) for stack in REQUIREMENTS}
    pythons["dice_tf"] = sys.executable
    work = [
        (model, batch, mode)
        for _ in range(passes)
        for model, batch in batches
        for mode in MODES
        if pythons[mode.stack] is not None and {model, (model, batch)} & {*(mode.only or [model])}
    ]
    done = Progress([1] * len(work), progress)
    found, failed = {}, set()
    for model, batch, mode in work:
        key = model, batch, mode.name
        if key in failed:
            done(f"{model} {batch}, {mode.name}: failed before")
            continue
        specification = {"model": model, "batch": batch, **mode.options, **options}
        result = measure(mode.script, specification, python=str(pythons[mode.stack]))
        found.setdefault(key, []).append({**result, "mode": mode.name})
        if "ms" not in result:
            failed.add(key)
        done(report.describe({k: v for k, v in found[key][-1].items() if k in _SHOWN}))
    return [
        _summary(found, model, batch, mode)
        for model, batch in batches
        for mode in sorted(MODES, key=lambda mode: list(pythons).index(mode.stack))
        if (model, batch, mode.name) in found
    ]


def _summary(found, model, batch, mode):
    """Medians over the passes, and the ratio to the same framework without privacy."""
    results = found[model, batch, mode.name]
    summary = {
        "model": model,
        "batch": batch,
        "stack": mode.stack,
        "mode": mode.name,
        "private": mode.private,
        "load": max(result["load"] for result in results),
    }
    if any("ms" not in result for result in results):
        return {**summary, **{k: results[-1][k] for k in ("failed", "refused") if k in results[-1]}}
    milliseconds = [result["ms"] for result in results]
    summary |= {
        "ms": statistics.median(milliseconds),
        "processor_ms": statistics.median(result["processor_ms"] for result in results),
        "lowest_ms": min(milliseconds),
        "highest_ms": max(milliseconds),
        "examples_per_second": 1e3 * batch / statistics.median(milliseconds),
        "peak_mib": max(result["peak_mib"] for result in results),
        "versions": results[-1].get("versions", {}),
    }
    plain = next(m.name for m in MODES if m.script == mode.script and not m.private)
    baseline = [result.get("ms") for result in found.get((model, batch, plain), ())]
    if mode.private and len(baseline) == len(results) and None not in baseline:
        # Processes of one pass ran next to each other; only those are divided.
        ratios = [ms / plain for ms, plain in zip(milliseconds, baseline, strict=True)]
        summary["ratio"] = statistics.median(ratios)
    return summary
