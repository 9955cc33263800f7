# Copyright 2026 The dice_tf Authors.
# SPDX-License-Identifier: Apache-2.0
"""Statements of several runs on the same data: of all of them, or of the best one alone."""

from collections.abc import Sequence
import decimal
import math

from dice_tf.accounting import events, repeated_selection, statement_text, units
from dice_tf.accounting import statement as of_one_run
from dice_tf.accounting.composition import compose_epsilon
from dice_tf.accounting.epsilon import (
    ACCOUNTANTS,
    check_accountant,
    compute_epsilon,
    delta_up,
    guarantee,
    up,
)
from dice_tf.accounting.statement_text import items, wrap
from dice_tf.errors import AccountingError
from dice_tf.mechanism import DiceMechanism
from dice_tf.sampling import Sampling

__all__ = ["compose_statement", "selection_statement"]

# The first item of a single run is about other runs.
_NOT_COVERED = of_one_run.NOT_COVERED[1:]

SCORE_DATA = {
    "public": "public data, which nobody's privacy depends on",
    "held_out": (
        "held-out data that no trial was trained on; the people in it are NOT covered by this "
        "guarantee"
    ),
}

_LAWS = {0.0: "logarithmic", 1.0: "geometric", math.inf: "Poisson"}


def compose_statement(
    runs: Sequence[tuple[DiceMechanism, Sampling, int]], delta: float, accountant: str = "rdp"
) -> str:
    """Returns a text that says what privacy several runs on the same data have together.

    Args:
        runs: List of `(mechanism, sampling, steps)`, one for each run, not empty: from
            `dice_tf.accounted_run(model, sampling)`, or as planned.
        delta: Float in (0, 1/N), for every N.
        accountant: `"rdp"` or `"pld"`: whose epsilon is the guarantee. The other one's stands
            beside it.

    Returns:
        A string of several lines: the epsilon of `compose_epsilon`, one line for every run with
        what it costs alone, the sum of those, and what is not covered.

    Raises:
        AccountingError: As `compose_epsilon`, or if there is no run.

    Example:

    >>> from dice_tf.mechanism import DiceMechanism
    >>> from dice_tf.sampling import PoissonSampling
    >>> run = (DiceMechanism(l2_norm_clip=1.0, noise_multiplier=2.0, expected_batch_size=512),
    ...        PoissonSampling(num_examples=60_000, expected_batch_size=512), 1171)
    >>> statement = compose_statement([run] * 3, delta=1e-5)
    >>> [line for line in statement.splitlines() if line.isupper()]
    ['GUARANTEE', 'RUNS', 'FOR COMPARISON', 'NOT COVERED']

    Source: as `compose_epsilon`.
    """
    runs = list(runs)
    if not runs:
        raise AccountingError(
            "Argument `runs` must have at least one run, `(mechanism, sampling, steps)`. "
            f"Received: runs={runs!r}."
        )
    check_accountant(accountant)
    epsilons = {name: compose_epsilon(runs, delta, name) for name in ACCOUNTANTS}
    shuffled = any(not sampling.own_coins for _, sampling, _ in runs)
    relation = events.REPLACE_BY_EMPTY if shuffled else events.ADD_OR_REMOVE_ONE
    several = f"All {len(runs)} runs below, taken together, are"
    which = several if len(runs) > 1 else "The one run below is"
    subject = f"{which}, with every model on the way and every choice among them,"
    lines = [
        *statement_text.guarantee(subject, epsilons, accountant, delta, relation),
        *statement_text.missing(runs, _draws_are_secret(runs)),
    ]
    alone = [{name: compute_epsilon(*run, delta, name) for name in ACCOUNTANTS} for run in runs]
    table = [
        f"  {'':<5}{'sampling':<24}{'N':>9}{'B':>7}{'steps':>8}{'noise':>9}{'RDP':>10}{'PLD':>10}"
    ]
    for number, ((mechanism, sampling, steps), own) in enumerate(zip(runs, alone), 1):
        table.append(
            f"  {number:<5}{type(sampling).__name__:<24}{sampling.num_examples:>9}"
            f"{sampling.expected_batch_size:>7}{steps:>8}{mechanism.noise_multiplier:>9.4g}"
            f"{up(own['rdp']):>10}{up(own['pld']):>10}"
        )
    table.append(
        wrap("Noise is `noise_multiplier`; RDP and PLD are the epsilon of the run alone, at delta.")
    )
    added = math.fsum(own[accountant] for own in alone)
    deltas = float(decimal.Decimal(repr(float(delta))) * len(runs))
    comparison = wrap(
        f"Adding up the epsilons of the runs gives {up(added)}, and their deltas "
        f"{delta_up(deltas)}. That holds, too, and is what composition saves."
    )
    others = ("Runs on the same data that are not in the list: they compose with these.",)
    text = statement_text.sections(
        {
            "GUARANTEE": "\n".join(lines),
            "RUNS": "\n".join(table),
            "FOR COMPARISON": comparison,
            "NOT COVERED": items(others + _NOT_COVERED),
        }
    )
    # All runs draw the same units, which `compose_epsilon` has checked.
    return units.in_words_of(runs[0][1], text)


