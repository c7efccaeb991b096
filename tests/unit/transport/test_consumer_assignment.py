import asyncio
from collections.abc import Callable, Collection, Mapping
from concurrent.futures import Future
from typing import Any

import faust
import pytest
from confluent_kafka import OFFSET_BEGINNING, KafkaError, KafkaException
from faust.types import ConsumerMessage

from schemas.errors import ServiceError
from streams.transport.consumer import ColumnarConsumer
from streams.transport.options import CommittedOffset, ConsumerOptions, Partition
from tests.support.consumer import T0, Committed, FakePoller, assign, batch, deliver, deliver_each


async def test_partitions_start_where_committed_or_at_the_beginning(consumer: ColumnarConsumer) -> None:
    await assign(consumer)
    assert consumer.poller.sought == [({("t", 0): OFFSET_BEGINNING, ("t", 1): 40}, 1)]


async def test_the_application_decides_where_partitions_start(
    consumer: ColumnarConsumer, options: ConsumerOptions
) -> None:
    asked = []

    async def start(offsets: Mapping[Partition, CommittedOffset]) -> dict[Partition, int]:
        asked.append(offsets)
        return {("t", 1): 7}

    options.start_offsets = start
    await assign(consumer)
    noted = {
        ("t", 0): CommittedOffset(offset=None, metadata="noted"),
        ("t", 1): CommittedOffset(offset=40, metadata="noted"),
    }
    assert asked == [noted]
    assert consumer.poller.sought == [({("t", 0): OFFSET_BEGINNING, ("t", 1): 7}, 1)]


async def test_a_start_before_the_committed_offset_is_committed_from_there(
    consumer: ColumnarConsumer, options: ConsumerOptions, committed: Committed
) -> None:
    async def start(_: Mapping[Partition, CommittedOffset]) -> dict[Partition, int]:
        return {("t", 1): 7}

    options.start_offsets = start
    await assign(consumer)
    (message,) = await deliver(consumer, batch(7, 3, partition=1))
    message.ack(consumer)
    await consumer.force_commit()
    assert committed.offsets == [{("t", 1): 10}]


async def test_a_new_group_begins_where_it_is_told_and_commits_that_at_once(
    consumer: ColumnarConsumer, options: ConsumerOptions, committed: Committed
) -> None:
    asked = []

    def begin_at(_: Any, partitions: Collection[Partition]) -> dict[Partition, int]:
        asked.append(list(partitions))
        return {("t", 0): 500}

    options.begin_at = begin_at
    await assign(consumer)  # partition 1 is committed at 40
    assert asked == [[("t", 0)]]
    assert committed.offsets == [{("t", 0): 500}]
    assert consumer.poller.sought == [({("t", 0): 500, ("t", 1): 40}, 1)]


async def test_offsets_that_the_topic_has_lost_are_told(consumer: ColumnarConsumer, options: ConsumerOptions) -> None:
    lost = []
    options.lost = lambda tp, n_offsets: lost.append((tp, n_offsets))
    consumer.poller.kafka.bounds = (55, 1_000)
    await assign(consumer)
    assert lost == [(("t", 1), 15)]
    assert consumer.poller.sought == [({("t", 0): OFFSET_BEGINNING, ("t", 1): 55}, 1)]


async def test_a_topic_that_ends_before_the_start_is_refused(consumer: ColumnarConsumer) -> None:
    consumer.poller.kafka.bounds = (0, 39)
    with pytest.raises(ServiceError, match="t-1 is to be read from offset 40, but ends at 39"):
        await assign(consumer)


async def test_a_worker_that_failed_undoes_what_is_not_committed(
    consumer: ColumnarConsumer, options: ConsumerOptions, committed: Committed
) -> None:
    undone = []

    async def abandon() -> None:
        undone.append(True)

    options.abandon = abandon
    await assign(consumer)
    options.has_failed = True
    await consumer.drain()
    await consumer.drain()
    assert undone == [True]
    assert committed.offsets == []


async def test_the_application_prepares_before_committed_offsets_are_read(
    consumer: ColumnarConsumer, options: ConsumerOptions
) -> None:
    # Another worker's open transaction may hold them: to fence it comes first.
    order = []

    async def prepare() -> None:
        order.append("prepare")

    async def start(_: Mapping[Partition, CommittedOffset]) -> dict[Partition, int]:
        order.append("start")
        return {}

    def call(function: Callable[..., Any]) -> "Future[Any]":
        order.append("ask")
        return FakePoller.call(consumer.poller, function)

    options.prepare, options.start_offsets = prepare, start
    consumer.poller.call = call
    await assign(consumer)
    assert order == ["prepare", "ask", "start", "ask"]


async def test_the_application_prepares_for_an_empty_assignment_too(
    consumer: ColumnarConsumer, options: ConsumerOptions
) -> None:
    prepared = asyncio.Event()

    async def prepare() -> None:
        prepared.set()

    options.prepare = prepare
    await consumer._after_assignment(set(), generation=1)
    assert prepared.is_set()


@pytest.mark.parametrize("code", [KafkaError.UNSTABLE_OFFSET_COMMIT, KafkaError._TIMED_OUT])
async def test_committed_offsets_in_an_open_transaction_are_waited_for(consumer: ColumnarConsumer, code: int) -> None:
    answers = [KafkaException(KafkaError(code))]

    def call(function: Callable[..., Any]) -> "Future[Any]":
        if not answers:
            return FakePoller.call(consumer.poller, function)
        error = answers.pop()
        failed: Future[Any] = Future()
        failed.set_exception(error)
        return failed

    consumer.poller.call = call
    await assign(consumer)
    assert answers == []
    assert len(consumer.poller.sought) == 1


