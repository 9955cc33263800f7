# Copyright 2026 The dice_tf Authors.
# SPDX-License-Identifier: Apache-2.0
"""The benchmarks run, and report what they measured. Nothing here judges a time."""

import csv
import json
import math
import pathlib
import re
import sys

from absl import flags
import keras
import numpy as np
import pytest

ROOT = pathlib.Path(__file__).absolute().parents[1]
sys.path.insert(0, str(ROOT / "benchmarks"))

import benchmark
import cell
import models
import peers
import progress
import protocol
import real_models

CELL = {
    "model": "tiny",
    "batch": 4,
    "optimizer": "sgd",
    "engine": "layerwise",
    "method": "DiceSGD",
    "chunk_size": None,
    "rounds": 1,
    "seconds": 0.0,
}
RATIO = {
    **CELL,
    "plain_ms": 2.0,
    "private_ms": 3.0,
    "ratio": 1.5,
    "lowest_ratio": 1.25,
    "highest_ratio": 1.75,
    "processor_ratio": 1.4,
    "load": 0.1,
}


@pytest.fixture
def tiny(monkeypatch):
    """A model that takes no time: eight inputs, one layer."""
    monkeypatch.setitem(protocol.INPUT_SHAPES, "tiny", (8,))
    monkeypatch.setitem(models._BODIES, "tiny", lambda keras, x: keras.layers.Dense(10)(x))
    monkeypatch.setattr(protocol, "_EXAMPLES", 16)


@pytest.mark.parametrize(
    "changes",
    [{}, {"method": "DP-SGD"}, {"engine": "vectorized", "chunk_size": 2}, {"optimizer": "adam"}],
    ids=str,
)
def test_private_and_plain_models_take_turns(tiny, monkeypatch, changes):
    trained = []
    fit = keras.Model.fit

    def recording_fit(self, *args, **kwargs):
        trained.append(type(self.optimizer))
        return fit(self, *args, **kwargs)

    monkeypatch.setattr(keras.Model, "fit", recording_fit)
    result = cell.measure_ratio({**CELL, **changes, "rounds": 2})
    assert all(math.isfinite(value) for value in result.values())
    assert result["lowest_ratio"] <= result["ratio"] <= result["highest_ratio"]
    plain, private = cell._OPTIMIZERS[changes.get("optimizer", "sgd")]
    assert trained[-4:] == [private, plain, plain, private]
    # Small models first, so that none of the two pays for what a process loads once.
    assert trained[:4] == [plain, private, plain, private]
    firsts = result["private_first_s"], result["plain_first_s"]
    assert min(firsts) > 0 and result["first_ratio"] == firsts[0] / firsts[1]
    assert result["first_processor_ratio"] > 0


def test_compiled_models_are_what_their_cell_says(tiny):
    optimizer = cell.compiled_model({**CELL, "chunk_size": 2}, private=True).optimizer
    assert optimizer.mechanism.noise_stddev == 0.25
    assert optimizer.mechanism.error_norm_clip == 1.0
    assert (optimizer.chunk_size, optimizer.gradient_engine) == (2, "layerwise")
    optimizer = cell.compiled_model({**CELL, "method": "DP-SGD"}, private=True).optimizer
    assert optimizer.mechanism.error_norm_clip == 0.0
    assert type(cell.compiled_model(CELL, private=False).optimizer) is keras.optimizers.SGD


def test_times_are_per_step(tiny, monkeypatch):
    seconds = iter(range(1000))
    monkeypatch.setattr(protocol, "_clock", lambda: np.full(2, float(next(seconds))))
    x, y = protocol.make_examples("tiny", 4)
    model = cell.compiled_model(CELL, private=False)
    run, most = protocol.keras_run(keras, model, x, y, 4)
    assert most == 3
    np.testing.assert_array_equal(run(3), [1.0, 1.0])  # The clock is read once a step.

    taken = []
    run, most = protocol.loop_run(lambda x, y: taken.append(len(x)), lambda: None, x, y, 4)
    assert most == 4
    np.testing.assert_array_equal(run(4), [0.25, 0.25])
    assert taken == [4, 4, 4, 4]


