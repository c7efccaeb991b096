"""The features role: raw events in, feature rows, dead letters and state out, one Kafka transaction an epoch.

Rows of sources that are not keyed by the entity go out to a repartition topic first, in the same transactions, and come
in again from there, in this worker or another.
"""

import asyncio
import logging
import math
import time
from collections import Counter, defaultdict
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from schemas.errors import WindowingError
from schemas.row import Pane
from schemas.topology import connect
from schemas.view import FeatureView
from streams.agents.dead_letter import write_dead_letter
from streams.agents.read_ahead import ReadAhead
from streams.agents.worker import consume, consumer_config, create_app, fail
from streams.agents.writer_schema import learn_writers
from streams.batch import RawBatch
from streams.lineage.openlineage import LineageEmitter
from streams.observability.metrics import Metrics
from streams.pipeline import PartitionPipeline, Processed, ViewStart, read_rows
from streams.repartition import ReadRows, Router, RouteState
from streams.state.changelog import Changelog, ViewState, read_states
from streams.state.route_log import count_partitions, read_routes, write_route
from streams.transport.epoch import Epoch
from streams.transport.options import CommittedOffset, ConsumerOptions, Delivery, Partition
from streams.wire import encode_keys, encode_rows

logger = logging.getLogger(__name__)

_STATE_INTERVAL_S = 2.0
_STATE_SHARE = 0.05
"""Of the time, what writing the state of a partition may take: a large state is written less often."""
_IDLE_POLL_S = 1.0
_ROWS_AT_ONCE = 50_000
"""Rows of output that are text at a time."""


