"""Looking up, at each event's time, the row of a reference that holds then."""

import contextlib
import itertools
import json
import tempfile
from pathlib import Path
from typing import Any

import hypothesis.strategies as st
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings

from offline.computation import Computation
from schemas.aggregation import count, from_event, mean
from schemas.entity import Entity
from schemas.reference import Reference, ReferenceLookup
from schemas.view import FeatureView
from streams.windowing.lookup import LookupColumns
from tests.support.builders import Row, make_source, run_engine, to_rows

SECOND_US = 1_000_000


def make_reference(rows: list[Row], schema: pa.Schema, **settings: Any) -> Reference:
    with tempfile.TemporaryDirectory() as directory, contextlib.chdir(directory):
        path = Path("schemas") / "references" / "r@1.parquet"
        path.parent.mkdir(parents=True)
        pq.write_table(pa.Table.from_pylist(rows, schema=schema), path)
        return Reference("r", version=1, **settings)


TIMED = pa.schema([("a", pa.string()), ("b", pa.int64()), ("since", pa.timestamp("s", "UTC")), ("x", pa.float64())])


def find(
    lookup: ReferenceLookup, events: list[tuple[str | None, int | None]], times_s: list[int]
) -> list[float | None]:
    table = pa.table(
        {"a": pa.array([a for a, _ in events], pa.string()), "b": pa.array([b for _, b in events], pa.int64())}
    )
    found, is_missing = LookupColumns({"r": lookup}).add(table, np.array(times_s) * SECOND_US)
    values: list[float | None] = found.column("r_x").to_pylist()
    assert is_missing.sum() <= values.count(None)
    return values


def test_a_row_holds_from_its_time_on_until_the_next_of_its_key() -> None:
    rows = [{"a": "p", "b": 1, "since": since, "x": x} for since, x in ((10, 1.0), (20, 2.0))]
    lookup = make_reference(rows, TIMED, key=("a", "b"), valid_from="since").on("a", "b")

    times = [9, 10, 19, 20, 1_000]
    assert find(lookup, [("p", 1)] * 5, times) == [None, 1.0, 1.0, 2.0, 2.0]
    assert find(lookup, [("q", 1), ("p", 2), (None, 1), ("p", None)], [30] * 4) == [None] * 4


def test_a_row_is_used_for_less_than_its_age() -> None:
    rows = [{"a": "p", "b": 1, "since": 10, "x": 1.0}]
    lookup = make_reference(rows, TIMED, key=("a", "b"), valid_from="since").on("a", "b", max_age="5s")

    assert find(lookup, [("p", 1)] * 3, [10, 14, 15]) == [1.0, 1.0, None]


def test_without_times_a_row_holds_always_before_1970_too() -> None:
    schema = pa.schema([("a", pa.string()), ("x", pa.float64())])
    lookup = make_reference([{"a": "p", "x": 1.0}], schema, key="a").on("a")

    assert find(lookup, [("p", None)] * 2, [-(10**6), 10**9]) == [1.0, 1.0]


def test_nothing_is_found_in_an_empty_table() -> None:
    lookup = make_reference([], TIMED, key=("a", "b"), valid_from="since").on("a", "b")

    assert find(lookup, [("p", 1)], [5]) == [None]


KEYS = st.tuples(st.sampled_from(["p", "q", "ü"]), st.integers(-1, 1))


@settings(max_examples=150, deadline=None)
@given(
    rows=st.dictionaries(st.tuples(KEYS, st.integers(-5, 20)), st.none() | st.floats(0, 9), max_size=12),
    events=st.lists(
        st.tuples(KEYS | st.tuples(st.none(), st.integers(0, 1)), st.integers(-8, 30)), min_size=1, max_size=12
    ),
    max_age=st.sampled_from([None, "1s", "7s"]),
)
def test_it_is_what_going_through_all_rows_finds(
    rows: dict[tuple[tuple[str, int], int], float | None],
    events: list[tuple[tuple[str | None, int], int]],
    max_age: str | None,
) -> None:
    content = [{"a": a, "b": b, "since": since, "x": x} for ((a, b), since), x in rows.items()]
    reference = make_reference(content, TIMED, key=("a", "b"), valid_from="since")
    lookup = reference.on("a", "b", max_age=max_age)
    age = None if max_age is None else int(max_age.rstrip("s"))

    def expected(key: tuple[str | None, int], time: int) -> float | None:
        known = [(since, x) for (k, since), x in rows.items() if k == key and since <= time]
        newest = max(known, key=lambda row: row[0], default=None)
        return None if newest is None or (age is not None and time - newest[0] >= age) else newest[1]

    found = find(lookup, [key for key, _ in events], [time for _, time in events])
    assert found == [expected(key, time) for key, time in events]


@pytest.fixture(scope="module")
def view() -> FeatureView:
    rows = [{"a": "a", "b": 1, "since": since, "x": since / 10} for since in (0, 50)]
    reference = make_reference(rows, TIMED, key=("a", "b"), valid_from="since")
    return FeatureView(
        "v",
        version=1,
        entity=Entity("thing", key="key"),
        source=make_source(),
        slide="10s",
        allowed_lateness="1m",
        emit="every_event",
        lookups={"w": reference.on("key", "n")},
        features={
            "x": from_event("w_x"),
            "warm": count(where="w_x > 1").over("1m"),
            "mean": mean("w_x").over("1m"),
        },
    )


EVENTS = [
    {"key": "a", "at": at, "n": n, "_offset": number}
    for number, (at, n) in enumerate([(40, 1), (55, 1), (45, 1), (60, 2), (None, 1), (61, 1)])
]


def test_an_event_that_comes_late_finds_what_held_at_its_time(view: FeatureView) -> None:
    table, _, results = run_engine(view, EVENTS)

    early = [(row["x"], row["warm"], row["mean"]) for row in to_rows(table) if row["pane"] == "EARLY"]
    assert early == [(0.0, 0, 0.0), (5.0, 1, 2.5), (0.0, 0, 0.0), (None, 1, 5.0 / 3), (5.0, 2, 2.5)]
    assert results[0].counts.without_reference == 1


def test_batches_and_restarts_do_not_show(view: FeatureView) -> None:
    whole, _, _ = run_engine(view, EVENTS, close=True)
    for splits in itertools.combinations(range(1, len(EVENTS)), 2):
        parts, _, _ = run_engine(view, EVENTS, splits=splits, close=True, restore=True)
        assert parts.equals(whole)


def test_a_view_with_a_lookup_runs_over_a_file(view: FeatureView, tmp_path: Path) -> None:
    path = tmp_path / "in.ndjson"
    path.write_text("".join(json.dumps({"key": "a", "at": at, "n": 1}) + "\n" for at in (40, 55, 45)))
    made = pa.concat_tables([part.rows for part in Computation(view).run(path)])

    assert [row["x"] for row in to_rows(made) if row["pane"] == "EARLY"] == [0.0, 5.0, 0.0]