@pytest.mark.parametrize("seconds, most, steps", [(1.0, 100, 10), (1.0, 4, 4), (0.01, 100, 1)])
def test_chunks_take_the_aimed_time_within_the_data(seconds, most, steps):
    trainer = protocol.Trainer(lambda steps: np.array([0.1, 0.2]), most, seconds)
    assert trainer.steps == steps
    np.testing.assert_allclose(trainer.milliseconds(), [100.0, 200.0])


@pytest.mark.parametrize("step_seconds, chunks", [(1.0, 7), (15.0, 2)])
def test_steps_of_many_seconds_are_taken_few_times(monkeypatch, step_seconds, chunks):
    passed = [0.0]

    def run(steps):
        passed.append(passed[-1] + steps * step_seconds)
        return np.full(2, step_seconds)

    monkeypatch.setattr(protocol.time, "monotonic", lambda: passed[-1])
    result = protocol.time_alone(run, 100, {"batch": 5, "seconds": 1.0, "rounds": 7})
    assert result["ms"] == 1e3 * step_seconds and result["examples_per_second"] == 5 / step_seconds
    # The first step, and one that says how many belong into a chunk, come before.
    assert len(passed) == 1 + 2 + chunks


def test_progress_says_what_is_left_at_this_pace():
    seconds, lines = iter([0.0, 30.0, 90.0, 120.0]), []
    done = progress.Progress([1, 2, 4], lines.append, clock=lambda: next(seconds))
    for name in "abc":
        done(name)
    assert lines == ["[1/3, 3 min left] a", "[2/3, 2 min left] b", "[3/3] c"]
    assert progress.in_words(31.0) == "40 s" and progress.in_words(601.0) == "11 min"
    known = {*real_models.MODELS, *benchmark.MODELS}
    assert {name for name in progress._SECONDS if "Backbone" not in name} <= known


def test_data_does_not_depend_on_the_batch_size():
    for model in benchmark.MODELS:
        x, y = protocol.make_examples(model, 64)
        assert len(x) == len(y) == len(protocol.make_examples(model, 1024)[0])
        assert x.shape[1:] == protocol.INPUT_SHAPES[model]
        assert models.build(keras, model)(x[:2]).shape == (2, protocol.CLASSES)


def test_measurements_are_processes_of_their_own(monkeypatch, tmp_path):
    (tmp_path / "good.py").write_text(
        "import json, sys\nprint('RESULT ' + json.dumps({'got': json.loads(sys.argv[1])}))"
    )
    (tmp_path / "bad.py").write_text("raise SystemExit('no such thing')")
    (tmp_path / "slow.py").write_text("import time\ntime.sleep(60)")
    monkeypatch.setattr(protocol, "__file__", str(tmp_path / "protocol.py"))
    result = protocol.measure("good.py", {"model": "tiny"})
    assert result["got"] == {"model": "tiny"} and result["model"] == "tiny"
    assert protocol.measure("bad.py", {"model": "tiny"})["failed"].strip() == "no such thing"
    slow = protocol.measure("slow.py", {"model": "tiny"}, timeout=0.1)
    assert slow["failed"] == "took more than 0.1 s"


