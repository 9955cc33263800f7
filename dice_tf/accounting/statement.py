# Copyright 2026 The dice_tf Authors.
# SPDX-License-Identifier: Apache-2.0
"""`privacy_statement`: what a run guarantees, in words that a data officer can check."""

from collections.abc import Mapping
import dataclasses
import functools
import math

from dice_tf.accounting import events, moving, statement_text, units
from dice_tf.accounting.attack import true_positive_rates
from dice_tf.accounting.epsilon import (
    ACCOUNTANTS,
    check_accountant,
    compute_epsilon,
    delta_up,
    guarantee,
    up,
)
from dice_tf.accounting.paper import NOT_A_GUARANTEE, paper_epsilon
from dice_tf.accounting.statement_text import items, wrap
from dice_tf.mechanism import DiceMechanism
from dice_tf.sampling import PoissonSampling, Sampling

__all__ = ["privacy_statement"]

# The share of people found, at 0.1 % false accusations, from which a guarantee says nothing.
_VACUOUS = 0.999

NOT_COVERED = (
    "Choices made by looking at several trainings on the same data (hyperparameter search, early "
    "stopping, picking the best run): each training has its own epsilon, and they compose.",
    "Losses, metrics and gradient norms of the training data that are displayed or logged: they "
    "are computed from the data without noise.",
    "The optimizer's error variables and the noise key: whoever holds them besides the model "
    "(a private, resumable checkpoint) is not covered by epsilon.",
    "Validation and test data, preprocessing fitted to the data (vocabularies, normalisation), "
    "and data that the model was pretrained on.",
    "Arithmetic and randomness: the proof is about real numbers and ideal Gaussian noise, while "
    "the noise is float32 from a counter-based generator (Threefry, 64 bits of key) that is not "
    "cryptographic.",
)


_GROUPS = (
    "Groups: for k examples of one person the guarantee is weaker. `group_size=k` states it.",
    "People with more examples than the group size.",
)


def privacy_statement(
    mechanism: DiceMechanism,
    sampling: Sampling,
    steps: int,
    delta: float,
    accountant: str = "rdp",
    neighbouring_relation: str | None = None,
    *,
    draws_are_secret: bool | None = None,
    group_size: int = 1,
    thresholds: Mapping[str, float] | None = None,
) -> str:
    """Returns a text that says what privacy a run has, and what it does not have.

    Every number comes from `guarantee`, `compute_epsilon` and `paper_epsilon`.

    Args:
        mechanism: `DiceMechanism`, for example `optimizer.mechanism`.
        sampling: `PoissonSampling`, `CyclicPoissonSampling` or `ShuffledEpochs`.
        steps: Int >= 0, number of optimizer steps.
        delta: Float in (0, 1/N).
        accountant: `"rdp"` or `"pld"`: whose epsilon is the guarantee. The other one's stands
            beside it.
        neighbouring_relation: As for `guarantee`.
        draws_are_secret: `None` if `sampling` drew all batches, `False` if some draws of the
            run came from the seed of another one.
        group_size: Int in [1, N]. Above 1, it is also said what holds for a person with up to
            so many examples, or that it is vacuous: an attacker who wrongly accuses 0.1 % might
            then find 99.9 %.

    Returns:
        A string of several lines: the guarantee, with the epsilon of the other accountant
        beside it, what an attacker can find at most, every parameter, a comparison with
        DP-SGD and with the paper's formula, and what is not covered.

    Raises:
        AccountingError: If the arguments are out of range or contradict each other.

    Example:

    >>> from dice_tf.mechanism import DiceMechanism
    >>> from dice_tf.sampling import CyclicPoissonSampling
    >>> statement = privacy_statement(
    ...     DiceMechanism(l2_norm_clip=1.0, noise_multiplier=2.0, expected_batch_size=512),
    ...     CyclicPoissonSampling(num_examples=60_000, expected_batch_size=512),
    ...     steps=1171, delta=1e-5)
    >>> [line for line in statement.splitlines() if line.isupper()]
    ['GUARANTEE', 'PARAMETERS', 'HOW IT IS ACCOUNTED', 'FOR COMPARISON', 'NOT COVERED']
    """
    check_accountant(accountant)
    by_accountant = [
        guarantee(mechanism, sampling, steps, delta, name, neighbouring_relation)
        for name in ACCOUNTANTS
    ]
    chosen = by_accountant[ACCOUNTANTS.index(accountant)]
    if not events.is_amplified(sampling):
        draws_are_secret = None  # Nothing is claimed of them.
    elif draws_are_secret is None:
        draws_are_secret = sampling.seed is None
    group_size = events.check_group_size(group_size, sampling.num_examples)
    finds = _attacker(mechanism, sampling, chosen, group_size)
    not_covered = units.not_covered(sampling, (*NOT_COVERED, _GROUPS[group_size > 1]))
    text = statement_text.sections(
        {
            "GUARANTEE": _guarantee_text(
                mechanism, sampling, chosen, by_accountant, draws_are_secret, finds
            ),
            "PARAMETERS": parameters(mechanism, sampling, chosen, draws_are_secret, thresholds),
            "HOW IT IS ACCOUNTED": accounting(mechanism, sampling, steps),
            "FOR COMPARISON": _comparison(mechanism, sampling, by_accountant),
            "NOT COVERED": items(not_covered),
        }
    )
    return units.in_words_of(sampling, text)


