"""Puts single events on Kafka for code with an event loop, and tells of each when all replicas have it.

Confluent's own asyncio producer takes no headers; here its plain one is served by a thread, which only hands over what
has become of records. Records of one call go in order: once the client has
no room for one, none after it is sent.
"""

import asyncio
import contextlib
import logging
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from types import TracebackType
from typing import Any, Final, Self

from confluent_kafka import KafkaError, KafkaException, Message, Producer

from streams.transport.epoch import MAX_RECORD_BYTES

logger = logging.getLogger(__name__)

DELIVERY_TIMEOUT_S: Final = 10.0
"""How long a record may wait for Kafka: longer than a partition takes to find another leader."""
_MAX_QUEUED_KBYTES: Final = 64 * 1024
_POLL_S: Final = 0.1
_TURN: Final = 500
"""Records that are handed over before others in the event loop get their turn."""
_SILENT: Final = 0
_TOO_LARGE: Final = (KafkaError.MSG_SIZE_TOO_LARGE, KafkaError.RECORD_LIST_TOO_LARGE)


@dataclass(frozen=True, kw_only=True)
class EventRecord:
    """A record to be sent.

    Attributes:
        key: Its key; records of equal keys are in one partition. None: any partition.
        value: Its payload.
        headers: Its headers.
    """

    key: bytes | None
    value: bytes
    headers: Sequence[tuple[str, bytes]]


@dataclass(frozen=True)
class Delivered:
    """All replicas that are in sync have the record."""

    partition: int
    offset: int


@dataclass(frozen=True)
class Undelivered:
    """Kafka has not acknowledged the record.

    Attributes:
        cause: Why.
        is_too_large: Whether it never will, for it is larger than the topic takes.
        is_unsent: Whether it is certain that it is not on the topic.
    """

    cause: str
    is_too_large: bool = False
    is_unsent: bool = False


