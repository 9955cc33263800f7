# Copyright 2026 The dice_tf Authors.
# SPDX-License-Identifier: Apache-2.0
"""docs/differential_privacy.md and the start of docs/error_feedback.md: numbers and figures."""

import doctest
import importlib
import math
import pathlib
import re
import sys

import dp_accounting
from dp_accounting.rdp import rdp_privacy_accountant
import numpy as np
import pytest
from scipy import stats

ROOT = pathlib.Path(__file__).absolute().parents[1]
sys.path.insert(0, str(ROOT / "docs"))
figures = importlib.import_module("make_concept_figures")
matrix_mechanism = importlib.import_module("matrix_mechanism")
privacy_figures = importlib.import_module("make_privacy_figures")


def page(name):
    return (ROOT / "docs" / name).read_text(encoding="utf-8")


BASICS, FEEDBACK = page("differential_privacy.md"), page("error_feedback.md")


def test_the_code_prints_what_the_page_says():
    parsed = doctest.DocTestParser().get_doctest(BASICS, {}, "differential_privacy.md", None, 0)
    assert len(parsed.examples) == 8
    assert doctest.DocTestRunner().run(parsed).failed == 0


def test_figures_exist_and_are_shown():
    shown = set(re.findall(r"\]\(figures/([\w.]+)\)", BASICS + FEEDBACK))
    # From make_privacy_figures.py, and from examples/convergence.py.
    assert set(figures.PLOTS) | {"influence.png", "convergence.png"} == shown
    sizes = {name: (ROOT / "docs" / "figures" / name).stat().st_size for name in shown}
    assert 0 < max(sizes.values()) < 100_000, sizes


def test_numbers_in_the_text():
    text = " ".join(BASICS.split())
    assert round(math.e, 1) == 2.7 and "2.7 times as likely" in text
    assert 2900 < math.exp(8) < 3000 and "nearly 3000 times" in text
    found = [100 * float(figures.most_true_positives(e, 0.01)) for e in (1.0, 2.7, 8.0)]
    assert [round(found[0], 1), round(found[1])] == [2.7, 15] and 99 < found[2] < 100
    assert (
        "accuses 1 % of the innocent finds at most 2.7 % of the others. At 2.7 it is 15 %" in text
    )


def test_the_curve_of_the_promise_holds_for_a_mechanism_that_is_as_bad_as_it_may_be():
    # Randomised response is (epsilon, 0)-private, and no test is as good as its best one.
    epsilon = 1.0
    truth = math.exp(epsilon) / (1 + math.exp(epsilon))
    assert figures.most_true_positives(epsilon, 1 - truth, delta=0.0) == pytest.approx(truth)
    # A Gaussian mechanism stays below the curve of its own epsilon everywhere.
    event = dp_accounting.GaussianDpEvent(2.0)
    accountant = rdp_privacy_accountant.RdpAccountant().compose(event)
    rates = np.linspace(1e-6, 1 - 1e-6, 999)
    attained = stats.norm.cdf(stats.norm.ppf(rates) + 1 / 2.0)
    most = figures.most_true_positives(accountant.get_epsilon(1e-5), rates, 1e-5)
    assert np.all(attained <= most)


def test_clipping_bounds_the_influence_that_the_figure_shows():
    gradients = figures.example_gradients()
    norms = np.linalg.norm(gradients.astype("float64"), axis=1)
    expected = gradients * np.minimum(1, 0.8 / norms)[:, None]
    found = figures.clipped(gradients, 0.8)
    np.testing.assert_allclose(found, expected, rtol=2e-5)
    assert np.linalg.norm(found.astype("float64"), axis=1).max() <= 0.8
    assert norms[-1] > 2 > 0.8  # The red one is clipped.


@pytest.mark.parametrize("label", list(figures.SAMPLERS))
def test_epsilons_of_the_figure(label):
    sampling = figures.SAMPLERS[label][0]
    # With C1 = C2: rounds per epoch, probability of taking part, influence over C1.
    rounds, probability, influence = {
        "shuffled epochs": (1, 1.0, 2.0),
        "Poisson sampling": (117, 512 / 60_000, 2.0),
        "cyclic Poisson sampling": (59, 1024 / 60_000, math.sqrt(2)),
    }[label]
    event = dp_accounting.PoissonSampledDpEvent(
        probability, dp_accounting.GaussianDpEvent(2.0 / influence)
    )
    for epochs, epsilon in zip((1, 8), figures.epsilons_of_epochs(sampling, (1, 8))):
        composed = dp_accounting.SelfComposedDpEvent(event, epochs * rounds)
        accountant = rdp_privacy_accountant.RdpAccountant().compose(composed)
        assert epsilon == pytest.approx(accountant.get_epsilon(1e-5), rel=0.02)


@pytest.mark.parametrize("label", list(figures.DESCENTS))
def test_descent_ends_where_the_forces_balance(label):
    arguments = figures.DESCENTS[label][0]
    total = sum(arguments.values()) if arguments else math.inf
    # Nine examples pull with force w to 0, one with force min(4 - w, total) to 4.
    expected = min(0.4, total / 9)
    reached = figures.descend(figures.TARGETS, 150, 0.15, **arguments)[-1]
    assert reached == pytest.approx(expected, abs=1e-3)
    if expected < 0.4:
        assert f"{expected:.2f}" in FEEDBACK


