# Copyright 2026 The dice_tf Authors.
# SPDX-License-Identifier: Apache-2.0
"""What files hold: all of a run, for its owner, or only what may be released."""
