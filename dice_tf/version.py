# Copyright 2026 The dice_tf Authors.
# SPDX-License-Identifier: Apache-2.0
"""The version of dice_tf: the only place where the number is written."""

__version__ = "0.1.0"
