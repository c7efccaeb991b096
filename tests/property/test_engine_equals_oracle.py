"""The engine is the oracle, and batching never shows, on logs that Hypothesis makes up."""

import dataclasses
import math
from datetime import datetime
from typing import Any

import hypothesis.strategies as st
import pyarrow as pa
import pyarrow.compute as pc
from hypothesis import assume, given, settings

from schemas.aggregation import (
    Feature,
    approx_distinct,
    count,
    decayed_sum,
    derived,
    distinct,
    entropy,
    first,
    from_event,
    last,
    last_n,
    max_,
    mean,
    min_,
    quantile,
    rate,
    stddev,
    sum_,
    time_since_last,
    top_k,
    variance,
)
from schemas.entity import Entity
from schemas.view import FeatureView
from tests.support.builders import Row, make_source, run_engine, to_rows
from tests.support.oracle import Oracle

PREDICATES = {
    "kind == 'a'": lambda row: row["kind"] == "a",
    "n > 0 and kind is not null": lambda row: row["n"] is not None and row["n"] > 0 and row["kind"] is not None,
}
DERIVATIONS = {
    "base_x / base_n": lambda row: (
        None if row["base_x"] is None or not row["base_n"] else row["base_x"] / row["base_n"]
    ),
    "log1p(base_n) - 1": lambda row: math.log1p(row["base_n"]) - 1,
    "bucketize(base_n, 2, 3.5)": lambda row: float((row["base_n"] >= 2) + (row["base_n"] >= 3.5)),
    "base_n > 1 and base_x is not null": lambda row: row["base_n"] > 1 and row["base_x"] is not None,
    "coalesce(d0, -1) * 2": lambda row: (-1.0 if row["d0"] is None else row["d0"]) * 2,
}
FILTERS = st.none() | st.sampled_from(sorted(PREDICATES))
ENTITY = Entity("thing", key="key")
APPROXIMATE = {"variance", "stddev", "entropy", "decayed_sum", "derived"}


@st.composite
def aggregations(draw: st.DrawFn, *, is_last: bool = False, has_window: bool = True) -> Any:
    where = draw(FILTERS)
    number = st.sampled_from(["n", "x"])
    choices = [
        st.just(count(where=where)),
        *(number.map(lambda c, f=f: f(c, where=where)) for f in (sum_, mean, variance, stddev)),
        *(st.sampled_from(["n", "x", "kind"]).map(lambda c, f=f: f(c, where=where)) for f in (min_, max_)),
        *(st.sampled_from(["n", "x", "kind", "flag"]).map(lambda c, f=f: f(c, where=where)) for f in (first, last)),
        *(st.sampled_from(["n", "kind", "flag"]).map(lambda c, f=f: f(c, where=where)) for f in (distinct, entropy)),
    ]
    choices.append(st.just(time_since_last(where=where)))
    half_lives = st.sampled_from(["1us", "1s", "10s", "1h"])
    choices.append(st.tuples(number, half_lives).map(lambda p: decayed_sum(p[0], half_life=p[1], where=where)))
    categories = st.tuples(st.sampled_from(["n", "kind", "flag"]), st.integers(1, 3))
    choices.append(categories.map(lambda p: top_k(p[0], k=p[1], where=where)))
    shares = st.sampled_from([0, 0.07, 0.5, 0.9, 1])
    choices.append(st.tuples(number, shares).map(lambda p: quantile(p[0], q=p[1], where=where)))
    if not is_last:
        categories = st.tuples(st.sampled_from(["n", "kind", "flag"]), st.sampled_from([7, 12]))
        choices.append(categories.map(lambda p: approx_distinct(p[0], lg_k=p[1], where=where)))
    if has_window and not is_last:
        choices.append(st.sampled_from([None, "n", "x"]).map(lambda c: rate(c, where=where)))
    if is_last:
        choices.append(st.sampled_from(["n", "kind", "tags"]).map(lambda c: last_n(c, where=where)))
    return draw(st.one_of(choices))


def with_derived(features: dict[str, Any], base: Any) -> dict[str, Any]:
    """Add a feature for each derivation, the ones that are read last."""
    names = {text: f"d{index}" for index, text in enumerate(DERIVATIONS)}
    added = {name: derived(text) for text, name in names.items()}
    return features | {"base_n": base, "base_x": sum_("x").over(lifetime=True)} | added


