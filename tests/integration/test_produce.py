"""``headrace produce flights`` against a real Kafka: what arrives is what was planned, where Java would put it."""

import json
import signal
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from typing import Any

import polars as pl
import pytest
from confluent_kafka import TIMESTAMP_CREATE_TIME, Consumer, KafkaException, Message, TopicPartition
from confluent_kafka.admin import (
    AdminClient,
    AlterConfigOpType,
    ConfigEntry,
    ConfigResource,
    ConfigSource,
    NewTopic,
    ResourceType,
)
from typer.testing import CliRunner

from infra.local.process import wait_until
from jobs import produce
from jobs.flights.dataset import LANDED
from jobs.flights.events import TOPICS, plan_events
from jobs.flights.producer import ProduceProgress, ProduceSummary, check_retention, produce_flights
from jobs.topic_reader import end_offsets
from jobs.topics import ensure_topics, raw_topic
from schemas.errors import ConfigError, ServiceError
from schemas.time import parse_rfc3339_us
from tests.integration.conftest import MakeServices

DAY = datetime(2013, 3, 10, tzinfo=UTC)
HOUR = datetime(2013, 3, 10, 18, tzinfo=UTC)
NOWHERE = "127.0.0.1:1"


def to_us(moment: datetime) -> int:
    return parse_rfc3339_us(moment.isoformat())


def murmur2(key: bytes) -> int:
    """Hash a key as Kafka's Java clients do: 32-bit MurmurHash2 with their seed."""
    mask, multiplier = 0xFFFFFFFF, 0x5BD1E995
    state = 0x9747B28C ^ len(key)
    whole = len(key) // 4 * 4
    for start in range(0, whole, 4):
        word = int.from_bytes(key[start : start + 4], "little") * multiplier & mask
        word = (word ^ word >> 24) * multiplier & mask
        state = state * multiplier & mask ^ word
    if rest := key[whole:]:
        state = (state ^ int.from_bytes(rest, "little")) * multiplier & mask
    state = (state ^ state >> 13) * multiplier & mask
    return state ^ state >> 15


class Tail:
    """Reads what comes after the ends that the flight topics have now; other tests may have filled them before."""

    def __init__(self, kafka: str) -> None:
        self._kafka = kafka
        ensure_topics(kafka, [raw_topic(topic) for topic in TOPICS], partitions=4)
        self.consumer = Consumer(
            {"bootstrap.servers": kafka, "group.id": f"tail-{uuid.uuid4()}", "enable.auto.commit": False}
        )
        self.partitions = {
            topic: len(self.consumer.list_topics(topic, timeout=10).topics[topic].partitions) for topic in TOPICS
        }
        self._starts = self._ends()

    def read(self) -> list[Message]:
        ends = self._ends()
        expected = sum(ends[place] - start for place, start in self._starts.items())
        self.consumer.assign([TopicPartition(*place, offset) for place, offset in self._starts.items()])
        messages: list[Message] = []
        while len(messages) < expected:
            found = self.consumer.consume(num_messages=expected - len(messages), timeout=30)
            assert found, f"{len(messages)} of {expected} records within 30 s"
            messages.extend(found)
        assert not [message.error() for message in messages if message.error() is not None]
        return messages

    def _ends(self) -> dict[tuple[str, int], int]:
        return {
            (topic, partition): end
            for topic in self.partitions
            for partition, end in end_offsets(self._kafka, topic).items()
        }


@pytest.fixture(scope="module")
def admin(kafka: str) -> AdminClient:
    return AdminClient({"bootstrap.servers": kafka})


@pytest.fixture
def tail(kafka: str) -> Iterator[Tail]:
    tail = Tail(kafka)
    yield tail
    tail.consumer.close()


@pytest.fixture
def own_topic(admin: AdminClient) -> Iterator[str]:
    name = f"test.{uuid.uuid4()}"
    yield name
    admin.delete_topics([name])[name].result(10)


@pytest.mark.parametrize(
    ("key", "expected"),
    [
        # From the unit tests of Kafka's own clients.
        (b"21", -973932308),
        (b"foobar", -790332482),
        (b"a-little-bit-long-string", -985981536),
        (b"a-little-bit-longer-string", -1486304829),
        (b"lkjh234lh9fiuh90y23oiuhsafujhadof229phr9h19h89h8", -58897971),
        (b"abc", 479470107),
    ],
)
def test_the_hash_that_this_file_expects_is_that_of_java(key: bytes, expected: int) -> None:
    assert murmur2(key) == expected % 2**32


