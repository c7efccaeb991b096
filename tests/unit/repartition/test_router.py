"""What goes to a repartition topic, and what is made of it on the other side."""

import itertools
import json
from dataclasses import asdict
from datetime import UTC, datetime
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from schemas.aggregation import count, last
from schemas.entity import Entity
from schemas.errors import DecodeError
from schemas.source import EventSource
from schemas.time import MINUS_INFINITY_US
from schemas.view import FeatureView
from schemas.view_input import ViewInput
from streams.batch import RawBatch
from streams.pipeline import PartitionPipeline, Processed
from streams.repartition import RepartitionedRows, Router, RouteState
from tests.support.builders import EVENT_FIELDS, make_contract, make_source, to_rows
from tests.support.transport import make_batch

SECOND_US = 1_000_000
BINARY = b"\x00\xff\n\x80"


def make_input(*sources: EventSource, key: str = "key") -> ViewInput:
    return ViewInput(sources or (make_source(key="kind", max_out_of_orderness="2s"),), Entity("thing", key=key))


def make_router(view_input: ViewInput, state: RouteState | None = None, *, partition: int = 2) -> Router:
    return Router(view_input.sources[0], view_input, partition=partition, n_partitions=3, state=state)


def event(at: int | None, key: str | None = "a", **more: Any) -> bytes:
    return json.dumps({"key": key, "at": at, **more}).encode()


def route(router: Router, batch: RawBatch, *, now_us: int = 0) -> Processed:
    pipeline = PartitionPipeline(router.view_input.sources[0], [], partition=2, routers={router: []})
    return pipeline.process(batch, processing_time_us=now_us, computed_time_us=0, epoch=1)


def sent(router: Router, batch: RawBatch) -> list[tuple[bytes | None, bytes]]:
    routed = route(router, batch).routed[router.topic]
    return list(zip(routed.keys, routed.values, strict=True))


def read(view_input: ViewInput, records: list[tuple[bytes | None, bytes]], **more: Any) -> RepartitionedRows:
    values, keys = [value for _, value in records], [key for key, _ in records]
    return RepartitionedRows(make_batch(values, keys=keys, topic=view_input.topic, **more), view_input)


def test_a_row_arrives_with_what_its_source_said_of_it() -> None:
    view_input = make_input()
    headers = [("request_id", b"r-1"), ("raw", BINARY)]
    payload = event(10, n=5, kind="x")
    batch = make_batch([payload], topic="test.events", partition=2, first_offset=7, headers=[headers], keys=[BINARY])
    arrived = read(view_input, sent(make_router(view_input), batch), first_offset=40)

    (row,) = arrived.rows.to_pylist()
    assert (row["key"], row["n"], row["kind"], row["_offset"], row["_request_id"]) == ("a", 5, "x", 40, "r-1")
    assert (row["_source"], row["_source_partition"], row["_source_partitions"]) == ("test.events", 2, 3)
    assert (row["_time"], row["_watermark"], row["_is_event"], row["_is_idle"]) == (10 * SECOND_US, None, True, False)
    original, at = arrived.record(40)
    assert (original.topic, original.partition, original.offsets.tolist()) == ("test.events", 2, [7])
    assert (original.keys[at], original.values[at], original.headers[at]) == (BINARY, payload, headers)


def test_the_watermark_of_a_row_is_the_one_before_it() -> None:
    view_input = make_input()
    values = [event(10), event(20), event(15, "b"), event(21)]
    arrived = read(view_input, sent(make_router(view_input), make_batch(values, topic="test.events")))

    rows = arrived.rows.to_pylist()
    assert [row["_watermark"] for row in rows] == [None, 8_000_000, 18_000_000, 18_000_000]
    assert [row["_watermark_after"] for row in rows] == [8_000_000, 18_000_000, 18_000_000, 19_000_000]


def test_what_a_row_alone_decides_is_decided_before_it_is_sent_on_and_moves_no_watermark() -> None:
    view_input = make_input(make_source(max_future_skew="1s", key=""))
    router = make_router(view_input)
    rows = [event(900), event(950, None), event(None), event(2_000), event(2_000_000_000_000), b"{"]
    processed = route(router, make_batch(rows, topic="test.events", broker_time_us=1_000 * SECOND_US))

    assert len(processed.routed[router.topic].values) == 1
    assert processed.routed[router.topic].rejected["reason"].to_pylist() == [
        "missing_key",
        "missing_event_time",
        "future_timestamp",
        "timestamp_unit",
    ]
    assert router.state.watermark_us == 900 * SECOND_US


