# Copyright 2026 The dice_tf Authors.
# SPDX-License-Identifier: Apache-2.0
"""The script on flights: its data, its plans, and runs from start to end on small tables."""

import csv
from importlib import metadata
import math
import pathlib
import re
import sys

from absl import app, flags
import numpy as np
import pandas as pd
import pytest

EXAMPLES = pathlib.Path(__file__).resolve().parents[1] / "examples"
sys.path.insert(0, str(EXAMPLES))
sys.path.insert(0, str(pathlib.Path(__file__).parent))

from dp_accounting_oracle import TOLERANCE, composed_epsilon
import flight_data
import train_table

SMALL = ("--batch_size=40", "--epochs=2", "--delta=1e-4", "--verbose=0", "--seed=0")


def made_up_tables(folder):
    """Writes tables with the columns of the package: 2,400 flights, late in the evening."""
    rng = np.random.default_rng(0)
    rows = 2400
    hour = rng.integers(5, 24, rows)
    flights = pd.DataFrame({
        "year": 2013,
        "month": rng.integers(1, 13, rows),
        "day": rng.integers(1, 29, rows),
        "dep_time": np.where(rng.random(rows) < 0.03, np.nan, 100.0 * hour),
        "sched_dep_time": 100 * hour,
        "dep_delay": 0.0,
        "arr_time": 2400.0,
        "sched_arr_time": 2400,
        "arr_delay": rng.normal(40.0 * (hour > 18) - 10, 10, rows).round(),
        "carrier": rng.choice(["UA", "DL", "B6"], rows),
        "flight": rng.integers(1, 999, rows),
        "tailnum": [f"N{number:03d}AA" for number in rng.integers(0, 120, rows)],
        "origin": rng.choice(flight_data.ORIGINS, rows),
        "dest": rng.choice(["LAX", "ORD", "SJU"], rows),
        "air_time": 100.0,
        "distance": rng.integers(80, 4983, rows),
        "hour": hour,
        "minute": 0,
    })  # fmt: skip
    flights["time_hour"] = [f"{m}-{d}T{h}" for m, d, h in
                            zip(flights["month"], flights["day"], hour)]  # fmt: skip
    flights.loc[flights["dep_time"].isna(), "arr_delay"] = np.nan
    flights.loc[flights.index[:5], ["tailnum", "arr_delay"]] = None, np.nan
    flights.to_csv(folder / "flights.csv.zip", index=False)
    pd.DataFrame({"carrier": ["B6", "DL", "UA", "AA"]}).to_csv(
        folder / "airlines.csv", index=False)  # fmt: skip
    pd.DataFrame({"faa": ["LAX", "ORD", "SEA"]}).to_csv(folder / "airports.csv", index=False)
    weather = flights[["origin", "time_hour"]].drop_duplicates().iloc[::2].copy()
    for name, (usual, scale) in list(flight_data.NUMBERS.items())[1:]:
        weather[name] = usual + scale
    # Hours of which there are two reports.
    pd.concat([weather, weather[:20]]).to_csv(folder / "weather.csv", index=False)
    return flights


def subset_of_the_package(folder):
    """Writes every hundredth flight of the installed package, and its other tables."""
    source = flight_data.folder_of()
    flights = pd.read_csv(source / "flights.csv.zip").iloc[::100]
    flights.to_csv(folder / "flights.csv.zip", index=False)
    for name in ("airlines.csv", "airports.csv", "weather.csv"):
        (folder / name).write_bytes((source / name).read_bytes())
    return flights


def installed():
    try:
        metadata.distribution(flight_data.PACKAGE)
    except metadata.PackageNotFoundError:
        return False
    return True


# The real flights where they are installed, as `make test` does, and made-up ones anywhere.
SOURCES = {"made up": made_up_tables}
if installed():
    SOURCES["real"] = subset_of_the_package


@pytest.fixture(scope="module", params=list(SOURCES))
def tables(request, tmp_path_factory):
    """A folder of tables, and the flights in it."""
    folder = tmp_path_factory.mktemp(request.param.replace(" ", "_"))
    return folder, SOURCES[request.param](folder)


