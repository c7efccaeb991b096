"""Epochs: one Kafka transaction per commit, with everything a worker wrote since the last one.

The order of a commit, step by step; a crash between any two leaves the whole epoch undone, and it is made again:

1. rows and dead letters (:meth:`Epoch.write_rows`, :meth:`Epoch.write_output`) and state (:meth:`Epoch.write`) written
   since the last commit are in the open transaction;
2. ``before_commit`` adds what belongs to the commit itself (state snapshots);
3. the input offsets go into the transaction, fenced by the consumer group's generation;
4. the transaction commits: from here on readers of committed data see all of it;
5. the consumer takes the offsets for committed.

With ``Delivery.AT_LEAST_ONCE`` rows and dead letters are not in the transaction: an idempotent producer sends them, and
before step 2 all of them are acknowledged. State, offsets and rows on repartition topics stay in one: half a state
would be a wrong one for good, and a row that came twice into a window would count twice.

Source: KIP-98 (transactions) and KIP-447 (fencing by consumer group metadata).
"""

import asyncio
import logging
import threading
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from concurrent.futures import Future
from typing import Any, Final

from confluent_kafka import KafkaError, KafkaException, Message, Producer, TopicPartition

from schemas.errors import SinkError, SinkRejectedError
from streams.transport.options import Delivery

logger = logging.getLogger(__name__)

TRANSACTION_TIMEOUT_S: Final = 20.0
MAX_RECORD_BYTES: Final = 2 * 2**20
"""Largest record that is sent: a dead letter is a raw record of Kafka's usual limit, and headers that say why."""
_CALL_TIMEOUT_S = 5.0
_HANG_S = 3.0
_STEP_TIMEOUT_S = 60.0
_RETRY_S = 0.1
_CHUNK = 10_000
_ANY_PARTITION = -1


