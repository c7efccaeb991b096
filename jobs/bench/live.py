"""``headrace bench live``: the features role on a real Kafka, from raw events to committed feature rows.

The services, the events and the worker's process are the run's own. A worker starts on a topic that holds all events
already, and its speed is what it commits from its first epoch to the end: what a stream may reach before it lags. Its
rows are read back and compared with what polars computes before the time counts.
"""

import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import count
from pathlib import Path
from typing import Final

import pyarrow as pa
from confluent_kafka import Consumer, Producer, TopicPartition

from infra.local.process import ProcessIdentity, exit_code, read_lines, spawn, telling_lines, wait_until
from jobs.bench.ceiling import decode as read_events
from jobs.bench.ceiling import group
from jobs.bench.figure import Figure
from jobs.bench.job import KEYS, OUT_OF_ORDERNESS_MS, EventStream, make_view, to_json
from jobs.bench.witness import Witness
from jobs.settings import Settings
from jobs.topic_reader import read_topic
from jobs.topics import ensure_topics, plan_topics
from schemas.errors import ServiceError
from schemas.view import FeatureView
from streams.decoding import decode
from streams.wire import decode_rows

_PARTITIONS: Final = 4
_FILL_ROWS: Final = 100_000
_BATCH_ROWS: Final = 20_000
_WITNESSED: Final = 40
_POLL_S: Final = 0.02
_TIMEOUT_S: Final = 180.0
_GRACE_S: Final = 15.0

_NOT_PASSED_ON: Final = (
    "HEADRACE_KAFKA",
    "HEADRACE_REDIS",
    "HEADRACE_TRITON",
    "HEADRACE_DELTA",
    "HEADRACE_LINEAGE",
    "HEADRACE_APP",
)

Tell = Callable[[str], None]


@dataclass(frozen=True)
class Size:
    """How much a run measures: events on the topic, those that stock Faust gets of them, and rounds."""

    events: int
    peer_events: int
    rounds: int


_FULL: Final = Size(events=3_000_000, peer_events=4_000, rounds=3)
_QUICK: Final = Size(events=400_000, peer_events=1_500, rounds=1)


