# Copyright 2026 The dice_tf Authors.
# SPDX-License-Identifier: Apache-2.0
"""Typed errors, one per way in which a run could fail to be private.

Every error derives from `DicePrivacyError`, itself a `ValueError`: code that
already catches `ValueError` around a Keras call keeps working. Messages name
the argument or the layer, echo the value received and say what to do.
"""

__all__ = [
    "AccountingError",
    "BudgetExhaustedError",
    "DataDependentChoiceWarning",
    "DicePrivacyError",
    "DistributionError",
    "GradientEngineError",
    "LossError",
    "MechanismError",
    "MissingPackageError",
    "ModelError",
    "NoisyPlanWarning",
    "OptimizerArgumentError",
    "PlainGradientsError",
    "ReleaseError",
    "SamplingError",
    "UnaccountedStepsWarning",
    "UncheckedGradientsWarning",
]


class DicePrivacyError(ValueError):
    """Base class of every refusal made by dice_tf to protect a privacy claim."""

    # AutoGraph replaces errors that leave a tf.function by a type of its own unless told.
    ag_pass_through = True


class MechanismError(DicePrivacyError):
    """A differential privacy parameter is missing, out of range or contradictory."""


class SamplingError(DicePrivacyError):
    """The data, or the way it is drawn, contradicts the declared sampling."""


class AccountingError(DicePrivacyError):
    """A privacy statement was asked for that the accountant cannot make truthfully."""


class BudgetExhaustedError(DicePrivacyError):
    """Training was asked to go on although the privacy budget is spent."""


class ModelError(DicePrivacyError):
    """The model mixes examples or carries data-dependent state outside its gradients."""


class LossError(DicePrivacyError):
    """The loss has no value per example, or couples the examples of a batch."""


class PlainGradientsError(DicePrivacyError):
    """Gradients reached the optimizer without per-example clipping."""


class OptimizerArgumentError(DicePrivacyError):
    """A Keras optimizer option cannot be right together with per-example clipping."""


class GradientEngineError(DicePrivacyError):
    """The gradient engine cannot produce exact per-example gradients for this model."""


class DistributionError(DicePrivacyError):
    """Replicas or workers would not take one and the same private step together."""


class ReleaseError(DicePrivacyError):
    """What must stay private was about to be written to a file or a configuration."""


class MissingPackageError(DicePrivacyError, ImportError):
    """An optional package is needed that is not installed or cannot be imported."""


class DataDependentChoiceWarning(UserWarning):
    """A callback lets private data, without noise, decide what is trained or kept."""


class UncheckedGradientsWarning(UserWarning):
    """Whether examples mix could not be seen from the batches that were compared."""


class NoisyPlanWarning(UserWarning):
    """The noise of a plan is larger than the largest signal that a model of that size can have."""


class UnaccountedStepsWarning(UserWarning):
    """`fit` took private steps, and no EpsilonCallback said what they cost."""
