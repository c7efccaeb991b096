"""Sessions in batches: what is looked at row by row, and what becomes of a batch full of mergers."""

import dataclasses
from typing import Any

import pyarrow.compute as pc
import pytest

from schemas.aggregation import approx_distinct, count, distinct, first, stddev, sum_
from schemas.entity import Entity
from schemas.view import FeatureView
from streams.windowing import session_intake, session_layout
from tests.support.builders import Row, make_source, run_engine, to_rows

N_ROWS = 400


def make_view(*, emit: str = "every_event", **source: Any) -> FeatureView:
    return FeatureView(
        "sessions",
        version=1,
        entity=Entity("thing", key="key"),
        source=make_source(**{"max_out_of_orderness": "1h"} | source),
        gap="10s",
        emit=emit,
        features={
            "n": count(),
            "total": sum_("x"),
            "spread": stddev("x"),
            "kinds": distinct("kind"),
            "about": approx_distinct("id"),
            "oldest": first("kind"),
            "ever": count().over(lifetime=True),
        },
    )


def event(offset: int, at: int, key: str = "a") -> Row:
    values = {"kind": f"k{offset % 7}", "x": offset / 3, "id": f"i{offset}"}
    return {"key": key, "at": at, "_offset": offset, "_broker_time": None, "_request_id": None} | values


def mergers() -> list[Row]:
    """Rows of two keys, every second of which merges the session so far with the row before it."""
    times = [time for step in range(N_ROWS // 4) for time in (18 * step + 18, 18 * step + 9)]
    return [event(2 + 2 * i + j, at, key) for i, at in enumerate(times) for j, key in enumerate("ab")]


@pytest.mark.parametrize("emit", ["every_event", "latest", "on_close"])
@pytest.mark.parametrize("source", [{}, {"event_id": "id", "dedup_window": "1h"}], ids=["", "deduplicated"])
def test_a_batch_full_of_mergers_is_as_one_row_at_a_time(emit: str, source: dict[str, Any]) -> None:
    rows = [event(0, 0), event(1, 0, "b"), *mergers()]
    rows += [{**rows[5], "_offset": 10_000}, event(10_001, 1), event(10_002, 40, "c")]
    whole, dead, results = run_engine(make_view(emit=emit, **source), rows, close=True)
    singly, dead_singly, _ = run_engine(
        make_view(emit="on_close" if emit == "on_close" else "every_event", **source),
        rows,
        splits=range(len(rows)),
        close=True,
    )
    expected = to_rows(singly)
    if emit == "latest":
        last = {row["key"]: row["source_offset"] for row in expected if row["pane"] == "EARLY"}
        expected = [r for r in expected if r["pane"] != "EARLY" or r["source_offset"] == last[r["key"]]]

    assert to_rows(whole) == expected
    assert dead.equals(dead_singly)
    assert dead.num_rows == bool(source)
    assert results[0].counts.admitted == len(rows) - dead.num_rows
    assert pc.max(whole.column("n")).as_py() >= N_ROWS // 2


def test_rows_in_order_are_never_looked_at_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(**_: Any) -> None:
        pytest.fail("a row was looked at by itself")

    monkeypatch.setattr(session_layout, "SessionWalk", refuse)
    monkeypatch.setattr(session_intake, "SessionWalk", refuse)
    view = make_view(max_out_of_orderness="4s", event_id="id", dedup_window="1h")
    times = [at + shift for at in range(0, 600, 3) for shift in (3, 0)] + [700, 800, 803]
    table, _, _ = run_engine(view, [event(i, at, "ab"[i % 3 == 0]) for i, at in enumerate(times)], splits=[50, 300])

    assert table.num_rows > len(times)


def test_behind_a_repartition_topic_a_session_that_a_record_closes_fires_before_the_record_changes_it() -> None:
    def record(offset: int, at: int, *, before: int | None, after: int) -> Row:
        sender = {"_source": "test.events", "_source_partition": 0, "_source_partitions": 1}
        told = {"_watermark": before, "_watermark_after": after, "_is_event": True, "_is_idle": False}
        return event(offset, at) | {"_time": at} | told | sender

    view = dataclasses.replace(make_view(key="", max_out_of_orderness="0s"), allowed_lateness="5s")
    second = 1_000_000
    records = [
        record(0, 0, before=None, after=0),
        record(1, 10 * second, before=0, after=10 * second),
        record(2, 9 * second, before=10 * second, after=10 * second),
    ]
    whole, _, _ = run_engine(view, records)
    singly, _, _ = run_engine(view, records, splits=[1, 2], restore=True)

    made = [(row["pane"], row["pane_index"], row["n"]) for row in to_rows(whole) if row["source_offset"] == 2]
    assert made == [("ON_TIME", 0, 1), ("EMPTY", 1, 0), ("LATE", 2, 3), ("EARLY", 3, 3)]
    assert to_rows(singly) == to_rows(whole)
