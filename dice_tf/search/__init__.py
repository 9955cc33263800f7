# Copyright 2026 The dice_tf Authors.
# SPDX-License-Identifier: Apache-2.0
"""The best of a random, secret number of private trainings."""

__all__: list[str] = []
