# Copyright 2026 The dice_tf Authors.
# SPDX-License-Identifier: Apache-2.0
"""Settings of every test process, made before TensorFlow is imported."""

import os

import hypothesis

os.environ["KERAS_BACKEND"] = "tensorflow"
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "1")

# Where there is a GPU, several test processes share it.
os.environ.setdefault("TF_FORCE_GPU_ALLOW_GROWTH", "true")

# Test processes that each take every core slow each other down.
_PROCESSES = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
_THREADS = str(max(1, (os.cpu_count() or 1) // _PROCESSES))
for _variable in ("TF_NUM_INTRAOP_THREADS", "TF_NUM_INTEROP_THREADS", "OMP_NUM_THREADS"):
    os.environ.setdefault(_variable, _THREADS)

# The same examples in every run, and no verdict that depends on the clock: the
# first example of a property traces a graph, the others do not.
hypothesis.settings.register_profile("dice_tf", deadline=None, derandomize=True)
hypothesis.settings.load_profile("dice_tf")
