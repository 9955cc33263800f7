# Copyright 2026 The dice_tf Authors.
# SPDX-License-Identifier: Apache-2.0
"""docs/your_data_on_disk.md: its code runs from top to bottom on small files of these names."""

import math
import pathlib
import re
import textwrap

import dp_accounting
from dp_accounting.rdp import rdp_privacy_accountant
import h5py
import keras
import numpy as np
import pytest
import tensorflow as tf
import tensorflow_datasets as tfds

import dice_tf
from dice_tf.ledger import provenance

PAGE_FILE = pathlib.Path(__file__).absolute().parents[1] / "docs" / "your_data_on_disk.md"
PAGE = PAGE_FILE.read_text(encoding="utf-8")
BLOCKS = [
    textwrap.dedent(block)
    for _, block in re.findall(r"^( *)```python\n(.*?)^\1```", PAGE, re.DOTALL | re.MULTILINE)
]


def make_files(folder):
    """Makes the files that the page reads, with labels that their features tell."""
    rng = np.random.default_rng(0)
    labels = rng.integers(4, size=1200)
    features = np.eye(16, dtype="float32")[labels] + rng.normal(0, 0.1, (1200, 16))
    np.save(folder / "features.npy", features.astype("float32"))
    np.save(folder / "labels.npy", labels)
    np.save(folder / "ages.npy", np.arange(1000))
    with h5py.File(folder / "features.h5", "w") as file:
        file["signal"], file["label"] = (
            np.repeat(np.arange(1000), 3).reshape(-1, 3),
            np.arange(1000),
        )
    for number, name in enumerate(("cat", "dog")):
        (folder / "images" / name).mkdir(parents=True)
        for i in range(60):
            pixels = np.full((12, 12, 3), 100 * number, np.uint8)
            path = folder / "images" / name / f"{i}.png"
            path.write_bytes(tf.io.encode_png(pixels).numpy())
    with tf.io.TFRecordWriter(str(folder / "examples.tfrecord")) as writer:
        for i in range(300):
            values = tf.train.Feature(float_list=tf.train.FloatList(value=[i] * 16))
            label = tf.train.Feature(int64_list=tf.train.Int64List(value=[i]))
            example = tf.train.Features(feature={"x": values, "y": label})
            writer.write(tf.train.Example(features=example).SerializeToString())
    (folder / "signals").mkdir()
    for i in range(40):
        np.save(folder / "signals" / f"{i:02}.npy", np.full(5, i % 2))
    cities = ["Bonn", "Oslo", "Rome", "Lima"]
    lines = [f"{20 + i % 50},{cities[i % 4]},{2000 + 10 * (i % 50 * 4)}" for i in range(500)]
    (folder / "people.csv").write_text("\n".join(["age,city,income", *lines]))
    np.save(folder / "series.npy", np.arange(6000, dtype="float32").reshape(2000, 3))


@pytest.fixture(scope="module")
def program(tmp_path_factory):
    """Runs the page; returns the names after each block, and what each printed."""
    folder = tmp_path_factory.mktemp("data")
    make_files(folder)
    keras.utils.set_random_seed(0)
    names, after, printed = {"__name__": "page"}, [], []
    # A set that tfds prepares here, as ArrayRecord, in place of the 60,000 digits of the network.
    digits = tfds.testing.DummyMnist(data_dir=str(folder / "tfds"), file_format="array_record")
    digits.download_and_prepare()
    small = {
        "num_examples=60_000": "num_examples=20",
        "expected_batch_size=600)": "expected_batch_size=4)",
    }
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tfds, "data_source", lambda name, split: digits.as_data_source(split))
        patch.chdir(folder)
        for block in BLOCKS:
            if "tfds" in block:
                for large, number in small.items():
                    assert large in block
                    block = block.replace(large, number)
            lines = []
            names["print"] = lines.append
            exec(block, names)  # The reader's own lines, from our own page.
            after.append(dict(names))
            printed.append(lines)
            if isinstance(names.get("data"), tf.data.Dataset):
                after[-1]["batch"] = next(iter(names["data"]))
        yield after, printed


