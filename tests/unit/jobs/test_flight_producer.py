"""Sending the events: pace, back-pressure, failure and stopping, against a fake Kafka client and a fake clock."""

import threading
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from confluent_kafka import KafkaError, KafkaException
from typer.testing import CliRunner

from jobs.flights import events
from jobs.flights import producer as module
from jobs.flights.dataset import load_reports
from jobs.flights.events import plan_events
from jobs.flights.producer import ProduceProgress, ProduceSummary, produce_flights
from jobs.produce import app
from schemas.errors import ConfigError, ServiceError
from schemas.time import parse_rfc3339_us

START = datetime(2013, 1, 1, 12, tzinfo=UTC)
END = START + timedelta(hours=1)
LINE = "127.0.0.1:1"


class FakeClock:
    """Monotonic time that passes when someone waits."""

    def __init__(self) -> None:
        self.now_s = 1_000.0

    def monotonic(self) -> float:
        return self.now_s

    def time_ns(self) -> int:
        return round(self.now_s * 1e9)


class FakeStop(threading.Event):
    """An event whose waits take no real time; set after ``after`` waits."""

    def __init__(self, clock: FakeClock, *, after: int | None = None) -> None:
        super().__init__()
        self._clock = clock
        self._left = after

    def wait(self, timeout: float | None = None) -> bool:
        self._clock.now_s += timeout or 0.0
        if self._left is not None:
            self._left -= 1
            if self._left <= 0:
                self.set()
        return self.is_set()


class FakeProducer:
    """Takes records into a queue of ``capacity``, which a poll empties; may refuse one of them for good."""

    capacity = 10**9
    fail_at: int | None = None
    fatal_at: int | None = None

    def __init__(self, config: dict[str, Any], *, clock: FakeClock) -> None:
        self.config = config
        self.records: list[tuple[float, str, bytes, dict[str, Any]]] = []
        self.refused = 0
        self.purged = False
        self._clock = clock
        self._queued = 0

    def produce(self, topic: str, value: bytes, **record: Any) -> None:
        if self._queued >= self.capacity:
            self.refused += 1
            raise BufferError
        if self.fatal_at == len(self.records):
            raise KafkaException(KafkaError(KafkaError._FATAL))
        self._queued += 1
        self.records.append((self._clock.now_s, topic, value, record))

    def poll(self, timeout: float = -1) -> int:
        if self.fail_at is not None and len(self.records) > self.fail_at:
            self.config["on_delivery"](KafkaError(KafkaError.MSG_SIZE_TOO_LARGE), None)
            self.fail_at = None
        self._queued = 0
        return 0

    def flush(self, timeout: float = -1) -> int:
        return self.poll()

    def purge(self) -> None:
        self.purged = True


@pytest.fixture(scope="module", autouse=True)
def loaded_once() -> Iterator[None]:
    """Let the tests of this file share one load of the data."""
    reports = load_reports()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(events, "load_reports", lambda: reports)
        yield


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> FakeClock:
    clock = FakeClock()
    monkeypatch.setattr(module, "time", clock)
    return clock


@pytest.fixture
def client(monkeypatch: pytest.MonkeyPatch, clock: FakeClock) -> Callable[[], FakeProducer]:
    made: list[FakeProducer] = []

    def make(config: dict[str, Any], **_: Any) -> FakeProducer:
        made.append(FakeProducer(config, clock=clock))
        return made[-1]

    monkeypatch.setattr(module, "Producer", make)
    monkeypatch.setattr(module, "ensure_topics", lambda *_, **__: [])
    monkeypatch.setattr(module, "check_retention", lambda *_, **__: None)
    return lambda: made[-1]


def planned() -> list[tuple[Any, ...]]:
    plan = plan_events(start_us=parse_rfc3339_us(START.isoformat()), end_us=parse_rfc3339_us(END.isoformat()))
    return plan.table().select("topic", "value", "key", "known_us", "request_id").rows()


def test_every_event_is_sent_once_in_order_with_key_timestamp_and_request_id(
    client: Callable[[], FakeProducer],
) -> None:
    summary = produce_flights(LINE, start=START, end=END)
    assert [
        (topic, value, record["key"], record["timestamp"] * 1_000, dict(record["headers"])["request_id"])
        for _, topic, value, record in client().records
    ] == planned()
    # When each was really sent goes along, since its timestamp is of 2013: freshness counts from there.
    assert [int(dict(record["headers"])["produced_time"]) for *_, record in client().records] == [
        round(sent_s * 1e6) for sent_s, *_ in client().records
    ]
    assert summary.is_complete
    assert summary.events == len(planned())


def test_the_client_is_safe_against_duplicates_and_places_keys_as_java_does(
    client: Callable[[], FakeProducer],
) -> None:
    produce_flights(LINE, start=START, end=END)
    config = client().config
    assert (config["enable.idempotence"], config["acks"]) == (True, "all")
    assert config["partitioner"] == "murmur2_random"


