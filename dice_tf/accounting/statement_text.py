# Copyright 2026 The dice_tf Authors.
# SPDX-License-Identifier: Apache-2.0
"""What statements of one run and of several are written with."""

import textwrap

from dice_tf.accounting.epsilon import delta_up, up
from dice_tf.accounting.events import NEIGHBOURING_RELATIONS

_WIDTH = 88


def wrap(text, first="  "):
    """Returns a paragraph, indented."""
    return textwrap.fill(text, _WIDTH, initial_indent=first, subsequent_indent="  ")


def items(texts):
    """Returns a list with one paragraph for each text."""
    return "\n".join(wrap(text, "- ") for text in texts)


def table(rows):
    """Returns one line for each name and its value."""
    return "\n".join(f"  {name:<28}{value}" for name, value in rows.items())


def sections(texts):
    """Returns a statement, from a dictionary of texts by their titles."""
    return "\n\n".join(f"{title}\n{text}" for title, text in texts.items()) + "\n"


def guarantee(subject, epsilons, accountant, delta, relation):
    """Returns what is private, how much, and between which data sets, in a list of paragraphs.

    Args:
        subject: What is private, with its verb.
        epsilons: Dictionary of epsilon by accountant.
        accountant: The one that was chosen.
        delta: Float.
        relation: Key of `NEIGHBOURING_RELATIONS`.
    """
    claim = wrap(
        f"{subject} (epsilon, delta)-differentially private with "
        f"epsilon = {up(epsilons[accountant])} ({accountant.upper()} accountant) and "
        f"delta = {delta_up(delta)}. Two data sets that cannot be told apart: "
        f"{NEIGHBOURING_RELATIONS[relation]} ({relation})."
    )
    # All hold. Which one a run goes by is decided before it, not by the result.
    lines = [
        f"  epsilon by the {name.upper()} accountant: {up(epsilon)}"
        + (" (for information: it holds, too)" if name != accountant else "")
        for name, epsilon in epsilons.items()
    ]
    return [claim, *lines]


def missing(runs, draws_are_secret):
    """Yields what the guarantee of runs does not hold without, if they have it not."""
    where = " in a run" if len(runs) > 1 else ""
    if any(mechanism.noise_multiplier == 0 and steps for mechanism, _, steps in runs):
        yield wrap(f"No noise is added{where}: there is NO privacy.")
    if not all(mechanism.noise_is_secret for mechanism, _, _ in runs):
        yield wrap(
            f"The noise{where} was drawn from a seed that was set in the program: it is NOT "
            "secret. The guarantee holds only towards readers who cannot learn or guess the seed."
        )
    if not draws_are_secret:
        yield wrap(
            f"Draws{where} came from a seed that was set in the program: they are NOT secret. The "
            "guarantee holds only towards readers who cannot tell from the seed at which steps an "
            "example was used."
        )
