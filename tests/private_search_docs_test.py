# Copyright 2026 The dice_tf Authors.
# SPDX-License-Identifier: Apache-2.0
"""docs/private_search.md: its code runs from top to bottom, and its numbers are right."""

import math
import pathlib
import re

import keras
import pytest

import dice_tf
from dice_tf import accounting
from dice_tf.accounting import repeated_selection

PAGE = (pathlib.Path(__file__).absolute().parents[1] / "docs" / "private_search.md").read_text(
    encoding="utf-8"
)
BLOCKS = re.findall(r"^```python\n(.*?)^```", PAGE, re.DOTALL | re.MULTILINE)


@pytest.fixture(scope="module")
def program(tmp_path_factory):
    """Runs the page with two trials a search; returns its names and what it printed."""
    names, printed = {"__name__": "page"}, []
    names["print"] = lambda *values: printed.append(" ".join(map(str, values)))
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(tmp_path_factory.mktemp("page"))
        patch.setattr(repeated_selection, "draw_number_of_trials", lambda mean, shape: 2)
        for block in BLOCKS:
            exec(block, names)  # The reader's own lines, from our own page.
        assert pathlib.Path("search/trials.png").stat().st_size > 5000
    return names, printed


def test_the_search_of_the_page(program):
    names, printed = program
    result, plan = names["result"], names["plan"]
    assert result.epsilon == names["best"] and plan.epsilon() < names["best"] < 3 * plan.epsilon()
    assert printed[0].startswith(f"one trial {plan.epsilon():.2f}, the best of 4")
    assert result.score > 0.25 and 0.1 <= result.values["learning_rate"] <= 10
    assert result.statement in printed
    accuracy = result.model.evaluate(names["x_public"], names["y_public"], verbose=0)[1]
    assert accuracy == pytest.approx(result.score, abs=1e-6)
    assert len(names["trials"]) == 2 and str(names["trials"]).startswith("PRIVATE")
    assert "All 10 runs below" in printed[-1]


def test_the_hypermodel_of_the_page(program):
    names, _ = program
    tuned = names["tuned"]
    assert isinstance(tuned.model, keras.Model) and set(tuned.values) == {"learning_rate", "clip"}
    assert tuned.epsilon < names["result"].epsilon


def test_the_numbers_of_the_page():
    run = (
        dice_tf.DiceMechanism(l2_norm_clip=1.0, noise_multiplier=2.0, expected_batch_size=512),
        dice_tf.CyclicPoissonSampling(60_000, 512),
        1171,
    )
    cost = lambda mean, shape, accountant: accounting.selection_epsilon(
        *run, 1e-5, mean, shape, accountant
    )
    for mean in (10, 100):
        cells = [
            f"{cost(mean, shape, 'rdp'):.2f} / {cost(mean, shape, 'pld'):.2f}" for shape in (0, 1)
        ]
        poisson = f"{cost(mean, math.inf, 'rdp'):.2f} / -"
        assert f"| {mean} | {cells[0]} | {cells[1]} | {poisson} |" in PAGE
    one = {name: f"{accounting.compute_epsilon(*run, 1e-5, name):.2f}" for name in ("rdp", "pld")}
    assert f"one run costs {one['rdp']} (RDP) or {one['pld']} (PLD)" in PAGE


def test_the_chances_of_a_single_trial():
    # P[K = 1] = (1 - gamma) / log(1 / gamma) for shape 0, gamma for shape 1.
    log_inverse = repeated_selection.log_inverse_gamma(10.0, 0.0)
    assert (1 - math.exp(-log_inverse)) / log_inverse == pytest.approx(0.27, abs=5e-3)
    assert math.exp(-repeated_selection.log_inverse_gamma(10.0, 1.0)) == pytest.approx(0.1)
    assert "27 % of searches make one trial for `shape=0`, 10 %" in PAGE


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__]))
