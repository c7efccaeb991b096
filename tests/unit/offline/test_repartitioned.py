"""Views by way of a repartition topic, over a file."""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from offline.computation import Computation, Computed
from offline.report import report_lateness
from schemas.aggregation import count, from_event, last
from schemas.entity import Entity
from schemas.errors import ConfigError, DecodeError
from schemas.source import EventSource
from schemas.view import FeatureView
from streams.pipeline import PartitionPipeline
from streams.repartition import Router
from tests.support.builders import EVENT_FIELDS, make_contract, make_source, to_rows
from tests.support.transport import make_batch

Row = dict[str, Any]
WHEN = "1970-01-01T00:{:02}:{:02}Z"


def weather() -> EventSource:
    fields = {"key": EVENT_FIELDS["key"], "when": {"type": "string", "format": "date-time"}, "x": EVENT_FIELDS["x"]}
    return EventSource(
        "weather",
        contract=make_contract(fields),
        event_time="when",
        plausible_from="1900-01-01T00:00:00Z",
        max_out_of_orderness="5s",
        max_future_skew=None,
    )


def make_view(*sources: EventSource, **settings: Any) -> FeatureView:
    features = {
        "n": count(where="_source == 'test.events'").over("20s") if len(sources) > 1 else count().over("20s"),
        "newest": last("x", where="_source == 'weather'" if len(sources) > 1 else None).over(last=1),
        "own": from_event("n"),
    }
    given: Row = {"version": 1, "slide": "10s", "emit": "every_event", "features": features}
    return FeatureView("things", entity=Entity("thing", key="key"), source=list(sources), **given | settings)


def write(path: Path, rows: Iterable[Row | bytes]) -> Path:
    path.write_bytes(b"".join((r if isinstance(r, bytes) else json.dumps(r).encode()) + b"\n" for r in rows))
    return path


def compute(view: FeatureView, path: Path, **options: Any) -> Computed:
    parts = list(Computation(view).run(path, **options))
    rows = pa.concat_tables([part.rows for part in parts]).combine_chunks()
    return Computed(rows=rows, dead_letters=pa.concat_tables([part.dead_letters for part in parts]).combine_chunks())


TWO = [
    {"_source": "test.events", "key": "a", "at": 100, "n": 1},
    {"_source": "weather", "key": "a", "when": WHEN.format(1, 41), "x": 20.5},
    {"_source": "test.events", "key": "a", "at": 103, "n": 2},
    b"{",
    {"_source": "weather", "key": "b", "when": WHEN.format(2, 10), "x": 21.5},
    {"_source": "weather", "key": None, "when": WHEN.format(2, 11)},
    {"_source": "test.events", "key": "a", "at": 131, "n": 3},
    {"_source": "weather", "key": "a", "when": WHEN.format(2, 20), "x": 1.5},
    {"_source": "test.events", "key": "a", "at": 101, "n": 4},
    {"_source": "weather", "key": "a", "when": WHEN.format(1, 42)},
]


def test_a_view_over_two_sources_sees_the_rows_of_both(tmp_path: Path) -> None:
    computed = compute(make_view(make_source(), weather()), write(tmp_path / "in.ndjson", TWO))

    early = [row for row in to_rows(computed.rows) if row["pane"] == "EARLY"]
    columns = ("source_offset", "origin_topic", "n", "newest", "own", "request_id")
    assert [tuple(row[name] for name in columns) for row in early] == [
        (0, "test.events", 1, None, 1, "test.events-0-0"),
        (1, "weather", 1, 20.5, None, "weather-0-1"),
        (2, "test.events", 2, 20.5, 2, "test.events-0-2"),
        (4, "weather", 0, 21.5, None, "weather-0-4"),
        (6, "test.events", 1, 20.5, 3, "test.events-0-6"),
        (7, "weather", 1, 1.5, None, "weather-0-7"),
    ]
    letters = [tuple(row[n] for n in ("topic", "offset", "reason")) for row in computed.dead_letters.to_pylist()]
    assert letters == [
        ("test.events", 3, "decode_error"),
        ("weather", 5, "missing_key"),
        ("test.events", 8, "late"),
        ("weather", 9, "late"),
    ]


def test_the_watermark_is_the_minimum_over_the_sources(tmp_path: Path) -> None:
    computed = compute(make_view(make_source(), weather()), write(tmp_path / "in.ndjson", TWO))

    marks = [row["watermark"] for row in to_rows(computed.rows) if row["pane"] == "EARLY"]
    # Of the two the weather is 5 s behind itself; what a row moves counts with the next one.
    assert marks == [None, None, 96_000_000, 96_000_000, 103_000_000, 125_000_000]


@pytest.mark.parametrize("batch_rows", [1, 2, 3, 7])
def test_batches_do_not_show(tmp_path: Path, batch_rows: int) -> None:
    view, path = make_view(make_source(), weather()), write(tmp_path / "in.ndjson", TWO)

    whole, cut = compute(view, path, closes=True), compute(view, path, closes=True, batch_rows=batch_rows)
    assert cut.rows.equals(whole.rows)
    assert cut.dead_letters.equals(whole.dead_letters)
    assert whole.rows["origin_offset"].null_count == 0