def test_each_view_behind_a_router_has_the_dead_letters_that_are_its_own() -> None:
    view_input = make_input()
    router = make_router(view_input)
    views = [
        FeatureView(
            name,
            version=1,
            entity=view_input.entity,
            source=view_input.sources[0],
            slide="1m",
            features={"n": count().over("1m")},
        )
        for name in ("v", "w")
    ]
    pipeline = PartitionPipeline(view_input.sources[0], [], partition=2, routers={router: views})
    batch = make_batch([event(10, None), event(None), b"{"], topic="test.events")
    letters = pipeline.process(batch, processing_time_us=0, computed_time_us=0, epoch=1).dead_letters

    assert sorted(zip(letters["_offset"].to_pylist(), letters["view"].to_pylist(), strict=True), key=str) == [
        (0, "v"),
        (0, "w"),
        (1, None),
        (2, None),
    ]


def test_a_router_goes_on_where_its_state_says_and_sends_nothing_twice() -> None:
    view_input = make_input()
    rows = [event(10), event(20), event(30), event(40)]
    whole = sent(make_router(view_input), make_batch(rows, topic="test.events"))
    first = make_router(view_input)
    before = sent(first, make_batch(rows[:2], topic="test.events"))
    again = make_router(view_input, first.state)

    assert before + sent(again, make_batch(rows, topic="test.events")) == whole
    assert again.next_offset == 4


@settings(max_examples=60, deadline=None)
@given(
    times=st.lists(st.tuples(st.integers(0, 30), st.sampled_from(["a", "b", None])), min_size=1, max_size=12),
    splits=st.lists(st.integers(1, 11), max_size=4),
)
def test_batches_do_not_show_in_what_is_sent(times: list[tuple[int, str | None]], splits: list[int]) -> None:
    view_input = make_input()
    rows = [event(at, key) for at, key in times]
    whole = sent(make_router(view_input), make_batch(rows, topic="test.events"))
    router, parts = make_router(view_input), []
    edges = [0, *sorted({split for split in splits if split < len(rows)}), len(rows)]
    for start, stop in itertools.pairwise(edges):
        parts += sent(router, make_batch(rows[start:stop], topic="test.events", first_offset=start))
        router = make_router(view_input, router.state)

    assert parts == whole


def heartbeat(router: Router) -> dict[str, Any] | None:
    value = router.heartbeat()
    return None if value is None else json.loads(value)


def test_a_partition_says_that_it_is_there_before_it_has_a_row_and_then_only_what_is_new() -> None:
    view_input = make_input()
    router = make_router(view_input)

    first = heartbeat(router)
    assert first is not None
    assert (first["partition"], first["partitions"], first["watermark_us"], first["is_idle"]) == (2, 3, None, False)
    assert heartbeat(router) is None
    sent(router, make_batch([event(10)], topic="test.events"))
    assert (heartbeat(router) or {})["watermark_us"] == 8 * SECOND_US
    sent(router, make_batch([event(5)], topic="test.events", first_offset=1))
    assert heartbeat(router) is None
    assert heartbeat(make_router(view_input, router.state)) is None


def test_a_partition_is_idle_when_it_has_been_silent_for_the_timeout_and_no_longer_with_its_next_row() -> None:
    view_input = make_input(make_source(key="", idle_timeout="10s"))
    router = make_router(view_input)
    route(router, make_batch([event(10)], topic="test.events"), now_us=0)
    heartbeat(router)
    router.poll_idle(processing_time_us=9 * SECOND_US, is_caught_up=True)
    assert heartbeat(router) is None
    router.poll_idle(processing_time_us=10 * SECOND_US, is_caught_up=True)
    told = heartbeat(router)
    assert told is not None
    assert (told["is_idle"], told["watermark_us"], told["offset"]) == (True, 10 * SECOND_US, 0)

    again = make_router(view_input, router.state)
    again.poll_idle(processing_time_us=0, is_caught_up=True)
    assert heartbeat(again) is None, "a restart does not wake an idle partition"
    route(again, make_batch([event(11)], topic="test.events", first_offset=1), now_us=20 * SECOND_US)
    assert (heartbeat(again) or {})["is_idle"] is False


ARRIVED = datetime(2026, 1, 1, tzinfo=UTC)
ARRIVED_US = int(ARRIVED.timestamp()) * SECOND_US


