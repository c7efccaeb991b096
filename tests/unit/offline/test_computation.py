import json
import math
import tracemalloc
from collections.abc import Iterable
from decimal import Decimal
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from offline.computation import DEAD_LETTER_COLUMNS, Computation, Computed
from schemas.aggregation import count, from_event, last, sum_
from schemas.entity import Entity
from schemas.errors import ConfigError, DecodeError, SchemaMismatchError
from schemas.row import Pane
from schemas.time import parse_rfc3339_us
from schemas.view import FeatureView
from streams.windowing.engine import WindowEngine
from tests.support.builders import EVENT_FIELDS, make_batch, make_source, to_rows

Row = dict[str, Any]


def make_view(*, fields: Any = EVENT_FIELDS, source: Row | None = None, **settings: Any) -> FeatureView:
    defaults: Row = {
        "version": 1,
        "entity": Entity("thing", key="key"),
        "slide": "10s",
        "emit": "every_event",
        "features": {"n": count().over("20s"), "total": sum_("x").over("20s")},
    }
    return FeatureView("things", source=make_source(fields, **source or {}), **defaults | settings)


def write(path: Path, rows: Iterable[Row | bytes], *, end: bytes = b"\n") -> Path:
    lines = [row if isinstance(row, bytes) else json.dumps(row, ensure_ascii=False).encode() for row in rows]
    path.write_bytes(b"".join(line + end for line in lines))
    return path


def compute(view: FeatureView, path: Path, *, emit: str | None = None, **options: Any) -> Computed:
    parts = list(Computation(view, emit=emit).run(path, **options))
    rows = pa.concat_tables([view.row_schema.empty_table(), *(part.rows for part in parts)])
    letters = pa.concat_tables([DEAD_LETTER_COLUMNS.empty_table(), *(part.dead_letters for part in parts)])
    return Computed(rows=rows.combine_chunks(), dead_letters=letters.combine_chunks())


def dead(computed: Computed, *columns: str) -> list[tuple[Any, ...]]:
    return [tuple(letter[name] for name in columns) for letter in computed.dead_letters.to_pylist()]


# What a row is


def test_a_row_without_a_place_is_in_partition_0_at_its_number(tmp_path: Path) -> None:
    path = write(tmp_path / "in.ndjson", [{"key": "a", "at": 100}, {"key": "b", "at": 101}])

    rows = to_rows(compute(make_view(), path).rows)

    assert [(row["source_partition"], row["source_offset"], row["request_id"]) for row in rows] == [
        (0, 0, "test.events-0-0"),
        (0, 1, "test.events-0-1"),
    ]
    assert {row["broker_time"] for row in rows} == {None}


def test_computed_time_and_epoch_are_null_because_nothing_was_committed(tmp_path: Path) -> None:
    view = make_view()
    computed = compute(view, write(tmp_path / "in.ndjson", [{"key": "a", "at": 100}]), closes=True)

    assert computed.rows.schema == view.row_schema
    assert {(row["computed_time"], row["epoch"]) for row in computed.rows.to_pylist()} == {(None, None)}
    assert set(computed.rows["definition_hash"].to_pylist()) == {view.definition_hash}


def test_the_columns_are_key_features_engine_context_in_this_order() -> None:
    assert make_view().row_schema.names == [
        *("key", "n", "total"),
        *("event_time", "window_end", "pane", "pane_index", "is_final", "watermark"),
        *("source_offset", "broker_time", "request_id"),
        *("view", "view_version", "definition_hash", "source_topic", "source_partition", "computed_time", "epoch"),
    ]


