# Copyright 2026 The dice_tf Authors.
# SPDX-License-Identifier: Apache-2.0
"""Which arguments and attributes a private optimizer refuses, and why."""

import math

from dice_tf.checks.arguments import check_integer
from dice_tf.errors import GradientEngineError, MechanismError, ModelError, OptimizerArgumentError
from dice_tf.mechanism import PRIVACY_ARGUMENTS

GRADIENT_ENGINES = ("auto", "layerwise", "vectorized")

_REFUSED_KERAS_ARGUMENTS = {
    "clipnorm": "it would clip the noised mean, variable by variable",
    "clipvalue": "it would clip the noised mean, coordinate by coordinate",
    "global_clipnorm": "it would clip the noised mean of the batch, not each example",
    "loss_scale_factor": "gradients are clipped before Keras could unscale them",
    "gradient_accumulation_steps": "it would add noise at every accumulated batch; use a larger "
    "`expected_batch_size` with `chunk_size` to bound memory",
}


def check_none_positional(optimizer_class, learning_rate, positional):
    """Refuses positional arguments after the learning rate.

    Args:
        optimizer_class: Class of the optimizer, for the error message.
        learning_rate: The first argument.
        positional: Tuple of those that came after it without a name.

    Raises:
        OptimizerArgumentError: If there are any.
    """
    if positional:
        raise OptimizerArgumentError(
            f"All arguments of {optimizer_class.__name__} but `learning_rate` are keyword-only, so "
            "that no number is taken for another. Received: "
            f"{', '.join(map(repr, (learning_rate, *positional)))}. Write l2_norm_clip=..., "
            "noise_multiplier=..., expected_batch_size=..."
        )


def with_plan(plan, given):
    """Returns privacy arguments of an optimizer together with those that a plan decides.

    Args:
        plan: `PrivacyPlan`, or `None` for arguments that say it all.
        given: Dict of `PRIVACY_ARGUMENTS` as the optimizer received them; `None` is not given.

    Returns:
        Dict of arguments for `DiceMechanism`.

    Raises:
        MechanismError: If an argument contradicts the plan, or the plan is none.
    """
    given = {name: value for name, value in given.items() if value is not None}
    if plan is None:
        required = ("noise_multiplier", "expected_batch_size")
        return {**dict.fromkeys(required), **given}
    # Imported late: a plan makes a callback, which knows optimizers.
    from dice_tf.plan import PrivacyPlan

    if not isinstance(plan, PrivacyPlan):
        raise MechanismError(
            "Argument `plan` must be a `dice_tf.PrivacyPlan`. Received: "
            f"plan={plan!r} (of type {type(plan).__name__})."
        )
    mechanism = plan.mechanism(given.get("l2_norm_clip"), given.get("clipping"))
    for name, value in given.items():
        planned = getattr(mechanism, name)
        if not same_value(value, planned):
            raise MechanismError(
                f"Argument `{name}` contradicts the plan, which decides it. Received: "
                f"{name}={value!r} (plan: {planned!r}). Leave it out, or make a plan that has it. "
                "What no plan has goes with arguments one by one, without `plan`."
            )
    return {name: getattr(mechanism, name) for name in PRIVACY_ARGUMENTS}


def same_value(value: object, other: object) -> bool:
    """Returns whether two values of a privacy argument are the same, up to rounding."""
    if isinstance(value, float) and isinstance(other, float):
        return math.isclose(value, other, rel_tol=1e-9)
    return value == other


def check_not_fixed(optimizer_class, name, value):
    """Refuses an attribute that was decided when the optimizer was made.

    Args:
        optimizer_class: Class of the optimizer, for the error message.
        name: Name of the attribute.
        value: What it is assigned.

    Raises:
        OptimizerArgumentError: If it is a privacy parameter or the seed.
    """
    if name in PRIVACY_ARGUMENTS or name == "noise_seed":
        raise OptimizerArgumentError(
            f"Privacy parameters of {optimizer_class.__name__} are fixed when it is made. "
            f"Received: {name}={value!r}. Compile the model with a new optimizer, and "
            "compose both trainings by `accounting.compose_epsilon`."
        )


def check_keras_argument(name, value):
    """Refuses what Keras would do to gradients that are clipped and noised already.

    Args:
        name: Name of an argument or attribute of Keras' optimizers.
        value: Its value.

    Raises:
        OptimizerArgumentError: If it is refused, and not `None`.
    """
    if name in _REFUSED_KERAS_ARGUMENTS and value is not None:
        raise OptimizerArgumentError(
            f"Argument `{name}` cannot be used for private training: "
            f"{_REFUSED_KERAS_ARGUMENTS[name]}. Received: {name}={value!r}. Clipping is set by "
            "`l2_norm_clip`."
        )


def check_noise_bias(mechanism, keras_arguments, rescale_to_unit_norm):
    """Refuses to subtract a variance of noise that changes.

    Args:
        mechanism: The `DiceMechanism`.
        keras_arguments: Dict of arguments of the update rule.
        rescale_to_unit_norm: Whether the rule sees directions over the threshold of their step.

    Raises:
        OptimizerArgumentError: If it would.
    """
    schedule = mechanism.schedule
    steady = rescale_to_unit_norm and (schedule is None or set(schedule.noise_factors) == {1.0})
    if mechanism.moves and keras_arguments.get("correct_noise_bias") and not steady:
        raise OptimizerArgumentError(
            "A second moment over steps of several noises has no one variance to subtract. "
            f"Received: correct_noise_bias=True with clipping={mechanism.clipping!r}, "
            f"schedule={schedule!r}. Pass `rescale_to_unit_norm=True`, under which noise follows "
            "no threshold, without `noise_factors`; or leave the correction out."
        )


def check_variables(variables):
    """Refuses variables that no update rule changes.

    Args:
        variables: Trainable variables of a model.

    Raises:
        ModelError: If the gradient of one is not a gradient but its new value.
    """
    for variable in variables:
        if getattr(variable, "overwrite_with_gradient", False):
            raise ModelError(
                f"Variable '{variable.path}' is assigned what Keras passes for its gradient "
                "(overwrite_with_gradient=True, as in layers quantized to float8), a statistic "
                "of the batch that clipping and noise have no meaning for. Train the layer "
                "without quantization, or freeze it."
            )


def check_engine(gradient_engine, mechanism, chunk_size):
    """Checks how gradients are to be computed.

    Args:
        gradient_engine: One of `GRADIENT_ENGINES`.
        mechanism: The `DiceMechanism`.
        chunk_size: Int, `"auto"`, or `None` for no chunks.

    Raises:
        GradientEngineError: If a value is unknown, or cuts a unit in two.
    """
    if gradient_engine not in GRADIENT_ENGINES:
        raise GradientEngineError(
            f"Argument `gradient_engine` must be one of {GRADIENT_ENGINES}. "
            f"Received: gradient_engine={gradient_engine!r}."
        )
    if isinstance(chunk_size, str) and chunk_size != "auto":
        raise GradientEngineError(
            "Argument `chunk_size` must be an integer, 'auto' or None. Received: "
            f"chunk_size={chunk_size!r}."
        )
    if chunk_size not in (None, "auto"):
        check_integer("chunk_size", chunk_size, error=GradientEngineError)
        if chunk_size % mechanism.rows_clipped_together:
            raise GradientEngineError(
                "Argument `chunk_size` counts rows, and must be a multiple of the "
                f"{mechanism.rows_clipped_together} rows that are clipped together. Received: "
                f"chunk_size={chunk_size}."
            )
