# Copyright 2026 The dice_tf Authors.
# SPDX-License-Identifier: Apache-2.0
r"""The closed form of the paper, kept for comparison: it is not a guarantee.

Zhang et al., ICLR 2024, Thm 3.2 states for Alg. 1 with \(C_2 \le C/B\)

\[\sigma_1^2 \ge \frac{32\, T\, \tilde G \log(1/\delta)}{N^2 \varepsilon^2}, \qquad
  \tilde G = C_1^2 + 2 \min(C^2, G'^2), \qquad G' = \max(0, G + \sigma - C_1),\]

and proves it by a Renyi divergence of \(16 \alpha T \tilde G / (\sigma_1^2 N^2)\) at every
order. Two things are wrong with it as a statement about Alg. 1:

* The constant does not follow from that divergence: at this noise it converts to
  \(\sqrt2\,\varepsilon + \varepsilon^2 / (2 \log(1/\delta))\), see `paper_epsilon`.
* It fails for large gradients, see `counterexample_epsilon_lower_bound`.

What holds is in `dice_tf.accounting.compute_epsilon`.
"""

import math
from typing import NamedTuple

from scipy import stats

from dice_tf.accounting.events import check_delta
from dice_tf.checks.arguments import check_integer, check_number
from dice_tf.errors import AccountingError

__all__ = [
    "Counterexample",
    "counterexample_epsilon_lower_bound",
    "paper_epsilon",
    "paper_noise_stddev",
]

NOT_A_GUARANTEE = "closed form of the paper, not a guarantee"


def _g_tilde(l2_norm_clip, feedback_clip, gradient_bound, gradient_deviation):
    l2_norm_clip = check_number("l2_norm_clip", l2_norm_clip, error=AccountingError)
    if feedback_clip is None:
        feedback_clip = l2_norm_clip
    feedback_clip = check_number(
        "feedback_clip", feedback_clip, exclusive=False, error=AccountingError
    )
    excess = math.inf
    if gradient_bound is not None:
        bound = check_number("gradient_bound", gradient_bound, error=AccountingError)
        deviation = check_number(
            "gradient_deviation", gradient_deviation, exclusive=False, error=AccountingError
        )
        excess = max(0.0, bound + deviation - l2_norm_clip)
    return l2_norm_clip**2 + 2 * min(feedback_clip, excess) ** 2


def paper_noise_stddev(
    epsilon: float,
    delta: float,
    num_examples: int,
    steps: int,
    l2_norm_clip: float = 1.0,
    feedback_clip: float | None = None,
    gradient_bound: float | None = None,
    gradient_deviation: float = 0.0,
) -> float:
    r"""Returns the noise of Thm 3.2: closed form of the paper, not a guarantee.

    \[\sigma_1 = \sqrt{32\, T\, \tilde G \log(1/\delta)} / (N \varepsilon)\]

    Args:
        epsilon: Float > 0, the epsilon that the paper claims.
        delta: Float in (0, 1/N).
        num_examples: Int > 0, N.
        steps: Int > 0, T.
        l2_norm_clip: Float > 0, C1.
        feedback_clip: Float >= 0, the paper's C, that is `expected_batch_size` times
            `error_norm_clip` of the unbounded form. `None` means `l2_norm_clip`.
        gradient_bound: Float > 0, the paper's G, or `None` for no bound.
        gradient_deviation: Float >= 0, the paper's sigma; used with `gradient_bound`.

    Returns:
        Float, noise standard deviation per coordinate on the mean.

    Raises:
        AccountingError: If an argument is out of range.

    Example:

    >>> round(1e3 * paper_noise_stddev(2.0, 1e-5, num_examples=50_000, steps=150), 3)
    4.072

    Source: Zhang et al., ICLR 2024, Thm 3.2.
    """
    epsilon = check_number("epsilon", epsilon, error=AccountingError)
    num_examples = check_integer("num_examples", num_examples, error=AccountingError)
    steps = check_integer("steps", steps, error=AccountingError)
    delta = check_delta(delta, num_examples)
    g_tilde = _g_tilde(l2_norm_clip, feedback_clip, gradient_bound, gradient_deviation)
    return math.sqrt(32 * steps * g_tilde * math.log(1 / delta)) / (num_examples * epsilon)


def paper_epsilon(
    noise_stddev: float,
    delta: float,
    num_examples: int,
    steps: int,
    l2_norm_clip: float = 1.0,
    feedback_clip: float | None = None,
    gradient_bound: float | None = None,
    gradient_deviation: float = 0.0,
    form: str = "closed",
) -> float:
    r"""Returns the epsilon that the paper claims: not a guarantee.

    `form="closed"` inverts Thm 3.2. `form="renyi"` converts the paper's own sum
    \(16 \alpha T \tilde G / (\sigma_1^2 N^2) =: \rho \alpha\) at its best order,

    \[\min_{\alpha > 1} \rho\alpha + \frac{\log(1/\delta)}{\alpha - 1}
      = \rho + 2 \sqrt{\rho \log(1/\delta)},\]

    which at the noise of Thm 3.2 is \(\sqrt2\,\varepsilon + \varepsilon^2 / (2\log(1/\delta))\):
    the theorem's constant is too small by its own proof.

    Args:
        noise_stddev: Float > 0, noise standard deviation per coordinate on the mean.
        delta: As for `paper_noise_stddev`, like the next six.
        num_examples: Int > 0.
        steps: Int > 0.
        l2_norm_clip: Float > 0.
        feedback_clip: Float >= 0 or `None`.
        gradient_bound: Float > 0 or `None`.
        gradient_deviation: Float >= 0.
        form: `"closed"` or `"renyi"`.

    Returns:
        Float > 0.

    Raises:
        AccountingError: If an argument is out of range.

    Example:

    >>> noise_stddev = paper_noise_stddev(2.0, 1e-5, num_examples=50_000, steps=150)
    >>> round(paper_epsilon(noise_stddev, 1e-5, 50_000, 150), 2)
    2.0
    >>> round(paper_epsilon(noise_stddev, 1e-5, 50_000, 150, form="renyi"), 2)
    3.0

    Source: Zhang et al., ICLR 2024, Thm 3.2 and its proof.
    """
    if form not in ("closed", "renyi"):
        raise AccountingError(
            f'Argument `form` must be "closed" or "renyi". Received: form={form!r}.'
        )
    noise_stddev = check_number("noise_stddev", noise_stddev, error=AccountingError)
    # The closed form is a noise that is inversely proportional to epsilon.
    g_tilde = l2_norm_clip, feedback_clip, gradient_bound, gradient_deviation
    closed = paper_noise_stddev(1.0, delta, num_examples, steps, *g_tilde) / noise_stddev
    if form == "closed":
        return closed
    return math.sqrt(2) * closed + closed * closed / (2 * math.log(1 / delta))


