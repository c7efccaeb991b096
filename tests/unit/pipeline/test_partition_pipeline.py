"""One partition's pipeline: what it emits, and that a restart anywhere emits the rest and nothing else."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from schemas.aggregation import count, last, sum_
from schemas.entity import Entity
from schemas.row import PRODUCED_TIME_HEADER, REQUEST_ID_HEADER
from schemas.source import EventSource
from schemas.view import FeatureView
from streams.batch import RawBatch
from streams.pipeline import IdleStep, PartitionPipeline, Processed, ViewStart
from streams.windowing.result import WatermarkMarker
from tests.support.builders import make_source
from tests.support.transport import make_batch


@pytest.fixture(scope="module")
def source() -> EventSource:
    return make_source(max_out_of_orderness="0s")


def make_view(source: EventSource, name: str = "v", *, allowed_lateness: str = "0s", **settings: Any) -> FeatureView:
    return FeatureView(
        name,
        **{
            "version": 2,
            "entity": Entity("thing", key="key"),
            "source": source,
            "slide": "1m",
            "allowed_lateness": allowed_lateness,
            "emit": "every_event",
            "features": {"n_1m": count().over("1m"), "n_sum": sum_("n").over("1m"), "kind": last("kind").over(last=1)},
            **settings,
        },
    )


@pytest.fixture
def view(source: EventSource) -> FeatureView:
    return make_view(source)


def event(at: int, key: str | None = "a", **fields: Any) -> bytes:
    return json.dumps({"key": key, "at": at, "n": 1, **fields}).encode()


def process(pipeline: PartitionPipeline, batch: RawBatch) -> Processed:
    return pipeline.process(batch, processing_time_us=0, computed_time_us=123, epoch=7)


def run(
    views: Sequence[FeatureView],
    batches: Sequence[RawBatch],
    *,
    starts: Mapping[str, ViewStart] | None = None,
    reject_from: int = 0,
) -> tuple[dict[str, pa.Table], pa.Table]:
    pipeline = PartitionPipeline(views[0].source, views, partition=3, starts=starts, reject_from=reject_from)
    done = [process(pipeline, batch) for batch in batches]
    rows = {view.name: pa.concat_tables([part.rows[view.name] for part in done]) for view in views}
    return rows, pa.concat_tables([part.dead_letters for part in done])


EVENTS = [
    event(0),
    event(10, "b"),
    b"{",
    event(30, kind="x"),
    event(65),
    event(3),  # late
    event(70, None),  # no key
    event(130, "b", n=5),
    event(1_700_000_000_000),  # milliseconds in place of seconds
    event(200),
    event(330, "b"),
]


def test_rows_have_all_columns_of_their_view_and_say_where_they_come_from(view: FeatureView) -> None:
    rows, _ = run([view], [make_batch(EVENTS, first_offset=50)])
    made = rows["v"]
    assert made.schema.names == view.row_schema.names
    assert made.schema.types == view.row_schema.types
    for column, value in (
        ("view", "v"),
        ("view_version", 2),
        ("definition_hash", view.definition_hash),
        ("source_topic", "test.events"),
        ("source_partition", 3),
        ("epoch", 7),
    ):
        assert set(made[column].to_pylist()) == {value}
    assert set(made["computed_time"].cast(pa.int64()).to_pylist()) == {123}
    assert min(made["source_offset"].to_pylist()) == 50


def test_each_row_is_in_a_feature_row_or_a_dead_letter(view: FeatureView) -> None:
    rows, dead_letters = run([view], [make_batch(EVENTS)])
    as_of = [row["source_offset"] for row in rows["v"].to_pylist() if row["pane"] == "EARLY"]
    assert dict(zip(dead_letters["_offset"].to_pylist(), dead_letters["reason"].to_pylist(), strict=True)) == {
        2: "decode_error",
        5: "late",
        6: "missing_key",
        8: "timestamp_unit",
    }
    assert sorted(as_of + dead_letters["_offset"].to_pylist()) == list(range(len(EVENTS)))


def test_dead_letters_name_the_view_where_the_reason_is_its_own_and_are_one_where_it_is_not(
    source: EventSource,
) -> None:
    views = [make_view(source, "strict"), make_view(source, "patient", allowed_lateness="10m")]
    _, dead_letters = run(views, [make_batch(EVENTS)])
    named = [(row["_offset"], row["reason"], row["view"]) for row in dead_letters.to_pylist()]
    assert sorted(named[:2]) == [(2, "decode_error", None), (5, "late", "strict")]
    assert sorted(named[2:4]) == [(6, "missing_key", "patient"), (6, "missing_key", "strict")]
    assert named[4:] == [(8, "timestamp_unit", None)]


def test_dead_letters_are_in_the_order_of_offsets(source: EventSource) -> None:
    _, dead_letters = run([make_view(source, "x"), make_view(source, "y")], [make_batch(EVENTS)])
    offsets = dead_letters["_offset"].to_pylist()
    assert offsets == sorted(offsets)


def test_late_rows_say_by_how_much(view: FeatureView) -> None:
    _, dead_letters = run([view], [make_batch(EVENTS)])
    assert {row["late_by_us"] for row in dead_letters.to_pylist() if row["reason"] == "late"} == {62_000_000}


def test_the_time_a_record_was_produced_replaces_that_of_the_broker_in_rows_alone(view: FeatureView) -> None:
    batch = make_batch(
        [event(0), event(70)],
        headers=[[(PRODUCED_TIME_HEADER, b"55")], [(REQUEST_ID_HEADER, b"r")]],
        broker_time_us=1_000_000,
    )
    rows, _ = run([view], [batch])
    by_offset = {(row["source_offset"], row["pane"]): row for row in rows["v"].to_pylist()}
    times = {at: row["broker_time"].timestamp() for at, row in by_offset.items()}
    # The pane that closes was made by the row that moved the watermark.
    assert times == {(0, "EARLY"): 55e-6, (1, "ON_TIME"): 1.0, (1, "EARLY"): 1.0}
    assert by_offset[0, "EARLY"]["request_id"] == "test.events-3-0"
    assert by_offset[1, "EARLY"]["request_id"] == "r"


def test_admission_keeps_to_the_time_of_the_broker() -> None:
    source = make_source(max_future_skew="1m")
    batch = make_batch([event(500)], headers=[[(PRODUCED_TIME_HEADER, b"500000000")]], broker_time_us=100_000_000)
    _, dead_letters = run([make_view(source)], [batch])
    assert dead_letters["reason"].to_pylist() == ["future_timestamp"]


def test_rows_do_not_depend_on_how_they_were_fetched(source: EventSource) -> None:
    views = [make_view(source, "x"), make_view(source, "y", allowed_lateness="5m")]
    whole = run(views, [make_batch(EVENTS)])
    for at in range(1, len(EVENTS)):
        split = run(views, [make_batch(EVENTS[:at]), make_batch(EVENTS[at:], first_offset=at)])
        assert split[0] == whole[0]
        assert sorted_letters(split[1]) == sorted_letters(whole[1])
    each = run(views, [make_batch([value], first_offset=at) for at, value in enumerate(EVENTS)])
    assert each[0] == whole[0]


def sorted_letters(dead_letters: pa.Table) -> list[dict[str, Any]]:
    return sorted(dead_letters.to_pylist(), key=repr)


# -- restarts ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("emitted", range(len(EVENTS) + 1))
@pytest.mark.parametrize("snapshot_at", range(0, len(EVENTS) + 1, 3))
def test_a_replay_from_a_snapshot_emits_exactly_what_was_not_emitted(
    source: EventSource, snapshot_at: int, emitted: int
) -> None:
    if emitted < snapshot_at:
        return  # a snapshot is committed with the offset it belongs to, never ahead of it
    views = [make_view(source, "x"), make_view(source, "y", allowed_lateness="5m")]
    before = PartitionPipeline(source, views, partition=3)
    if snapshot_at:
        process(before, make_batch(EVENTS[:snapshot_at]))
    starts = {name: ViewStart(parts=[engine.snapshot()], emit_from=emitted) for name, engine in before.engines.items()}
    after = PartitionPipeline(source, views, partition=3, starts=starts, reject_from=emitted)
    # Rows that cannot be decoded leave no trace in the state: those at its end are looked at again.
    first = after.resume_offset
    assert first <= snapshot_at
    if first == len(EVENTS):
        return
    done = process(after, make_batch(EVENTS[first:], first_offset=first))

    whole, letters = run(views, [make_batch(EVENTS)])
    for name, rows in whole.items():
        expected = [row for row in rows.to_pylist() if row["source_offset"] >= emitted]
        assert done.rows[name].to_pylist() == expected
    assert sorted_letters(done.dead_letters) == sorted_letters(letters.filter(pa.compute.field("_offset") >= emitted))


def test_views_whose_snapshots_are_of_different_age_go_on_from_the_oldest(source: EventSource) -> None:
    views = [make_view(source, "x"), make_view(source, "y")]
    whole, _ = run(views, [make_batch(EVENTS)])
    starts = {}
    for view, at in zip(views, (4, 8), strict=True):
        part = PartitionPipeline(source, [view], partition=3)
        process(part, make_batch(EVENTS[:at]))
        starts[view.name] = ViewStart(parts=[part.engines[view.name].snapshot()], emit_from=9)
    pipeline = PartitionPipeline(source, views, partition=3, starts=starts, reject_from=9)
    assert pipeline.resume_offset == 4
    done = process(pipeline, make_batch(EVENTS[4:], first_offset=4))
    for name, rows in whole.items():
        assert done.rows[name].to_pylist() == [row for row in rows.to_pylist() if row["source_offset"] >= 9]


def test_a_new_view_emits_from_the_beginning_and_doubles_no_dead_letter_of_the_source(source: EventSource) -> None:
    old, new = make_view(source, "old"), make_view(source, "new", allowed_lateness="1h")
    part = PartitionPipeline(source, [old], partition=3)
    process(part, make_batch(EVENTS))
    starts = {"old": ViewStart(parts=[part.engines["old"].snapshot()], emit_from=len(EVENTS))}
    rows, dead_letters = run([old, new], [make_batch(EVENTS)], starts=starts, reject_from=len(EVENTS))
    alone, _ = run([new], [make_batch(EVENTS)])
    assert rows["new"] == alone["new"]
    assert rows["old"].num_rows == 0
    # What is bad for every view was told when the row first came; what is the new view's own was not.
    assert [(row["reason"], row["view"]) for row in dead_letters.to_pylist()] == [("missing_key", "new")]


# -- idle partitions ---------------------------------------------------------------------------------------------------

LATER = [event(70), event(95), event(110), event(130)]


@pytest.fixture
def idle_view() -> FeatureView:
    return make_view(make_source(max_out_of_orderness="0s", idle_timeout="10s", idle_advance=True))


def poll(pipeline: PartitionPipeline, now_us: int, *, is_caught_up: bool = True) -> dict[str, IdleStep]:
    return pipeline.poll_idle(
        processing_time_us=now_us, computed_time_us=now_us, epoch=lambda: 8, is_caught_up=is_caught_up
    )


def test_an_idle_partition_closes_its_windows_by_the_clock(idle_view: FeatureView) -> None:
    pipeline = PartitionPipeline(idle_view.source, [idle_view], partition=3)
    process(pipeline, make_batch(LATER[:1]))
    assert poll(pipeline, 9_000_000) == {}
    (step,) = poll(pipeline, 70_000_000).values()
    assert step.marker == WatermarkMarker(after_offset=0, watermark_us=130_000_000)
    assert step.rows.schema.equals(idle_view.row_schema)
    (row,) = step.rows.to_pylist()
    assert (row["pane"], row["n_1m"], row["source_offset"], row["epoch"]) == ("ON_TIME", 1, 0, 8)
    assert row["broker_time"] is None
    assert step.counts.on_time == 1


def test_a_backlog_is_never_idleness(idle_view: FeatureView) -> None:
    pipeline = PartitionPipeline(idle_view.source, [idle_view], partition=3)
    process(pipeline, make_batch(LATER[:1]))
    assert poll(pipeline, 70_000_000, is_caught_up=False) == {}
    assert poll(pipeline, 75_000_000) == {}


@pytest.mark.parametrize("state_at", [0, 1, 2])
@pytest.mark.parametrize("batch_rows", [1, 2, 4])
def test_a_replay_takes_the_steps_of_an_idle_partition_where_they_were_taken(
    idle_view: FeatureView, state_at: int, batch_rows: int
) -> None:
    live = PartitionPipeline(idle_view.source, [idle_view], partition=3)
    markers, parts = [], []
    for offset, value in enumerate(LATER[:3]):
        if offset == state_at:
            parts = [live.engines["v"].snapshot()]
        process(live, make_batch([value], first_offset=offset))
        if offset < 2:
            # The second step makes the third event late.
            markers += [step.marker for step in poll(live, 10_000_000 + 20_000_000 * (offset + 1)).values()]
    assert len(markers) == 2
    start = ViewStart(parts=parts, emit_from=3, markers=markers)
    again = PartitionPipeline(idle_view.source, [idle_view], partition=3, starts={"v": start}, reject_from=3)
    for at in range(again.resume_offset, 3, batch_rows):
        done = process(again, make_batch(LATER[at : min(3, at + batch_rows)], first_offset=at))
        assert (done.rows["v"].num_rows, done.dead_letters.num_rows) == (0, 0)
    expected = process(live, make_batch(LATER[3:], first_offset=3))
    done = process(again, make_batch(LATER[3:], first_offset=3))
    assert done.rows["v"] == expected.rows["v"]
    assert again.engines["v"].close().rows == live.engines["v"].close().rows


def test_a_pipeline_starts_at_the_beginning_unless_told(view: FeatureView) -> None:
    assert PartitionPipeline(view.source, [view], partition=0).resume_offset == 0


def test_a_batch_keeps_the_records_that_are_taken() -> None:
    batch = make_batch([b"a", b"bb", b"ccc"], offsets=[3, 5, 9], keys=[b"k", None, b"k"])
    taken = batch.take(np.array([0, 2]))
    assert (taken.offsets.tolist(), taken.keys, taken.values) == ([3, 9], [b"k", b"k"], [b"a", b"ccc"])
    assert (taken.next_offset, len(taken)) == (10, 2)