@pytest.fixture(scope="module")
def data(tables):
    return flight_data.load(tables[0])


def parse(*arguments):
    values = flags.FlagValues()
    train_table.define_flags(values)
    values(["train_table", *map(str, arguments)])
    return train_table.settings_from(values)


def test_rows_are_those_that_arrived_and_no_aircraft_is_on_two_sides(tables, data):
    arrived = tables[1]
    arrived = arrived[arrived["arr_delay"].notna()]
    parts = (data.train, data.validation, data.test)
    assert 0 < len(arrived) < len(tables[1])
    assert sum(len(part.late) for part in parts) == len(arrived)
    assert sum(part.late.sum() for part in parts) == (arrived["arr_delay"] > 15).sum()
    sides = [set(part.aircraft) for part in parts]
    assert all(sides) and len(set.union(*sides)) == sum(map(len, sides))
    for part in parts:
        counts = arrived[arrived["tailnum"].isin(set(part.aircraft))]
        assert len(counts) == len(part.late)
    assert 0.5 < len(data.train.late) / len(arrived) < 0.85


def test_a_row_becomes_the_same_whatever_the_others_are(tables, data, tmp_path):
    folder, flights = tables
    kept = flights[flights["tailnum"].isin(sorted(set(data.train.aircraft))[:10])]
    for name in ("airlines.csv", "airports.csv", "weather.csv"):
        (tmp_path / name).write_bytes((folder / name).read_bytes())
    kept.to_csv(tmp_path / "flights.csv.zip", index=False)
    alone = flight_data.load(tmp_path)
    chosen = np.isin(data.train.aircraft, alone.train.aircraft)
    assert 0 < chosen.sum() == len(alone.train.late) < len(data.train.late)
    assert len(alone.test.late) == len(alone.validation.late) == 0
    for name, values in alone.train.columns.items():
        np.testing.assert_array_equal(values, data.train.columns[name][chosen])
    assert alone.sizes == data.sizes


def test_features_are_what_they_say(tables, data):
    folder, flights = tables
    frame = flights[flights["arr_delay"].notna()].reset_index(drop=True)
    frame = frame[frame["tailnum"].isin(set(data.train.aircraft))]
    columns = {name: values[:, 0] for name, values in data.train.columns.items()}
    np.testing.assert_allclose(columns["distance"], (frame["distance"] - 1000) / 1000, atol=1e-6)
    weekdays = [pd.Timestamp(y, m, d).dayofweek for y, m, d in
                zip(frame["year"], frame["month"], frame["day"])]  # fmt: skip
    for name, values in (("weekday", weekdays), ("hour", frame["hour"]),
                         ("month", frame["month"]), ("carrier", frame["carrier"])):  # fmt: skip
        # One number for each value, and another one for each other value.
        pairs = set(zip(values, columns[name]))
        assert len(pairs) == len(set(values)) == len(set(columns[name])), name
        assert 0 <= columns[name].min() and columns[name].max() < data.sizes[name]
    airports = set(pd.read_csv(folder / "airports.csv")["faa"])
    np.testing.assert_array_equal(columns["dest"] == 0, ~frame["dest"].isin(airports))
    assert 0 < (columns["dest"] == 0).mean() < 0.5


def test_weather_is_that_of_the_hour_and_gaps_are_usual(tmp_path):
    made_up_tables(tmp_path)
    data = flight_data.load(tmp_path)
    # Half of the hours have a report, one scale above what is usual.
    for name in list(flight_data.NUMBERS)[1:]:
        values = data.train.columns[name]
        assert set(np.round(values[:, 0], 4)) == {0.0, 1.0}
        assert 0.3 < values.mean() < 0.7


