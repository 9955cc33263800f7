# Copyright 2026 The dice_tf Authors.
# SPDX-License-Identifier: Apache-2.0
"""What replicas cost: DiceSGD against Keras SGD under the same strategy, and the exchange.

The first table has the ratio of step times, private and plain in turns in one process,
under MirroredStrategy on logical CPU devices. They share the cores of this machine: the
table shows what replicas add, not what more devices gain. The second table has the time
in which local worker processes add up sums, next to what the model of docs/scaling.md
makes of the first row.

    python benchmarks/replicas.py
    python benchmarks/replicas.py --rounds=3 --seconds=0.5
"""

import concurrent.futures
import os
import socket

from absl import app, flags
import protocol

REPLICAS = (1, 2, 4)
MODELS = {"cnn": 256, "mlp": 256}
WORKERS = (1, 2, 4)
# Keras' own `fit` under MirroredStrategy drops an iterator that still prefetches, and
# TensorFlow 2.21 crashes over it now and then.
_ATTEMPTS = 4
FLOATS = (26_000, 262_144, 1_863_690, 2 * 1_863_690)


def ring_milliseconds(workers, floats, latency, bandwidth):
    """Returns the time of a ring all-reduce.

    Each of W workers sends and receives 2 (W - 1) / W of the bytes, in 2 (W - 1) messages.

    Args:
        workers: Int, W.
        floats: Int, number of float32 values.
        latency: Float, milliseconds per message.
        bandwidth: Float, bytes per millisecond.
    """
    messages = 2 * (workers - 1)
    return messages * (latency + 4 * floats / workers / bandwidth)


def exchange(workers, floats, rounds):
    """Returns the measured milliseconds of a sum over local worker processes.

    Args:
        workers: Int, number of processes.
        floats: Int.
        rounds: Int.
    """
    sockets = [socket.socket() for _ in range(workers)]
    for s in sockets:
        s.bind(("127.0.0.1", 0))
    ports = [s.getsockname()[1] for s in sockets]
    for s in sockets:
        s.close()
    specifications = [
        {"floats": floats, "ports": ports, "worker": i, "rounds": rounds} for i in range(workers)
    ]
    with concurrent.futures.ThreadPoolExecutor(workers) as pool:
        results = list(pool.map(lambda s: protocol.measure("replica_cell.py", s), specifications))
    failed = [result["failed"] for result in results if "failed" in result]
    if failed:
        raise RuntimeError(failed[0])
    return max(result["milliseconds"] for result in results)


def fit_network(measured):
    """Returns latency and bandwidth of the ring that explains sums over 2 workers.

    Args:
        measured: Dict from (workers, floats) to milliseconds, with the smallest and the
            largest of `FLOATS` for 2 workers.

    Returns:
        Pair: milliseconds per message (at least 0), and bytes per millisecond.
    """
    small, large = FLOATS[0], FLOATS[-1]
    slope = (measured[2, large] - measured[2, small]) / (large - small)
    bandwidth = 4 / slope
    return max(0.0, measured[2, small] / 2 - 2 * small / bandwidth), bandwidth


def run(values):
    """Prints both tables.

    Args:
        values: Parsed flags.
    """
    print(f"{os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}\n")
    print("| model | batch | replicas | SGD, ms | DiceSGD, ms | ratio | range |")
    print("| --- | --- | --- | --- | --- | --- | --- |")
    for model, batch in MODELS.items():
        for replicas in REPLICAS:
            specification = dict(
                model=model, batch=batch, optimizer="sgd", engine="layerwise", method="DiceSGD",
                chunk_size=None, replicas=replicas, rounds=values.rounds, seconds=values.seconds,
            )  # fmt: skip
            for _ in range(_ATTEMPTS):
                r = protocol.measure("replica_cell.py", specification)
                if "failed" not in r:
                    break
            else:
                raise RuntimeError(r["failed"])
            print(
                f"| {model} | {batch} | {replicas} | {r['plain_ms']:.1f} | {r['private_ms']:.1f} | "
                f"{r['ratio']:.2f} | {r['lowest_ratio']:.2f} to {r['highest_ratio']:.2f} |",
                flush=True,
            )
    print("\n| floats | workers | measured, ms | model, ms |\n| --- | --- | --- | --- |")
    measured = {(w, f): exchange(w, f, 20) for w in WORKERS for f in FLOATS}
    latency, bandwidth = fit_network(measured)  # The rows of 4 workers are predictions.
    for (workers, floats), milliseconds in measured.items():
        predicted = ring_milliseconds(workers, floats, latency, bandwidth)
        print(f"| {floats} | {workers} | {milliseconds:.2f} | {predicted:.2f} |")
    print(f"\nFrom the rows of 2 workers: {latency:.2f} ms per message, "
          f"{bandwidth / 1e6:.2f} GB/s.")  # fmt: skip


def define_flags(flag_values):
    """Defines the flags of this script."""
    options = {"flag_values": flag_values}
    text = "Turns of the private and the plain model."
    flags.DEFINE_integer("rounds", 5, text, lower_bound=1, **options)
    flags.DEFINE_float("seconds", 1.0, "Aimed length of a turn.", lower_bound=0, **options)


def main(argv):
    """Runs the script with the flags of the command line."""
    del argv
    run(flags.FLAGS)


if __name__ == "__main__":
    define_flags(flags.FLAGS)
    app.run(main)
