"""``headrace bench live``: the features role on a real Kafka, from raw events to committed feature rows.

The services, the events and the worker's process are the run's own. A worker starts on a topic that holds all events
already, and its speed is what it commits from its first epoch to the end: what a stream may reach before it lags. Its
rows are read back and compared with what polars computes before the time counts. Both guarantees of delivery take
turns. Latency is measured at a fixed rate, with workers of all roles between an event and its score
(:mod:`jobs.bench.latency`).
"""

import statistics
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Final

import pyarrow as pa

from infra.local.process import read_lines, spawn, telling_lines, wait_until
from jobs.bench.ceiling import decode as read_events
from jobs.bench.ceiling import group
from jobs.bench.figure import Figure
from jobs.bench.job import KEYS, OUT_OF_ORDERNESS_MS, EventStream, make_view
from jobs.bench.latency import measure as measure_latency
from jobs.bench.live_worker import PARTITIONS, LiveWorker
from jobs.bench.own_services import event_producer, own_services, send
from jobs.bench.witness import Witness
from jobs.settings import Settings
from jobs.topic_reader import read_topic
from jobs.topics import ensure_topics, plan_topics
from schemas.errors import ServiceError
from schemas.view import FeatureView
from streams.decoding import decode
from streams.transport.options import Delivery
from streams.wire import decode_rows

_FILL_ROWS: Final = 100_000
_BATCH_ROWS: Final = 20_000
WITNESSED: Final = 40
_POLL_S: Final = 0.02
_TIMEOUT_S: Final = 180.0
_GRACE_S: Final = 15.0

Tell = Callable[[str], None]


@dataclass(frozen=True)
class Size:
    """How much a run measures: events, those that stock Faust gets of them, rounds, and seconds of latency."""

    events: int
    peer_events: int
    rounds: int
    latency_s: float


_FULL: Final = Size(events=3_000_000, peer_events=4_000, rounds=3, latency_s=70.0)
_QUICK: Final = Size(events=300_000, peer_events=1_000, rounds=1, latency_s=6.0)


@dataclass
class Rig:
    """The job under one guarantee of delivery, and what its rounds took."""

    delivery: Delivery
    events_per_s: list[float] = field(default_factory=list)
    cpu_us: list[float] = field(default_factory=list)


