# Copyright 2026 The dice_tf Authors.
# SPDX-License-Identifier: Apache-2.0
"""docs/adaptive_clipping.md: its code runs from top to bottom, and what it says is so."""

import math
import pathlib
import re

import pytest

import dice_tf
from dice_tf import accounting

PAGE = (pathlib.Path(__file__).absolute().parents[1] / "docs" / "adaptive_clipping.md").read_text(
    encoding="utf-8"
)


@pytest.fixture(scope="module")
def names():
    found = {}
    for block in re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL):
        exec(block, found)
    return found


def test_a_bad_first_threshold_is_left_and_the_model_learns(names):
    history = names["history"].history
    assert history["l2_norm_clip"][-1] > 50 * 0.01 and history["accuracy"][-1] > 0.6
    # One epsilon in the bar, the plan and the statement.
    model, optimizer = names["model"], names["model"].optimizer
    callback_epsilon = history["epsilon"][-1]
    # A rule of defaults is known by its name.
    assert optimizer.mechanism.clipping == "adaptive" and 3.98 < callback_epsilon <= 4.0
    sampling = dice_tf.CyclicPoissonSampling(2000, 200)
    planned = accounting.compute_epsilon(optimizer.mechanism, sampling, 120, 5e-5, "pld")
    assert planned == pytest.approx(callback_epsilon, rel=1e-9)
    threshold = dice_tf.clip_thresholds(model)["all"]
    assert threshold == pytest.approx(history["l2_norm_clip"][-1])


def test_statements_have_the_last_thresholds(names):
    statement = names["plan"].statement(names["scheduled"])
    assert "C1 after the last step      0.5" in statement and "0, 60, 90" in statement
    with pytest.raises(dice_tf.errors.MechanismError):
        names["plan"].statement(names["model"])
    text = accounting.privacy_statement(
        names["layers"].optimizer.mechanism,
        dice_tf.CyclicPoissonSampling(2000, 200),
        120,
        5e-5,
        thresholds=dice_tf.clip_thresholds(names["layers"]),
    )
    each = dice_tf.clip_thresholds(names["layers"])
    assert list(each) == ["hidden", "output"]
    for value in (math.hypot(*each.values()), *each.values()):
        assert f"{value:.6g}" in text
    assert "noise multiplier of counts  20" in text


def test_what_the_count_takes_of_the_noise():
    for batch, percent in ((200, 0.06), (10, 22)):
        run = dice_tf.DiceMechanism(
            l2_norm_clip=1.0, noise_multiplier=1.0, expected_batch_size=batch, clipping="adaptive"
        )
        more = run.sensitivity(separate_entries=True) / math.sqrt(2) - 1
        assert round(100 * more, 2 if batch == 200 else 0) == percent
    assert 100 * math.expm1(0.2 * 0.5) == pytest.approx(11, abs=0.5)
    assert -100 * math.expm1(-0.2 * 0.5) == pytest.approx(10, abs=0.5)


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__]))