def _percent(rate):
    # Up: nothing here is said to be smaller than it is.
    return f"{min(100.0, math.ceil(rate * 1000 - 1e-9) / 10):g} %"


def _attacker(mechanism, sampling, chosen, group_size):
    """Returns paragraphs on what an attacker finds: one example, and a group of them."""
    run, relation = (mechanism, sampling, chosen.steps), chosen.neighbouring_relation
    rates = functools.partial(true_positive_rates, *run, neighbouring_relation=relation)
    listed = "{}, {} or {}".format(*map(_percent, rates()))
    notes = [
        "An attacker who sees all of these models, and wrongly accuses 0.1 %, 1 % or 10 % of the "
        f"examples that were not used, rightly accuses at most {listed} of those that were."
    ]
    if group_size > 1:
        group = guarantee(*run, chosen.delta, chosen.accountant, relation, group_size=group_size)
        found = rates(group_size=group_size)
        listed = "{}, {} or {}".format(*map(_percent, found))
        says = "the guarantee is VACUOUS: " if found[0] >= _VACUOUS else ""
        notes.append(
            f"For a person with up to {group_size} examples {says}epsilon = {up(group.epsilon)} "
            f"({group.accountant.upper()} accountant) at the same delta, and the attacker rightly "
            f"accuses at most {listed} of those people."
        )
    return notes


def _guarantee_text(mechanism, sampling, chosen, by_accountant, draws_are_secret, finds):
    subject = f"The model after {chosen.steps} steps, with all models on the way, is"
    epsilons = {result.accountant: result.epsilon for result in by_accountant}
    relation = chosen.neighbouring_relation
    says = statement_text.guarantee(subject, epsilons, chosen.accountant, chosen.delta, relation)
    run = mechanism, sampling, chosen.steps
    lacks = statement_text.missing([run], draws_are_secret is not False)
    return "\n".join([*says, *map(wrap, finds), *lacks])


def parameters(mechanism, sampling, result, draws_are_secret, thresholds=None):
    """Returns the table of what epsilon depends on."""
    first = " at first" if mechanism.moves else ""
    rows = {
        f"number of {units.word(sampling)}s N": sampling.num_examples,
        "expected batch size B": mechanism.expected_batch_size,
        "sampling": type(sampling).__name__,
        "groups": sampling.num_groups,
        "sampling probability": f"{sampling.sampling_probability:.6g}",
        "steps T": result.steps,
        "delta": delta_up(result.delta),
        "neighbouring relation": result.neighbouring_relation,
        "l2_norm_clip C1": f"{mechanism.l2_norm_clip:g}{first}",
        "error_norm_clip C2": f"{mechanism.error_norm_clip:g}{first}",
        **moving.parameters(mechanism, thresholds),
        "bound_residuals": mechanism.bound_residuals,
        "feedback_steps": mechanism.feedback_steps,
        "clipping": mechanism.clip.name,
        "num_microbatches": mechanism.num_microbatches or "none: each example is clipped",
        **units.parameters(mechanism, sampling),
        "noise_multiplier": f"{mechanism.noise_multiplier:g}",
        "noise on the mean (stddev)": f"{mechanism.noise_stddev:.6g}{first}",
        "noise key is secret": mechanism.noise_is_secret,
        "draws are secret": "not needed" if draws_are_secret is None else draws_are_secret,
        "accountant": result.accountant.upper(),
    }
    return statement_text.table(rows)


