# Copyright 2026 The dice_tf Authors.
# SPDX-License-Identifier: Apache-2.0
"""What is refused before the first step: arguments, models, precisions, gradients that differ."""