def test_a_full_queue_is_waited_for_and_loses_nothing(
    client: Callable[[], FakeProducer], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(FakeProducer, "capacity", 7)
    produce_flights(LINE, start=START, end=END)
    assert client().refused > 0
    assert [value for _, _, value, _ in client().records] == [value for _, value, *_ in planned()]


def test_speed_sends_each_event_when_it_is_due_and_never_before(
    client: Callable[[], FakeProducer], clock: FakeClock
) -> None:
    began_s = clock.now_s
    produce_flights(LINE, start=START, end=END, speed=60, stop=FakeStop(clock))
    known_us = [row[3] for row in planned()]
    for (sent_s, *_), due_us in zip(client().records, known_us, strict=True):
        due_s = began_s + (due_us - known_us[0]) / 1e6 / 60
        assert due_s - 1e-6 <= sent_s < due_s + 0.11
    assert client().records[-1][0] - began_s == pytest.approx((known_us[-1] - known_us[0]) / 60e6, abs=0.11)


def test_progress_is_told_while_waiting_and_ends_with_the_whole(
    client: Callable[[], FakeProducer], clock: FakeClock
) -> None:
    told: list[ProduceProgress] = []
    produce_flights(LINE, start=START, end=END, speed=60, stop=FakeStop(clock), on_progress=told.append)
    assert len(told) > 100
    assert [progress.sent for progress in told] == sorted(progress.sent for progress in told)
    assert told[-1].sent == told[-1].total == len(planned())
    assert told[-1].known_us == planned()[-1][3]


def test_stopping_ends_early_and_the_summary_tells_what_was_sent(
    client: Callable[[], FakeProducer], clock: FakeClock
) -> None:
    summary = produce_flights(LINE, start=START, end=END, speed=60, stop=FakeStop(clock, after=100))
    assert not summary.is_complete
    assert 0 < summary.events == len(client().records) < len(planned())


def test_stopped_before_the_first_event_the_summary_is_empty(client: Callable[[], FakeProducer]) -> None:
    stop = threading.Event()
    stop.set()
    summary = produce_flights(LINE, start=START, end=END, stop=stop)
    assert (summary.events, summary.first_event_us, summary.is_complete) == (0, None, False)
    assert summary.to_json()["first_event"] is None


@pytest.mark.parametrize("speed", [None, 60.0])
def test_a_record_that_is_not_taken_stops_the_run_with_an_error(
    client: Callable[[], FakeProducer], clock: FakeClock, monkeypatch: pytest.MonkeyPatch, speed: float | None
) -> None:
    monkeypatch.setattr(FakeProducer, "fail_at", 20)
    with pytest.raises(ServiceError, match=rf"Kafka at {LINE} did not take 1 of \d+ events.*Message size too large"):
        produce_flights(LINE, start=START, end=END, speed=speed, stop=FakeStop(clock))
    assert client().purged
    if speed is not None:
        assert len(client().records) < len(planned())


def test_a_fatal_error_of_the_client_stops_the_run_with_an_error(
    client: Callable[[], FakeProducer], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(FakeProducer, "fatal_at", 20)
    with pytest.raises(ServiceError, match=r"did not take 1 of 20 events.*Fatal error"):
        produce_flights(LINE, start=START, end=END)


def test_the_summary_counts_faults_by_topic_kind_and_reason(client: Callable[[], FakeProducer]) -> None:
    summary = produce_flights(
        LINE, start=START, end=START + timedelta(days=3), late_share=0.1, invalid_share=0.2, seed=1
    )
    for topic in summary.topics:
        assert sum(summary.injected[topic].values()) == sum(summary.rejected[topic].values()) > 0
        assert summary.delayed[topic] > 0
    assert (
        summary.rejected["flights.landed"]["missing_key"] == summary.injected["flights.landed"]["tail_number_missing"]
    )
    told = summary.to_json()
    assert told["events"] == sum(summary.topics.values())
    assert str(told["first_known"]) >= "2013-01-01T12:00:00.000000Z"
    assert str(told["first_event"]) < str(told["first_known"])


def test_the_rate_of_a_run_that_took_no_time_is_zero() -> None:
    summary = ProduceSummary(
        topics={"flights.landed": 1},
        delayed={},
        injected={},
        rejected={},
        first_event_us=0,
        last_event_us=0,
        first_known_us=0,
        last_known_us=0,
        wall_s=0.0,
        is_complete=True,
    )
    assert summary.events_per_s == 0.0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"speed": 0.0}, "`speed` is 0.0"),
        ({"speed": float("nan")}, "`speed` is nan"),
        ({"speed": float("inf")}, "`speed` is inf"),
        ({"partitions": 0}, "`partitions` is 0"),
        ({"start": START.replace(tzinfo=None)}, "without an offset from UTC"),
        ({"start": END, "end": START}, "no flight event becomes known"),
    ],
)
def test_wrong_arguments_are_refused_before_anything_is_sent(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        produce_flights(LINE, **arguments)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--from", "yesterday"], "--from is 'yesterday'"),
        (["--to", "2013-13-01"], "--to is '2013-13-01'"),
        (["--speed", "fast"], "--speed is 'fast'"),
        (["--from", "2015-01-01"], "no flight event becomes known from 2015-01-01"),
        (["--speed", "0"], "--speed is '0'"),
    ],
)
def test_wrong_options_of_the_command_are_named(options: list[str], message: str) -> None:
    result = CliRunner().invoke(app, ["flights", "--brokers", LINE, *options])
    assert isinstance(result.exception, ConfigError)
    assert message in str(result.exception)
