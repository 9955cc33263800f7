# Copyright 2026 The dice_tf Authors.
# SPDX-License-Identifier: Apache-2.0
"""Differentially private training for TensorFlow and Keras, with error feedback."""

from dice_tf import accounting, auditing, canaries, errors
from dice_tf.callbacks import EpsilonCallback
from dice_tf.ledger import accounted_run, run_epsilon, run_statement
from dice_tf.mechanism import DiceMechanism
from dice_tf.model_repair import fix_model
from dice_tf.optimizers import DiceAdamOptimizer, DiceSGDOptimizer, make_dice_optimizer_class
from dice_tf.per_example import register_rule
from dice_tf.plan import PrivacyPlan
from dice_tf.private_checkpoints import continue_sampling
from dice_tf.private_search import private_search
from dice_tf.random_allocation import RandomAllocation
from dice_tf.sampling import CyclicPoissonSampling, PoissonSampling, ShuffledEpochs
from dice_tf.search_record import private_trials
from dice_tf.training import check_gradients, private_train_step
from dice_tf.validation import check_model
from dice_tf.version import __version__

__all__ = [
    "CyclicPoissonSampling",
    "DiceAdamOptimizer",
    "DiceMechanism",
    "DiceSGDOptimizer",
    "EpsilonCallback",
    "PoissonSampling",
    "PrivacyPlan",
    "RandomAllocation",
    "ShuffledEpochs",
    "__version__",
    "accounted_run",
    "accounting",
    "auditing",
    "canaries",
    "check_gradients",
    "check_model",
    "continue_sampling",
    "errors",
    "fix_model",
    "make_dice_optimizer_class",
    "private_search",
    "private_train_step",
    "private_trials",
    "register_rule",
    "run_epsilon",
    "run_statement",
]
