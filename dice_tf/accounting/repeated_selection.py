# Copyright 2026 The dice_tf Authors.
# SPDX-License-Identifier: Apache-2.0
r"""What the best of a random number of trials costs, when nothing else is shown.

\(Q\) is one trial: it draws hyperparameters, trains, and gives a model with a score, by which
results are ordered. \(K\) is drawn before the first trial, from a law that ignores the data, with
mean \(\mu\) and shape \(\eta\):

| shape | law of K |
|---|---|
| 0 | logarithmic, \(\Pr[K = k] \propto (1-\gamma)^k / k\) |
| 1 | geometric, \(\Pr[K = k] = \gamma (1-\gamma)^{k-1}\) |
| finite | negative binomial without 0, \(\propto (1-\gamma)^k \prod_{l<k}\frac{l+\eta}{l+1}\) |
| infinite | Poisson, which may draw no trial |

The selection runs Q independently K times, and releases the best result.

**Renyi.** If one trial has divergence \(r(\alpha)\), the selection has at most

\[r(\alpha) + \frac{\log \mu}{\alpha - 1}
  + (1 + \eta) \min_\beta \Bigl[(1 - \tfrac1\beta) r(\beta)
  + \tfrac1\beta \log \tfrac1\gamma\Bigr],\]

or, for Poisson, \(r(\alpha) + \log \mu/(\alpha-1) + \mu\,\delta(\log(1 + \frac1{\alpha-1}))\),
where \(\delta(\cdot)\) is the delta of one trial at that epsilon.

**Loss distributions.** If one trial has \(\varepsilon(\delta)\), the selection has at most

\[\varepsilon(\delta/\mu) + (1 + \eta) \min_{\delta_1} \log\Bigl(e^{\varepsilon(\delta_1)}
  + \tfrac{1 - \gamma}{\gamma}\,\delta_1\Bigr).\]

Proof. With \(f\) the generating function of K, the selection has the density
\(Q(y) f'(q)\), \(q = Q(\le y)\), where \(f'(x) \propto (1 - (1-\gamma) x)^{-\eta-1}\) is at most
\(f'(1) = \mu\). Let \(Q'\) and \(q'\) be those of a neighbour, and \(\varepsilon_1 =
\varepsilon(\delta_1)\). As \(1 - q' \le e^{\varepsilon_1}(1 - q) + \delta_1\),

\[\frac{f'(q)}{f'(q')} = \Bigl(\frac{\gamma + (1-\gamma)(1-q')}{\gamma + (1-\gamma)(1-q)}
  \Bigr)^{1+\eta} \le \Bigl(e^{\varepsilon_1} + \tfrac{1-\gamma}{\gamma}\delta_1\Bigr)^{1+\eta}
  = e^c.\]

So \(\int [Q f'(q) - e^{\varepsilon} Q' f'(q')]^+ \le \int f'(q) [Q - e^{\varepsilon - c} Q']^+
\le \mu\,\delta(\varepsilon - c)\). QED. Where results tie, the same holds of any order among them
that ignores the data, such as "the first wins".

Source: Papernot, Steinke, "Hyperparameter tuning with Renyi differential privacy", ICLR 2022,
Thm 2 and 6 (Renyi; what dp_accounting's `RepeatAndSelectDpEvent` is accounted by). Koskela,
Redberg, Wang, "Privacy profiles for private selection", ICML 2024 (loss distributions; the proof
above is complete without it).
"""

import functools
import math
import secrets
from typing import Any

import numpy as np
from scipy import optimize

from dice_tf.accounting import events
from dice_tf.accounting.account import run_rounds
from dice_tf.accounting.composition import composed_curve
from dice_tf.accounting.epsilon import check_accountant
from dice_tf.accounting.renyi import divergences_of, epsilon_per_order, warn_at_edge
from dice_tf.checks.arguments import check_number
from dice_tf.errors import AccountingError
from dice_tf.mechanism import DiceMechanism
from dice_tf.sampling import Sampling

__all__ = ["selection_epsilon"]

# More trials on average than anybody makes; beyond, gamma leaves the range of floats.
_MOST_TRIALS = 1e6


