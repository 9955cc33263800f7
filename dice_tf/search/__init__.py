# Copyright 2026 The dice_tf Authors.
# SPDX-License-Identifier: Apache-2.0
"""The best of a random, secret number of private trainings."""

from dice_tf.search.private_search import SearchResult, Trial, private_search
from dice_tf.search.search_record import PrivateTrials, private_trials

__all__ = ["PrivateTrials", "SearchResult", "Trial", "private_search", "private_trials"]
