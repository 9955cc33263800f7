# Copyright 2026 The dice_tf Authors.
# SPDX-License-Identifier: Apache-2.0
"""Arrays on disk are read by row: case C1."""

import mmap
import os
import subprocess
import sys

from cases2_data_test import DELTA, IMAGES, NUMBERS, ROOT, SECRET, B, N, X, make_model, refused
import h5py
import numpy as np
import pytest
import tensorflow as tf

import dice_tf
from dice_tf.ledger import provenance
from dice_tf.sampling import PoissonSampling, ShuffledEpochs, data_sources

# C1: arrays on disk are read by row.

MEASURE = """
import resource, sys
import numpy as np
import dice_tf

path, rows, width = sys.argv[1], 32_768, 16_384                         # 2 GiB of float32
x = np.memmap(path, "float32", "r", shape=(rows, width))
y = np.memmap(path, "int64", "r", shape=(rows,))

class Source:
    def __len__(self):
        return rows

    def __getitem__(self, index):
        return {"x": x[index]}, y[index]

    def __getitems__(self, indices):
        return [self[index] for index in indices]

sampling = dice_tf.PoissonSampling(num_examples=rows, expected_batch_size=64)
for data in (lambda: sampling.dataset(Source()), lambda: sampling.dataset({"x": x}, y)):
    for features, labels, weights in data().take(3):
        assert features["x"].shape[1:] == (width,) and labels.shape == weights.shape
    print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)
"""


def test_c1_a_memmap_needs_no_more_memory_than_a_source_of_rows(tmp_path):
    path = tmp_path / "sparse.dat"
    with open(path, "wb") as file:
        file.truncate(32_768 * 16_384 * 4)  # A hole: it takes no room on the disk.
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, [ROOT, *sys.path]))}
    run = subprocess.run(
        [sys.executable, "-c", MEASURE, str(path)], capture_output=True, text=True, env=environment
    )
    assert run.returncode == 0, run.stderr[-2000:]
    # The peak of a process never falls, so the second number is of both ways.
    source, both = map(int, run.stdout.split())
    assert both <= 1.2 * source, (source, both)


class ZarrLike:
    """An array with shape, type and rows, nothing else; it counts what is read."""

    def __init__(self, array, many_at_once=True):
        self._array, self._many = array, many_at_once
        self.shape, self.dtype, self.reads = array.shape, array.dtype, []

    def __getitem__(self, index):
        places = np.atleast_1d(index)
        if places.size > 1 and not self._many:
            raise TypeError("one index at a time")
        assert (np.diff(places) > 0).all()  # As h5py wants it.
        self.reads.append(places.size)
        return self._array[index]


def on_disk(folder):
    """Returns arrays of all kinds of disk, with rows `IMAGES`."""
    np.save(folder / "a.npy", IMAGES)
    IMAGES.astype(">f4").tofile(folder / "big_endian")
    opened = np.lib.format.open_memmap(folder / "b.npy", "w+", "float32", IMAGES.shape)
    opened[:] = IMAGES
    file = h5py.File(folder / "c.h5", "w")
    file["plain"] = IMAGES
    file.create_dataset("chunked", data=IMAGES, chunks=(7, 2, 3), compression="gzip")
    file["double"] = IMAGES.astype("float64")
    loaded = np.load(folder / "a.npy", mmap_mode="r")
    padded = np.memmap(folder / "padded", "float32", "w+", shape=(2 * N, 2, 4))
    padded[::2, :, 1:] = IMAGES
    with open(folder / "a.npy", "rb") as opened_file:
        mapped = mmap.mmap(opened_file.fileno(), 0, access=mmap.ACCESS_READ)
    return {
        "np.load": loaded,
        "open_memmap": opened,
        "plain array of a map": np.asarray(loaded),
        "view of a view": padded[::2][:, :, 1:],
        "big endian": np.memmap(folder / "big_endian", ">f4", "r", shape=IMAGES.shape),
        "mmap": np.frombuffer(mapped, "float32", IMAGES.size, mapped.size() - IMAGES.nbytes)
        .reshape(IMAGES.shape),
        "h5py": file["plain"],
        "h5py, chunks": file["chunked"],
        "h5py, float64": file["double"],
        "zarr": ZarrLike(IMAGES),
        "zarr, one at a time": ZarrLike(IMAGES, many_at_once=False),
    }  # fmt: skip


