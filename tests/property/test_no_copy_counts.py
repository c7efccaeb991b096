"""Whatever is forgotten meanwhile, no event counts twice, and a row that is no copy is never called one."""

from itertools import combinations
from typing import Any

import hypothesis.strategies as st
from hypothesis import given, settings

from schemas.aggregation import count
from schemas.entity import Entity
from schemas.time import MINUS_INFINITY_US
from schemas.view import FeatureView
from tests.support.builders import Row, make_source, run_engine, to_rows

_S = 1_000_000


@st.composite
def views(draw: st.DrawFn) -> FeatureView:
    is_session = draw(st.booleans())
    windows: dict[str, Any] = {"gap": "10s"} if is_session else {"slide": "10s"}
    return FeatureView(
        "counted",
        version=1,
        entity=Entity("thing", key="key"),
        source=make_source(
            max_out_of_orderness=draw(st.sampled_from(["0s", "15s"])),
            event_id="id",
            dedup_window=draw(st.sampled_from(["1us", "5s", "40s"])),
        ),
        **windows,
        allowed_lateness=draw(st.sampled_from(["0s", "7s"])),
        emit="every_event",
        features={"n": count() if is_session else count().over("30s")},
    )


@st.composite
def logs(draw: st.DrawFn) -> list[Row]:
    """A session that lasts, and in it copies of any of its events, exactly or nearly as they were."""
    rows: list[Row] = []
    now = 0
    for offset in range(draw(st.integers(2, 40))):
        now += draw(st.sampled_from([1, 4, 9]))
        row = {"key": draw(st.sampled_from("aaaab")), "at": now, "id": f"i{offset}"}
        if rows and draw(st.integers(0, 2)) == 0:
            row = dict(draw(st.sampled_from(rows)))
            row["at"] += draw(st.sampled_from([0, 0, 4, -4, 39, -39]))
        absent = dict.fromkeys(("kind", "n", "x", "flag", "tags", "_broker_time", "_request_id"))
        rows.append(absent | row | {"_offset": offset})
    return rows


@settings(max_examples=200, deadline=None)
@given(view=views(), rows=logs(), splits=st.lists(st.integers(1, 39), max_size=6), restore=st.booleans())
def test_no_two_admitted_rows_are_copies(view: FeatureView, rows: list[Row], splits: list[int], restore: bool) -> None:
    window_us = view.sources[0].dedup_window_us
    assert window_us is not None
    splits = sorted({split for split in splits if split < len(rows)})
    _, dead, _ = run_engine(view, rows, splits=splits, restore=restore, close=True)
    rejected = {letter["_offset"]: letter["reason"] for letter in to_rows(dead)}
    admitted = [row for row in rows if row["_offset"] not in rejected]

    def are_copies(one: Row, other: Row) -> bool:
        return bool(one["id"] == other["id"] and abs(one["at"] - other["at"]) * _S < window_us)

    assert not [pair for pair in combinations(admitted, 2) if are_copies(*pair)]
    for offset, reason in rejected.items():
        if reason == "duplicate":
            row = rows[offset]
            assert any(are_copies(row, other) for other in admitted if other["_offset"] < offset)


@settings(max_examples=100, deadline=None)
@given(view=views(), rows=logs())
def test_a_row_that_is_late_for_being_old_is_older_than_ids_are_remembered(view: FeatureView, rows: list[Row]) -> None:
    window_us, ooo_us = view.sources[0].dedup_window_us or 0, view.sources[0].max_out_of_orderness_us
    _, dead, _ = run_engine(view, rows)
    rejected = {letter["_offset"]: letter for letter in to_rows(dead)}
    watermark_us = MINUS_INFINITY_US
    for row in rows:
        time_us = row["at"] * _S
        letter = rejected.get(row["_offset"])
        if letter is None:
            watermark_us = max(watermark_us, time_us - ooo_us)
        elif "too old to tell it from a copy" in letter["detail"]:
            assert letter["reason"] == "late"
            assert letter["late_by_us"] == watermark_us - time_us
            assert letter["late_by_us"] >= window_us + (view.gap_us or 0) + view.allowed_lateness_us
