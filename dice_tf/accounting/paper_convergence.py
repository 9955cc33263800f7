# Copyright 2026 The dice_tf Authors.
# SPDX-License-Identifier: Apache-2.0
r"""The convergence theorem of the paper: its step size, its bound, its best number of steps.

It is about Alg. 1 (`bound_residuals=False`, one feedback step, plain SGD) on a loss \(f\) that
is \(L\)-smooth, over \(d\) weights, from a start that is \(D = f(x_0) - f^*\) above the least loss.
With thresholds \(C_2 \ge 3 C_1 + \sigma/B\), where \(\sigma\) bounds the deviation of per-example
gradients, and with any noise \(\sigma_1\),

\[V = 2 C_1^2 + 3 C_2^2 + d\,\sigma_1^2, \qquad
  \eta = \sqrt{\frac{2 D}{T L V}}, \qquad
  \overline{\lVert \nabla f \rVert^2} \le 2 \sqrt{\frac{2 L D V}{T}},\]

where the bar is a weighted mean over the \(T\) steps. Clipping has no part in the bound that stays
as \(T\) grows. With bounded residuals, the default, it has: training then stops where SGD stops
that clips at \(C_1 + C_2\) (`examples/convergence.py`).

It promises nothing of privacy. It is here because the best number of steps is where the noise of
Thm 3.2, which `paper_noise_stddev` computes, outweighs what more steps gain.

Source: Zhang et al., ICLR 2024, the convergence theorem of DiceSGD and its corollary.
"""

import math

from dice_tf.accounting.paper import paper_noise_stddev
from dice_tf.checks.arguments import check_integer, check_number
from dice_tf.errors import AccountingError

__all__ = ["paper_best_steps", "paper_gradient_bound", "paper_step_size"]


def _variance(
    num_parameters: int,
    l2_norm_clip: float,
    error_norm_clip: float,
    noise_stddev: float,
    gradient_deviation: float = 0.0,
    expected_batch_size: int = 1,
) -> float:
    """Returns V, if the thresholds are such that the theorem holds."""
    parameters = check_integer("num_parameters", num_parameters, error=AccountingError)
    c1 = check_number("l2_norm_clip", l2_norm_clip, error=AccountingError)
    c2 = check_number("error_norm_clip", error_norm_clip, error=AccountingError)
    noise = check_number("noise_stddev", noise_stddev, exclusive=False, error=AccountingError)
    deviation = check_number(
        "gradient_deviation", gradient_deviation, exclusive=False, error=AccountingError
    )
    batch = check_integer("expected_batch_size", expected_batch_size, error=AccountingError)
    least = 3 * c1 + deviation / batch
    # C2 that was computed as 3 C1 in another order of operations is enough.
    if c2 < least * (1 - 1e-12):
        raise AccountingError(
            "The convergence theorem needs `error_norm_clip` of at least 3 l2_norm_clip + "
            f"gradient_deviation / expected_batch_size, here {least:g}. Received: "
            f"error_norm_clip={c2:g}. Raise it, or lower `l2_norm_clip`."
        )
    return 2 * c1**2 + 3 * c2**2 + parameters * noise**2


def paper_step_size(
    loss_gap: float,
    smoothness: float,
    num_parameters: int,
    steps: int,
    l2_norm_clip: float,
    error_norm_clip: float,
    noise_stddev: float,
    gradient_deviation: float = 0.0,
    expected_batch_size: int = 1,
) -> float:
    r"""Returns the step size of the paper's convergence theorem.

    \[\eta = \sqrt{\frac{2 D}{T L (2 C_1^2 + 3 C_2^2 + d\,\sigma_1^2)}}\]

    Args:
        loss_gap: Float > 0, D, the loss at the start less the least loss.
        smoothness: Float > 0, L, the largest curvature of the loss.
        num_parameters: Int > 0, d.
        steps: Int > 0, T.
        l2_norm_clip: Float > 0, C1.
        error_norm_clip: Float, C2 of the unbounded form, at least
            3 C1 + `gradient_deviation` / `expected_batch_size`.
        noise_stddev: Float >= 0, \(\sigma_1\), noise standard deviation on the mean.
        gradient_deviation: Float >= 0, the paper's \(\sigma\), a bound on the root mean square
            distance of a per-example gradient from the gradient.
        expected_batch_size: Int > 0, B. Used with `gradient_deviation`.

    Returns:
        Float > 0, the learning rate of plain SGD.

    Raises:
        AccountingError: If an argument is out of range, or C2 too small for the theorem.

    Example:

    >>> round(paper_step_size(0.5, 1.0, 10, 1000, l2_norm_clip=1.0, error_norm_clip=3.0,
    ...                       noise_stddev=0.1), 5)
    0.00586

    Source: Zhang et al., ICLR 2024, convergence theorem of DiceSGD.
    """
    gap = check_number("loss_gap", loss_gap, error=AccountingError)
    curvature = check_number("smoothness", smoothness, error=AccountingError)
    steps = check_integer("steps", steps, error=AccountingError)
    variance = _variance(
        num_parameters,
        l2_norm_clip,
        error_norm_clip,
        noise_stddev,
        gradient_deviation,
        expected_batch_size,
    )
    return math.sqrt(2 * gap / (steps * curvature * variance))


