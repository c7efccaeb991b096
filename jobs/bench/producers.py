"""``headrace bench producers``: events over HTTP, to a server, a Kafka and a Redis of the run's own.

The server is a worker of the role ``serve`` as it ships, with a key, limits and all; callers keep their connections.
What is measured is how long a caller waits for the answer, which comes once Kafka has the event, and how many go
through with many callers; beside it, the same events by Kafka's own client from the same machine. Callers, server,
Kafka and Redis share its cores, so the server's own processor time stands beside: on a machine that is busy with
other things that is what can be compared. After each round what is on the topic is compared with what was accepted,
before its time counts.
"""

import asyncio
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AsyncExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, Self
from uuid import uuid4

import psutil

from infra.local.port import accepts_connections, choose_ports
from infra.local.process import read_lines, spawn, telling_lines, wait_until
from jobs.bench.figure import Figure
from jobs.bench.job import KEYS, EventStream, make_view, to_json
from jobs.bench.own_services import event_producer, own_services, send
from jobs.settings import Settings
from jobs.topic_reader import end_offsets
from jobs.topics import ensure_topics, plan_topics
from schemas.errors import ServiceError, SinkError
from schemas.event_rate import MAX_EVENT_RATE
from schemas.time import format_rfc3339
from streams.serving.producer_key import ALL_SOURCES, ProducerKey, Rate, digest_of, make_secret
from streams.serving.producer_store import ProducerStore

PARTITIONS: Final = 4
_ALONE: Final = 300
"""Requests of one caller in a round."""
_TOGETHER: Final = 3_000
"""Requests of all callers in a round."""
_CALLERS: Final = 32
_BATCHES: Final = 60
_BATCH_CALLERS: Final = 4
_BATCH_EVENTS: Final = 1_000
_ROUNDS: Final = 7
_QUICK_ROUNDS: Final = 3
_QUICK_S: Final = 15.0
"""When a quick run begins no more rounds."""
_START_S: Final = 60.0
_GRACE_S: Final = 15.0
_JSON: Final = "application/json"
_NDJSON: Final = "application/x-ndjson"

Tell = Callable[[str], None]


class _Caller:
    """A connection of HTTP/1.1 that is kept, and nothing that would cost more than what is measured."""

    def __init__(self, port: int, *, path: str, key: str) -> None:
        self._port = port
        self._head = f"POST {path} HTTP/1.1\r\nHost: 127.0.0.1\r\nAuthorization: Bearer {key}\r\n"

    async def __aenter__(self) -> Self:
        self._reader, self._writer = await asyncio.open_connection("127.0.0.1", self._port)
        return self

    async def __aexit__(self, *_: object) -> None:
        self._writer.close()
        await self._writer.wait_closed()

    async def send(self, body: bytes, *, kind: str, once: bool) -> None:
        """Send a request and wait for its answer.

        Raises:
            SinkError: The answer is not that all of it was accepted.
        """
        further = f"Idempotency-Key: {uuid4().hex}\r\n" if once else ""
        head = f"{self._head}Content-Type: {kind}\r\nContent-Length: {len(body)}\r\n{further}\r\n"
        self._writer.write(head.encode() + body)
        answer = await self._reader.readuntil(b"\r\n\r\n")
        lengths = [line for line in answer.lower().split(b"\r\n") if line.startswith(b"content-length:")]
        text = await self._reader.readexactly(int(lengths[0].partition(b":")[2]))
        if not answer.startswith(b"HTTP/1.1 200 "):
            msg = (
                f"an answer is {answer.splitlines()[0].decode()} ({text[:500].decode()}), expected 200; no time counts"
            )
            raise SinkError(msg)


