# Copyright 2026 The dice_tf Authors.
# SPDX-License-Identifier: Apache-2.0
"""`python -m dice_tf.accounting` prints a statement, not what TensorFlow logs when it loads.

Python imports `dice_tf`, and with it TensorFlow, before the first line of the command runs.
And some lines of TensorFlow 2.21 heed no setting, so what its C++ code writes is dropped.
"""

import os
import sys


def silence_tensorflow():
    """Drops TensorFlow's log lines in that command, and nowhere else.

    Python's own errors and warnings stay. So do the log lines with TF_CPP_MIN_LOG_LEVEL=0.
    """
    # While Python looks for a module to run, its name stands nowhere else.
    is_command = sys.argv[:1] == ["-m"] and "dice_tf.accounting" in sys.orig_argv
    if not is_command or os.environ.get("TF_CPP_MIN_LOG_LEVEL") == "0":
        return
    sys.stderr.flush()
    sys.stderr = os.fdopen(os.dup(2), "w", buffering=1, errors="backslashreplace")
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 2)
    os.close(nowhere)
