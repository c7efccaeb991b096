"""What the roles that read topics have in common: a Faust app over the columnar transport, and how it is run."""

import asyncio
import gc
import logging
import os
import threading
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import nullcontext
from typing import Any, Final

import faust

from streams.agents.watch import Watch
from streams.batch import RawBatch
from streams.observability.health import Health
from streams.observability.metrics import Metrics
from streams.transport.consumer import ColumnarSchema
from streams.transport.options import ConsumerOptions

logger = logging.getLogger(__name__)

_GC_THRESHOLDS: Final = (100_000, 20, 100)
DRAIN_S: Final = 12.0
"""Seconds from SIGTERM to the end of the process, at most."""


def collect_seldom() -> None:
    """Have the collector look seldom, and not at what is there already, for the rest of the process.

    Rows come and go by the ten thousand and are in no cycles: it would look at each again and again.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(*_GC_THRESHOLDS)


class _App(faust.App):  # type: ignore[misc]  # Faust has no type information
    """Faust's app, without its directories: what Headrace keeps is in Kafka."""

    def _create_directories(self) -> None:
        pass


def create_app(
    role: str,
    *,
    brokers: str,
    options: ConsumerOptions,
    metrics: Metrics,
    commit_interval_s: float,
    group: str | None = None,
    views: Mapping[str, Sequence[str]] | None = None,
) -> faust.App:
    """Make the Faust app of a role.

    Faust's tables, web views, topic declarations and leader topic are off: state, topics and metrics are Headrace's
    own. Its producer stays the stock one (aiokafka); rows leave in epochs.

    Args:
        role: features, online, offline or scoring.
        brokers: ``host:port[,host:port]``.
        options: How offsets are committed and where partitions start.
        metrics: Where offsets that were lost go.
        commit_interval_s: Seconds between commits.
        group: The consumer group is ``headrace.<group>``; the role when left out.
        views: Names of the views whose watermarks the role reports, by topic.
    """
    app = _App(
        f"headrace.{group or role}",
        broker_consumer=f"headrace://{brokers}",
        broker_producer=f"kafka://{brokers}",
        broker_commit_interval=commit_interval_s,
        broker_session_timeout=30.0,
        stream_buffer_maxsize=1,  # what waits is joined before it is handed over
        stream_recovery_delay=0.0,
        stream_wait_empty=False,
        topic_disable_leader=True,
        topic_allow_declare=False,
        web_enabled=False,
        autodiscover=False,
        store="memory://",
        debug=False,
    )
    app.headrace = options
    options.lost = lambda tp, offsets: metrics.offsets_lost(role, topic=tp[0], partition=tp[1], offsets=offsets)

    async def drain(*_: Any, **__: Any) -> None:
        await app.consumer.drain()

    # Faust ends the agents next, in the middle of a batch if need be, and the consumer after them.
    app.on_before_shutdown.connect(drain, weak=False)

    @app.on_partitions_revoked.connect  # type: ignore[untyped-decorator]
    async def forget_gauges(_: faust.App, revoked: set[Any], **__: Any) -> None:
        # Else what the new owner reports would stand beside what stands still here.
        for tp in revoked:
            reported = (views or {}).get(tp.topic, ())
            metrics.forget_partition(role, topic=tp.topic, partition=tp.partition, views=reported)

    return app


def consumer_config(group: str, *, brokers: str) -> dict[str, Any]:
    """Librdkafka configuration of a worker's consumer: committed data only, offsets committed by the worker alone."""
    return {
        "bootstrap.servers": brokers,
        "group.id": f"headrace.{group}",
        "client.id": f"headrace-{group}",
        "enable.auto.commit": False,
        "enable.auto.offset.store": False,
        "auto.offset.reset": "error",
        "isolation.level": "read_committed",
        "enable.partition.eof": True,
        "partition.assignment.strategy": "range",
        # Heartbeats have a thread of their own. A worker that was killed holds its group up for so long.
        "session.timeout.ms": 10_000,
        "max.poll.interval.ms": 300_000,
        "fetch.wait.max.ms": 20,
        "reconnect.backoff.ms": 500,
        "queued.max.messages.kbytes": 65_536,
        # A partition with enough in hand is not asked for more for so long: at the default, a second, a reader that is
        # faster than that runs dry.
        "fetch.queue.backoff.ms": 10,
    }


def consume(
    app: faust.App,
    topic: str,
    handle: Callable[[Any], Awaitable[None]],
    *,
    lock: asyncio.Lock | None = None,
    before: Callable[[Any], Awaitable[None]] | None = None,
) -> None:
    """Have an agent of ``app`` hand every event of ``topic`` to ``handle``, which acknowledges it when all is done.

    When that fails the worker ends: the event stays unacknowledged, nothing is committed any more, and the next worker
    does the batch again.

    Args:
        app: The app.
        topic: The topic.
        handle: Called with one event after the other.
        lock: Held meanwhile.
        before: Called with each event first, without the lock: it may wait for long.
    """
    options: ConsumerOptions = app.headrace

    async def agent(stream: faust.StreamT) -> None:
        async for event in stream.noack().events():
            if before is not None:
                await _guarded(before, event)
            async with lock or nullcontext():
                # Partitions may have gone while it waited. And Faust starts an agent that failed again.
                if options.has_failed or not app.consumer.is_current(event):
                    continue
                await _guarded(handle, event)

    async def _guarded(act: Callable[[Any], Awaitable[None]], event: Any) -> None:
        try:
            await act(event)
        except Exception as exc:
            batch: RawBatch = event.value
            offsets = f"{int(batch.offsets[0])} to {batch.next_offset - 1}"
            logger.exception("%s-%d, offsets %s: failed", batch.topic, batch.partition, offsets)
            await fail(app, exc)
            raise

    app.agent(app.topic(topic, schema=ColumnarSchema()), name=f"{app.conf.id}:{topic}")(agent)


async def fail(app: faust.App, error: Exception) -> None:
    """End the worker without committing anything more."""
    app.headrace.has_failed = True
    await app.crash(error)


class _Worker(faust.Worker):  # type: ignore[misc]  # Faust has no type information
    """Faust's worker, with an end: a drain that hangs, as on a broker that is gone, is cut off."""

    async def stop(self) -> None:
        """Stop everything inside the deadline."""
        _end_in_time()
        await super().stop()


def _end_in_time() -> None:
    cut_off = threading.Timer(DRAIN_S, _cut_off)
    cut_off.daemon = True
    cut_off.start()


def _cut_off() -> None:
    logger.error("not drained within %.0f s, ending at once; what is not committed will be done again", DRAIN_S)
    os._exit(1)


def run(
    app: faust.App, *, role: str, metrics: Metrics, health: Health, log_level: str, stall_timeout_s: float = 60.0
) -> None:
    """Run the app until SIGTERM or SIGINT, then drain and leave the group within :data:`DRAIN_S`; exits the process.

    A worker that failed, or that stands still for ``stall_timeout_s`` although there is work, exits with code 1, so
    that its supervisor starts it again.
    """
    watch = Watch(
        app,
        role=role,
        metrics=metrics,
        health=health,
        stall_timeout_s=stall_timeout_s,
        end_in_time=_end_in_time,
    )
    app.task(watch.start)
    collect_seldom()
    worker = _Worker(app, loglevel=log_level, redirect_stdouts=False, quiet=True, logging_config=None)
    worker.execute_from_commandline()
