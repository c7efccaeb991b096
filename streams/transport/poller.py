"""The one thread that talks to Kafka on behalf of a worker's consumer.

librdkafka wants to be polled whether or not the application asks for rows (else the group member is thrown out), and
confluent-kafka starves calls made from other threads while one polls. So one thread owns the consumer: it polls, turns
what it got into columns, and runs every other consumer call from a queue between two polls, also while a rebalance
callback waits for the application to finish its last commit.
"""

import contextlib
import logging
import queue
import threading
import time
from collections.abc import Callable
from concurrent.futures import CancelledError, Future
from operator import itemgetter
from typing import Any, Protocol, TypeVar, cast

import confluent_kafka
import numpy as np
from confluent_kafka import OFFSET_BEGINNING, KafkaError, KafkaException, Message, TopicPartition

from streams.batch import Headers, RawBatch

logger = logging.getLogger(__name__)

_POLL_S = 0.02
_MAX_ROWS = 20_000
_REBALANCE_POLL_S = 0.005
_PAUSE_AFTER_S = 0.5
_FULL_POLL_S = 0.005
T = TypeVar("T")


class Application(Protocol):
    """What the poll thread tells the application; every method is called from the poll thread."""

    def deliver(self, batches: list[RawBatch], *, generation: int) -> None:
        """Take batches that were fetched under an assignment; must not block."""

    def is_over_budget(self) -> bool:
        """Tell whether the application holds as many unprocessed bytes as it may."""

    def assigned(self, partitions: set[tuple[str, int]], *, generation: int) -> None:
        """Partitions came (paused, until :meth:`PollThread.seek`), all that are held now; must not block."""

    def revoked(self, partitions: set[tuple[str, int]], *, lost: bool) -> "Future[None]":
        """All partitions go; the poll thread serves queued calls until the future is done."""

    def failed(self, error: BaseException) -> None:
        """Polling ended with an error."""


