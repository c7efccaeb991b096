"""The scoring role: as-of rows of a model's trigger view in, scores out, in the Kafka transaction of their offsets.

Rows gather into micro-batches, across what is read at once, until one is full or the first of its rows has to go.
Several are on the way at once: while one is at the model server, others are looked up, and more rows are read. They are
written in their order, and what was read together is acknowledged once all its scores are written. While the online
store or the model server does not answer, rows wait in Kafka; a row whose score would be invalid becomes a dead letter.
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
from streams.inference.deadline import Pace, wait_us
from streams.inference.in_flight import InFlight
from streams.inference.outbox import Outbox, Part
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
"""How long a row waits for others where its model promises no freshness."""
_MAX_IN_FLIGHT: Final = 4
"""Batches on the way at once: more would wait for the same server, and hold memory."""
_MAX_RETRY_S: Final = 2.0
_RELEASE_GRACE_S: Final = 5.0
_START_GRACE_S: Final = 10.0
"""How long the first rows wait for a model that is not there yet, before its ladder answers them."""
_UNAVAILABLE: Final = (InferenceUnavailableError, InferenceTimeoutError, SinkUnavailableError)


class _ReleasedError(Exception):
    """The partitions of a batch go, and the service that it needs does not answer."""


@dataclass(frozen=True, kw_only=True, eq=False)
class _Chunk:
    """Rows that came together, when, and the event to acknowledge when all of them are scored."""

    event: Any
    batch: RawBatch
    came_us: int


@dataclass(frozen=True, kw_only=True)
class _Made:
    """What became of a batch, and when that was begun, by the monotonic clock."""

    scored: Scored
    began_us: int


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
        self._is_connected = False
        self._connecting = asyncio.Lock()
        self._released = asyncio.Event()
        self._arrived = asyncio.Event()
        self._begin_anew()
        # How long a batch and a commit take, and how long a commit may be waited for.
        self._scoring_pace, self._commit_pace = Pace(), Pace()
        self._commit_interval_us = int(commit_interval_s * 1e6)
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

    def _begin_anew(self) -> None:
        self._batcher = MicroBatcher[_Chunk](
            max_rows=MAX_BATCH_ROWS,
            max_bytes=_MAX_BATCH_BYTES,
            max_wait_us=_MAX_WAIT_US if self._model.freshness_us is None else self._model.freshness_us,
        )
        self._outbox = Outbox[_Chunk]()
        self._in_flight = InFlight[MicroBatch[_Chunk], _Made](
            self._score, hand_on=self._hand_on, places=_MAX_IN_FLIGHT, failed=self._arrived.set
        )

    async def _begin(self) -> None:
        async with self._scoring, self._lock:
            await self._in_flight.cancel()
            await self._epoch.start()
            self._begin_anew()
            self._uncommitted = []
            self._released.clear()

    async def _abandon(self) -> None:
        await self._in_flight.cancel()
        await self._epoch.abort()

    async def _release(self, _: set[Partition], lost: bool) -> bool:
        # From here on a batch that waits for a service gives up: who has its partition next scores it and what follows.
        self._released.set()
        async with self._scoring:
            if lost:
                async with self._lock:  # none of them is half written
                    await self._in_flight.cancel()
            else:
                with contextlib.suppress(_ReleasedError):
                    if (batch := self._batcher.take()) is not None:
                        await self._in_flight.put(batch)
                    await self._in_flight.settle()
            self._begin_anew()
            return True

    async def _handle(self, event: Any) -> None:
        if self._released.is_set():
            return
        found = decode_feature_rows(event.value, self._view)
        self._metrics.rows_of_other_definitions("scoring", self._view.name, found.of_other_definitions)
        came_us, now_us = time.time_ns() // 1_000, time.monotonic_ns() // 1_000
        chunk = _Chunk(event=event, batch=found.batch, came_us=came_us)
        may_wait_us = self._may_wait_us(found.rows, now_us=came_us)
        deadline_us = None if may_wait_us is None else now_us + may_wait_us
        batches = self._batcher.add(found.rows, chunk=chunk, now_us=now_us, deadline_us=deadline_us)
        self._arrived.set()
        with contextlib.suppress(_ReleasedError):
            for batch in batches:
                await self._in_flight.put(batch)

    def _may_wait_us(self, rows: pa.Table, *, now_us: int) -> int | None:
        """Tell how long rows may wait for others and still be scored in time; no longer than they would anyway."""
        if self._model.freshness_us is None:
            return None
        reserve_us = self._scoring_pace.us + self._commit_pace.us + self._commit_interval_us
        found_us = wait_us(rows, freshness_us=self._model.freshness_us, reserve_us=reserve_us, now_us=now_us)
        return _MAX_WAIT_US if found_us is None else found_us

    async def _score_when_due(self) -> None:
        try:
            with contextlib.suppress(_ReleasedError):
                await self._until_connected()
            while not self.app.should_stop:
                with contextlib.suppress(_ReleasedError):
                    await self._score_next()
        except Exception as exc:
            logger.exception("scoring failed")
            await fail(self.app, exc)
            raise

    async def _score_next(self) -> None:
        """Wait until rows are due, and score them; or until others have come, which may be due sooner."""
        self._arrived.clear()
        try:
            self._in_flight.check()
        except _ReleasedError:
            await self._arrived.wait()
            return
        due_us = self._batcher.next_deadline_us
        left_s = None if due_us is None else (due_us - time.monotonic_ns() // 1_000) / 1e6
        if left_s is None or left_s > 0:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._arrived.wait(), left_s)
            return
        # A batch that is due and finds no place goes on filling.
        await self._in_flight.room()
        async with self._scoring:
            if (batch := self._batcher.take_due(time.monotonic_ns() // 1_000)) is not None:
                await self._in_flight.put(batch)

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

    async def _score(self, batch: MicroBatch[_Chunk]) -> _Made:
        await self._until_connected()
        began_us = time.monotonic_ns() // 1_000
        scored = await self._until_available(
            lambda: self._scorer.score(
                batch.rows,
                now_us=time.time_ns() // 1_000,
                on_failure=lambda store: self._metrics.store_retried("scoring", store=store),
            )
        )
        seconds = (time.monotonic_ns() // 1_000 - began_us) / 1e6
        self._metrics.batch_processed("scoring", rows=batch.rows.num_rows, seconds=seconds)
        return _Made(scored=scored, began_us=began_us)

    async def _hand_on(self, batch: MicroBatch[_Chunk], made: _Made) -> None:
        """Write the scores of the chunks that the batch completes, and acknowledge them, with no commit between."""
        parts = self._outbox.add(batch, made.scored)
        async with self._lock:
            for part in parts:
                await self._write(part.batch, part.scored)
            for chunk in batch.completed:
                chunk.event.ack()
        self._scoring_pace.took(time.monotonic_ns() // 1_000 - made.began_us)
        self._tell_lineage(parts, batch.completed)

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

    def _tell_lineage(self, parts: Sequence[Part[_Chunk]], completed: Sequence[_Chunk]) -> None:
        scores: Counter[int] = Counter()
        found = {version for part in parts for version in pc.unique(part.scored.scores["model_version"]).to_pylist()}
        versions = ", ".join(sorted(found, key=int)) or self._scorer.arms.entry.state.champion.version
        for part in parts:
            for span in part.batch.spans:
                first, last = np.searchsorted(part.scored.scored_rows, [span.start, span.start + span.n_rows])
                scores[id(span.chunk)] += int(last - first)
        for chunk in completed:
            self._lineage.scores_done(
                self._model,
                view=self._view,
                partition=chunk.batch.partition,
                offsets=(int(chunk.batch.offsets[0]), chunk.batch.next_offset),
                rows=len(chunk.batch),
                scores=scores[id(chunk)],
                started_us=chunk.came_us,
                model_version=versions,
            )

    async def _commit(self, offsets: Mapping[Partition, int]) -> None:
        started = time.perf_counter()
        await self._epoch.commit(offsets)
        seconds = time.perf_counter() - started
        self._commit_pace.took(int(seconds * 1e6))
        self._metrics.epoch_committed("scoring", seconds=seconds)
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
