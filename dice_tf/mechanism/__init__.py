# Copyright 2026 The dice_tf Authors.
# SPDX-License-Identifier: Apache-2.0
"""The algorithm: its parameters, clipping, error feedback and noise, as functions on tensors."""

from dice_tf.mechanism.adaptive import AdaptiveClipping
from dice_tf.mechanism.parameters import PRIVACY_ARGUMENTS, DiceMechanism
from dice_tf.mechanism.per_layer import PerLayerClipping
from dice_tf.mechanism.schedules import PiecewiseSchedule

__all__ = [
    "PRIVACY_ARGUMENTS",
    "AdaptiveClipping",
    "DiceMechanism",
    "PerLayerClipping",
    "PiecewiseSchedule",
]
