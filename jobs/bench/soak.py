"""``headrace bench soak``: the features role at half its top rate for long, with memory that stays flat.

The top rate is measured first, on events that are there already. Then events come at half of it for ten minutes
(``--quick``: a quarter of one), event time passing as the clock does. Memory and lag of the worker are sampled each
second, and what it made of some users is compared with what polars computes.
"""

import statistics
import threading
import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from confluent_kafka import OFFSET_BEGINNING, Consumer, KafkaError, Message, TopicPartition

from jobs.bench.figure import Figure
from jobs.bench.job import KEYS, OUT_OF_ORDERNESS_MS, EventStream, to_json
from jobs.bench.live import Bench, Rig
from jobs.bench.live_worker import PARTITIONS, LiveWorker
from jobs.bench.own_services import event_producer, own_services, paced, send
from jobs.bench.witness import Witness
from jobs.settings import Settings
from jobs.topics import ensure_topics, plan_topics
from schemas.errors import ServiceError
from schemas.view import FeatureView
from streams.transport.options import Delivery
from streams.wire import decode_rows

_SECONDS: Final = 600.0
_QUICK_SECONDS: Final = 15.0
_TOP_EVENTS: Final = 2_000_000
_QUICK_TOP_EVENTS: Final = 300_000
_FILL_ROWS: Final = 20_000
_WITNESSED: Final = 40
_TICK_S: Final = 0.05
_SAMPLE_S: Final = 1.0
_TELL_SAMPLES: Final = 60
_DRAIN_S: Final = 60.0
_KEPT_BYTES: Final = 2**28

Tell = Callable[[str], None]


@dataclass
class Sample:
    """The worker at one moment of the monotonic clock: memory in bytes, and events that it has not committed."""

    at_s: float
    resident_bytes: int
    n_lagging: int


@dataclass
class Followed:
    """Events of some users as the broker took them, and rows that came of them, by partition."""

    users: pa.Array
    events: dict[int, list[dict[str, Any]]] = field(default_factory=lambda: defaultdict(list))
    rows: dict[int, list[bytes]] = field(default_factory=lambda: defaultdict(list))
    n_sent: int = 0

    def send(self, producer: Any, topic: str, events: pa.Table) -> None:
        """Hand events to the producer, those of the followed users so that it tells their offsets."""
        is_mine = pc.is_in(events["user_id"], value_set=self.users)
        send(producer, topic, events.filter(pc.invert(is_mine)))
        mine = events.filter(is_mine)
        for event, payload in zip(mine.to_pylist(), to_json(mine).splitlines(), strict=True):
            key = event["user_id"].encode()
            producer.produce(topic, key=key, value=payload, on_delivery=partial(self._came, event))
        self.n_sent += len(events)

    def _came(self, event: dict[str, Any], error: KafkaError | None, message: Message) -> None:
        if error is None:
            self.events[message.partition() or 0].append(event | {"_offset": message.offset()})

    def check(self, view: FeatureView) -> int:
        """Compare the rows with what polars makes of the events; returns how many there were.

        Raises:
            WindowingError: They differ.
        """
        n_rows = 0
        schema = EventStream(1).batch(1).schema
        for partition, events in self.events.items():
            witness = Witness(self.users.to_pylist(), out_of_orderness_us=OUT_OF_ORDERNESS_MS * 1_000, as_of="some")
            rows = decode_rows(self.rows[partition], view.row_schema)
            batch = pa.Table.from_pylist(sorted(events, key=lambda event: int(event["_offset"])), schema=schema)
            # None is late, so of the watermark it only matters how far it came in the end.
            witness.see(batch, rows)
            witness.reach(pc.max(rows["watermark"]).cast(pa.int64()).as_py())
            n_rows += witness.check()
        return n_rows