def accounting(mechanism, sampling, steps):
    """Returns the list of how draws, feedback and clipping are accounted."""
    notes = [sampling.description(steps)]
    if mechanism.clip.statement() is not None:
        notes.append(mechanism.clip.statement())
    notes += moving.notes(mechanism)
    if mechanism.error_norm_clip == 0:
        notes.append("There is no error feedback: this is DP-SGD.")
    elif events.is_unbounded(mechanism):
        notes.append(
            "Residuals are not bounded per example (Alg. 1 to the letter): one example may shift "
            f"every later step by 2 C2 = {2 * mechanism.error_norm_clip:g}, whether it is drawn or "
            "not. That part is counted at every step without amplification."
        )
    elif sampling.separates_entries(mechanism.feedback_steps):
        notes.append(
            "An example is back only after its residual has been fed back, so its influence on "
            f"{mechanism.feedback_steps + 1} releases adds up in quadrature: sensitivity "
            f"sqrt(C1^2 + C2^2/{mechanism.feedback_steps})."
        )
    else:
        notes.append(
            "An example may be drawn again while its residual is fed back: sensitivity C1 + C2."
        )
    notes += units.notes(mechanism, sampling)
    if mechanism.num_microbatches is not None:
        notes.append(
            f"Means of {mechanism.microbatch_size} examples are clipped, not single examples. One "
            "example can turn a clipped mean into any other: the sensitivity is doubled."
        )
        if sampling.own_coins:
            notes.append(
                "Drawing one more example also moves another one to a different microbatch: it is "
                "doubled again."
            )
    return items(notes)


def _comparison(mechanism, sampling, by_accountant):
    c1, c2 = mechanism.l2_norm_clip, mechanism.error_norm_clip
    per_layer = mechanism.clip.name == "per_layer"
    steps, delta = by_accountant[0].steps, by_accountant[0].delta
    exchange = by_accountant[0].neighbouring_relation == events.REPLACE_ONE
    relation = events.REPLACE_ONE if exchange else None
    rows = [("this run", *(up(result.epsilon) for result in by_accountant))]
    plain = plain_sampling(sampling)
    baselines = [(c1, "C1")] if c2 else []
    if c2 and not events.is_unbounded(mechanism):
        baselines.insert(0, (c1 + c2, "C1 + C2"))
    for clip, what in baselines:
        baseline = dataclasses.replace(
            mechanism,
            l2_norm_clip=clip,
            error_norm_clip=0.0,
            bound_residuals=True,
            clipping="flat",
            schedule=None,
            feedback_steps=1,
            noise_multiplier=mechanism.noise_stddev_of_sum / clip,
        )
        epsilons = (
            compute_epsilon(baseline, plain, steps, delta, accountant, relation)
            for accountant in ACCOUNTANTS
        )
        name = f"DP-SGD clipping to {what} = {clip:g}"
        rows.append((name, *(up(epsilon) for epsilon in epsilons)))
    lines = [f"  {'epsilon':<52}{'RDP':>12}{'PLD':>12}"]
    lines += [f"  {name:<52}{renyi:>12}{loss:>12}" for name, renyi, loss in rows]
    if len(rows) > 1:
        order = "as here" if plain is sampling else "by Poisson sampling"
        note = f"DP-SGD means error_norm_clip=0, with the same noise and batch size, drawn {order}."
        if len(baselines) > 1:
            note += " Clipping to C1 + C2 discards as little of each gradient as this run does"
            # A layer may be longer than its share while the whole is short.
            note += ", if layers are long in proportion to their shares." if per_layer else "."
        lines.append(wrap(note))
    return "\n".join(lines + [_paper_text(mechanism, sampling, steps, delta)])


def plain_sampling(sampling):
    """Returns the sampling of the DP-SGD that a run is compared with, of the same neighbours."""
    if not sampling.own_coins:
        return sampling
    return PoissonSampling(sampling.num_examples, sampling.expected_batch_size)


def _paper_text(mechanism, sampling, steps, delta):
    if mechanism.moves:
        return wrap("The paper's formula is about noise and thresholds that never change.")
    if steps == 0 or mechanism.noise_multiplier == 0:
        return wrap("The paper's formula says nothing about a run without steps or noise.")
    # The paper's C is on the scale of the sum; its error is clipped to C/B.
    scale = mechanism.divisor if events.is_unbounded(mechanism) else 1
    arguments = (
        mechanism.noise_stddev,
        delta,
        sampling.num_examples,
        steps,
        mechanism.l2_norm_clip,
        mechanism.error_norm_clip * scale,
    )
    return wrap(
        f"Thm 3.2 of Zhang et al. (2024) would claim epsilon = {paper_epsilon(*arguments):.3f}, "
        f"its own Renyi sum {paper_epsilon(*arguments, form='renyi'):.3f} ({NOT_A_GUARANTEE})."
    )
