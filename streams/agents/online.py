"""The online role: feature rows, and the scores that use cases want, from their topics to the online store.

At least once over a guarded, idempotent write: a batch is acknowledged once the store has it. While the store is down,
the worker holds the batches it has, whose bytes the transport bounds (``ConsumerOptions.max_held_bytes``: fetching
pauses there), and the other rows wait in Kafka. How much the store holds is up to the views' ``ttl``.
"""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

import pyarrow as pa

from schemas.errors import ConfigError, SinkUnavailableError
from schemas.model import ModelSpec
from schemas.view import FeatureView
from streams.agents.feature_topic import decode_feature_rows
from streams.agents.worker import consume, consumer_config, create_app
from streams.batch import RawBatch
from streams.lineage.openlineage import LineageEmitter
from streams.observability.freshness import FreshnessObjectives
from streams.observability.metrics import Metrics
from streams.sinks.online import OnlineReader, OnlineWriter, WriteResult
from streams.sinks.rows import ORDER_COLUMNS
from streams.sinks.score_store import ScoreWriter
from streams.transport.options import ConsumerOptions

logger = logging.getLogger(__name__)

_MAX_RETRY_S = 2.0
_READ_BACK_S = 1.0


class OnlineWorker:
    """Keeps the online store at the newest row of each entity.

    Args:
        views: Views whose rows are stored.
        application: Name of the application, part of the consumer group's.
        brokers: Kafka bootstrap servers.
        writer: The online store.
        scores: Scores to keep: by topic their model, and for how many microseconds each stays.
        score_writer: Where they are kept; None where there are none.
        reader: Reads a written row back, once a second and view; None: nothing is read back.
        metrics: Where counts and freshness go.
        lineage: Where lineage goes.
        commit_interval_s: Seconds between offset commits.
    """

    def __init__(
        self,
        views: Sequence[FeatureView],
        *,
        application: str,
        brokers: str,
        writer: OnlineWriter,
        scores: Mapping[str, tuple[ModelSpec, int]] | None = None,
        score_writer: ScoreWriter | None = None,
        reader: OnlineReader | None = None,
        metrics: Metrics,
        lineage: LineageEmitter,
        commit_interval_s: float = 0.5,
    ) -> None:
        self._views = {view.topic: view for view in views}
        self._writer = writer
        self._scores = dict(scores or {})
        self._score_writer = score_writer
        self._metrics = metrics
        self._reader = reader
        self._freshness = FreshnessObjectives(views, metrics=metrics)
        self._read_back_s: dict[str, float] = {}
        self._lineage = lineage
        group = f"{application}.online"
        options = ConsumerOptions(kafka=consumer_config(group, brokers=brokers))
        self.app = create_app(
            "online",
            brokers=brokers,
            options=options,
            metrics=metrics,
            commit_interval_s=commit_interval_s,
            group=group,
        )
        for topic in self._views:
            consume(self.app, topic, self._handle)
        for topic in self._scores:
            consume(self.app, topic, self._handle_scores)

    async def _handle(self, event: Any) -> None:
        await self._store(event.value)
        event.ack()

    async def _handle_scores(self, event: Any) -> None:
        batch: RawBatch = event.value
        (model, keep_us), writer = self._scores[batch.topic], self._score_writer
        if writer is None:
            msg = f"there is no writer for {batch.topic}, expected `score_writer` where there are `scores`"
            raise ConfigError(msg)
        offsets = batch.offsets.tolist()
        await self._until_written(lambda: writer.write(batch.values, offsets=offsets, model=model, keep_us=keep_us))
        event.ack()

    async def _store(self, batch: RawBatch) -> None:
        view = self._views[batch.topic]
        found = decode_feature_rows(batch, view)
        self._metrics.rows_of_other_definitions("online", view.name, found.of_other_definitions)
        rows = found.rows
        started_us, started = time.time_ns() // 1_000, time.perf_counter()
        result = await self._until_written(lambda: self._writer.write(rows, view=view))
        stored_us = time.time_ns() // 1_000
        self._metrics.batch_processed("online", rows=len(batch), seconds=time.perf_counter() - started)
        self._metrics.online_written(view.name, written=result.written, superseded=result.superseded)
        broker_time = rows.column("broker_time")
        self._metrics.freshness(view.name, broker_time=broker_time, readable_time_us=stored_us)
        self._freshness.written(view.name, broker_time=broker_time, readable_time_us=stored_us)
        await self._read_back(rows, view)
        self._lineage.batch_done(
            "online",
            view=view,
            topic=batch.topic,
            partition=batch.partition,
            offsets=(int(batch.offsets[0]), batch.next_offset),
            rows=len(batch),
            output_rows=result.written,
            started_us=started_us,
        )

    async def _read_back(self, rows: pa.Table, view: FeatureView) -> None:
        """Read the newest row of the batch, as who asks for it would: what is acknowledged must be readable."""
        if self._reader is None or not rows.num_rows:
            return
        if time.monotonic() - self._read_back_s.get(view.name, -_READ_BACK_S) < _READ_BACK_S:
            return
        self._read_back_s[view.name] = time.monotonic()
        newest = rows.slice(rows.num_rows - 1).select([view.entity.key, *ORDER_COLUMNS, "broker_time"])
        times = [column.cast(pa.int64()) if pa.types.is_timestamp(column.type) else column for column in newest.columns]
        (row,) = pa.table(times, names=newest.column_names).to_pylist()
        try:
            (value,) = await self._reader.read(view, [row[view.entity.key]], now_us=time.time_ns() // 1_000)
        except SinkUnavailableError as exc:
            logger.warning("view %s: nothing could be read back: %s", view.name, exc)
            return
        read = (value.window_end_us, value.pane_index, value.source_offset)
        self._freshness.read_back(
            view.name,
            broker_time_us=row["broker_time"],
            read_time_us=time.time_ns() // 1_000,
            # A newer one may have come from another worker.
            is_there=None not in read and read >= tuple(row[name] for name in ORDER_COLUMNS),
        )

    async def _until_written(self, write: Callable[[], Awaitable[WriteResult]]) -> WriteResult:
        wait_s = 0.0
        while True:
            try:
                return await write()
            except SinkUnavailableError as exc:
                wait_s = min(max(exc.retry_after_ms / 1_000, wait_s * 2), _MAX_RETRY_S)
                self._metrics.store_retried("online", store="redis")
                logger.warning("online store unavailable, rows wait in Kafka, next try in %.1f s: %s", wait_s, exc)
                await asyncio.sleep(wait_s)