def test_blank_lines_a_byte_order_mark_and_carriage_returns_are_no_part_of_a_row(tmp_path: Path) -> None:
    rows = [{"key": "a", "at": 100}, {"key": "é😀", "at": 101}, {"key": "a", "at": 102}]
    plain = compute(make_view(), write(tmp_path / "plain.ndjson", rows))
    lines = [b"\xef\xbb\xbf" + json.dumps(rows[0]).encode(), b"", b" \t", b"  " + json.dumps(rows[1]).encode(), b""]
    odd = write(tmp_path / "odd.ndjson", [*lines, json.dumps(rows[2]).encode()], end=b"\r\n")
    odd.write_bytes(odd.read_bytes().removesuffix(b"\r\n"))  # nor need the last line end

    assert compute(make_view(), odd).rows.equals(plain.rows)
    assert plain.rows["key"].to_pylist() == ["a", "é😀", "a"]


@pytest.mark.parametrize("content", [b"", b"\n\n", b"\xef\xbb\xbf", b"\r\n"])
def test_an_empty_input_gives_empty_output(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "in.ndjson").write_bytes(content)

    for emit in ("every_event", "latest", "on_close"):
        computed = compute(make_view(), tmp_path / "in.ndjson", emit=emit, closes=True)
        assert (computed.rows.num_rows, computed.dead_letters.num_rows) == (0, 0)


def test_an_escaped_name_of_a_place_counts_like_a_plain_one(tmp_path: Path) -> None:
    path = write(tmp_path / "in.ndjson", [rb'{"key": "a", "at": 100, "\u005foffset": 7}'])

    assert compute(make_view(), path).rows["source_offset"].to_pylist() == [7]


def test_a_place_inside_another_object_is_none(tmp_path: Path) -> None:
    path = write(tmp_path / "in.ndjson", [{"key": "a", "at": 100, "more": {"_offset": -1, "_partition": "x"}}])

    assert compute(make_view(), path).rows["source_offset"].to_pylist() == [0]


# Places


def test_each_partition_has_an_engine_of_its_own_and_output_stands_in_the_order_of_the_input(tmp_path: Path) -> None:
    events = [
        {"key": "a", "at": 100, "_partition": 5, "_offset": 40},
        {"key": "b", "at": 101, "_partition": 2, "_offset": 7},
        {"key": "a", "at": 131, "_partition": 5, "_offset": 41},
        {"key": "b", "at": 102, "_partition": 2, "_offset": 9},
        {"key": "b", "at": 131, "_partition": 2, "_offset": 10},
    ]
    view = make_view()

    rows = to_rows(compute(view, write(tmp_path / "in.ndjson", events), closes=True).rows)

    made_by = [(row["source_partition"], row["source_offset"], row["pane"]) for row in rows]
    assert made_by == [
        *((5, 40, "EARLY"), (2, 7, "EARLY")),
        *((5, 41, "ON_TIME"), (5, 41, "ON_TIME"), (5, 41, "EMPTY"), (5, 41, "EARLY")),
        (2, 9, "EARLY"),
        *((2, 10, "ON_TIME"), (2, 10, "ON_TIME"), (2, 10, "EMPTY"), (2, 10, "EARLY")),
        *((2, 10, "ON_TIME"), (2, 10, "ON_TIME"), (2, 10, "EMPTY")),  # closing comes last, by partition
        *((5, 41, "ON_TIME"), (5, 41, "ON_TIME"), (5, 41, "EMPTY")),
    ]
    for partition in (2, 5):
        engine = WindowEngine(view, source_partition=partition)
        batch = make_batch(view, [event for event in events if event["_partition"] == partition])
        alone = to_rows(engine.step(batch, processing_time_us=0).rows) + to_rows(engine.close().rows)
        mine = [row for row in rows if row["source_partition"] == partition]
        assert [{name: row[name] for name in view.engine_schema.names} for row in mine] == alone


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([{"_offset": 5}, {"_offset": 5}], "row 2: offset 5 of partition 0 comes after 5, expected rising offsets"),
        ([{"_offset": 5}, {"_offset": 4}], "row 2: offset 4 of partition 0 comes after 5"),
        ([{"_offset": 5}, {}], "row 2: offset 1 of partition 0 comes after 5"),
        ([{}, {"_partition": 3, "_offset": 9}, {"_partition": 3, "_offset": 8}], "row 3: offset 8 of partition 3"),
        ([{"_partition": 1, "_offset": 9}, {"_offset": 9}, {"_offset": 8}, {"_partition": 1, "_offset": 1}], "row 3"),
    ],
)
@pytest.mark.parametrize("batch_rows", [1, 2, 100])
def test_offsets_that_do_not_rise_within_a_partition_are_refused(
    tmp_path: Path, rows: list[Row], message: str, batch_rows: int
) -> None:
    path = write(tmp_path / "in.ndjson", [{"key": "a", "at": 100} | row for row in rows])

    with pytest.raises(SchemaMismatchError, match=message):
        compute(make_view(), path, batch_rows=batch_rows)


