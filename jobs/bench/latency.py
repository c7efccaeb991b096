"""The latency part of ``headrace bench live``: from an event in the broker to Redis, and to its score.

Workers of the features, online and scoring roles do the job at a fixed rate. Events of some users are followed from the
outside: when each was handed to Kafka's client, when its row is first read in Redis, and when a reader of committed
data gets its score.
"""

import asyncio
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from hashlib import sha256
from typing import Any, Final

import numpy as np
import orjson
import pyarrow as pa
import pyarrow.compute as pc
from confluent_kafka import Consumer, TopicPartition

from jobs.bench.figure import Figure
from jobs.bench.job import KEYS, EventStream, make_view
from jobs.bench.live_worker import PARTITIONS
from jobs.bench.own_services import event_producer, own_services, paced, send
from jobs.consumer_group import is_caught_up
from jobs.role import Role
from jobs.settings import Settings
from jobs.supervisor import Supervisor
from jobs.topics import ensure_topics, plan_topics
from offline.card import ModelCard, described_inputs, described_outputs, write_version
from offline.export import OPSET
from schemas.errors import ServiceError
from schemas.ladder import NO_LADDER
from schemas.model import ModelInput, ModelSpec, ViewReference
from schemas.output import ModelOutput
from schemas.time import parse_rfc3339_us
from streams.sinks.online import OnlineReader

EVENTS_PER_S: Final = 20_000
_WATCHED: Final = 50
_FILL_ROWS: Final = 20_000
_TICK_S: Final = 0.01
_SETTLE_S: Final = 2.0
"""Left out at the start: what was caught up with."""
_TIMEOUT_S: Final = 120.0
_PERCENTILE: Final = 99
_FEATURES: Final = ("count_5m", "mean_5m", "max_5m", "entropy_3")

Tell = Callable[[str], None]
Event = tuple[str, int]
"""User and event time in microseconds."""

VIEW: Final = make_view("every_event")  # each event is scored
MODEL: Final = ModelSpec(
    name="bench_score",
    version="1",
    trigger=ViewReference.of(VIEW),
    entity="user_id",
    inputs=tuple(ModelInput.of(VIEW, name) for name in _FEATURES),
    outputs=(ModelOutput(column="probability", tensor="probabilities", minimum=0, maximum=1),),
    ladder=NO_LADDER,  # what is measured is the model
)
VIEWS: Final = [VIEW]
MODELS: Final = [MODEL]