def test_a_parquet_file_is_the_same_events(tmp_path: Path) -> None:
    view = make_view(make_source(), weather())
    rows = [row for row in TWO if isinstance(row, dict)]
    names = dict.fromkeys(name for row in rows for name in row)
    table = pa.Table.from_pylist([{name: row.get(name) for name in names} for row in rows])
    when = pa.array([row.get("when") for row in rows]).cast(pa.timestamp("us", tz="UTC"))
    table = table.set_column(table.schema.get_field_index("when"), "when", when)
    pq.write_table(table, tmp_path / "in.parquet")

    expected = compute(view, write(tmp_path / "in.ndjson", rows))
    got = compute(view, tmp_path / "in.parquet")
    assert got.rows.equals(expected.rows)
    assert got.dead_letters.drop(["value"]).equals(expected.dead_letters.drop(["value"]))


@pytest.mark.parametrize("name", [None, "elsewhere"])
def test_a_row_that_does_not_say_which_source_it_is_of_is_refused(tmp_path: Path, name: str | None) -> None:
    path = write(tmp_path / "in.ndjson", [TWO[0], {"key": "a", "at": 1, "_source": name}])

    with pytest.raises(DecodeError, match=r"row 2: `_source` is .*expected the topic"):
        compute(make_view(make_source(), weather()), path)


def test_a_source_without_a_row_in_the_file_holds_nothing_back(tmp_path: Path) -> None:
    rows = [{"_source": "test.events", "key": "a", "at": at} for at in (100, 130, 160)]
    computed = compute(make_view(make_source(), weather()), write(tmp_path / "in.ndjson", rows))

    assert [row["pane"] for row in to_rows(computed.rows)] == ["EARLY", "EARLY", "ON_TIME", "ON_TIME", "EMPTY", "EARLY"]


def test_offsets_rise_within_each_partition_of_each_source(tmp_path: Path) -> None:
    view = make_view(make_source(), weather())
    rows = [
        {"_source": "test.events", "key": "a", "at": 100, "_offset": 5, "_partition": 3},
        {"_source": "weather", "key": "a", "when": WHEN.format(1, 41), "_offset": 1, "_partition": 3},
        {"_source": "test.events", "key": "a", "at": 100, "_offset": 2, "_partition": 0},
    ]
    computed = compute(view, write(tmp_path / "in.ndjson", rows))

    origins = ("origin_topic", "origin_partition", "origin_offset")
    assert [tuple(row[name] for name in origins) for row in computed.rows.to_pylist()] == [
        ("test.events", 3, 5),
        ("weather", 3, 1),
        ("test.events", 0, 2),
    ]


def test_a_file_gives_what_the_live_path_gives_where_records_come_in_its_order(tmp_path: Path) -> None:
    source = make_source(key="kind", max_out_of_orderness="3s")
    view = make_view(source)
    rows = [
        {"key": "ab"[number % 2], "at": 100 + 7 * number % 61, "n": number, "_partition": number % 3}
        for number in range(60)
    ]
    offsets = [number // 3 for number in range(60)]
    path = write(tmp_path / "in.ndjson", [row | {"_offset": o} for row, o in zip(rows, offsets, strict=True)])
    pipeline = PartitionPipeline(view.input, [view], partition=0)
    routers = [Router(source, view.input, partition=number, n_partitions=3) for number in range(3)]
    feeds = [PartitionPipeline(source, [], partition=n, routers={router: []}) for n, router in enumerate(routers)]
    live, records, letters = [], 0, []

    def take(keys: list[bytes | None], values: list[bytes]) -> None:
        nonlocal records
        batch = make_batch(values, keys=keys, topic=view.input.topic, first_offset=records)
        records += len(values)
        processed = pipeline.process(batch, processing_time_us=0, computed_time_us=0, epoch=1)
        live.append(processed.rows["things"])
        letters.extend(processed.dead_letters.to_pylist())

    for router in routers:
        take([None], [router.heartbeat() or b""])
    for number, row in enumerate(rows):
        value = json.dumps(row).encode()
        batch = make_batch([value], topic=source.topic, partition=number % 3, first_offset=offsets[number])
        router = routers[number % 3]
        routed = (
            feeds[number % 3].process(batch, processing_time_us=0, computed_time_us=0, epoch=1).routed[router.topic]
        )
        take(list(routed.keys), list(routed.values))

    computed = compute(view, path)
    own = ("broker_time", "computed_time", "epoch", "source_offset")
    assert computed.rows.drop(own).equals(pa.concat_tables(live).combine_chunks().drop(own))
    assert computed.dead_letters["late_by_us"].to_pylist() == [letter["late_by_us"] for letter in letters]
    assert len(letters) > 0


def test_a_report_tells_of_a_source_that_is_not_keyed_by_the_entity_and_of_no_two(tmp_path: Path) -> None:
    path = write(tmp_path / "in.ndjson", [{"key": "a", "at": at} for at in (100, 130, 90)])
    report = report_lateness(make_view(make_source(key="kind")), path)
    assert report.settings[0].late == 1
    with pytest.raises(ConfigError, match="expected one source"):
        report_lateness(make_view(make_source(), weather()), path)
