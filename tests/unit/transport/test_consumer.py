import asyncio
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from typing import Any

import faust
import pytest
from confluent_kafka import OFFSET_BEGINNING, OFFSET_INVALID, KafkaError, KafkaException, TopicPartition
from faust.types import TP, ConsumerMessage
from prometheus_client import CollectorRegistry

from schemas.errors import ServiceError
from streams.agents.worker import create_app
from streams.batch import RawBatch
from streams.observability.metrics import Metrics
from streams.transport import consumer as consumer_module
from streams.transport.consumer import ColumnarConsumer, ColumnarSchema, Transport
from streams.transport.options import CommittedOffset, ConsumerOptions, Partition
from streams.transport.poller import PollThread
from tests.support.transport import make_batch

T0, T1 = TP("t", 0), TP("t", 1)


class FakeKafka:
    """Answers what a consumer is asked before its partitions start."""

    def __init__(self, committed: Mapping[Partition, int | None]) -> None:
        self.offsets = committed
        self.bounds = (0, 1_000)

    def committed(self, partitions: list[TopicPartition], *, timeout: float) -> list[TopicPartition]:
        assert timeout
        found = [(tp, self.offsets[tp.topic, tp.partition]) for tp in partitions]
        return [
            TopicPartition(tp.topic, tp.partition, OFFSET_INVALID if at is None else at, "noted") for tp, at in found
        ]

    def get_watermark_offsets(self, _: TopicPartition, *, timeout: float) -> tuple[int, int]:
        assert timeout
        return self.bounds


class FakePoller(PollThread):
    """A poll thread that never runs: calls are answered at once."""

    def __init__(self, committed: Mapping[Partition, int | None]) -> None:
        super().__init__({}, application=None, revoke_timeout_s=1.0)  # type: ignore[arg-type]  # never polls
        self.kafka = FakeKafka(committed)
        self.sought: list[tuple[dict[Partition, int], int]] = []

    def call(self, function: Callable[..., Any]) -> "Future[Any]":
        done: Future[Any] = Future()
        done.set_result(function(self.kafka))
        return done

    def seek(self, offsets: dict[Partition, int], *, generation: int) -> "Future[None]":
        self.sought.append((offsets, generation))
        done: Future[None] = Future()
        done.set_result(None)
        return done

    def hold(self, *partitions: Partition) -> None:
        self._assignment = set(partitions)


class Committed:
    """Takes down commits."""

    def __init__(self) -> None:
        self.offsets: list[dict[Partition, int]] = []
        self.error: Exception | None = None
        self.began = asyncio.Event()
        self.may_end = asyncio.Event()
        self.may_end.set()

    async def __call__(self, offsets: Mapping[Partition, int]) -> None:
        self.began.set()
        await self.may_end.wait()
        if self.error is not None:
            raise self.error
        self.offsets.append(dict(offsets))


@pytest.fixture
def committed() -> Committed:
    return Committed()


@pytest.fixture
def options(committed: Committed) -> ConsumerOptions:
    return ConsumerOptions(
        kafka={"bootstrap.servers": "127.0.0.1:1", "group.id": "g"}, max_held_bytes=2_100, commit=committed
    )


@pytest.fixture
async def app(options: ConsumerOptions) -> faust.App:
    made = create_app(
        "test", brokers="127.0.0.1:1", options=options, metrics=Metrics(CollectorRegistry()), commit_interval_s=60.0
    )
    made.topics.acks_enabled_for = lambda _: True
    return made


@pytest.fixture
async def consumer(app: faust.App) -> ColumnarConsumer:
    made: ColumnarConsumer = app.consumer
    made._main_loop = asyncio.get_running_loop()
    made.poller = FakePoller({("t", 0): None, ("t", 1): 40})
    made.poller.hold(("t", 0), ("t", 1))
    return made


async def assign(consumer: ColumnarConsumer, *, generation: int = 1) -> None:
    await consumer._after_assignment({("t", 0), ("t", 1)}, generation=generation)
    consumer.resume_partitions({T0, T1})
    consumer.resume_flow()
    consumer.app.flow_control.resume()


async def deliver(
    consumer: ColumnarConsumer, *batches: RawBatch, generation: int | None = None
) -> list[ConsumerMessage]:
    """Hand batches over and fetch what comes of them."""
    consumer.deliver(list(batches), generation=consumer._generation if generation is None else generation)
    await asyncio.sleep(0)  # they come through the loop
    return [message async for _, message in consumer.getmany(0.0)]


async def deliver_each(consumer: ColumnarConsumer, *batches: RawBatch) -> list[ConsumerMessage]:
    return [message for batch in batches for message in await deliver(consumer, batch)]


def batch(first: int, n: int = 10, *, partition: int = 0, size: int = 1) -> RawBatch:
    return make_batch([b"x" * size] * n, first_offset=first, partition=partition)


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


# -- which offset is committed -----------------------------------------------------------------------------------------


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


# -- when partitions come and go ---------------------------------------------------------------------------------------


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


# -- how much is held --------------------------------------------------------------------------------------------------


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
    consumer.poller.at_end = {("t", 0), ("t", 1)}  # what is left are markers of transactions
    assert consumer.lags() == {("t", 0): 0, ("t", 1): 0}
    (message,) = await deliver(consumer, batch(0))
    assert consumer.lags()["t", 0] == 12
    message.ack(consumer)
    await consumer.commit()
    assert consumer.lags()["t", 0] == 0


# -- getting rows ------------------------------------------------------------------------------------------------------


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


async def test_a_consumer_that_was_not_started_has_no_loop(app: faust.App) -> None:
    with pytest.raises(RuntimeError, match="before it was started"):
        app.consumer.deliver([batch(0)], generation=0)


async def test_faust_finds_the_transport_by_its_scheme(app: faust.App) -> None:
    assert isinstance(app.consumer.transport, Transport)
    assert app.consumer.transport.driver_version.startswith("confluent-kafka=")