@dataclass
class _Rig:
    """A server with what it needs, the events, and the times of everything that is done with them."""

    settings: Settings
    port: int
    key: str
    server: psutil.Process
    stream: EventStream = field(default_factory=lambda: EventStream(KEYS))
    n_sent: int = 0
    waits_s: dict[str, list[float]] = field(default_factory=dict)
    per_s: dict[str, list[float]] = field(default_factory=dict)
    cpu_s: dict[str, list[float]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._topic = make_view("latest").sources[0].topic
        self._brokers = self.settings.address("kafka")

    def round(self, *, quick: bool) -> None:
        """Send everything once, each by itself, and check the topic; a fifth of it where it is to be quick."""
        alone, together, n_batches = (count // (5 if quick else 1) for count in (_ALONE, _TOGETHER, _BATCHES))
        asyncio.run(self._send("one", self._events(alone), callers=1, kind=_JSON))
        asyncio.run(self._send("one_once", self._events(alone), callers=1, kind=_JSON, once=True))
        asyncio.run(self._send("many", self._events(together), callers=_CALLERS, kind=_JSON))
        asyncio.run(self._send("many_once", self._events(together), callers=_CALLERS, kind=_JSON, once=True))
        batches = [b"\n".join(self._events(_BATCH_EVENTS)) for _ in range(n_batches)]
        asyncio.run(self._send("batches", batches, callers=_BATCH_CALLERS, kind=_NDJSON, events=_BATCH_EVENTS))
        self._direct(n_batches * _BATCH_EVENTS)
        found = sum(end_offsets(self._brokers, self._topic).values())
        if found != self.n_sent:
            msg = f"{found} events are on the topic, expected the {self.n_sent} that were accepted; no time counts"
            raise SinkError(msg)

    def _events(self, count: int) -> list[bytes]:
        return to_json(self.stream.batch(count)).splitlines()

    async def _send(
        self, name: str, bodies: Sequence[bytes], *, callers: int, kind: str, once: bool = False, events: int = 1
    ) -> None:
        waits_s = self.waits_s.setdefault(name, [])

        async def call(caller: _Caller, own: Sequence[bytes]) -> None:
            for body in own:
                started_s = time.perf_counter()
                await caller.send(body, kind=kind, once=once)
                waits_s.append(time.perf_counter() - started_s)

        path = f"/v1/events/{self._topic}"
        async with AsyncExitStack() as stack:
            made = [
                await stack.enter_async_context(_Caller(self.port, path=path, key=self.key)) for _ in range(callers)
            ]
            cpu_s, started_s = self._cpu_s(), time.perf_counter()
            await asyncio.gather(*(call(caller, bodies[n::callers]) for n, caller in enumerate(made)))
            seconds, cpu_s = time.perf_counter() - started_s, self._cpu_s() - cpu_s
        self.per_s.setdefault(name, []).append(len(bodies) * events / seconds)
        self.cpu_s.setdefault(name, []).append(cpu_s / (len(bodies) * events))
        self.n_sent += len(bodies) * events

    def _cpu_s(self) -> float:
        used = self.server.cpu_times()
        return float(used.user + used.system)

    def _direct(self, count: int) -> None:
        rows = self.stream.batch(count)
        producer = event_producer(self._brokers, linger_ms=5)
        producer.list_topics(self._topic, timeout=30)
        started_s = time.perf_counter()
        send(producer, self._topic, rows)
        if left := producer.flush(30):
            msg = f"{left} events by Kafka's own client were not acknowledged within 30 s; no time counts"
            raise SinkError(msg)
        self.per_s.setdefault("direct", []).append(rows.num_rows / (time.perf_counter() - started_s))
        self.n_sent += rows.num_rows


def run(*, quick: bool, tell: Tell) -> list[Figure]:
    """Measure events over HTTP.

    Args:
        quick: Fewer rounds.
        tell: Takes a line of progress.

    Raises:
        SinkError: Something was not accepted, or is not on the topic.
        ServiceError: A service or the server does not start.
    """
    with own_services(["kafka", "redis"]) as settings:
        ensure_topics(settings.address("kafka"), plan_topics([make_view("latest")], []), partitions=PARTITIONS)
        key = asyncio.run(_make_key(settings.address("redis")))
        with _serving(settings) as (port, server):
            rig = _Rig(settings, port, key, server)
            n_rounds, started_s = _QUICK_ROUNDS if quick else _ROUNDS, time.monotonic()
            for number in range(n_rounds):
                if quick and number and time.monotonic() - started_s > _QUICK_S:
                    break
                tell(f"round {number + 1} of {n_rounds}")
                rig.round(quick=quick)
    return _figures(rig)


async def _make_key(redis_url: str) -> str:
    secret = make_secret()
    key = ProducerKey(
        name="bench",
        digest=digest_of(secret),
        sources=(ALL_SOURCES,),
        rate=Rate(MAX_EVENT_RATE, MAX_EVENT_RATE),
        created_at=format_rfc3339(time.time_ns() // 1_000),
    )
    async with ProducerStore(redis_url, timeout_s=5.0) as store:
        await store.change_ring(lambda ring: ring.with_key(key))
    return secret


@contextmanager
def _serving(settings: Settings) -> Iterator[tuple[int, psutil.Process]]:
    application = settings.home / "bench_producers.py"
    application.write_text('from jobs.bench.job import make_view\nVIEWS = [make_view("latest")]\n')
    environment = {
        **settings.environment,
        "HEADRACE_APP": str(application),
        "HEADRACE_EVENT_RATE": str(MAX_EVENT_RATE),
    }
    (port,) = choose_ports({"api": 0}).values()
    argv = [sys.executable, "-m", "jobs.cli", "worker", "--role", "serve", "--metrics-port", "0"]
    log = settings.home / "logs" / "bench_producers.log"
    process = spawn([*argv, "--http-port", str(port)], environment=environment, cwd=Path.cwd(), log=log)
    try:
        wait_until(
            lambda: accepts_connections(f"127.0.0.1:{port}", service="API") or not process.is_alive(),
            timeout_s=_START_S,
        )
        if not accepts_connections(f"127.0.0.1:{port}", service="API"):
            tail = telling_lines(read_lines(log, since_bytes=0))
            msg = f"the server does not answer within {_START_S:.0f} s; {log} ends with:\n{tail}"
            raise ServiceError(msg)
        yield port, psutil.Process(process.pid)
    finally:
        process.end(grace_s=_GRACE_S)


def _figures(rig: _Rig) -> list[Figure]:
    figures = []
    for name in ("one", "one_once", "many", "many_once", "batches"):
        points = statistics.quantiles(rig.waits_s[name], n=100)
        for label, at in (("p50", 49), ("p99", 98)):
            figures.append(Figure(name=f"producers.{name}.{label}", value=points[at] * 1e3, unit="ms"))
    for name, found in rig.cpu_s.items():
        unit = f"us of cpu/{'event' if name == 'batches' else 'request'}"
        figures.append(Figure(name=f"producers.{name}.cpu", value=statistics.median(found) * 1e6, unit=unit))
    per_s = {name: statistics.median(found) for name, found in rig.per_s.items()}
    compared = {"many_once": "many", "batches": "direct"}
    for name in ("many", "many_once", "batches", "direct"):
        other = compared.get(name)
        figures.append(
            Figure(
                name=f"producers.{name}",
                value=per_s[name],
                unit="events/s",
                compared_with=other and f"producers.{other}",
                ratio=per_s[name] / per_s[other] if other else None,
            )
        )
    return figures