def selection_epsilon(
    mechanism: DiceMechanism,
    sampling: Sampling,
    steps: int,
    delta: float,
    mean_trials: float,
    shape: float = 1.0,
    accountant: str = "rdp",
) -> float:
    r"""Returns the epsilon of releasing the best of a random number of private runs.

    \[\varepsilon' = \min_\alpha\; r'(\alpha) + \log\frac{\alpha-1}{\alpha}
      - \frac{\log\delta + \log\alpha}{\alpha - 1},\]

    where \(r'\) is the divergence of the selection, as at the top of this module. It covers the
    best model, its hyperparameters and its score, if scores are from data outside the guarantee.
    It covers neither the number of trials nor the results of the others.

    Args:
        mechanism: `DiceMechanism` of every run. What epsilon does not depend on, such as
            `l2_norm_clip` at equal ratios, may differ between runs.
        sampling: How the batches of every run are drawn.
        steps: Int >= 0, number of optimizer steps of one run, at most.
        delta: Float in (0, 1/N), for the selection as a whole.
        mean_trials: Float from 1 to 1e6, the mean number of runs.
        shape: Float >= 0 of the negative binomial law: 1 is geometric, 0 logarithmic (a smaller
            epsilon, and more often a single trial). `math.inf` is Poisson (a number near
            its mean, which may be 0).
        accountant: `"rdp"`, or `"pld"` (tighter; not for Poisson).

    Returns:
        Float >= 0, the epsilon of the neighbouring relation of one run; infinite without noise.

    Raises:
        AccountingError: If an argument is out of range or arguments contradict each other.

    Example:

    >>> from dice_tf.mechanism import DiceMechanism
    >>> from dice_tf.sampling import CyclicPoissonSampling
    >>> from dice_tf.accounting import compute_epsilon
    >>> run = (DiceMechanism(l2_norm_clip=1.0, noise_multiplier=2.0, expected_batch_size=512),
    ...        CyclicPoissonSampling(num_examples=60_000, expected_batch_size=512), 1171)
    >>> round(compute_epsilon(*run, delta=1e-5), 2)
    1.51
    >>> round(selection_epsilon(*run, delta=1e-5, mean_trials=10), 2)
    3.07

    Source: Papernot and Steinke, ICLR 2022; Koskela et al., ICML 2024 (`"pld"`).
    """
    steps = events.check_run(mechanism, sampling, steps)
    delta = events.check_delta(delta, sampling.num_examples)
    check_accountant(accountant)
    mean, shape = check_law(mean_trials, shape)
    if accountant == "pld" and math.isinf(shape):
        raise AccountingError(
            'A Poisson number of trials is accounted by accountant="rdp" alone. Received: '
            'shape=inf, accountant="pld". Take another shape, such as 1, or accountant="rdp".'
        )
    if steps == 0:
        return 0.0
    if mechanism.noise_multiplier == 0:
        return math.inf
    if accountant == "pld":
        curve = composed_curve([(mechanism, sampling, steps)], delta, accountant)
        return _loss_epsilon(curve, math.log(delta), mean, shape)
    orders, divergences = divergences_of(run_rounds(mechanism, sampling, steps, delta))
    selected = selection_divergences(orders, divergences, mean, shape)
    epsilons = epsilon_per_order(orders, selected, math.log(delta))
    best = int(np.argmin(epsilons))
    epsilon = max(0.0, float(epsilons[best]))
    warn_at_edge(epsilon, float(orders[best]))
    return epsilon


def check_law(mean_trials: Any, shape: Any) -> tuple[float, float]:
    """Refuses a law of the number of trials that there is not.

    Args:
        mean_trials: Float from 1 to 1e6.
        shape: Float >= 0, or infinity.

    Returns:
        Both as floats.

    Raises:
        AccountingError: If one is out of range.
    """
    mean = check_number(
        "mean_trials", mean_trials, minimum=1.0, exclusive=False, error=AccountingError
    )
    if mean > _MOST_TRIALS:
        raise AccountingError(
            f"Argument `mean_trials` must be at most {_MOST_TRIALS:g}. "
            f"Received: mean_trials={mean_trials!r}."
        )
    if not (isinstance(shape, float) and shape == math.inf):
        shape = check_number("shape", shape, exclusive=False, error=AccountingError)
    return mean, shape


def log_inverse_gamma(mean: float, shape: float) -> float:
    r"""Returns \(\log(1/\gamma)\) of the law with this mean and a finite shape.

    \[\mu = \frac{\eta\,(1/\gamma - 1)}{1 - \gamma^\eta}, \qquad
      \mu = \frac{1/\gamma - 1}{\log(1/\gamma)} \text{ for } \eta = 0.\]

    Args:
        mean: Float >= 1.
        shape: Float >= 0.

    Returns:
        Float >= 0; 0 for a single trial.

    Example:

    >>> round(math.exp(log_inverse_gamma(10.0, 1.0)), 9)
    10.0
    """
    if mean == 1.0:
        return 0.0

    def excess(log_inverse):
        # The second factor is 1 for shape 0, where x = 0.
        x = shape * log_inverse
        share = x / -math.expm1(-x) if x > 1e-12 else 1.0
        return math.expm1(log_inverse) / log_inverse * share - mean

    root: Any = optimize.brentq(excess, 1e-12, 100.0, xtol=1e-14)
    return float(root)


