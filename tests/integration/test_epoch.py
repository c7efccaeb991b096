"""Epochs on a real Kafka: what a reader of committed data sees of them, whatever becomes of the writer."""

import asyncio
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass, field
from typing import Any

import pytest
from confluent_kafka import Consumer

from infra.local.process import wait_until
from infra.local.services import LocalServices
from jobs.consumer_group import committed_offsets, place_group
from jobs.topics import ensure_topics, plan_topics
from schemas.errors import SinkError, SinkRejectedError
from streams.transport import epoch as epoch_module
from streams.transport.epoch import MAX_RECORD_BYTES, Epoch
from streams.transport.options import Delivery
from tests.support.feature_rows import make_view
from tests.support.kafka import TIMEOUT_S, committed_values, join_group, make_group, make_topic


@dataclass
class Stage:
    """An input topic that a group reads, and an output topic that epochs write to."""

    kafka: str
    source: str
    output: str
    group: str = field(default_factory=make_group)
    consumer: Consumer | None = None

    def epoch(self, name: str = "worker", **options: Any) -> Epoch:
        """Make the epoch of a worker that holds the group's partitions."""
        if self.consumer is None:
            self.consumer = join_group(self.kafka, self.group, self.source)
        defaults = {
            "transactional_id": f"{self.group}.{name}",
            "group_metadata": self.consumer.consumer_group_metadata,
        }
        return Epoch({"bootstrap.servers": self.kafka, **options.pop("config", {})}, **{**defaults, **options})

    def committed(self) -> int | None:
        """Offset that the group is committed at."""
        return committed_offsets(self.kafka, self.group, self.source).get(0)

    def until_committed(self, offset: int) -> None:
        """Wait until the group is committed there: the marker that ends a transaction comes a moment after it."""
        assert wait_until(lambda: self.committed() == offset, timeout_s=TIMEOUT_S), self.committed()

    def values(self) -> list[bytes | None]:
        """What a reader of committed data sees of the output."""
        return committed_values(self.kafka, self.output)


@pytest.fixture
def stage(kafka: str) -> Iterator[Stage]:
    made = Stage(kafka, make_topic(kafka, "in"), make_topic(kafka, "out"))
    yield made
    if made.consumer is not None:
        made.consumer.close()


async def test_rows_and_offsets_become_visible_together(stage: Stage) -> None:
    epoch = stage.epoch()
    await epoch.start()
    await epoch.write(stage.output, key=b"k", value=b"one", headers=[("h", b"x")])
    await epoch.write_rows(stage.output, partition=0, keys=[b"k", None], values=[b"two", b"three"])
    assert stage.values() == []
    assert stage.committed() is None
    await epoch.commit({(stage.source, 0): 5})
    assert stage.values() == [b"one", b"two", b"three"]
    stage.until_committed(5)


async def test_epochs_have_numbers_that_rise(stage: Stage) -> None:
    epoch = stage.epoch()
    await epoch.start()
    numbers = []
    for offset in range(3):
        numbers.append(epoch.begin())
        assert epoch.begin() == numbers[-1]
        await epoch.commit({(stage.source, 0): offset})
    assert numbers == sorted(set(numbers))


async def test_an_aborted_epoch_is_never_seen(stage: Stage) -> None:
    epoch = stage.epoch()
    await epoch.start()
    await epoch.write(stage.output, key=None, value=b"aborted")
    await epoch.abort()
    await epoch.abort()  # nothing is open: does nothing
    await epoch.write(stage.output, key=None, value=b"kept")
    await epoch.commit({(stage.source, 0): 1})
    assert stage.values() == [b"kept"]


async def test_a_new_assignment_undoes_what_was_written_for_the_old_one(stage: Stage) -> None:
    epoch = stage.epoch()
    await epoch.start()
    await epoch.write(stage.output, key=None, value=b"of partitions that are lost")
    await epoch.start()
    await epoch.commit({(stage.source, 0): 1})
    assert stage.values() == []


class CrashError(Exception):
    """The process ends here."""


def crash(*_: Any) -> Any:
    raise CrashError


async def crash_later(*_: Any) -> None:
    raise CrashError