@pytest.mark.parametrize(
    ("rows", "is_idle", "broker_time"),
    [([], True, None), ([b"{"], True, None), ([event(1)], True, None), ([event(90)], False, ARRIVED)],
    ids=["never a row", "none that passes", "no further row", "a row for another partition"],
)
def test_what_a_heartbeat_fires_is_as_old_as_the_row_that_moved_the_watermark_and_of_no_age_where_silence_did(
    rows: list[bytes], *, is_idle: bool, broker_time: datetime | None
) -> None:
    source = make_source(key="", idle_timeout="10s")
    features = {"n": count().over("1m")}
    view = FeatureView(
        "v", version=1, entity=Entity("thing", key="key"), source=source, slide="1m", features=features, emit="on_close"
    )
    busy, other = (Router(source, view.input, partition=number, n_partitions=2) for number in range(2))
    records = [
        (None, other.heartbeat()),
        *sent_by(busy, source, make_batch([event(10), event(70)], topic=source.topic)),
    ]
    if rows:
        sent_by(other, source, make_batch(rows, topic=source.topic, broker_time_us=ARRIVED_US))
    other.poll_idle(processing_time_us=0, is_caught_up=True)
    other.poll_idle(processing_time_us=60 * SECOND_US if is_idle else 0, is_caught_up=True)
    assert other.state.is_idle is is_idle
    records.append((None, other.heartbeat()))

    pipeline = PartitionPipeline(view.input, [view], partition=0)
    batch = make_batch([value for _, value in records], keys=[key for key, _ in records], topic=view.input.topic)
    fired = pipeline.process(batch, processing_time_us=0, computed_time_us=0, epoch=1).rows["v"]
    assert [(row["n"], row["broker_time"]) for row in fired.to_pylist()] == [(1, broker_time)]


def test_rows_that_wait_are_no_silence() -> None:
    router = make_router(make_input(make_source(key="", idle_timeout="10s")))
    route(router, make_batch([event(10)], topic="test.events"), now_us=0)
    router.poll_idle(processing_time_us=60 * SECOND_US, is_caught_up=False)
    router.poll_idle(processing_time_us=61 * SECOND_US, is_caught_up=True)

    assert router.state.is_idle is False


def test_the_watermark_of_an_idle_partition_moves_on_with_the_clock_where_the_source_says_so() -> None:
    router = make_router(make_input(make_source(key="", idle_timeout="10s", idle_advance=True)))
    route(router, make_batch([event(100)], topic="test.events"), now_us=0)
    router.poll_idle(processing_time_us=15 * SECOND_US, is_caught_up=True)

    assert router.state.watermark_us == 105 * SECOND_US


def test_records_of_another_definition_are_passed_over() -> None:
    view_input, other = make_input(), make_input(make_source(key="kind", max_out_of_orderness="3s"))
    assert view_input.topic == other.topic
    old = sent(make_router(other), make_batch([event(1), event(2)], topic="test.events"))
    new = sent(make_router(view_input), make_batch([event(3)], topic="test.events"))
    arrived = read(view_input, [*old, *new], first_offset=10)

    assert arrived.rows["_offset"].to_pylist() == [12]
    assert arrived.record(12)[0].values == [event(3)]


def test_rows_of_another_application_are_passed_over() -> None:
    view_input = make_input()
    other = Router(view_input.sources[0], view_input, partition=2, n_partitions=3, application="other")
    theirs = sent(other, make_batch([event(1)], topic="test.events"))
    mine = sent(make_router(view_input), make_batch([event(1)], topic="test.events"))

    assert read(view_input, [*theirs, *mine]).rows["_offset"].to_pylist() == [1]


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (b"", "no feature row"),
        (b"{}\x00", "no feature row"),
        (b'{"route": 5}\n{}', "only Headrace may write"),
    ],
)
def test_a_record_of_another_writer_stops_the_partition(value: bytes, words: str) -> None:
    with pytest.raises(DecodeError, match=words):
        read(make_input(), [(b"a", value)])


def test_a_payload_that_does_not_pass_its_contract_stops_the_partition() -> None:
    view_input = make_input()
    ((key, value),) = sent(make_router(view_input), make_batch([event(1)], topic="test.events"))
    envelope, _, _ = value.partition(b"\n")
    with pytest.raises(DecodeError, match="does not let pass"):
        read(view_input, [(key, envelope + b'\n{"at": "x"}')])


