# Copyright 2026 The dice_tf Authors.
# SPDX-License-Identifier: Apache-2.0
"""DP-SGD against DiceSGD: equal epsilon, intervals, restarts, features."""

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
import comparison_runs
import comparison_search
import comparison_tasks
from dp_accounting_oracle import TOLERANCE, composed_epsilon
import scattering
import trial_log

import dice_tf
from dice_tf import accounting

QUICK = ("--tasks=heavy_tails", "--quick", "--epsilons=3", "--epochs=2", "--draws=2",
         "--repetition=2", "--test_seeds=3", "--stacked_seeds=1")  # fmt: skip
SETTING = comparison_search.Setting(3.0, 4, 0)


@pytest.fixture(scope="module", name="task")
def small_task():
    return comparison_tasks.heavy_tails(comparison_tasks.Options(quick=True))


def parse(*arguments):
    values = flags.FlagValues()
    compare.define_flags(values)
    values(["compare", *arguments])
    return values


def first_draws(task, draws):
    return next(comparison_search.search(SETTING, task, draws, (1, 3, 7)))


def test_every_trial_has_the_same_proven_epsilon(task, tmp_path):
    runs = comparison_runs.Runs(tmp_path, task)
    size = len(task.x)
    tested = set()
    for trial in first_draws(task, 6):
        sampling, noise = runs.sampling(trial, size), runs.noise_multiplier(trial, size)
        s, ratio = trial.feedback_steps, (1 - trial.share) / trial.share
        kind = type(sampling), trial.batch_size, s, round(trial.share, 6)
        if kind in tested:
            continue
        tested.add(kind)
        plan = dice_tf.PrivacyPlan(
            sampling=sampling,
            epochs=trial.epochs,
            noise_multiplier=noise,
            delta=task.delta,
            feedback_steps=s,
            error_norm_clip_ratio=ratio,
        )
        assert 2.99 < plan.epsilon() <= 3.0
        assert sampling.num_groups == s + 1 and (ratio == 0) == (trial.method == "DP-SGD")
        # Over one round an example moves s + 1 directions: its head, and 1/s of its residual s
        # times. By dp_accounting alone, Poisson sampling with this noise has no smaller epsilon:
        # the other sampler was chosen because it needs less.
        influence = math.hypot(1, ratio / math.sqrt(max(s, 1)))
        steps = plan.steps
        probability = (s + 1) * trial.batch_size / size
        oracle = composed_epsilon(
            probability, noise / influence, math.ceil(steps / (s + 1)), task.delta, "pld"
        )
        if isinstance(sampling, dice_tf.RandomAllocation):
            assert oracle > 0.999 * plan.epsilon()
        else:
            assert oracle == pytest.approx(plan.epsilon(), rel=TOLERANCE["pld"])
    assert len(tested) > 4


def test_the_sampler_is_the_one_that_needs_less_noise(task, tmp_path):
    runs = comparison_runs.Runs(tmp_path, task)
    for trial in first_draws(task, 1):
        chosen = runs.sampling(trial, len(task.x))
        groups = trial.feedback_steps + 1
        arguments = len(task.x), trial.batch_size, groups
        kinds = [dice_tf.RandomAllocation(*arguments)]
        cyclic = dice_tf.CyclicPoissonSampling(*arguments)
        kinds.append(cyclic if groups > 1 else dice_tf.PoissonSampling(*arguments[:2]))
        noises = {
            type(kind): accounting.calibrate_noise_multiplier(
                3.0, task.delta, kind, kind.steps(4), error_norm_clip=0.0, accountant="pld"
            )
            for kind in kinds
        }
        least = min(noises, key=noises.get)
        assert type(chosen) is least
        ratio = (1 - trial.share) / trial.share
        influence = math.hypot(1, ratio / math.sqrt(max(1, trial.feedback_steps)))
        noise = runs.noise_multiplier(trial, len(task.x))
        assert noise / influence == pytest.approx(noises[least], rel=1e-3)


def test_both_trainers_give_the_same_test_scores(task, tmp_path):
    runs = comparison_runs.Runs(tmp_path, task, threads=2)
    # At this epsilon there is next to no noise, which the two draw differently.
    drawn = dict(batch=0, seed=0, batch_size=83, clip=8.0, step_length=1.0, momentum=0.9)
    for s, share in ((0, 1.0), (3, 0.3)):
        trial = comparison_search.Trial(
            "", 1e4, 2, feedback_steps=s, share=share, averaged_part=0.2, **drawn
        )
        runs.train_stacked_tests([trial])
        stacked, package = (runs.test_scores(trial, by_package) for by_package in (False, True))
        assert package.mean() > 0.2
        assert np.corrcoef(stacked, package)[0, 1] > 0.995
        assert np.abs(stacked - package).mean() < 0.02


