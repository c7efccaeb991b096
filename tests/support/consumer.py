"""A consumer without Kafka: what it is asked is answered in place, and its commits are taken down."""

import asyncio
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from typing import Any

from confluent_kafka import OFFSET_INVALID, TopicPartition
from faust.types import TP, ConsumerMessage

from streams.batch import RawBatch
from streams.transport.consumer import ColumnarConsumer
from streams.transport.options import Partition
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
