# Copyright 2026 The dice_tf Authors.
# SPDX-License-Identifier: Apache-2.0
"""docs/tables.md: its code runs, learns, and has the guarantee that the page says."""

import pathlib
import re

import keras
import numpy as np
import pytest

PAGE = (pathlib.Path(__file__).absolute().parents[1] / "docs" / "tables.md").read_text(
    encoding="utf-8"
)


@pytest.fixture(scope="module")
def names():
    keras.utils.set_random_seed(0)
    found = {}
    for block in re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL):
        exec(block, found)
    return found


def test_it_finds_the_rare_class_within_the_budget(names):
    assert 0.1 < names["back"].mean() < 0.25
    assert names["auc"] > 0.85
    assert 2.9 < names["plan"].epsilon() <= 3.0


def test_the_unit_is_the_patient_and_no_patient_is_on_two_sides(names):
    assert "one owner is added or removed" in " ".join(names["statement"].split())
    train, test = set(names["train"]["patient"]), set(names["test"]["patient"])
    assert not train & test and names["sampling"].num_examples == len(train)


def test_features_of_a_row_do_not_depend_on_the_others(names):
    rows = names["train"]
    some, all_of_them = names["features"](rows[:3]), names["features"](rows)
    for name, values in some.items():
        np.testing.assert_array_equal(values, all_of_them[name][:3])
    wards = all_of_them["ward"][:, 0]
    assert set(wards) == {0, 1, 2, 3}
    np.testing.assert_array_equal(wards == 0, rows["ward"] == "other")


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__]))
