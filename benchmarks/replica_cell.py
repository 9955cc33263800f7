# Copyright 2026 The dice_tf Authors.
# SPDX-License-Identifier: Apache-2.0
"""One measurement of `replicas.py`, in a process of its own.

Started with a specification as JSON: either a cell of `cell.py` with the number of
"replicas", or "floats", "ports" and "worker" of an exchange between processes.
"""

import json
import os
import statistics
import time

import protocol


def time_exchange(specification):
    """Times the sum of float32 numbers over worker processes on this machine.

    Args:
        specification: Dict with "floats", "ports", "worker" and "rounds".

    Returns:
        Dict with the median "milliseconds" of a sum.
    """
    addresses = [f"127.0.0.1:{port}" for port in specification["ports"]]
    task = {"type": "worker", "index": specification["worker"]}
    os.environ["TF_CONFIG"] = json.dumps({"cluster": {"worker": addresses}, "task": task})
    import tensorflow as tf

    strategy = tf.distribute.MultiWorkerMirroredStrategy()
    values = tf.random.normal([specification["floats"]])

    @tf.function
    def exchange():
        add = lambda: tf.distribute.get_replica_context().all_reduce("SUM", values)
        return strategy.run(add)

    exchange()
    times = []
    for _ in range(specification["rounds"]):
        start = time.perf_counter()
        exchange().numpy()
        times.append(time.perf_counter() - start)
    return {"milliseconds": 1e3 * statistics.median(times)}


def time_steps(specification):
    """Times private and plain steps in turns, under MirroredStrategy on logical CPUs.

    Args:
        specification: Dict of a cell, see `cell.measure_ratio`, and "replicas".
    """
    import tensorflow as tf

    replicas = specification["replicas"]
    logical = [tf.config.LogicalDeviceConfiguration()] * replicas
    cpu = tf.config.list_physical_devices("CPU")[0]
    tf.config.set_logical_device_configuration(cpu, logical)
    import cell

    strategy = tf.distribute.MirroredStrategy([f"CPU:{i}" for i in range(replicas)])
    with strategy.scope():
        return cell.measure_ratio(specification)


def main():
    """Measures what the command line specifies."""
    specification = protocol.specification()
    protocol.report((time_exchange if "ports" in specification else time_steps)(specification))
    os._exit(0)  # Without waiting for workers that are gone.


if __name__ == "__main__":
    main()
