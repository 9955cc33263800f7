# Copyright 2026 The dice_tf Authors.
# SPDX-License-Identifier: Apache-2.0
"""Epsilon of Gaussians on Poisson samples, by dp_accounting alone: nothing of dice_tf."""

import dp_accounting
from dp_accounting import pld, rdp
import numpy as np

# Grids of PLD differ: dp_accounting's default interval here, one that follows epsilon in dice_tf.
TOLERANCE = {"pld": 1e-4, "rdp": 1e-9}
ORDERS = np.concatenate([1 + np.arange(1, 100) / 10, np.arange(11, 64)])


def composed_epsilon(probability, noise_multiplier, rounds, delta, accountant="pld"):
    """Returns the epsilon of a mechanism that is composed with itself.

    Args:
        probability: Float in (0, 1], with which an example takes part in a round.
        noise_multiplier: Float, noise of a round over what one example can move in it.
        rounds: Int.
        delta: Float.
        accountant: `"pld"` or `"rdp"`.
    """
    event = dp_accounting.GaussianDpEvent(noise_multiplier)
    if probability < 1:
        event = dp_accounting.PoissonSampledDpEvent(probability, event)
    accountant = pld.PLDAccountant() if accountant == "pld" else rdp.RdpAccountant(ORDERS)
    return accountant.compose(event, rounds).get_epsilon(delta)
