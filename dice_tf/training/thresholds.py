# Copyright 2026 The dice_tf Authors.
# SPDX-License-Identifier: Apache-2.0
r"""Thresholds and noise that change from step to step: their state in an optimizer.

Thresholds of step t are those of the mechanism times factors, which are public: a schedule's, or
what released counts made of them. Two rules keep the proof of `docs/privacy.md`. Noise is
proportional to the thresholds of its step. And what is stored of residuals never exceeds
\(C_{2,t}\) of the step that releases it: errors are kept with the factors that they were formed
under, and multiplied by \(\min(1, c_t / c_{t-1})\) when they are read, whoever changed them.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import keras
import numpy as np
import tensorflow as tf

from dice_tf.errors import MechanismError
from dice_tf.ledger import provenance
from dice_tf.mechanism import AdaptiveClipping, adaptive, noise, per_layer, rounding
from dice_tf.mechanism.clipping import VariableGroups
from dice_tf.training import rebuilding
from dice_tf.training.run import private_optimizer

__all__ = ["clip_thresholds"]

# Less than 1 by more than the quotient and the product of a rescaling are rounded up.
_DOWN = 1.0 - 2.0**-21
# Of the noise on counts, apart from that on every variable: no variable has this number.
_OF_COUNTS = -1


class Moved(NamedTuple):
    """Thresholds and noise of one step.

    Attributes:
        factors: Float32 `[groups]`, thresholds over those of the mechanism.
        total: Float32 scalar, C1 of the whole over that of the mechanism.
        noise: Float32 scalar, noise over that of the mechanism.
    """

    factors: Any
    total: Any
    noise: Any


def clip_thresholds(model: keras.Model) -> dict[str, float]:
    """Returns the thresholds C1 that the next step of a model clips to. They are public.

    Args:
        model: Built Keras model compiled with a private optimizer.

    Returns:
        Dict from the name of each layer that is clipped by itself, as `PerLayerClipping` has it,
        to its threshold; its only key is `"all"` if there is one threshold for the whole gradient.

    Raises:
        PlainGradientsError: If the optimizer is not private.

    Example:

    >>> import dice_tf
    >>> model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
    >>> model.compile(dice_tf.DiceSGDOptimizer(
    ...     l2_norm_clip=0.5, noise_multiplier=1.0, expected_batch_size=8,
    ...     clipping="adaptive"), loss="mse")
    >>> clip_thresholds(model)
    {'all': 0.5}
    """
    optimizer = private_optimizer(model, "thresholds")
    mechanism = optimizer._mechanism
    groups, factors = mechanism.clip.groups(model), np.ones([1])
    if mechanism.moves and optimizer.built:
        if not rebuilding.knows(optimizer, model.trainable_variables):
            rebuilding.build_again(model)  # As the next step would.
        now: Any = current(optimizer, groups, model.trainable_variables)
        factors = now.factors.numpy()
    if groups is None:
        return {"all": float(mechanism.l2_norm_clip * factors[0])}
    each = mechanism.l2_norm_clip * np.array(groups.shares) * factors
    return dict(zip(per_layer.group_names(model), map(float, each), strict=True))


def current(
    optimizer: Any, groups: VariableGroups | None, variables: list[Any] | None
) -> Moved | None:
    """Returns the thresholds and the noise of the next step, `None` if they never change.

    Args:
        optimizer: A private optimizer that is built.
        groups: What `mechanism.clip.groups` returned for the model.
        variables: The model's trainable variables, those of `groups`.

    Raises:
        MechanismError: If layers have thresholds of their own, and `groups` is missing.
    """
    mechanism = optimizer._mechanism
    if not mechanism.moves:
        return None
    noise_factor, clip_factor = tf.ones([]), tf.ones([])
    if mechanism.schedule is not None:
        noise_factor, clip_factor = mechanism.schedule.factors_at(_position(optimizer))
    if not isinstance(mechanism.clip, AdaptiveClipping):
        number = 1 if groups is None else len(groups.shares)
        return Moved(tf.fill([number], clip_factor), clip_factor, clip_factor * noise_factor)
    state = tf.convert_to_tensor(optimizer._threshold_factors.value)
    if not mechanism.clip.per_layer:
        return Moved(state, state[0], state[0] * noise_factor)
    if groups is None or variables is None:
        raise MechanismError(
            "Thresholds per layer need the groups of the model's variables. Received: groups=None. "
            "Take steps by `fit` or `dice_tf.private_train_step`."
        )
    firsts = map(groups.of_variables.index, range(len(groups.shares)))
    slots = [optimizer._get_variable_index(variables[first]) for first in firsts]
    factors = tf.gather(state, slots)
    shares = tf.constant(groups.shares, tf.float32)
    total = rounding.global_norm([shares * factors])
    return Moved(factors, total, total * noise_factor)


def _position(optimizer):
    """Returns the number of steps before this one, as epsilon counts them."""
    # Not `iterations`, which anybody may assign.
    record = dict(zip(provenance.RECORD_FIELDS, tf.unstack(optimizer._sampling_record.value)))
    return record["steps"] + record["unfinished_steps"]


def rescaled(
    optimizer: Any,
    errors: list[Any],
    slots: list[int],
    now: Moved | None,
    groups: Any,
    variables: list[Any],
) -> list[Any]:
    r"""Returns errors times \(\min(1, c_t / c_{t-1})\), by their variables.

    Args:
        optimizer: A private optimizer that is built.
        errors: List of tensors: those of all variables in `slots`, delay by delay.
        slots: Numbers of variables in the optimizer.
        now: What `current` returned.
        groups: What `mechanism.clip.groups` returned.
        variables: The model's trainable variables.
    """
    if now is None or not errors:
        return errors
    kept = tf.convert_to_tensor(optimizer._private.error_factors.value)
    ratio = tf.math.divide_no_nan(_by_slot(optimizer, now.factors, groups, variables), kept)
    # Down, so that no rounding makes a residual longer than its threshold.
    ratio = tf.where(ratio < 1.0, _DOWN * ratio, tf.ones_like(ratio))
    if ratio.shape[0] == 1:
        return [error * ratio[0] for error in errors]
    return [error * ratio[slots[i % len(slots)]] for i, error in enumerate(errors)]


def _by_slot(optimizer, of_groups, groups, variables):
    """Returns factors of groups as the state has them: one, or one per variable.

    Those that were used: variables of one layer may have other ones in the state, after one of
    them was thawed.
    """
    clip = optimizer._mechanism.clip
    if not (isinstance(clip, AdaptiveClipping) and clip.per_layer):
        return of_groups[:1]
    found = tf.unstack(tf.convert_to_tensor(optimizer._threshold_factors.value))
    for variable, group in zip(variables, groups.of_variables, strict=True):
        found[optimizer._get_variable_index(variable)] = of_groups[group]
    return tf.stack(found)


def noisy_counts(optimizer: Any, counts: Any, groups: Any, key: Any, draw: Any) -> Any:
    """Returns counts with their noise, the same on every replica.

    Args:
        optimizer: A private optimizer with adaptive thresholds.
        counts: Float32 `[groups]`, over all replicas.
        groups: What `mechanism.clip.groups` returned.
        key: Int32 `[2]`, the noise key of the step.
        draw: Integer scalar tensor, its number.
    """
    stddev = adaptive.count_stddev(optimizer._mechanism, groups)
    drawn = noise.gaussian_noise(key, draw, {_OF_COUNTS: counts.shape}, stddev)
    return counts + drawn[_OF_COUNTS]


def updates(
    optimizer: Any, now: Moved | None, noisy: Any, groups: Any, variables: list[Any]
) -> list[tuple[Any, Any]]:
    """Returns pairs of a variable of the state and its value after this step.

    Args:
        optimizer: A private optimizer that is built.
        now: What `current` returned.
        noisy: What `noisy_counts` returned, or `None` if thresholds are not adaptive.
        groups: What `mechanism.clip.groups` returned.
        variables: The model's trainable variables.
    """
    found = []
    if now is not None and optimizer._private.error_factors is not None:
        used = _by_slot(optimizer, now.factors, groups, variables)
        found.append((optimizer._private.error_factors, used))
    if now is None or noisy is None:
        return found
    following = adaptive.next_factors(now.factors, noisy, optimizer._mechanism, groups)
    following = _by_slot(optimizer, following, groups, variables)
    return [*found, (optimizer._threshold_factors, following)]


def build(optimizer: Any, variables: list[Any]) -> None:
    """Creates the state, or takes over what is left of it when an optimizer is built again.

    Args:
        optimizer: A private optimizer within `build`.
        variables: Those that it is built for.
    """
    mechanism, private = optimizer._mechanism, optimizer._private
    if not mechanism.moves:
        return
    is_adaptive = isinstance(mechanism.clip, AdaptiveClipping)
    of_layers = is_adaptive and mechanism.clip.per_layer
    keys = [optimizer._var_key(v) for v in variables] if of_layers else [None]
    known = {}
    if getattr(optimizer, "_threshold_factors", None) is not None:
        old = optimizer._threshold_factors.numpy()
        known = dict(zip(optimizer._threshold_keys, old, strict=True))
    start: Any = np.array([known.get(key, 1.0) for key in keys], np.float32)
    if mechanism.error_norm_clip > 0:
        private.error_factors = keras.Variable(
            start, dtype="float32", trainable=False, aggregation="only_first_replica",
            name="error_factors",
        )  # fmt: skip
    if is_adaptive:
        optimizer._threshold_keys = keys
        initializer: Any = keras.initializers.Constant(start)
        optimizer._threshold_factors = optimizer.add_variable(
            shape=start.shape,
            initializer=initializer,
            dtype="float32",
            name="threshold_factors",
            aggregation="only_first_replica",
        )