class Epoch:
    """The open transaction of one worker.

    Args:
        config: librdkafka configuration of the producer (``bootstrap.servers`` and the like).
        transactional_id: Stable name of this worker; a new start under it aborts what a killed one left open.
        group_metadata: Returns the consumer's group metadata as of the last assignment.
        before_commit: Called inside the commit with the offsets, may write to the transaction.
        delivery: Whether rows and dead letters are in the transaction.
    """

    def __init__(
        self,
        config: Mapping[str, Any],
        *,
        transactional_id: str,
        group_metadata: Callable[[], Any],
        before_commit: Callable[[Mapping[tuple[str, int], int]], Awaitable[None]] | None = None,
        delivery: Delivery = Delivery.EXACTLY_ONCE,
    ) -> None:
        common = {
            "partitioner": "murmur2_random",
            "compression.type": "lz4",
            "linger.ms": 5,
            "reconnect.backoff.ms": 500,
            # With "rebootstrap" librdkafka 2.16 makes new handles of brokers that were all down, and waits for the
            # old one of the group's coordinator: the next offsets are never sent.
            "metadata.recovery.strategy": "none",
            "message.max.bytes": MAX_RECORD_BYTES,
            "queue.buffering.max.messages": 1_000_000,
            "queue.buffering.max.kbytes": 512 * 1024,
            **config,
        }
        transaction = {
            "transactional.id": transactional_id,
            "transaction.timeout.ms": int(TRANSACTION_TIMEOUT_S * 1000),
        }
        self._producer = Producer({**transaction, **common})
        self._outputs = self._producer
        self._undelivered: KafkaError | None = None
        if delivery is Delivery.AT_LEAST_ONCE:
            acknowledged = {
                "enable.idempotence": True,
                "delivery.report.only.error": True,
                "on_delivery": self._not_delivered,
            }
            self._outputs = Producer({**acknowledged, **common})
        self._group_metadata = group_metadata
        self._before_commit = before_commit
        self._is_registered = False
        self._is_open = False
        self.number = 0
        """Identifies the open epoch: the time it began, in microseconds; rises within a worker."""

    async def start(self) -> None:
        """Make ready for new partitions: nothing of what came before may still commit.

        The first time, registers the transactional id, which aborts what an earlier worker of that name left open.
        Later, aborts what this worker wrote for partitions that it has lost.

        Raises:
            SinkError: The broker cannot be reached or does not let us write.
        """
        try:
            if not self._is_registered:
                await self._until_done(lambda: self._producer.init_transactions(_CALL_TIMEOUT_S))
                self._is_registered = True
        except KafkaException as exc:
            msg = f"Kafka does not accept transactions of this worker: {exc}; expected a broker of 2.5 or later"
            raise SinkError(msg) from exc
        await self.abort()
        self._undelivered = None

    async def abort(self) -> None:
        """Undo everything written since the last commit.

        Raises:
            SinkError: The broker cannot be reached; it aborts the transaction itself when its timeout has passed.
        """
        if not self._is_open:
            return
        try:
            await self._until_done(lambda: self._producer.abort_transaction(_CALL_TIMEOUT_S))
        except KafkaException as exc:
            msg = f"epoch {self.number} could not be aborted: {exc}; a new start of this worker does it"
            raise SinkError(msg) from exc
        self._is_open = False

    def begin(self) -> int:
        """Open the transaction unless it is open; returns the epoch's number.

        Raises:
            SinkError: Kafka's client opens none, such as one that another worker of its name has fenced.
        """
        if not self._is_open:
            try:
                self._producer.begin_transaction()
            except KafkaException as exc:
                msg = f"no epoch can be opened: {exc}; the worker restores its state in a new start"
                raise SinkError(msg) from exc
            self._is_open = True
            self.number = max(self.number + 1, time.time_ns() // 1_000)
        return self.number

    async def write_rows(
        self,
        topic: str,
        *,
        partition: int | None,
        keys: Sequence[bytes | None],
        values: Sequence[bytes],
        is_output: bool = True,
    ) -> None:
        """Write rows to one topic.

        Args:
            topic: The topic.
            partition: Partition that takes them; that of its key takes each where it is None.
            keys: Their keys.
            values: Their values.
            is_output: Whether readers may see them again where an epoch is done again; else they are in the
                transaction, whatever the delivery.

        Raises:
            SinkRejectedError: Kafka's client does not take a row, such as one that is too large.
            SinkError: It takes none.
        """
        self.begin()
        producer = self._outputs if is_output else self._producer
        messages: list[dict[str, Any]] = [{"key": key, "value": value} for key, value in zip(keys, values, strict=True)]
        for start in range(0, len(messages), _CHUNK):
            pending = messages[start : start + _CHUNK]
            while True:
                try:
                    producer.produce_batch(topic, pending, _ANY_PARTITION if partition is None else partition)
                except KafkaException as exc:
                    msg = f"rows for {topic} are not taken: {exc}; the worker does the epoch again in a new start"
                    raise SinkError(msg) from exc
                refused = [(message, error) for message in pending if (error := message.pop("_error", None))]
                if not refused:
                    break
                for message, error in refused:
                    if error.code() != KafkaError._QUEUE_FULL:
                        raise _rejected(topic, message["key"], message["value"], error)
                pending = [message for message, _ in refused]
                # The send queue is full: let it drain, then send what was refused.
                await asyncio.to_thread(producer.poll, 0.1)
        producer.poll(0)

    async def write_output(
        self, topic: str, *, key: bytes | None, value: bytes | None, headers: list[tuple[str, bytes]] | None = None
    ) -> None:
        """Write one record that readers are to see, as :meth:`write_rows` does.

        Raises:
            SinkRejectedError: Kafka's client does not take it, such as one that is too large.
        """
        await self._write(self._outputs, topic, key=key, value=value, headers=headers, partition=None)

    async def write(
        self,
        topic: str,
        *,
        key: bytes | None,
        value: bytes | None,
        headers: list[tuple[str, bytes]] | None = None,
        partition: int | None = None,
    ) -> None:
        """Write one record of state: it is in the transaction, whatever the delivery.

        Raises:
            SinkRejectedError: Kafka's client does not take it, such as one that is too large.
        """
        await self._write(self._producer, topic, key=key, value=value, headers=headers, partition=partition)

    async def _write(
        self,
        producer: Producer,
        topic: str,
        *,
        key: bytes | None,
        value: bytes | None,
        headers: list[tuple[str, bytes]] | None,
        partition: int | None,
    ) -> None:
        self.begin()
        while True:
            try:
                producer.produce(
                    topic,
                    key=key,
                    value=value,
                    headers=[*headers] if headers else [],
                    partition=_ANY_PARTITION if partition is None else partition,
                )
            except BufferError:
                await asyncio.to_thread(producer.poll, 0.1)
            except KafkaException as exc:
                raise _rejected(topic, key, value, exc.args[0]) from exc
            else:
                return

    async def commit(
        self, offsets: Mapping[tuple[str, int], int], *, metadata: Mapping[tuple[str, int], str] | None = None
    ) -> None:
        """Commit everything written since the last commit, together with ``offsets``.

        Args:
            offsets: Next offset by topic and partition.
            metadata: Text that is committed with an offset, at most 4 KB each.

        Raises:
            SinkError: Records were not acknowledged, or the transaction could not be committed; it was aborted where
                that was possible, and the worker must restore its state before it goes on.
        """
        self.begin()
        if self._outputs is not self._producer:
            await self._until_acknowledged()
        try:
            if self._before_commit is not None:
                await self._before_commit(offsets)
            positions = [TopicPartition(*tp, offset, (metadata or {}).get(tp, "")) for tp, offset in offsets.items()]
            await self._until_done(
                lambda: self._producer.send_offsets_to_transaction(positions, self._group_metadata(), _CALL_TIMEOUT_S)
            )
            await self._until_done(lambda: self._producer.commit_transaction(_CALL_TIMEOUT_S))
        except KafkaException as exc:
            if exc.args[0].txn_requires_abort():
                await self.abort()
            msg = f"epoch {self.number} could not be committed: {exc}; the worker restores its state and does it again"
            raise SinkError(msg) from exc
        self._is_open = False

    def _not_delivered(self, error: KafkaError | None, _: Message) -> None:
        self._undelivered = self._undelivered or error

    async def _until_acknowledged(self) -> None:
        deadline = time.monotonic() + _STEP_TIMEOUT_S
        while left := await asyncio.to_thread(self._outputs.flush, _RETRY_S):
            if time.monotonic() > deadline:
                msg = (
                    f"{left} records are not acknowledged within {_STEP_TIMEOUT_S:.0f} s; expected a broker that is up"
                )
                raise SinkError(msg)
        if self._undelivered is not None:
            msg = (
                f"a record was not delivered: {self._undelivered.str()}; the worker does the epoch again in a new start"
            )
            raise SinkError(msg)

    async def _until_done(self, step: Callable[[], None]) -> None:
        deadline = time.monotonic() + _STEP_TIMEOUT_S
        while True:
            try:
                return await _call(step)
            except KafkaException as exc:
                if not exc.args[0].retriable() or time.monotonic() > deadline:
                    raise
                logger.warning("epoch %d: trying again: %s", self.number, exc.args[0].str())
                await asyncio.sleep(_RETRY_S)


async def _call(step: Callable[[], None]) -> None:
    """Make a blocking call of Kafka's client on a thread of its own.

    librdkafka does not always keep to its timeout, and a worker that then waits for the thread would not end.

    Raises:
        SinkError: The call does not return. The client can be used no more.
    """
    done: Future[None] = Future()
    done.set_running_or_notify_cancel()

    def run() -> None:
        try:
            step()
        except BaseException as exc:
            done.set_exception(exc)
        else:
            done.set_result(None)

    threading.Thread(target=run, name="kafka-transaction", daemon=True).start()
    try:
        await asyncio.wait_for(asyncio.wrap_future(done), _CALL_TIMEOUT_S + _HANG_S)
    except TimeoutError as exc:
        msg = (
            f"Kafka's client does not return from a call that should have timed out {_HANG_S:.0f} s ago; the worker "
            "must be started again, which undoes the open epoch"
        )
        raise SinkError(msg) from exc


def _rejected(topic: str, key: bytes | None, value: bytes | None, error: KafkaError) -> SinkRejectedError:
    msg = (
        f"a record for {topic} with a key of {len(key or b'')} and a value of {len(value or b'')} bytes is not taken: "
        f"{error.str()}; expected at most {MAX_RECORD_BYTES} bytes, and a topic that is there"
    )
    return SinkRejectedError(msg)
