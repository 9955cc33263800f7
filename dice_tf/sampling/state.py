# Copyright 2026 The dice_tf Authors.
# SPDX-License-Identifier: Apache-2.0
"""What a sampling object remembers: its secret entropy, and what was drawn so far."""

import collections
from collections.abc import Callable
import dataclasses
import os
import secrets
import threading
import weakref

import numpy as np

# Gives processes that are forked from this one entropy of their own.
renewed_in_forks = weakref.WeakSet()


def _renew_after_fork():
    # Another thread of the parent may have held it.
    SamplingState.lock = threading.Lock()
    for state in renewed_in_forks:
        state.entropy, state.assignment = secrets.randbits(128), secrets.randbits(31)
        state.groups, state.numbered, state.offset = None, False, 0


if hasattr(os, "register_at_fork"):  # Not on Windows, which has no forks.
    os.register_at_fork(after_in_child=_renew_after_fork)


# Compared as objects, because they are kept in a set.
@dataclasses.dataclass(eq=False)
class SamplingState:
    """The state of one object of `dice_tf.sampling`, safe with threads of tf.data.

    Attributes:
        entropy: Int, all that draws depend on besides their number: as secret as the draws.
        assignment: Int, public name of the assignment of examples to groups. Independent of
            the entropy, because it is stored with the optimizer.
        iterations: Int, iterations begun so far.
        draws: Int, batches drawn so far.
        groups: The members of each group, or `None` before they are needed.
        shared: Whether all workers of a cluster hold the same entropy.
        numbered: Whether a private checkpoint may have to find iterations by their number.
        offset: Int, steps by which iterations are shifted after a run that was cut short.
    """

    entropy: int
    assignment: int = dataclasses.field(default_factory=lambda: secrets.randbits(31))
    iterations: int = 0
    draws: int = 0
    groups: list | None = None
    shared: bool = False
    numbered: bool = False
    offset: int = 0
    # From entropy to the first iteration, and its offset, that was never begun.
    _unused: dict = dataclasses.field(default_factory=dict)
    # What `watch` was told: the position then, that of the next draw, and what to call.
    _watched_from: int = 0
    _expected: int = 0
    _on_gap: Callable[[], None] | None = None

    # No fields: one for all, so that objects can be copied.
    lock = threading.Lock()
    # From the public name of a sampling to the batches that all its objects drew here, without
    # those that a `fit` trained on: so many are there for the steps of loops.
    drawn_for_loops = collections.Counter()

    def begin_iteration(self, seeded):
        """Returns what makes an iteration's draws differ from all others, and its offset."""
        with self.lock:
            self.iterations += 1
            if seeded or self.shared or self.numbered:
                return np.asarray([self.iterations - 1, self.offset], dtype=np.int64)
        return np.asarray([*(secrets.randbits(32) for _ in range(4)), 0], dtype=np.int64)

    def move_to(self, entropy, assignment, iterations, offset):
        """Takes over the draws of another object, at a place in them.

        Returns:
            Whether it does: not if this object has drawn there before, for whichever model.
        """
        with self.lock:
            self._unused[self.entropy] = self.iterations, self.offset
            if (iterations, offset) < self._unused.get(entropy, (0, 0)):
                return False
            self.entropy, self.assignment, self.groups = entropy, assignment, None
            self.iterations, self.offset, self.numbered = iterations, offset, True
            return True

    def start_whole_pass(self):
        """Begins the next iteration at the start of a pass over the data, and numbers it."""
        with self.lock:
            self.iterations += self.offset > 0
            self.offset, self.numbered = 0, True

    def count_draw(self, of_data_set, name):
        """Counts one batch, also for the data set and for the name of its sampling.

        Args:
            of_data_set: List of one number.
            name: Int, `provenance.sampling_name`.
        """
        with self.lock:
            self.draws += 1
            self.drawn_for_loops[name] += 1
            of_data_set[0] += 1

    def watch(self, position, on_gap):
        """Calls `on_gap`, once, when the draw at or after `position` is left out."""
        with self.lock:
            self._watched_from = self._expected = position
            self._on_gap = on_gap

    def note_draw(self, position):
        """Notices a draw, and whether those before it were made."""
        on_gap = None
        with self.lock:
            # Iterations begun before may still fetch batches ahead, which nobody uses.
            if self._on_gap and position >= self._watched_from:
                if position != self._expected:
                    on_gap, self._on_gap = self._on_gap, None
                self._expected = position + 1
        if on_gap:
            on_gap()
