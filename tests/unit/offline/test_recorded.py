"""What scores record of the rows that they were made of, against rows made anew."""

from typing import Any

import polars as pl
import pytest

from offline.parity import Comparison
from offline.recorded import RECORDED, LookedUpRows, ScoredRows
from schemas.view import FeatureView
from streams.ports import LogPart
from tests.support.feature_rows import T0_US, make_rows
from tests.support.scoring import CARRIERS, MINUTE_US, TRIPS, make_spec, make_triggers

SPEC = make_spec()
PARTS = {0: LogPart(offsets=range(6), records=6, size_bytes=None)}
ROWS = make_triggers({}, {}, {})
WATERMARKS_US = ROWS["watermark"].cast("int64").to_pylist()


def score(number: int, view: FeatureView = TRIPS, **changes: Any) -> dict[str, Any]:
    """What the score of a trigger row records of a view."""
    at_us = T0_US + number * MINUTE_US
    return {
        "request_id": f"flights.departed-0-{number}",
        "entity": f"f{number}",
        "event_time": at_us,
        "watermark": WATERMARKS_US[number % 3],
        "version": view.version,
        "hash": view.definition_hash,
        "read_time": at_us,
        "status": "present",
        **changes,
    }


def scored(*scores: dict[str, Any]) -> Comparison:
    reads = ScoredRows(TRIPS, SPEC, pl.DataFrame(list(scores), schema=RECORDED))
    for number in range(ROWS.num_rows):
        reads.see(ROWS.slice(number, 1))
    return reads.finish(PARTS)


def test_scores_of_rows_that_the_records_make_are_compared_and_do_not_differ() -> None:
    found = scored(*map(score, range(3)))
    assert (found.store, found.rows, found.values, found.mismatched, found.not_judged) == ("scores.delay", 3, 12, 0, 0)


@pytest.mark.parametrize(
    ("column", "value"),
    [("entity", "f9"), ("event_time", 5), ("watermark", 5), ("watermark", None), ("read_time", T0_US)],
)
def test_what_a_score_says_otherwise_of_its_row_is_found(column: str, value: Any) -> None:
    found = scored(score(0), score(1, **{column: value}))
    (mismatch,) = found.mismatches
    assert (mismatch.kind, mismatch.column, mismatch.served) == ("value", column, value)
    assert mismatch.recomputed == score(1)[column]
    assert mismatch.lineage["request_id"] == "flights.departed-0-1"
    assert found.rows == 2


def test_a_score_of_no_row_is_found_where_the_log_has_its_record() -> None:
    found = scored(score(4), score(7), score(1, request_id="a-producers-own"), score(2, request_id="other-0-2"))
    assert [(m.kind, m.lineage["request_id"]) for m in found.mismatches] == [("unexpected", "flights.departed-0-4")]
    assert (found.rows, found.not_judged) == (1, 3)


def test_several_rows_may_have_one_request_id() -> None:
    rows = make_triggers({"request_id": "r"}, {"request_id": "r"})
    reads = ScoredRows(TRIPS, SPEC, pl.DataFrame([score(0, request_id="r"), score(1, request_id="r")], schema=RECORDED))
    for number in (0, 1):
        reads.see(rows.slice(number, 1))
    found = reads.finish(PARTS)
    assert (found.rows, found.mismatched) == (2, 0)


def test_scores_of_another_definition_are_not_judged() -> None:
    found = scored(score(0, hash="0" * 16), score(1, version=9), score(2))
    assert (found.rows, found.mismatched, found.not_judged) == (1, 0, 2)


def looked_up(*scores: dict[str, Any], parts: dict[int, LogPart] = PARTS) -> Comparison:
    """Scores that read carrier AA, which has rows at 0, 1 and 2 minutes, the last of them with empty windows."""
    rows = make_rows(
        CARRIERS,
        [
            {"carrier": "AA", "event_time": T0_US + n * MINUTE_US, "pane": "EMPTY" if n == 2 else "EARLY"}
            for n in range(3)
        ],
    )
    frame = pl.DataFrame(list(scores), schema={**RECORDED, "key": pl.String})
    reads = LookedUpRows(CARRIERS, SPEC, frame)
    reads.see(rows.slice(0, 2))
    reads.see(rows.slice(2))
    return reads.finish(parts)


def read(minute: float, *, key: str = "AA", **changes: Any) -> dict[str, Any]:
    return {**score(0, CARRIERS, read_time=T0_US + int(minute * MINUTE_US), **changes), "key": key}


def test_a_row_that_was_looked_up_is_one_of_its_entity_at_that_time_and_empty_or_not() -> None:
    found = looked_up(read(0), read(1), read(2, status="empty"), read(2, status="stale"), read(1, status="ahead"))
    assert (found.rows, found.mismatched, found.not_judged) == (5, 0, 0)


@pytest.mark.parametrize("wrong", [read(1.5), read(1, status="empty"), read(2)])
def test_a_row_that_the_records_do_not_make_is_found(wrong: dict[str, Any]) -> None:
    found = looked_up(read(0), wrong)
    assert [m.kind for m in found.mismatches] == ["unexpected"]
    assert (found.rows, found.not_judged) == (2, 0)


def test_what_the_log_cannot_tell_is_not_judged() -> None:
    later, other, none = read(7), read(1, key="BB"), {**read(0, status="missing"), "read_time": None}
    found = looked_up(later, other, none)
    assert (found.rows, found.mismatched, found.not_judged) == (0, 0, 3)
    cut = {0: LogPart(offsets=range(3, 6), records=3, size_bytes=None)}
    assert looked_up(read(1.5), parts=cut).not_judged == 1