def of_block(program, word):
    """Returns the names after the block of the page that has this word."""
    (index,) = [i for i, block in enumerate(BLOCKS) if word in block]
    return program[0][index]


def rows_of(batch):
    """Returns the features and targets of the rows that were drawn, and checks their mark."""
    x, y, weights = batch
    assert int(provenance.count_marks(weights)) == 1
    return x, y.numpy()


def test_c2_every_kind_of_data_has_code():
    kinds = ("np.load", "h5py", "glob", "array_record", "tfds.data_source", "__getitem__", "pandas",
             "FeatureSpace", "StringLookup", "sparse.random", "ragged",
             "sliding_window_view")  # fmt: skip
    assert [kind for kind in kinds if not any(kind in block for block in BLOCKS)] == []


def test_c2_memory_maps_and_h5py(program):
    names = of_block(program, "# float32 [1200")
    assert names["budget"].accounted_steps() == 20 and len(names["x"]) == 1000
    assert isinstance(names["x"], np.memmap)
    x, y = rows_of(of_block(program, "import h5py")["batch"])
    np.testing.assert_array_equal(x["signal"].numpy(), np.repeat(y, 3).reshape(-1, 3))
    np.testing.assert_array_equal(x["age"].numpy(), y)


def test_c2_a_folder_of_images_trains_and_is_accounted_with_amplification(program):
    names = of_block(program, "def decode")
    x, y = rows_of(names["batch"])
    assert x.shape[1:] == (16, 16, 3) and names["names"] == ["cat", "dog"]
    np.testing.assert_allclose(x.numpy()[:, 5, 5, 1], y * np.float32(100 / 255), rtol=1e-5)
    budget = dice_tf.EpsilonCallback(names["sampling"], delta=1e-3)
    train(names["data"], 24, budget, epochs=2)
    assert budget.accounted_steps() == names["sampling"].steps(2)


def test_c2_a_directory_is_accounted_as_shuffled_epochs(program):
    names = of_block(program, "stream = ")
    train(names["stream"], 24, names["budget"], epochs=2)
    assert names["budget"].accounted_steps() == 10


def train(data, batch, budget, epochs):
    model = keras.Sequential([keras.layers.Flatten(), keras.layers.Dense(2)])
    model.compile(
        dice_tf.DiceSGDOptimizer(
            0.1, l2_norm_clip=0.5, noise_multiplier=3.0, expected_batch_size=batch
        ),
        keras.losses.SparseCategoricalCrossentropy(from_logits=True),
    )
    model.fit(data, epochs=epochs, verbose=0, callbacks=[budget])


def rdp_epsilon(rounds, probability, noise, delta):
    """dp_accounting's own epsilon of a Poisson-subsampled Gaussian mechanism."""
    event = dp_accounting.GaussianDpEvent(noise)
    if probability < 1:
        event = dp_accounting.PoissonSampledDpEvent(probability, event)
    accountant = rdp_privacy_accountant.RdpAccountant()
    return accountant.compose(dp_accounting.SelfComposedDpEvent(event, rounds)).get_epsilon(delta)


def test_c2_epsilons_of_the_page(program):
    (index,) = [i for i, block in enumerate(BLOCKS) if "paths_drawn" in block]
    stated = re.findall(r"^print\(.*\) +# ([\d.]+)$", BLOCKS[index], re.MULTILINE)
    assert program[1][index] == stated and len(stated) == 2
    # 400 steps of 20,000 examples: a group of two takes every other step with probability 0.1.
    drawn = rdp_epsilon(200, 0.1, 5 / math.sqrt(2), 5e-6)
    # Once in each of 20 epochs, with head and residual.
    shuffled = rdp_epsilon(20, 1.0, 5 / 2, 5e-6)
    for expected, found in zip((drawn, shuffled), stated, strict=True):
        assert float(found) == pytest.approx(expected, rel=0.01)


def test_c2_records_keep_their_bytes(program):
    x, y = rows_of(of_block(program, "ArrayRecordWriter")["batch"])
    assert x.shape[1:] == (16,)
    np.testing.assert_array_equal(x.numpy()[:, 7], y)
    names = of_block(program, "tfds.data_source")
    x, _ = rows_of(names["batch"])
    assert x.shape[1:] == (28, 28, 1) and len(names["source"]) == 20