def test_the_table_of_releases():
    rows = re.findall(
        r"^\| released by ([\w-]+), (.*?) \| (\d) \| (\d) \| (\d) \|$", FEEDBACK, re.M
    )
    assert len(rows) == 3
    for name, thresholds, *released in rows:
        first, *second = (float(value) for value in re.findall(r"= (\d)", thresholds))
        assert (name == "DiceSGD") == bool(second)
        shifts = privacy_figures.influence(
            (0,), 3, 4.0, l2_norm_clip=first, error_norm_clip=second[0] if second else 0.0
        )
        released = [float(value) for value in released]
        # Clipping allows for rounding: never more than what the table says.
        assert shifts == pytest.approx(released, rel=2e-5)
        assert all(s <= r for s, r in zip(shifts, released, strict=True))


def test_the_gain_that_is_quoted():
    tables = re.findall(r"<!-- table: noise-[\w-]+ -->\n((?:\|.*\n)+)", page("privacy.md"))
    rows = [row.split("|") for table in tables for row in table.splitlines()[2:]]
    assert len(tables) == 2 and len(rows) == 10
    # DP-SGD, and next to it two groups with one step of feedback.
    less = [1 - float(row[7]) / float(row[6]) for row in rows]
    low, high = map(int, re.search(r"(\d+) to (\d+) %\s+less\s+noise", FEEDBACK).groups())
    assert low == round(100 * min(less)) and high == round(100 * max(less))


def matrix_of_sums(steps):
    return np.tril(np.ones((steps, steps)))


def strategy(column, steps):
    """Returns the matrix with `column` on its first diagonals."""
    return sum(value * np.eye(steps, k=-k) for k, value in enumerate(column))


def sums_noise(releases):
    """Returns root mean squares of the noise of DiceSGD's sums, by whole matrices."""
    steps = matrix_mechanism.STEPS
    averages = strategy(np.full(releases, 1 / releases), steps)
    longest_column = np.linalg.norm(averages, axis=0).max()
    covariance = longest_column**2 * matrix_of_sums(steps) @ matrix_of_sums(steps).T
    return np.sqrt(np.trace(covariance) / steps)


@pytest.mark.parametrize("releases", (1, *matrix_mechanism.SPREADS))
def test_noise_of_the_matrix_mechanism(releases):
    noise = matrix_mechanism.noise_of_spread(releases)
    found = matrix_mechanism.root_mean_square(matrix_mechanism.noise_of_sums(noise))
    assert found == pytest.approx(sums_noise(releases), rel=1e-9)
    stated = {1: 24.2, 2: 17.1, 4: 12.1, 8: 8.5, 16: 6.0}[releases]
    assert round(found, 1) == stated
    # And by drawing it.
    rng = np.random.default_rng(releases)
    drawn = np.cumsum(rng.normal(0, noise, (400, matrix_mechanism.STEPS)), axis=1)
    assert np.sqrt((drawn**2).mean()) == pytest.approx(found, rel=0.1)


@pytest.mark.parametrize("releases", matrix_mechanism.SPREADS)
def test_releases_are_moving_averages(releases):
    shifts = privacy_figures.influence(
        (3,), 24, 1e6, l2_norm_clip=1 / releases, error_norm_clip=1 - 1 / releases,
        feedback_steps=releases - 1,
    )  # fmt: skip
    averages = strategy(np.full(releases, 1 / releases), 24)
    np.testing.assert_allclose(shifts, averages[:, 3], rtol=1e-4)


@pytest.mark.parametrize("releases, stated", [(2, 17.2), (4, 12.3), (8, 9.0), (16, 6.7)])
def test_best_banded_factorization(releases, stated):
    steps = matrix_mechanism.STEPS
    column, of_steps, of_sums = matrix_mechanism.banded_factorization(releases)
    assert len(column) == releases and np.linalg.norm(column) == pytest.approx(1)
    inverse = np.linalg.inv(strategy(column, steps))
    np.testing.assert_allclose(np.linalg.norm(inverse, axis=1), of_steps, rtol=1e-6)
    sums = matrix_of_sums(steps) @ inverse
    np.testing.assert_allclose(np.linalg.norm(sums, axis=1), of_sums, rtol=1e-6)
    least = np.linalg.norm(sums) / np.sqrt(steps)
    assert round(least, 1) == stated
    rng = np.random.default_rng(releases)
    for size in (0.003, 0.03):
        other = column + size * rng.normal(size=releases)
        of_other = matrix_of_sums(steps) @ np.linalg.inv(
            strategy(other / np.linalg.norm(other), steps)
        )
        assert np.linalg.norm(of_other) / np.sqrt(steps) > least


def test_table_of_the_matrix_mechanism():
    assert f"<!-- table: matrix -->\n{matrix_mechanism.table()}\n" in FEEDBACK


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__]))