@st.composite
def views(draw: st.DrawFn, *, emit: str = "every_event") -> FeatureView:
    slide = draw(st.sampled_from([7, 10, 60]))
    features: dict[str, Any] = {}
    for index in range(draw(st.integers(0, 3))):
        size = draw(st.sampled_from([slide, 2 * slide, 5 * slide, slide + 3]))
        features[f"w{index}"] = draw(aggregations()).over(f"{size}s")
    for index in range(draw(st.integers(0, 2))):
        features[f"l{index}"] = draw(aggregations(is_last=True)).over(last=draw(st.integers(1, 4)))
    if draw(st.booleans()):
        features["life"] = draw(aggregations(has_window=False)).over(lifetime=True)
    if draw(st.booleans()) or not features:
        features["own"] = from_event("x")
    if draw(st.integers(0, 3)) == 0:
        features = with_derived(features, count().over(f"{slide}s"))
    return FeatureView(
        "random",
        version=1,
        entity=ENTITY,
        source=make_source(
            max_out_of_orderness=f"{draw(st.sampled_from([0, 0, 5, 30]))}s",
            max_future_skew=draw(st.sampled_from([None, "0s", "20s"])),
            **draw(st.sampled_from([{}, {"event_id": "id", "dedup_window": "15s"}])),
        ),
        slide=f"{slide}s",
        allowed_lateness=f"{draw(st.sampled_from([0, 3, slide, 2 * slide + 1, 20 * slide]))}s",
        align_to=draw(st.sampled_from(["1970-01-01T00:00:00Z", "1999-12-31T23:59:57.5Z"])),
        state_ttl=draw(st.sampled_from(["25s", "30d"])),
        emit=emit,
        features=features,
    )


@st.composite
def calendar_views(draw: st.DrawFn) -> FeatureView:
    slide, sizes = draw(st.sampled_from([("1d", ["1d", "3d"]), ("1h", ["1h", "24h"]), ("6h", ["6h", "1d"])]))
    features: dict[str, Any] = {
        f"w{index}": draw(aggregations()).over(draw(st.sampled_from(sizes))) for index in range(draw(st.integers(1, 3)))
    }
    if draw(st.booleans()):
        features["life"] = draw(aggregations(has_window=False)).over(lifetime=True)
    return FeatureView(
        "calendar",
        version=1,
        entity=ENTITY,
        source=make_source(
            max_out_of_orderness=draw(st.sampled_from(["0s", "45m", "30h"])),
            **draw(st.sampled_from([{}, {"event_id": "id", "dedup_window": "3h"}])),
        ),
        slide=slide,
        time_zone=draw(st.sampled_from([zone for zone, _ in CHANGES])),
        align_to=draw(st.sampled_from([None, "2013-01-01T04:00:00Z"])),
        allowed_lateness=draw(st.sampled_from(["0s", "20m", "26h", "9d"])),
        emit="every_event",
        features=features,
    )


CHANGES = [
    ("America/New_York", "2024-03-10T07:00:00Z"),
    ("America/New_York", "2024-11-03T06:00:00Z"),
    ("Asia/Kolkata", "2024-01-01T00:00:00Z"),
    ("Australia/Lord_Howe", "2024-04-06T15:00:00Z"),
    ("Australia/Lord_Howe", "2024-10-05T15:30:00Z"),
    ("America/Sao_Paulo", "2018-11-04T03:00:00Z"),
    ("America/Sao_Paulo", "2018-02-18T02:00:00Z"),
    ("America/Havana", "2024-11-03T05:00:00Z"),
    ("America/St_Johns", "2006-10-29T02:31:00Z"),
    ("Africa/Cairo", "2024-04-25T22:00:00Z"),
    ("Pacific/Apia", "2011-12-30T10:00:00Z"),
]
"""Zones, and when their clocks were changed."""


@st.composite
def calendar_logs(draw: st.DrawFn, zone: str) -> list[Row]:
    """A log of some days around a change of the clock, in steps of minutes to hours."""
    moment = draw(st.sampled_from([when for name, when in CHANGES if name == zone]))
    rows: list[Row] = draw(logs(max_size=20))
    start = int(datetime.fromisoformat(moment).timestamp()) - draw(st.sampled_from([0, 3_600, 90_000]))
    pace = draw(st.sampled_from([60, 1_200, 5_400]))
    for row in rows:
        if row["at"] is not None and abs(row["at"]) < 10**7:
            row["at"] = start + (row["at"] - (1_000_000 if row["at"] > 10**5 else 0)) * pace
    return rows


