# Copyright 2026 The dice_tf Authors.
# SPDX-License-Identifier: Apache-2.0
"""Which steps were taken, and from where: what data may come in, and what the run has cost."""
