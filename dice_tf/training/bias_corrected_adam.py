# Copyright 2026 The dice_tf Authors.
# SPDX-License-Identifier: Apache-2.0
r"""Adam whose second moment is freed from the variance of the noise.

Of a direction \(g + w\) with noise \(w\) of variance \(\phi\) the second moment is
\(E[g^2] + \phi\). Where noise outweighs the gradient, as private training has it, it is about
\(\phi\) in every coordinate, and Adam becomes SGD with momentum. But \(\phi\) is public, so it
can be subtracted.
"""

import math
from typing import TYPE_CHECKING, Any

import keras

from dice_tf.checks.arguments import check_number
from dice_tf.errors import OptimizerArgumentError

# Keras' own types leave out that operations on tensors give tensors.
ops: Any = keras.ops


class NoiseBiasCorrection(keras.optimizers.Adam if TYPE_CHECKING else object):
    """Mixin between `PrivateUpdate` and Keras' Adam; see `DiceAdamOptimizer`."""

    def __init__(
        self,
        *positional: Any,
        correct_noise_bias: bool = False,
        noise_bias_floor: float | None = None,
        **keras_arguments: Any,
    ) -> None:
        super().__init__(*positional, **keras_arguments)
        self.correct_noise_bias = bool(correct_noise_bias)
        if noise_bias_floor is not None:
            noise_bias_floor = check_number(
                "noise_bias_floor", noise_bias_floor, error=OptimizerArgumentError
            )
        self.noise_bias_floor = noise_bias_floor
        if noise_bias_floor is not None and not correct_noise_bias:
            raise OptimizerArgumentError(
                "Argument `noise_bias_floor` is the smallest second moment after the noise was "
                f"subtracted. Received: noise_bias_floor={noise_bias_floor} with "
                "correct_noise_bias=False. Pass `correct_noise_bias=True`, or leave it out."
            )
        if self.correct_noise_bias and self.amsgrad:
            raise OptimizerArgumentError(
                "AMSGrad keeps the largest second moment so far, which is that of the largest "
                "noise: no known variance can be subtracted from it. Received: amsgrad=True with "
                "correct_noise_bias=True. Leave one of them out."
            )

    def update_step(self, gradient, variable, learning_rate):
        """Takes Adam's step for one variable, with the noise subtracted if asked for."""
        variance = self._noise_variance()
        if not self.correct_noise_bias or variance == 0:
            super().update_step(gradient, variable, learning_rate)
            return
        # As Keras' own, but for `noiseless`.
        cast = lambda value: ops.cast(value, variable.dtype)
        gradient, step = cast(gradient), cast(ops.add(self.iterations, 1))
        kept = [ops.power(cast(beta), step) for beta in (self.beta_1, self.beta_2)]
        index = self._get_variable_index(variable)
        momentum, velocity = self._momentums[index], self._velocities[index]
        self.assign_add(momentum, (gradient - momentum) * (1 - self.beta_1))
        self.assign_add(velocity, (ops.square(gradient) - velocity) * (1 - self.beta_2))
        floor = self.noise_bias_floor
        if floor is None:
            floor = variance * _relative_deviation(self.beta_2, kept[1])
        # The mean square of the noise so far counts only as much as the moment does.
        noiseless = ops.maximum(velocity / (1 - kept[1]) - cast(variance), cast(floor))
        root = ops.sqrt((1 - kept[1]) * noiseless) + self.epsilon
        size = cast(learning_rate) * ops.sqrt(1 - kept[1]) / (1 - kept[0])
        self.assign_sub(variable, size * momentum / root)

    def _noise_variance(self):
        """Variance of the noise per coordinate of the direction that the rule is given."""
        mechanism: Any = getattr(self, "_mechanism")
        unit = mechanism.l2_norm_clip if getattr(self, "rescale_to_unit_norm") else 1.0
        return (mechanism.noise_stddev / unit) ** 2

    def get_config(self) -> dict[str, Any]:
        """Returns the constructor's arguments."""
        own = dict(
            correct_noise_bias=self.correct_noise_bias, noise_bias_floor=self.noise_bias_floor
        )
        return {**super().get_config(), **own}


def _relative_deviation(beta, kept):
    r"""Returns the standard deviation of what noise adds to the second moment, over its mean.

    \[\sqrt{2 \sum_k w_k^2} = \sqrt{\frac{2 (1 - \beta)(1 + \beta^t)}{(1 + \beta)(1 - \beta^t)}}\]

    for squares of Gaussians with the weights
    \(w_k = (1 - \beta) \beta^{t - k} / (1 - \beta^t)\).

    Args:
        beta: Float, \(\beta\).
        kept: Scalar tensor, \(\beta^t\) at step t.
    """
    return math.sqrt(2 * (1 - beta) / (1 + beta)) * ops.sqrt((1 + kept) / (1 - kept))
