"""How the records of a replay are paced and handed over, and what their headers say in its namespace."""

import threading
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
import pytest
from confluent_kafka import KafkaError, KafkaException

from jobs.replay_feed import Feed, Pace, Section, feed, renamed
from schemas.errors import ServiceError
from streams.batch import RawBatch
from streams.ports import LogPart


class Waits(threading.Event):
    """An event that is waited for on a clock of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.now_s = 100.0
        self.waited: list[float] = []

    def wait(self, timeout: float | None = None) -> bool:
        assert timeout is not None
        self.waited.append(timeout)
        self.now_s += timeout
        return False


def test_records_wait_as_long_as_they_are_apart_by_their_timestamps_at_the_speed() -> None:
    stop = Waits()
    pace = Pace(10.0, stop, clock_s=lambda: stop.now_s)
    for second in (1_000, 1_005, 1_005, 1_030):
        pace.wait(second * 1_000_000)
    assert stop.waited == pytest.approx([0.5, 2.5])


def test_a_replay_that_is_behind_does_not_wait_until_it_has_caught_up() -> None:
    stop = Waits()
    pace = Pace(1.0, stop, clock_s=lambda: stop.now_s)
    pace.wait(0)
    stop.now_s += 10.0  # the broker was slow
    for second in (3, 9, 12):
        pace.wait(second * 1_000_000)
    assert stop.waited == pytest.approx([2.0])


def test_as_fast_as_possible_nothing_waits() -> None:
    stop = Waits()
    pace = Pace(None, stop, clock_s=lambda: stop.now_s)
    for second in (0, 5):
        pace.wait(second * 1_000_000)
    assert stop.waited == []


def test_views_that_a_record_is_meant_for_are_called_as_in_the_namespace() -> None:
    headers = [("headrace.views", b"a,b"), ("headrace.late_for", b"b"), ("trace", b"a"), ("headrace.origin", b"t-0-1")]
    assert renamed(headers, "ns") == [
        ("headrace.views", b"ns_a,ns_b"),
        ("headrace.late_for", b"ns_b"),
        ("trace", b"a"),
        ("headrace.origin", b"t-0-1"),
    ]
    assert renamed(None, "ns") is None


class Records:
    """A log of three records."""

    topic = "shop.events"

    def parts(self) -> Mapping[int, LogPart]:
        raise NotImplementedError

    def first_at(self, time_us: int) -> Mapping[int, int]:
        raise NotImplementedError

    def read(self, partition: int, offsets: range) -> Iterator[RawBatch]:
        n_rows = len(offsets)
        yield RawBatch(
            topic=self.topic,
            partition=partition,
            offsets=np.array(offsets),
            broker_time_us=np.zeros(n_rows, np.int64),
            keys=[None] * n_rows,
            values=[b"{}"] * n_rows,
            headers=[None] * n_rows,
            next_offset=offsets.stop,
        )


class FakeProducer:
    """Has room for a record, and then for none; ``on_poll`` says what comes of waiting for it."""

    def __init__(
        self, *, error: KafkaError | None = None, on_poll: Callable[["FakeProducer"], object] = lambda _: None
    ) -> None:
        self._error = error
        self._on_poll = on_poll
        self.taken: list[Any] = []

    def produce(self, topic: str, *, on_delivery: Any, **record: Any) -> None:
        if self._error is not None:
            raise KafkaException(self._error)
        if self.taken:
            raise BufferError
        self.taken.append(on_delivery)

    def poll(self, timeout_s: float) -> None:
        assert timeout_s < 1
        if timeout_s:
            self._on_poll(self)

    def flush(self, timeout_s: float) -> int:
        assert timeout_s > 0
        return 0


def feed_to(producer: FakeProducer, monkeypatch: pytest.MonkeyPatch, *, stop: threading.Event) -> Feed:
    monkeypatch.setattr("jobs.replay_feed.Producer", lambda _: producer)
    section = Section(topic="shop.events", partition=0, read=range(3), wanted=range(3))
    return feed("kafka:1", {"shop.events": Records()}, [section], namespace="ns", speed=None, stop=stop)


def test_a_producer_that_has_failed_for_good_ends_the_replay_with_what_it_says(monkeypatch: pytest.MonkeyPatch) -> None:
    failed = FakeProducer(error=KafkaError(KafkaError._FATAL, "it was fenced"))
    with pytest.raises(ServiceError, match=r"Kafka at kafka:1 does not take what is replayed: it was fenced"):
        feed_to(failed, monkeypatch, stop=threading.Event())


def test_a_stop_is_seen_while_there_is_no_room_for_a_record(monkeypatch: pytest.MonkeyPatch) -> None:
    stop = threading.Event()

    def wait(_: FakeProducer) -> None:
        assert not stop.is_set(), "it goes on waiting"
        stop.set()

    assert feed_to(FakeProducer(on_poll=wait), monkeypatch, stop=stop).records == 1


def test_a_record_that_is_not_taken_is_seen_while_there_is_no_room_for_the_next(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    told = []

    def tell(producer: FakeProducer) -> None:
        assert not told, "it goes on waiting"
        told.append(producer)
        producer.taken[0](KafkaError(KafkaError.MSG_SIZE_TOO_LARGE, "too large"), None)

    with pytest.raises(ServiceError, match="too large"):
        feed_to(FakeProducer(on_poll=tell), monkeypatch, stop=threading.Event())
