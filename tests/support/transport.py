"""Raw batches, and stand-ins for Kafka's consumer and for the application behind the poll thread."""

import threading
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from confluent_kafka import KafkaError, Message, TopicPartition

from streams.batch import Headers, RawBatch


def make_batch(
    values: Sequence[bytes | None],
    *,
    topic: str = "t",
    partition: int = 0,
    first_offset: int = 0,
    offsets: Sequence[int] | None = None,
    headers: Sequence[Headers] | None = None,
    keys: Sequence[bytes | None] | None = None,
    broker_time_us: int = 1_000_000_000,
) -> RawBatch:
    """Make a raw batch of values."""
    numbers = np.array(offsets if offsets is not None else range(first_offset, first_offset + len(values)), np.int64)
    return RawBatch(
        topic=topic,
        partition=partition,
        offsets=numbers,
        broker_time_us=np.full(len(values), broker_time_us, np.int64),
        keys=keys or [None] * len(values),
        values=list(values),
        headers=headers or [None] * len(values),
        next_offset=int(numbers[-1]) + 1,
    )


def make_message(
    at: tuple[str, int], number: int = 0, content: bytes | None = b"v", *, failure: KafkaError | None = None
) -> Message:
    """Make a record, or an error, as confluent-kafka gives it."""
    return Message(
        topic=at[0],
        partition=at[1],
        offset=number,
        key=None,
        value=content,
        headers=None,
        error=failure,
        timestamp=(1, 1_000),
        latency=0.0,
        leader_epoch=0,
    )


class FakeKafkaConsumer:
    """Scripted consumer: :attr:`script` holds what each poll brings, messages or a call to make meanwhile."""

    def __init__(self) -> None:
        self.script: deque[Any] = deque()
        self.calls: list[tuple[str, Any]] = []
        self.callbacks: dict[str, Any] = {}
        self.polled = threading.Event()
        self.is_closed = False

    def subscribe(self, topics: list[str], **callbacks: Any) -> None:
        self.calls.append(("subscribe", topics))
        self.callbacks = callbacks

    def consume(self, _: int, timeout: float) -> list[Message]:
        if timeout == 0:
            return []
        self.polled.set()
        step = self.script.popleft() if self.script else None
        if callable(step):
            step()
            return []
        if isinstance(step, BaseException):
            raise step
        if step is None:
            threading.Event().wait(0.001)
        return step or []

    def rebalance(self, kind: str, *partitions: tuple[str, int]) -> None:
        """Run a rebalance callback, as a poll does."""
        self.callbacks[kind](self, [TopicPartition(*tp) for tp in partitions])

    def get_watermark_offsets(self, _: TopicPartition, *, cached: bool) -> tuple[int, int]:
        assert cached
        return (0, 1_000)

    def consumer_group_metadata(self) -> str:
        return "metadata"

    def close(self) -> None:
        self.is_closed = True

    def assign(self, partitions: list[TopicPartition]) -> None:
        self._record("assign", partitions)

    def pause(self, partitions: list[TopicPartition]) -> None:
        self._record("pause", partitions)

    def resume(self, partitions: list[TopicPartition]) -> None:
        self._record("resume", partitions)

    def seek(self, partition: TopicPartition) -> None:
        self.calls.append(("seek", (partition.topic, partition.partition, partition.offset)))

    def unassign(self) -> None:
        self.calls.append(("unassign", None))

    def _record(self, name: str, partitions: list[TopicPartition]) -> None:
        self.calls.append((name, sorted((tp.topic, tp.partition) for tp in partitions)))


@dataclass
class FakeApplication:
    """Takes down what the poll thread tells."""

    is_over: bool = False
    is_prompt: bool = True
    delivered: list[tuple[RawBatch, int]] = field(default_factory=list)
    assignments: list[tuple[set[tuple[str, int]], int]] = field(default_factory=list)
    revocations: list[tuple[set[tuple[str, int]], bool]] = field(default_factory=list)
    last_commit: "Future[None]" = field(default_factory=Future)
    errors: list[BaseException] = field(default_factory=list)
    told: threading.Condition = field(default_factory=threading.Condition)

    def deliver(self, batches: list[RawBatch], *, generation: int) -> None:
        with self.told:
            self.delivered += [(batch, generation) for batch in batches]
            self.told.notify_all()

    def is_over_budget(self) -> bool:
        return self.is_over

    def assigned(self, partitions: set[tuple[str, int]], *, generation: int) -> None:
        with self.told:
            self.assignments.append((partitions, generation))
            self.told.notify_all()

    def revoked(self, partitions: set[tuple[str, int]], *, lost: bool) -> "Future[None]":
        with self.told:
            self.revocations.append((partitions, lost))
            self.told.notify_all()
        if self.is_prompt:
            done: Future[None] = Future()
            done.set_result(None)
            return done
        return self.last_commit

    def failed(self, error: BaseException) -> None:
        with self.told:
            self.errors.append(error)
            self.told.notify_all()
