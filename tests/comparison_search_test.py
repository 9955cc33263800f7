# Copyright 2026 The dice_tf Authors.
# SPDX-License-Identifier: Apache-2.0
"""Searches give both methods the same draws, and end with no best draw at an edge."""

import math
import pathlib
import sys
from types import SimpleNamespace

import numpy as np
import pytest

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1] / "examples"))

import comparison_search
from comparison_search import METHODS, Setting

TASK = SimpleNamespace(
    x=np.zeros((5000, 1)), held_out=1000, batch_sizes=(250, 500), clips=(0.1, 1.0),
    step_lengths=(1.0, 10.0),
)  # fmt: skip


def peaked(best, noise=0.0):
    """Returns a score that is largest at the given values, with luck that depends on the seed."""

    def score(trial):
        distance = sum(math.log(getattr(trial, name) / value) ** 2 for name, value in best.items())
        luck = np.random.default_rng([trial.seed, round(1e6 * trial.clip)]).normal()
        return -distance + noise * luck

    return score


def searched(score, batch=0, epsilon=2.0, draws=24, repetition=0):
    setting, seen = Setting(epsilon, 5, batch), []

    def evaluate(trials):
        seen.append(list(trials))
        return [score(trial) for trial in trials]

    searches = {setting: comparison_search.search(setting, TASK, draws, (1, 3, 7), repetition)}
    return comparison_search.run_searches(searches, evaluate)[setting], seen


@pytest.mark.parametrize("clip", [0.01, 0.3, 5.0])
@pytest.mark.parametrize("step_length", [0.2, 3.0, 60.0])
def test_ranges_extend_until_the_best_draw_is_inside(clip, step_length):
    choice, _ = searched(peaked({"clip": clip, "step_length": step_length}))
    assert choice.at_edge == ()
    for (low, high), best in ((choice.clips, clip), (choice.step_lengths, step_length)):
        # A best draw is this far from either end, and about as near to the best there is.
        assert 0.75 * low < best < high / 0.75
    for trial in choice.trials.values():
        assert abs(math.log(trial.clip / clip)) < math.log(2.5)
        assert abs(math.log(trial.step_length / step_length)) < math.log(2.5)


def test_an_edge_that_stays_is_said():
    choice, _ = searched(lambda trial: trial.clip)
    assert choice.at_edge == ("clip high",)


def test_ranges_that_hold_the_best_do_not_grow():
    choice, seen = searched(peaked({"clip": 0.3, "step_length": 3.0}))
    assert (choice.clips, choice.step_lengths) == (TASK.clips, TASK.step_lengths)
    # First draws, those near the best, and the finalists with two more seeds.
    assert [len(wave) for wave in seen] == [48, 24, 16]


def test_both_methods_have_the_same_draws_and_as_many():
    choice, seen = searched(peaked({"clip": 9.0, "step_length": 3.0}))
    same = lambda trial: trial._replace(method="", feedback_steps=0, share=0.0)
    first = {m: [same(t) for t in seen[0] if t.method == m] for m in METHODS}
    assert first["DP-SGD"] == first["DiceSGD"] and len(set(first["DP-SGD"])) == 24
    counts = [sum(t.method == m for wave in seen[:-1] for t in wave) for m in METHODS]
    assert counts == [choice.draws] * 2 and choice.draws > 24 + 12


def test_what_is_drawn_for_error_feedback():
    _, (first, *_) = searched(peaked({"clip": 0.3, "step_length": 3.0}), draws=300)
    dice = [t for t in first if t.method == "DiceSGD"]
    # 8 groups of 500 fill 4,000 examples, and hold no more.
    assert {(t.batch_size, t.feedback_steps) for t in dice} == {
        (batch, s) for batch in (250, 500) for s in (1, 3, 7)
    }
    assert {(t.feedback_steps, t.share) for t in dice} == {
        (s, share) for s in (1, 3, 7) for share in (1 / (s + 1), 0.3, 0.5)
    }
    assert {(t.feedback_steps, t.share) for t in first if t not in dice} == {(0, 1.0)}
    with_600 = searched(peaked({"clip": 0.3, "step_length": 3.0}), batch=600)[1]
    assert {t.batch_size for wave in with_600 for t in wave} == {600}
    assert {t.feedback_steps for t in with_600[0] if t.method == "DiceSGD"} == {1, 3}


def test_further_seeds_decide():
    score = peaked({"clip": 0.3, "step_length": 3.0}, noise=3.0)
    choice, seen = searched(score)
    finalists = {t._replace(seed=0) for t in seen[-1]}
    assert len(finalists) == 8 and {t.seed for t in seen[-1]} == {1, 2}
    for method, chosen in choice.trials.items():
        means = {
            trial: np.mean([score(trial._replace(seed=seed)) for seed in (0, 1, 2)])
            for trial in finalists
            if trial.method == method
        }
        assert means[chosen] == max(means.values()) == choice.scores[method]


def test_of_several_batch_sizes_each_method_gets_its_best():
    best = {"DP-SGD": 500, "DiceSGD": 250}
    score = lambda t: -abs(math.log(t.batch_size / best[t.method])) - 1e-3 * abs(math.log(t.clip))
    choices = [searched(score, batch=batch)[0] for batch in (125, 250, 500)]
    combined = comparison_search.of_all_batches(choices)
    for choice, method in ((choices[2], "DP-SGD"), (choices[1], "DiceSGD")):
        assert combined.trials[method] == choice.trials[method]
        assert combined.scores[method] == choice.scores[method]
    # 250 has sizes on both sides, 500 has not.
    assert [edge for edge in combined.at_edge if "batch" in edge] == ["batch of DP-SGD high"]
    assert combined.draws == sum(choice.draws for choice in choices)
    assert combined.clips == (
        min(choice.clips[0] for choice in choices), max(choice.clips[1] for choice in choices)
    )  # fmt: skip


def test_a_repetition_has_other_draws_and_seeds():
    score = peaked({"clip": 0.3, "step_length": 3.0})
    runs = [searched(score, repetition=number)[1] for number in (0, 1, 1)]
    first, second = ([t for wave in seen for t in wave] for seen in runs[:2])
    assert runs[1] == runs[2]
    for name in ("seed", "clip", "step_length"):
        assert not {getattr(t, name) for t in first} & {getattr(t, name) for t in second}
    assert {t.seed for t in second} == {1000, 1001, 1002}


def test_a_step_is_as_long_with_momentum():
    trial = searched(peaked({"clip": 0.3, "step_length": 3.0}))[0].trials["DP-SGD"]
    for momentum in (0.0, 0.9):
        rate = trial._replace(momentum=momentum).learning_rate
        assert rate / (1 - momentum) * trial.clip == pytest.approx(trial.step_length)


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__]))
