# Copyright 2026 The dice_tf Authors.
# SPDX-License-Identifier: Apache-2.0
"""The search over thresholds and learning rates: one epsilon for all cells, and kills."""

import csv
import math
import os
import pathlib
import signal
import subprocess
import sys
import time

from absl import app, flags
import numpy as np
import pytest

EXAMPLES = pathlib.Path(__file__).resolve().parents[1] / "examples"
sys.path.insert(0, str(EXAMPLES))
sys.path.insert(0, str(pathlib.Path(__file__).parent))

import ablation
import ablation_cells
import ablation_text
from dp_accounting_oracle import TOLERANCE, composed_epsilon
from image_classifier_flags import settings_from
import trial_log

HELD_OUT, TRAINED = 287, 1150
PARAMETERS = ("l2_norm_clip", "error_norm_clip", "noise_stddev")
# 3 cells of 2 steps: 2 over C1 and C2, and 2 over C1 and the learning rate, of which one is both.
TINY = ("--batch_size=500", "--epochs=1", "--epsilon=3", "--l2_norm_clips=0.1,0.4",
        "--error_norm_clips=0.4", "--learning_rates=0.2")  # fmt: skip


@pytest.fixture(scope="module", name="data_dir")
def prepared_data(tmp_path_factory):
    return str(tmp_path_factory.mktemp("tfds"))


def parse(*arguments):
    values = flags.FlagValues()
    ablation.define_image_flags(values)
    values(["ablation", *arguments])
    return values


