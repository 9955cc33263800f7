# Copyright 2026 The dice_tf Authors.
# SPDX-License-Identifier: Apache-2.0
"""The private counterparts of Keras' optimizer classes."""

import functools
import inspect
from typing import Any

import keras

from dice_tf.errors import OptimizerArgumentError
from dice_tf.training.bias_corrected_adam import NoiseBiasCorrection
from dice_tf.training.private_update import PrivateUpdate

__all__ = ["DiceAdamOptimizer", "DiceSGDOptimizer", "make_dice_optimizer_class"]

_WRAPPERS = {
    "LossScaleOptimizer": "it skips steps depending on the data, which would tell about them. Use "
    "the class of the optimizer to wrap, in float32 or under the dtype policy 'mixed_bfloat16'",
    "MultiOptimizer": "it hands gradients to other optimizers, which add them up over replicas "
    "once more. Use one class for all variables",
}
# Where Keras takes gradients in or adds them up; a private step has a part of its own there.
_TAKEN_BY_PRIVATE_STEPS = ("apply", "apply_gradients", "_backend_apply_gradients",
                           "_all_reduce_sum_gradients")  # fmt: skip


@functools.cache
def make_dice_optimizer_class(keras_optimizer_class: Any) -> Any:
    r"""Returns the private counterpart of a Keras optimizer class.

    \[v^t = \tfrac1B\sum_i h_i + e^t, \qquad x^{t+1} = \mathrm{Rule}(x^t, v^t + w^t)\]

    All that the rule keeps (moments, averages) comes from the noised direction; the error
    comes from the un-noised one. Files that hold an optimizer of a class of
    `keras.optimizers` load after `import dice_tf`; for a class of your own call this first.

    Args:
        keras_optimizer_class: Class derived from `keras.optimizers.Optimizer`, such as
            `keras.optimizers.AdamW`.

    Returns:
        A class, the same one at every call, named `Dice<Name>Optimizer`. It takes the
        arguments of `DiceSGDOptimizer` and every keyword of the Keras class.

    Raises:
        OptimizerArgumentError: If it is not such a class, or does more with gradients than
            an update rule: it may then not be post-processing of what was released.

    Example:

    >>> DiceAdamWOptimizer = make_dice_optimizer_class(keras.optimizers.AdamW)
    >>> optimizer = DiceAdamWOptimizer(
    ...     learning_rate=1e-3, weight_decay=0.01, l2_norm_clip=1.0, noise_multiplier=1.1,
    ...     expected_batch_size=64)
    >>> isinstance(optimizer, keras.optimizers.AdamW), type(optimizer).__name__
    (True, 'DiceAdamWOptimizer')
    >>> make_dice_optimizer_class(keras.optimizers.SGD) is DiceSGDOptimizer
    True

    Source: Zhang et al., ICLR 2024, Alg. 1 and, for Adam, its appendix.
    """
    refusal = _refusal(keras_optimizer_class)
    if refusal is not None:
        raise OptimizerArgumentError(
            f"There is no private optimizer class for this argument: {refusal}. "
            f"Received: keras_optimizer_class={keras_optimizer_class!r}."
        )
    explicit = {
        keras.optimizers.SGD: DiceSGDOptimizer,
        keras.optimizers.Adam: DiceAdamOptimizer,
    }
    if keras_optimizer_class in explicit:
        return explicit[keras_optimizer_class]
    name = keras_optimizer_class.__name__
    members = {
        "__module__": __name__,
        "__doc__": f"Private `{name}` with error feedback; see `make_dice_optimizer_class`.",
    }
    bases = (PrivateUpdate, keras_optimizer_class)
    if keras_optimizer_class.update_step is keras.optimizers.Adam.update_step:
        bases = (PrivateUpdate, NoiseBiasCorrection, keras_optimizer_class)
    private_class = type(f"Dice{name}Optimizer", bases, members)
    # Two classes of one name must not be taken for each other when a file is loaded.
    stock = getattr(keras.optimizers, name, None) is keras_optimizer_class
    package = "dice_tf" if stock else f"dice_tf.{keras_optimizer_class.__module__}"
    return keras.saving.register_keras_serializable(package)(private_class)