@dataclass
class Rig:
    """The job under one guarantee of delivery, and what its rounds took."""

    delivery: str
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
        self.topic = make_view("latest").source.topic
        self.n_events = n_events
        self._users = EventStream(KEYS).users[:: KEYS // _WITNESSED].to_pylist()

    def produce(self) -> None:
        """Put the events on their topic, each user's on one partition."""
        ensure_topics(self._brokers, plan_topics([make_view("latest")], []), partitions=_PARTITIONS)
        producer = Producer(
            {
                "bootstrap.servers": self._brokers,
                "partitioner": "murmur2_random",
                "linger.ms": 20,
                "batch.size": 2**20,
                "queue.buffering.max.messages": 1_000_000,
            }
        )
        stream = EventStream(KEYS)
        for batch in _batches(stream, self.n_events):
            rows = zip(batch["user_id"].to_pylist(), to_json(batch).splitlines(), strict=True)
            messages = [{"key": user.encode(), "value": value} for user, value in rows]
            if producer.produce_batch(self.topic, messages) != len(messages):
                msg = f"Kafka's client did not take all {len(messages)} events of a batch, expected room for them"
                raise ServiceError(msg)
            producer.flush()

    def run(self, rig: Rig) -> None:
        """Have a new worker do the job over all events, and check what it made of them."""
        number = next(self._numbers)
        view = replace(make_view("latest"), name=f"live_{number}")
        home = self._settings.home
        application = home / f"{view.name}.py"
        application.write_text(
            "from dataclasses import replace\n"
            "from jobs.bench.job import make_view\n"
            f'VIEWS = [replace(make_view("latest"), name="{view.name}")]\n'
        )
        environment = {**self._settings.environment, "HEADRACE_APP": str(application)}
        argv = [sys.executable, "-m", "jobs.cli", "worker", "--role", "features", "--metrics-port", "0"]
        log = home / "logs" / f"{view.name}.log"
        worker = spawn(argv, environment=environment, cwd=Path.cwd(), log=log)
        try:
            self._time(rig, worker, group=f"headrace.{view.name}.features", log=log)
        finally:
            worker.end(grace_s=_GRACE_S)
        rows = self._check(view)
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
        argv += [str(_PARTITIONS), str(n_events)]
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

    def _time(self, rig: Rig, worker: ProcessIdentity, *, group: str, log: Path) -> None:
        consumer = Consumer(
            {"bootstrap.servers": self._brokers, "group.id": group, "isolation.level": "read_uncommitted"}
        )
        partitions = [TopicPartition(self.topic, number) for number in range(_PARTITIONS)]
        process = worker.process()
        first: tuple[float, float, int] | None = None
        deadline_s = time.monotonic() + _TIMEOUT_S
        try:
            while process is not None and worker.is_alive():
                done = sum(max(0, tp.offset) for tp in consumer.committed(partitions, timeout=10.0))
                now_s = time.perf_counter()
                used = process.cpu_times()
                cpu_s = used.user + used.system
                if done and first is None:
                    first = (now_s, cpu_s, done)
                if done >= self.n_events and first is not None:
                    if not (n_events := done - first[2]):
                        msg = f"{done} events were done at once, expected so many that it takes a while"
                        raise ServiceError(msg)
                    rig.events_per_s.append(n_events / (now_s - first[0]))
                    rig.cpu_us.append((cpu_s - first[1]) / n_events * 1e6)
                    return
                if time.monotonic() > deadline_s:
                    msg = (
                        f"the worker has committed {done} of {self.n_events} events after {_TIMEOUT_S:.0f} s, see {log}"
                    )
                    raise ServiceError(msg)
                time.sleep(_POLL_S)
        finally:
            consumer.close()
        msg = f"the worker ended with exit code {exit_code(worker.pid)}; {log} ends with:\n"
        raise ServiceError(msg + telling_lines(read_lines(log, since_bytes=0)))

    def _check(self, view: FeatureView) -> int:
        witnesses = [
            Witness(self._users, out_of_orderness_us=OUT_OF_ORDERNESS_MS * 1_000, as_of="some")
            for _ in range(_PARTITIONS)
        ]
        nothing = view.row_schema.empty_table()
        for batch in read_topic(self._brokers, self.topic):
            witnesses[batch.partition].see(decode(batch, view.source.schema).rows, nothing)
        for batch in read_topic(self._brokers, view.topic):
            witnesses[batch.partition].see_rows(decode_rows(batch.values, view.row_schema))
        return sum(witness.check() for witness in witnesses)


@contextmanager
def _services(names: Sequence[str]) -> Iterator[Settings]:
    """Run services of this run's own, in a home that goes with it."""
    with tempfile.TemporaryDirectory(prefix="headrace-bench-") as home:
        kept = {name: value for name, value in os.environ.items() if name not in _NOT_PASSED_ON}
        settings = Settings.from_environment({**kept, "HEADRACE_HOME": home})
        services = settings.local_services()
        with services.guarded():
            services.up(names)
            yield settings


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
    rigs = [Rig("exactly_once")]
    size = _QUICK if quick else _FULL
    with _services(["kafka", "redis"]) as settings:
        bench = Bench(settings, n_events=size.events, tell=tell)
        tell(f"producing {bench.n_events:,} events")
        bench.produce()
        ceilings, peers = [], []
        for _ in range(size.rounds):
            ceilings.append(bench.ceiling())
            peers.append(bench.stock_faust(n_events=size.peer_events))
            tell(f"stock Faust: {peers[-1]:,.0f} events/s")
            for rig in rigs:
                bench.run(rig)
    ceiling, peer = (
        Figure(name="live.ceiling", value=statistics.median(ceilings), unit="events/s"),
        statistics.median(peers),
    )
    figures = [ceiling, Figure(name="live.stock_faust", value=peer, unit="events/s")]
    for rig in rigs:
        name, speed = f"live.{rig.delivery}", statistics.median(rig.events_per_s)
        figures += [
            Figure(
                name=name,
                value=speed,
                unit="events/s",
                bar=250_000,
                compared_with=ceiling.name,
                ratio=speed / ceiling.value,
            ),
            Figure(name=f"{name}.cpu", value=statistics.median(rig.cpu_us), unit="us/event"),
        ]
    times = statistics.median(rigs[0].events_per_s) / peer
    figures.append(
        Figure(
            name="live.times_stock_faust",
            value=times,
            unit="x",
            bar=20,
            compared_with="live.stock_faust",
            ratio=times,
        )
    )
    return figures