@pytest.mark.parametrize("batch_rows", [1, 2, 100])
def test_a_row_that_is_no_object_has_its_number_as_offset_wherever_the_others_are(
    tmp_path: Path, batch_rows: int
) -> None:
    rows = [{"key": "a", "at": 100, "_offset": 1000}, b"{garbage", b"[1]", {"key": "a", "at": 101, "_offset": 1001}]
    path = write(tmp_path / "in.ndjson", rows)

    computed = compute(make_view(), path, batch_rows=batch_rows)

    assert dead(computed, "partition", "offset", "reason", "value") == [
        (0, 1, "decode_error", "{garbage"),
        (0, 2, "schema_violation", "[1]"),
    ]
    assert computed.rows["source_offset"].to_pylist() == [1000, 1001]


@pytest.mark.parametrize("batch_rows", [1, 2, 100])
def test_an_offset_may_follow_garbage_that_has_a_higher_number(tmp_path: Path, batch_rows: int) -> None:
    path = write(tmp_path / "in.ndjson", [{"key": "a", "at": 100}, b"garbage", {"key": "a", "at": 101, "_offset": 1}])

    assert compute(make_view(), path, batch_rows=batch_rows).rows["source_offset"].to_pylist() == [0, 1]


@pytest.mark.parametrize(
    ("place", "message"),
    [
        ({"_partition": -1}, "row 2: `_partition` is -1, expected a whole number of 0 or more"),
        ({"_partition": "0"}, "row 2: `_partition` is '0'"),
        ({"_partition": True}, "row 2: `_partition` is True"),
        ({"_offset": 1.5}, "row 2: `_offset` is 1.5"),
        ({"_offset": 2**63}, "row 2: `_offset` is 9223372036854775808"),
        ({"_broker_time": "yesterday"}, "row 2: `_broker_time` is 'yesterday', expected RFC 3339"),
        ({"_broker_time": "2013-01-01T10:00:00"}, "row 2: `_broker_time`"),
        ({"_broker_time": 1.5}, "row 2: `_broker_time` is 1.5"),
        ({"_broker_time": 2**63}, "row 2: `_broker_time`"),
        ({"_broker_time": False}, "row 2: `_broker_time` is False"),
        ({"_broker_time": [1]}, "row 2: `_broker_time`"),
        ({"_broker_time": 2**63 - 1}, "row 2: `_broker_time` is 9223372036854775807, .* in the years 1 to 9999"),
        ({"_broker_time": 1 - 2**63}, "row 2: `_broker_time`"),
        ({"_broker_time": "9999-12-31T23:59:59-14:00"}, "row 2: `_broker_time`"),
        ({"_broker_time": "0001-01-01T00:00:00+14:00"}, "row 2: `_broker_time`"),
    ],
)
def test_a_place_that_is_none_is_refused(tmp_path: Path, place: Row, message: str) -> None:
    path = write(tmp_path / "in.ndjson", [{"key": "a", "at": 100}, {"key": "a", "at": 101} | place])

    with pytest.raises(DecodeError, match=message):
        compute(make_view(), path)


