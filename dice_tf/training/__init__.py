# Copyright 2026 The dice_tf Authors.
# SPDX-License-Identifier: Apache-2.0
"""The rim: optimizers, the private step, Keras' trainer and callbacks."""
