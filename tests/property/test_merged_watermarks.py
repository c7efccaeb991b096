"""Behind a repartition topic the engine is the oracle too, and neither batches nor restarts show."""

import dataclasses
import itertools
from typing import Any

import hypothesis.strategies as st
import pyarrow as pa
from hypothesis import given, settings

from schemas.time import MINUS_INFINITY_US
from schemas.view import FeatureView
from streams.windowing import WindowEngine
from tests.property.test_engine_equals_oracle import (
    DERIVATIONS,
    PREDICATES,
    assert_same,
    is_same_bytes,
    logs,
    session_views,
    views,
)
from tests.support.builders import Row, make_batch, run_engine, to_rows
from tests.support.merging_oracle import MergingOracle


@st.composite
def merging_views(draw: st.DrawFn) -> FeatureView:
    view = draw(st.one_of(views(), session_views()))
    (source,) = view.sources
    topics = draw(st.sampled_from([["a"], ["a", "b"], ["b", "a", "c"]]))
    sources = [dataclasses.replace(source, topic=topic, key="") for topic in topics]
    return dataclasses.replace(view, source=sources)


@st.composite
def record_logs(draw: st.DrawFn, view: FeatureView) -> list[Row]:
    """A log as the repartition topic holds it: what each partition sends is in the order of that partition."""
    counts = {source.topic: draw(st.integers(1, 3)) for source in view.sources}
    speakers = [(topic, number) for topic, count in counts.items() for number in range(count)]
    told: dict[tuple[str, int], int] = dict.fromkeys(speakers, MINUS_INFINITY_US)
    records: list[Row] = []

    def tell(speaker: tuple[str, int], **more: Any) -> None:
        topic, number = speaker
        watermark = None if told[speaker] == MINUS_INFINITY_US else told[speaker]
        place = {"_source": topic, "_source_partition": number, "_source_partitions": counts[topic]}
        empty = (*view.columns.names, "_time", "_event_id", "_broker_time", "_watermark_after")
        blank: Row = dict.fromkeys(empty)
        offset = len(records) + draw(st.integers(0, 1)) if not records else records[-1]["_offset"] + 1
        records.append(blank | {"_watermark": watermark, "_request_id": "r", "_offset": offset} | more | place)

    if draw(st.booleans()):
        for speaker in speakers:
            tell(speaker, _is_event=False, _is_idle=draw(st.sampled_from([False, False, True])))
    for row in draw(logs()):
        if row["at"] is None or abs(row["at"]) > 10**7 or row["key"] is None:
            continue
        time_us = row["at"] * 1_000_000
        speaker = draw(st.sampled_from(speakers))
        if draw(st.integers(0, 9)) == 0:
            counts[speaker[0]] += draw(st.integers(0, 1))
        event_id = None if row["id"] is None else f"{speaker[0]}/{row['id']}"
        tell(speaker, **row, _is_event=True, _is_idle=False, _time=time_us, _event_id=event_id)
        records[-1]["_offset"] = len(records)
        told[speaker] = max(told[speaker], time_us - view.input.max_out_of_orderness_us)
        records[-1]["_watermark_after"] = told[speaker]
        for other in draw(st.lists(st.sampled_from(speakers), max_size=2)):
            tell(other, _is_event=False, _is_idle=draw(st.sampled_from([False, False, True])))
            records[-1]["_offset"] = len(records)
    for number, record in enumerate(records):
        record["_offset"] = 2 * number
    return records


@settings(max_examples=150, deadline=None)
@given(data=st.data(), view=merging_views())
def test_a_view_over_a_repartition_topic_is_the_oracle(data: st.DataObject, view: FeatureView) -> None:
    records = data.draw(record_logs(view))
    table, dead, results = run_engine(view, records, close=True)
    expected = MergingOracle(view, predicates=PREDICATES, derivations=DERIVATIONS).run(records, close=True)
    letters = [{name: row[name] for name in ("_offset", "reason", "late_by_us")} for row in to_rows(dead)]
    assert letters == expected.dead_letters
    assert_same(to_rows(table), expected.rows, view=view, rows=[r for r in records if r["_is_event"]])
    counts = results[0].counts
    assert (counts.admitted, counts.partially_late, counts.without_as_of) == (
        expected.admitted,
        expected.partially_late,
        expected.without_as_of,
    )


@settings(max_examples=100, deadline=None)
@given(
    data=st.data(),
    view=merging_views(),
    splits=st.lists(st.integers(0, 60), max_size=6),
    restore=st.booleans(),
)
def test_batches_and_restarts_do_not_show_behind_a_repartition_topic(
    data: st.DataObject, view: FeatureView, splits: list[int], restore: bool
) -> None:
    records = data.draw(record_logs(view))
    whole, dead, _ = run_engine(view, records, close=True)
    splits = [split for split in splits if split < len(records)]
    parts, dead_parts, _ = run_engine(view, records, splits=splits, restore=restore, close=True)
    assert is_same_bytes(dead, dead_parts)
    assert is_same_bytes(whole, parts)


@settings(max_examples=40, deadline=None)
@given(data=st.data(), view=merging_views(), split=st.integers(0, 60))
def test_changes_and_buckets_hold_the_watermarks_of_the_inputs(
    data: st.DataObject, view: FeatureView, split: int
) -> None:
    records = data.draw(record_logs(view))
    split = min(split, len(records))
    engine, parts, made = WindowEngine(view), [], []
    for start, stop in itertools.pairwise([0, split // 2, split]):
        made.append(engine.step(make_batch(view, records[start:stop]), processing_time_us=0).rows)
        parts.append(engine.changes())
    restored = WindowEngine.restore_parts(view, parts)
    made.append(restored.step(make_batch(view, records[split:]), processing_time_us=0).rows)
    made.append(restored.close().rows)
    whole, _, _ = run_engine(view, records, close=True)
    assert is_same_bytes(whole, pa.concat_tables(made).combine_chunks())
