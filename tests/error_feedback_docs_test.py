# Copyright 2026 The dice_tf Authors.
# SPDX-License-Identifier: Apache-2.0
"""docs/error_feedback.md: its code prints what it says, and its numbers are right."""

import doctest
import pathlib
import re

import numpy as np
import pytest

import dice_tf

ROOT = pathlib.Path(__file__).absolute().parents[1]
PAGE = (ROOT / "docs" / "error_feedback.md").read_text(encoding="utf-8")


def test_the_code_prints_what_the_page_says():
    parsed = doctest.DocTestParser().get_doctest(PAGE, {}, "error_feedback.md", None, 0)
    assert PAGE.count("```python") == 6 and len(parsed.examples) == 19
    assert doctest.DocTestRunner().run(parsed).failed == 0


def test_seven_steps_take_two_thirds_of_the_noise():
    row = re.search(r"^8\.0 \['([\d.]+)', '[\d.]+', '([\d.]+)'\]", PAGE, re.MULTILINE)
    one, seven = (float(text) for text in row.groups())
    assert seven / one == pytest.approx(2 / 3, abs=0.02)


def largest_stable_step(s):
    """Of x' = x - a mean(x, ..., x of s steps ago): the first a with a root outside the circle."""
    for a in np.arange(0.01, 3.0, 0.01):
        companion = np.eye(s + 1, k=-1)
        companion[0] = -a / (s + 1)
        companion[0, 0] += 1
        if max(abs(np.linalg.eigvals(companion))) > 1 + 1e-9:
            return a - 0.005
    raise AssertionError(s)


@pytest.mark.parametrize("s, stated", [(0, 2.0), (1, 2.0), (2, 1.5), (3, 1.17), (7, 0.61)])
def test_stability_of_delayed_steps(s, stated):
    assert largest_stable_step(s) == pytest.approx(stated, abs=0.01)
    assert (
        f"{stated:.2f} for $s = {s}$" if s > 1 else "2 without error feedback and for $s = 1$"
    ) in " ".join(PAGE.split())


def test_names_exist():
    assert (ROOT / "dice_tf" / "engine" / "gram.py").is_file()
    assert hasattr(dice_tf, "make_dice_optimizer_class")


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__]))
