# Copyright 2026 The dice_tf Authors.
# SPDX-License-Identifier: Apache-2.0
"""docs/random_allocation.md: its code prints what it says."""

import doctest
import pathlib

import pytest

NAME = "random_allocation.md"
PAGE = (pathlib.Path(__file__).absolute().parents[1] / "docs" / NAME).read_text("utf-8")


def test_the_code_prints_what_the_page_says():
    parsed = doctest.DocTestParser().get_doctest(PAGE, {}, NAME, None, 0)
    assert len(parsed.examples) == 21
    assert doctest.DocTestRunner().run(parsed).failed == 0


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__]))