def _refusal(candidate):
    """Returns why `candidate` has no private counterpart, or `None`."""
    base = keras.optimizers.Optimizer
    if not (inspect.isclass(candidate) and issubclass(candidate, base)):
        return (
            "it is not a class derived from `keras.optimizers.Optimizer` of Keras 3; an instance, "
            "a name or a class of tf_keras will not do"
        )
    if issubclass(candidate, PrivateUpdate):
        return "it is private already"
    for wrapper, reason in _WRAPPERS.items():
        if issubclass(candidate, getattr(keras.optimizers, wrapper, ())):
            return reason
    if candidate.update_step is base.update_step:
        return "it has no update rule, `update_step`"
    different = lambda name: getattr(candidate, name, None) is not getattr(base, name, None)
    overridden = [name for name in _TAKEN_BY_PRIVATE_STEPS if different(name)]
    if overridden:
        return (
            f"it overrides {', '.join(overridden)}, through which gradients come in. Express the "
            "rule in `update_step`, which sees one noised direction per variable"
        )
    return None


@keras.saving.register_keras_serializable(package="dice_tf")
class DiceSGDOptimizer(PrivateUpdate, keras.optimizers.SGD):
    r"""Differentially private SGD with error feedback.

    One step, with \(h_i = \mathrm{clip}(g_i, C_1)\) and \(r_i = \mathrm{clip}(g_i - h_i, C_2)\):

    \[v^t = \tfrac1B\sum_i h_i + e^t, \qquad e^{t+1} = \tfrac1B\sum_i r_i, \qquad
      x^{t+1} = \mathrm{SGD}(x^t, v^t + w^t),\quad w^t \sim N(0, (z C_1 / B)^2 I).\]

    With `bound_residuals=False`, Alg. 1 of the paper to the letter:
    \(v^t = \frac1B\sum_i h_i + \mathrm{clip}(e^t, C_2)\) and
    \(e^{t+1} = e^t + \frac1B\sum_i g_i - v^t\). Its privacy cost is far higher, and is
    reported as such.

    Args:
        learning_rate: Float, schedule or callable, as in Keras. Defaults to Keras' 0.01.
        l2_norm_clip: Float >= 1e-12, \(C_1\): threshold of a per-example gradient's norm over
            all trainable variables. To be left out with `clipping="automatic"`.
        noise_multiplier: Float >= 0, \(z\): noise standard deviation on the sum of clipped
            gradients, divided by `l2_norm_clip`. From
            `accounting.calibrate_noise_multiplier`. 0 is not private and warns.
        expected_batch_size: Int, \(B\): the public divisor of all sums.
        error_norm_clip: Float >= 0, \(C_2\): threshold of a residual. Defaults to
            `l2_norm_clip`; 0 is DP-SGD (no error feedback).
        bound_residuals: Whether residuals are clipped per example (default), or the
            error when it is fed back.
        clipping: `"flat"`: one threshold for the whole gradient. `"automatic"`: each gradient
            is divided by its norm, so that there is no threshold to choose. `"per_layer"` or
            a `PerLayerClipping`: every layer has its share of both thresholds, at the same
            epsilon. `"adaptive"` or an `AdaptiveClipping`: thresholds begin at these and follow
            a quantile of norms. See `docs/error_feedback.md` and `docs/adaptive_clipping.md`.
        feedback_steps: Int, \(s\): residuals are fed back in equal parts at the next s steps,
            \(v^t = \frac1B\sum_i h_i + \frac1s\sum_{k=1}^s e^{t-k+1}\). Pays with
            `CyclicPoissonSampling(num_groups=s + 1)`; takes s variables per trainable variable.
        num_microbatches: Int or `None`: clip mean gradients of this many microbatches
            instead of per-example gradients, as in TF-Privacy. Multiplies the sensitivity by 4
            with Poisson sampling, by 2 with shuffled epochs.
        rows_per_unit: Int >= 1 or `None` (1): so many consecutive rows of a batch are one unit,
            whose mean gradient is clipped, and \(B\) counts units: `views` of
            `sampling.dataset` times `rows_per_owner` of a sampling of owners. `fit` refuses data
            with another number. See `docs/units.md`.
        schedule: `PiecewiseSchedule` of noise and thresholds by steps, or `None`.
        plan: `PrivacyPlan`, which decides all of the above but `l2_norm_clip` and `clipping`.
        chunk_size: Int, `"auto"` or `None`: at most this many rows' gradients are computed at
            once, a multiple of `rows_per_unit`. `"auto"` takes all rows if an estimate from
            shapes says that they fit into 4 GiB, else as many as do, and says so; `None` always
            takes all. Bounds memory; changes nothing else.
        gradient_engine: `"layerwise"`: closed forms, layer by layer. `"vectorized"`: the whole
            model under `tf.vectorized_map`, the reference, slow. `"auto"`: layerwise.
        self_check: Whether `fit` compares the gradients of a few examples with their gradients
            alone, once per compiled model, before the first step.
        rescale_to_unit_norm: Whether the noised direction is divided by \(C_1\) before the
            update rule sees it. The best learning rate then hardly depends on \(C_1\).
        save_errors: Whether files hold what a killed run needs to go on bit for bit: the error,
            the noise key and the position of the sampler. Such files are as private as the
            data; see `docs/saving.md`.
        noise_seed: Int or `None`: fixes the noise for reproducible tests. Whoever knows the
            seed can remove the noise, so leave it out for real data.
        **keras_arguments: Of `keras.optimizers.SGD`: `momentum`, `nesterov`,
            `weight_decay`, `use_ema`, `name`, ...

    Raises:
        MechanismError: If a privacy parameter is out of range.
        OptimizerArgumentError: If a Keras argument contradicts per-example clipping.

    Example:

    >>> optimizer = DiceSGDOptimizer(
    ...     learning_rate=0.5, momentum=0.9, l2_norm_clip=1.0, noise_multiplier=1.1,
    ...     expected_batch_size=64)
    >>> optimizer.mechanism.noise_stddev
    0.0171875

    Source: Zhang et al., "Differentially Private SGD Without Clipping Bias: An
    Error-Feedback Approach", ICLR 2024, Alg. 1.
    """


