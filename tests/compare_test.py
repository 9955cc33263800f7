# Copyright 2026 The dice_tf Authors.
# SPDX-License-Identifier: Apache-2.0
"""DP-SGD against DiceSGD: equal epsilon, equal budgets, intervals, restarts, features."""

import csv
import math
import pathlib
import sys

from absl import app, flags
import numpy as np
import pytest

EXAMPLES = pathlib.Path(__file__).resolve().parents[1] / "examples"
sys.path.insert(0, str(EXAMPLES))
sys.path.insert(0, str(pathlib.Path(__file__).parent))

import compare
import comparison_report
import comparison_tasks
from dp_accounting_oracle import TOLERANCE, composed_epsilon
import scattering
import trial_log

QUICK = ("--tasks=heavy_tails", "--quick", "--epsilons=3", "--trials=1", "--repeats=2")


@pytest.fixture(scope="module", name="task")
def small_task():
    return comparison_tasks.heavy_tails(quick=True)


def parse(*arguments):
    values = flags.FlagValues()
    compare.define_flags(values)
    values(["compare", *arguments])
    return values


def epsilon_of(trial, optimizer, steps, task, accountant):
    """Epsilon of a trial, by dp_accounting alone."""
    mechanism, s, batch = optimizer.mechanism, trial.feedback_steps, task.batch_size
    # Over one round an example moves s + 1 directions: its head once, 1/s of its residual s times.
    influence = math.hypot(mechanism.l2_norm_clip, mechanism.error_norm_clip / math.sqrt(max(s, 1)))
    probability, noise = (s + 1) * batch / len(task.train[0]), mechanism.noise_stddev * batch
    rounds = math.ceil(steps / (s + 1))
    return composed_epsilon(probability, noise / influence, rounds, task.delta, accountant)


@pytest.mark.parametrize("accountant", ["pld", "rdp"])
@pytest.mark.parametrize("method", comparison_report.METHODS)
def test_every_trial_has_the_same_proven_epsilon(task, method, accountant):
    tested = set()
    for trial in compare.draw_trials(method, 3.0, task, range(8)):
        plan, optimizer = compare.plan_trial(trial, task, accountant)
        assert plan.steps == 4 * 12  # As many for all, or length would be tuned as well.
        assert plan.sampling.seed == trial.seed
        assert 2.95 < plan.epsilon() <= 3.0
        mechanism = optimizer.mechanism
        if trial.feedback_steps not in tested:
            epsilon = epsilon_of(trial, optimizer, plan.steps, task, accountant)
            assert plan.epsilon() == pytest.approx(epsilon, rel=TOLERANCE[accountant])
            tested.add(trial.feedback_steps)
        total = mechanism.l2_norm_clip + mechanism.error_norm_clip
        np.testing.assert_allclose(total, trial.clip, rtol=1e-12)
        assert (mechanism.error_norm_clip == 0) == (method == "DP-SGD")


def test_golden_noise_of_the_recorded_results(task):
    noise = {}
    for method in comparison_report.METHODS:
        for trial in compare.draw_trials(method, 3.0, task, range(8)):
            plan, _ = compare.plan_trial(trial, task, "rdp")
            noise[trial.feedback_steps] = plan.noise_multiplier
    assert noise == pytest.approx(GOLDEN_NOISE, abs=1e-3)


# By feedback steps, in units of C1, which is 1 / (s + 1) of what is passed on in all.
GOLDEN_NOISE = {0: 1.173, 1: 2.086, 2: 2.952, 5: 5.331}


def test_both_methods_draw_the_same_trials(task):
    draw = lambda method: compare.draw_trials(method, 1.0, task, range(12))
    plain, dice = draw("DP-SGD"), draw("DiceSGD")
    same = lambda trial: trial._replace(method="", feedback_steps=0)
    assert [*map(same, plain)] == [*map(same, dice)] and len(set(plain)) == 12
    assert {trial.feedback_steps for trial in dice} == set(compare.FEEDBACK_STEPS)
    assert {trial.feedback_steps for trial in plain} == {0}


def share_within(quantile, freedom):
    """Probability that |t| is below a quantile, by summing up Student's density."""
    density = lambda t: (1 + t**2 / freedom) ** (-(freedom + 1) / 2)
    centres = (np.arange(4_000_000) + 0.5) * 1e-3
    return density(centres)[: round(quantile * 1e3)].sum() / density(centres).sum()


def test_intervals_by_hand():
    scores = {"DP-SGD": [0.70, 0.72, 0.74, 0.76], "DiceSGD": [0.80, 0.81, 0.82, 0.83]}
    # 12 draws: a 95 % interval of the median goes from the 3rd to the 10th, for 1 - 2 P(at most
    # 2 of 12 coins) is 0.961 and 1 - 2 P(at most 3) is 0.854.
    draws = {"DP-SGD": [0.5] * 12, "DiceSGD": [0.5 + i / 100 for i in (*range(-4, 7), 90)]}
    summary = comparison_report.summarise(1.0, scores, draws)
    np.testing.assert_allclose(summary.draw_difference, [0.015, -0.02, 0.05], atol=1e-12)
    assert summary.num_draws == 12
    # Variances of the means: (0.03^2 + 0.01^2 + 0.01^2 + 0.03^2) / 3 / 4, and a quarter of it.
    plain, dice = 0.002 / 12, 0.0005 / 12
    for method, mean, variance in (("DP-SGD", 0.73, plain), ("DiceSGD", 0.815, dice)):
        found, half = summary.intervals[method]
        assert abs(found - mean) < 1e-12
        np.testing.assert_allclose(share_within(half / math.sqrt(variance), 3), 0.95, atol=2e-4)
    # Differences 0.10, 0.09, 0.08, 0.07: mean 0.085, variance of the mean as that of DiceSGD.
    mean, low, high = summary.difference
    np.testing.assert_allclose([mean, low + high], [0.085, 0.17], rtol=1e-9)
    np.testing.assert_allclose(share_within((high - mean) / math.sqrt(dice), 3), 0.95, atol=2e-4)
    assert summary.verdict == "DiceSGD ahead"
    table = comparison_report.format_table([summary], "accuracy")
    assert "+8.50 (+6.45 to +10.55) | DiceSGD ahead | +1.50 (-2.00 to +5.00), 12 draws |" in table