@st.composite
def session_views(draw: st.DrawFn) -> FeatureView:
    features: dict[str, Any] = {f"s{index}": draw(aggregations()) for index in range(draw(st.integers(1, 3)))}
    if draw(st.booleans()):
        features["l0"] = draw(aggregations(is_last=True)).over(last=draw(st.integers(1, 3)))
    if draw(st.booleans()):
        features["life"] = draw(aggregations(has_window=False)).over(lifetime=True)
    if draw(st.booleans()):
        features["own"] = from_event("x")
    if draw(st.integers(0, 3)) == 0:
        features = with_derived(features, count())
    return FeatureView(
        "sessions",
        version=1,
        entity=ENTITY,
        source=make_source(
            max_out_of_orderness=f"{draw(st.sampled_from([0, 0, 5, 30]))}s",
            **draw(st.sampled_from([{}, {"event_id": "id", "dedup_window": "15s"}])),
        ),
        gap=draw(st.sampled_from(["4s", "15s", "60s"])),
        allowed_lateness=f"{draw(st.sampled_from([0, 3, 100]))}s",
        state_ttl=draw(st.sampled_from(["25s", "30d"])),
        emit="every_event",
        features=features,
    )


@st.composite
def logs(draw: st.DrawFn, *, max_size: int = 30) -> list[Row]:
    rows: list[Row] = []
    now = draw(st.sampled_from([-40, 0, 1_000_000]))
    offset = draw(st.integers(0, 3))
    for _ in range(draw(st.integers(1, max_size))):
        now += draw(st.sampled_from([0, 0, 1, 1, 3, 9, 20, 90]))
        at: int | None = now - draw(st.sampled_from([0, 0, 0, 1, 4, 12, 25, 60, 200]))
        if draw(st.integers(0, 30)) == 0:
            at = draw(st.sampled_from([None, 10**12, -(2**63), 2**63 - 1, 10**15, now + 500]))
        rows.append(
            {
                "key": draw(
                    st.sampled_from(["a", "a", "a", "b", "b", "é", "日本", "\N{GRINNING FACE}", "", "a", "b", None])
                ),
                "at": at,
                "id": draw(st.sampled_from([None, "i1", "i2", "i3", "i4", "i5", "i6", "i7"])),
                "kind": draw(st.sampled_from(["a", "b", "ü", None])),
                "n": draw(st.sampled_from([0, 1, -3, 5, None, 2**62, 2**63 - 1, -(2**63)])),
                "x": draw(st.sampled_from([0.0, -0.0, 0.1, 0.2, 1e16, -2.5, None, math.nan, math.inf])),
                "flag": draw(st.sampled_from([True, False, None])),
                "tags": draw(st.sampled_from([None, [], ["p"], ["p", "q"]])),
                "_offset": offset,
                "_broker_time": draw(st.sampled_from([None, now * 1_000_000, (now + 5) * 1_000_000])),
                "_request_id": draw(st.sampled_from([None, None, "r"])),
            }
        )
        offset += draw(st.sampled_from([1, 1, 2]))
    return rows


def tolerance(feature: Feature, rows: list[Row]) -> float:
    """How far apart two ways of computing a feature may lie, from the size of its inputs."""
    if feature.function in {"entropy", "derived"}:
        return 1e-9
    inputs = [abs(row[feature.column]) for row in rows if row[feature.column] is not None]
    largest = max((value for value in inputs if math.isfinite(value)), default=0.0)
    # The spread of values of size 2**63 has lost all that is small beside them.
    return 1e-12 * float(largest) ** 2 if feature.function == "variance" else 1e-6 * float(largest)


def assert_same(got: list[Row], expected: list[Row], *, view: FeatureView, rows: list[Row]) -> None:
    for mine, theirs in zip(got, expected, strict=False):
        assert mine.keys() == theirs.keys()
        for name, value in theirs.items():
            feature = view.definitions.get(name)
            is_float = isinstance(value, float) and isinstance(mine[name], float)
            if is_float and math.isnan(value):
                same = math.isnan(mine[name])
            elif is_float and feature is not None and feature.function in APPROXIMATE:
                same = math.isclose(mine[name], value, rel_tol=1e-6, abs_tol=tolerance(feature, rows))
            else:
                same = mine[name] == value
            assert same, f"{name}: got {mine[name]!r}, expected {value!r}\n{mine}\n{theirs}"
    assert len(got) == len(expected)


def is_same_bytes(one: pa.Table, other: pa.Table) -> bool:
    """Equal down to the last bit of each value; what lies under a null does not count."""
    return one.schema == other.schema and [bits(c) for c in one.columns] == [bits(c) for c in other.columns]


