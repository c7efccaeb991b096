"""The scoring role: as-of rows of a model's trigger view in, scores out, in the Kafka transaction of their offsets.

Rows gather into micro-batches until one is full or the first of its rows has waited long enough. While the online store
or the model server does not answer, rows wait in Kafka; a row whose score would be invalid becomes a dead letter.
"""

import asyncio
import contextlib
import logging
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, TypeVar

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from schemas.errors import InferenceTimeoutError, InferenceUnavailableError, SinkUnavailableError
from schemas.model import ModelSpec
from schemas.score import LATENCY_STAGES
from schemas.view import FeatureView
from streams.agents.dead_letter import write_dead_letter
from streams.agents.feature_topic import decode_feature_rows
from streams.agents.worker import consume, consumer_config, create_app, fail
from streams.batch import RawBatch
from streams.inference.batcher import MicroBatch, MicroBatcher
from streams.inference.score_table import encode_scores, with_total_latency
from streams.inference.scorer import Scored, Scorer
from streams.lineage.openlineage import LineageEmitter
from streams.observability.metrics import Metrics
from streams.transport.epoch import Epoch
from streams.transport.options import ConsumerOptions, Delivery, Partition

logger = logging.getLogger(__name__)

Answer = TypeVar("Answer")
MAX_BATCH_ROWS: Final = 4_096
_MAX_BATCH_BYTES: Final = 64 * 2**20
_MAX_WAIT_US: Final = 10_000
_MAX_SIDE_BY_SIDE: Final = 4
"""Batches that are scored at once: more would wait for the same server, and hold memory."""
_MAX_RETRY_S: Final = 2.0
_RELEASE_GRACE_S: Final = 5.0
_START_GRACE_S: Final = 10.0
"""How long the first rows wait for a model that is not there yet, before its ladder answers them."""
_UNAVAILABLE: Final = (InferenceUnavailableError, InferenceTimeoutError, SinkUnavailableError)


class _ReleasedError(Exception):
    """The partitions of a batch go, and the service that it needs does not answer."""


@dataclass(frozen=True, kw_only=True, eq=False)
class _Chunk:
    """Rows that came together, and the event to acknowledge when all of them are scored."""

    event: Any
    batch: RawBatch


