# Copyright 2026 The dice_tf Authors.
# SPDX-License-Identifier: Apache-2.0
"""Starts the worker processes of a cluster on this machine."""

import json
import os
import pathlib
import socket
import subprocess
import sys

TESTS = pathlib.Path(__file__).parent


def task_configurations(workers):
    """Returns what `TF_CONFIG` says to each of so many workers, on ports that are free."""
    sockets = [socket.socket() for _ in range(workers)]
    for s in sockets:
        s.bind(("127.0.0.1", 0))
    addresses = [f"127.0.0.1:{s.getsockname()[1]}" for s in sockets]
    for s in sockets:
        s.close()
    cluster = {"worker": addresses}
    return [{"cluster": cluster, "task": {"type": "worker", "index": i}} for i in range(workers)]


def start(arguments, configuration, folder, **popen_arguments):
    """Starts a script of this folder as one worker, in `folder`.

    Args:
        arguments: List: the script and its arguments.
        configuration: For `TF_CONFIG`, or `None` for a process without a cluster.
        folder: Path.
        **popen_arguments: For `subprocess.Popen`.
    """
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(TESTS.parent), os.environ.get("PYTHONPATH", "")]),
        "CUDA_VISIBLE_DEVICES": "-1",
        "TF_CPP_MIN_LOG_LEVEL": "2",
        "TMPDIR": str(folder),
        "PYTHONDONTWRITEBYTECODE": "1",
    }
    environment.pop("TF_CONFIG", None)
    if configuration is not None:
        environment["TF_CONFIG"] = json.dumps(configuration)
    script, *rest = arguments
    return subprocess.Popen(
        [sys.executable, str(TESTS / script), *rest],
        env=environment,
        cwd=folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        **popen_arguments,
    )
