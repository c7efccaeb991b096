"""Training sets: labels with what was known at their moment, from the tables of the offline store."""

import json
import random
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from deltalake import DeltaTable

from offline.training_set import join_features
from schemas.aggregation import count, last_n
from schemas.errors import ConfigError, SinkUnavailableError
from schemas.row import TIMESTAMP
from schemas.view import FeatureView
from streams.sinks.offline import OfflineWriter, read_features
from tests.support.feature_rows import T0_US, make_rows, make_view
from tests.support.history import Place

MINUTE_US = 60_000_000
USERS = make_view("users", features={"n": count().over("5m")}, max_out_of_orderness="30s", ttl="20m")
ACCOUNTS = make_view("accounts", key="account", features={"m": count().over("5m"), "l": last_n("amount").over(last=2)})
ORDER = ("window_end", "pane_index", "source_offset")


def random_rows(view: FeatureView, *, seed: int, n_rows: int = 300) -> list[dict[str, Any]]:
    """Rows of two hours; some of events that came out of order, some panes that fired late, some empty ones."""
    chance = random.Random(seed)
    rows: list[dict[str, Any]] = []
    front = T0_US
    for offset in range(n_rows):
        front += chance.randrange(MINUTE_US)
        event_us = front - chance.choice([0, 0, 0, 20_000_000, 90_000_000])
        key = chance.randrange(8)
        values = {name: offset if name in ("n", "m") else [0.5, float(offset)] for name in view.definitions}
        rows.append(
            {
                view.entity.key: f"u{key}" if view.entity.key == "user_id" else key,
                "event_time": event_us,
                "window_end": event_us // MINUTE_US * MINUTE_US + MINUTE_US,
                "pane": chance.choice(["EARLY", "EARLY", "LATE", "EMPTY"]),
                "pane_index": chance.randrange(2),
                "watermark": front - view.input.max_out_of_orderness_us,
                "source_offset": offset,
                **values,
            }
        )
    return rows


def store(root: Path, view: FeatureView, rows: list[dict[str, Any]]) -> None:
    OfflineWriter(root).write(make_rows(view, rows), view=view, partition=0, offsets=range(len(rows)))


def labels_of(n_labels: int, *, seed: int = 0) -> pa.Table:
    chance = random.Random(seed)
    times = [T0_US + chance.randrange(-10 * MINUTE_US, 200 * MINUTE_US) for _ in range(n_labels)]
    return pa.table(
        {
            "user_id": [None if chance.random() < 0.05 else f"u{chance.randrange(10)}" for _ in range(n_labels)],
            "account": [chance.randrange(10) for _ in range(n_labels)],
            "event_time": pa.array(times, TIMESTAMP),
            "label": [chance.random() < 0.5 for _ in range(n_labels)],
        }
    )


def read_naively(view: FeatureView, rows: list[dict[str, Any]], key: Any, at_us: int) -> dict[str, Any]:
    """Go over the rows in the order in which they were known, as the online store does."""
    known: list[tuple[int, int, dict[str, Any]]] = []
    for row in rows:
        since = max(row["event_time"], row["watermark"] + view.input.max_out_of_orderness_us)
        if row[view.entity.key] == key and since <= at_us:
            known.append((since, row["source_offset"], row))
    newest = max((row for _, _, row in known), key=lambda row: [row[name] for name in ORDER], default=None)
    nothing = dict.fromkeys(view.definitions)
    if newest is None:
        return {**nothing, "status": "missing"}
    values = {name: newest[name] for name in view.definitions}
    if newest["pane"] == "EMPTY":
        return {**values, "status": "empty"}
    if view.ttl_us is not None and at_us - newest["event_time"] > view.ttl_us:
        return {**nothing, "status": "stale"}
    return {**values, "status": "present"}


@pytest.mark.parametrize("held_rows", [10_000, 37])
def test_each_label_has_what_was_known_at_its_moment(tmp_path: Path, held_rows: int) -> None:
    """With few rows held at a time they go to disk by entity first."""
    made = {view.name: random_rows(view, seed=at) for at, view in enumerate((USERS, ACCOUNTS))}
    for view in (USERS, ACCOUNTS):
        store(tmp_path, view, made[view.name])
    labels = labels_of(400)
    found = join_features(labels, [USERS, ACCOUNTS], root=tmp_path, held_rows=held_rows)
    assert found.rows.select(labels.column_names).equals(labels)
    statuses = set()
    for row, at_us in zip(found.rows.to_pylist(), labels["event_time"].cast(pa.int64()).to_pylist(), strict=True):
        for view in (USERS, ACCOUNTS):
            expected = read_naively(view, made[view.name], row[view.entity.key], at_us)
            assert {name: row[f"{view.name}__{name}"] for name in expected} == expected
            statuses.add(expected["status"])
    assert statuses == {"present", "empty", "stale", "missing"}