def rows_of(folder):
    with open(folder / "cells.csv", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def epsilon_of(l2_norm_clip, error_norm_clip, noise_stddev, steps, accountant="pld"):
    """Epsilon of a cell, by dp_accounting alone."""
    noise = noise_stddev * 500 / math.hypot(l2_norm_clip, error_norm_clip)
    return composed_epsilon(2 * 500 / TRAINED, noise, math.ceil(steps / 2), 1e-4, accountant)


def start(*arguments):
    return subprocess.Popen(
        [sys.executable, str(EXAMPLES / "ablation.py"), *arguments],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def test_killed_search_goes_on_where_it_stopped(data_dir, tmp_path):
    arguments = (*TINY, f"--data_dir={data_dir}", f"--output_dir={tmp_path}")
    table = tmp_path / "cells.csv"
    killed = start(*arguments)
    while not table.exists() or table.read_text(encoding="utf-8").count("\n") < 2:
        assert killed.poll() is None, killed.communicate()[0]
        time.sleep(0.02)
    killed.send_signal(signal.SIGKILL)
    killed.communicate()
    assert killed.returncode == -signal.SIGKILL
    before = table.read_bytes()
    # As if it had come in the middle of a row.
    table.write_bytes(before + b"0.4,0.4,0.2")

    resumed = start(*arguments)
    printed = resumed.communicate()[0]
    assert resumed.returncode == 0, printed
    assert table.read_bytes().startswith(before)
    rows = rows_of(tmp_path)
    keys = [tuple(float(row[name]) for name in ablation_cells.Cell._fields) for row in rows]
    clips = [(0.1, 0.4), (0.4, 0.4), (0.1, 0.1)]
    assert keys == [(c1, c2, 0.2, 0) for c1, c2 in clips]
    done = before.count(b"\n") - 1
    assert 1 <= done < 3
    assert f"3 cells, {done} of them finished before." in printed
    assert f"[{3 - done}/{3 - done}]" in printed and "0 min left)" in printed
    for name in ("thresholds", "learning_rate"):
        assert (tmp_path / f"ablation_{name}.png").read_bytes().startswith(b"\x89PNG")

    for row in rows:
        expected = epsilon_of(*(float(row[name]) for name in (*PARAMETERS, "steps")))
        assert float(row["epsilon"]) == pytest.approx(expected, rel=1e-4)
        assert 2.99 < float(row["epsilon"]) <= 3.0
        correct = float(row["accuracy"]) * HELD_OUT
        assert row["steps"] == "2" and correct == pytest.approx(round(correct), abs=1e-3)
    for text in ("1150 examples, 500 expected", "0.0001", "CyclicPoissonSampling, 2 groups",
                 "never on test data", "the seeds are known"):  # fmt: skip
        assert text in printed


@pytest.mark.parametrize("accountant", ["pld", "rdp"])
@pytest.mark.parametrize("clips", [(0.1, 0.0), (0.1, 0.3), (3.0, 0.01), (0.7, 0.7)])
def test_every_cell_has_the_same_epsilon_by_a_noise_of_its_own(clips, accountant):
    flag = f"--accountant={accountant}"
    settings = settings_from(parse("--epsilon=3", "--batch_size=500", "--epochs=9", flag))
    cell = ablation_cells.Cell(*clips, 0.2, 0)
    settings, plan = ablation.plan_cell(cell, settings, TRAINED)
    mechanism = ablation.IMAGES.make_optimizer(settings, plan).mechanism
    assert (mechanism.l2_norm_clip, mechanism.error_norm_clip) == pytest.approx(clips, rel=1e-12)
    parameters = [getattr(mechanism, name) for name in PARAMETERS]
    epsilon = epsilon_of(*parameters, plan.steps, accountant)
    assert plan.epsilon() == pytest.approx(epsilon, rel=TOLERANCE[accountant])
    assert 2.99 < plan.epsilon() <= 3.0 and plan.steps == 18


@pytest.fixture(name="trained")
def untrained_cells(monkeypatch):
    """Makes cells cost nothing; returns the list of those that were asked for."""
    asked = []

    def train_cell(trainer, cell, settings, task, self_check):
        del trainer, settings, self_check
        asked.append((cell, len(task.train[1]), len(task.held_out[1])))
        accuracy = 0.5 + cell.l2_norm_clip / 10 + cell.seed / 100
        return ablation_cells.Result(1.0, np.float64(0.1), 2, 3.0, np.float32(accuracy), 1.0, 60.0)

    monkeypatch.setattr(ablation, "train_cell", train_cell)
    return asked


def test_grids_may_grow_and_finished_cells_are_kept(data_dir, tmp_path, trained, capsys):
    arguments = (*TINY, f"--data_dir={data_dir}", f"--output_dir={tmp_path}")
    first = ablation.run(parse(*arguments))
    assert len(first) == len(trained) == 3
    assert {(train, test) for _, train, test in trained} == {(TRAINED, HELD_OUT)}
    assert "[1/3]" in (printed := capsys.readouterr().out) and "2 min left)" in printed
    trained.clear()
    both = ablation.run(parse(*arguments, "--repeats=2"))
    assert [cell.seed for cell, *_ in trained] == [1] * 3
    for cell, result in first.items():
        assert both[cell] == pytest.approx(result)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("--epsilon=2", "epsilon was 3.0 and is 2.0"),
        ("--epochs=2", "epochs was 1 and is 2"),
        ("--validation_fraction=0.5", "held_out_examples was 287 and is 718"),
    ],
)
def test_cells_of_another_search_are_refused(data_dir, tmp_path, trained, change, message):
    arguments = (*TINY, f"--data_dir={data_dir}", f"--output_dir={tmp_path}")
    ablation.run(parse(*arguments))
    trained.clear()
    with pytest.raises(app.UsageError, match=message):
        ablation.run(parse(*arguments, change))
    assert not trained


def test_cells_without_their_settings_are_refused(tmp_path):
    (tmp_path / "cells.csv").write_text("a,b\n1,2\n", encoding="utf-8")
    with pytest.raises(app.UsageError, match="no settings.json"):
        trial_log.claim_folder(tmp_path, {})
    with pytest.raises(app.UsageError, match="does not start with"):
        ablation_cells.read(tmp_path)
    assert (tmp_path / "cells.csv").read_text(encoding="utf-8") == "a,b\n1,2\n"


def test_values_are_read_back_as_they_were_at_any_cut(tmp_path):
    cells = [ablation_cells.Cell(0.1, 0.0, 1 / 3, 0), ablation_cells.Cell(0.1, 0.0, 1 / 3, 1)]
    result = ablation_cells.Result(math.pi, 1e-7, 3, 2.0, np.float32(0.1), float("nan"), 1.5)
    assert ablation_cells.read(tmp_path) == {}
    for cell in cells:
        ablation_cells.append(tmp_path, cell, result)
    path = tmp_path / "cells.csv"
    complete = path.read_bytes()
    assert list(ablation_cells.read(tmp_path)) == cells
    assert ablation_cells.read(tmp_path)[cells[0]].noise_multiplier == math.pi
    ends = [i + 1 for i, byte in enumerate(complete) if byte == ord("\n")]
    for cut in range(len(complete)):
        path.write_bytes(complete[:cut])
        found = ablation_cells.read(tmp_path)
        assert list(found) == cells[: sum(end <= cut for end in ends[1:])]
        ablation_cells.append(tmp_path, cells[1], result)
        assert list(ablation_cells.read(tmp_path))[-1] == cells[1]


