import asyncio

import faust
import pytest

from streams.transport.consumer import ColumnarConsumer
from streams.transport.options import ConsumerOptions
from tests.support.consumer import T0, Committed, assign, batch, deliver, deliver_each


async def test_the_offset_after_the_last_batch_that_is_done_is_committed(
    consumer: ColumnarConsumer, committed: Committed
) -> None:
    await assign(consumer)
    first, second, _ = await deliver_each(consumer, batch(0), batch(10), batch(20))
    first.ack(consumer)
    second.ack(consumer)
    assert await consumer.commit()
    assert committed.offsets == [{("t", 0): 20}]


async def test_nothing_is_committed_past_a_batch_that_is_not_done(
    consumer: ColumnarConsumer, committed: Committed
) -> None:
    await assign(consumer)
    first, second, third = await deliver_each(consumer, batch(0), batch(10), batch(20))
    third.ack(consumer)
    second.ack(consumer)
    assert not await consumer.commit()
    assert committed.offsets == []
    first.ack(consumer)
    assert await consumer.commit()
    assert committed.offsets == [{("t", 0): 30}]


async def test_offsets_that_hold_no_record_hold_nothing_up(consumer: ColumnarConsumer, committed: Committed) -> None:
    await assign(consumer)
    first, second = await deliver_each(consumer, batch(0, 3), batch(17, 3))
    first.ack(consumer)
    await consumer.commit()
    second.ack(consumer)
    await consumer.commit()
    assert committed.offsets == [{("t", 0): 3}, {("t", 0): 20}]


async def test_partitions_do_not_wait_for_each_other(consumer: ColumnarConsumer, committed: Committed) -> None:
    await assign(consumer)
    _, other = await deliver(consumer, batch(0), batch(40, partition=1))
    other.ack(consumer)
    await consumer.commit()
    assert committed.offsets == [{("t", 1): 50}]


async def test_the_first_batch_from_the_committed_offset_on_counts(
    consumer: ColumnarConsumer, committed: Committed
) -> None:
    await assign(consumer)
    (message,) = await deliver(consumer, batch(40, partition=1))
    message.ack(consumer)
    await consumer.commit()
    assert committed.offsets == [{("t", 1): 50}]


async def test_a_replay_counts_and_is_committed_once_it_is_past_what_was_committed(
    consumer: ColumnarConsumer, committed: Committed
) -> None:
    await assign(consumer)  # partition 1 is committed at 40
    before, across = await deliver_each(consumer, batch(20, partition=1), batch(30, 15, partition=1))
    before.ack(consumer)
    assert not await consumer.commit()  # a lower offset than Kafka has would emit rows again
    across.ack(consumer)
    await consumer.commit()
    assert committed.offsets == [{("t", 1): 45}]
    assert consumer.held_bytes == 0


async def test_nothing_is_committed_twice(consumer: ColumnarConsumer, committed: Committed) -> None:
    await assign(consumer)
    (message,) = await deliver(consumer, batch(0))
    message.ack(consumer)
    message.ack(consumer)
    await consumer.commit()
    assert not await consumer.commit()
    assert committed.offsets == [{("t", 0): 10}]


async def test_a_commit_waits_for_the_batch_that_is_being_written(
    consumer: ColumnarConsumer, committed: Committed, options: ConsumerOptions
) -> None:
    await assign(consumer)
    (message,) = await deliver(consumer, batch(0))
    async with options.lock:
        commit = asyncio.ensure_future(consumer.commit())
        await asyncio.sleep(0)
        assert not committed.began.is_set()
        message.ack(consumer)
    await commit
    assert committed.offsets == [{("t", 0): 10}]


async def test_a_commit_that_fails_ends_the_worker_and_moves_nothing(
    app: faust.App, consumer: ColumnarConsumer, committed: Committed, options: ConsumerOptions
) -> None:
    await assign(consumer)
    first, second = await deliver_each(consumer, batch(0), batch(10))
    first.ack(consumer)
    committed.error = RuntimeError("the broker refuses")
    with pytest.raises(RuntimeError, match="refuses"):
        await consumer.commit()
    assert options.has_failed
    assert app.crash_reason is committed.error
    assert consumer._committed_offset[T0] is None
    committed.error = None
    second.ack(consumer)
    assert not await consumer.commit()
    assert committed.offsets == []


async def test_a_worker_that_has_failed_commits_nothing(
    consumer: ColumnarConsumer, committed: Committed, options: ConsumerOptions
) -> None:
    await assign(consumer)
    (message,) = await deliver(consumer, batch(0))
    message.ack(consumer)
    options.has_failed = True
    assert not await consumer.commit()
    await consumer._before_revocation({("t", 0), ("t", 1)}, lost=False)
    await consumer.drain()
    assert committed.offsets == []


async def test_the_end_commits_once_and_then_nothing(consumer: ColumnarConsumer, committed: Committed) -> None:
    await assign(consumer)
    first, second = await deliver_each(consumer, batch(0), batch(10))
    first.ack(consumer)
    await consumer.drain()
    second.ack(consumer)
    await consumer.drain()
    await consumer.commit()
    assert committed.offsets == [{("t", 0): 10}]


async def test_an_end_whose_commit_fails_still_comes_to_an_end(
    consumer: ColumnarConsumer, committed: Committed, options: ConsumerOptions
) -> None:
    await assign(consumer)
    (message,) = await deliver(consumer, batch(0))
    message.ack(consumer)
    committed.error = RuntimeError("no")
    await consumer.drain()
    assert options.has_failed


async def test_a_round_is_committed_once_all_of_it_is_done_and_not_before(
    consumer: ColumnarConsumer, committed: Committed
) -> None:
    await assign(consumer)
    consumer.commit_interval = 3_600.0
    committing = asyncio.create_task(ColumnarConsumer._commit_handler.fun(consumer))
    first, other = await deliver(consumer, batch(0), batch(40, partition=1))
    first.ack(consumer)
    assert not consumer._is_settled.is_set()
    other.ack(consumer)
    await asyncio.wait_for(committed.began.wait(), 10)
    committing.cancel()
    assert committed.offsets == [{("t", 0): 10, ("t", 1): 50}]


async def test_a_round_that_is_not_handed_over_yet_is_not_done(consumer: ColumnarConsumer) -> None:
    await assign(consumer)
    consumer._take([batch(0), batch(40, partition=1)], 1)
    messages = consumer.getmany(0.0)
    _, first = await anext(messages)
    first.ack(consumer)
    assert not consumer._is_settled.is_set()
    _, other = await anext(messages)
    other.ack(consumer)
    assert consumer._is_settled.is_set()


async def test_each_interval_commits_what_is_done_of_a_round_that_is_not(
    consumer: ColumnarConsumer, committed: Committed
) -> None:
    await assign(consumer)
    consumer.commit_interval = 0.01
    first, _ = await deliver(consumer, batch(0), batch(40, partition=1))
    first.ack(consumer)
    committing = asyncio.create_task(ColumnarConsumer._commit_handler.fun(consumer))
    await asyncio.wait_for(committed.began.wait(), 10)
    committing.cancel()
    assert committed.offsets == [{("t", 0): 10}]
