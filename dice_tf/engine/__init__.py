# Copyright 2026 The dice_tf Authors.
# SPDX-License-Identifier: Apache-2.0
"""Gradient engines: from a batch to weighted sums of its per-example gradients.

What a rule for one's own layer needs is here: `register_rule` and the three kinds of
contributions that a rule returns.
"""

from dice_tf.engine.contributions import OuterProduct, PerExample, Rows
from dice_tf.engine.rules import register_rule

__all__ = ["OuterProduct", "PerExample", "Rows", "register_rule"]
