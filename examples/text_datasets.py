# Copyright 2026 The dice_tf Authors.
# SPDX-License-Identifier: Apache-2.0
"""Texts of the examples: E2E NLG, files of one's own, and the definitions of WordNet."""

import csv
import json
import pathlib
from typing import NamedTuple

import numpy as np
import tensorflow_datasets as tfds

# The 26 kinds of noun that WordNet's lexicographers worked on, from number 3 on.
NOUN_KINDS = (
    "Tops", "act", "animal", "artifact", "attribute", "body", "cognition", "communication",
    "event", "feeling", "food", "group", "location", "motive", "object", "person", "phenomenon",
    "plant", "possession", "process", "quantity", "relation", "shape", "state", "substance",
    "time",
)  # fmt: skip
FIRST_NOUN_KIND = 3
MOST_TEST_DEFINITIONS = 2000
SPLIT_SEED = 0


class TextPairs(NamedTuple):
    """Inputs and what should be written for them.

    Attributes:
        train: List of pairs (input, text). The unit of privacy is one pair.
        test: List of pairs; several may have the same input.
        source: Text, where they come from.
    """

    train: list
    test: list
    source: str


class LabelledTexts(NamedTuple):
    """Texts, each of one of several classes.

    Attributes:
        train: List of pairs (text, class number). The unit of privacy is one pair.
        test: List of such pairs.
        class_names: Names of the classes.
        source: Text, where they come from.
    """

    train: list
    test: list
    class_names: tuple
    source: str


def load_e2e(data_dir=None):
    """Loads the cleaned E2E NLG data: attributes of a restaurant, and a sentence about it.

    Args:
        data_dir: Folder of prepared data sets; `None` is TFDS' default, which is
            `~/tensorflow_datasets` or the environment variable `TFDS_DATA_DIR`.

    Returns:
        `TextPairs`. An input is written as E2E does: `name[The Eagle], food[French]`.

    Raises:
        ConnectionError: If the texts have to be downloaded and cannot be.

    Source: Dusek, Howcroft, Rieser, "Semantic Noise Matters for Neural Natural Language
    Generation", INLG 2019.
    """
    builder = tfds.builder("e2e_cleaned", data_dir=data_dir)
    if not builder.is_prepared():
        print(f"Downloading and preparing e2e_cleaned in {builder.data_dir}, once.", flush=True)
        try:
            builder.download_and_prepare(
                download_config=tfds.download.DownloadConfig(try_download_gcs=False)
            )
        # TFDS' network errors are the `requests` ones, which are all OSErrors, or its own.
        except (OSError, tfds.download.DownloadError) as error:
            raise ConnectionError(
                f"The data set 'e2e_cleaned' could not be downloaded from its publisher: {error}. "
                "Pass --train_file and --test_file, prepare it elsewhere and copy it to "
                f"{builder.data_dir}, or use --task=classify, which needs no network."
            ) from error
    read = lambda split: [
        _pair_of(example) for example in tfds.as_numpy(builder.as_dataset(split=split))
    ]
    source = f"TFDS data set {builder.name} {builder.version}, {builder.info.homepage}"
    return TextPairs(read("train"), read("test"), source)


def _pair_of(example):
    table = example["input_text"]["table"]
    attributes = zip(table["column_header"], table["content"], strict=True)
    mr = ", ".join(f"{name.decode()}[{content.decode()}]" for name, content in attributes)
    return mr, example["target_text"].decode()


def load_pairs(train_file, test_file):
    """Loads pairs of input and text from files.

    Args:
        train_file: Path, see `read_pairs`.
        test_file: Path.

    Returns:
        `TextPairs`.
    """
    source = f"files {train_file} and {test_file}"
    return TextPairs(read_pairs(train_file), read_pairs(test_file), source)


def read_pairs(path):
    """Reads pairs of input and text, `mr` and `ref` as in the files of E2E NLG.

    Args:
        path: Path of a CSV file with these columns, or of a JSON file with a list of
            objects with these keys.

    Returns:
        List of pairs of texts.

    Raises:
        ValueError: If the file has another ending, no pairs, or lacks a column.
    """
    path = pathlib.Path(path)
    if path.suffix not in (".csv", ".json"):
        raise ValueError(f"A file of texts must end in .csv or .json. Received: {path}.")
    with open(path, encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file)) if path.suffix == ".csv" else json.load(file)
    if not rows:
        raise ValueError(f"{path} has no texts.")
    for number, row in enumerate(rows, start=1):
        if not all(isinstance(row.get(key), str) for key in ("mr", "ref")):
            raise ValueError(f"Entry {number} of {path} has no text for 'mr' and 'ref': {row}.")
    return [(row["mr"], row["ref"]) for row in rows]


def load_definitions(folder):
    """Loads WordNet's definitions of nouns, and what kind of thing each defines.

    A definition is what precedes the examples. Texts that occur twice are kept once, so that
    none is in both parts: 81,484 in WordNet 3.0.

    Args:
        folder: Folder of the database files of WordNet (Debian's package wordnet-base).

    Returns:
        `LabelledTexts` in a fixed shuffle: at most 2,000 test definitions, and at most a
        fifth of all.

    Raises:
        FileNotFoundError: If WordNet is not there.

    Source: Miller, "WordNet: A Lexical Database for English", CACM 1995.
    """
    path = pathlib.Path(folder) / "data.noun"
    if not path.is_file():
        raise FileNotFoundError(
            f"There is no {path}. Install Debian's package wordnet-base, or unpack WordNet 3 and "
            "pass the folder of data.noun as --wordnet_dir."
        )
    found = {}
    with open(path, encoding="utf-8") as file:
        for line in file:
            # The licence on top of the file is indented.
            if line.startswith(" "):
                continue
            data, gloss = line.split("|", 1)
            text = gloss.split('; "')[0].strip()
            found.setdefault(text, int(data.split()[1]) - FIRST_NOUN_KIND)
    pairs = list(found.items())
    # NumPy has frozen what this generator returns; that of the newer ones may change.
    order = np.random.RandomState(SPLIT_SEED).permutation(len(pairs))
    end = len(pairs) - min(MOST_TEST_DEFINITIONS, len(pairs) // 5)
    return LabelledTexts(
        train=[pairs[i] for i in order[:end]],
        test=[pairs[i] for i in order[end:]],
        class_names=NOUN_KINDS,
        source=f"definitions of nouns in {path}, WordNet, https://wordnet.princeton.edu",
    )


def selected(data, num_examples, validation_fraction):
    """Returns the data with fewer training texts, and held-out ones in place of the test.

    Args:
        data: `TextPairs` or `LabelledTexts`.
        num_examples: Int, number of training texts to keep, or `None`.
        validation_fraction: Float in [0, 1): the end of the kept ones is held out.

    Raises:
        ValueError: If there are fewer training texts than asked for.
    """
    if num_examples is not None and num_examples > len(data.train):
        raise ValueError(
            f"There are {len(data.train)} training texts. Received: num_examples={num_examples}."
        )
    train = data.train[:num_examples]
    if not validation_fraction:
        return data._replace(train=train)
    end = len(train) - round(validation_fraction * len(train))
    return data._replace(train=train[:end], test=train[end:])