@pytest.mark.parametrize(("per_second", "unit"), [(1, "s"), (10**3, "ms"), (10**9, "ns")])
def test_a_broker_time_in_another_unit_is_refused(tmp_path: Path, per_second: int, unit: str) -> None:
    view = make_view(source={"plausible_from": "1990-01-01T00:00:00Z"})
    at_s = 1_357_034_400
    rows = [{"key": "a", "at": at_s, "_broker_time": at_s * each} for each in (10**6, per_second)]
    path = write(tmp_path / "in.ndjson", rows)

    message = f"row 2: `_broker_time` is {at_s * per_second}, expected microseconds since 1970, .* in {unit}; convert"
    with pytest.raises(DecodeError, match=message):
        compute(view, path)


@pytest.mark.parametrize("time", ["0001-01-01T00:00:00Z", "9999-12-31T23:59:59.999999Z"])
def test_any_broker_time_that_can_be_written_is_read(tmp_path: Path, time: str) -> None:
    path = write(tmp_path / "in.ndjson", [{"key": "a", "at": 100, "_broker_time": time}])

    assert [row["broker_time"] for row in to_rows(compute(make_view(), path).rows)] == [parse_rfc3339_us(time)]


def test_broker_times_are_microseconds_or_rfc_3339_and_null_ones_are_none(tmp_path: Path) -> None:
    times = [1_357_034_400_000_000, "2013-01-01T12:00:00.5+02:00", None]
    path = write(tmp_path / "in.ndjson", [{"key": "a", "at": 1_357_034_400, "_broker_time": time} for time in times])

    rows = to_rows(compute(make_view(), path).rows)

    assert [row["broker_time"] for row in rows] == [times[0], parse_rfc3339_us("2013-01-01T10:00:00.500000Z"), None]


def test_the_future_guard_goes_by_the_broker_time_and_not_without_one(tmp_path: Path) -> None:
    view = make_view(source={"max_future_skew": "1m"})
    path = write(
        tmp_path / "in.ndjson",
        [{"key": "a", "at": 1000, "_broker_time": at_us} for at_us in (939_999_999, 940_000_000, None)],
    )

    assert dead(compute(view, path), "offset", "reason") == [(0, "future_timestamp")]


# Emit modes


def test_of_latest_the_last_as_of_row_of_each_key_and_partition_is_kept_at_its_place(tmp_path: Path) -> None:
    events = [
        {"key": key, "at": at, "_partition": partition, "_offset": offset}
        for offset, (key, at, partition) in enumerate(
            [("a", 100, 0), ("b", 100, 0), ("a", 101, 0), ("a", 100, 1), ("a", 121, 0), ("c", 122, 0)]
        )
    ]
    path = write(tmp_path / "in.ndjson", events)
    every, latest = (compute(make_view(), path, emit=emit) for emit in ("every_event", "latest"))

    as_of = [row for row in every.rows.to_pylist() if row["pane"] == Pane.EARLY]
    last_of = {(row["key"], row["source_partition"]): row["source_offset"] for row in as_of}
    expected = [
        row
        for row in every.rows.to_pylist()
        if row["pane"] != Pane.EARLY or last_of[row["key"], row["source_partition"]] == row["source_offset"]
    ]
    assert latest.rows.to_pylist() == expected
    assert [row["source_offset"] for row in expected if row["pane"] == Pane.EARLY] == [1, 3, 4, 5]


def test_latest_keeps_what_it_holds_back_on_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write(tmp_path / "in.ndjson", [{"key": f"k{at % 3}", "at": 100 + at} for at in range(50)])
    expected = compute(make_view(), path, emit="latest", batch_rows=4)
    monkeypatch.setattr("offline.computation._REMEMBERED_ROWS", 5)
    monkeypatch.setattr("offline.computation._SPOOLED_BYTES", 100)

    assert compute(make_view(), path, emit="latest", batch_rows=4).rows.equals(expected.rows)