def test_what_comes_after_a_label_changes_nothing(tmp_path: Path) -> None:
    rows = random_rows(USERS, seed=3)
    labels = labels_of(200)
    newest_us = max(labels["event_time"].cast(pa.int64()).to_pylist())
    store(tmp_path / "before", USERS, rows)
    planted = [
        {**row, "n": -1, "source_offset": 10_000 + at, "watermark": newest_us + MINUTE_US, "window_end": 2**61}
        for at, row in enumerate(rows)  # their events lie in the past, but nobody knew them then
    ]
    planted += [{**row, "n": -2, "event_time": newest_us + 1, "source_offset": 20_000} for row in rows[:50]]
    store(tmp_path / "after", USERS, [*rows, *planted])
    before, after = (join_features(labels, [USERS], root=tmp_path / name) for name in ("before", "after"))
    assert after.rows.equals(before.rows)
    assert before.rows["users__status"].to_pylist().count("present") > 20


def test_the_manifest_says_what_it_was_made_of(tmp_path: Path) -> None:
    store(tmp_path, USERS, random_rows(USERS, seed=5))
    labels = labels_of(100)
    found = join_features(labels, [USERS], root=tmp_path, max_age_us=5 * MINUTE_US)
    (told,) = found.manifest["views"]
    assert (told["view"], told["version"], told["definition_hash"]) == ("users", 1, USERS.definition_hash)
    assert told["table_version"] == 1
    assert found.manifest["labels"]["rows"] == 100
    assert told["null_shares"]["n"] == found.rows["users__n"].null_count / 100
    assert sum(told["status_shares"].values()) == pytest.approx(1)
    assert told["status_shares"]["stale"] == found.rows["users__status"].to_pylist().count("stale") / 100 > 0


def test_labels_without_rows_and_tables_without_them_are_no_special_case(tmp_path: Path) -> None:
    store(tmp_path, USERS, random_rows(USERS, seed=5))
    labels = labels_of(3)
    assert join_features(labels.slice(0, 0), [USERS], root=tmp_path).rows.num_rows == 0
    unknown = labels.set_column(0, "user_id", pa.array(["nobody"] * 3))
    assert join_features(unknown, [USERS], root=tmp_path).rows["users__status"].to_pylist() == ["missing"] * 3


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"time": "when"}, r"expected 'when' for the times among them"),
        ({"keys": {"users": "uid"}}, r"expected 'uid' for the keys of view users"),
        ({"time": "label"}, r"label as bool, expected a timestamp with a time zone"),
        ({"views": [USERS, USERS]}, r"expected at least one, and each once"),
        (
            {"keys": {"accounts": "user_id"}, "views": [ACCOUNTS]},
            r"user_id as string, expected int64 for view accounts",
        ),
    ],
)
def test_labels_that_do_not_fit_are_refused(tmp_path: Path, change: dict[str, Any], said: str) -> None:
    options = {"views": [USERS], **change}
    with pytest.raises(ConfigError, match=said):
        join_features(labels_of(10), options.pop("views"), root=tmp_path, **options)


def test_without_a_table_it_says_who_writes_it(tmp_path: Path) -> None:
    with pytest.raises(SinkUnavailableError, match="offline role or a backfill"):
        join_features(labels_of(10), [USERS], root=tmp_path)


def test_the_command_writes_parquet_and_delta_with_a_manifest(tmp_path: Path) -> None:
    place = Place(tmp_path)
    place.write_live(place.view, place.live_rows(place.view))
    newest = max(row["event_time"] for row in read_features(place.delta, place.view).to_pylist())
    times = [newest + timedelta(minutes=1), newest - timedelta(minutes=2), datetime(2020, 1, 1, tzinfo=UTC)]
    labels = pa.table({"who": ["u1-0"] * 3, "at": pa.array(times, TIMESTAMP)})
    pq.write_table(labels, tmp_path / "labels.parquet")
    options = ("--view", "activity=who", "--time", "at")
    done = [
        place.run(str(tmp_path / "labels.parquet"), str(tmp_path / name), *options, "--json", command="training-set")
        for name in ("set.parquet", "set")
    ]
    assert [outcome.code for outcome in done] == [0, 0], done[0].err
    written = pq.read_table(tmp_path / "set.parquet")
    assert written["activity__status"].to_pylist() == ["present", "present", "missing"]
    assert pl.from_arrow(DeltaTable(str(tmp_path / "set")).to_pyarrow_table()).equals(pl.from_arrow(written))
    manifest = json.loads((tmp_path / "set.parquet.manifest.json").read_text())
    assert manifest == json.loads(done[0].out)
    assert len(manifest["labels"]["sha256"]) == 64
    again = place.run(str(tmp_path / "labels.parquet"), str(tmp_path / "set"), *options, command="training-set")
    assert (again.code, "is there already" in again.err) == (2, True)
