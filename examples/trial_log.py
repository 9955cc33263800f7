# Copyright 2026 The dice_tf Authors.
# SPDX-License-Identifier: Apache-2.0
"""A folder of finished trials that outlives a kill at any moment.

`settings.json` says what all trials depend on, so that a restart with other flags is
refused. A CSV file has one row per finished trial, each on disk before the next starts.
A trial is a pair of `NamedTuple`s whose fields are numbers and text: what it was (the
key), and what came of it (the result).
"""

import csv
import json
import os

from absl import app

SETTINGS = "settings.json"


def claim_folder(folder, shared):
    """Makes a folder belong to one search, or checks that it does.

    Args:
        folder: `pathlib.Path`.
        shared: Dict of what all trials depend on, in types that JSON has.

    Raises:
        app.UsageError: If the folder has trials of another search, or of an unknown one.
    """
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / SETTINGS
    remedy = "Name another --output_dir, or remove this one."
    if not path.exists():
        unknown = sorted(file.name for file in folder.glob("*.csv"))
        if unknown:
            raise app.UsageError(f"{folder} has {unknown} but no {SETTINGS} to check by. {remedy}")
        # Renamed when complete: there is never half a file of this name.
        part = path.with_suffix(".part")
        _write(part, "w", json.dumps(shared, indent=1))
        os.replace(part, path)
        return
    known = json.loads(path.read_text(encoding="utf-8"))
    different = [
        f"{name} was {known.get(name)!r} and is {shared.get(name)!r}"
        for name in sorted({*known, *shared})
        if known.get(name) != shared.get(name)
    ]
    if different:
        raise app.UsageError(
            f"{folder} has the trials of another search: {'; '.join(different)}. {remedy}"
        )


def read(path, key_type, result_type):
    """Returns the finished trials, and removes a row that a kill cut short.

    Args:
        path: `pathlib.Path` of the CSV file.
        key_type: `NamedTuple` class.
        result_type: `NamedTuple` class.

    Returns:
        Dict from keys to results.

    Raises:
        app.UsageError: If the file has other columns.
    """
    header = ",".join((*key_type._fields, *result_type._fields)) + "\n"
    content = path.read_bytes() if path.exists() else b""
    complete = content[: content.rfind(b"\n") + 1].decode("utf-8")
    if complete and not complete.startswith(header):
        raise app.UsageError(f"{path} does not start with {header!r}. Name another --output_dir.")
    if len(complete) < len(content):
        os.truncate(path, len(complete))
    if not complete:
        _write(path, "a", header)
    rows = csv.DictReader(complete.splitlines())
    return {_parse(key_type, row): _parse(result_type, row) for row in rows}


def append(path, key, result):
    """Adds a finished trial, and returns when it is on disk.

    Args:
        path: `pathlib.Path` of the CSV file.
        key: `NamedTuple`.
        result: `NamedTuple`.
    """
    # The `repr` of a float is read back as the same float; that of NumPy's is not one.
    values = [*_typed(type(key), key), *_typed(type(result), result)]
    text = (value if isinstance(value, str) else repr(value) for value in values)
    _write(path, "a", ",".join(text) + "\n")


def _typed(kind, values):
    """Returns `values` in the types that the fields of `kind` have."""
    types = kind.__annotations__.values()
    return kind(*(to_type(value) for to_type, value in zip(types, values, strict=True)))


def _parse(kind, row):
    return _typed(kind, [row[name] for name in kind._fields])


def _write(path, mode, text):
    with open(path, mode, encoding="utf-8", newline="") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
