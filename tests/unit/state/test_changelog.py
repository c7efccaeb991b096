from dataclasses import dataclass, field
from typing import Any

import pytest
from confluent_kafka import KafkaError, KafkaException

from schemas.errors import StateVersionError
from schemas.view import FeatureView
from streams.state import changelog
from streams.state.changelog import Changelog, ViewState, read_states, state_topic
from streams.windowing.bucket import N_BUCKETS
from streams.windowing.engine import WindowEngine
from streams.windowing.result import WatermarkMarker
from tests.support.builders import make_batch, make_source
from tests.unit.pipeline.test_partition_pipeline import make_view

TOPIC = "state.v"


@dataclass
class FakeEpoch:
    """Takes records down, and what is left of them once the topic is compacted."""

    records: list["Record"] = field(default_factory=list)

    def begin(self) -> int:
        return 1

    async def write(self, topic: str, *, key: bytes, value: bytes | None, headers: Any, partition: int) -> None:
        assert (topic, partition) == (TOPIC, 2)
        self.records.append(Record(key, value, headers, len(self.records)))

    def compacted(self) -> list["Record"]:
        newest = {record.name: record for record in self.records}
        kept = [record for record in newest.values() if record.content is not None]
        return sorted(kept, key=lambda record: record.at)

    def end(self) -> "Record":
        return Record(b"", None, None, len(self.records), KafkaError(KafkaError._PARTITION_EOF))


@dataclass
class Record:
    """A record as confluent-kafka reads it."""

    name: bytes
    content: bytes | None
    facts: Any
    at: int
    failure: KafkaError | None = None

    def error(self) -> KafkaError | None:
        return self.failure

    def key(self) -> bytes:
        return self.name

    def value(self) -> bytes | None:
        return self.content

    def headers(self) -> Any:
        return self.facts

    def topic(self) -> str:
        return TOPIC

    def partition(self) -> int:
        return 2

    def offset(self) -> int:
        return self.at


class FakeConsumer:
    def __init__(self, records: list[Record]) -> None:
        self.records = records
        self.assigned: Any = None
        self.is_closed = False

    def assign(self, partitions: Any) -> None:
        self.assigned = [(tp.topic, tp.partition) for tp in partitions]

    def consume(self, n: int, _: float) -> list[Record]:
        taken, self.records = self.records[:n], self.records[n:]
        return taken

    def close(self) -> None:
        self.is_closed = True


@pytest.fixture(scope="module")
def view() -> FeatureView:
    return make_view(make_source(max_out_of_orderness="0s"))


@pytest.fixture
def epoch() -> FakeEpoch:
    return FakeEpoch()


