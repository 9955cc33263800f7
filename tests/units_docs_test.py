# Copyright 2026 The dice_tf Authors.
# SPDX-License-Identifier: Apache-2.0
"""docs/units.md: its code runs from top to bottom, and what it says of the runs is so."""

import pathlib
import re

import pytest

import dice_tf
from dice_tf import accounting

PAGE = (pathlib.Path(__file__).absolute().parents[1] / "docs" / "units.md").read_text(
    encoding="utf-8"
)


@pytest.fixture(scope="module")
def names():
    found = {}
    for block in re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL):
        exec(block, found)
    return found


def test_views_are_learned_from_at_the_price_of_one(names):
    assert max(names["history"].history["accuracy"]) > 0.7  # By chance 0.25.
    budget = names["budget"]
    one = dice_tf.DiceMechanism(l2_norm_clip=1.0, noise_multiplier=2.0, expected_batch_size=200)
    assert budget.epsilon() == accounting.compute_epsilon(one, budget.sampling, 20, 1e-5)


def test_owners_are_what_the_statement_is_about(names):
    statement = " ".join(names["statement"].split())
    assert "one owner is added or removed" in statement and "number of owners N 300" in statement
    assert names["people"].optimizer.rows_per_unit == 4
    assert names["people"].evaluate(names["images"], names["labels"], verbose=0)[1] > 0.5


def test_windows_are_rows_of_their_owner(names):
    sampling = names["sampling"]
    assert (sampling.num_examples, sampling.num_rows) == (100, 5300)
    assert dice_tf.run_epsilon(names["forecast"], sampling, 1e-3) > 0


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__]))
