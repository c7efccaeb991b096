"""The columnar transport on a real Kafka: everything arrives once, in order, with all that it carries."""

import asyncio
import os
import random
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import faust
import pytest
from confluent_kafka import ConsumerGroupState, Producer
from confluent_kafka.admin import AdminClient
from prometheus_client import CollectorRegistry

from infra.local.process import ProcessIdentity, exit_code, spawn, wait_until
from jobs.consumer_group import committed_offsets, is_caught_up
from jobs.topic_reader import read_topic
from streams.agents.worker import consume, consumer_config, create_app
from streams.batch import RawBatch
from streams.observability.metrics import Metrics
from streams.transport.options import ConsumerOptions
from tests.support.kafka import committed_values, describe_group, make_group, make_topic, produce

TIMEOUT_S = 40.0
N_PARTITIONS = 3


class Reader:
    """A worker that keeps the batches of a topic, and acknowledges them when told."""

    def __init__(self, brokers: str, topic: str, group: str, **options: Any) -> None:
        self.topic = topic
        self.options = ConsumerOptions(kafka=consumer_config(group, brokers=brokers), **options)
        self.group = f"headrace.{group}"
        self.metrics = Metrics(CollectorRegistry())
        self.app: faust.App = create_app(
            group, brokers=brokers, options=self.options, metrics=self.metrics, commit_interval_s=0.1
        )
        self.events: list[Any] = []
        self.acknowledges = True
        self.fails_at: int | None = None
        self._arrived = asyncio.Condition()
        consume(self.app, topic, self._handle)

    @property
    def batches(self) -> list[RawBatch]:
        return [event.value for event in self.events]

    @property
    def n_rows(self) -> int:
        return sum(map(len, self.batches))

    async def _handle(self, event: Any) -> None:
        if self.fails_at is not None and self.n_rows + len(event.value) > self.fails_at:
            msg = "as told"
            raise RuntimeError(msg)
        async with self._arrived:
            self.events.append(event)
            if self.acknowledges:
                event.ack()
            self._arrived.notify_all()

    async def until(self, condition: Callable[[], bool]) -> None:
        async with self._arrived:
            await asyncio.wait_for(self._arrived.wait_for(condition), TIMEOUT_S)

    async def __aenter__(self) -> "Reader":
        await self.app.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.app.stop()