def test_peak_of_memory_is_that_of_this_process():
    before = protocol.memory_mib(peak=True)
    block = np.ones(64 * 2**20 // 8)
    assert protocol.memory_mib(peak=True) >= max(before, 64)
    del block
    assert protocol.memory_mib(peak=False) > 0


def test_memory_is_compared_with_the_plain_model_of_the_same_cell():
    measured = []

    def measure(script, specification):
        measured.append(specification)
        if "private" not in specification:
            return dict(RATIO)
        peak = 600.0 if specification["private"] else 400.0
        return {"peak_mib": peak, "before_mib": 300.0, "load": 0.0}

    lines = []
    cells = [{**CELL, "method": "DP-SGD"}, CELL]
    results = list(benchmark.run_cells(cells, {"rounds": 7}, lines.append, measure))
    assert [result["memory_ratio"] for result in results] == [1.5, 1.5]
    # The plain model is weighed once, perhaps after the private one next to it.
    kinds = [each.get("private") for each in measured]
    assert kinds[0] is None and set(kinds[1:3]) == {False, True} and kinds[3:] == [None, True]
    assert [each.get("weigh") for each in measured] == [None, True, True, None, True]
    assert len(lines) == 2


def test_peaks_of_memory_are_those_of_a_few_steps(tiny):
    result = cell.measure_alone({**CELL, "private": True, "weigh": True})
    assert set(result) == {"peak_mib", "before_mib"}
    # The kernel counts pages of the peak and of the moment apart, some at a time.
    assert result["peak_mib"] + 1 >= result["before_mib"] > 100


def test_cells_cover_models_methods_and_engines():
    cells = benchmark.ratio_cells(benchmark.MODELS)
    layerwise = {(c["model"], c["batch"]) for c in cells if c["engine"] == "layerwise"}
    assert layerwise == {
        ("cnn", 256), ("cnn", 1024), ("mlp", 256), ("vit", 64), ("transformer", 64), ("lstm", 64)
    }  # fmt: skip
    assert {c["model"] for c in cells if c["engine"] == "vectorized"} == set(benchmark.MODELS)
    assert {c["model"] for c in cells if c["optimizer"] == "adam"} == {"transformer"}
    sweep = benchmark.sweep_cells(benchmark.SWEEP)
    assert min(c["batch"] for c in sweep) == 64 and max(c["batch"] for c in sweep) == 4096
    assert {c["chunk_size"] for c in sweep} == {None, benchmark.SWEEP_CHUNK}


def test_real_models_are_chosen_by_name_or_group():
    cells = benchmark.real_cells(["ConvLSTM2D", "table"])
    assert [c["model"] for c in cells] == ["ConvLSTM2D", "embedding of 20000"]
    assert [c["batch"] for c in cells] == [32, 256]
    assert benchmark.real_cells(["cnn", "sweep"]) == []
    groups = {model.group for model in real_models.MODELS.values()}
    assert groups | {"hub"} == set(real_models.GROUPS)
    applications = [c["model"] for c in benchmark.real_cells(["applications"])]
    assert applications == [
        "MobileNetV2", "EfficientNetB0", "ResNet50", "DenseNet121", "ConvNeXtTiny"
    ]  # fmt: skip


@pytest.mark.parametrize("name", ["embedding of 20000", "LayerNormalization x 3"])
def test_real_models_train_on_their_examples(name):
    x, y = real_models.make_examples(name, 2)
    specification = {**CELL, "model": name, "batch": 2}
    model = cell.compiled_model(specification, private=True)
    assert all(protocol.seconds_of_fit(model, x, y, 2) > 0)
    assert int(model.optimizer.iterations) == 1
    assert model(protocol.first_rows(x, 2)).shape == (2, real_models.CLASSES)


def test_masked_sequences_and_padding_go_together():
    x, _ = real_models.make_examples("BiLSTM + BiGRU with masks", 4)
    masked = x == 0
    assert masked.any() and not masked[:, : x.shape[1] // 2].any()
    assert (np.diff(masked.astype(int), axis=1) >= 0).all()
    if "BertBackbone" in real_models.MODELS:
        texts, _ = real_models.make_examples("BertBackbone", 4)
        np.testing.assert_array_equal(texts["padding_mask"], texts["token_ids"] > 0)


def test_what_decides_the_speed_of_products_is_named():
    known = "fpu sse4_1 avx avx2 fma avx512f amx_tile avx512vbmi"
    assert benchmark.vector_extensions(known) == "AVX, AVX2, FMA, AVX-512, AMX"
    assert benchmark.vector_extensions("") == ""
    environment = benchmark.environment()
    heading = benchmark.report.heading({**environment, "extensions": "AVX2, AMX"})
    assert environment["date"] in heading and "; AVX2, AMX)" in heading


def peer_results(fail=()):
    milliseconds = iter(range(1, 1000))

    def measure(script, specification, python):
        if script in fail:
            return {**specification, "load": 0.0, "failed": "Traceback\nImportError: gone"}
        ms = float(next(milliseconds))
        return {**specification, "load": 0.0, "ms": ms, "processor_ms": ms, "peak_mib": 1.0}

    return measure


def test_peers_take_turns_and_are_divided_by_their_own_stack(monkeypatch):
    monkeypatch.setattr(peers, "ensure_environment", lambda *_: pathlib.Path("python"))
    lines = []
    results = peers.run_passes(
        [("cnn", 256)], 2, {}, pathlib.Path(), lines.append, peer_results(fail=["peer_jax.py"])
    )
    by_mode = {result["mode"]: result for result in results}
    assert set(by_mode) == {mode.name for mode in peers.MODES}
    # Times count up: hooks came after SGD by the same number of measurements in each pass.
    hooks, sgd = by_mode["Opacus hooks"], by_mode["PyTorch SGD"]
    pairs = zip(*((r["lowest_ms"], r["highest_ms"]) for r in (hooks, sgd)), strict=True)
    assert hooks["ratio"] == pytest.approx(np.median([a / b for a, b in pairs]))
    assert "ratio" not in sgd
    assert by_mode["JAX-Privacy"]["failed"].endswith("gone")
    # What failed once is not tried again.
    assert sum("JAX" in line and "failed before" not in line for line in lines) == 2


def test_peers_that_take_minutes_are_left_out_of_large_batches(monkeypatch):
    monkeypatch.setattr(peers, "ensure_environment", lambda *_: pathlib.Path("python"))
    batches = [("cnn", 256), ("cnn", 1024), ("lstm", 64)]
    results = peers.run_passes(batches, 1, {}, pathlib.Path(), lambda line: None, peer_results())
    found = {(r["model"], r["batch"]) for r in results if "Vectorized" in r["mode"]}
    assert found == {("cnn", 256)}
    assert {r["model"] for r in results if r["mode"] == "FastDP"} == {"cnn"}


def test_peers_that_cannot_be_installed_are_left_out(monkeypatch, tmp_path):
    def run(command, check):
        raise peers.subprocess.CalledProcessError(1, command)

    monkeypatch.setattr(peers.subprocess, "run", run)
    lines = []
    results = peers.run_passes([("mlp", 256)], 1, {}, tmp_path, lines.append, peer_results())
    assert {result["stack"] for result in results} == {"dice_tf"}
    assert sum("left out" in line for line in lines) == len(peers.REQUIREMENTS)


def test_peers_are_pinned():
    pins = [pin for requirements in peers.REQUIREMENTS.values() for pin in requirements]
    assert [
        pin for pin in pins if not re.fullmatch(r"[\w-]+==[\w.]+|fastDP @ git\S+@[0-9a-f]{40}", pin)
    ] == []


def parse(module, *arguments):
    values = flags.FlagValues()
    module.define_flags(values)
    values(["benchmark", *arguments])
    return values


def test_command_prints_tables_and_writes_files(monkeypatch, tmp_path, capsys):
    def measure(script, specification, python=None):
        if specification.get("engine") == "vectorized":
            return {**specification, "load": 0.0, "refused": "It has no rule. Write one."}
        memory = {"ms": 1.0, "processor_ms": 1.0, "peak_mib": 500.0, "before_mib": 300.0}
        return {**RATIO, **memory, **specification}

    run_cells, run_passes = benchmark.run_cells, peers.run_passes
    monkeypatch.setattr(benchmark, "run_cells", lambda *args: run_cells(*args, measure=measure))
    monkeypatch.setattr(peers, "run_passes", lambda *args: run_passes(*args, measure=measure))
    monkeypatch.setattr(peers, "ensure_environment", lambda *_: pathlib.Path("python"))
    names = "cnn,sweep,ConvLSTM2D"
    arguments = ["--rounds=1", "--peers", f"--models={names}", f"--output_dir={tmp_path}/new"]
    benchmark.run(parse(benchmark, *arguments))
    printed = capsys.readouterr().out
    assert "| cnn | 256 | sgd | layerwise | DiceSGD | 2.0 | 3.0 | 1.50 | 1.25 to 1.75 |" in printed
    assert "refused: It has no rule" in printed
    folder = tmp_path / "new"
    saved = json.loads((folder / "results.json").read_text(encoding="utf-8"))
    assert "| ConvLSTM2D | 32 | 2.0 | 3.0 | 1.50 |" in printed
    assert {"environment", "options", "ratios", "real", "sweep", "peers"} <= set(saved)
    for name in ("ratios", "real", "sweep", "peers"):
        with (folder / f"{name}.csv").open(encoding="utf-8") as file:
            assert len(list(csv.DictReader(file))) == len(saved[name])
        if name == "real":
            continue
        assert (folder / f"{name}.png").read_bytes().startswith(b"\x89PNG")


def test_quick_measures_dicesgd_alone(monkeypatch, tmp_path):
    seen = []
    monkeypatch.setattr(
        benchmark, "run_cells", lambda cells, options, show: seen.extend(cells) or []
    )
    benchmark.run(parse(benchmark, "--quick", f"--output_dir={tmp_path}"))
    assert {(c["method"], c["engine"]) for c in seen} == {("DiceSGD", "layerwise")}
    measured = {c["model"] for c in seen}
    assert measured == {*benchmark.QUICK} & {*benchmark.MODELS, *real_models.MODELS}
    # Some of every family.
    groups = {real_models.MODELS[m].group for m in measured if m in real_models.MODELS}
    assert groups == {model.group for model in real_models.MODELS.values()}


def test_without_quick_everything_is_measured(monkeypatch, tmp_path):
    seen = []
    monkeypatch.setattr(
        benchmark, "run_cells", lambda cells, options, show: seen.extend(cells) or []
    )
    benchmark.run(parse(benchmark, f"--output_dir={tmp_path}"))
    assert {c["model"] for c in seen} == {*benchmark.MODELS, *real_models.MODELS}
    seen.clear()
    benchmark.run(parse(benchmark, "--noratios", f"--output_dir={tmp_path}"))
    assert seen == []


@pytest.mark.parametrize("asked", [False, True])
def test_models_are_compiled_with_xla_if_asked(tiny, monkeypatch, tmp_path, asked):
    seen = []
    monkeypatch.setattr(
        benchmark, "run_cells", lambda cells, options, show: seen.append(options) or []
    )
    arguments = [f"--jit_compile={asked}", "--models=cnn", f"--output_dir={tmp_path}"]
    benchmark.run(parse(benchmark, *arguments))
    model = cell.compiled_model({**CELL, **seen[0]}, private=True)
    assert model.jit_compile is asked


def test_unknown_models_are_refused():
    with pytest.raises(flags.IllegalFlagValueError, match="must be names out of cnn,"):
        parse(benchmark, "--models=cnn,resnet50")


def test_every_program_is_a_bazel_target():
    text = (ROOT / "benchmarks" / "BUILD").read_text(encoding="utf-8")
    programs = re.findall(r'^    "(\w+\.py)",$', text, re.MULTILINE)
    assert [program for program in programs if not (ROOT / "benchmarks" / program).exists()] == []


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__]))