@pytest.mark.parametrize(
    ("argument", "message"),
    [
        ("--l2_norm_clip=1", "Use --l2_norm_clips"),
        ("--error_norm_clip=1", "Use --error_norm_clips"),
        ("--noise_multiplier=1", "calibrated to --epsilon"),
        ("--optimizer=dp_sgd", "as DP-SGD"),
        ("--optimizer=sgd", "about error feedback"),
        ("--strategy=mirrored", "Cells run on one device"),
        ("--validation_fraction=0", "test data is for the model that is chosen"),
    ],
)
def test_flags_that_contradict_the_search_are_refused(argument, message):
    with pytest.raises(app.UsageError, match=message):
        ablation.run(parse(argument))


@pytest.mark.parametrize(
    ("argument", "message"),
    [
        ("--l2_norm_clips=0.1,a", "--l2_norm_clips takes numbers.*'a'"),
        ("--l2_norm_clips=0,1", "--l2_norm_clips takes finite numbers from 1e-09 on"),
        ("--error_norm_clips=-1", "--error_norm_clips takes finite numbers from 0.0 on"),
        ("--learning_rates=nan", "--learning_rates takes finite numbers"),
    ],
)
def test_values_that_cannot_be_are_refused(argument, message):
    values = parse(argument)
    with pytest.raises(app.UsageError, match=message):
        ablation_cells.make_grids(values, settings_from(values))


def test_plain_command_searches_around_the_defaults():
    values = parse()
    settings = settings_from(values)
    assert (settings.epsilon, settings.delta, settings.seed) == (8.0, 1e-4, 0)
    assert settings.rescale_to_unit_norm and settings.validation_fraction == 0.2
    # The steps of the default, 2.0 at C1 = 0.1.
    assert settings.learning_rate == pytest.approx(0.2)
    thresholds, rates = ablation_cells.make_grids(values, settings)
    assert {cell.learning_rate for cell in thresholds.cells} == {0.2}
    assert 0.2 in {cell.learning_rate for cell in rates.cells}
    assert all(cell.l2_norm_clip == cell.error_norm_clip for cell in rates.cells)


def test_it_takes_the_setting_of_the_paper():
    settings = settings_from(parse("--dataset=cifar10", "--model=vit"))
    assert (settings.epsilon, settings.delta, settings.epochs, settings.batch_size) == (
        2.0,
        1e-5,
        3,
        1000,
    )
    assert settings.rescale_to_unit_norm


def test_language_models_are_searched_in_the_same_way(tmp_path):
    lines = ["mr,ref", *(f"name[Cafe {i}],Cafe {i} is good." for i in range(50))]
    (tmp_path / "pairs.csv").write_text("\n".join(lines), encoding="utf-8")
    values = flags.FlagValues()
    ablation_text.define_flags(values)
    files = [f"--{part}_file={tmp_path}/pairs.csv" for part in ("train", "test")]
    small = ["--model=tiny", "--batch_size=10", "--epochs=1", "--delta=1e-3"]
    values(["ablation_text", *files, *small])
    settings = ablation_text.TEXTS.settings_from(values)
    assert len(ablation_cells.make_grids(values, settings)) == 2
    task = ablation_text.TEXTS.load_task(settings)
    assert (len(task.train[1]), len(task.held_out[1])) == (40, 10)
    cell = ablation_cells.Cell(0.1, 0.3, 0.002, 0)
    optimizer = ablation_text.TEXTS.make_optimizer(*ablation.plan_cell(cell, settings, 40))
    assert optimizer.mechanism.error_norm_clip == pytest.approx(0.3)
    found = task.make_model(optimizer).evaluate(*task.held_out, verbose=0, return_dict=True)
    assert 0 <= found["accuracy"] <= 1 and found["loss"] > 0


def test_only_the_task_of_the_paper_is_searched_for_texts():
    values = flags.FlagValues()
    ablation_text.define_flags(values)
    values(["ablation_text", "--task=classify"])
    with pytest.raises(app.UsageError, match="generating texts"):
        ablation_text.run(values)


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__]))
