# Copyright 2026 The dice_tf Authors.
# SPDX-License-Identifier: Apache-2.0
"""What a training run costs in privacy, noise for a budget, and a statement to print."""

from dice_tf.accounting import quiet_command

# Before anything loads TensorFlow.
quiet_command.silence_tensorflow()

from dice_tf.accounting.attack import true_positive_rates
from dice_tf.accounting.calibration import (
    calibrate_batch_size,
    calibrate_noise_multiplier,
    calibrate_steps,
)
from dice_tf.accounting.composition import compose_epsilon
from dice_tf.accounting.epsilon import PrivacyGuarantee, compute_epsilon, dp_event, guarantee
from dice_tf.accounting.events import NEIGHBOURING_RELATIONS, Round
from dice_tf.accounting.joint_statements import compose_statement, selection_statement
from dice_tf.accounting.paper import (
    Counterexample,
    counterexample_epsilon_lower_bound,
    paper_epsilon,
    paper_noise_stddev,
)
from dice_tf.accounting.paper_convergence import (
    paper_best_steps,
    paper_gradient_bound,
    paper_step_size,
)
from dice_tf.accounting.repeated_selection import selection_epsilon
from dice_tf.accounting.statement import privacy_statement

__all__ = [
    "NEIGHBOURING_RELATIONS",
    "Counterexample",
    "PrivacyGuarantee",
    "Round",
    "calibrate_batch_size",
    "calibrate_noise_multiplier",
    "calibrate_steps",
    "compose_epsilon",
    "compose_statement",
    "compute_epsilon",
    "counterexample_epsilon_lower_bound",
    "dp_event",
    "guarantee",
    "paper_best_steps",
    "paper_epsilon",
    "paper_gradient_bound",
    "paper_noise_stddev",
    "paper_step_size",
    "privacy_statement",
    "selection_epsilon",
    "selection_statement",
    "true_positive_rates",
]