def selection_statement(
    mechanism: DiceMechanism,
    sampling: Sampling,
    steps: int,
    delta: float,
    mean_trials: float,
    score_data: str,
    shape: float = 1.0,
    accountant: str = "rdp",
) -> str:
    """Returns a text that says what privacy the best of a random number of runs has.

    It says nothing of the search but its public arguments, so it may be shown with the model.

    Args:
        mechanism: As for `selection_epsilon`, like all others that are not named here.
        sampling: How the batches of every run are drawn.
        steps: Int >= 0, number of optimizer steps of one run, at most.
        delta: Float in (0, 1/N).
        mean_trials: Float from 1 to 1e6.
        score_data: `"public"` or `"held_out"`, as for `dice_tf.private_search`.
        shape: Float >= 0, or infinity.
        accountant: `"rdp"` or `"pld"`: whose epsilon is the guarantee.

    Returns:
        A string of several lines.

    Raises:
        AccountingError: If an argument is out of range, or scores are from private data.

    Example:

    >>> from dice_tf.mechanism import DiceMechanism
    >>> from dice_tf.sampling import PoissonSampling
    >>> statement = selection_statement(
    ...     DiceMechanism(l2_norm_clip=1.0, noise_multiplier=2.0, expected_batch_size=512),
    ...     PoissonSampling(num_examples=60_000, expected_batch_size=512), steps=1171,
    ...     delta=1e-5, mean_trials=10, score_data="public")
    >>> [line for line in statement.splitlines() if line.isupper()]
    ['GUARANTEE', 'SEARCH', 'PARAMETERS OF ONE TRIAL', 'HOW IT IS ACCOUNTED', 'NOT COVERED']

    Source: as `selection_epsilon`.
    """
    check_accountant(accountant)
    check_score_data(score_data)
    mean, shape = repeated_selection.check_law(mean_trials, shape)
    run = (mechanism, sampling, steps)
    epsilons = {
        name: repeated_selection.selection_epsilon(*run, delta, mean, shape, name)
        for name in ACCOUNTANTS
        if name == accountant or not math.isinf(shape)
    }
    one = guarantee(*run, delta, accountant)
    law = _LAWS.get(shape, f"truncated negative binomial of shape {shape:g}")
    subject = "The best model of the search, its hyperparameters and its score are, taken together,"
    lines = [
        *statement_text.guarantee(subject, epsilons, accountant, delta, one.neighbouring_relation),
        *statement_text.missing([run], _draws_are_secret([run])),
    ]
    rows = {
        "mean number of trials": f"{mean:g}",
        "law of that number": law,
        "epsilon of one trial": up(one.epsilon),
        "scores are from": score_data,
    }
    accounting = (
        "The number of trials was drawn before the first one, by a law that ignores the data, and "
        "is secret. Trials are independent: each draws hyperparameters by one and the same law, "
        "makes at most the steps of one trial with at least its noise, and draws batches of its "
        "own.",
        "Papernot and Steinke (ICLR 2022) for RDP, Koskela et al. (ICML 2024) for PLD.",
    )
    not_covered = (
        f"The data of the scores: {SCORE_DATA[score_data]}.",
        "The number of trials, how long the search took, and the table of its trials: they are "
        "for the person who trains. Whoever shows all trials owes the epsilon of all of them: "
        "`accounting.compose_epsilon`.",
        "Other searches and trainings on the same data, and a search that was begun anew or "
        "stopped because of its results: they compose.",
    )
    own = of_one_run.parameters(mechanism, sampling, one, None)
    own = "\n".join(line for line in own.splitlines() if "draws are secret" not in line)
    text = statement_text.sections(
        {
            "GUARANTEE": "\n".join(lines),
            "SEARCH": statement_text.table(rows),
            "PARAMETERS OF ONE TRIAL": own,
            "HOW IT IS ACCOUNTED": f"{items(accounting)}\n"
            + of_one_run.accounting(mechanism, sampling, steps),
            "NOT COVERED": items(not_covered + _NOT_COVERED),
        }
    )
    return units.in_words_of(sampling, text)


def check_score_data(score_data: str) -> None:
    """Refuses scores from data that the guarantee is about.

    Args:
        score_data: `"public"` or `"held_out"`.

    Raises:
        AccountingError: If it is anything else.
    """
    if score_data == "private":
        raise AccountingError(
            "A score from private data is a release of its own, which the theorem of private "
            'selection does not pay for. Received: score_data="private". Score on public data, or '
            'on rows that were taken out before training and that no sampler has ("held_out").'
        )
    if not isinstance(score_data, str) or score_data not in SCORE_DATA:
        raise AccountingError(
            f"Argument `score_data` must be one of {tuple(SCORE_DATA)}: what the scores are "
            "computed from decides what the guarantee covers, so there is no default. "
            f"Received: score_data={score_data!r}."
        )


def _draws_are_secret(runs):
    return not any(events.is_amplified(s) and s.seed is not None for _, s, _ in runs)
