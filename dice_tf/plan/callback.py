# Copyright 2026 The dice_tf Authors.
# SPDX-License-Identifier: Apache-2.0
"""The callback of a plan: what `EpsilonCallback` does, and two checks that need the model."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any
import warnings

from dice_tf.errors import NoisyPlanWarning
from dice_tf.plan import report
from dice_tf.training.epsilon_callback import EpsilonCallback

if TYPE_CHECKING:
    from dice_tf.plan.plan import PrivacyPlan


class PlanCallback(EpsilonCallback):
    """The callback of a plan: that of its sampling, and two checks that need the model."""

    def __init__(self, plan: PrivacyPlan) -> None:
        super().__init__(
            plan.sampling,
            plan.delta,
            plan.target_epsilon,
            plan.accountant,
            group_size=plan.group_size,
        )
        self._plan = plan

    def on_train_begin(self, logs: Any = None) -> None:
        """Checks the optimizer against the plan, and the noise against the model."""
        super().on_train_begin(logs)
        model: Any = self.model
        self._plan.check_follows(model)
        parameters = sum(math.prod(v.shape) for v in model.trainable_variables)
        if parameters and self._plan.signal_to_noise(parameters) < 1:
            warnings.warn(
                f"The noise drowns the signal {report.drowned(self._plan, parameters)}",
                NoisyPlanWarning,
                stacklevel=2,
            )
