# Copyright 2026 The dice_tf Authors.
# SPDX-License-Identifier: Apache-2.0
"""The example of constant clipping bias: where each method stops, by NumPy and by Keras."""

import pathlib
import sys

from absl import app, flags
import numpy as np
import pytest

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1] / "examples"))

import clipping_bias


def simulate(outlier, clip, error_clip, bounded, learning_rate, steps, start):
    """Float64 transcription of both forms on G samples at 1 and one at -G."""
    samples = np.array([1.0] * outlier + [-float(outlier)])
    weight, error, trajectory = start, 0.0, [start]
    for _ in range(steps):
        # The derivative of the Huber loss of weight - sample.
        gradients = np.clip(weight - samples, -outlier, outlier)
        heads = np.clip(gradients, -clip, clip)
        if bounded:
            direction = heads.mean() + error
            error = np.clip(gradients - heads, -error_clip, error_clip).mean()
        else:
            direction = heads.mean() + np.clip(error, -error_clip, error_clip)
            error = error + gradients.mean() - direction
        weight -= learning_rate * direction
        trajectory.append(weight)
    return np.array(trajectory)


def limit(*method, start=2.0):
    return simulate(*method, learning_rate=0.1, steps=1_000, start=start)[-1]


@pytest.mark.parametrize("outlier", [3, 30])
@pytest.mark.parametrize("clip", [0.3, 2.0])
@pytest.mark.parametrize("start", [-1.0, 3.0])
def test_clipped_sgd_stops_at_a_constant_bias(outlier, clip, start):
    cut_off = outlier - clip
    assert limit(outlier, clip, 0.0, True, start=start) == pytest.approx(
        cut_off / (cut_off + clip), abs=1e-9
    )
    assert clipping_bias.clipped_limit(clip, outlier) == pytest.approx(
        cut_off / (cut_off + clip), abs=1e-12
    )


@pytest.mark.parametrize("outlier", [3, 30])
@pytest.mark.parametrize("clip", [0.3, 2.0])
@pytest.mark.parametrize("share", [0.25, 0.9, 1.0, 1.5])
def test_bounded_form_reaches_the_optimum_if_and_only_if_nothing_is_cut_off(outlier, clip, share):
    error_clip = share * (outlier - clip)
    reached = limit(outlier, clip, error_clip, True)
    expected = 0.0 if share >= 1 else 1 - (clip + error_clip) / outlier
    assert reached == pytest.approx(expected, abs=1e-9)


@pytest.mark.parametrize("outlier", [3, 30])
@pytest.mark.parametrize("clip", [0.3, 2.0])
def test_form_to_the_letter_reaches_the_optimum_with_equal_thresholds(outlier, clip):
    assert limit(outlier, clip, clip, False) == pytest.approx(0.0, abs=1e-9)


def test_form_to_the_letter_needs_a_large_enough_error_threshold():
    assert limit(9, 0.3, 0.15, False) == pytest.approx(0.8, abs=1e-9)


@pytest.mark.parametrize("method", clipping_bias.methods(9, 3.0), ids=lambda m: m.label)
def test_keras_training_follows_numpy_to_the_predicted_limit(method):
    trajectory = clipping_bias.train(method, 9, learning_rate=0.3, steps=60)
    clip = 9.0 if method.l2_norm_clip is None else method.l2_norm_clip
    expected = simulate(
        9, clip, method.error_norm_clip, method.bound_residuals, 0.3, 60, clipping_bias.START
    )
    np.testing.assert_allclose(trajectory, expected, rtol=0, atol=2e-5)
    assert trajectory[-1] == pytest.approx(method.limit, abs=1e-3)


def test_methods_cover_every_behaviour():
    limits = [method.limit for method in clipping_bias.methods(9, 3.0)]
    np.testing.assert_allclose(limits, [0, 2 / 3, 1 / 3, 0, 0], atol=1e-12)


def parse(*arguments):
    values = flags.FlagValues()
    clipping_bias.define_flags(values)
    values(["clipping_bias", *arguments])
    return values


def test_script_prints_a_table_and_draws_a_plot(tmp_path, capsys):
    clipping_bias.run(parse("--steps=3", f"--output_dir={tmp_path}/new"))
    printed = capsys.readouterr().out
    for method in clipping_bias.methods(9, 3.0):
        row = next(line for line in printed.splitlines() if line.startswith(method.label))
        assert f"{method.limit:.4f}" in row
    assert "not private" in printed
    assert (tmp_path / "new" / "clipping_bias.png").read_bytes().startswith(b"\x89PNG")


def test_threshold_that_clips_nothing_is_refused():
    with pytest.raises(app.UsageError, match="--l2_norm_clip=9 must be below --outlier_gradient=9"):
        clipping_bias.run(parse("--l2_norm_clip=9"))


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__]))