def write_model(settings: Settings) -> None:
    """Put a logistic regression over four features into the model repository."""
    import onnx  # noqa: PLC0415  # only this benchmark and training need it
    from onnx import TensorProto, helper, numpy_helper  # noqa: PLC0415

    weights = np.array([[0.01], [0.002], [0.001], [0.5]], dtype=np.float32)
    graph = helper.make_graph(
        [
            helper.make_node("MatMul", [MODEL.input_tensor, "weights"], ["sums"]),
            helper.make_node("Sigmoid", ["sums"], ["probabilities"]),
        ],
        MODEL.name,
        [helper.make_tensor_value_info(MODEL.input_tensor, TensorProto.FLOAT, [None, len(_FEATURES)])],
        [helper.make_tensor_value_info("probabilities", TensorProto.FLOAT, [None, 1])],
        [numpy_helper.from_array(weights, "weights")],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", OPSET)], ir_version=8)
    onnx.checker.check_model(model)
    content = model.SerializeToString(deterministic=True)
    card = ModelCard(
        name=MODEL.name,
        version=1,
        semver="1.0.0",
        contract=MODEL.reference,
        sha256=sha256(content).hexdigest(),
        license="Apache-2.0",
        description="A logistic regression with made-up weights, to measure with.",
        created="2026-01-01T00:00:00Z",
        inputs=described_inputs(MODEL),
        outputs=described_outputs(MODEL),
        training={},
        training_set={},
        evaluation={},
        golden=[{"inputs": [0.0] * len(_FEATURES), "outputs": {"probability": 0.5}}],
    )
    write_version(settings.model_repository, spec=MODEL, card=card, model=content)


@dataclass
class Watched:
    """Events that are followed, and when they came where.

    Attributes:
        users: Whose events are followed.
        sent_s: When each was handed to Kafka's client, by the monotonic clock.
        readable_s, scored_s: How long each took from there.
    """

    users: Sequence[str]
    sent_s: dict[Event, float] = field(default_factory=dict)
    readable_s: dict[Event, float] = field(default_factory=dict)
    scored_s: dict[Event, float] = field(default_factory=dict)

    def send(self, events: pa.Table) -> None:
        """Take note of events that are handed over now."""
        now_s = time.monotonic()
        mine = events.filter(pc.is_in(events["user_id"], value_set=pa.array(self.users)))
        for user, at_ms in zip(mine["user_id"].to_pylist(), mine["event_time"].to_pylist(), strict=True):
            self.sent_s.setdefault((user, at_ms * 1_000), now_s)

    def came(self, event: Event, took: dict[Event, float]) -> None:
        """Take note of an event that is there now; of the first time."""
        if event in self.sent_s and event not in took:
            took[event] = time.monotonic() - self.sent_s[event]


def measure(*, seconds: float, tell: Tell) -> list[Figure]:
    """Measure at :data:`EVENTS_PER_S` for so many seconds.

    Raises:
        ServiceError: A service or a worker fails, or does not keep up.
    """
    with own_services(["kafka", "redis", "triton"]) as settings:
        write_model(settings)
        brokers = settings.address("kafka")
        ensure_topics(brokers, plan_topics(VIEWS, MODELS), partitions=PARTITIONS)
        environment = {**settings.environment, "HEADRACE_APP": "jobs.bench.latency"}
        roles = [Role.FEATURES, Role.ONLINE, Role.SCORING]
        workers = Supervisor(settings.home, environment=environment, ports=dict.fromkeys(Role, 0))
        workers.start(roles)
        try:
            watched = _observe(settings, workers, seconds=seconds, tell=tell)
        finally:
            workers.stop()
    return [
        _figure("live.event_to_redis", watched.readable_s, bar_ms=150),
        _figure("live.event_to_score", watched.scored_s, bar_ms=250),
    ]


def _observe(settings: Settings, workers: Supervisor, *, seconds: float, tell: Tell) -> Watched:
    brokers = settings.address("kafka")
    stream = EventStream(KEYS, events_per_s=EVENTS_PER_S)
    producer = event_producer(brokers, linger_ms=1)
    for batch in stream.fill(_FILL_ROWS):
        send(producer, VIEW.input.topic, batch)
        producer.flush()
    tell(f"{stream.n_rows:,} events to begin with")
    _wait_until_caught_up(brokers, workers)
    watched = Watched(stream.users[:: KEYS // _WATCHED].to_pylist())
    ended = threading.Event()
    tell(f"{EVENTS_PER_S:,} events/s for {seconds:.0f} s")
    with ThreadPoolExecutor(max_workers=2) as threads:
        running = [
            threads.submit(_produce, producer, stream, watched, workers, seconds=seconds, ended=ended, brokers=brokers),
            threads.submit(_read_scores, brokers, watched, ended),
        ]
        try:
            asyncio.run(_read_online(settings.address("redis"), watched, ended))
        finally:
            ended.set()
        for thread in running:
            thread.result()
    for line in workers.check():
        msg = f"a worker ended while it was measured: {line}"
        raise ServiceError(msg)
    return watched


def _wait_until_caught_up(brokers: str, workers: Supervisor) -> None:
    deadline_s = time.monotonic() + _TIMEOUT_S
    name = __name__.rpartition(".")[2]
    groups = {
        f"headrace.{name}.features": VIEW.input.topic,
        f"headrace.{name}.online": VIEW.topic,
        f"headrace.{name}.scoring.{MODEL.name}": VIEW.topic,
    }
    while not all(is_caught_up(brokers, group, topic) for group, topic in groups.items()):
        workers.check()
        if time.monotonic() > deadline_s:
            msg = (
                f"the workers have not caught up within {_TIMEOUT_S:.0f} s, expected them to be faster than the events"
            )
            raise ServiceError(msg)
        time.sleep(_TICK_S)


def _produce(
    producer: Any,
    stream: EventStream,
    watched: Watched,
    workers: Supervisor,
    *,
    seconds: float,
    ended: threading.Event,
    brokers: str,
) -> None:
    """Send events at their rate, and end when all of them are scored: those that take long count like the others."""
    began_s = time.monotonic()
    try:
        for events in paced(stream, seconds=seconds):
            if time.monotonic() - began_s > _SETTLE_S:
                watched.send(events)
            send(producer, VIEW.input.topic, events)
            producer.poll(0)
            if ended.is_set():
                return
        producer.flush()
        _wait_until_caught_up(brokers, workers)
        ended.wait(_SETTLE_S)
    finally:
        ended.set()


def _read_scores(brokers: str, watched: Watched, ended: threading.Event) -> None:
    users = {user.encode() for user in watched.users}
    consumer = Consumer(
        {
            "bootstrap.servers": brokers,
            "group.id": "headrace-bench",
            "isolation.level": "read_committed",
            "enable.auto.commit": False,
            "auto.offset.reset": "latest",
            "fetch.wait.max.ms": 20,
        }
    )
    consumer.assign([TopicPartition(MODEL.topic, number) for number in range(PARTITIONS)])
    try:
        while not ended.is_set():
            for message in consumer.consume(10_000, _TICK_S):
                if message.error() is None and message.key() in users:
                    score = orjson.loads(message.value() or b"")
                    watched.came((score["entity"], parse_rfc3339_us(score["event_time"])), watched.scored_s)
    finally:
        consumer.close()


async def _read_online(redis_url: str, watched: Watched, ended: threading.Event) -> None:
    async with OnlineReader(redis_url) as reader:
        while not ended.is_set():
            for value in await reader.read(VIEW, watched.users, now_us=time.time_ns() // 1_000):
                if value.event_time_us is not None:
                    watched.came((str(value.entity), value.event_time_us), watched.readable_s)
            await asyncio.sleep(_TICK_S)


def _figure(name: str, took_s: dict[Event, float], *, bar_ms: float) -> Figure:
    if not took_s:
        msg = f"{name}: none of the events that were followed came there"
        raise ServiceError(msg)
    p99 = float(np.percentile(list(took_s.values()), _PERCENTILE)) * 1_000
    return Figure(name=f"{name}.p99", value=p99, unit="ms", bar=bar_ms, is_lower_better=True)