@dataclass(kw_only=True)
class _Progress:
    """How far a partition has come.

    Attributes:
        next_offset: Source offset that is processed next.
        rejected_to: Source offset up to which rows that are bad for every view are on the dead-letter topic.
        changelogs: What is recorded of each view, by its name.
        begin: Source offset that the views begin at, until that is recorded; 0 where they began before.
        state_due_s: When changes of state are written next, by the monotonic clock.
    """

    next_offset: int
    rejected_to: int
    changelogs: dict[str, Changelog]
    begin: int = 0
    state_due_s: float = -math.inf


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
        delivery: How often a reader may see a row of an epoch that was done again.
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
        delivery: Delivery = Delivery.EXACTLY_ONCE,
    ) -> None:
        self._topology = connect(views)
        self._application = application
        self._partitions: Mapping[str, int] = {}
        self._kafka = {"bootstrap.servers": brokers}
        self._metrics = metrics
        self._lineage = lineage
        self._pipelines: dict[Partition, PartitionPipeline] = {}
        self._progress: dict[Partition, _Progress] = {}
        self._unwritten: set[Partition] = set()
        self._is_released = False
        group = f"{application}.features"
        self._options = ConsumerOptions(
            kafka=consumer_config(group, brokers=brokers),
            commit=self._commit,
            prepare=self._begin,
            start_offsets=self._restore,
            release=self._release,
            abandon=self._abandon,
        )
        self.app = create_app(
            "features",
            brokers=brokers,
            options=self._options,
            metrics=metrics,
            commit_interval_s=commit_interval_s,
            group=group,
            views={topic: [view.name for view in read] for topic, read in self._topology.views.items()},
        )
        self._lock = self._options.lock
        self._epoch = Epoch(
            self._kafka,
            transactional_id=f"headrace.{group}.{worker_id}",
            group_metadata=lambda: self.app.consumer.poller.group_metadata,
            delivery=delivery,
            before_commit=self._write_state,
        )
        self._learning = {topic: learn for topic in self._topology.topics if (learn := self._learn(topic)) is not None}
        self._read_ahead = ReadAhead(self._read)
        self._options.arriving = self._begin_reading
        for topic in self._topology.topics:
            before = self._learning.get(topic, self._read_ahead.until_read)
            consume(self.app, topic, self._handle, lock=self._lock, before=before)
        # A source that is routed says how many partitions it has before any of them has a row.
        sources = self._topology.sources.values()
        if self._topology.routes or any(source.idle_timeout_us is not None for source in sources):
            self.app.timer(interval=_IDLE_POLL_S)(self._poll_idle)

    def _learn(self, topic: str) -> Callable[[Any], Awaitable[None]] | None:
        """Make what waits for the schemas that payloads of a topic name; None where they name none."""
        own = self._topology.sources.get(topic)
        read = [own] if own is not None else self._topology.inputs[topic].sources
        if not any(source.schema.is_framed for source in read):
            return None

        async def learn(event: Any) -> None:
            await learn_writers(
                event.value,
                is_routed=own is None,
                is_wanted=lambda: not self._options.has_failed and bool(self.app.consumer.is_current(event)),
                metrics=self._metrics,
                role="features",
            )

        return learn

    def _begin_reading(self, batch: RawBatch) -> None:
        # What may name a schema that the registry has not told yet is read when it has.
        if batch.topic not in self._learning:
            self._read_ahead.begin(batch)

    def _read(self, batch: RawBatch) -> ReadRows:
        source = self._topology.inputs.get(batch.topic) or self._topology.sources[batch.topic]
        return read_rows(batch, source, application=self._application)

    async def _handle(self, event: Any) -> None:
        await self._process(event.value)
        event.ack()

    async def _process(self, batch: RawBatch) -> None:
        tp = (batch.topic, batch.partition)
        self._unwritten.add(tp)
        started = time.perf_counter()
        read = await self._read_ahead.take(batch)
        now_us = time.time_ns() // 1_000
        processed = self._pipelines[tp].process(
            batch, processing_time_us=now_us, computed_time_us=now_us, epoch=self._epoch.begin(), read=read
        )
        for view in self._views(batch.topic):
            await self._write_rows(view, processed.rows[view.name], partition=batch.partition)
        for topic, routed in processed.routed.items():
            # In the transaction, whatever the delivery: a row that came twice here would count twice.
            await self._epoch.write_rows(topic, partition=None, keys=routed.keys, values=routed.values, is_output=False)
        await self._write_dead_letters(processed)
        self._progress[tp].next_offset = batch.next_offset
        for view in self._views(batch.topic):
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

    def _views(self, topic: str) -> Sequence[FeatureView]:
        return self._topology.views.get(topic, ())

    async def _write_rows(self, view: FeatureView, rows: pa.Table, *, partition: int) -> None:
        # A tick may fire a pane for each key at once: as text they take many times the room of their columns.
        for start in range(0, rows.num_rows, _ROWS_AT_ONCE):
            part = rows.slice(start, _ROWS_AT_ONCE)
            keys, values = encode_keys(part.column(view.entity.key)), encode_rows(part)
            await self._epoch.write_rows(view.topic, partition=partition, keys=keys, values=values)

    async def _poll_idle(self) -> None:
        """Let the watermarks of idle partitions move on with the clock, each step and its rows in an epoch."""
        async with self._lock:
            if self._is_released or self._options.has_failed:
                return
            try:
                for tp in list(self._pipelines):
                    await self._poll_idle_partition(tp)
                if self._unwritten:
                    await self._commit({tp: self._progress[tp].next_offset for tp in self._unwritten})
            except Exception as exc:
                logger.exception("a step of an idle partition failed")
                await fail(self.app, exc)
                raise

    async def _poll_idle_partition(self, tp: Partition) -> None:
        topic, partition = tp
        now_us = time.time_ns() // 1_000
        steps = self._pipelines[tp].poll_idle(
            processing_time_us=now_us,
            computed_time_us=now_us,
            epoch=self._epoch.begin,
            is_caught_up=self.app.consumer.is_caught_up(tp),
        )
        pipeline = self._pipelines[tp]
        if any(router.has_news for router in pipeline.routers):
            self._unwritten.add(tp)
        for view in self._views(topic):
            if (step := steps.get(view.name)) is None:
                continue
            self._unwritten.add(tp)
            await self._progress[tp].changelogs[view.name].write_marker(step.marker)
            await self._write_rows(view, step.rows, partition=partition)
            self._metrics.rows_counted("features", view.name, asdict(step.counts))
            self._metrics.watermark(
                view.name, partition=partition, watermark_us=step.marker.watermark_us, computed_time_us=now_us
            )

    async def _write_dead_letters(self, processed: Processed) -> None:
        written: defaultdict[str, Counter[str]] = defaultdict(Counter)
        for letter in processed.dead_letters.to_pylist():
            batch, position = processed.read.record(letter.pop("_offset"))
            topic = self._topology.sources[batch.topic].dead_letter_topic
            await write_dead_letter(self._epoch, topic, batch, position, **letter)
            written[batch.topic][letter["reason"]] += 1
        for source, reasons in written.items():
            self._metrics.dead_letters(source, reasons)

    async def _commit(self, offsets: Mapping[Partition, int]) -> None:
        started = time.perf_counter()
        rejected_to = {tp: max(self._progress[tp].rejected_to, offset) for tp, offset in offsets.items()}
        await self._epoch.commit(offsets, metadata={tp: str(offset) for tp, offset in rejected_to.items()})
        self._unwritten -= offsets.keys()
        self._metrics.epoch_committed("features", seconds=time.perf_counter() - started)

    async def _write_state(self, offsets: Mapping[Partition, int]) -> None:
        # One partition's in an epoch, so that none of them waits for all.
        tp = min(offsets, key=lambda tp: self._progress[tp].state_due_s)
        if (started_s := time.monotonic()) >= self._progress[tp].state_due_s:
            for view, changelog in self._progress[tp].changelogs.items():
                await changelog.write_state(self._pipelines[tp].engines[view])
            ended_s = time.monotonic()
            pause_s = max(_STATE_INTERVAL_S, (ended_s - started_s) / _STATE_SHARE)
            self._progress[tp].state_due_s = ended_s + pause_s
        for tp, offset in offsets.items():
            progress = self._progress[tp]
            if progress.next_offset != offset:
                msg = f"{tp} is to be committed at {offset}, but its state is at {progress.next_offset}"
                raise WindowingError(msg)
            for changelog in progress.changelogs.values():
                if progress.begin:
                    await changelog.write_begin(progress.begin)
                await changelog.write_position(offset)
            progress.begin = 0
            for router in self._pipelines[tp].routers:
                await self._write_route(router, tp)

    async def _write_route(self, router: Router, tp: Partition) -> None:
        """Tell the partitions of a repartition topic what is new, and write how far this one has been routed."""
        if (heartbeat := router.heartbeat()) is not None:
            for partition in range(self._partitions[router.topic]):
                await self._epoch.write(router.topic, key=None, value=heartbeat, partition=partition)
        await write_route(
            self._epoch,
            router.view_input,
            router.state,
            application=self._application,
            source=tp[0],
            partition=tp[1],
        )

    async def _release(self, _: set[Partition], __: bool) -> bool:
        async with self._lock:
            self._is_released = True
        return True

    async def _abandon(self) -> None:
        await self._epoch.abort()

    async def _begin(self) -> None:
        async with self._lock:
            await self._epoch.start()
            self._read_ahead.forget()
            self._pipelines, self._progress, self._unwritten = {}, {}, set()
            self._is_released = False

    async def _restore(self, committed: Mapping[Partition, CommittedOffset]) -> dict[Partition, int]:
        wanted = [(view, partition) for topic, partition in committed for view in self._views(topic)]
        states = await asyncio.to_thread(read_states, self._kafka, wanted, on_progress=self._tell_restore)
        routes = await asyncio.to_thread(self._read_routes, {topic for topic, _ in committed})
        starts = {}
        for tp, found in committed.items():
            pipeline = await asyncio.to_thread(self._restore_partition, tp, found, states, routes)
            self._pipelines[tp] = pipeline
            starts[tp] = pipeline.resume_offset
        return starts

    def _tell_restore(self, view: str, partition: int, remaining: int) -> None:
        self._metrics.restoring(view, partition=partition, remaining=remaining)

    def _read_routes(self, topics: set[str]) -> dict[tuple[str, str, int], RouteState]:
        routed = {topic: ways for topic, ways in self._topology.routes.items() if topic in topics}
        ways = sorted({way for ways in routed.values() for way in ways})
        self._partitions = count_partitions(self._kafka, [*routed, *ways]) if routed else {}
        inputs = [self._topology.inputs[way] for way in ways]
        return read_routes(self._kafka, inputs, application=self._application)

    def _restore_partition(
        self,
        tp: Partition,
        committed: CommittedOffset,
        states: Mapping[tuple[str, int], ViewState],
        routes: Mapping[tuple[str, str, int], RouteState],
    ) -> PartitionPipeline:
        topic, partition = tp
        starts, changelogs = {}, {}
        is_known = any((view.name, partition) in states for view in self._views(topic))
        is_known |= any((way, topic, partition) in routes for way in self._topology.routes.get(topic, ()))
        # A group whose offsets have expired is none that begins: what its views and routers hold tells where they are.
        begin = 0 if is_known else committed.begin or 0
        for view in self._views(topic):
            state = states.get((view.name, partition), ViewState(begin=begin, emitted_to=begin))
            starts[view.name] = ViewStart(
                parts=state.parts, begin=state.begin, emit_from=state.emitted_to, markers=state.markers
            )
            changelogs[view.name] = Changelog(self._epoch, view, partition=partition, state=state)
        emitted_to = {name: start.emit_from for name, start in starts.items()}
        routers = {
            Router(
                self._topology.sources[topic],
                self._topology.inputs[way],
                partition=partition,
                n_partitions=self._partitions[topic],
                application=self._application,
                state=routes.get((way, topic, partition), RouteState(next_offset=begin)),
            ): self._topology.views[way]
            for way in self._topology.routes.get(topic, ())
        }
        emitted_to |= {router.topic: router.next_offset for router in routers}
        # Metadata of another writer is no number; what was emitted is then the least that was rejected too.
        rejected_to = max([int(committed.metadata) if committed.metadata.isdigit() else 0, *emitted_to.values()])
        pipeline = PartitionPipeline(
            self._topology.inputs.get(topic) or self._topology.sources[topic],
            self._views(topic),
            partition=partition,
            application=self._application,
            routers=routers,
            starts=starts,
            reject_from=rejected_to,
        )
        self._progress[tp] = _Progress(
            next_offset=pipeline.resume_offset, rejected_to=rejected_to, changelogs=changelogs, begin=begin
        )
        logger.info("%s-%d: from offset %d, rows go out from %s", topic, partition, pipeline.resume_offset, emitted_to)
        return pipeline

    def _measure(self, batch: RawBatch, processed: Processed, *, computed_us: int, seconds: float) -> None:
        self._metrics.batch_processed("features", rows=len(batch), seconds=seconds)
        for topic, routed in processed.routed.items():
            self._metrics.rows_routed(batch.topic, topic=topic, rows=len(routed.keys))
        for view, counts in processed.counts.items():
            self._metrics.rows_counted("features", view, asdict(counts))
            rows = processed.rows[view]
            newest = pc.max(rows.column("event_time").filter(pc.equal(rows.column("pane"), Pane.EARLY)))
            self._metrics.watermark(
                view,
                partition=batch.partition,
                watermark_us=processed.watermarks_us[view],
                computed_time_us=computed_us,
                event_time_us=newest.value,
            )
