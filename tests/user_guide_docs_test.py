# Copyright 2026 The dice_tf Authors.
# SPDX-License-Identifier: Apache-2.0
"""docs/user_guide.md: its code runs from top to bottom, and its numbers are right."""

import importlib
import pathlib
import re
import sys

import dp_accounting
from dp_accounting.rdp import rdp_privacy_accountant
import keras
import numpy as np
import pytest

sys.path.insert(0, str(pathlib.Path(__file__).parent))

import accounting_releases

import dice_tf
from dice_tf import accounting
from dice_tf.engine import rules

ROOT = pathlib.Path(__file__).absolute().parents[1]
sys.path.insert(0, str(ROOT / "docs"))
figures = importlib.import_module("make_concept_figures")

PAGE = (ROOT / "docs" / "user_guide.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"```python\n(.*?)```", PAGE, flags=re.DOTALL)


def rows(name):
    """Returns the rows of a table of the page, as lists of texts."""
    (text,) = re.findall(rf"<!-- table: {name} -->\n((?:\|.*\n)+)", PAGE)
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines()[2:]]


def test_the_code_runs_from_top_to_bottom(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(rules, "_rules", dict(rules._rules))
    keras.utils.set_random_seed(0)
    names, printed = {}, []
    for block in BLOCKS:
        exec(block, names)  # The reader's own lines, from our own page.
        printed.append(capsys.readouterr().out)
    trained = next(out for out in printed if "accuracy" in out and "epsilon" in out)
    epsilon, accuracy = re.search(r"^epsilon ([\d.]+), accuracy ([\d.]+)$", trained, re.M).groups()
    assert 1.9 < float(epsilon) <= 2.0 and float(accuracy) > 0.8
    assert any("not cover" in out for out in printed)
    assert (tmp_path / "released.keras").exists()
    # Numbers in comments behind prints.
    for block, out in zip(BLOCKS, printed):
        for stated in re.findall(r"^print\(.*\) +# ([\d.]+)$", block, re.MULTILINE):
            assert stated in out.split()
    # The last loop makes the steps of one epoch.
    assert int(names["model"].optimizer.iterations) == names["sampling"].steps_per_epoch
    # "The same run, spelled out."
    assert any(out == "True True\n" for out in printed)
    assert names["Scale"] in rules._rules
    # "so that `load_model` finds it": the layer and the loss.
    names["model"].save(tmp_path / "scaled.keras")
    loaded = keras.models.load_model(tmp_path / "scaled.keras")
    assert isinstance(loaded.layers[0], names["Scale"]) and loaded.loss is names["smooth_error"]


def test_a_wrong_rule_is_found_as_the_page_says(monkeypatch):
    monkeypatch.setattr(rules, "_rules", dict(rules._rules))
    keras.utils.set_random_seed(0)
    (layer,) = [block for block in BLOCKS if "class Scale" in block]
    (rule,) = [block for block in BLOCKS if "register_rule" in block]
    names = dict(keras=keras, dice_tf=dice_tf)
    exec(layer, names)
    wrong = rule.replace("call.inputs * call.cotangents", "call.cotangents")
    assert wrong != rule
    for text, refused in ((rule, False), (wrong, True)):
        exec(text, names)
        model = names["model"]
        model.compile(dice_tf.DiceSGDOptimizer(
            0.1, l2_norm_clip=0.5, noise_multiplier=1.0, expected_batch_size=8), "mse")  # fmt: skip
        batch = np.arange(32, dtype="float32").reshape(8, 4), np.ones((8, 1), "float32")
        if refused:
            with pytest.raises(dice_tf.errors.GradientEngineError, match="depend on the other"):
                dice_tf.check_gradients(model, batch)
        else:
            dice_tf.check_gradients(model, batch)


@pytest.mark.parametrize("name", ["variations", "batches"])
def test_tables_are_what_the_script_prints(name):
    printed = figures.TABLES[name]().splitlines()
    (text,) = re.findall(rf"<!-- table: {name} -->\n((?:\|.*\n)+)", PAGE)
    assert accounting_releases.same_table(text.splitlines(), printed), "\n".join(printed)


def rdp_epsilon(rounds, probability, noise_over_influence, delta=1e-5):
    """dp_accounting's own epsilon of a Poisson-subsampled Gaussian mechanism."""
    event = dp_accounting.SelfComposedDpEvent(
        dp_accounting.PoissonSampledDpEvent(
            probability, dp_accounting.GaussianDpEvent(noise_over_influence)
        ),
        rounds,
    )
    return rdp_privacy_accountant.RdpAccountant().compose(event).get_epsilon(delta)


def test_epsilons_of_the_table_of_variations():
    table = {label: float(epsilon) for label, epsilon, _ in rows("variations")}
    # 20 epochs of 118 steps, half of them of the group of an example.
    cyclic = lambda noise, influence, q=1024 / 60_000, rounds=1180, **more: rdp_epsilon(
        rounds, q, noise / influence, **more
    )
    expected = {
        "the run above": cyclic(2, 2**0.5),
        "twice the noise": cyclic(4, 2**0.5),
        "half the epochs": cyclic(2, 2**0.5, rounds=590),
        "twice the batch": cyclic(2, 2**0.5, q=2048 / 60_000, rounds=580),
        "twice the batch, half the `noise_multiplier`": cyclic(
            1, 2**0.5, q=2048 / 60_000, rounds=580
        ),
        "`PoissonSampling`": rdp_epsilon(2340, 512 / 60_000, 1.0),
        "arrays to `fit` (`ShuffledEpochs`)": rdp_epsilon(20, 1.0, 1.0),
        "C1 = C2 = 5 in place of 0.5": table["the run above"],
        "C2 = 0, so DP-SGD": cyclic(2, 1),
        "C2 = 2 C1": cyclic(2, 5**0.5),
    }
    for label, epsilon in expected.items():
        assert table[label] == pytest.approx(epsilon, rel=0.02), label
    assert set(table) - set(expected) == {"ten times the data, as many steps, delta = 1e-6"}


def test_noise_in_the_table_of_batches_gives_the_epsilon():
    fractions = []
    for batch, steps, noise, fraction in rows("batches"):
        probability = 2 * int(batch) / 60_000
        epsilon = rdp_epsilon(int(steps) // 2, probability, float(noise) / 2**0.5)
        assert epsilon == pytest.approx(3.0, rel=0.02)
        fractions.append(int(re.search(r"\d+$", fraction.replace("C1 / ", ""))[0]))
        assert fractions[-1] == pytest.approx(int(batch) / float(noise), rel=0.01)
    # "Batches 64 times as large have a thirteenth of the noise."
    assert fractions[-1] / fractions[0] == pytest.approx(13, abs=0.5)


def test_numbers_in_the_text():
    # "they need 1.26 times the noise"
    sampling = dice_tf.CyclicPoissonSampling(60_000, 512)
    needed = [accounting.calibrate_noise_multiplier(3.0, 1e-5, sampling, sampling.steps(e))
              for e in (20, 40)]  # fmt: skip
    assert needed[1] / needed[0] == pytest.approx(1.26, abs=0.005)
    # "59 times as much"
    assert (1_000_000 / 292) ** 0.5 == pytest.approx(59, abs=0.6)
    # "`accountant="pld"` is tighter: 5 to 10 %"
    mechanism = figures.mechanism_of()
    rdp, pld = (accounting.compute_epsilon(mechanism, sampling, sampling.steps(20), 1e-5, by)
                for by in ("rdp", "pld"))  # fmt: skip
    assert 0.05 < 1 - pld / rdp < 0.10
    # "over five times the noise"
    program = dice_tf.PrivacyPlan(
        num_examples=20_000, batch_size=500, epochs=15, target_epsilon=2.0, delta=5e-6
    )
    shuffled = accounting.calibrate_noise_multiplier(
        2.0, 5e-6, dice_tf.ShuffledEpochs(20_000, 500), steps=600, accountant="pld"
    )
    assert program.error_norm_clip_ratio == 1 and program.steps == 600
    assert 5 < shuffled / program.noise_multiplier < 6
    # "With 455 examples": the noise on the mean is C1 over these.
    small = {int(batch): int(over) for over, batch in re.findall(r"C1 / (\d+) at B = (\d+)", PAGE)}
    assert len(small) == 2
    for batch, over in small.items():
        sampling = dice_tf.CyclicPoissonSampling(455, batch)
        noise = accounting.calibrate_noise_multiplier(3.0, 2e-4, sampling, sampling.steps(30))
        assert round(batch / noise) == over


def test_the_table_of_feedback_steps_is_what_a_plan_chooses():
    (table,) = re.findall(r"\| steps in all epochs .*\n\|-.*\n((?:\|.*\n)+)", PAGE)
    lines = [[cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines()]
    # The first and the last number of steps of each row, fifty steps an epoch.
    ends = [(700, 7000), (350, 650), (200, 300), (50, 150)]
    for (steps, feedback_steps, groups, ratio, share), epochs in zip(lines, ends, strict=True):
        assert str(epochs[0]) in steps or str(epochs[1] + 50) in steps
        for number in epochs:
            plan = dice_tf.PrivacyPlan(
                num_examples=5000, batch_size=100, epochs=number // 50, target_epsilon=8.0
            )
            assert plan.feedback_steps == int(feedback_steps.split(":")[0])
            assert str(plan.sampling.num_groups) == groups.replace("none", "1")
            numerator, _, denominator = ratio.partition("/")
            assert plan.error_norm_clip_ratio == pytest.approx(
                int(numerator) / int(denominator or 1)
            )
            assert 1 / (1 + plan.error_norm_clip_ratio) == pytest.approx(float(share))


def test_the_command_line_has_these_flags():
    # Read, not imported: its flags would meet those of other scripts in this process.
    source = (ROOT / "dice_tf" / "accounting" / "__main__.py").read_text(encoding="utf-8")
    defined = re.findall(r"DEFINE_\w+\(\s*\"(\w+)\"", source)
    (command,) = re.findall(r"^python -m dice_tf\.accounting (.*)$", PAGE, re.MULTILINE)
    for flag in re.findall(r"--(\w+)=", command):
        assert flag in defined


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__]))