@keras.saving.register_keras_serializable(package="dice_tf")
class DiceAdamOptimizer(PrivateUpdate, NoiseBiasCorrection, keras.optimizers.Adam):
    r"""Differentially private Adam with error feedback.

    \[x^{t+1} = \mathrm{Adam}(x^t, v^t + w^t)\]

    with \(v\), \(e\) and \(w\) of `DiceSGDOptimizer`. Both moments are of the noised
    direction \(v + w\), so they cost no privacy; the error \(e\) is from the un-noised one.

    With `correct_noise_bias=True` (DP-AdamBC) the variance of the noise is subtracted from the
    second moment, which otherwise is mostly noise:

    \[x^{t+1} = x^t - \frac{\eta\, \hat m^t}{\sqrt{\max(\hat v^t - \phi, \gamma')} + \epsilon^t},
      \qquad \phi = (z C_1 / B)^2\]

    with Adam's moments \(\hat m\) and \(\hat v\), divided by \(1 - \beta^t\), and
    \(\epsilon^t = \epsilon / \sqrt{1 - \beta_2^t}\), as Keras has it. With
    `rescale_to_unit_norm`, \(\phi = (z / B)^2\). That variance is public, so this is
    post-processing, and epsilon stays as it is. Gradients of weight regularizers get no noise and
    stay in the second moment. Without noise it is plain Adam.

    Args:
        correct_noise_bias: Whether the variance of the noise is subtracted. Coordinates with
            little signal then take longer steps: tune `learning_rate` anew. Not with `amsgrad`.
        noise_bias_floor: Float > 0, \(\gamma'\), in squared units of the direction: below it no
            second moment falls, so that no step gets too long. Smaller is bolder. `None`: one
            standard deviation of what noise adds to \(\hat v^t\),
            \(\phi \sqrt{2 (1 - \beta_2)(1 + \beta_2^t) / ((1 + \beta_2)(1 - \beta_2^t))}\).
        **arguments: Of `DiceSGDOptimizer` and of `keras.optimizers.Adam` (`beta_1`,
            `beta_2`, `epsilon`, `amsgrad`, ...). `learning_rate` defaults to Keras' 0.001.

    Raises:
        MechanismError: If a privacy parameter is out of range.
        OptimizerArgumentError: If a Keras argument contradicts per-example clipping.

    Example:

    >>> optimizer = DiceAdamOptimizer(
    ...     l2_norm_clip=0.25, noise_multiplier=2.0, expected_batch_size=500)
    >>> optimizer.mechanism.noise_stddev, float(optimizer.learning_rate)
    (0.001, 0.0010000000474974513)

    Source: Zhang et al., ICLR 2024, appendix, the Adam variant. Tang, Shpilevskiy and Lécuyer,
    "DP-AdamBC: Your DP-Adam Is Actually DP-SGD (Unless You Apply Bias Correction)", AAAI 2024,
    Alg. 1 (the correction and \(\gamma'\)); the default of the floor is our own.
    """


# Keras looks a class up by its registered name when it loads a file.
for _candidate in list(vars(keras.optimizers).values()):
    if _refusal(_candidate) is None:
        make_dice_optimizer_class(_candidate)