def run(*, quick: bool, tell: Tell) -> list[Figure]:
    """Measure the features role over a long time.

    Args:
        quick: A quarter of a minute, which tells nothing of memory but that the run is right.
        tell: Takes a line of progress.

    Raises:
        ServiceError: A service or the worker fails, or falls behind.
        WindowingError: The worker's rows are wrong.
    """
    seconds = _QUICK_SECONDS if quick else _SECONDS
    with own_services(["kafka", "redis"]) as settings:
        top = Rig(Delivery.EXACTLY_ONCE)
        bench = Bench(settings, n_events=_QUICK_TOP_EVENTS if quick else _TOP_EVENTS, tell=tell)
        bench.produce()
        bench.run(top)
    rate = round(top.events_per_s[0] / 2)
    with own_services(["kafka", "redis"]) as settings:
        samples, n_rows = _soak(settings, rate=rate, seconds=seconds, tell=tell)
    tell(f"{n_rows:,} rows are what polars computes")
    third = len(samples) // 3
    early, late = (
        statistics.median(s.resident_bytes for s in part) for part in (samples[third:-third], samples[-third:])
    )
    lag_s = float(np.percentile([sample.n_lagging for sample in samples], 99)) / rate
    return [
        Figure(name="soak.events", value=float(rate), unit="events/s"),
        Figure(name="soak.duration", value=seconds, unit="s"),
        Figure(name="soak.memory", value=late / 1e6, unit="MB"),
        Figure(
            name="soak.memory_growth",
            value=late / early,
            unit="x",
            bar=1.05,
            is_lower_better=True,
            compared_with="the third before",
            ratio=late / early,
        ),
        Figure(name="soak.lag.p99", value=lag_s, unit="s", bar=2.0, is_lower_better=True),
    ]


def _soak(settings: Settings, *, rate: int, seconds: float, tell: Tell) -> tuple[list[Sample], int]:
    brokers = settings.address("kafka")
    stream = EventStream(KEYS, events_per_s=rate)
    followed = Followed(stream.users.take(pa.array(range(0, KEYS, KEYS // _WITNESSED))))
    producer, ended = event_producer(brokers), threading.Event()
    with LiveWorker(settings, "soak") as worker:
        topic = worker.view.input.topic
        planned = plan_topics([worker.view], [])
        # Ten minutes of events and rows would fill a disk.
        kept = {"retention.bytes": str(_KEPT_BYTES), "segment.bytes": str(_KEPT_BYTES // 4)}
        ensure_topics(brokers, [replace(plan, config=plan.config | kept) for plan in planned], partitions=PARTITIONS)
        reader = threading.Thread(target=_read_rows, args=(brokers, worker.view.topic, followed, ended))
        reader.start()
        try:
            for batch in stream.fill(_FILL_ROWS):
                followed.send(producer, topic, batch)
                producer.flush()
            _wait_until_done(worker, followed)
            tell(f"{rate:,} events/s for {seconds:.0f} s")
            samples: list[Sample] = []
            for batch in paced(stream, seconds=seconds):
                followed.send(producer, topic, batch)
                producer.poll(0)
                now_s = time.monotonic()
                if not samples or now_s - samples[-1].at_s >= _SAMPLE_S:
                    n_lagging = followed.n_sent - worker.n_committed()
                    samples.append(Sample(now_s, worker.resident_bytes(), n_lagging))
                    if len(samples) % _TELL_SAMPLES == 0:
                        tell(
                            f"{len(samples)} s: {samples[-1].resident_bytes / 1e6:.0f} MB, {n_lagging:,} events behind"
                        )
            producer.flush()
            _wait_until_done(worker, followed)
            time.sleep(_SAMPLE_S)  # for the reader to read what has just been committed
        finally:
            ended.set()
            reader.join()
        return samples, followed.check(worker.view)


def _wait_until_done(worker: LiveWorker, followed: Followed) -> None:
    deadline_s = time.monotonic() + _DRAIN_S
    while (n_done := worker.n_committed()) < followed.n_sent:
        if time.monotonic() > deadline_s:
            msg = f"the worker has committed {n_done} of {followed.n_sent} events, expected all within {_DRAIN_S:.0f} s"
            raise ServiceError(msg)
        time.sleep(_TICK_S)


def _read_rows(brokers: str, topic: str, followed: Followed, ended: threading.Event) -> None:
    users = {user.encode() for user in followed.users.to_pylist()}
    consumer = Consumer(
        {
            "bootstrap.servers": brokers,
            "group.id": "headrace-bench",
            "isolation.level": "read_committed",
            "enable.auto.commit": False,
        }
    )
    consumer.assign([TopicPartition(topic, number, OFFSET_BEGINNING) for number in range(PARTITIONS)])
    try:
        while not ended.is_set():
            for message in consumer.consume(10_000, _TICK_S):
                if message.error() is None and message.key() in users:
                    followed.rows[message.partition() or 0].append(message.value() or b"")
    finally:
        consumer.close()