def paper_gradient_bound(
    loss_gap: float,
    smoothness: float,
    num_parameters: int,
    steps: int,
    l2_norm_clip: float,
    error_norm_clip: float,
    noise_stddev: float,
    gradient_deviation: float = 0.0,
    expected_batch_size: int = 1,
) -> float:
    r"""Returns the bound of the paper's convergence theorem, at its step size.

    \[\overline{\lVert \nabla f \rVert^2}
      \le 2 \sqrt{\frac{2 L D (2 C_1^2 + 3 C_2^2 + d\,\sigma_1^2)}{T}}\]

    Args:
        loss_gap: As for `paper_step_size`, like all others.
        smoothness: Float > 0.
        num_parameters: Int > 0.
        steps: Int > 0.
        l2_norm_clip: Float > 0.
        error_norm_clip: Float > 0.
        noise_stddev: Float >= 0.
        gradient_deviation: Float >= 0.
        expected_batch_size: Int > 0.

    Returns:
        Float > 0, a bound on a weighted mean over the steps of the expected squared norm of the
        gradient, for Alg. 1 (`bound_residuals=False`). It does not hold with bounded residuals.

    Raises:
        AccountingError: If an argument is out of range, or C2 too small for the theorem.

    Example:

    >>> arguments = dict(loss_gap=0.5, smoothness=1.0, num_parameters=10, l2_norm_clip=1.0,
    ...                  error_norm_clip=3.0, noise_stddev=0.1)
    >>> [round(paper_gradient_bound(steps=steps, **arguments), 3) for steps in (100, 10_000)]
    [1.079, 0.108]

    Source: Zhang et al., ICLR 2024, convergence theorem of DiceSGD.
    """
    problem = loss_gap, smoothness, num_parameters, steps
    private = l2_norm_clip, error_norm_clip, noise_stddev, gradient_deviation, expected_batch_size
    step_size = paper_step_size(*problem, *private)
    # The two terms of the bound, D / (eta T) and L eta V / 2, are equal at this step size.
    return 4 * loss_gap / (step_size * steps)


def paper_best_steps(
    epsilon: float,
    delta: float,
    num_examples: int,
    expected_batch_size: int,
    num_parameters: int,
    l2_norm_clip: float,
    error_norm_clip: float,
    gradient_bound: float | None = None,
    gradient_deviation: float = 0.0,
) -> int:
    r"""Returns the paper's best number of steps for a budget: not a guarantee.

    The noise of Thm 3.2 grows with the steps, \(\sigma_1^2 = T \sigma_{(1)}^2\), where
    \(\sigma_{(1)}\) is that of one step. So the bound of the convergence theorem is

    \[2 \sqrt{2 L D \Bigl(\frac{2 C_1^2 + 3 C_2^2}{T} + d\,\sigma_{(1)}^2\Bigr)}, \qquad
      T^* = \frac{2 C_1^2 + 3 C_2^2}{d\,\sigma_{(1)}^2}
      = \frac{(2 C_1^2 + 3 C_2^2) N^2 \varepsilon^2}{32\, d\, \tilde G \log(1/\delta)}.\]

    It falls with T for ever, but hardly beyond \(T^*\), where both terms are equal: there it is
    \(\sqrt2\) times its limit. The paper states the order of \(T^*\), not its constant.

    Args:
        epsilon: Float > 0, the epsilon that the paper claims.
        delta: Float in (0, 1/N).
        num_examples: Int > 0, N.
        expected_batch_size: Int > 0, B.
        num_parameters: Int > 0, d.
        l2_norm_clip: Float > 0, C1.
        error_norm_clip: Float, C2 of the unbounded form, at least
            3 C1 + `gradient_deviation` / B. The paper's C is B C2.
        gradient_bound: Float > 0, the paper's G, or `None` for no bound.
        gradient_deviation: Float >= 0, the paper's \(\sigma\).

    Returns:
        Int >= 1.

    Raises:
        AccountingError: If an argument is out of range, or C2 too small for the theorem.

    Example:

    >>> paper_best_steps(2.0, 1e-5, num_examples=50_000, expected_batch_size=1000,
    ...                  num_parameters=1000, l2_norm_clip=1.0, error_norm_clip=3.0,
    ...                  gradient_bound=10.0)
    4829

    Source: Zhang et al., ICLR 2024, corollary of the convergence theorem with Thm 3.2.
    """
    batch = check_integer("expected_batch_size", expected_batch_size, error=AccountingError)
    without_noise = _variance(
        num_parameters, l2_norm_clip, error_norm_clip, 0.0, gradient_deviation, batch
    )
    g_tilde = l2_norm_clip, batch * error_norm_clip, gradient_bound, gradient_deviation
    of_one_step = paper_noise_stddev(epsilon, delta, num_examples, 1, *g_tilde)
    return max(1, round(without_noise / (num_parameters * of_one_step**2)))
