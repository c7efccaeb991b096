"""The features role: raw events in, feature rows, dead letters and state out, one Kafka transaction an epoch."""

import asyncio
import logging
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from schemas.errors import ConfigError, WindowingError
from schemas.row import Pane
from schemas.source import EventSource
from schemas.view import FeatureView
from streams.agents.worker import consume, consumer_config, create_app
from streams.batch import RawBatch
from streams.lineage.openlineage import LineageEmitter
from streams.observability.metrics import Metrics
from streams.pipeline import PartitionPipeline, Processed, ViewStart
from streams.state.changelog import Snapshot, read_snapshot, write_snapshot
from streams.transport.consumer import ConsumerOptions, Partition
from streams.transport.epoch import Epoch
from streams.wire import encode_keys, encode_rows

logger = logging.getLogger(__name__)

_SNAPSHOT_INTERVAL_S = 10.0


class FeaturesWorker:
    """Computes the views of an application.

    Args:
        views: Views to compute; those over the same topic share one event source.
        application: Name of the application, part of the consumer group's and the transactional id.
        brokers: Kafka bootstrap servers.
        worker_id: Stable name of this worker among those of its role.
        metrics: Where counts and watermarks go.
        lineage: Where lineage goes.
        commit_interval_s: Seconds between epochs.
    """

    def __init__(
        self,
        views: Sequence[FeatureView],
        *,
        application: str,
        brokers: str,
        worker_id: str,
        metrics: Metrics,
        lineage: LineageEmitter,
        commit_interval_s: float = 0.1,
    ) -> None:
        self._views: dict[str, list[FeatureView]] = {}
        self._sources: dict[str, EventSource] = {}
        for view in views:
            topic = view.source.topic
            if self._sources.setdefault(topic, view.source) != view.source:
                msg = f"view {view.name} describes topic {topic} otherwise than another view; share one EventSource"
                raise ConfigError(msg)
            self._views.setdefault(topic, []).append(view)
        self._kafka = {"bootstrap.servers": brokers}
        self._metrics = metrics
        self._lineage = lineage
        self._pipelines: dict[Partition, PartitionPipeline] = {}
        self._next_offset: dict[Partition, int] = {}
        self._snapshot_at: dict[Partition, float] = {}
        group = f"{application}.features"
        options = ConsumerOptions(
            kafka=consumer_config(group, brokers=brokers),
            commit=self._commit,
            prepare=self._begin,
            start_offsets=self._restore,
        )
        self.app = create_app(
            "features",
            brokers=brokers,
            options=options,
            metrics=metrics,
            commit_interval_s=commit_interval_s,
            group=group,
            views={topic: [view.name for view in views] for topic, views in self._views.items()},
        )
        self._lock = options.lock
        self._epoch = Epoch(
            self._kafka,
            transactional_id=f"headrace.{group}.{worker_id}",
            group_metadata=lambda: self.app.consumer.poller.group_metadata,
            before_commit=self._write_snapshots,
        )
        for topic in self._sources:
            consume(self.app, topic, self._handle, lock=options.lock)

    async def _handle(self, event: Any) -> None:
        await self._process(event.value)
        event.ack()

    async def _process(self, batch: RawBatch) -> None:
        tp = (batch.topic, batch.partition)
        started = time.perf_counter()
        now_us = time.time_ns() // 1_000
        processed = self._pipelines[tp].process(
            batch, processing_time_us=now_us, computed_time_us=now_us, epoch=self._epoch.begin()
        )
        for view in self._views[batch.topic]:
            rows = processed.rows[view.name]
            await self._epoch.write_rows(
                view.topic,
                partition=batch.partition,
                keys=encode_keys(rows.column(view.entity.key)),
                values=encode_rows(rows),
            )
        await self._write_dead_letters(batch, processed.dead_letters)
        self._next_offset[tp] = batch.next_offset
        for view in self._views[batch.topic]:
            self._lineage.batch_done(
                "features",
                view=view,
                topic=batch.topic,
                partition=batch.partition,
                offsets=(int(batch.offsets[0]), batch.next_offset),
                rows=len(batch),
                output_rows=processed.rows[view.name].num_rows,
                started_us=now_us,
            )
        self._measure(batch, processed, computed_us=now_us, seconds=time.perf_counter() - started)

    async def _write_dead_letters(self, batch: RawBatch, dead_letters: pa.Table) -> None:
        positions = {int(offset): position for position, offset in enumerate(batch.offsets)}
        source = self._sources[batch.topic]
        for letter in dead_letters.to_pylist():
            position = positions[letter["_offset"]]
            headers = [*(batch.headers[position] or ()), *_dead_letter_headers(batch, letter)]
            await self._epoch.write(
                source.dead_letter_topic,
                key=batch.keys[position],
                value=batch.values[position],
                headers=headers,
            )

    async def _commit(self, offsets: Mapping[Partition, int]) -> None:
        started = time.perf_counter()
        await self._epoch.commit(offsets)
        self._metrics.epoch_committed("features", seconds=time.perf_counter() - started)

    async def _write_snapshots(self, offsets: Mapping[Partition, int]) -> None:
        now = time.monotonic()
        for tp, offset in offsets.items():
            if self._next_offset.get(tp) != offset:
                msg = f"{tp} is to be committed at {offset}, but its state is at {self._next_offset.get(tp)}"
                raise WindowingError(msg)
            if now - self._snapshot_at.get(tp, -math.inf) < _SNAPSHOT_INTERVAL_S:
                continue
            for view, state in self._pipelines[tp].snapshots().items():
                snapshot = Snapshot(state=state, next_offset=offset)
                await write_snapshot(self._epoch, view, partition=tp[1], snapshot=snapshot)
            self._snapshot_at[tp] = now

    async def _begin(self) -> None:
        async with self._lock:
            await self._epoch.start()
            self._pipelines, self._next_offset, self._snapshot_at = {}, {}, {}

    async def _restore(self, committed: Mapping[Partition, int | None]) -> dict[Partition, int]:
        starts = await asyncio.gather(
            *(self._restore_partition(tp, committed=offset) for tp, offset in committed.items())
        )
        return dict(zip(committed, starts, strict=True))

    async def _restore_partition(self, tp: Partition, *, committed: int | None) -> int:
        topic, partition = tp
        views = self._views[topic]
        snapshots = [
            await asyncio.to_thread(read_snapshot, self._kafka, view.name, partition=partition) for view in views
        ]
        view_starts = {
            view.name: ViewStart(
                state=snapshot.state if snapshot else None,
                next_offset=snapshot.next_offset if snapshot else 0,
                # Each partition's first epoch holds a snapshot: a view without one is new and emits from its start.
                emit_from=(committed or 0) if snapshot else 0,
            )
            for view, snapshot in zip(views, snapshots, strict=True)
        }
        pipeline = PartitionPipeline(
            self._sources[topic], views, partition=partition, starts=view_starts, reject_from=committed or 0
        )
        self._pipelines[tp] = pipeline
        logger.info("%s-%d: from offset %d, emitting from %s", topic, partition, pipeline.resume_offset, committed)
        return pipeline.resume_offset

    def _measure(self, batch: RawBatch, processed: Processed, *, computed_us: int, seconds: float) -> None:
        self._metrics.batch_processed("features", rows=len(batch), seconds=seconds)
        if processed.dead_letters.num_rows:
            self._metrics.dead_letters(batch.topic, processed.dead_letters.column("reason"))
        for view, counts in processed.counts.items():
            self._metrics.rows_counted("features", view, asdict(counts))
            rows = processed.rows[view]
            newest = pc.max(rows.filter(pc.equal(rows.column("pane"), Pane.EARLY)).column("event_time"))
            self._metrics.watermark(
                view,
                partition=batch.partition,
                watermark_us=processed.watermarks_us[view],
                computed_time_us=computed_us,
                event_time_us=newest.value,
            )


def _dead_letter_headers(batch: RawBatch, letter: Mapping[str, Any]) -> list[tuple[str, bytes]]:
    facts = {
        "reason": letter["reason"],
        "detail": letter["detail"],
        "topic": batch.topic,
        "partition": batch.partition,
        "offset": letter["_offset"],
        "late_by_us": letter["late_by_us"],
        "view": letter["view"],
    }
    return [(f"headrace.{name}", str(fact).encode()) for name, fact in facts.items() if fact is not None]