@pytest.fixture(params=[0, 1_000_000], ids=["in_buckets", "whole"])
def written(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bytes:
    """In what the state is written, by how large it may be to be written whole."""
    monkeypatch.setattr(changelog, "_WHOLE_BYTES", request.param)
    return b"whole" if request.param else b"bucket"


@pytest.fixture
def log(epoch: FakeEpoch, view: FeatureView) -> Changelog:
    return Changelog(epoch, view, partition=2, state=ViewState())


def read(
    monkeypatch: pytest.MonkeyPatch, view: FeatureView, records: list[Record], *, end: int = 1
) -> ViewState | None:
    consumer = FakeConsumer(records)
    monkeypatch.setattr(changelog, "Consumer", lambda _: consumer)
    monkeypatch.setattr(changelog, "_end_offsets", lambda _, partitions: dict.fromkeys(partitions, end))
    try:
        return read_states({}, [(view, 2)]).get(("v", 2))
    finally:
        assert consumer.is_closed
        assert consumer.assigned == [(TOPIC, 2)]


def step(engine: WindowEngine, first_offset: int, *, n_rows: int = 50, n_keys: int = 500) -> None:
    start = first_offset * 7
    rows = [
        {"_offset": first_offset + n, "key": f"k{(start + n) % n_keys}", "at": 1_000 * first_offset + n, "n": 1}
        for n in range(n_rows)
    ]
    engine.step(make_batch(engine.view, rows), processing_time_us=0)


@pytest.mark.usefixtures("written")
async def test_parts_are_cut_into_records_that_fit_a_message_and_come_back_as_they_were(
    monkeypatch: pytest.MonkeyPatch, epoch: FakeEpoch, log: Changelog, view: FeatureView
) -> None:
    monkeypatch.setattr(changelog, "_CHUNK_BYTES", 300)
    engine = WindowEngine(view, source_partition=2)
    for n in range(20):
        step(engine, n * 50)
        await log.write_state(engine)
        await log.write_position(n * 50 + 50)
    assert max(len(record.content or b"") for record in epoch.records) == 300
    state = read(monkeypatch, view, [*epoch.records, epoch.end()])
    assert state is not None
    assert state.emitted_to == 1_000
    restored = WindowEngine.restore_parts(view, state.parts, source_partition=2)
    assert restored.close().rows == engine.close().rows


@pytest.mark.usefixtures("written")
async def test_a_compacted_topic_holds_the_state_and_at_most_about_as_much_again(
    monkeypatch: pytest.MonkeyPatch, epoch: FakeEpoch, log: Changelog, view: FeatureView
) -> None:
    engine = WindowEngine(view, source_partition=2)
    sizes = []
    for n in range(400):
        step(engine, n * 50, n_rows=50, n_keys=5_000)
        await log.write_state(engine)
        await log.write_position(n * 50 + 50)
        if n > 200 and n % 20 == 0:
            whole = sum(len(engine.bucket(number)) for number in range(N_BUCKETS))
            sizes.append(sum(len(record.content or b"") for record in epoch.compacted()) / whole)
    assert max(sizes) < 2.5
    state = read(monkeypatch, view, [*epoch.compacted(), epoch.end()])
    assert state is not None
    restored = WindowEngine.restore_parts(view, state.parts, source_partition=2)
    assert restored.close().rows == engine.close().rows


async def test_a_writer_goes_on_where_another_was(
    monkeypatch: pytest.MonkeyPatch, epoch: FakeEpoch, log: Changelog, view: FeatureView, written: bytes
) -> None:
    engine = WindowEngine(view, source_partition=2)
    for n in range(200):
        step(engine, n * 50)
        await log.write_state(engine)
        await log.write_position(n * 50 + 50)
        if n % 30 == 29:
            state = read(monkeypatch, view, [*epoch.compacted(), epoch.end()])
            assert state is not None
            engine = WindowEngine.restore_parts(view, state.parts, source_partition=2)
            log = Changelog(epoch, view, partition=2, state=state)
            assert log.emitted_to == n * 50 + 50
    kept = [record.name.split(b"/")[1] for record in epoch.compacted()]
    assert kept.count(written) == (N_BUCKETS if written == b"bucket" else 1)
    assert kept.count(b"changes") < 200


async def test_a_state_that_grows_goes_over_to_buckets_and_back_when_it_has_shrunk(
    monkeypatch: pytest.MonkeyPatch, epoch: FakeEpoch, log: Changelog, view: FeatureView
) -> None:
    engine = WindowEngine(view, source_partition=2)
    offset, ways = 0, list[str]()

    async def write(n_keys: int, *, n_times: int) -> None:
        nonlocal engine, log, offset
        for _ in range(n_times):
            step(engine, offset, n_rows=500, n_keys=n_keys)
            offset += 500
            await log.write_state(engine)
            await log.write_position(offset)
            state = read(monkeypatch, view, [*epoch.compacted(), epoch.end()])
            assert state is not None
            log = Changelog(epoch, view, partition=2, state=state)
            engine = WindowEngine.restore_parts(view, state.parts, source_partition=2)
        ways.append("+".join(sorted({record.name.split(b"/")[1].decode() for record in epoch.compacted()})))

    await write(50, n_times=3)
    monkeypatch.setattr(changelog, "_WHOLE_BYTES", 1)
    await write(5_000, n_times=1)
    await write(5_000, n_times=80)
    monkeypatch.setattr(changelog, "_WHOLE_BYTES", 1_000_000)
    await write(50, n_times=1)

    assert ways[0].endswith("position+whole")
    assert ways[1] == "bucket+changes+position+whole"
    assert ways[2] in ("bucket+changes+position", "bucket+position")
    assert ways[3] == "position+whole"


async def test_what_no_position_follows_was_never_committed(
    monkeypatch: pytest.MonkeyPatch, epoch: FakeEpoch, log: Changelog, view: FeatureView
) -> None:
    engine = WindowEngine(view, source_partition=2)
    step(engine, 0)
    await log.write_state(engine)
    await log.write_position(50)
    committed = len(epoch.records)
    step(engine, 50)
    await log.write_state(engine)
    await log.write_marker(WatermarkMarker(after_offset=99, watermark_us=5))
    assert read(monkeypatch, view, [*epoch.records, epoch.end()]) == read(
        monkeypatch, view, [*epoch.records[:committed], epoch.end()]
    )


async def test_markers_stay_until_the_state_holds_them(
    monkeypatch: pytest.MonkeyPatch, epoch: FakeEpoch, log: Changelog, view: FeatureView
) -> None:
    markers = [WatermarkMarker(after_offset=4, watermark_us=at) for at in (10, 20)]
    for marker in markers:
        await log.write_marker(marker)
        await log.write_position(5)
    state = read(monkeypatch, view, [*epoch.records, epoch.end()])
    assert state == ViewState(emitted_to=5, markers=tuple(markers))
    again = Changelog(epoch, view, partition=2, state=state)
    await again.write_state(WindowEngine(view, source_partition=2))
    await again.write_position(5)
    state = read(monkeypatch, view, [*epoch.records, epoch.end()])
    assert state is not None
    assert state.markers == ()


async def test_a_position_never_goes_back(epoch: FakeEpoch, log: Changelog) -> None:
    for next_offset in (5, 3, 7):
        await log.write_position(next_offset)
    assert [record.content for record in epoch.records] == [b"5", b"5", b"7"]


async def test_state_of_another_definition_is_not_read(
    monkeypatch: pytest.MonkeyPatch, epoch: FakeEpoch, log: Changelog, view: FeatureView
) -> None:
    await log.write_position(5)
    other = make_view(view.source, version=3)
    assert read(monkeypatch, other, [*epoch.records, epoch.end()]) is None


async def test_a_part_with_a_chunk_missing_is_refused(
    monkeypatch: pytest.MonkeyPatch, epoch: FakeEpoch, log: Changelog, view: FeatureView
) -> None:
    monkeypatch.setattr(changelog, "_CHUNK_BYTES", 300)
    engine = WindowEngine(view, source_partition=2)
    step(engine, 0)
    await log.write_state(engine)
    await log.write_position(50)
    records = [record for record in epoch.records if not record.name.endswith(b"/whole/1")]
    with pytest.raises(StateVersionError, match=r"chunks \[0, 2.* of whole; .*delete state\.v"):
        read(monkeypatch, view, [*records, epoch.end()])


@pytest.mark.parametrize(
    ("name", "message"),
    [
        (b"0", "with key b'0' is not state of a view"),
        (b"2-{hash}/bucket/1/0", "no header 'number'"),
        (b"2-{hash}/standby", "holds 'standby', expected changes, whole, bucket, marker, begin or position"),
    ],
)
def test_a_record_that_is_no_state_is_refused(
    monkeypatch: pytest.MonkeyPatch, epoch: FakeEpoch, view: FeatureView, name: bytes, message: str
) -> None:
    prefix = view.definition_hash[:16].encode()
    records = [
        Record(name.replace(b"{hash}", prefix), b"x", None, 0),
        Record(b"2-" + prefix + b"/bucket/1/1", b"x", None, 1),
        Record(b"2-" + prefix + b"/position", b"5", None, 2),
    ]
    with pytest.raises(StateVersionError, match=message):
        read(monkeypatch, view, [*records, epoch.end()])


def test_a_topic_without_state_has_none(monkeypatch: pytest.MonkeyPatch, view: FeatureView) -> None:
    assert read(monkeypatch, view, [], end=0) is None


async def test_what_is_in_an_open_transaction_is_waited_for(
    monkeypatch: pytest.MonkeyPatch, epoch: FakeEpoch, log: Changelog, view: FeatureView
) -> None:
    await log.write_position(5)
    early, late = Record(b"", None, None, 0, KafkaError(KafkaError._PARTITION_EOF)), epoch.end()
    state = read(monkeypatch, view, [early, *epoch.records, late])
    assert state is not None
    assert state.emitted_to == 5


def test_a_broker_that_says_nothing_is_an_error_and_no_empty_state(
    monkeypatch: pytest.MonkeyPatch, view: FeatureView
) -> None:
    with pytest.raises(KafkaException, match=r"no answer from .*state\.v"):
        read(monkeypatch, view, [])


def test_an_error_of_the_broker_is_an_error_and_no_empty_state(
    monkeypatch: pytest.MonkeyPatch, view: FeatureView
) -> None:
    failed = Record(b"", None, None, 0, KafkaError(KafkaError.UNKNOWN_TOPIC_OR_PART))
    with pytest.raises(KafkaException):
        read(monkeypatch, view, [failed])


def test_nothing_wanted_is_nothing_asked() -> None:
    assert read_states({}, []) == {}


def test_the_topic_is_named_by_the_view() -> None:
    assert state_topic("v") == TOPIC
