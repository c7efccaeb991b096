from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
from confluent_kafka import KafkaError, KafkaException

from schemas.errors import StateVersionError
from streams.state import changelog
from streams.state.changelog import Snapshot, read_snapshot, state_topic, write_snapshot


@dataclass
class FakeEpoch:
    number: int = 1
    records: list[dict[str, Any]] = field(default_factory=list)

    def begin(self) -> int:
        return self.number

    async def write(self, topic: str, **record: Any) -> None:
        self.records.append({"topic": topic, **record})


@dataclass
class Record:
    """A record as confluent-kafka reads it."""

    content: dict[str, Any]
    failure: KafkaError | None = None

    def error(self) -> KafkaError | None:
        return self.failure

    def key(self) -> bytes:
        return bytes(self.content["key"])

    def value(self) -> bytes:
        return bytes(self.content["value"])

    def headers(self) -> Any:
        return self.content["headers"]

    def topic(self) -> str:
        return "state.v"

    def partition(self) -> int:
        return 2

    def offset(self) -> int:
        return 0


END = Record({}, KafkaError(KafkaError._PARTITION_EOF))


class FakeConsumer:
    def __init__(self, records: list[Record], topic_error: KafkaError | None) -> None:
        self.records = records
        self.topic_error = topic_error
        self.assigned: Any = None
        self.is_closed = False

    def list_topics(self, topic: str, *, timeout: float) -> Any:
        assert timeout
        return SimpleNamespace(topics={topic: SimpleNamespace(error=self.topic_error)})

    def assign(self, partitions: Any) -> None:
        self.assigned = [(tp.topic, tp.partition) for tp in partitions]

    def consume(self, n: int, _: float) -> list[Record]:
        taken, self.records = self.records[:n], self.records[n:]
        return taken

    def close(self) -> None:
        self.is_closed = True


def read(
    monkeypatch: pytest.MonkeyPatch, records: list[Record], *, topic_error: KafkaError | None = None
) -> Snapshot | None:
    consumer = FakeConsumer(records, topic_error)
    monkeypatch.setattr(changelog, "Consumer", lambda _: consumer)
    try:
        return read_snapshot({}, "v", partition=2)
    finally:
        assert consumer.is_closed
        assert consumer.assigned == (None if topic_error else [("state.v", 2)])


async def written(snapshot: Snapshot, *, number: int = 1) -> list[Record]:
    epoch = FakeEpoch(number)
    await write_snapshot(epoch, "v", partition=2, snapshot=snapshot)
    return [Record(record) for record in epoch.records]


async def test_a_snapshot_is_cut_into_records_that_fit_a_message() -> None:
    epoch = FakeEpoch(77)
    await write_snapshot(epoch, "v", partition=2, snapshot=Snapshot(state=b"x" * 2_000_000, next_offset=9))
    assert [record["key"] for record in epoch.records] == [b"0", b"1", b"2"]
    assert max(len(record["value"]) for record in epoch.records) < 1_000_000
    assert {record["topic"] for record in epoch.records} == {state_topic("v")} == {"state.v"}
    assert {record["partition"] for record in epoch.records} == {2}
    assert epoch.records[0]["headers"] == [("snapshot", b"77"), ("chunks", b"3"), ("next_offset", b"9")]


@pytest.mark.parametrize("state", [b"", b"x", b"x" * 2_000_000])
async def test_a_snapshot_comes_back_as_it_was(monkeypatch: pytest.MonkeyPatch, state: bytes) -> None:
    snapshot = Snapshot(state=state, next_offset=9)
    assert read(monkeypatch, [*await written(snapshot), END]) == snapshot


def test_a_topic_without_a_snapshot_has_none(monkeypatch: pytest.MonkeyPatch) -> None:
    assert read(monkeypatch, [END]) is None


async def test_the_last_snapshot_counts_whatever_the_clocks_said(monkeypatch: pytest.MonkeyPatch) -> None:
    older = await written(Snapshot(state=b"old", next_offset=5), number=2_000)
    newer = Snapshot(state=b"new", next_offset=9)
    assert read(monkeypatch, [*older, *await written(newer, number=1_000), END]) == newer


async def test_what_compaction_left_of_a_longer_snapshot_does_not_matter(monkeypatch: pytest.MonkeyPatch) -> None:
    older = await written(Snapshot(state=b"o" * 2_000_000, next_offset=5), number=1)
    newer = Snapshot(state=b"new", next_offset=9)
    assert read(monkeypatch, [*older[1:], *await written(newer, number=2), END]) == newer


async def test_a_snapshot_with_a_part_missing_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    parts = await written(Snapshot(state=b"o" * 2_000_000, next_offset=5))
    with pytest.raises(StateVersionError, match=r"chunks \[0, 2\] of 3.*delete the topic"):
        read(monkeypatch, [parts[0], parts[2], END])


async def test_a_record_that_is_no_snapshot_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    alien = Record({"key": b"0", "value": b"", "headers": [("chunks", b"1")]})
    with pytest.raises(StateVersionError, match="no header 'snapshot'"):
        read(monkeypatch, [alien, END])


def test_a_broker_that_says_nothing_is_an_error_and_no_empty_state(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(KafkaException, match=r"no answer from state\.v-2"):
        read(monkeypatch, [])


def test_an_error_of_the_broker_is_an_error_and_no_empty_state(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(KafkaException):
        read(monkeypatch, [Record({}, KafkaError(KafkaError.UNKNOWN_TOPIC_OR_PART))])
    with pytest.raises(KafkaException):
        read(monkeypatch, [], topic_error=KafkaError(KafkaError.UNKNOWN_TOPIC_OR_PART))
