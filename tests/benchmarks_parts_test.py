# Copyright 2026 The dice_tf Authors.
# SPDX-License-Identifier: Apache-2.0
"""The benchmarks of parts: noise, products, memory of a row, first steps."""

from benchmarks_test import parse, tiny
import first_step
import first_step_cell
import memory as memory_benchmark
import memory_cell
import noise
import numpy as np
import products
import protocol
import pytest

__all__ = ["tiny"]  # A fixture.


def test_noise_is_timed_in_every_way(capsys):
    times = noise.run(parse(noise, "--draws=10", "--rounds=1"))
    assert len(times) == 4 and all(min(pair) > 0 for pair in times.values())
    printed = capsys.readouterr().out
    assert all(f"| {label} |" in printed for label in times)


def test_gradients_of_kernels_are_timed_and_equal(monkeypatch, capsys):
    monkeypatch.setattr(products, "_SIDE", 8)
    monkeypatch.setattr(products, "_ENTRIES", 8)
    speeds, times = products.run(parse(products, "--examples=3", "--rounds=1"))
    printed = capsys.readouterr().out
    assert min(speeds) > 0 and all(f"| {name} |" in printed for name in times)
    for make, shape in products._CONVOLUTIONS.values():
        arguments, functions = products._of_convolution(make, shape, examples=1)
        both = functions["each"](*arguments).numpy()
        summed = functions["summed"](*arguments).numpy().reshape(-1)
        scales = arguments[2].numpy() * np.sum(summed**2)
        np.testing.assert_allclose(both, scales * summed, rtol=1e-3, atol=1e-4 * np.abs(both).max())


def test_memory_of_a_row_is_the_slope_of_peaks(monkeypatch, capsys):
    peaks = {512: 700.0, 2048: 1012.5}
    monkeypatch.setattr(
        protocol, "measure", lambda script, cell: {"peak_mib": peaks[cell["batch"]],
                                                   "estimated_kib": 300.0},
    )  # fmt: skip
    found = memory_benchmark.run(parse(memory_benchmark, "--models=cnn"))
    # 312.5 MiB of 1,536 rows.
    assert found == {"cnn": (pytest.approx(208.33, abs=0.01), 300.0)}
    assert "| cnn | 208 | 300 | 1.44 |" in capsys.readouterr().out


def test_memory_of_a_step_is_measured(tiny):
    result = memory_cell.measure({"model": "tiny", "batch": 2**16})
    # At least inputs and outputs, of 8 and 10 numbers: 4.5 MiB.
    assert 4.5 <= result["peak_mib"] < 100 and 72 <= result["estimated_kib"] * 1024 <= 1500


def test_parts_of_a_first_step_are_measured(tiny):
    result = first_step_cell.measure({"model": "tiny", "batch": 4})
    assert result["check"][0] == 0 < result["check"][1]
    assert min(*result["whole"], *result["trace"]) > 0
    # Without privacy a step of one layer has some product, some bias, some update.
    plain, private = result["operations"]
    assert 20 < plain < private < 2000


def test_parts_of_a_first_step_add_up_and_a_failure_is_shown(monkeypatch, capsys):
    parts = {"whole": [0.5, 2.0], "check": [0.0, 0.25], "trace": [0.25, 1.0],
             "operations": [210, 1050]}  # fmt: skip
    of = {"cnn": (256, parts), "ResNet50": (32, {"failed": "no memory"})}
    asked = []

    def measure(script, cell):
        asked.append((cell["model"], cell["batch"]))
        return of[cell["model"]][1]

    monkeypatch.setattr(protocol, "measure", measure)
    assert first_step.run(parse(first_step, "--models=cnn,ResNet50"))["cnn"] is parts
    assert asked == [(name, batch) for name, (batch, _) in of.items()]
    printed = capsys.readouterr().out
    assert "| cnn | 0.50, 2.00 | 0.25 | 0.25, 1.00 | 210, 1,050 | 0.25, 0.75 |" in printed
    assert "| ResNet50 | failed: no memory |" in printed


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__]))
