"""What an application decides about its consumer."""

import asyncio
from collections.abc import Awaitable, Callable, Collection, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from streams.batch import RawBatch

Partition = tuple[str, int]


class Delivery(StrEnum):
    """How often a reader of committed data may see a row of an epoch that was done again."""

    EXACTLY_ONCE = "exactly_once"
    """Once: rows are in the transaction of their offsets."""
    AT_LEAST_ONCE = "at_least_once"
    """Once or more: rows are seen as they are written, and the offsets are committed once all of them are."""


@dataclass(frozen=True)
class CommittedOffset:
    """What a group has committed of a partition.

    Attributes:
        offset: Offset that is read next; None where nothing was committed, or it has expired.
        metadata: Text that was committed with it.
        begin: Where to begin where nothing was committed; None for the beginning of what is there.
    """

    offset: int | None
    metadata: str = ""
    begin: int | None = None


@dataclass(kw_only=True)
class ConsumerOptions:
    """What the application decides about its consumer; set as ``app.headrace`` before the app starts.

    Attributes:
        kafka: librdkafka configuration of the consumer, with ``auto.offset.reset`` ``error``: where a partition starts
            is decided here, and a position that is gone must never be skipped unseen.
        max_held_bytes: Bytes that may be unacknowledged before fetching pauses.
        lock: Held while rows are written and their batch acknowledged, and during a commit, so that a commit never
            cuts between the two.
        commit: Commits offsets (next offset by partition) with everything written since the last commit; None commits
            them to the group alone.
        arriving: Told of each batch as it is handed over to its agent, which may be busy with others yet.
        prepare: Called each time that partitions have come, be it none, before their committed offsets are read:
            everything of before is void.
        start_offsets: Given what is committed of each assigned partition, returns where to start; partitions it leaves
            out start where committed, else at the beginning. Never called twice at once.
        lost: Told a partition and how many offsets the topic has lost (retention) before they could be read.
        release: Called when all partitions go (given them, and whether they are lost: then there is nothing left to
            commit), and before the worker ends; finishes what is under way. Returns False when what is written and
            what is acknowledged do not agree, so that nothing may be committed.
        abandon: Called where the worker ends after a failure: undoes what is not committed, so that readers of
            committed data need not wait until the broker does.
        begin_at: Finds where the group begins in partitions of which it has committed nothing, asked of the consumer on
            its own thread; None for the beginning. What it finds is committed at once: the next start must not find
            another place.
        has_failed: Set once a batch has failed half-way: nothing may be committed any more, the worker must end.
    """

    kafka: dict[str, Any]
    max_held_bytes: int = 64 * 2**20
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    commit: Callable[[Mapping[Partition, int]], Awaitable[None]] | None = None
    arriving: Callable[[RawBatch], None] | None = None
    prepare: Callable[[], Awaitable[None]] | None = None
    start_offsets: Callable[[Mapping[Partition, CommittedOffset]], Awaitable[Mapping[Partition, int]]] | None = None
    lost: Callable[[Partition, int], None] | None = None
    release: Callable[[set[Partition], bool], Awaitable[bool]] | None = None
    abandon: Callable[[], Awaitable[None]] | None = None
    begin_at: Callable[[Any, Collection[Partition]], dict[Partition, int]] | None = None
    has_failed: bool = False
