import asyncio

import faust
import pytest
from faust.types import ConsumerMessage

from streams.transport import consumer as consumer_module
from streams.transport.consumer import ColumnarConsumer, ColumnarSchema, Transport
from streams.transport.options import ConsumerOptions
from tests.support.consumer import T0, Committed, assign, batch, deliver, deliver_each


async def test_what_has_gathered_is_one_batch(
    consumer: ColumnarConsumer, committed: Committed, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(consumer_module, "_MAX_ROWS", 25)
    await assign(consumer)
    batches = [batch(0), batch(10), batch(20), batch(30, 40), batch(70)]
    first, *_ = await deliver(consumer, *batches)
    rest = [message async for _, message in consumer.getmany(0.0)]
    rest += [message async for _, message in consumer.getmany(0.0)]
    rest += [message async for _, message in consumer.getmany(0.0)]
    assert [message.value.offsets.tolist() for message in (first, *rest)] == [
        list(range(20)),
        list(range(20, 30)),
        list(range(30, 70)),
        list(range(70, 80)),
    ]
    assert len(first.value.values) == len(first.value.keys) == len(first.value.headers) == 20
    for message in (first, *rest):
        message.ack(consumer)
    await consumer.force_commit()
    assert committed.offsets == [{("t", 0): 80}]
    assert consumer.held_bytes == 0


async def test_a_batch_is_one_message(consumer: ColumnarConsumer) -> None:
    await assign(consumer)
    (message,) = await deliver(consumer, batch(5))
    assert (message.topic, message.partition, message.offset, message.generation_id) == ("t", 0, 5, 1)
    assert message.value.next_offset == 15


async def test_columns_go_through_the_schema_as_they_are(app: faust.App, consumer: ColumnarConsumer) -> None:
    await assign(consumer)
    (message,) = await deliver(consumer, batch(5))
    event = await ColumnarSchema().compile(app)(message)
    assert event.value is message.value
    assert event.message is message


async def test_fetching_pauses_over_the_budget_and_goes_on_when_half_of_it_is_free(consumer: ColumnarConsumer) -> None:
    await assign(consumer)
    messages = await deliver_each(consumer, *(batch(at, size=4) for at in (0, 10, 20)))
    assert consumer.held_bytes == 2_520
    assert consumer.is_over_budget()
    consumer.poller.is_held_back = True
    messages[0].ack(consumer)
    await consumer.commit()
    assert consumer.held_bytes == 1_680
    assert consumer.is_over_budget()
    messages[1].ack(consumer)
    await consumer.commit()
    assert consumer.held_bytes == 840
    assert not consumer.is_over_budget()
    consumer.poller.is_held_back = False
    await deliver(consumer, batch(30, size=5))
    assert consumer.held_bytes == 1_690
    assert not consumer.is_over_budget()


async def test_partitions_that_go_hold_nothing_any_more(consumer: ColumnarConsumer) -> None:
    await assign(consumer)
    (message,) = await deliver(consumer, batch(0, size=9))  # delivered
    await anext(consumer.getmany(0.0), None)
    consumer.deliver([batch(10, size=9)], generation=1)  # under way
    await consumer._before_revocation({("t", 0), ("t", 1)}, lost=False)
    assert consumer.held_bytes == 0
    await assign(consumer, generation=3)
    message.ack(consumer)
    await consumer.commit()
    assert consumer.held_bytes == 0
    await deliver(consumer, batch(0, size=9))
    assert consumer.held_bytes == 890


async def test_lag_counts_what_is_not_committed(consumer: ColumnarConsumer) -> None:
    await assign(consumer)
    consumer.poller.highwater = {("t", 0): 12, ("t", 1): 45}
    assert consumer.lags() == {("t", 0): 12, ("t", 1): 5}
    consumer.poller.at_end = {("t", 0): 12, ("t", 1): 45}  # what is left are markers of transactions
    assert consumer.lags() == {("t", 0): 0, ("t", 1): 0}
    (message,) = await deliver(consumer, batch(0))
    assert consumer.lags()["t", 0] == 12
    message.ack(consumer)
    await consumer.commit()
    assert consumer.lags()["t", 0] == 0


async def test_a_paused_partition_waits_and_holds_no_other_up(consumer: ColumnarConsumer) -> None:
    await assign(consumer)
    consumer.on_buffer_full(T0)
    (message,) = await deliver(consumer, batch(0), batch(40, partition=1))
    assert message.partition == 1
    waiting = asyncio.ensure_future(anext(consumer.getmany(30.0)))
    await asyncio.sleep(0)
    consumer.on_buffer_drop(T0)
    _, message = await asyncio.wait_for(waiting, 5)
    assert message.partition == 0


async def test_no_rows_flow_once_partitions_go(consumer: ColumnarConsumer) -> None:
    await assign(consumer)
    consumer.deliver([batch(0), batch(40, partition=1)], generation=1)
    rows = consumer.getmany(5.0)
    await anext(rows)
    consumer.stop_flow()
    assert [message async for message in rows] == []


async def test_a_consumer_that_was_not_started_has_no_loop(app: faust.App) -> None:
    with pytest.raises(RuntimeError, match="before it was started"):
        app.consumer.deliver([batch(0)], generation=0)


async def test_faust_finds_the_transport_by_its_scheme(app: faust.App) -> None:
    assert isinstance(app.consumer.transport, Transport)
    assert app.consumer.transport.driver_version.startswith("confluent-kafka=")


@pytest.mark.parametrize(("gather_s", "interval_s"), [(0.0, 0.05), (0.05, 0.0)])
async def test_what_comes_within_an_epoch_is_one_round_of_all_partitions(
    consumer: ColumnarConsumer, monkeypatch: pytest.MonkeyPatch, gather_s: float, interval_s: float
) -> None:
    monkeypatch.setattr(consumer_module, "_GATHER_S", gather_s)
    consumer.commit_interval = interval_s
    await assign(consumer)
    await deliver(consumer, batch(0))
    consumer.deliver([batch(10)], generation=1)
    round_ = asyncio.create_task(_round(consumer))
    await asyncio.sleep(0)  # the round has begun with the one batch that is there
    await asyncio.sleep(0)
    consumer.deliver([batch(20), batch(40, partition=1)], generation=1)
    assert [message.value.offsets.tolist() for message in await round_] == [list(range(10, 30)), list(range(40, 50))]


async def test_where_rows_need_no_commit_to_be_seen_they_wait_for_none(
    consumer: ColumnarConsumer, options: ConsumerOptions
) -> None:
    options.commit = None
    consumer.commit_interval = 3_600.0
    await assign(consumer)
    await deliver(consumer, batch(0))
    (message,) = await deliver(consumer, batch(10))
    assert message.offset == 10


async def _round(consumer: ColumnarConsumer) -> list[ConsumerMessage]:
    return [message async for _, message in consumer.getmany(1.0)]
