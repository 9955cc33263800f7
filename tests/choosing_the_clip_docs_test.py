# Copyright 2026 The dice_tf Authors.
# SPDX-License-Identifier: Apache-2.0
"""docs/choosing_the_clip.md: its code prints what it says."""

import doctest
import pathlib
import re

import pytest

ROOT = pathlib.Path(__file__).absolute().parents[1]
PAGE = (ROOT / "docs" / "choosing_the_clip.md").read_text(encoding="utf-8")


def test_the_code_prints_what_the_page_says():
    parsed = doctest.DocTestParser().get_doctest(PAGE, {}, "choosing_the_clip.md", None, 0)
    assert PAGE.count("```python") == 4 and len(parsed.examples) == 20
    assert doctest.DocTestRunner().run(parsed).failed == 0


def test_the_threshold_of_the_page_clips_most_gradients_to_the_end():
    (shares,) = re.findall(r"^ 1\.0: +(\d+)% are longer, and (\d+)% later$", PAGE, re.MULTILINE)
    assert min(map(int, shares)) > 50


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__]))
