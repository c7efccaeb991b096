"""From which offset each partition is read: what is committed, where a new group begins, what is still there."""

import asyncio
import logging
import time
from collections.abc import Iterable, Mapping
from typing import Final

from confluent_kafka import Consumer, KafkaError, KafkaException, TopicPartition

from schemas.errors import ServiceError
from streams.transport.options import CommittedOffset, ConsumerOptions, Partition
from streams.transport.poller import PollThread

logger = logging.getLogger(__name__)

_TIMEOUT_S: Final = 15.0
_ASK_TIMEOUT_S: Final = 3.0
_COMMITTED_TIMEOUT_S: Final = 60.0
_RETRY_S: Final = 0.1
_PASSING: Final = (
    KafkaError._TIMED_OUT,
    KafkaError._TRANSPORT,
    KafkaError._WAIT_COORD,
    KafkaError.UNSTABLE_OFFSET_COMMIT,
    KafkaError.COORDINATOR_LOAD_IN_PROGRESS,
    KafkaError.COORDINATOR_NOT_AVAILABLE,
    KafkaError.NOT_COORDINATOR,
)


class Positions:
    """Asks the brokers for offsets, by way of the poll thread.

    Args:
        poller: The poll thread.
        options: What the application decides about its consumer.
    """

    def __init__(self, poller: PollThread, options: ConsumerOptions) -> None:
        self._poller = poller
        self._options = options

    async def committed(self, partitions: set[Partition]) -> dict[Partition, CommittedOffset]:
        """Ask for committed offsets; those in a transaction that another worker left open are waited for.

        Raises:
            KafkaException: The broker refuses, or has not answered for a minute.
        """
        deadline = time.monotonic() + _COMMITTED_TIMEOUT_S
        while partitions:
            try:
                return await asyncio.wrap_future(self._poller.call(lambda consumer: _committed(consumer, partitions)))
            except KafkaException as exc:
                error = exc.args[0]
                is_passing = error.retriable() or error.code() in _PASSING
                if not is_passing or time.monotonic() > deadline:
                    raise
                logger.warning("committed offsets of %d partitions: trying again: %s", len(partitions), error.str())
                await asyncio.sleep(_RETRY_S)
        return {}

    async def begin_new(self, committed: dict[Partition, CommittedOffset]) -> dict[Partition, int]:
        """Find where to begin in partitions of which nothing was committed, and note it beside them."""
        new = [tp for tp, found in committed.items() if found.offset is None]
        if self._options.begin_at is None or not new:
            return {}
        begin_at = self._options.begin_at
        begins = await asyncio.wrap_future(self._poller.call(lambda consumer: begin_at(consumer, new)))
        committed.update({tp: CommittedOffset(offset=None, begin=begin) for tp, begin in begins.items()})
        logger.info("the group begins at %s", begins)
        return begins

    async def within_bounds(self, starts: Mapping[Partition, int]) -> dict[Partition, int]:
        """Move starts that the topic has lost to its first record; tell of the gap.

        Raises:
            ServiceError: A topic ends before a start: it was deleted and made again, or truncated.
        """
        bounds = await self.bounds(starts)
        found = {}
        for tp, start in starts.items():
            first, end = bounds[tp]
            if start > end:
                msg = (
                    f"{tp[0]}-{tp[1]} is to be read from offset {start}, but ends at {end}: the topic was deleted and "
                    f"made again, or truncated; expected the topic that group {self._options.kafka['group.id']} has "
                    "read. Delete the group's offsets and the topics made from it to begin anew"
                )
                raise ServiceError(msg)
            if start < first:
                logger.error(
                    "%s-%d: offsets %d to %d are gone (retention) and can not be read; going on from %d",
                    *(*tp, start, first - 1, first),
                )
                if self._options.lost is not None:
                    self._options.lost(tp, first - start)
            found[tp] = max(start, first)
        return found

    async def bounds(self, partitions: Iterable[Partition]) -> dict[Partition, tuple[int, int]]:
        """Ask for the first and the end offset of each partition."""

        def ask(consumer: Consumer) -> dict[Partition, tuple[int, int]]:
            return {tp: consumer.get_watermark_offsets(TopicPartition(*tp), timeout=_TIMEOUT_S) for tp in partitions}

        return await asyncio.wrap_future(self._poller.call(ask))


def _committed(consumer: Consumer, partitions: set[Partition]) -> dict[Partition, CommittedOffset]:
    found = consumer.committed([TopicPartition(*tp) for tp in partitions], timeout=_ASK_TIMEOUT_S)
    for tp in found:
        if tp.error is not None:
            raise KafkaException(tp.error)
    return {
        (tp.topic, tp.partition): CommittedOffset(
            offset=tp.offset if tp.offset >= 0 else None, metadata=tp.metadata or ""
        )
        for tp in found
    }
