# Copyright 2026 The dice_tf Authors.
# SPDX-License-Identifier: Apache-2.0
"""The audit script on few canaries and runs: what holds, what breaks, what is drawn."""

import functools
import pathlib
import sys

from absl import flags
import numpy as np
import pytest

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1] / "examples"))

import audit_privacy

from dice_tf import accounting
from dice_tf.mechanism import noise

audit_fit, audit_letter = audit_privacy.audit_fit, audit_privacy.audit_letter


@functools.cache
def audited_fit(method):
    return audit_fit(method, 8.0, num_canaries=600, num_guesses=60, seed=1)


@functools.cache
def audited_letter():
    return audit_letter(2.0, num_runs=120, seed=2)


@pytest.mark.parametrize("method", audit_privacy.ERROR_NORM_CLIP)
def test_what_dice_tf_claims_for_one_run_of_fit_stands(method):
    finding = audited_fit(method)
    assert finding.claimed == pytest.approx(8.0, rel=1e-2)
    # The attack sees something, so that not finding more means something.
    assert 0.3 < finding.lower_bound < finding.claimed
    assert not finding.refuted


@pytest.mark.parametrize("method", audit_privacy.ERROR_NORM_CLIP)
def test_noise_that_is_too_small_is_caught(method, monkeypatch):
    right = noise.gaussian_noise
    monkeypatch.setattr(
        noise,
        "gaussian_noise",
        lambda key, step, shapes, stddev: right(key, step, shapes, stddev / 10),
    )
    finding = audit_fit(method, 1.0, num_canaries=600, num_guesses=60, seed=3)
    assert finding.claimed == pytest.approx(1.0, rel=1e-2)
    assert finding.refuted


def test_alg_1_to_the_letter_breaks_the_paper_and_not_dice_tf():
    paper, ours = audited_letter()
    assert paper.claimed == 2.0 and paper.lower_bound == ours.lower_bound
    assert paper.lower_bound > 1.2 * paper.claimed
    assert ours.claimed > 10 * ours.lower_bound
    assert paper.refuted and not ours.refuted


def test_the_paper_itself_would_claim_that_epsilon():
    mechanism = audit_privacy.letter_model(2.0).optimizer.mechanism
    assert not mechanism.bound_residuals
    claimed = accounting.paper_epsilon(
        mechanism.noise_stddev,
        audit_privacy.DELTA,
        audit_privacy.NUM_EXAMPLES,
        audit_privacy.STEPS,
        l2_norm_clip=mechanism.l2_norm_clip,
        feedback_clip=mechanism.error_norm_clip * audit_privacy.BATCH_SIZE,
    )
    assert claimed == pytest.approx(2.0, rel=1e-9)
    # The theorem's condition C1 <= C2.
    assert mechanism.l2_norm_clip <= mechanism.error_norm_clip


def test_runs_to_the_letter_follow_the_exact_calculation():
    model = audit_privacy.letter_model(2.0, noise_seed=4)
    train = audit_privacy.letter_run(model, seed=5)
    runs, steps = 150, audit_privacy.STEPS
    with_it, without = np.array([(train(True), train(False)) for _ in range(runs)]).T
    noise_stddev = model.optimizer.mechanism.noise_stddev * np.sqrt(steps)
    # Without the example, the weight is the sum of the noise.
    assert abs(without.mean()) < 4 * noise_stddev / np.sqrt(runs)
    assert without.std() == pytest.approx(noise_stddev, rel=0.25)
    # With it, C2 for every step after the first draw, and C1 / B for every draw.
    probability = audit_privacy.BATCH_SIZE / audit_privacy.NUM_EXAMPLES
    drawn = 1 - (1 - probability) ** np.arange(steps)
    shift = drawn.sum() + probability * steps / audit_privacy.BATCH_SIZE
    error = np.sqrt(noise_stddev**2 + (0.4 * steps) ** 2) / np.sqrt(runs)
    assert abs(with_it.mean() - shift) < 4 * error < 0.4 * shift


def test_bound_of_infinitely_many_runs_is_above_the_claim_and_the_measurement():
    assert audit_privacy.exact_letter_bound(2.0) > audited_letter()[0].lower_bound > 2.0


def test_script_prints_a_table_and_draws_a_plot(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(audit_privacy, "audit_fit", lambda method, *_: audited_fit(method))
    monkeypatch.setattr(audit_privacy, "audit_letter", lambda *_, **__: audited_letter())
    values = flags.FlagValues()
    audit_privacy.define_flags(values)
    values(["audit", "--epsilons=8", "--paper_epsilons=2", f"--output_dir={tmp_path / 'new'}"])
    findings = audit_privacy.run(values)
    assert [f.method for f in findings] == ["DP-SGD", "DiceSGD"] + 2 * ["Alg. 1 to the letter"]
    lines = [line for line in capsys.readouterr().out.splitlines() if "REFUTED" in line]
    assert len(lines) == 1 and "the paper" in lines[0] and " 2.00 " in lines[0]
    png = (tmp_path / "new" / "audit_privacy.png").read_bytes()
    assert png.startswith(b"\x89PNG") and len(png) > 10_000


def test_defaults_of_the_flags():
    values = flags.FlagValues()
    audit_privacy.define_flags(values)
    values(["audit"])
    assert values.seed is None and values.num_canaries % 20 == 0


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__]))