def test_tests_trained_side_by_side_are_those_trained_alone(task, tmp_path):
    drawn = dict(epochs=2, batch=0, seed=5, batch_size=83, step_length=1.0, momentum=0.0)
    trials = [
        comparison_search.Trial(
            "", epsilon, feedback_steps=3, share=0.3, clip=clip, averaged_part=0.0, **drawn
        )
        for epsilon, clip in ((3.0, 8.0), (8.0, 16.0))
    ]
    scores = []
    for name, parts in (("together", [trials]), ("alone", [[trial] for trial in trials])):
        (tmp_path / name).mkdir()
        runs = comparison_runs.Runs(tmp_path / name, task)
        for part in parts:
            runs.train_stacked_tests(part)
        scores.append([runs.test_scores(trial, False) for trial in trials])
    np.testing.assert_allclose(*scores, rtol=1e-4, atol=1e-4)
    assert np.abs(scores[0][0] - scores[0][1]).mean() > 0.02


def share_within(quantile, freedom):
    """Probability that |t| is below a quantile, by summing up Student's density."""
    density = lambda t: (1 + t**2 / freedom) ** (-(freedom + 1) / 2)
    centres = (np.arange(4_000_000) + 0.5) * 1e-3
    return density(centres)[: round(quantile * 1e3)].sum() / density(centres).sum()


def summary_of(plain, dice):
    """Summarises scores of examples `[seeds, examples]`."""
    trial = comparison_search.Trial("DP-SGD", *SETTING, 0, 100, 0, 1.0, 0.2, 30.0, 0.0, 0.0)
    trials = {"DP-SGD": trial, "DiceSGD": trial._replace(feedback_steps=3, share=0.5)}
    result = comparison_runs.Result(0.2, 0.0, 2.0, "PoissonSampling", 600, 3.0, 0.8, 1.0)
    choice = comparison_search.Choice(trials, {}, (0.1, 1), (1, 9), (), 24)
    # At C1 + C2 = 1 the noise on the sum is 2 and 0.5 * 3.
    results = {"DP-SGD": result, "DiceSGD": result._replace(noise_multiplier=3.0)}
    scores = {"DP-SGD": np.asarray(plain), "DiceSGD": np.asarray(dice)}
    return comparison_report.summarise(SETTING, choice, scores, results)


def test_intervals_by_hand():
    random = np.random.default_rng(0)
    plain = (random.random((4, 500)) < 0.7).astype(np.float32)
    dice = np.maximum(plain, random.random((4, 500)) < [[0.1], [0.2], [0.3], [0.2]])
    summary = summary_of(plain, dice)
    differences = [dice[i].mean() - plain[i].mean() for i in range(4)]
    mean = sum(differences) / 4
    assert summary.difference == pytest.approx(mean, abs=1e-6)
    error = math.sqrt(sum((d - mean) ** 2 for d in differences) / 3 / 4)
    np.testing.assert_allclose(share_within(summary.over_seeds / error, 3), 0.95, atol=2e-4)
    # Over examples: draw the 500 again and again, and see how the difference scatters.
    of_examples = (dice.astype(float) - plain).mean(0)
    again = [random.choice(of_examples, 500).mean() for _ in range(4000)]
    assert summary.over_examples == pytest.approx(1.96 * np.std(again), rel=0.05)
    assert summary.noise_ratio == pytest.approx(1.5 / 2)
    table = comparison_report.format_table([summary], "accuracy")
    row = f"{100 * mean:+.2f} ± {100 * summary.over_seeds:.2f} ± {100 * summary.over_examples:.2f}"
    assert f"| 4, 3, free | {100 * plain.mean():.2f} ± " in table and row in table
    assert "| s 3, C1 0.50 G, B 100, T 600, G 0.2, u 30 |" in table


def test_a_win_a_loss_and_a_draw_are_said():
    random = np.random.default_rng(0)
    plain = (random.random((4, 2000)) < 0.7).astype(np.float32)
    better = np.maximum(plain, random.random((4, 2000)) < 0.2)
    # Of two seeds one is much better and one much worse.
    mixed = np.stack([better[0], plain[1], np.minimum(plain[2], 1 - better[3]), better[3]])
    assert summary_of(plain, better).verdict == "DiceSGD ahead"
    assert summary_of(better, plain).verdict == "DP-SGD ahead"
    assert summary_of(plain, mixed).verdict == "no difference shown"
    assert summary_of(plain, plain).verdict == "no difference shown"  # No scatter at all.
    # Few examples may all be luck, however alike the seeds are.
    few = np.tile([[1.0] * 9 + [0.0]], (3, 1))
    some = few.copy()
    some[:, 0], some[:, 9], some[0, 8] = 0.0, 1.0, 1.0
    one_less = some.copy()
    one_less[:, 1] = 0.0
    assert summary_of(few, one_less).verdict == "no difference shown"