def test_on_close_emits_closing_panes_alone(tmp_path: Path) -> None:
    path = write(tmp_path / "in.ndjson", [{"key": "a", "at": at} for at in (100, 105, 131)])

    rows = to_rows(compute(make_view(), path, emit="on_close").rows)

    assert [(row["pane"], row["n"]) for row in rows] == [("ON_TIME", 2), ("ON_TIME", 2), ("EMPTY", 0)]


def test_without_an_emit_mode_the_views_own_holds(tmp_path: Path) -> None:
    path = write(tmp_path / "in.ndjson", [{"key": "a", "at": 100}, {"key": "a", "at": 101}])

    assert compute(make_view(emit="latest"), path).rows.num_rows == 1
    assert compute(make_view(emit="on_close"), path).rows.num_rows == 0


def test_an_emit_mode_in_which_the_view_makes_no_row_is_refused_before_any_input() -> None:
    view = make_view(features={"x": last("x").over(last=1)})

    with pytest.raises(ConfigError, match="no row would ever be made"):
        Computation(view, emit="on_close")


def test_closing_takes_the_watermark_to_the_end_of_time(tmp_path: Path) -> None:
    path = write(tmp_path / "in.ndjson", [{"key": "a", "at": 100}])

    assert compute(make_view(), path, emit="on_close").rows.num_rows == 0
    rows = compute(make_view(), path, emit="on_close", closes=True).rows.to_pylist()
    assert [(row["pane"], row["is_final"]) for row in rows] == [("ON_TIME", True), ("ON_TIME", True), ("EMPTY", True)]
    assert {str(row["watermark"]) for row in rows} == {"9999-12-31 23:59:59.999999+00:00"}


# Dead letters


def test_dead_letters_of_all_kinds_stand_in_the_order_of_the_input(tmp_path: Path) -> None:
    rows: list[Row | bytes] = [
        {"key": "a", "at": 200, "_partition": 3},
        {"key": None, "at": 200},
        {"key": "a", "at": 100, "_partition": 3},
        b"\xff\xfe",
        {"key": "a"},
        {"key": "a", "at": "soon"},
        {"key": "a", "at": 200_000_000_000},
    ]
    computed = compute(make_view(), write(tmp_path / "in.ndjson", rows))

    assert computed.dead_letters.schema == DEAD_LETTER_COLUMNS
    assert dead(computed, "topic", "partition", "offset", "reason", "late_by_us", "view") == [
        ("test.events", 0, 1, "missing_key", None, "things"),
        ("test.events", 3, 2, "late", 100_000_000, "things"),
        ("test.events", 0, 3, "decode_error", None, "things"),
        ("test.events", 0, 4, "missing_event_time", None, "things"),
        ("test.events", 0, 5, "schema_violation", None, "things"),
        ("test.events", 0, 6, "timestamp_unit", None, "things"),
    ]
    assert computed.dead_letters["value"][2].as_py() == "\ufffd\ufffd"


# Parquet


def test_parquet_gives_what_the_same_rows_give_as_ndjson(tmp_path: Path) -> None:
    events = [
        {"key": "a", "at": 100, "x": 1.5, "flag": True, "tags": ["p", "q"], "_partition": 0, "_offset": 3},
        {"key": "é", "at": 99, "x": None, "flag": None, "tags": None, "_partition": 1, "_offset": 0},
        {"key": None, "at": 131, "x": 2.0, "flag": False, "tags": [], "_partition": 0, "_offset": 4},
        {"key": "a", "at": 131, "x": 2.0, "flag": False, "tags": [], "_partition": 0, "_offset": 5},
    ]
    pq.write_table(pa.Table.from_pylist(events), tmp_path / "in.parquet")

    from_parquet = compute(make_view(), tmp_path / "in.parquet", closes=True)

    from_ndjson = compute(make_view(), write(tmp_path / "in.ndjson", events), closes=True)
    assert from_parquet.rows.equals(from_ndjson.rows)
    assert dead(from_parquet, "offset", "reason") == dead(from_ndjson, "offset", "reason") == [(4, "missing_key")]


