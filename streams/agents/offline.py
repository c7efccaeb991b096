"""The offline role: feature rows and raw events to the offline store, gathered by size and time into few commits.

A batch is acknowledged once the commit that holds it stands. Each commit records the topic offset it reaches, so a
batch that comes again after a crash between the commit and the acknowledgement is left out.
"""

import asyncio
import contextlib
import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from schemas.errors import SinkConflictError, SinkUnavailableError
from schemas.view import FeatureView
from streams.agents.offline_part import Destination, TopicArchive, ViewTable
from streams.agents.worker import consume, consumer_config, create_app, fail
from streams.lineage.openlineage import LineageEmitter
from streams.observability.metrics import Metrics
from streams.sinks.archive import ArchiveWriter
from streams.sinks.offline import CommitResult, OfflineWriter
from streams.transport.options import ConsumerOptions, Partition

logger = logging.getLogger(__name__)

_MAX_RETRY_S = 2.0
_FLUSH_BYTES = 128 * 2**20


@dataclass
class _Gathered:
    events: list[Any] = field(default_factory=list)
    parts: list[Any] = field(default_factory=list)
    n_rows: int = 0
    n_bytes: int = 0
    since_s: float = 0.0


class OfflineWorker:
    """Appends every feature row, and every record of the topics that are archived, to the offline store once.

    Args:
        views: Views whose rows are stored.
        archived: Topics whose records are archived as they come.
        application: Name of the application, part of the consumer group's.
        brokers: Kafka bootstrap servers.
        writer: The offline store.
        archive: Where records are archived.
        metrics: Where counts go.
        lineage: Where lineage goes.
        flush_rows: Rows of a view and partition that make a commit.
        flush_interval_s: Seconds after which what there is makes a commit.
        commit_interval_s: Seconds between offset commits.
    """

    def __init__(
        self,
        views: Sequence[FeatureView],
        *,
        application: str,
        brokers: str,
        writer: OfflineWriter,
        archive: ArchiveWriter,
        archived: Sequence[str],
        metrics: Metrics,
        lineage: LineageEmitter,
        flush_rows: int = 50_000,
        flush_interval_s: float = 5.0,
        commit_interval_s: float = 0.5,
    ) -> None:
        self._tables: dict[str, Destination] = {view.topic: ViewTable(view, writer, metrics) for view in views}
        self._tables |= {topic: TopicArchive(topic, archive) for topic in archived}
        self._metrics = metrics
        self._lineage = lineage
        self._flush_rows = flush_rows
        self._flush_interval_s = flush_interval_s
        self._gathered: dict[Partition, _Gathered] = {}
        group = f"{application}.offline"
        options = ConsumerOptions(
            kafka=consumer_config(group, brokers=brokers),
            max_held_bytes=512 * 2**20,
            prepare=self._begin,
            release=self._release,
        )
        # Not the lock of the commit: that one need not wait for the store.
        self._lock = asyncio.Lock()
        self._released = asyncio.Event()
        self.app = create_app(
            "offline",
            brokers=brokers,
            options=options,
            metrics=metrics,
            commit_interval_s=commit_interval_s,
            group=group,
        )
        for topic in self._tables:
            consume(self.app, topic, self._gather, lock=self._lock)
        self.app.timer(interval=min(1.0, flush_interval_s))(self._flush_due)

    async def _begin(self) -> None:
        async with self._lock:
            self._gathered = {}
            self._released.clear()

    async def _gather(self, event: Any) -> None:
        if self._released.is_set():
            return  # what was gathered before it may not have been stored: it comes again
        batch = event.value
        part, n_rows = self._tables[batch.topic].take(batch)
        gathered = self._gathered.setdefault((batch.topic, batch.partition), _Gathered(since_s=time.monotonic()))
        gathered.events.append(event)
        gathered.parts.append(part)
        gathered.n_rows += n_rows
        gathered.n_bytes += batch.size_bytes
        if gathered.n_rows >= self._flush_rows or gathered.n_bytes >= _FLUSH_BYTES:
            await self._flush({(batch.topic, batch.partition)})

    async def _flush_due(self) -> None:
        now = time.monotonic()
        async with self._lock:
            if self._released.is_set():
                return
            due = {tp for tp, held in self._gathered.items() if now - held.since_s >= self._flush_interval_s}
            try:
                await self._flush(due)
            except Exception as exc:
                logger.exception("storing %s failed", sorted(due))
                await fail(self.app, exc)
                raise

    async def _release(self, partitions: set[Partition], lost: bool) -> bool:
        # From here on a write that finds the store unavailable gives up: its rows are stored by who has them next.
        self._released.set()
        async with self._lock:
            if not lost:
                await self._flush(partitions)
            self._gathered = {}
        return True

    async def _flush(self, partitions: set[Partition]) -> None:
        for tp in sorted(partitions & self._gathered.keys()):
            gathered = self._gathered[tp]
            table = self._tables[tp[0]]
            started_us, started = time.time_ns() // 1_000, time.perf_counter()
            result = await self._write(gathered, table, partition=tp[1])
            del self._gathered[tp]
            if result is None:
                continue
            for event in gathered.events:
                event.ack()
            seconds = time.perf_counter() - started
            self._metrics.batch_processed("offline", rows=gathered.n_rows, seconds=seconds)
            self._metrics.offline_committed(table.name, rows=result.rows, skipped=result.skipped, seconds=seconds)
            if table.view is None:
                continue  # an archive says itself what it is: every record, as it came
            self._lineage.batch_done(
                "offline",
                view=table.view,
                topic=tp[0],
                partition=tp[1],
                offsets=(int(gathered.events[0].value.offsets[0]), gathered.events[-1].value.next_offset),
                rows=gathered.n_rows,
                output_rows=result.rows,
                started_us=started_us,
            )

    async def _write(self, gathered: _Gathered, table: Destination, *, partition: int) -> CommitResult | None:
        """Store what is gathered; None where the partition goes before the store is available."""
        wait_s = 0.1
        while True:
            try:
                return await asyncio.to_thread(table.write, gathered.parts, partition=partition)
            except (SinkUnavailableError, SinkConflictError) as exc:
                if self._released.is_set():
                    return None
                wait_s = min(wait_s * 2, _MAX_RETRY_S)
                self._metrics.store_retried("offline", store="delta")
                logger.warning("offline store: next try in %.1f s: %s", wait_s, exc)
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self._released.wait(), wait_s)
