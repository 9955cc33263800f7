# Copyright 2026 The dice_tf Authors.
# SPDX-License-Identifier: Apache-2.0
"""docs/privacy.md: its numbers are the library's, its code runs, its links lead somewhere."""

import doctest
import importlib
import math
import pathlib
import re
import sys

import pytest

sys.path.insert(0, str(pathlib.Path(__file__).parent))

import accounting_releases

import dice_tf
from dice_tf import accounting
from dice_tf.accounting import events

ROOT = pathlib.Path(__file__).absolute().parents[1]
sys.path.insert(0, str(ROOT / "docs"))
figures = importlib.import_module("make_privacy_figures")

PAGE = (ROOT / "docs" / "privacy.md").read_text(encoding="utf-8")


def table(name):
    """Returns the lines of a table of the page, the two of its head first."""
    (text,) = re.findall(rf"<!-- table: {name} -->\n((?: *\|.*\n)+)", PAGE)
    return [line.strip() for line in text.splitlines()]


def cells(name):
    """Returns the rows of a table, as lists of texts."""
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in table(name)[2:]]


# (name of the table, rows as the script has them, feedback steps of the columns; 0 is DP-SGD)
NOISE_TABLES = [
    ("noise-two-groups", figures.TWO_GROUPS_ROWS, (0, 1)),
    ("noise-spread", figures.SPREAD_ROWS, (0, 1, 3, 7)),
]
NOISE_CELLS = [
    (run, epsilon, feedback_steps, float(noise))
    for name, rows, spreads in NOISE_TABLES
    for (run, epsilon), row in zip(rows, cells(name))
    for feedback_steps, noise in zip(spreads, row[5:-1])
]


def test_every_table_is_made_by_the_script():
    assert set(re.findall(r"<!-- table: (\S+) -->", PAGE)) == set(figures.TABLES)


@pytest.mark.parametrize("name, rows, spreads", NOISE_TABLES, ids=lambda value: str(value)[:12])
def test_rows_and_ratios_of_the_tables_of_noise(name, rows, spreads):
    for (run, epsilon), row in zip(rows, cells(name), strict=True):
        *parameters, stated = (float(text.replace(",", "")) for text in row[:5])
        noises = [float(text) for text in row[5:-1]]
        assert (*parameters, stated) == (*run, epsilon) and len(noises) == len(spreads)
        assert float(row[-1]) == pytest.approx(noises[0] / noises[-1], abs=0.006)


# tests/accounting_tables_test.py checks the same settings; a sample ties the page to the script.
@pytest.mark.parametrize("run, epsilon, feedback_steps, noise", NOISE_CELLS[::5])
def test_the_noise_tabled_brackets_the_epsilon(run, epsilon, feedback_steps, noise):
    above, below = (
        figures.epsilon_at(run, feedback_steps, factor * noise) for factor in (0.995, 1.005)
    )
    assert below < epsilon < above


@pytest.mark.filterwarnings("ignore:The best Renyi order")
@pytest.mark.parametrize("index", range(len(figures.forms())))
def test_the_table_of_forms(index):
    label, mechanism, sampling, relation = figures.forms()[index]
    stated_label, *stated = cells("forms")[index]
    assert stated_label == label
    # The other loss distributions are tighter with newer releases of dp_accounting.
    fixed = mechanism.bound_residuals and relation is None
    accountants = ("rdp", "pld") if fixed else ("rdp",)
    for accountant, text in zip(accountants, stated):
        epsilon = accounting.compute_epsilon(mechanism, sampling, 600, 1e-5, accountant, relation)
        assert accounting_releases.agrees(text, epsilon), (text, epsilon)


@pytest.mark.parametrize("name", ["paper", "noise-edge"])
def test_the_quick_tables_are_what_the_script_prints(name):
    assert table(name) == figures.TABLES[name]().splitlines()


def test_loss_distributions_are_tighter_in_the_table_of_forms():
    for label, renyi, loss in cells("forms"):
        assert float(loss) <= float(renyi), label


def test_the_code_prints_what_the_page_says():
    blocks = re.findall(r"```python\n(.*?)```", PAGE, flags=re.DOTALL)
    assert len(blocks) == 2
    names = {}
    runner = doctest.DocTestRunner()
    for block in blocks:
        parsed = doctest.DocTestParser().get_doctest(block, names, "privacy.md", None, 0)
        assert parsed.examples
        runner.run(parsed, clear_globs=False)
        names = parsed.globs
    assert runner.summarize().failed == 0


def test_numbers_in_the_text():
    assert "at most 15 % of those" in PAGE
    assert round(100 * (math.exp(2.7) * 0.01 + 1e-5)) == 15
    sampling = dice_tf.CyclicPoissonSampling(60_000, 2048)
    mechanism = dice_tf.DiceMechanism(
        l2_norm_clip=0.25, noise_multiplier=2.85, expected_batch_size=2048
    )
    of_group = lambda k: accounting.compute_epsilon(
        mechanism, sampling, 600, 1e-5, "pld", group_size=k
    )
    assert [f"{of_group(k):.1f}" for k in (1, 2, 5)] == ["2.7", "6.0", "19.3"]
    assert "= 2.7 for one, 6.0 for two and 19.3 for five" in PAGE


def test_the_first_figure_shows_the_sensitivities():
    plain = figures.influence((2, 8), 16, 100.0, l2_norm_clip=2.0, error_norm_clip=0.0)
    bounded = figures.influence((2, 8), 16, 100.0, l2_norm_clip=1.0)
    letter = figures.influence((2, 8), 16, 100.0, l2_norm_clip=1.0, bound_residuals=False)
    assert [i for i, shift in enumerate(plain) if shift] == [2, 8]
    assert [i for i, shift in enumerate(bounded) if shift] == [2, 3, 8, 9]
    assert 1 - 2e-5 <= max(bounded) <= 1.0 and 2 - 4e-5 <= max(plain) <= 2.0
    # To the letter: shifted from the first draw to the end.
    assert [shift > 0.999 for shift in letter] == [False] * 2 + [True] * 14


def test_links_and_figures_exist():
    links = re.findall(r"\]\(([^)#\s]+)\)", PAGE)
    local = [link for link in links if not link.startswith("https://")]
    assert set(figures.FIGURES) <= {pathlib.Path(link).name for link in local}
    assert [link for link in local if not (ROOT / "docs" / link).is_file()] == []
    sizes = {name: (ROOT / "docs" / "figures" / name).stat().st_size for name in figures.FIGURES}
    assert max(sizes.values()) < 100_000, sizes


def test_sections_that_are_linked_exist():
    # GitHub's rule: lower case, punctuation dropped, spaces to hyphens.
    slug = lambda title: re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-")
    headings = {slug(title) for title in re.findall(r"^#+ (.*)$", PAGE, re.MULTILINE)}
    anchors = re.findall(r"\]\(#([^)]+)\)", PAGE)
    assert anchors and set(anchors) <= headings


def test_names_in_code_style_exist():
    for name in re.findall(r"`accounting\.(\w+)", PAGE):
        assert hasattr(accounting, name), name
    for name in ("bounded_rounds", "unbounded_rounds", "mixture_event", "_extra_factor"):
        assert f"`{name}`" in PAGE and hasattr(events, name)
    for name in ("check_model", "fix_model", "check_gradients", "EpsilonCallback"):
        assert f"`{name}`" in PAGE and hasattr(dice_tf, name)


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__]))
