# Copyright 2026 The dice_tf Authors.
# SPDX-License-Identifier: Apache-2.0
"""Everything public about a run, decided before its first step."""

from dice_tf.plan.plan import PrivacyPlan

__all__ = ["PrivacyPlan"]