class ScoringWorker:
    """Scores the rows of one model's trigger view.

    Args:
        model: The model's contract.
        view: Its trigger view.
        scorer: Turns rows into scores.
        connect: Makes the model server ready; called before the first row.
        follow: Follows the model's rollout until cancelled, given what tells whether this worker judges it.
        watch: Watches over the model's versions until cancelled.
        application: Name of the application, part of the consumer group's and the transactional id.
        brokers: Kafka bootstrap servers.
        worker_id: Stable name of this worker among those of its role.
        metrics: Where counts and latency go.
        lineage: Where lineage goes.
        commit_interval_s: Seconds between epochs.
        delivery: How often a reader may see a row of an epoch that was done again.
    """

    def __init__(
        self,
        model: ModelSpec,
        *,
        view: FeatureView,
        scorer: Scorer,
        connect: Callable[[], Awaitable[None]],
        follow: Callable[[Callable[[], bool]], Awaitable[None]],
        watch: Callable[[], Awaitable[None]],
        application: str,
        brokers: str,
        worker_id: str,
        metrics: Metrics,
        lineage: LineageEmitter,
        commit_interval_s: float = 0.1,
        delivery: Delivery = Delivery.EXACTLY_ONCE,
    ) -> None:
        self._model = model
        self._view = view
        self._scorer = scorer
        self._connect = connect
        self._follow_rollout = follow
        self._watch_versions = watch
        self._metrics = metrics
        self._lineage = lineage
        self._batcher = self._new_batcher()
        self._is_connected = False
        self._connecting = asyncio.Lock()
        self._released = asyncio.Event()
        # A batch was left out: what came after it must not be written either, since its offsets come later.
        self._is_cut = False
        # Of the scores in the open epoch: when their events came to the broker.
        self._uncommitted: list[pa.ChunkedArray] = []
        group = f"{application}.scoring.{model.name}"
        options = ConsumerOptions(
            kafka=consumer_config(group, brokers=brokers),
            commit=self._commit,
            prepare=self._begin,
            release=self._release,
            abandon=self._abandon,
        )
        self.app = create_app(
            "scoring",
            brokers=brokers,
            options=options,
            metrics=metrics,
            commit_interval_s=commit_interval_s,
            group=group,
        )
        # Scoring may wait long for a service. Commits go on meanwhile: only writing keeps them off.
        self._scoring = asyncio.Lock()
        self._lock = options.lock
        self._arrived = asyncio.Event()
        self._epoch = Epoch(
            {"bootstrap.servers": brokers},
            transactional_id=f"headrace.{group}.{worker_id}",
            group_metadata=lambda: self.app.consumer.poller.group_metadata,
            delivery=delivery,
        )
        consume(self.app, view.topic, self._handle, lock=self._scoring)
        self.app.task(self._score_when_due)
        self.app.task(self._follow)
        self.app.task(self._watch)

    async def _begin(self) -> None:
        async with self._scoring, self._lock:
            await self._epoch.start()
            self._batcher = self._new_batcher()
            self._uncommitted = []
            self._is_cut = False
            self._released.clear()

    async def _abandon(self) -> None:
        await self._epoch.abort()

    async def _release(self, _: set[Partition], lost: bool) -> bool:
        # From here on a batch that waits for a service gives up: who has its partition next scores it.
        self._released.set()
        async with self._scoring:
            if not lost and (batch := self._batcher.take()) is not None:
                await self._score_unless_released([batch])
            self._batcher = self._new_batcher()
            return True

    async def _handle(self, event: Any) -> None:
        if self._released.is_set():
            return
        found = decode_feature_rows(event.value, self._view)
        self._metrics.rows_of_other_definitions("scoring", self._view.name, found.of_other_definitions)
        chunk = _Chunk(event=event, batch=found.batch)
        batches = self._batcher.add(found.rows, chunk=chunk, now_us=time.monotonic_ns() // 1_000)
        # A commit must never cut through a chunk: what a full batch has left of it goes at once.
        if batches and (rest := self._batcher.take()) is not None:
            batches.append(rest)
        await self._score_unless_released(batches)
        self._arrived.set()

    async def _score_when_due(self) -> None:
        try:
            with contextlib.suppress(_ReleasedError):
                await self._until_connected()
            while not self.app.should_stop:
                due_us = self._batcher.next_deadline_us
                if due_us is None:
                    self._arrived.clear()
                    await self._arrived.wait()
                    continue
                await asyncio.sleep(max(0, due_us - time.monotonic_ns() // 1_000) / 1e6)
                async with self._scoring:
                    batch = self._batcher.take_due(time.monotonic_ns() // 1_000)
                    if batch is not None:
                        await self._score_unless_released([batch])
        except Exception as exc:
            logger.exception("scoring failed")
            await fail(self.app, exc)
            raise

    async def _follow(self) -> None:
        # One worker judges a rollout: whoever has this partition, which is always somebody's.
        judged_with = (self._view.topic, 0)
        try:
            await self._follow_rollout(lambda: judged_with in self.app.consumer.poller.assignment)
        except Exception as exc:
            logger.exception("following the rollout failed")
            await fail(self.app, exc)
            raise

    async def _watch(self) -> None:
        try:
            await self._watch_versions()
        except Exception as exc:
            logger.exception("watching the versions of the model failed")
            await fail(self.app, exc)
            raise

    async def _score_unless_released(self, batches: Sequence[MicroBatch[_Chunk]]) -> None:
        """Score batches and write all of them, or none, where their partitions go before they are scored."""
        if self._is_cut:
            return
        started_us = time.time_ns() // 1_000
        try:
            await self._until_connected()
            made = await self._score_side_by_side(batches)
        except _ReleasedError:
            self._is_cut = True
            return
        async with self._lock:
            for batch, scored in zip(batches, made, strict=True):
                await self._write(batch, scored)
        self._tell_lineage(batches, made, started_us=started_us)

    async def _score_side_by_side(self, batches: Sequence[MicroBatch[_Chunk]]) -> list[Scored]:
        """Score several batches: one is looked up while another is at the server; they are written in their order."""
        places = asyncio.Semaphore(_MAX_SIDE_BY_SIDE)

        async def score(batch: MicroBatch[_Chunk]) -> Scored:
            async with places:
                return await self._score(batch)

        tasks = [asyncio.ensure_future(score(batch)) for batch in batches]
        try:
            return list(await asyncio.gather(*tasks))
        finally:
            # Where one fails, none of the others goes on behind what comes next.
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _score(self, batch: MicroBatch[_Chunk]) -> Scored:
        started = time.perf_counter()
        scored = await self._until_available(
            lambda: self._scorer.score(
                batch.rows,
                now_us=time.time_ns() // 1_000,
                on_failure=lambda store: self._metrics.store_retried("scoring", store=store),
            )
        )
        self._metrics.batch_processed("scoring", rows=batch.rows.num_rows, seconds=time.perf_counter() - started)
        return scored

    async def _write(self, batch: MicroBatch[_Chunk], scored: Scored) -> None:
        broker_time = batch.rows["broker_time"].take(pa.array(scored.scored_rows))
        scores = with_total_latency(scored.scores, broker_time=broker_time, now_us=time.time_ns() // 1_000)
        await self._epoch.write_rows(
            self._model.topic,
            partition=None,
            keys=[entity.encode() for entity in scores["entity"].to_pylist()],
            values=encode_scores(scores),
        )
        await self._write_dead_letters(batch, scored.dead_letters)
        for chunk in batch.completed:
            chunk.event.ack()
        self._uncommitted.append(broker_time)
        self._measure(scores, scored)

    async def _write_dead_letters(self, batch: MicroBatch[_Chunk], dead_letters: pa.Table) -> None:
        starts = [span.start for span in batch.spans]
        for letter in dead_letters.to_pylist():
            row = letter["_row"]
            span = batch.spans[int(np.searchsorted(starts, row, side="right")) - 1]
            raw = span.chunk.batch
            position = row - span.start + span.start_in_chunk
            await write_dead_letter(
                self._epoch,
                self._model.dead_letter_topic,
                raw,
                position,
                reason=letter["reason"],
                detail=letter["detail"],
                view=self._view.name,
                request_id=batch.rows["request_id"][row].as_py(),
            )

    def _tell_lineage(self, batches: Sequence[MicroBatch[_Chunk]], made: Sequence[Scored], *, started_us: int) -> None:
        scores: Counter[int] = Counter()
        found = {version for scored in made for version in pc.unique(scored.scores["model_version"]).to_pylist()}
        versions = ", ".join(sorted(found, key=int)) or self._scorer.arms.entry.state.champion.version
        for batch, scored in zip(batches, made, strict=True):
            for span in batch.spans:
                first, last = np.searchsorted(scored.scored_rows, [span.start, span.start + span.n_rows])
                scores[id(span.chunk)] += int(last - first)
            for chunk in batch.completed:
                self._lineage.scores_done(
                    self._model,
                    view=self._view,
                    partition=chunk.batch.partition,
                    offsets=(int(chunk.batch.offsets[0]), chunk.batch.next_offset),
                    rows=len(chunk.batch),
                    scores=scores[id(chunk)],
                    started_us=started_us,
                    model_version=versions,
                )

    async def _commit(self, offsets: Mapping[Partition, int]) -> None:
        started = time.perf_counter()
        await self._epoch.commit(offsets)
        self._metrics.epoch_committed("scoring", seconds=time.perf_counter() - started)
        committed_us = time.time_ns() // 1_000
        for broker_time in self._uncommitted:
            self._metrics.score_committed(self._model.name, broker_time=broker_time, committed_time_us=committed_us)
        self._uncommitted = []

    async def _until_connected(self) -> None:
        async with self._connecting:
            if not self._is_connected:
                patience_s = None if self._model.rungs.is_empty else _START_GRACE_S
                try:
                    await self._until_available(self._connect_once, patience_s=patience_s)
                except _UNAVAILABLE as exc:
                    logger.warning("scoring begins without the model, by what stands in for it: %s", exc)
                self._is_connected = True

    async def _connect_once(self) -> None:
        try:
            await self._connect()
        except _UNAVAILABLE:
            self._metrics.store_retried("scoring", store="triton")
            raise

    async def _until_available(
        self, call: Callable[[], Awaitable[Answer]], *, patience_s: float | None = None
    ) -> Answer:
        """Call until the service answers.

        Raises:
            _ReleasedError: The partitions go before it does.
            InferenceUnavailableError, InferenceTimeoutError, SinkUnavailableError: Patience ends before it does.
        """
        wait_s, began_s = 0.25, time.monotonic()
        while True:
            try:
                return await self._unless_released(call())
            except _UNAVAILABLE as exc:
                if self._released.is_set():
                    raise _ReleasedError from exc
                wait_s = min(wait_s * 2, _MAX_RETRY_S)
                if patience_s is not None and time.monotonic() + wait_s > began_s + patience_s:
                    raise
                store = "redis" if isinstance(exc, SinkUnavailableError) else "triton"
                logger.warning("scoring waits for %s, next try in %.1f s: %s", store, wait_s, exc)
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self._released.wait(), wait_s)

    async def _unless_released(self, call: Awaitable[Answer]) -> Answer:
        answer = asyncio.ensure_future(call)
        released = asyncio.ensure_future(self._released.wait())
        try:
            await asyncio.wait({answer, released}, return_when=asyncio.FIRST_COMPLETED)
            if not answer.done():
                await asyncio.wait({answer}, timeout=_RELEASE_GRACE_S)
            if not answer.done():
                raise _ReleasedError
            return answer.result()
        finally:
            answer.cancel()
            released.cancel()

    def _measure(self, scores: pa.Table, scored: Scored) -> None:
        for (arm, served_by), (complete, incomplete) in _counted(scores).items():
            self._metrics.scored(
                self._model.name, arm=arm, served_by=served_by, complete=complete, incomplete=incomplete
            )
        for (cause, served_by), rows in scored.fallen.items():
            self._metrics.fell_back(self._model.name, cause=cause, served_by=served_by, rows=rows)
        for stage in LATENCY_STAGES:
            latency_ms = pc.struct_field(scores["latency_ms"], stage).to_numpy()
            self._metrics.score_latency(self._model.name, stage=stage, seconds=latency_ms / 1_000)
        counts = {"scored": scores.num_rows, "dead_letter": scored.dead_letters.num_rows}
        self._metrics.rows_counted("scoring", self._view.name, counts)
        for reason, rows in scored.ignored.items():
            self._metrics.rows_counted("scoring", self._view.name, {"ignored": rows}, reason=reason)
        if scored.dead_letters.num_rows:
            self._metrics.dead_letters(self._view.topic, scored.dead_letters["reason"])

    @staticmethod
    def _new_batcher() -> MicroBatcher[_Chunk]:
        return MicroBatcher(max_rows=MAX_BATCH_ROWS, max_bytes=_MAX_BATCH_BYTES, max_wait_us=_MAX_WAIT_US)


def _counted(scores: pa.Table) -> dict[tuple[str, str], tuple[int, int]]:
    """Count scores by arm and by what served them: those with every feature, and those without."""
    groups = scores.group_by(["arm", "served_by", "complete"]).aggregate([([], "count_all")]).to_pylist()
    counts: dict[tuple[str, str], tuple[int, int]] = {}
    for group in groups:
        complete, incomplete = counts.get((group["arm"], group["served_by"]), (0, 0))
        if group["complete"]:
            complete += group["count_all"]
        else:
            incomplete += group["count_all"]
        counts[group["arm"], group["served_by"]] = (complete, incomplete)
    return counts