@pytest.mark.parametrize("step", ["rows written", "state written", "offsets sent", "committed"])
async def test_a_crash_after_any_step_of_a_commit_leaves_all_of_the_epoch_or_nothing(
    stage: Stage, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    options: dict[str, Any] = {}
    if step == "rows written":
        options["before_commit"] = crash_later
    elif step == "state written":
        options["group_metadata"] = crash
    first = stage.epoch(**options)
    await first.start()
    await first.write(stage.output, key=None, value=b"row")
    if step == "offsets sent":

        class HalfProducer:
            """Crashes instead of committing."""

            def __init__(self, producer: Any) -> None:
                self._inner = producer
                self.commit_transaction = crash

            def __getattr__(self, name: str) -> Any:
                return getattr(self._inner, name)

        monkeypatch.setattr(first, "_producer", HalfProducer(first._producer))
    if step == "committed":
        await first.commit({(stage.source, 0): 1})
    else:
        with pytest.raises(CrashError):
            await first.commit({(stage.source, 0): 1})

    again = stage.epoch()  # the same worker, started again
    await again.start()
    done = step == "committed"
    assert stage.committed() == (1 if done else None)
    assert stage.values() == ([b"row"] if done else [])
    if not done:
        await again.write(stage.output, key=None, value=b"row")
        await again.commit({(stage.source, 0): 1})
    stage.until_committed(1)
    assert stage.values() == [b"row"]


class TestAtLeastOnce:
    async def test_rows_are_seen_at_once_and_state_and_offsets_together_with_the_commit(self, stage: Stage) -> None:
        state = make_topic(stage.kafka, "state")
        epoch = stage.epoch(delivery=Delivery.AT_LEAST_ONCE)
        await epoch.start()
        await epoch.write_rows(stage.output, partition=0, keys=[b"k"], values=[b"row"])
        await epoch.write_output(stage.output, key=b"k", value=b"letter")
        await epoch.write(state, key=b"k", value=b"state")
        await epoch._until_acknowledged()
        assert stage.values() == [b"row", b"letter"]
        assert (stage.committed(), committed_values(stage.kafka, state)) == (None, [])
        await epoch.commit({(stage.source, 0): 2})
        stage.until_committed(2)
        assert committed_values(stage.kafka, state) == [b"state"]

    async def test_an_epoch_that_was_not_committed_is_done_again_and_its_rows_are_there_twice(
        self, stage: Stage
    ) -> None:
        first = stage.epoch(delivery=Delivery.AT_LEAST_ONCE, before_commit=crash_later)
        await first.start()
        await first.write_output(stage.output, key=None, value=b"row")
        with pytest.raises(CrashError):
            await first.commit({(stage.source, 0): 1})
        assert (stage.committed(), stage.values()) == (None, [b"row"])
        again = stage.epoch(delivery=Delivery.AT_LEAST_ONCE)
        await again.start()
        await again.write_output(stage.output, key=None, value=b"row")
        await again.commit({(stage.source, 0): 1})
        stage.until_committed(1)
        assert stage.values() == [b"row", b"row"]

    async def test_offsets_are_not_committed_where_a_row_was_not_taken(self, stage: Stage) -> None:
        small = make_topic(stage.kafka, "small", config={"max.message.bytes": "1000"})
        epoch = stage.epoch(delivery=Delivery.AT_LEAST_ONCE)
        await epoch.start()
        await epoch.write_output(small, key=None, value=os.urandom(5_000))
        with pytest.raises(SinkError, match=r"a record was not delivered: .*too large"):
            await epoch.commit({(stage.source, 0): 1})
        assert stage.committed() is None
        await epoch.start()  # what was written before is void
        await epoch.commit({(stage.source, 0): 1})
        stage.until_committed(1)

    async def test_a_zombie_cannot_commit(self, stage: Stage) -> None:
        zombie, heir = (stage.epoch(delivery=Delivery.AT_LEAST_ONCE) for _ in range(2))
        await zombie.start()
        await heir.start()
        await heir.commit({(stage.source, 0): 1})
        with pytest.raises(SinkError, match="could not be committed"):
            await zombie.commit({(stage.source, 0): 9})
        stage.until_committed(1)


async def test_a_zombie_of_the_same_name_is_fenced(stage: Stage) -> None:
    zombie, heir = stage.epoch(), stage.epoch()
    await zombie.start()
    await zombie.write(stage.output, key=None, value=b"zombie")
    await heir.start()
    await heir.write(stage.output, key=None, value=b"heir")
    await heir.commit({(stage.source, 0): 1})
    with pytest.raises(SinkError, match="could not be committed"):
        await zombie.commit({(stage.source, 0): 9})
    assert stage.values() == [b"heir"]
    stage.until_committed(1)


async def test_a_worker_whose_partitions_have_gone_to_another_cannot_commit_for_them(stage: Stage) -> None:
    late = stage.epoch("late")
    await late.start()
    await late.write(stage.output, key=None, value=b"too late")
    old = stage.consumer
    assert old is not None
    metadata = old.consumer_group_metadata()
    late._group_metadata = lambda: metadata
    old.close()
    stage.consumer = None
    owner = stage.epoch("owner")
    await owner.start()
    await owner.write(stage.output, key=None, value=b"owner")
    await owner.commit({(stage.source, 0): 1})
    with pytest.raises(SinkError, match="could not be committed"):
        await late.commit({(stage.source, 0): 9})
    assert stage.values() == [b"owner"]
    stage.until_committed(1)


async def test_more_rows_than_the_send_queue_takes_arrive_in_order(stage: Stage) -> None:
    epoch = stage.epoch(config={"queue.buffering.max.messages": 500})
    await epoch.start()
    values = [str(number).encode() for number in range(12_000)]
    await epoch.write_rows(stage.output, partition=0, keys=[None] * len(values), values=values)
    for value in values[:2_000]:
        await epoch.write(stage.output, key=None, value=value, partition=0)
    await epoch.commit({(stage.source, 0): 1})
    assert stage.values() == values + values[:2_000]


async def test_a_record_that_is_too_large_is_refused_and_names_the_topic(stage: Stage) -> None:
    epoch = stage.epoch()
    await epoch.start()
    huge = b"x" * (MAX_RECORD_BYTES + 1)
    with pytest.raises(SinkRejectedError, match=stage.output):
        await epoch.write(stage.output, key=None, value=huge)
    with pytest.raises(SinkRejectedError, match="expected at most"):
        await epoch.write_rows(stage.output, partition=0, keys=[b"k"], values=[huge])


async def test_a_raw_record_of_the_largest_size_fits_the_dead_letter_topic_with_its_headers(
    stage: Stage, kafka: str
) -> None:
    (dead_letters,) = [topic for topic in plan_topics([make_view("large")], []) if topic.name.startswith("dlq.")]
    topic = make_topic(kafka, "dlq", config=dead_letters.config)
    epoch = stage.epoch()
    await epoch.start()
    largest = b"x" * 1_048_500
    await epoch.write(topic, key=None, value=largest, headers=[("headrace.detail", b"y" * 2_000)])
    await epoch.commit({(stage.source, 0): 1})
    assert committed_values(kafka, topic) == [largest]
    assert ensure_topics(kafka, []) == []


async def test_where_a_group_stands_can_be_asked_while_its_offsets_are_in_an_open_epoch(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    epoch = stage.epoch()
    await epoch.start()
    await epoch.commit({(stage.source, 0): 3})
    asked: list[int | None] = []

    def ask_then_commit(timeout: float) -> None:
        asked.append(stage.committed())
        producer.commit_transaction(timeout)

    producer = epoch._producer

    class Asking:
        commit_transaction = staticmethod(ask_then_commit)

        def __getattr__(self, name: str) -> Any:
            return getattr(producer, name)

    monkeypatch.setattr(epoch, "_producer", Asking())
    await epoch.write(stage.output, key=None, value=b"row")
    await epoch.commit({(stage.source, 0): 7})
    assert asked == [3]
    stage.until_committed(7)


def test_a_group_without_members_can_be_placed(kafka: str, stage: Stage) -> None:
    place_group(kafka, stage.group, stage.source, {0: 42})
    stage.until_committed(42)


async def test_the_broker_may_be_started_again_between_epochs(make_services: Callable[..., LocalServices]) -> None:
    services = make_services()
    brokers = services.up(["kafka"]).kafka
    assert brokers is not None
    stage = Stage(brokers, make_topic(brokers, "in"), make_topic(brokers, "out"))
    epoch = stage.epoch()
    assert stage.consumer is not None
    with closing(stage.consumer):
        await epoch.start()
        await epoch.write(stage.output, key=None, value=b"before")
        await epoch.commit({(stage.source, 0): 1})
        services.kill("kafka")
        services.start("kafka")
        await epoch.write(stage.output, key=None, value=b"after")
        await epoch.commit({(stage.source, 0): 2})
        assert stage.values() == [b"before", b"after"]
        stage.until_committed(2)


async def test_a_broker_that_cannot_be_reached_is_an_error_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(epoch_module, "_CALL_TIMEOUT_S", 0.5)
    monkeypatch.setattr(epoch_module, "_STEP_TIMEOUT_S", 0.0)
    epoch = Epoch(
        {"bootstrap.servers": "127.0.0.1:9", "log_level": 0}, transactional_id="nobody", group_metadata=lambda: None
    )
    with pytest.raises(SinkError, match="does not accept transactions"):
        await asyncio.wait_for(epoch.start(), 20)


async def test_a_call_that_does_not_return_is_an_error_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(epoch_module, "_CALL_TIMEOUT_S", 0.05)
    monkeypatch.setattr(epoch_module, "_HANG_S", 0.05)
    never = threading.Event()
    with pytest.raises(SinkError, match="does not return"):
        await epoch_module._call(never.wait)  # type: ignore[arg-type]  # what it returns is not asked for
    never.set()