# What one unit can move, over C1; rounds: 2 epochs of N/B steps, in groups by cycles.
@pytest.mark.parametrize(
    "unit, method, accountant",
    [("flight", "dice", "pld"), ("aircraft", "dice", "rdp"), ("aircraft", "dpsgd", "rdp")],
)
def test_epsilon_is_that_of_dp_accounting(unit, method, accountant):
    aircraft = np.repeat([f"N{i}" for i in range(1000)], 3)
    settings = parse(
        f"--unit={unit}", "--epsilon=3", "--delta=1e-5", "--batch_size=50", "--epochs=2",
        "--feedback_steps=3", "--head_share=0.5", f"--accountant={accountant}",
        "--rows_per_owner=2",
    )  # fmt: skip
    plan = train_table.make_plan(settings, aircraft, method)
    units = 3000 if unit == "flight" else 1000
    groups, influence = (4, math.sqrt(1 + 1 / 3)) if method == "dice" else (1, 1.0)
    assert (plan.num_examples, plan.steps) == (units, 2 * units // 50)
    assert plan.sampling.rows_per_unit == (1 if unit == "flight" else 2)
    expected = composed_epsilon(
        groups * 50 / units, plan.noise_multiplier / influence, plan.steps // groups, 1e-5,
        accountant,
    )  # fmt: skip
    assert plan.epsilon() == pytest.approx(expected, rel=TOLERANCE[accountant])
    assert 2.97 < plan.epsilon() <= 3.0
    mechanism = train_table.make_optimizer(settings, plan).mechanism
    total = mechanism.l2_norm_clip + mechanism.error_norm_clip
    assert total == pytest.approx(settings.total_clip)


@pytest.mark.parametrize("unit", train_table.UNITS)
def test_runs_from_start_to_end(unit, tmp_path, capsys):
    # On the real flights if they are there.
    (tmp_path / "tables").mkdir()
    list(SOURCES.values())[-1](tmp_path / "tables")
    extra = ["--batch_size=8", "--rows_per_owner=4"] if unit == "aircraft" else []
    results = train_table.run(parse(
        *SMALL, f"--unit={unit}", "--epsilon=8", "--feedback_steps=1",
        f"--data_dir={tmp_path}/tables", f"--output_dir={tmp_path}", *extra,
    ))  # fmt: skip
    assert [result.method for result in results] == list(train_table.METHODS)
    assert all(7.9 < result.epsilon <= 8 for result in results[:2])
    assert math.isinf(results[2].epsilon)
    printed = " ".join(capsys.readouterr().out.split())
    word = "one owner is added" if unit == "aircraft" else "one example is added"
    for method in ("dice", "dpsgd"):
        statement = (tmp_path / f"statement_{method}.txt").read_text(encoding="utf-8")
        assert word in " ".join(statement.split())
        assert word in printed
    with open(tmp_path / "results.csv", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    assert [float(row["auc"]) for row in rows] == [result.auc for result in results]
    table = re.search(r"(\d+) flights of (\d+) test aircraft.*", printed)
    assert f"nonprivate inf {results[2].auc:.4f}" in table[0]


def test_private_training_learns_who_is_late(tmp_path):
    made_up_tables(tmp_path)
    data = flight_data.load(tmp_path)
    settings = parse(
        "--verbose=0", "--batch_size=200", "--epochs=15", "--epsilon=8", "--delta=1e-4",
        "--feedback_steps=1", "--head_share=0.5", "--total_clip=1", "--learning_rate=2",
        "--validation",
    )  # fmt: skip
    result, statement = train_table.train(settings, data, "dice", seed=0)
    # By chance 0.5; the hour alone tells nearly all.
    assert result.auc > 0.9 and result.average_precision > 0.7
    assert "epsilon" in statement


def test_missing_tables_are_said(tmp_path, monkeypatch):
    with pytest.raises(app.UsageError, match="There is no flights.csv.zip. Received: .*"):
        flight_data.folder_of(tmp_path)
    monkeypatch.setattr(flight_data, "PACKAGE", "no_such_package_of_flights")
    with pytest.raises(app.UsageError, match="pip install --no-deps no_such_package_of_flights"):
        flight_data.folder_of()


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__]))
