# Copyright 2026 The dice_tf Authors.
# SPDX-License-Identifier: Apache-2.0
"""The convergence example: its problems, its training, and where methods level off."""

import pathlib
import re
import sys

from absl import flags
import numpy as np
import pytest
from scipy import optimize

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1] / "examples"))

import convergence

PROBLEMS = {problem.name: problem for problem in convergence.problems()}


@pytest.fixture(params=list(PROBLEMS))
def problem(request):
    return PROBLEMS[request.param]


def test_gradient_is_that_of_the_loss_and_vanishes_at_the_optimum(problem):
    rng = np.random.default_rng(1)
    weights, step = rng.normal(size=(2, convergence.DIMENSION))
    slope = (problem.loss(weights + 1e-5 * step) - problem.loss(weights - 1e-5 * step)) / 2e-5
    assert problem.gradient(weights) @ step == pytest.approx(slope, rel=1e-6)
    assert np.linalg.norm(problem.gradient(problem.optimum)) < 1e-9
    found = optimize.minimize(problem.loss, weights)
    assert problem.loss(problem.optimum) <= found.fun + 1e-9
    assert problem.loss_gap == pytest.approx(problem.loss(np.zeros(10)) - found.fun, abs=1e-6)


def test_no_pair_of_points_is_curved_more_than_the_smoothness(problem):
    rng = np.random.default_rng(2)
    ratios = []
    for scale in (1e-3, 1.0, 10.0):
        # Around 0, where the logistic loss is curved most, and along the steepest direction.
        direction = np.linalg.eigh(problem.inputs.T @ problem.inputs)[1][:, -1]
        for step in (scale * direction, *rng.normal(0, scale, (20, convergence.DIMENSION))):
            moved = problem.gradient(step / 2) - problem.gradient(-step / 2)
            ratios.append(np.linalg.norm(moved) / np.linalg.norm(step))
    assert max(ratios) <= problem.smoothness * (1 + 1e-9)
    assert max(ratios) == pytest.approx(problem.smoothness, rel=1e-3)


def transcription(problem, method, rows, noise, step_size):
    """Float64 loop: the mean squared norm of the gradient over plain SGD from 0."""
    c1, c2 = problem.l2_norm_clip, problem.error_norm_clip
    clip = lambda v, c: v * min(1, c / max(np.linalg.norm(v), 1e-300))
    weights, error, squares = np.zeros(10), np.zeros(10), []
    for batch, added in zip(rows, noise.astype("float64")):
        squares.append((problem.gradient(weights) ** 2).sum())
        targets = None if problem.targets is None else problem.targets[batch]
        gradients = problem.gradients(weights, problem.inputs[batch], targets)
        heads = np.array([clip(g, c1) for g in gradients])
        if method == "SGD":
            direction = gradients.mean(0)
        elif method == "DP-SGD":
            direction = heads.mean(0)
        elif method == "DiceSGD, as in the paper":
            direction = heads.mean(0) + clip(error, c2)
            error = error + gradients.mean(0) - direction
        else:
            direction = heads.mean(0) + error
            error = np.mean([clip(g - h, c2) for g, h in zip(gradients, heads)], 0)
        weights = weights - step_size * (direction + added)
    return np.mean(squares)


@pytest.mark.parametrize("method", convergence.METHODS)
def test_training_follows_a_float64_transcription(problem, method):
    rows, noise = convergence.draws(60, seed=5)
    noise *= problem.noise_stddev
    train = convergence.make_trainer(problem, convergence.mechanism_of(method, problem))
    found = float(train(rows, noise, 0.3, 60))
    assert found == pytest.approx(transcription(problem, method, rows, noise, 0.3), rel=2e-4)


def test_levels_are_where_clipped_gradients_add_up_to_zero(problem):
    level = convergence.levels(problem)
    for method, threshold in (
        ("DP-SGD", problem.l2_norm_clip),
        ("DiceSGD, bounded residuals", problem.l2_norm_clip + problem.error_norm_clip),
    ):

        def clipped_mean(weights, threshold=threshold):
            gradients = problem.gradients(weights, problem.inputs, problem.targets)
            norms = np.linalg.norm(gradients, axis=1)
            return np.mean([g * min(1, threshold / n) for g, n in zip(gradients, norms)], 0)

        # From another start, and finished by a solver.
        weights = np.random.default_rng(3).normal(size=convergence.DIMENSION)
        for _ in range(1500):
            weights = weights - clipped_mean(weights) / problem.smoothness
        root = optimize.root(clipped_mean, weights, tol=1e-12)
        assert np.linalg.norm(root.fun) < 1e-8
        expected = (problem.gradient(root.x) ** 2).sum()
        assert level[method] == pytest.approx(expected, rel=1e-3)
    assert level["DP-SGD"] > 1.2 * level["DiceSGD, bounded residuals"] > 0.01


def test_a_table_of_what_the_theorem_says(tmp_path, capsys):
    values = flags.FlagValues()
    convergence.define_flags(values)
    values(["convergence", "--steps=3000", "--seeds=1", f"--output_dir={tmp_path}"])
    results = convergence.run(values)
    printed = capsys.readouterr().out
    assert re.findall(r"^ +(\d+) ", printed, re.MULTILINE)[:6] == [
        "10", "31", "98", "306", "959", "3000"]  # fmt: skip
    for name, found in results.items():
        problem, level = PROBLEMS[name], convergence.levels(PROBLEMS[name])
        bound = convergence.theorem(problem, 3000)[1]
        assert found["SGD"][-1] < found["DiceSGD, as in the paper"][-1] * 1.1
        assert found["DiceSGD, as in the paper"][-1] < bound
        if name == "quadratic":
            assert found["DiceSGD, bounded residuals"][-1] < found["DP-SGD"][-1]
            # It has levelled off, above the bound that only the paper's form must keep.
            assert found["DP-SGD"][-1] == pytest.approx(level["DP-SGD"], rel=0.05)
            assert found["DiceSGD, bounded residuals"][-1] > bound
    assert (tmp_path / "convergence.png").read_bytes().startswith(b"\x89PNG")


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__]))