MOMENTS = ["2013-01-01T10:00:00.123456Z", "1969-12-31T23:59:59.999500Z", "2013-01-01T10:00:05Z"]


@pytest.mark.parametrize("unit", ["s", "ms", "us"])
@pytest.mark.parametrize("stored", [pa.timestamp("ns"), pa.timestamp("us", tz="America/New_York")])
def test_a_parquet_timestamp_is_counted_in_the_unit_of_the_contract(
    tmp_path: Path, unit: str, stored: pa.DataType
) -> None:
    unit_us = {"s": 1_000_000, "ms": 1_000, "us": 1}[unit]
    fields = EVENT_FIELDS | {"at": {"type": "integer", "x-unit": unit}}
    view = make_view(fields=fields, source={"max_out_of_orderness": "52w"}, allowed_lateness="5200w")
    times_us = [parse_rfc3339_us(moment) for moment in MOMENTS]
    columns = {"key": ["a"] * 3, "at": pa.array(times_us, pa.timestamp("us", tz="UTC")).cast(stored, safe=False)}
    pq.write_table(pa.table(columns), tmp_path / "in.parquet")

    rows = to_rows(compute(view, tmp_path / "in.parquet").rows)

    assert [row["event_time"] for row in rows] == [time_us // unit_us * unit_us for time_us in times_us]


@pytest.mark.parametrize(
    "stored", [pa.timestamp("us"), pa.timestamp("ns", tz="UTC"), pa.timestamp("us", tz="Asia/Kolkata")]
)
def test_a_parquet_timestamp_is_rfc_3339_where_the_contract_has_text(tmp_path: Path, stored: pa.DataType) -> None:
    fields = EVENT_FIELDS | {"at": {"type": "string", "format": "date-time"}}
    view = make_view(fields=fields, source={"max_out_of_orderness": "52w"}, allowed_lateness="5200w")
    times_us = [parse_rfc3339_us(moment) for moment in MOMENTS]
    columns = {"key": ["a"] * 3, "at": pa.array(times_us, pa.timestamp("us", tz="UTC")).cast(stored, safe=False)}
    pq.write_table(pa.table(columns), tmp_path / "in.parquet")

    assert [row["event_time"] for row in to_rows(compute(view, tmp_path / "in.parquet").rows)] == times_us


def test_a_parquet_column_that_is_there_twice_is_refused(tmp_path: Path) -> None:
    twice = pa.table([pa.array(["a"]), pa.array([3.5]), pa.array(["b"])], names=["key", "at", "key"])
    pq.write_table(twice, tmp_path / "in.parquet")

    with pytest.raises(DecodeError, match=r"has the columns \['key'\] more than once, expected each once"):
        compute(make_view(), tmp_path / "in.parquet")


def test_parquet_types_that_json_has_not_go_by_the_contract(tmp_path: Path) -> None:
    columns = {
        "key": pa.array(["a", "b"]).dictionary_encode(),
        "at": pa.array([100.0, 100.5]),  # pandas makes floats of whole numbers where some are missing
        "n": pa.array([Decimal(1), Decimal(2)]),
        "x": pa.array([Decimal("1.00"), Decimal("2.00")]),
        "kind": pa.array([b"k", None]),
        "_partition": pa.array([4.0, None]),
        "_broker_time": pa.array([100_000_000, None], pa.timestamp("us")),
    }
    view = make_view(
        features={"n": last("n").over(last=1), "x": last("x").over(last=1), "k": last("kind").over(last=1)}
    )
    pq.write_table(pa.table(columns), tmp_path / "in.parquet")

    computed = compute(view, tmp_path / "in.parquet")

    (row,) = to_rows(computed.rows)
    assert (row["key"], row["n"], row["x"], row["k"], row["source_partition"]) == ("a", 1, 1.0, "k", 4)
    assert (row["event_time"], row["broker_time"]) == (100_000_000, 100_000_000)
    assert dead(computed, "reason", "value") == [
        ("schema_violation", '{"key":"b","at":100.5,"n":2,"x":2.0,"kind":null,"_partition":null,"_broker_time":null}')
    ]


def test_a_parquet_null_is_an_absent_field_where_the_contract_allows_none(tmp_path: Path) -> None:
    fields = EVENT_FIELDS | {"x": {"type": "number"}, "n": {"type": ["integer", "null"]}}
    columns = {"key": ["a", "a"], "at": [100, 101], "x": [None, 2.5], "n": [None, 1]}
    pq.write_table(pa.table(columns), tmp_path / "in.parquet")

    computed = compute(make_view(fields=fields), tmp_path / "in.parquet")

    assert [row["total"] for row in computed.rows.to_pylist()] == [None, 2.5]
    assert computed.dead_letters.num_rows == 0


BYTES = [
    pa.array([b"\xff\xfe"]),
    pa.array([b"\xff\xfe"], pa.large_binary()),
    pa.array([b"\xff\xfe"], pa.binary_view()),
    pa.array([b"\xff\xfe"], pa.binary(2)),
    pa.array([[b"\xff\xfe"]]),
    pa.array([{"raw": b"\xff\xfe"}]),
    pa.array([[(b"\xff\xfe", 1)]], pa.map_(pa.binary(), pa.int64())),
    pa.array([b"\xff\xfe"]).dictionary_encode(),
]


@pytest.mark.parametrize("column", BYTES, ids=lambda column: str(column.type))
def test_parquet_bytes_that_the_contract_does_not_name_are_left_out(tmp_path: Path, column: pa.Array) -> None:
    pq.write_table(pa.table({"key": ["a"], "at": [3.5], "raw": column, "note": ["n"]}), tmp_path / "in.parquet")

    assert dead(compute(make_view(), tmp_path / "in.parquet"), "value") == [('{"key":"a","at":3.5,"note":"n"}',)]


@pytest.mark.parametrize("column", BYTES[4:7], ids=lambda column: str(column.type))
def test_a_parquet_column_with_bytes_in_it_is_refused_by_its_name(tmp_path: Path, column: pa.Array) -> None:
    pq.write_table(pa.table({"key": column, "at": [100]}), tmp_path / "in.parquet")

    with pytest.raises(DecodeError, match=r"in\.parquet cannot be read: column 'key' is "):
        compute(make_view(), tmp_path / "in.parquet")


@pytest.mark.parametrize("column", [*BYTES[:4], BYTES[-1]], ids=lambda column: str(column.type))
def test_parquet_bytes_that_are_no_text_are_a_dead_letter_and_no_other_row_with_them(
    tmp_path: Path, column: pa.Array
) -> None:
    text = pa.array([b"ab"], pa.binary(2) if pa.types.is_fixed_size_binary(column.type) else pa.binary())
    keys = pa.chunked_array([text.cast(column.type) if column.type != BYTES[-1].type else text.dictionary_encode()] * 2)
    keys = pa.chunked_array([keys.chunk(0), column, keys.chunk(1)])
    pq.write_table(pa.table({"key": keys, "at": [100] * 3}), tmp_path / "in.parquet")

    computed = compute(make_view(), tmp_path / "in.parquet")

    assert computed.rows["key"].to_pylist() == ["ab", "ab"]
    assert dead(computed, "offset", "reason", "value") == [(1, "schema_violation", '{"key":{"bytes":"fffe"},"at":100}')]


@pytest.mark.parametrize("batch_rows", [1, 2, 50])
def test_a_parquet_time_beyond_64_bits_is_a_dead_letter_and_no_other_row_with_it(
    tmp_path: Path, batch_rows: int
) -> None:
    at = pa.array([100_000, 10**17, -(10**17), 101_000], pa.timestamp("ms"))
    pq.write_table(pa.table({"key": ["a"] * 4, "at": at}), tmp_path / "in.parquet")

    computed = compute(make_view(), tmp_path / "in.parquet", batch_rows=batch_rows)

    assert computed.rows["source_offset"].to_pylist() == [0, 3]
    assert dead(computed, "offset", "reason", "value") == [
        (1, "schema_violation", '{"key":"a","at":"100000000000000000 ms"}'),
        (2, "schema_violation", '{"key":"a","at":"-100000000000000000 ms"}'),
    ]


def test_an_infinite_parquet_number_is_a_dead_letter_and_never_null(tmp_path: Path) -> None:
    inf = math.inf
    columns = {"key": ["a"] * 5, "at": [100.0, 100, inf, 100, 100], "x": [inf, 1.5, 1, math.nan, -inf]}
    pq.write_table(pa.table(columns | {"n": [1.0, 2, 3, 4, 5]}), tmp_path / "in.parquet")

    computed = compute(make_view(), tmp_path / "in.parquet")

    assert [row["total"] for row in computed.rows.to_pylist()] == [1.5, 1.5]
    assert dead(computed, "offset", "reason") == [(at, "schema_violation") for at in (0, 2, 4)]
    assert '"x":"-inf"' in dead(computed, "value")[2][0]


@pytest.mark.parametrize("arrow", [pa.binary(), pa.large_binary(), pa.binary_view(), pa.binary(3)], ids=str)
def test_parquet_bytes_in_utf_8_are_text(tmp_path: Path, arrow: pa.DataType) -> None:
    pq.write_table(pa.table({"key": pa.array(["日".encode()], arrow), "at": [100]}), tmp_path / "in.parquet")

    assert compute(make_view(), tmp_path / "in.parquet").rows["key"].to_pylist() == ["日"]


@pytest.mark.parametrize("arrow", [pa.decimal128(38), pa.decimal256(60)], ids=str)
def test_a_parquet_decimal_beyond_64_bits_is_a_dead_letter_and_no_other_row_with_it(
    tmp_path: Path, arrow: pa.DataType
) -> None:
    numbers = [2**63 - 1, -(2**63), 10**30, 2**63, -(2**63) - 1, None]
    decimals = pa.array([None if number is None else Decimal(number) for number in numbers], arrow)
    pq.write_table(pa.table({"key": ["a"] * 6, "at": [100] * 6, "n": decimals}), tmp_path / "in.parquet")
    view = make_view(features={"n": from_event("n")})

    computed = compute(view, tmp_path / "in.parquet", batch_rows=4)

    assert computed.rows["n"].to_pylist() == [2**63 - 1, -(2**63), None]
    assert dead(computed, "offset", "reason") == [(at, "schema_violation") for at in (2, 3, 4)]


def test_an_empty_parquet_file_gives_empty_output(tmp_path: Path) -> None:
    pq.write_table(pa.table({"key": pa.array([], pa.string()), "at": pa.array([], pa.int64())}), tmp_path / "i.parquet")

    assert compute(make_view(), tmp_path / "i.parquet", emit="latest", closes=True).rows.num_rows == 0


def test_what_is_no_parquet_is_refused(tmp_path: Path) -> None:
    path = write(tmp_path / "in.parquet", [{"key": "a", "at": 100}])

    with pytest.raises(DecodeError, match=r"in\.parquet cannot be read: .* expected NDJSON, or Parquet under a name"):
        compute(make_view(), path)


# Size


def test_memory_does_not_grow_with_the_input(tmp_path: Path) -> None:
    def peak(n_rows: int) -> int:
        path = write(tmp_path / "in.ndjson", [{"key": f"k{at % 50}", "at": 100 + at} for at in range(n_rows)])
        pool = pa.default_memory_pool()
        tracemalloc.start()
        highest = 0
        for computed in Computation(make_view(), emit="every_event").run(path, batch_rows=500):
            highest = max(highest, pool.bytes_allocated() + tracemalloc.get_traced_memory()[0])
            del computed
        tracemalloc.stop()
        return highest - pool.bytes_allocated()

    few = peak(3_000)
    assert peak(15_000) < 1.3 * few
