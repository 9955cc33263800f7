# Copyright 2026 The dice_tf Authors.
# SPDX-License-Identifier: Apache-2.0
"""Gradient engines: from a batch to weighted sums of its per-example gradients."""