def test_c2_grain_reads_the_records_that_were_drawn(program):
    names = of_block(program, "import grain")
    x, y = rows_of(names["batch"])
    sizes = {len(record) for record in names["records"]}
    np.testing.assert_array_equal(x.numpy()[:, 0] % 2, y)
    assert set(x.numpy()[:, 0].astype(int).tolist()) <= sizes and len(names["lengths"]) == 300


def test_c2_sources_of_ones_own(program):
    x, y = rows_of(of_block(program, "class Recordings")["batch"])
    np.testing.assert_array_equal(x.numpy()[:, 4], y)


def test_c2_tables_are_dictionaries_of_columns(program):
    x, y = rows_of(of_block(program, "space.adapt")["batch"])
    # The age, and one of four cities: three that are known, and any other.
    assert x.shape[1] == 5
    np.testing.assert_array_equal(x.numpy()[:, 1:].sum(axis=1), 1)
    age = np.rint(x.numpy()[:, 0] * 100)
    np.testing.assert_array_equal(y, 2000 + 40 * (age - 20) > 3000)
    x, _ = rows_of(of_block(program, "StringLookup")["batch"])
    assert set(x["city"].numpy()) <= {0, 1, 2, 3} and x["age"].numpy().min() >= 20


def test_c2_sparse_and_ragged_rows(program):
    names = of_block(program, "sparse.random")
    x, _ = rows_of(next(iter(names["sampling"].dataset(names["counts"], names["y"]))))
    assert x.shape[1:] == (5000,) and 0 < np.count_nonzero(x) < 0.02 * np.size(x)
    x, _ = rows_of(names["batch"])
    assert x.shape[1:] == (8,)
    assert {tuple(row) for row in x.numpy()} == {(1, 2, 3, *[0] * 5), (4, 5, *[0] * 6)}


def test_a6_windows_do_not_overlap_or_show_one_of_each_person(program):
    names = of_block(program, "sliding_window_view")
    x, y = rows_of(names["batch"])
    # Values count the steps: window i has steps 10 i to 10 i + 9, and none of another.
    first = x.numpy()[:, 0, 0] / 3
    np.testing.assert_array_equal(first % 10, 0)
    np.testing.assert_array_equal(x.numpy()[:, 0], 3 * (first[:, None] + np.arange(9)))
    np.testing.assert_array_equal(y, 3 * (first + 9))
    # The view is read by row, not copied.
    assert dice_tf.sampling.row_readers.row_reader("x", names["windows"]) is not None
    names = of_block(program, "OneWindowEach")
    starts = set()
    for _ in range(3):
        x, y = rows_of(next(iter(names["data"])))
        np.testing.assert_array_equal(y, x.numpy()[:, -1] + 150)
        starts |= set(x.numpy()[:, 0].astype(int))
    persons = {start // 3 % 50 for start in starts}
    assert len(starts) > len(persons), "another window at each draw"


def test_a6_the_group_bound_of_the_page():
    text = " ".join(PAGE.split())
    (numbers,) = re.findall(
        r"windows of (\d+) steps, stride (\d+) \(\$k\$ = (\d+)\), epsilon = ([\d.]+) and delta = "
        r"([\d.e-]+) per window are epsilon = ([\d.]+) and delta = ([\d.e-]+) per step",
        text,
    )
    length, stride, k, epsilon, delta, of_step, delta_of_step = map(float, numbers)
    assert k == math.ceil(length / stride) and of_step == k * epsilon
    expected = k * math.exp((k - 1) * epsilon) * delta
    assert expected <= delta_of_step < 1.05 * expected


def test_a6_a_step_lies_in_as_many_windows_as_the_page_says():
    # "with windows of 10 steps each step lies in 10 of them", by default.
    data = keras.utils.timeseries_dataset_from_array(np.arange(100), None, sequence_length=10)
    windows = np.concatenate(list(data.as_numpy_iterator()))
    assert np.count_nonzero(windows == 50) == 10
    assert "with windows of 10 steps each step lies in 10" in " ".join(PAGE.split())


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__]))
