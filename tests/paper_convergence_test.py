# Copyright 2026 The dice_tf Authors.
# SPDX-License-Identifier: Apache-2.0
"""The paper's convergence theorem: by hand, and by searching for what it says is best."""

import math

import numpy as np
import pytest

from dice_tf import accounting
from dice_tf.errors import AccountingError

ARGUMENTS = dict(
    loss_gap=0.7,
    smoothness=2.5,
    num_parameters=12,
    steps=400,
    l2_norm_clip=0.5,
    error_norm_clip=2.0,
    noise_stddev=0.3,
)
BUDGET = dict(
    epsilon=2.0,
    delta=1e-5,
    num_examples=5000,
    expected_batch_size=100,
    num_parameters=80,
    l2_norm_clip=1.0,
    error_norm_clip=3.5,
)


def descent_bound(step_size, steps=400):
    """Returns what the descent lemma gives at any step size: 2 (D / (eta T) + L eta V / 2)."""
    variance = 2 * 0.5**2 + 3 * 2.0**2 + 12 * 0.3**2
    return 2 * (0.7 / (step_size * steps) + 2.5 * step_size * variance / 2)


def test_formulas_by_hand():
    variance = 2 * 0.5**2 + 3 * 2.0**2 + 12 * 0.3**2
    assert accounting.paper_step_size(**ARGUMENTS) == pytest.approx(
        math.sqrt(2 * 0.7 / (400 * 2.5 * variance)), rel=1e-12
    )
    assert accounting.paper_gradient_bound(**ARGUMENTS) == pytest.approx(
        2 * math.sqrt(2 * 2.5 * 0.7 * variance / 400), rel=1e-12
    )


def test_no_step_size_gives_a_smaller_bound():
    step_size = accounting.paper_step_size(**ARGUMENTS)
    grid = step_size * np.geomspace(0.1, 10, 200_001)
    bounds = descent_bound(grid)
    assert grid[bounds.argmin()] == pytest.approx(step_size, rel=1e-4)
    assert bounds.min() == pytest.approx(accounting.paper_gradient_bound(**ARGUMENTS), rel=1e-8)


@pytest.mark.parametrize("bounds", [{}, dict(gradient_bound=4.0, gradient_deviation=20.0)])
def test_best_steps_are_those_where_the_bound_is_within_root_two_of_its_limit(bounds):
    best = accounting.paper_best_steps(**BUDGET, **bounds)
    # All T, with the noise of Thm 3.2 written out: G' = 23 where G and sigma are given.
    g_tilde = 1.0 + 2 * min(350.0, 23.0 if bounds else math.inf) ** 2
    steps = np.arange(1, 10**6, dtype="float64")
    noise = 32 * steps * g_tilde * math.log(1e5) / (5000 * 2.0) ** 2
    found = 2 * np.sqrt(2 * 2.5 * 0.7 * (2 * 1.0 + 3 * 3.5**2 + 80 * noise) / steps)
    assert np.all(np.diff(found) < 0)  # There is no least one.
    limit = 2 * math.sqrt(2 * 2.5 * 0.7 * 80 * noise[0])
    if bounds:
        assert best > 10
        first = 1 + int(np.argmax(found <= math.sqrt(2) * limit))
        assert abs(best - first) <= 1
        arguments = {**ARGUMENTS, "num_parameters": 80, "l2_norm_clip": 1.0,
                     "error_norm_clip": 3.5, "steps": best,
                     "noise_stddev": math.sqrt(noise[best - 1])}  # fmt: skip
        assert accounting.paper_gradient_bound(**arguments) == pytest.approx(
            found[best - 1], rel=1e-12
        )
    else:
        # C = B C2 is so large that one step has more noise than all that steps can gain.
        assert best == 1 and found[0] < math.sqrt(2) * limit


def test_best_steps_grow_as_the_paper_says():
    of = lambda **changes: accounting.paper_best_steps(
        **{**BUDGET, "gradient_bound": 2.0, "num_examples": 10**6, "delta": 1e-7, **changes}
    )
    base = of()
    assert of(epsilon=4.0) == pytest.approx(4 * base, rel=1e-3)
    assert of(num_examples=2 * 10**6) == pytest.approx(4 * base, rel=1e-3)
    assert of(num_parameters=160) == pytest.approx(base / 2, rel=1e-3)
    assert of(delta=1e-14) == pytest.approx(base / 2, rel=1e-3)


@pytest.mark.parametrize("function", [accounting.paper_step_size, accounting.paper_gradient_bound])
def test_thresholds_outside_the_theorem_are_refused(function):
    least = dict(ARGUMENTS, error_norm_clip=1.5)
    assert function(**least) > 0
    with pytest.raises(AccountingError, match="`error_norm_clip` of at least 3 l2_norm_clip"):
        function(**dict(least, error_norm_clip=1.49))
    with pytest.raises(AccountingError, match="here 1.7. Received: error_norm_clip=1.5"):
        function(**least, gradient_deviation=2.0, expected_batch_size=10)
    # A threshold that rounding has put below.
    assert function(**dict(ARGUMENTS, l2_norm_clip=0.1, error_norm_clip=0.3)) > 0


@pytest.mark.parametrize(
    "name, value",
    [
        ("loss_gap", 0.0),
        ("smoothness", -1.0),
        ("num_parameters", 0),
        ("steps", 2.5),
        ("l2_norm_clip", 0.0),
        ("noise_stddev", -0.1),
        ("gradient_deviation", math.nan),
        ("expected_batch_size", 0),
    ],
)
def test_bad_arguments_are_refused_by_name(name, value):
    with pytest.raises(AccountingError, match=f"Argument `{name}`"):
        accounting.paper_gradient_bound(**{**ARGUMENTS, name: value})


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__]))