def test_a_run_and_its_restart(tmp_path, capsys):
    values = parse(*QUICK, f"--output_dir={tmp_path}")
    (first,) = compare.run_task("heavy_tails", values)
    printed = capsys.readouterr().out
    folder = tmp_path / "heavy_tails"
    rows = [*csv.DictReader((folder / "test_package.csv").open(encoding="utf-8"))]
    assert len(rows) == 4 and {row["seed"] for row in rows} == {"2101", "2102"}
    assert all(2.99 < float(row["epsilon"]) <= 3 for row in rows)
    searched = [*csv.DictReader((folder / "search.csv").open(encoding="utf-8"))]
    assert len(searched) >= 2 * (2 + 1) + 2 * 2 * 3
    assert {row["seed"] for row in searched} == {"2000", "2001", "2002"}
    assert "neighbouring_relation=add_or_remove_one" in printed and "0 left" in printed
    assert (folder / "comparison.png").read_bytes()[:4] == b"\x89PNG"
    assert "| 2, 3, free |" in (folder / "comparison.md").read_text(encoding="utf-8")
    # A kill in the middle of the last row: that trial alone is run again, with the same result.
    path = folder / "test_package.csv"
    path.write_bytes(path.read_bytes()[:-20])
    (again,) = compare.run_task("heavy_tails", values)
    printed = capsys.readouterr().out
    assert "stacks of this wave" not in printed
    assert len((folder / "test_package.csv").read_text(encoding="utf-8").splitlines()) == 5
    np.testing.assert_allclose(again.scores["DiceSGD"], first.scores["DiceSGD"], rtol=1e-4)
    with pytest.raises(app.UsageError, match="draws was 2 and is 3"):
        compare.run_task("heavy_tails", parse(*QUICK, "--draws=3", f"--output_dir={tmp_path}"))
    with pytest.raises(app.UsageError, match="repetition was 2 and is 0"):
        compare.run_task("heavy_tails", parse(*QUICK, "--repetition=0", f"--output_dir={tmp_path}"))


def test_several_batch_sizes_are_compared_one_by_one_and_at_their_best(tmp_path, capsys):
    flags = (*QUICK, "--batches=83,166", f"--output_dir={tmp_path}")
    *fixed, free = compare.run_task("heavy_tails", parse(*flags))
    assert [summary.setting.batch for summary in (*fixed, free)] == [83, 166, 0]
    for method in ("DP-SGD", "DiceSGD"):
        best = max(fixed, key=lambda summary: summary.choice.scores[method])
        assert free.choice.trials[method] == best.choice.trials[method]
        # The runs of a row by itself, not made again.
        assert free.scores[method] == best.scores[method]
    assert "batch=0): held-out" in capsys.readouterr().out
    table = (tmp_path / "heavy_tails" / "comparison.md").read_text(encoding="utf-8")
    assert [row.split(" |")[0] for row in table.splitlines()[2:]] == [
        "| 2, 3, 83", "| 2, 3, 166", "| 2, 3, free"
    ]  # fmt: skip


def test_a_folder_of_unknown_trials_is_refused(tmp_path):
    (tmp_path / "search.csv").write_text("method\n", encoding="utf-8")
    with pytest.raises(app.UsageError, match="no settings.json"):
        trial_log.claim_folder(tmp_path, {})
    with pytest.raises(app.UsageError, match="does not start with"):
        trial_log.read(tmp_path / "search.csv", comparison_search.Trial, comparison_runs.Result)


def test_heavy_tails_have_the_mean_that_they_say():
    task = comparison_tasks.heavy_tails(comparison_tasks.Options())
    x, y = task.train_data(for_search=True)
    weights = np.linalg.lstsq(x.astype("float64"), y.astype("float64"), rcond=None)[0]
    test_x, test_y = task.test
    # The least squares fit to noisy targets finds the noise-free ones, intercept included.
    found = task.example_scores((test_x @ weights)[:, np.newaxis, np.newaxis], test_y)
    assert found.mean() > 0.97
    assert found.mean() == pytest.approx(
        1 - np.mean((test_x @ weights - test_y) ** 2) / np.var(test_y)
    )
    noise = y - x @ weights
    assert np.median(noise) < -0.2 * noise.std() and noise.max() > 8 * noise.std()


def test_mean_accuracy_of_classes_by_hand():
    targets = np.array([0, 0, 0, 1])
    outputs = np.array([[1, 0], [1, 0], [0, 1], [0, 1]], np.float32)[:, np.newaxis]
    scores = comparison_tasks._correct_by_class(outputs, targets)
    assert scores.mean() == pytest.approx((2 / 3 + 1) / 2)
    assert comparison_tasks._correct(outputs, targets).mean() == pytest.approx(3 / 4)


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