@pytest.mark.parametrize(
    ("dice", "verdict"),
    [
        ([0.60, 0.61, 0.62], "DP-SGD ahead"),
        ([0.60, 0.75, 0.83], "no difference shown"),
        ([0.70, 0.72, 0.74], "no difference shown"),  # No scatter at all.
    ],
)
def test_a_loss_and_a_draw_are_said(dice, verdict):
    scores = {"DP-SGD": [0.70, 0.72, 0.74], "DiceSGD": dice}
    summary = comparison_report.summarise(1.0, scores, scores)
    table = comparison_report.format_table([summary], "accuracy")
    assert summary.verdict == verdict and verdict in table
    assert "(no interval), 3 draws" in table  # The median may lie outside all of three draws.


def test_a_run_and_its_restart(tmp_path, capsys):
    values = parse(*QUICK, f"--output_dir={tmp_path}")
    (first,) = compare.run_task("heavy_tails", values)
    printed = capsys.readouterr().out
    folder = tmp_path / "heavy_tails"
    for name, count in (("search", 4), ("final", 4)):
        rows = [*csv.DictReader((folder / f"{name}.csv").open(encoding="utf-8"))]
        assert len(rows) == count
        assert all(2.9 < float(row["epsilon"]) <= 3 for row in rows)
    assert "expected_batch_size=83" in printed and "0 left" in printed
    assert (folder / "comparison.png").read_bytes()[:4] == b"\x89PNG"
    # A kill in the middle of the last row: that trial alone is run again, with the same result.
    path = folder / "final.csv"
    path.write_bytes(path.read_bytes()[:-20])
    (again,) = compare.run_task("heavy_tails", values)
    assert capsys.readouterr().out.count("] final") == 1
    np.testing.assert_allclose(again.scores["DiceSGD"], first.scores["DiceSGD"], rtol=1e-4)
    with pytest.raises(app.UsageError, match="trials was 1 and is 3"):
        compare.run_task("heavy_tails", parse(*QUICK, "--trials=3", f"--output_dir={tmp_path}"))


def test_a_folder_of_unknown_trials_is_refused(tmp_path):
    (tmp_path / "search.csv").write_text("method\n", encoding="utf-8")
    with pytest.raises(app.UsageError, match="no settings.json"):
        trial_log.claim_folder(tmp_path, {})
    with pytest.raises(app.UsageError, match="does not start with"):
        trial_log.read(tmp_path / "search.csv", compare.Trial, compare.Result)


def test_heavy_tails_have_the_mean_that_they_say(task):
    x, y = comparison_tasks.heavy_tails().train
    weights = np.linalg.lstsq(x.astype("float64"), y[:, 0].astype("float64"), rcond=None)[0]
    test_x, test_y = task.test
    # The least squares fit to noisy targets finds the noise-free ones, intercept included.
    assert np.mean((test_x @ weights - test_y[:, 0]) ** 2) < 0.02 * np.var(test_y)
    noise = y[:, 0] - x @ weights
    assert np.median(noise) < -0.2 * noise.std() and noise.max() > 8 * noise.std()


def test_scattering_against_convolutions_pixel_by_pixel():
    images = np.random.default_rng(0).random((2, 12, 12))
    low_pass, wavelets = scattering.filters(24, 24)
    kernel = lambda response: np.fft.ifft2(response)

    def convolved(image, response):
        filtered = np.zeros((24, 24), complex)
        for (row, column), value in np.ndenumerate(kernel(response)):
            filtered += value * np.roll(image, (row, column), (0, 1))
        return filtered

    found = scattering.features(images)
    assert found.shape == (2, 81, 3, 3)
    padded = np.pad(images[1], ((8, 4), (8, 4)), mode="reflect")
    first = np.abs(convolved(padded, wavelets[0][3]))
    second = np.abs(convolved(first, wavelets[1][5]))
    # Order 0; fine angle 3 follows 3 others with 8 of order 2 each; its coarse angle 5.
    for channel, image in ((0, padded), (1 + 3 * 9, first), (1 + 3 * 9 + 1 + 5, second)):
        expected = convolved(image, low_pass).real[8:-4:4, 8:-4:4]
        np.testing.assert_allclose(found[1, channel], expected, atol=1e-6)


def test_wavelets_lose_little_and_amplify_nothing():
    low_pass, wavelets = scattering.filters(40, 40)
    flipped = lambda wavelet: np.roll(wavelet[::-1, ::-1], 1, (0, 1))
    energy = low_pass**2 + sum(
        (wavelet**2 + flipped(wavelet) ** 2) / 2 for of_scale in wavelets for wavelet in of_scale
    )
    assert 0.1 < energy.min() and energy.max() < 1 + 1e-6
    np.testing.assert_allclose([w[0, 0] for scale in wavelets for w in scale], 0, atol=1e-7)


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__]))