def selection_divergences(orders, divergences, mean, shape):
    """Returns the Renyi divergences of the selection, from those of one trial.

    Args:
        orders: Float array, above 1, ascending.
        divergences: Float array of the same shape, which may have infinities.
        mean: Float >= 1.
        shape: Float >= 0, or infinity.

    Returns:
        Float array of the same shape.
    """
    selected = divergences + math.log(mean) / (orders - 1)
    if math.isinf(shape):
        with np.errstate(invalid="ignore"):
            log_deltas = (orders - 1) * (
                divergences - np.log1p(1 / (orders - 1))[:, None] + np.log1p(-1 / orders)
            ) - np.log(orders)
        selected = selected + mean * np.exp(np.minimum(0.0, log_deltas.min(axis=1)))
    else:
        constant = (1 - 1 / orders) * divergences + log_inverse_gamma(mean, shape) / orders
        selected = selected + (1 + shape) * constant.min()
    # A divergence grows with its order.
    return np.minimum.accumulate(selected[::-1])[::-1]


def _loss_epsilon(curve, log_delta, mean, shape):
    first = curve(log_delta - math.log(mean))
    if not math.isfinite(first):
        return math.inf
    odds = math.expm1(log_inverse_gamma(mean, shape))
    log_odds = math.log(odds) if odds else -math.inf

    @functools.cache
    def log_ratio(log_one):
        return float(np.logaddexp(curve(log_one), log_odds + log_one))

    # Every delta_1 is valid; the second lattice leaves less than 1 in 1,000 on the table.
    low, high = log_delta - math.log(mean), math.log(0.9)
    for _ in range(2):
        lattice = np.linspace(low, high, 13).tolist()
        best = min(range(13), key=lambda index: log_ratio(lattice[index]))
        low, high = lattice[max(0, best - 1)], lattice[min(12, best + 1)]
    return first + (1 + shape) * log_ratio(lattice[best])


def draw_number_of_trials(mean: float, shape: float) -> int:
    """Draws K from entropy of the operating system.

    Args:
        mean: Float >= 1.
        shape: Float >= 0, or infinity.

    Returns:
        Int >= 1, or >= 0 for Poisson.

    Example:

    >>> draw_number_of_trials(1.0, 1.0)
    1
    """
    rng = np.random.default_rng(secrets.randbits(256))
    if math.isinf(shape):
        return int(rng.poisson(mean))
    gamma = math.exp(-log_inverse_gamma(mean, shape))
    if gamma == 1.0:
        return 1
    if shape == 0:
        return int(rng.logseries(1 - gamma))
    while True:
        number = int(rng.negative_binomial(shape, gamma))
        if number:
            return number


def costs_at_most(
    run: tuple[DiceMechanism, Sampling, int],
    declared: tuple[DiceMechanism, Sampling, int],
    delta: float,
    accountant: str = "rdp",
) -> bool:
    """Returns whether a run costs at most what another one does, by the whole curve.

    Renyi divergences are compared at every order. They say nothing of distributions of the
    privacy loss, so with `"pld"` also the rounds themselves: as many or fewer, each drawn with
    at most the probability and with at least the noise.

    Args:
        run: `(mechanism, sampling, steps)`.
        declared: The run that it is held against.
        delta: Float in (0, 1/N), by which the unbounded form is accounted.
        accountant: `"rdp"` or `"pld"`.

    Returns:
        Whether it does. Runs with other neighbours, or of other data, are not compared.
    """
    (mechanism, sampling, steps), (planned, its_sampling, most) = run, declared
    alike = type(sampling) is type(its_sampling)
    alike = alike and sampling.num_examples == its_sampling.num_examples
    if not alike or (mechanism.num_microbatches is None) != (planned.num_microbatches is None):
        return False
    if steps == 0 or planned.noise_multiplier == 0:
        return True
    if mechanism.noise_multiplier == 0 or most == 0:
        return False
    if events.is_unbounded(mechanism):
        # How it is split depends on the number of steps; with less of them it costs less.
        steps = max(steps, most)
    of_run, of_declared = (
        run_rounds(*one, delta) for one in ((mechanism, sampling, steps), declared)
    )
    if accountant == "pld" and not _is_dominated(of_run, of_declared):
        return False
    divergences, most_of_them = (divergences_of(rounds)[1] for rounds in (of_run, of_declared))
    return bool(np.all(divergences <= most_of_them * (1 + 1e-9)))


def _is_dominated(rounds, others):
    return len(rounds) == len(others) and all(
        one.sampling_probability <= other.sampling_probability
        and one.noise_multiplier >= other.noise_multiplier * (1 - 1e-9)
        and one.count <= other.count
        for one, other in zip(rounds, others, strict=True)
    )
