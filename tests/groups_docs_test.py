# Copyright 2026 The dice_tf Authors.
# SPDX-License-Identifier: Apache-2.0
"""docs/groups.md: its code prints what it says, its numbers are right."""

import doctest
import math
import pathlib

import pytest
from scipy import optimize

from dice_tf import accounting
from dice_tf.mechanism import DiceMechanism
from dice_tf.sampling import CyclicPoissonSampling

PAGE = (pathlib.Path(__file__).absolute().parents[1] / "docs" / "groups.md").read_text("utf-8")
RUN = (
    DiceMechanism(l2_norm_clip=0.25, noise_multiplier=2.85, expected_batch_size=2048),
    CyclicPoissonSampling(60_000, 2048),
    600,
)


def test_the_code_prints_what_the_page_says():
    parsed = doctest.DocTestParser().get_doctest(PAGE, {}, "groups.md", None, 0)
    assert len(parsed.examples) == 12
    assert doctest.DocTestRunner().run(parsed).failed == 0


def test_numbers_in_the_text():
    text = " ".join(PAGE.split())
    epsilon = accounting.compute_epsilon(*RUN, 1e-5, "pld")
    assert "The epsilon of this run is 2.70" in text and 2.695 < epsilon < 2.705
    assert round(100 * (math.exp(epsilon) * 0.01 + 1e-5)) == 15
    assert "cost 4.5 times as much of it" in text and round(12.948 / 2.848, 1) == 4.5


@pytest.mark.parametrize("group_size, stated", [(2, 6.4), (3, 11.4)])
def test_the_textbook_bound_is_larger(group_size, stated):
    def excess(epsilon):
        share = 1e-5 / sum(math.exp(i * epsilon) for i in range(group_size))
        return accounting.compute_epsilon(*RUN, share, "pld") - epsilon

    textbook = group_size * optimize.brentq(excess, 0.0, 20.0, xtol=1e-3)
    assert textbook == pytest.approx(stated, abs=0.05)
    assert accounting.compute_epsilon(*RUN, 1e-5, "pld", group_size=group_size) < textbook


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__]))
