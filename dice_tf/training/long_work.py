# Copyright 2026 The dice_tf Authors.
# SPDX-License-Identifier: Apache-2.0
"""One line about work that takes long, so that nobody takes it for a hang."""

import contextlib
import threading

from keras.src.utils import io_utils

SECONDS = 5.0


@contextlib.contextmanager
def said(line, wanted):
    """Context in which a line is printed if it takes more than `SECONDS`.

    Args:
        line: String that says what is done, and how often.
        wanted: Whether to print at all.

    Yields:
        Nothing.
    """
    if not wanted:
        yield
        return
    timer = threading.Timer(SECONDS, io_utils.print_msg, [line])
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