KINDS = ["np.load", "open_memmap", "plain array of a map", "view of a view", "big endian", "mmap",
         "h5py", "h5py, chunks", "h5py, float64", "zarr", "zarr, one at a time"]  # fmt: skip


@pytest.fixture(scope="module")
def disk(tmp_path_factory):
    return on_disk(tmp_path_factory.mktemp("disk"))


@pytest.mark.parametrize("kind", KINDS)
def test_c1_rows_on_disk_are_those_of_the_array(disk, kind, monkeypatch):
    # Nothing is held in memory.
    monkeypatch.setattr(data_sources, "_on_host", lambda value: pytest.fail("copied"))
    fetch = data_sources.row_fetcher({"a": disk[kind]}, (disk["np.load"], disk["zarr"]), N)
    # In any order and with repetitions, as batches have them.
    indices = tf.constant([59, 3, 0, 3, 41, 0], tf.int64)
    x, (first, second) = fetch(indices)
    for rows in (x["a"], first, second):
        assert rows.dtype == tf.float32
        np.testing.assert_array_equal(rows.numpy(), IMAGES[indices.numpy()])


def test_c1_one_read_a_batch_in_the_order_of_the_file():
    array = ZarrLike(IMAGES)
    data = PoissonSampling(N, 10, seed=1).dataset(array, NUMBERS)
    array.reads.clear()
    for _ in range(2):
        (x, y, w), *_ = data.take(1)
        np.testing.assert_array_equal(x.numpy()[:, 0, 0], y.numpy())
        assert int(provenance.count_marks(w)) == 1
    assert 2 <= len(array.reads) <= 6 and max(array.reads) <= len(w)  # Prefetched ones included.


def test_c1_fit_takes_arrays_on_disk_of_different_kinds(disk):
    flat = disk["np.load"].reshape(N, 6)[:, :3]
    targets = disk["h5py"][:, 0, :1]
    sampling = dice_tf.CyclicPoissonSampling(N, B)
    budget = dice_tf.EpsilonCallback(sampling, DELTA)
    data = sampling.dataset(flat, ZarrLike(targets))
    make_model().fit(data, epochs=2, verbose=0, callbacks=[budget])
    assert budget.accounted_steps() == sampling.steps(2)


@pytest.mark.parametrize("kind", [dice_tf.CyclicPoissonSampling, PoissonSampling, ShuffledEpochs])
def test_c1_every_sampler_reads_arrays_on_disk(disk, kind):
    x = {"map": disk["np.load"], "h5": disk["h5py, chunks"]}
    rows = list(kind(N, B).dataset(x, disk["zarr"]))
    for x, y, _ in rows:
        np.testing.assert_array_equal(x["map"], y)
        np.testing.assert_array_equal(x["h5"], y)
    if kind is ShuffledEpochs:
        assert sorted(np.concatenate([y.numpy()[:, 0, 0] for _, y, _ in rows])) == list(range(N))


def test_c1_strings_and_unfit_types_on_disk(tmp_path):
    with h5py.File(tmp_path / "a.h5", "w") as file:
        file["words"] = [f"word {i}" for i in range(N)]
        file["fixed"] = np.asarray([f"word {i}" for i in range(N)], "S7")
        ragged = file.create_dataset("ragged", (N,), h5py.vlen_dtype("float32"))
        ragged[:] = [np.full(i % 3 + 1, SECRET) for i in range(N)]
        file["records"] = np.zeros(N, [("a", "float32"), ("b", "int64")])
        for name in ("words", "fixed"):
            x, _ = data_sources.row_fetcher(file[name], None, N)(tf.constant([7, 0, 7], tf.int64))
            assert x.numpy().tolist() == [b"word 7", b"word 0", b"word 7"]
        sampling = PoissonSampling(N, B)
        refused(lambda: sampling.dataset(file["ragged"]), "`x`", "rows of one length", "Pad")
        refused(lambda: sampling.dataset(file["records"]), "`x`", "dict of columns")
        refused(lambda: sampling.dataset(X, file["words"][:7]), "`y`", "num_examples=60", "7 rows")


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__]))