class PollThread:
    """Owns a confluent-kafka consumer; see the module's docstring.

    Args:
        config: librdkafka configuration of the consumer.
        application: Told of rows, rebalances and failure.
        revoke_timeout_s: How long a revoke may wait for the application's last commit; it has failed after that.
    """

    def __init__(self, config: dict[str, Any], *, application: Application, revoke_timeout_s: float) -> None:
        self._config = config
        self._application = application
        self._revoke_timeout_s = revoke_timeout_s
        self._calls: queue.SimpleQueue[tuple[Callable[[confluent_kafka.Consumer], Any], Future[Any]]]
        self._calls = queue.SimpleQueue()
        self._stopping = threading.Event()
        self._ending = threading.Lock()
        self._has_ended = False
        self._thread = threading.Thread(target=self._run, name="kafka-poll", daemon=True)
        self._assignment: set[tuple[str, int]] = set()
        self._flowing: set[tuple[str, int]] = set()
        self._full_since_s: float | None = None
        self.is_held_back = False
        self._held_back_s = 0.0
        self._held_back_since_s = 0.0
        self.highwater: dict[tuple[str, int], int] = {}
        self.at_end: dict[tuple[str, int], int] = {}
        """End offsets of partitions whose last record has been fetched; before them may be markers of transactions."""
        self.group_metadata: Any = None
        self.generation = 0
        """Goes up whenever partitions come and whenever they go: what belongs to an earlier one is void."""

    @property
    def assignment(self) -> set[tuple[str, int]]:
        """Partitions this member holds now."""
        return set(self._assignment)

    @property
    def flowing(self) -> set[tuple[str, int]]:
        """Partitions of the assignment that have been started."""
        return set(self._flowing)

    @property
    def held_back_s(self) -> float:
        """Seconds for which fetching was held back, all in all."""
        return self._held_back_s + (time.monotonic() - self._held_back_since_s if self.is_held_back else 0.0)

    def start(self) -> None:
        """Start polling."""
        self._thread.start()

    def stop(self, timeout_s: float) -> None:
        """Leave the group and end the thread."""
        self._stopping.set()
        self._thread.join(timeout_s)

    def call(self, function: Callable[[confluent_kafka.Consumer], T]) -> "Future[T]":
        """Run ``function(consumer)`` on the poll thread."""
        future: Future[T] = Future()
        with self._ending:
            if self._has_ended or not self._thread.is_alive():
                future.set_exception(_closed())
            else:
                self._calls.put((function, future))
        return future

    def subscribe(self, topics: list[str]) -> "Future[None]":
        """Join the group for ``topics``."""
        return self.call(
            lambda consumer: consumer.subscribe(
                topics, on_assign=self._on_assign, on_revoke=self._on_revoke, on_lost=self._on_lost
            )
        )

    def seek(self, offsets: dict[tuple[str, int], int], *, generation: int) -> "Future[None]":
        """Start reading assigned partitions from ``offsets``, and let their rows flow.

        Does nothing when ``generation`` is over.
        """

        def start_from(consumer: confluent_kafka.Consumer) -> None:
            if generation != self.generation:
                return
            mine = {tp: offset for tp, offset in offsets.items() if tp in self._assignment}
            for (topic, partition), offset in mine.items():
                consumer.seek(TopicPartition(topic, partition, offset))
            self._flowing.update(mine)
            if not self.is_held_back:
                consumer.resume([TopicPartition(*tp) for tp in mine])

        return self.call(start_from)

    def _run(self) -> None:
        consumer = confluent_kafka.Consumer(self._config)
        try:
            while not self._stopping.is_set():
                self._serve_calls(consumer)
                if self._is_full():
                    self._stopping.wait(_FULL_POLL_S)
                    continue
                self._hold_back(consumer)
                generation = self.generation
                messages = consumer.consume(1, _POLL_S)
                if messages:
                    messages += consumer.consume(_MAX_ROWS, 0)
                if messages and generation == self.generation:
                    self._deliver(consumer, messages)
        except BaseException as exc:
            self._application.failed(exc)
        finally:
            with contextlib.suppress(KafkaException):
                consumer.close()
            with self._ending:
                self._has_ended = True
            while not self._calls.empty():
                self._calls.get()[1].set_exception(_closed())

    def _serve_calls(self, consumer: confluent_kafka.Consumer) -> None:
        while True:
            try:
                function, future = self._calls.get_nowait()
            except queue.Empty:
                return
            if not future.set_running_or_notify_cancel():
                continue
            try:
                future.set_result(function(consumer))
            except Exception as exc:
                future.set_exception(exc)

    def _is_full(self) -> bool:
        """Tell whether to take nothing for a moment, and leave what comes in librdkafka's own bounded queue.

        A pause throws away what is in that queue, and it takes a resumed partition tenths of a second to flow again: an
        application that is only slower than the broker would stop and go. So it is paused only after
        ``_PAUSE_AFTER_S``, for which the group can do without a poll.
        """
        if self.is_held_back or not self._flowing or not self._application.is_over_budget():
            self._full_since_s = None
            return False
        now_s = time.monotonic()
        if self._full_since_s is None:
            self._full_since_s = now_s
        return now_s - self._full_since_s < _PAUSE_AFTER_S

    def _hold_back(self, consumer: confluent_kafka.Consumer) -> None:
        is_over = self._application.is_over_budget()
        if is_over != self.is_held_back and self._flowing:
            partitions = [TopicPartition(*tp) for tp in self._flowing]
            if is_over:
                consumer.pause(partitions)
                self._held_back_since_s = time.monotonic()
            else:
                consumer.resume(partitions)
                self._held_back_s += time.monotonic() - self._held_back_since_s
            self.is_held_back = is_over

    def _deliver(self, consumer: confluent_kafka.Consumer, messages: list[Message]) -> None:
        by_partition: dict[tuple[str, int], list[Message]] = {}
        for message in messages:
            tp = cast("tuple[str, int]", (message.topic(), message.partition()))
            if (error := message.error()) is not None:
                if error.code() == KafkaError._PARTITION_EOF:
                    self.at_end[tp] = cast("int", message.offset())
                    continue
                if error.fatal() or error.code() in (
                    KafkaError.UNKNOWN_TOPIC_OR_PART,
                    KafkaError.TOPIC_AUTHORIZATION_FAILED,
                    KafkaError.GROUP_AUTHORIZATION_FAILED,
                    # What is read next is gone: the next start tells how much that is.
                    KafkaError._AUTO_OFFSET_RESET,
                ):
                    raise KafkaException(error)
                logger.warning("Kafka consumer: %s", error)
                continue
            self.at_end.pop(tp, None)
            by_partition.setdefault(tp, []).append(message)
        batches = []
        for tp, rows in by_partition.items():
            if tp not in self._flowing:
                continue
            batches.append(to_columns(tp, rows))
            _, self.highwater[tp] = consumer.get_watermark_offsets(TopicPartition(*tp), cached=True)
        if batches:
            self._application.deliver(batches, generation=self.generation)

    def _on_assign(self, consumer: confluent_kafka.Consumer, partitions: list[TopicPartition]) -> None:
        assigned = {(tp.topic, tp.partition) for tp in partitions}
        # Where to start is found out later: until then nothing is fetched, and no committed offset is asked for.
        consumer.assign([TopicPartition(*tp, OFFSET_BEGINNING) for tp in assigned])
        consumer.pause(partitions)
        self._assignment, self._flowing, self.at_end = assigned, set(), {}
        self.group_metadata = consumer.consumer_group_metadata()
        self.generation += 1
        self._application.assigned(assigned, generation=self.generation)

    def _on_revoke(self, consumer: confluent_kafka.Consumer, partitions: list[TopicPartition]) -> None:
        self._give_up(consumer, partitions, lost=False)

    def _on_lost(self, consumer: confluent_kafka.Consumer, partitions: list[TopicPartition]) -> None:
        self._give_up(consumer, partitions, lost=True)

    def _give_up(self, consumer: confluent_kafka.Consumer, partitions: list[TopicPartition], *, lost: bool) -> None:
        revoked = {(tp.topic, tp.partition) for tp in partitions}
        self._flowing -= revoked
        done = self._application.revoked(revoked, lost=lost)
        deadline_s = time.monotonic() + self._revoke_timeout_s
        while not done.done() and time.monotonic() < deadline_s:
            self._serve_calls(consumer)
            with contextlib.suppress(TimeoutError, CancelledError):
                done.exception(_REBALANCE_POLL_S)
        if not done.done():
            # What it commits from here on could be of partitions that another worker has by then.
            msg = f"the last commit of {sorted(revoked)} took more than {self._revoke_timeout_s:.0f} s"
            self._application.failed(TimeoutError(msg))
        elif not done.cancelled() and (error := done.exception()) is not None:
            self._application.failed(error)
        self._assignment -= revoked
        self.generation += 1
        consumer.unassign()


def _closed() -> KafkaException:
    return KafkaException(KafkaError(KafkaError._STATE, "the consumer is closed"))


def to_columns(tp: tuple[str, int], rows: list[Message]) -> RawBatch:
    """Make columns of consecutive records of one topic partition; at least one."""
    # Each record of the log comes through here: methods that are mapped cost two thirds of calls in a loop.
    offsets = np.fromiter(map(Message.offset, rows), np.int64, len(rows))
    return RawBatch(
        topic=tp[0],
        partition=tp[1],
        offsets=offsets,
        broker_time_us=np.fromiter(map(itemgetter(1), map(Message.timestamp, rows)), np.int64, len(rows)) * 1_000,
        keys=list(map(Message.key, rows)),
        values=list(map(Message.value, rows)),
        headers=cast("list[Headers]", list(map(Message.headers, rows))),
        next_offset=int(offsets[-1]) + 1,
    )
