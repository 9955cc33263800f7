# Copyright 2026 The dice_tf Authors.
# SPDX-License-Identifier: Apache-2.0
"""The rules of clipping that a mechanism takes, by name or as an object.

A rule that is not in this list is refused, even if it is derived from `Clip`: epsilon is
computed from \\(C_1\\) and \\(C_2\\), so a rule has to have a proof that it keeps them. For the
same reason a class derived from one of the list is refused.
"""

from collections.abc import Mapping
from typing import Any

from dice_tf.errors import MechanismError
from dice_tf.mechanism.adaptive import AdaptiveClipping
from dice_tf.mechanism.clipping import Clip
from dice_tf.mechanism.per_layer import PerLayerClipping
from dice_tf.mechanism.whole_gradient import AutomaticClipping, FlatClipping

RULES: dict[str, Any] = {
    rule.name: rule
    for rule in (FlatClipping, AutomaticClipping, PerLayerClipping, AdaptiveClipping)
}


def rule_of(clipping: Any) -> Clip:
    """Returns the rule that a value of the argument `clipping` names.

    Args:
        clipping: A name, a rule, or what `config_of` returned.

    Returns:
        An object of one of the classes in `RULES`.

    Raises:
        MechanismError: If it is none of them.

    Example:

    >>> rule_of("flat")
    FlatClipping()
    """
    if isinstance(clipping, str):
        if clipping in RULES:
            return RULES[clipping]()
    # Exact types: a derived class may return other weights.
    elif type(clipping) in RULES.values():
        return clipping
    if isinstance(clipping, Mapping) and clipping.get("rule") in RULES:
        return RULES[clipping["rule"]](**clipping.get("arguments", {}))
    raise MechanismError(
        f"Argument `clipping` must be one of {tuple(RULES)} or an object of "
        f"{', '.join(rule.__name__ for rule in RULES.values())}, not of a class of your own: its "
        "bound has no proof, and epsilon rests on it. "
        f"Received: clipping={clipping!r} (of type {type(clipping).__name__})."
    )


def canonical(clipping: Any) -> Any:
    """Returns the name of a rule with its defaults, or the rule, so that equal ones are equal.

    Args:
        clipping: What `rule_of` takes.

    Raises:
        MechanismError: If it names no rule.
    """
    rule = rule_of(clipping)
    return rule.name if rule == RULES[rule.name]() else rule


def config_of(clipping: Any) -> str | dict[str, Any]:
    """Returns a value of `clipping` as JSON has it, for files; the inverse of `rule_of`.

    Args:
        clipping: What `canonical` returned.

    Example:

    >>> config_of(PerLayerClipping({"dense": 2.0, "output": 1.0}))
    {'rule': 'per_layer', 'arguments': {'proportions': {'dense': 2.0, 'output': 1.0}}}
    """
    if isinstance(clipping, str):
        return clipping
    return {"rule": clipping.name, "arguments": clipping.get_config()}