class Counterexample(NamedTuple):
    """A test that tells two neighbouring data sets apart from the releases of Alg. 1.

    Attributes:
        epsilon: Float, what any true (epsilon, delta) guarantee must be at least.
        true_positive_rate: Chance that the test fires with the example in the data.
        false_positive_rate: Chance that it fires without.
        window: Int, over how many of the last releases the test sums.
        threshold: Float, in standard deviations of that sum.

    Example:

    >>> found = counterexample_epsilon_lower_bound(
    ...     noise_stddev=1e-3, delta=1e-5, num_examples=50_000, expected_batch_size=1000,
    ...     steps=150, error_norm_clip=1e-3, window=100, threshold=6.0)
    >>> found.window, found.true_positive_rate > 1e6 * found.false_positive_rate
    (100, True)
    """

    epsilon: float
    true_positive_rate: float
    false_positive_rate: float
    window: int
    threshold: float


def counterexample_epsilon_lower_bound(
    noise_stddev: float,
    delta: float,
    num_examples: int,
    expected_batch_size: int,
    steps: int,
    error_norm_clip: float,
    window: int,
    threshold: float,
) -> Counterexample:
    r"""Returns a lower bound on the epsilon of Alg. 1 to the letter, by exact calculation.

    One dimension. All gradients of D are 0; D' has one more example, with a gradient
    \(G \ge C_1 + T B C_2\). Once that example has been drawn, clip(e, C2) equals C2 for
    good, so each later release is shifted by exactly C2 (the head of a draw shifts it
    further, which is left out: the bound stays valid). The test fires if the sum of the
    last n = `window` releases exceeds k = `threshold` of its standard deviations:

    \[\mathrm{fpr} = \Phi(-k), \qquad
      \mathrm{tpr} \ge \sum_{j=0}^{n} \Pr[\text{j of the n releases are shifted}]\;
      \Phi\!\Bigl(\frac{j\, C_2}{\sigma_1 \sqrt n} - k\Bigr), \qquad
      \varepsilon \ge \log \frac{\mathrm{tpr} - \delta}{\mathrm{fpr}}.\]

    Args:
        noise_stddev: Float > 0, \(\sigma_1\), noise standard deviation on the mean.
        delta: Float in (0, 1/N).
        num_examples: Int > 0, N.
        expected_batch_size: Int > 0, B; each step draws with probability B/N.
        steps: Int > 0, T.
        error_norm_clip: Float > 0, C2, on the mean.
        window: Int in [1, T].
        threshold: Float > 0.

    Returns:
        A `Counterexample`. Its epsilon is 0 if the test shows nothing.

    Raises:
        AccountingError: If an argument is out of range.

    Example:

    >>> noise_stddev = paper_noise_stddev(2.0, 1e-5, num_examples=50_000, steps=150)
    >>> round(counterexample_epsilon_lower_bound(
    ...     noise_stddev, 1e-5, 50_000, 1000, 150, error_norm_clip=1e-3, window=141,
    ...     threshold=6.75).epsilon, 1)
    14.1

    Source: own; `docs/privacy.md`, section 4.
    """
    noise_stddev = check_number("noise_stddev", noise_stddev, error=AccountingError)
    num_examples = check_integer("num_examples", num_examples, error=AccountingError)
    batch = check_integer("expected_batch_size", expected_batch_size, error=AccountingError)
    steps = check_integer("steps", steps, error=AccountingError)
    window = check_integer("window", window, error=AccountingError)
    delta = check_delta(delta, num_examples)
    error_norm_clip = check_number("error_norm_clip", error_norm_clip, error=AccountingError)
    threshold = check_number("threshold", threshold, error=AccountingError)
    if window > steps or batch > num_examples:
        raise AccountingError(
            "Argument `window` must not exceed `steps`, nor `expected_batch_size` the number of "
            f"examples. Received: window={window}, steps={steps}, expected_batch_size={batch}, "
            f"num_examples={num_examples}."
        )
    probability = batch / num_examples
    false_positive = float(stats.norm.sf(threshold))
    true_positive = 0.0
    # First drawn at `step` (0-based): releases step+1, ..., T-1 are shifted.
    for step in range(steps):
        first_draw = probability * (1 - probability) ** step
        shifted = min(window, steps - 1 - step)
        shift = shifted * error_norm_clip / (noise_stddev * math.sqrt(window))
        true_positive += first_draw * float(stats.norm.sf(threshold - shift))
    true_positive += (1 - probability) ** steps * false_positive
    epsilon = 0.0
    if true_positive > delta and false_positive > 0:
        epsilon = max(0.0, math.log((true_positive - delta) / false_positive))
    return Counterexample(epsilon, true_positive, false_positive, window, threshold)