class Bench:
    """Local services of one run, with the events of the job on their Kafka.

    Args:
        settings: Of the run, with a home of its own.
        n_events: Events on the topic.
        tell: Takes a line of progress.
    """

    def __init__(self, settings: Settings, *, n_events: int, tell: Tell) -> None:
        self._settings = settings
        self._brokers = settings.address("kafka")
        self._numbers = count(1)
        self._tell = tell
        self.topic = make_view("latest").sources[0].topic
        self.n_events = n_events
        self._users = EventStream(KEYS).users[:: KEYS // WITNESSED].to_pylist()

    def produce(self) -> None:
        """Put the events on their topic, each user's on one partition."""
        ensure_topics(self._brokers, plan_topics([make_view("latest")], []), partitions=PARTITIONS)
        producer = event_producer(self._brokers)
        stream = EventStream(KEYS)
        for batch in _batches(stream, self.n_events):
            send(producer, self.topic, batch)
            producer.flush()

    def run(self, rig: Rig) -> None:
        """Have a new worker do the job over all events, and check what it made of them."""
        with LiveWorker(self._settings, f"live_{next(self._numbers)}", delivery=rig.delivery) as worker:
            self._time(rig, worker)
        rows = self._check(worker.view)
        self._tell(
            f"{rig.delivery}: {rig.events_per_s[-1]:,.0f} events/s, {rig.cpu_us[-1]:.2f} us of processor time each; "
            f"{rows:,} rows are what polars computes"
        )

    def ceiling(self) -> float:
        """Tell how many events a second one process consumes, decodes and groups by key and tile; nothing else."""
        started_s, n_events = time.perf_counter(), 0
        for batch in read_topic(self._brokers, self.topic):
            group(read_events(b"\n".join(value for value in batch.values if value is not None)))
            n_events += len(batch)
        return n_events / (time.perf_counter() - started_s)

    def stock_faust(self, *, n_events: int) -> float:
        """Tell how many events a second a stock Faust application does."""
        argv = [sys.executable, "-m", "jobs.bench.stock_faust", self._brokers, self.topic]
        argv += [str(PARTITIONS), str(n_events)]
        log = self._settings.home / "logs" / "stock_faust.log"
        process = spawn(argv, environment=self._settings.environment, cwd=Path.cwd(), log=log)
        try:
            if not wait_until(lambda: not process.is_alive(), timeout_s=_TIMEOUT_S):
                msg = f"stock Faust has not done {n_events} events within {_TIMEOUT_S:.0f} s, see {log}"
                raise ServiceError(msg)
        finally:
            process.end(grace_s=_GRACE_S)
        lines = read_lines(log, since_bytes=0)
        try:
            return float(lines[-1])
        except (IndexError, ValueError) as exc:
            msg = f"stock Faust ended without a figure; {log} ends with:\n{telling_lines(lines)}"
            raise ServiceError(msg) from exc

    def _time(self, rig: Rig, worker: LiveWorker) -> None:
        first: tuple[float, float, int] | None = None
        deadline_s = time.monotonic() + _TIMEOUT_S
        while time.monotonic() < deadline_s:
            n_done, now_s, cpu_s = worker.n_committed(), time.perf_counter(), worker.cpu_s()
            if n_done and first is None:
                first = now_s, cpu_s, n_done
            if n_done >= self.n_events and first is not None:
                if not (n_events := n_done - first[2]):
                    msg = f"{n_done} events were done at once, expected so many that it takes a while"
                    raise ServiceError(msg)
                rig.events_per_s.append(n_events / (now_s - first[0]))
                rig.cpu_us.append((cpu_s - first[1]) / n_events * 1e6)
                return
            time.sleep(_POLL_S)
        msg = f"the worker has committed {n_done} of {self.n_events} events after {_TIMEOUT_S:.0f} s"
        raise ServiceError(msg)

    def _check(self, view: FeatureView) -> int:
        witnesses = [
            Witness(self._users, out_of_orderness_us=OUT_OF_ORDERNESS_MS * 1_000, as_of="some")
            for _ in range(PARTITIONS)
        ]
        nothing = view.row_schema.empty_table()
        for batch in read_topic(self._brokers, self.topic):
            witnesses[batch.partition].see(decode(batch, view.sources[0].schema).rows, nothing)
        for batch in read_topic(self._brokers, view.topic):
            witnesses[batch.partition].see_rows(decode_rows(batch.values, view.row_schema))
        return sum(witness.check() for witness in witnesses)


def _batches(stream: EventStream, n_events: int) -> Iterator[pa.Table]:
    yield from stream.fill(_FILL_ROWS)
    while stream.n_rows < n_events:
        yield stream.batch(min(_BATCH_ROWS, n_events - stream.n_rows))


def run(*, quick: bool, tell: Tell) -> list[Figure]:
    """Measure the features role.

    Args:
        quick: Fewer events and one round.
        tell: Takes a line of progress.

    Raises:
        ServiceError: A service or the worker fails.
        WindowingError: The worker's rows are wrong.
    """
    rigs = [Rig(delivery) for delivery in Delivery]
    size = _QUICK if quick else _FULL
    with own_services(["kafka", "redis"]) as settings:
        bench = Bench(settings, n_events=size.events, tell=tell)
        tell(f"producing {bench.n_events:,} events")
        bench.produce()
        ceilings, peers = [], []
        for number in range(size.rounds):
            ceilings.append(bench.ceiling())
            peers.append(bench.stock_faust(n_events=size.peer_events))
            tell(f"stock Faust: {peers[-1]:,.0f} events/s")
            for rig in rigs if number % 2 else reversed(rigs):
                bench.run(rig)
    ceiling, peer = (
        Figure(name="live.ceiling", value=statistics.median(ceilings), unit="events/s"),
        statistics.median(peers),
    )
    figures = [ceiling, Figure(name="live.stock_faust", value=peer, unit="events/s")]
    speeds = {rig.delivery: statistics.median(rig.events_per_s) for rig in rigs}
    for rig in rigs:
        name = f"live.{rig.delivery}"
        figures += [
            Figure(
                name=name,
                value=speeds[rig.delivery],
                unit="events/s",
                bar=250_000 if rig.delivery is Delivery.EXACTLY_ONCE else None,
                compared_with=ceiling.name,
                ratio=speeds[rig.delivery] / ceiling.value,
            ),
            Figure(name=f"{name}.cpu", value=statistics.median(rig.cpu_us), unit="us/event"),
        ]
    exactly_once = speeds[Delivery.EXACTLY_ONCE]
    figures += [
        _times("live.times_at_least_once", exactly_once / speeds[Delivery.AT_LEAST_ONCE], 0.9, "live.at_least_once"),
        _times("live.times_stock_faust", exactly_once / peer, 20, "live.stock_faust"),
    ]
    return [*figures, *measure_latency(seconds=size.latency_s, tell=tell)]


def _times(name: str, times: float, bar: float, compared_with: str) -> Figure:
    return Figure(name=name, value=times, unit="x", bar=bar, compared_with=compared_with, ratio=times)