async def eventually(condition: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + TIMEOUT_S
    while not await asyncio.to_thread(condition):
        assert time.monotonic() < deadline, f"{what}: not within {TIMEOUT_S:.0f} s"
        await asyncio.sleep(0.02)


@pytest.fixture
def topic(kafka: str) -> str:
    return make_topic(kafka, partitions=N_PARTITIONS)


def offsets_of(batches: list[RawBatch]) -> dict[int, list[int]]:
    offsets: dict[int, list[int]] = {}
    for batch in batches:
        offsets.setdefault(batch.partition, []).extend(batch.offsets.tolist())
    return offsets


async def test_every_record_arrives_once_in_order_with_all_it_carries(kafka: str, topic: str) -> None:
    producer = Producer({"bootstrap.servers": kafka})
    for number in range(3_000):
        producer.produce(
            topic,
            key=None if number % 7 == 0 else f"key {number}".encode(),
            value=None if number % 11 == 0 else f"value {number}".encode(),
            headers=[("number", str(number).encode()), ("empty", b"")] if number % 2 else [],
            timestamp=1_000_000 + number,
            partition=number % N_PARTITIONS,
        )
        producer.poll(0)
    assert producer.flush(TIMEOUT_S) == 0
    async with Reader(kafka, topic, make_group()) as reader:
        await reader.until(lambda: reader.n_rows >= 3_000)
        for batch in reader.batches:
            assert batch.topic == topic
            for at, offset in enumerate(batch.offsets.tolist()):
                number = offset * N_PARTITIONS + batch.partition
                assert batch.keys[at] == (None if number % 7 == 0 else f"key {number}".encode())
                assert batch.values[at] == (None if number % 11 == 0 else f"value {number}".encode())
                expected = [("number", str(number).encode()), ("empty", b"")] if number % 2 else None
                assert (batch.headers[at] or None) == expected
                assert batch.broker_time_us[at] == (1_000_000 + number) * 1_000
        assert offsets_of(reader.batches) == {partition: list(range(1_000)) for partition in range(N_PARTITIONS)}
        await eventually(lambda: is_caught_up(kafka, reader.group, topic), "all of it is committed")
        # What Faust believes is what Kafka holds.
        believed = {tp.partition: offset for tp, offset in reader.app.consumer._committed_offset.items()}
        assert believed == committed_offsets(kafka, reader.group, topic)
        assert set(reader.app.consumer.lags().values()) == {0}


async def test_a_worker_goes_on_where_the_one_before_it_stopped(kafka: str, topic: str) -> None:
    group = make_group()
    produce(kafka, topic, [b"x"] * 500)
    async with Reader(kafka, topic, group) as first:
        await first.until(lambda: first.n_rows >= 500)
    produce(kafka, topic, [b"y"] * 300)
    async with Reader(kafka, topic, group) as second:
        await second.until(lambda: second.n_rows >= 300)
        assert offsets_of(second.batches) == {0: list(range(500, 800))}


async def test_what_was_not_acknowledged_comes_again(kafka: str, topic: str) -> None:
    group = make_group()
    produce(kafka, topic, [b"x"] * 500)
    reader = Reader(kafka, topic, group)
    reader.acknowledges = False
    async with reader:
        await reader.until(lambda: reader.n_rows >= 500)
    assert committed_offsets(kafka, f"headrace.{group}", topic) == {}
    async with Reader(kafka, topic, group) as second:
        await second.until(lambda: second.n_rows >= 500)


async def test_fetching_stops_at_the_byte_budget_and_loses_nothing(kafka: str, topic: str) -> None:
    n_rows, size = 1_500, 1_000
    for partition in range(N_PARTITIONS):
        produce(kafka, topic, [str(n).encode().ljust(size) for n in range(n_rows)], partition=partition)
    reader = Reader(kafka, topic, make_group(), max_held_bytes=300_000)
    reader.options.kafka["queued.max.messages.kbytes"] = 100
    reader.options.kafka["fetch.message.max.bytes"] = 50_000
    reader.acknowledges = False
    async with reader:
        consumer = reader.app.consumer
        await eventually(lambda: consumer.poller.is_held_back, "fetching is held back")
        assert 300_000 < consumer.held_bytes < 2_000_000
        assert reader.n_rows < N_PARTITIONS * n_rows
        reader.acknowledges = True
        for event in reader.events:
            event.ack()
        await reader.until(lambda: reader.n_rows >= N_PARTITIONS * n_rows)
        assert offsets_of(reader.batches) == {partition: list(range(n_rows)) for partition in range(N_PARTITIONS)}
        await eventually(lambda: consumer.held_bytes == 0, "all of it is let go")


async def test_a_batch_that_fails_ends_the_worker_and_nothing_after_it_is_committed(kafka: str, topic: str) -> None:
    group = make_group()
    produce(kafka, topic, [b"x"] * 100)
    reader = Reader(kafka, topic, group)
    async with reader:
        await reader.until(lambda: reader.n_rows >= 100)
        await eventually(lambda: is_caught_up(kafka, reader.group, topic), "all of it is committed")
        reader.fails_at = 100
        produce(kafka, topic, [b"poison"])
        produce(kafka, topic, [b"y"] * 100, partition=1)
        await asyncio.wait_for(reader.app._crashed.wait(), TIMEOUT_S)
        assert str(reader.app.crash_reason) == "as told"
        assert reader.options.has_failed
    assert committed_offsets(kafka, f"headrace.{group}", topic).get(0) == 100


async def test_a_topic_that_is_gone_ends_the_worker(kafka: str) -> None:
    reader = Reader(kafka, "test.there.is.none", make_group())
    async with reader:
        await asyncio.wait_for(reader.app._crashed.wait(), TIMEOUT_S)
        assert "UNKNOWN_TOPIC" in str(reader.app.crash_reason)


# -- several workers ---------------------------------------------------------------------------------------------------


class Copiers:
    """Child processes that copy a topic, all of one group."""

    def __init__(self, brokers: str, source: str, output: str, logs: Path) -> None:
        self._arguments = [brokers, source, output, make_group()]
        self._logs = logs
        self.running: dict[str, ProcessIdentity] = {}

    @property
    def group(self) -> str:
        return f"headrace.{self._arguments[-1]}"

    def start(self, name: str) -> None:
        command = [sys.executable, "-m", "tests.support.copier", *self._arguments, name]
        self.running[name] = spawn(command, environment=os.environ, cwd=Path.cwd(), log=self._logs / f"{name}.log")

    def end(self, name: str) -> int | None:
        process = self.running.pop(name)
        process.end(grace_s=20.0)
        return exit_code(process.pid)

    def kill(self, name: str) -> None:
        identity = self.running.pop(name)
        process = identity.process()
        assert process is not None, f"{name} has ended by itself; see {self._logs}"
        process.send_signal(signal.SIGKILL)
        assert wait_until(lambda: not identity.is_alive(), timeout_s=TIMEOUT_S), f"{name} survives SIGKILL"


@pytest.fixture
def output(kafka: str) -> str:
    return make_topic(kafka, "out", partitions=N_PARTITIONS)


@pytest.fixture
def copiers(kafka: str, topic: str, output: str, tmp_path: Path) -> Iterator[Copiers]:
    made = Copiers(kafka, topic, output, tmp_path)
    yield made
    for name in list(made.running):
        made.kill(name)


def test_workers_that_join_leave_and_die_under_load_copy_each_record_once(
    kafka: str, topic: str, output: str, copiers: Copiers, tmp_path: Path
) -> None:
    admin = AdminClient({"bootstrap.servers": kafka})
    sent = [0] * N_PARTITIONS
    stop = threading.Event()

    def load() -> None:
        producer = Producer({"bootstrap.servers": kafka, "linger.ms": 5})
        draw = random.Random(0)
        while not stop.wait(0.005):
            for _ in range(draw.randrange(1, 40)):
                partition = draw.randrange(N_PARTITIONS)
                producer.produce(topic, str(sent[partition]).encode(), partition=partition)
                sent[partition] += 1
            producer.poll(0)
        assert producer.flush(TIMEOUT_S) == 0

    def until_copied(more: int) -> None:
        target = n_copied() + more
        assert wait_until(lambda: n_copied() >= target, timeout_s=TIMEOUT_S), f"nothing is copied; see {tmp_path}"

    def until_members(n: int) -> None:
        """Wait until the group is at rest with ``n`` members."""

        def is_stable() -> bool:
            group = describe_group(admin, copiers.group)
            return group is not None and group.state == ConsumerGroupState.STABLE and len(group.members) == n

        assert wait_until(is_stable, timeout_s=TIMEOUT_S), f"the group has not come to {n} members; see {tmp_path}"

    def n_copied() -> int:
        return sum(committed_offsets(kafka, copiers.group, topic).values())

    copiers.start("one")
    producing = threading.Thread(target=load)
    producing.start()
    try:
        until_copied(500)
        copiers.start("two")  # joins
        copiers.start("three")
        until_members(3)
        until_copied(1_000)
        assert copiers.end("one") == 0  # leaves
        until_members(2)
        until_copied(1_000)
        copiers.kill("two")  # dies
        copiers.start("two")  # comes back, and undoes what it left open
        until_copied(1_000)
    finally:
        stop.set()
        producing.join()
    assert wait_until(lambda: is_caught_up(kafka, copiers.group, topic), timeout_s=TIMEOUT_S), f"see {tmp_path}"
    # A reader sees nothing past the transaction that the killed one left open until it has come back.
    assert wait_until(lambda: len(committed_values(kafka, output)) >= sum(sent), timeout_s=TIMEOUT_S), f"see {tmp_path}"
    copied: dict[int, list[int]] = {}
    for batch in read_topic(kafka, output):
        copied.setdefault(batch.partition, []).extend(int(value or b"-1") for value in batch.values)
    assert copied == {partition: list(range(n)) for partition, n in enumerate(sent)}
