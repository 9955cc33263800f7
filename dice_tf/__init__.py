# Copyright 2026 The dice_tf Authors.
# SPDX-License-Identifier: Apache-2.0
"""Differentially private training for TensorFlow and Keras, with error feedback."""

from dice_tf import accounting, auditing, errors
from dice_tf.auditing import canaries
from dice_tf.checkpoints.private_checkpoints import continue_sampling
from dice_tf.checks.model_checks import check_model
from dice_tf.checks.model_repair import fix_model
from dice_tf.engine import register_rule
from dice_tf.ledger.runs import accounted_run, run_epsilon, run_statement
from dice_tf.mechanism import (
    AdaptiveClipping,
    DiceMechanism,
    PerLayerClipping,
    PiecewiseSchedule,
)
from dice_tf.plan import PrivacyPlan
from dice_tf.sampling import (
    CyclicPoissonSampling,
    PoissonSampling,
    RandomAllocation,
    Sampling,
    ShuffledEpochs,
)
from dice_tf.search import private_search, private_trials
from dice_tf.training.epsilon_callback import EpsilonCallback
from dice_tf.training.gradient_norms import GradientNorms, gradient_norms
from dice_tf.training.optimizers import (
    DiceAdamOptimizer,
    DiceSGDOptimizer,
    make_dice_optimizer_class,
)
from dice_tf.training.private_step import check_gradients, private_train_step
from dice_tf.training.thresholds import clip_thresholds
from dice_tf.version import __version__

__all__ = [
    "AdaptiveClipping",
    "CyclicPoissonSampling",
    "DiceAdamOptimizer",
    "DiceMechanism",
    "DiceSGDOptimizer",
    "EpsilonCallback",
    "GradientNorms",
    "PerLayerClipping",
    "PiecewiseSchedule",
    "PoissonSampling",
    "PrivacyPlan",
    "RandomAllocation",
    "Sampling",
    "ShuffledEpochs",
    "__version__",
    "accounted_run",
    "accounting",
    "auditing",
    "canaries",
    "check_gradients",
    "check_model",
    "clip_thresholds",
    "continue_sampling",
    "errors",
    "fix_model",
    "gradient_norms",
    "make_dice_optimizer_class",
    "private_search",
    "private_train_step",
    "private_trials",
    "register_rule",
    "run_epsilon",
    "run_statement",
]