def test_a_day_arrives_whole_and_in_order(kafka: str, tail: Tail) -> None:
    summary = produce_flights(
        kafka, start=DAY, end=DAY + timedelta(days=1), late_share=0.05, invalid_share=0.05, seed=4
    )
    planned = plan_events(
        start_us=to_us(DAY), end_us=to_us(DAY + timedelta(days=1)), late_share=0.05, invalid_share=0.05, seed=4
    ).table()
    messages = tail.read()

    assert summary.topics == dict(planned.group_by("topic").len().iter_rows())
    assert len(messages) == summary.events == planned.height
    arrived = {dict(message.headers())["request_id"].decode(): message for message in messages}
    for topic, key, value, known_us, request_id in planned.select(
        "topic", "key", "value", "known_us", "request_id"
    ).iter_rows():
        message = arrived[request_id]
        assert (message.topic(), message.key(), message.value()) == (topic, key, value)
        assert message.timestamp() == (TIMESTAMP_CREATE_TIME, known_us // 1_000)
        if key is not None:
            assert message.partition() == (murmur2(key) & 0x7FFFFFFF) % tail.partitions[topic]
    place = {request_id: row for row, request_id in enumerate(planned["request_id"])}
    by_partition: dict[tuple[str, int], list[int]] = {}
    for message in messages:
        where = (message.topic(), message.partition())
        by_partition.setdefault(where, []).append(place[dict(message.headers())["request_id"].decode()])
    assert all(places == sorted(places) for places in by_partition.values())


def test_records_without_key_arrive_and_are_counted(kafka: str, tail: Tail) -> None:
    summary = produce_flights(kafka, start=DAY, end=DAY + timedelta(days=1), invalid_share=0.2, seed=1)
    keyless = [message for message in tail.read() if message.key() is None]
    assert len(keyless) == summary.injected["flights.landed"]["tail_number_missing"] > 0
    assert {message.topic() for message in keyless} == {"flights.landed"}


def test_speed_takes_the_time_of_the_range_divided_by_it(kafka: str, tail: Tail) -> None:
    told: list[ProduceProgress] = []
    began_s = time.monotonic()
    summary = produce_flights(kafka, start=HOUR, end=HOUR + timedelta(hours=1), speed=3_600, on_progress=told.append)
    assert summary.first_known_us is not None
    assert summary.last_known_us is not None
    assert time.monotonic() - began_s >= (summary.last_known_us - summary.first_known_us) / 3_600e6
    assert told[-1].sent == summary.events == len(tail.read())
    assert len({progress.known_us for progress in told}) > 3


def test_a_stopped_run_has_delivered_what_it_says(kafka: str, tail: Tail) -> None:
    stop = threading.Event()

    def stop_soon(progress: ProduceProgress) -> None:
        if progress.sent > 10:
            stop.set()

    summary = produce_flights(
        kafka, start=HOUR, end=HOUR + timedelta(hours=6), speed=3_600, on_progress=stop_soon, stop=stop
    )
    assert not summary.is_complete
    assert 10 < summary.events == len(tail.read())


def test_missing_topics_are_created_to_keep_old_records(kafka: str, admin: AdminClient, own_topic: str) -> None:
    ensure_topics(kafka, [raw_topic(own_topic)], partitions=3)
    check_retention(kafka, [own_topic])
    resource = ConfigResource(ResourceType.TOPIC, own_topic)
    retention = admin.describe_configs([resource])[resource].result(10)["retention.ms"]
    assert retention.value == "-1"
    assert retention.source == ConfigSource.DYNAMIC_TOPIC_CONFIG.value
    assert len(admin.list_topics(own_topic, timeout=10).topics[own_topic].partitions) == 3


def test_a_topic_that_would_delete_the_records_is_refused(kafka: str, admin: AdminClient, own_topic: str) -> None:
    topic = NewTopic(own_topic, num_partitions=1, config={"retention.ms": "604800000"})
    admin.create_topics([topic])[own_topic].result(10)
    resource = ConfigResource(ResourceType.TOPIC, own_topic)

    def retention() -> str | None:
        try:
            return str(admin.describe_configs([resource])[resource].result(10)["retention.ms"].value)
        except KafkaException:
            return None

    # The broker knows no such topic, or tells its defaults, until it has heard of it from its controller.
    assert wait_until(lambda: retention() == "604800000", timeout_s=10)
    with pytest.raises(ServiceError, match=rf"topic {own_topic} keeps records for 7 days, expected for good"):
        check_retention(kafka, [own_topic])


@contextmanager
def topic_config(admin: AdminClient, topic: str, *, name: str, value: str) -> Iterator[None]:
    def alter(operation: AlterConfigOpType) -> None:
        entry = ConfigEntry(name, value, incremental_operation=operation)
        resource = ConfigResource(ResourceType.TOPIC, topic, incremental_configs=[entry])
        admin.incremental_alter_configs([resource])[resource].result(10)

    alter(AlterConfigOpType.SET)
    try:
        yield
    finally:
        alter(AlterConfigOpType.DELETE)


def test_a_record_that_the_broker_refuses_ends_the_run_with_its_reason(
    kafka: str, admin: AdminClient, tail: Tail
) -> None:
    landed = next(topic.name for topic in TOPICS.values() if topic.kind == LANDED)
    with (
        topic_config(admin, landed, name="max.message.bytes", value="100"),
        pytest.raises(
            ServiceError, match=r"did not take [\d]+ of [\d]+ events, the first because: .*Message size too large"
        ),
    ):
        produce_flights(kafka, start=HOUR, end=HOUR + timedelta(days=2), speed=36_000)
    sent = pl.Series([message.topic() for message in tail.read()], dtype=pl.String)
    assert landed not in sent


def test_a_broker_that_does_not_answer_is_named_within_ten_seconds() -> None:
    began_s = time.monotonic()
    with pytest.raises(ServiceError, match=rf"no Kafka answers at {NOWHERE}: .*`headrace services up`"):
        produce_flights(NOWHERE, start=HOUR, end=HOUR + timedelta(hours=1))
    assert time.monotonic() - began_s < 10


def test_the_command_prints_a_summary_that_adds_up(kafka: str, tail: Tail) -> None:
    options = ["flights", "--brokers", kafka, "--from", "2013-03-10T18:00:00Z", "--to", "2013-03-10T20:00:00Z"]
    as_json = CliRunner().invoke(produce.app, [*options, "--json"])
    assert as_json.exit_code == 0
    summary = json.loads(as_json.stdout)
    assert summary["kafka"] == kafka
    assert summary["events"] == sum(summary["topics"].values()) == len(tail.read())
    assert summary["first_known"] >= "2013-03-10T18:00:00.000000Z"
    assert summary["last_known"] < "2013-03-10T20:00:00.000000Z"

    as_text = CliRunner().invoke(produce.app, options)
    assert as_text.exit_code == 0
    for topic, events in summary["topics"].items():
        assert any(line.split()[:2] == [topic, str(events)] for line in as_text.stdout.splitlines())
    assert f"{summary['events']} events to Kafka at {kafka}" in as_text.stdout


@pytest.mark.parametrize("brokers", ["foo", "a:1,b", "a:0", "a:1,"])
def test_an_address_that_is_none_is_refused(brokers: str) -> None:
    with pytest.raises(ConfigError, match=r"--brokers has .*, expected host:port, several with commas between"):
        CliRunner().invoke(produce.app, ["flights", "--brokers", brokers], catch_exceptions=False)


def test_a_broker_that_goes_and_comes_back_tears_up_no_progress_bar(
    make_services: MakeServices, caplog: pytest.LogCaptureFixture
) -> None:
    services = make_services()
    brokers = str(services.up(["kafka"]).kafka)
    killed: list[int] = []

    def kill_once(progress: ProduceProgress) -> None:
        if progress.sent and not killed:
            killed.append(services.kill("kafka"))
            services.start("kafka")

    summary = produce_flights(
        brokers, start=HOUR, end=HOUR + timedelta(hours=2), speed=3_600, partitions=1, on_progress=kill_once
    )

    assert killed
    assert summary.is_complete
    sent = {topic: sum(end_offsets(brokers, topic).values()) for topic in summary.topics}
    assert sent == summary.topics
    assert caplog.messages == []


def test_ctrl_c_stops_the_command_in_good_order(kafka: str, tail: Tail, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*arguments: Any, on_progress: Callable[[ProduceProgress], None], **options: Any) -> ProduceSummary:
        def press_ctrl_c(progress: ProduceProgress) -> None:
            on_progress(progress)
            if progress.sent > 0:
                signal.raise_signal(signal.SIGINT)

        return produce_flights(*arguments, on_progress=press_ctrl_c, **options)

    monkeypatch.setattr(produce, "produce_flights", interrupted)
    before = signal.getsignal(signal.SIGINT)
    result = CliRunner().invoke(
        produce.app, ["flights", "--brokers", kafka, "--from", "2013-03-10", "--speed", "600", "--json"]
    )
    assert result.exit_code == 130
    assert signal.getsignal(signal.SIGINT) is before
    summary = json.loads(result.stdout)
    assert not summary["is_complete"]
    assert 0 < summary["events"] == len(tail.read())