class EventProducer:
    """An idempotent producer; belongs to one event loop, closed by its end as a context manager.

    Args:
        brokers: Bootstrap servers.
        delivery_timeout_s: How long a record may wait for Kafka.
        make_producer: Makes the client of its configuration.
    """

    def __init__(
        self,
        brokers: str,
        *,
        delivery_timeout_s: float = DELIVERY_TIMEOUT_S,
        make_producer: Callable[[dict[str, Any]], Any] = Producer,
    ) -> None:
        self._config: dict[str, Any] = {
            "bootstrap.servers": brokers,
            "client.id": "headrace-serve",
            "log_level": _SILENT,  # what fails is told to who waits for it
            "enable.idempotence": True,
            "acks": "all",
            "partitioner": "murmur2_random",  # what Java's producers do, so that keys meet in one partition
            "linger.ms": 1,  # callers wait for it; those who send at the same time share a batch all the same
            "socket.nagle.disable": True,
            "compression.type": "lz4",
            "message.max.bytes": MAX_RECORD_BYTES,
            "queue.buffering.max.kbytes": _MAX_QUEUED_KBYTES,
            "message.timeout.ms": int(delivery_timeout_s * 1_000),
            "reconnect.backoff.max.ms": 1_000,
            "metadata.recovery.strategy": "none",
            "allow.auto.create.topics": False,
        }
        self._delivery_timeout_s = delivery_timeout_s
        self._make_producer = make_producer
        self._lock = threading.Lock()
        self._producers = [make_producer(self._config)]
        """The last one sends; those before it have failed for good, and are asked what became of their records."""
        self._is_ended = False
        self._thread = threading.Thread(target=self._serve, name="headrace-event-producer", daemon=True)
        self._thread.start()

    async def send(
        self, topic: str, records: Sequence[EventRecord], *, timestamp_ms: int
    ) -> list[Delivered | Undelivered]:
        """Send records to one topic, and wait for what becomes of each.

        Args:
            topic: The topic.
            records: The records.
            timestamp_ms: Record timestamp of all of them, milliseconds since the epoch.

        Returns:
            For each record its outcome, in order. Calling this off takes nothing back.
        """
        pending = _Pending(len(records), asyncio.get_running_loop())
        producer = self._producers[-1]
        for position, record in enumerate(records):
            if position % _TURN == _TURN - 1:
                await asyncio.sleep(0)
            try:
                producer.produce(
                    topic,
                    record.value,
                    key=record.key,
                    headers=list(record.headers),
                    timestamp=timestamp_ms,
                    on_delivery=partial(self._settle, producer, pending, position),
                )
            except BufferError:
                cause = f"{_MAX_QUEUED_KBYTES // 1024} MiB wait for Kafka already, expected less; send it later"
                pending.give_up(position, Undelivered(cause, is_unsent=True))
                break
            except KafkaException as exc:
                error: KafkaError = exc.args[0]
                outcome = self._outcome(producer, error, is_unsent=True)
                if not outcome.is_too_large:
                    pending.give_up(position, outcome)
                    break
                pending.settle(position, outcome)
        return await pending.outcomes

    async def close(self) -> None:
        """Wait for what is under way, no longer than records may wait, and end."""
        await asyncio.to_thread(self._close)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    def _close(self) -> None:
        self._is_ended = True
        self._thread.join()
        for producer in self._producers:
            if left := producer.flush(self._delivery_timeout_s):
                logger.warning("%d events were not acknowledged when the producer was closed", left)

    def _serve(self) -> None:
        while not self._is_ended:
            try:
                self._poll()
            except Exception:  # what one record's callback raises must not leave all the others waiting
                logger.exception("what has become of an event could not be handed over; others go on")

    def _poll(self) -> None:
        current = self._producers[-1]
        current.poll(_POLL_S)
        for failed in self._producers[:-1]:
            failed.poll(0)
            if not len(failed):
                with self._lock:
                    self._producers.remove(failed)

    def _settle(
        self, producer: Any, pending: "_Pending", position: int, error: KafkaError | None, message: Message
    ) -> None:
        outcome: Delivered | Undelivered = Undelivered("Kafka has not said where it is")
        try:
            if error is not None:
                outcome = self._outcome(producer, error)
            else:
                partition, offset = message.partition(), message.offset()
                if partition is not None and offset is not None and offset >= 0:
                    outcome = Delivered(partition, offset)
        finally:  # whoever waits for it must not wait for ever
            pending.settle(position, outcome)

    def _outcome(self, producer: Any, error: KafkaError, *, is_unsent: bool = False) -> Undelivered:
        if error.fatal() or error.code() == KafkaError._FATAL:
            self._replace(producer, error)
        return Undelivered(error.str(), is_too_large=error.code() in _TOO_LARGE, is_unsent=is_unsent)

    def _replace(self, failed: Any, error: KafkaError) -> None:
        """Go on with a new client: one that has lost its place in the order of a partition sends nothing any more."""
        with self._lock:
            if self._producers[-1] is not failed:
                return
            try:
                self._producers.append(self._make_producer(self._config))
            except KafkaException as exc:
                logger.warning("the producer of events failed for good (%s), and there is no other: %s", error, exc)
                return  # the next record that this one refuses tries again
            logger.warning("the producer of events failed for good (%s), another one goes on", error.str())


class _Pending:
    """Outcomes of one call, gathered by whatever thread has them, and handed over once all are there."""

    def __init__(self, count: int, loop: asyncio.AbstractEventLoop) -> None:
        self.outcomes: asyncio.Future[list[Delivered | Undelivered]] = loop.create_future()
        self._loop = loop
        self._found: list[Delivered | Undelivered | None] = [None] * count
        self._left = count
        self._lock = threading.Lock()
        if not count:
            self.outcomes.set_result([])

    def settle(self, position: int, outcome: Delivered | Undelivered) -> None:
        with self._lock:
            self._found[position] = outcome
            self._left -= 1
            is_complete = not self._left
        if is_complete:
            with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits any more
                self._loop.call_soon_threadsafe(self._hand_over)

    def give_up(self, position: int, outcome: Undelivered) -> None:
        """Settle this record and all after it."""
        for later in range(position, len(self._found)):
            self.settle(later, outcome)

    def _hand_over(self) -> None:
        if not self.outcomes.done():
            self.outcomes.set_result([outcome for outcome in self._found if outcome is not None])