def bits(column: pa.ChunkedArray) -> list[Any]:
    if pa.types.is_floating(column.type):
        filled = pc.fill_null(column, 0.0).to_numpy().tobytes()
        return [filled, column.is_null().to_pylist()]
    return column.to_pylist()


def check_against_oracle(view: FeatureView, rows: list[Row]) -> None:
    table, dead, results = run_engine(view, rows, close=True)
    expected = Oracle(view, predicates=PREDICATES, derivations=DERIVATIONS).run(rows, close=True)
    letters = [{name: row[name] for name in ("_offset", "reason", "late_by_us")} for row in to_rows(dead)]
    assert letters == expected.dead_letters
    assert_same(to_rows(table), expected.rows, view=view, rows=rows)
    counts = results[0].counts
    assert (counts.admitted, counts.partially_late, counts.without_as_of) == (
        expected.admitted,
        expected.partially_late,
        expected.without_as_of,
    )


def check_batching(view: FeatureView, rows: list[Row], splits: list[int], *, restore: bool) -> None:
    whole, dead, _ = run_engine(view, rows, close=True)
    parts, dead_parts, _ = run_engine(view, rows, splits=splits, restore=restore, close=True)
    assert is_same_bytes(dead, dead_parts)
    assert is_same_bytes(whole, parts)


@settings(max_examples=150, deadline=None)
@given(view=views(), rows=logs())
def test_a_sliding_view_is_the_oracle(view: FeatureView, rows: list[Row]) -> None:
    check_against_oracle(view, rows)


@settings(max_examples=120, deadline=None)
@given(view=session_views(), rows=logs())
def test_a_session_view_is_the_oracle(view: FeatureView, rows: list[Row]) -> None:
    check_against_oracle(view, rows)


@settings(max_examples=120, deadline=None)
@given(data=st.data(), view=calendar_views())
def test_a_view_in_a_time_zone_is_the_oracle(data: st.DataObject, view: FeatureView) -> None:
    check_against_oracle(view, data.draw(calendar_logs(view.time_zone or "")))


@settings(max_examples=80, deadline=None)
@given(
    data=st.data(),
    view=calendar_views(),
    splits=st.lists(st.integers(0, 19), max_size=6),
    restore=st.booleans(),
)
def test_batches_do_not_show_in_a_time_zone(
    data: st.DataObject, view: FeatureView, splits: list[int], restore: bool
) -> None:
    rows = data.draw(calendar_logs(view.time_zone or ""))
    check_batching(view, rows, [s for s in splits if s < len(rows)], restore=restore)


@settings(max_examples=80, deadline=None)
@given(
    view=st.one_of(views(), session_views()),
    rows=logs(),
    splits=st.lists(st.integers(0, 30), max_size=6),
    restore=st.booleans(),
)
def test_batches_and_restarts_do_not_show(view: FeatureView, rows: list[Row], splits: list[int], restore: bool) -> None:
    check_batching(view, rows, [s for s in splits if s < len(rows)], restore=restore)


@settings(max_examples=60, deadline=None)
@given(view=st.one_of(views(), session_views()), rows=logs(), split=st.integers(0, 30))
def test_latest_keeps_every_closing_pane_and_the_last_as_of_row_of_a_key_and_batch(
    view: FeatureView, rows: list[Row], split: int
) -> None:
    split = min(split, len(rows))
    table, _, _ = run_engine(view, rows, close=True)
    _, _, latest = run_engine(dataclasses.replace(view, emit="latest"), rows, splits=[split], close=True)
    edge = rows[split - 1]["_offset"] if split else -1
    expected, seen = [], set()
    for row in reversed(to_rows(table)):
        mark = (row["key"], row["source_offset"] > edge)
        if row["pane"] != "EARLY" or mark not in seen:
            expected.append(row)
        if row["pane"] == "EARLY":
            seen.add(mark)
    got = [row for result in latest for row in to_rows(result.rows)]
    assert repr(got) == repr(expected[::-1])


@settings(max_examples=60, deadline=None)
@given(view=st.one_of(views(), session_views()), rows=logs())
def test_on_close_is_every_event_without_its_as_of_rows(view: FeatureView, rows: list[Row]) -> None:
    assume(any(f.is_windowed for f in view.definitions.values()))
    table, _, _ = run_engine(view, rows, close=True)
    closing, _, _ = run_engine(dataclasses.replace(view, emit="on_close"), rows, close=True)
    assert is_same_bytes(closing, table.filter(pc.not_equal(table.column("pane"), "EARLY")))