async def test_starts_do_not_overlap_and_one_that_is_over_seeks_nothing(
    consumer: ColumnarConsumer, options: ConsumerOptions
) -> None:
    began, may_end, running = asyncio.Event(), asyncio.Event(), []

    async def start(_: Mapping[Partition, CommittedOffset]) -> dict[Partition, int]:
        running.append("begin")
        began.set()
        await may_end.wait()
        running.append("end")
        return {}

    options.start_offsets = start
    first = asyncio.ensure_future(assign(consumer, generation=1))
    await began.wait()
    await consumer._before_revocation({("t", 0), ("t", 1)}, lost=False)
    second = asyncio.ensure_future(assign(consumer, generation=3))
    await asyncio.sleep(0)
    may_end.set()
    await asyncio.gather(first, second)
    assert running == ["begin", "end", "begin", "end"]
    assert [generation for _, generation in consumer.poller.sought] == [3]


async def test_a_start_that_fails_ends_the_worker(
    app: faust.App, consumer: ColumnarConsumer, options: ConsumerOptions
) -> None:
    async def start(_: Mapping[Partition, CommittedOffset]) -> dict[Partition, int]:
        msg = "no state"
        raise RuntimeError(msg)

    options.start_offsets = start
    consumer.assigned({("t", 0)}, generation=1)
    await asyncio.wait_for(app._crashed.wait(), 5)
    assert options.has_failed
    assert str(app.crash_reason) == "no state"


async def test_what_is_done_is_committed_before_partitions_go(consumer: ColumnarConsumer, committed: Committed) -> None:
    await assign(consumer)
    (message,) = await deliver(consumer, batch(0))
    message.ack(consumer)
    await consumer._before_revocation({("t", 0), ("t", 1)}, lost=False)
    assert committed.offsets == [{("t", 0): 10}]


async def test_the_last_commit_holds_what_came_while_another_was_under_way(
    consumer: ColumnarConsumer, committed: Committed
) -> None:
    await assign(consumer)
    first, second = await deliver_each(consumer, batch(0), batch(10))
    first.ack(consumer)
    committed.may_end.clear()
    timer = asyncio.ensure_future(consumer.commit())
    await committed.began.wait()
    second.ack(consumer)
    going = asyncio.ensure_future(consumer._before_revocation({("t", 0), ("t", 1)}, lost=False))
    await asyncio.sleep(0)
    committed.may_end.set()
    await asyncio.gather(timer, going)
    assert committed.offsets == [{("t", 0): 10}, {("t", 0): 20}]


async def test_lost_partitions_are_not_committed(consumer: ColumnarConsumer, committed: Committed) -> None:
    await assign(consumer)
    (message,) = await deliver(consumer, batch(0))
    message.ack(consumer)
    await consumer._before_revocation({("t", 0), ("t", 1)}, lost=True)
    assert committed.offsets == []


async def test_a_release_finishes_before_the_last_commit_and_may_forbid_it(
    consumer: ColumnarConsumer, committed: Committed, options: ConsumerOptions
) -> None:
    await assign(consumer)
    first, second = await deliver_each(consumer, batch(0), batch(10))
    released = []

    async def release(partitions: set[Partition], lost: bool) -> bool:
        released.append((partitions, lost))
        (first if len(released) == 1 else second).ack(consumer)
        return len(released) == 1

    options.release = release
    await consumer._finish({("t", 0)}, lost=False)
    assert committed.offsets == [{("t", 0): 10}]
    await consumer._finish({("t", 0)}, lost=False)
    assert committed.offsets == [{("t", 0): 10}]
    assert released == [({("t", 0)}, False)] * 2


async def test_a_batch_of_an_assignment_that_is_over_counts_for_nothing(
    consumer: ColumnarConsumer, committed: Committed
) -> None:
    await assign(consumer)
    (stale,) = await deliver(consumer, batch(0))
    await consumer._before_revocation({("t", 0), ("t", 1)}, lost=False)
    await assign(consumer, generation=3)
    (again,) = await deliver(consumer, batch(0))
    assert not consumer.is_current(faust_event(stale))
    assert consumer.is_current(faust_event(again))
    stale.ack(consumer)
    assert not await consumer.commit()
    again.ack(consumer)
    assert await consumer.commit()
    assert committed.offsets == [{("t", 0): 10}]


def faust_event(message: ConsumerMessage) -> Any:
    return type("Event", (), {"message": message})()


async def test_batches_under_way_when_partitions_go_are_dropped(consumer: ColumnarConsumer) -> None:
    await assign(consumer)
    consumer.deliver([batch(0)], generation=1)
    await consumer._before_revocation({("t", 0), ("t", 1)}, lost=False)
    await assign(consumer, generation=3)
    assert await deliver(consumer, batch(10), generation=1) == []
    (message,) = await deliver(consumer, batch(0))
    assert message.offset == 0


async def test_rows_before_where_faust_read_to_are_not_dropped(consumer: ColumnarConsumer) -> None:
    consumer._read_offset[T0] = 500
    assert consumer._read_offset[T0] is None
