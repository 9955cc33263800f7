# Copyright 2026 The dice_tf Authors.
# SPDX-License-Identifier: Apache-2.0
"""Numbers that arguments may be, and the errors for those that they may not."""

import math
import numbers
from typing import Any

from dice_tf.errors import DicePrivacyError, MechanismError


def check_number(
    name: str,
    value: Any,
    *,
    minimum: float = 0.0,
    exclusive: bool = True,
    error: type[DicePrivacyError] = MechanismError,
) -> float:
    """Returns `value` as a float if it is a finite real number in range.

    Args:
        name: Name of the argument, for the error message.
        value: The value received.
        minimum: Lower bound.
        exclusive: Whether `minimum` itself is refused.
        error: Exception class to raise.

    Returns:
        `float(value)`.

    Raises:
        DicePrivacyError: (as `error`) if `value` is not a finite real number, or is
            below the bound.
    """
    bound = f"{'greater than' if exclusive else 'at least'} {minimum:g}"
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise error(
            f"Argument `{name}` must be a real number {bound}. "
            f"Received: {name}={value!r} (of type {type(value).__name__})."
        )
    number = float(value)
    below = number <= minimum if exclusive else number < minimum
    if not math.isfinite(number) or below:
        raise error(f"Argument `{name}` must be finite and {bound}. Received: {name}={value!r}.")
    return number


def check_integer(
    name: str,
    value: Any,
    *,
    minimum: int = 1,
    error: type[DicePrivacyError] = MechanismError,
) -> int:
    """Returns `value` as an int if it is a whole number that is at least `minimum`.

    Args:
        name: Name of the argument, for the error message.
        value: The value received.
        minimum: Smallest allowed value.
        error: Exception class to raise.

    Returns:
        `int(value)`.

    Raises:
        DicePrivacyError: (as `error`) if `value` is not a whole number in range.
    """
    if isinstance(value, bool) or not isinstance(value, numbers.Integral) or value < minimum:
        raise error(
            f"Argument `{name}` must be a whole number that is at least {minimum}. "
            f"Received: {name}={value!r} (of type {type(value).__name__})."
        )
    return int(value)