def test_each_source_is_read_by_its_own_contract_and_columns_of_others_are_null() -> None:
    fields = {"key": EVENT_FIELDS["key"], "when": {"type": "string"}, "x": EVENT_FIELDS["x"]}
    other = EventSource(
        "b.events",
        contract=make_contract(fields),
        event_time="when",
        plausible_from="1900-01-01T00:00:00Z",
        max_future_skew=None,
    )
    view_input = ViewInput((other, make_source()), Entity("thing", key="key"))
    text = Router(other, view_input, partition=0, n_partitions=1)
    pipeline = PartitionPipeline(other, [], partition=0, routers={text: []})
    payload = json.dumps({"key": "a", "when": "1970-01-01T00:00:30Z", "x": 2.5}).encode()
    batch = make_batch([payload], topic="b.events")
    routed = pipeline.process(batch, processing_time_us=0, computed_time_us=0, epoch=1).routed[text.topic]
    plain = Router(make_source(), view_input, partition=0, n_partitions=1)
    records = [
        *zip(routed.keys, routed.values, strict=True),
        *sent_by(plain, make_source(), make_batch([event(31, n=3)], topic="test.events")),
    ]
    rows = read(view_input, records).rows.to_pylist()

    assert view_input.topic == "repartition.b.events--test.events.key"
    assert [(row["_source"], row["_time"], row["n"], row["x"], row["when"]) for row in rows] == [
        ("b.events", 30 * SECOND_US, None, 2.5, "1970-01-01T00:00:30Z"),
        ("test.events", 31 * SECOND_US, 3, None, None),
    ]


def sent_by(router: Router, source: EventSource, batch: RawBatch) -> list[tuple[bytes | None, bytes]]:
    pipeline = PartitionPipeline(source, [], partition=0, routers={router: []})
    routed = pipeline.process(batch, processing_time_us=0, computed_time_us=0, epoch=1).routed[router.topic]
    return list(zip(routed.keys, routed.values, strict=True))


LETTERS = ("_offset", "reason", "late_by_us")


@settings(max_examples=80, deadline=None)
@given(
    times=st.lists(st.tuples(st.integers(0, 200), st.sampled_from(["a", "b", "c", "d"])), min_size=1, max_size=25),
    n_partitions=st.integers(1, 3),
    lateness=st.sampled_from(["0s", "15s"]),
)
def test_one_partition_is_judged_as_if_it_were_keyed_by_the_entity_however_many_it_is_spread_over(
    times: list[tuple[int, str]], n_partitions: int, lateness: str
) -> None:
    source = make_source(key="kind", max_out_of_orderness="10s")
    rows = [event(at, key, x=float(number)) for number, (at, key) in enumerate(times)]
    batch = make_batch(rows, topic="test.events")

    def make_view(of: EventSource) -> FeatureView:
        features = {"n": count().over("1m"), "x": last("x").over(last=1)}
        given = {"version": 1, "slide": "20s", "allowed_lateness": lateness, "emit": "every_event"}
        return FeatureView("v", entity=Entity("thing", key="key"), source=of, features=features, **given)

    direct = make_view(make_source(max_out_of_orderness="10s"))
    straight = PartitionPipeline(direct.sources[0], [direct], partition=0)
    expected = straight.process(batch, processing_time_us=0, computed_time_us=0, epoch=1)
    routed_view = make_view(source)
    router = Router(source, routed_view.input, partition=0, n_partitions=1)
    records = sent_by(router, source, batch)
    got: dict[int, tuple[Any, ...]] = {}
    letters: list[tuple[int, int]] = []
    for number in range(n_partitions):
        mine = [(key, value) for key, value in records if (key or b"")[0] % n_partitions == number]
        if not mine:
            continue
        pipeline = PartitionPipeline(routed_view.input, [routed_view], partition=number)
        read_there = make_batch([v for _, v in mine], keys=[k for k, _ in mine], topic=routed_view.input.topic)
        processed = pipeline.process(read_there, processing_time_us=0, computed_time_us=0, epoch=1)
        got |= as_of(processed.rows["v"], "origin_offset")
        for letter in processed.dead_letters.to_pylist():
            original, _ = processed.read.record(letter["_offset"])
            letters.append((int(original.offsets[0]), letter["late_by_us"]))

    assert got == as_of(expected.rows["v"], "source_offset")
    assert sorted(letters) == [(d["_offset"], d["late_by_us"]) for d in expected.dead_letters.to_pylist()]


def as_of(rows: pa.Table, offset: str) -> dict[int, tuple[Any, ...]]:
    return {
        row[offset]: tuple(row[name] for name in ("key", "n", "x", "event_time", "window_end", "request_id"))
        for row in to_rows(rows)
        if row["pane"] == "EARLY"
    }


def test_a_state_is_written_as_json_and_read_again() -> None:
    state = RouteState(next_offset=5, watermark_us=MINUS_INFINITY_US, is_told_idle=None)

    assert RouteState(**json.loads(json.dumps(asdict(state)))) == state
