# Copyright 2026 The dice_tf Authors.
# SPDX-License-Identifier: Apache-2.0
"""Attributes that are replaced for a while, safely with replica threads, and copies.

Several replica threads may run a train step at the same time on the same layers. The
replacement is installed by the first and removed by the last of them, so it must look
up what to do in thread-local state.
"""

import contextlib
import threading

_lock = threading.Lock()
_installed = {}
_MISSING = object()


@contextlib.contextmanager
def overridden(replacements):
    """Replaces instance or module attributes, and restores them however the block ends.

    Tracking of attributes by Keras is bypassed: a layer is left exactly as it was.

    Args:
        replacements: List of `(object, attribute name, make)`, where `make` is a function
            from the present value of the attribute to its replacement.

    Yields:
        Nothing.
    """
    done = []
    try:
        with _lock:
            for target, name, make in replacements:
                _install(target, name, make)
                done.append((target, name))
        yield
    finally:
        with _lock:
            for target, name in reversed(done):
                _remove(target, name)


def shallow_copy(tracked):
    """Copies a Keras object without its contents (`copy.copy` would save it to a file)."""
    duplicate = object.__new__(type(tracked))
    duplicate.__dict__.update(tracked.__dict__)
    return duplicate


def _install(target, name, make):
    key = (id(target), name)
    if key not in _installed:
        original = vars(target).get(name, _MISSING)
        vars(target)[name] = make(getattr(target, name))
        # The target is kept so that its id cannot be given to another object.
        _installed[key] = [target, original, 0]
    _installed[key][2] += 1


def _remove(target, name):
    entry = _installed[(id(target), name)]
    entry[2] -= 1
    if entry[2]:
        return
    del _installed[(id(target), name)]
    if entry[1] is _MISSING:
        del vars(target)[name]
    else:
        vars(target)[name] = entry[1]
