"""Puts flight events on Kafka, at the pace at which they became known or as fast as it goes."""

import logging
import math
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from datetime import datetime
from typing import Any, Final

import polars as pl
from confluent_kafka import KafkaError, KafkaException, Message, Producer
from confluent_kafka.admin import AdminClient, ConfigResource, ResourceType

from jobs.flights.events import TOPICS, FlightEvents, plan_events
from jobs.flights.fault import FAULTS
from jobs.topics import ensure_topics, raw_topic
from schemas.errors import ConfigError, ServiceError
from schemas.row import PRODUCED_TIME_HEADER
from schemas.time import END_OF_TIME_US, MINUS_INFINITY_US, format_rfc3339, parse_rfc3339_us

DEFAULT_PARTITIONS: Final = 4
"""Partitions of a topic that is created."""
_CONNECT_TIMEOUT_S: Final = 6.0
_DELIVERY_TIMEOUT_MS: Final = 60_000
_BATCH_EVENTS: Final = 4_000
_PROGRESS_INTERVAL_S: Final = 0.1
_SILENT: Final = 2  # each try to connect is an error of level 3, and would tear up the progress bar
_log: Final = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class ProduceProgress:
    """How far producing has come.

    Attributes:
        sent: Events handed to Kafka's client.
        total: Events in the range.
        known_us: Simulated time: when the newest event sent became known.
        wall_s: Seconds since the first event.
    """

    sent: int
    total: int
    known_us: int
    wall_s: float


@dataclass(frozen=True, kw_only=True)
class ProduceSummary:
    """What was produced, all of it acknowledged by the broker.

    Attributes:
        topics: Events by topic.
        delayed: Events that were reported late, by topic.
        injected: Corrupted events, by topic and kind of fault (see :data:`jobs.flights.fault.FAULTS`).
        rejected: Corrupted events, by topic and the reason with which each must become a dead letter.
        first_event_us: Earliest event time.
        last_event_us: Latest event time.
        first_known_us: When the first event became known.
        last_known_us: When the last event became known.
        wall_s: Seconds from the first event to the last acknowledgement.
        is_complete: Whether the whole range was produced; False when stopped before.
    """

    topics: dict[str, int]
    delayed: dict[str, int]
    injected: dict[str, dict[str, int]]
    rejected: dict[str, dict[str, int]]
    first_event_us: int | None
    last_event_us: int | None
    first_known_us: int | None
    last_known_us: int | None
    wall_s: float
    is_complete: bool

    @property
    def events(self) -> int:
        """Events on all topics together."""
        return sum(self.topics.values())

    @property
    def events_per_s(self) -> float:
        """Events a second of wall time."""
        return self.events / self.wall_s if self.wall_s else 0.0

    def to_json(self) -> dict[str, Any]:
        """Give the summary as JSON-ready values, times as RFC 3339."""
        fields = asdict(self)
        times = {
            name.removesuffix("_us"): None if (time_us := fields.pop(name)) is None else format_rfc3339(time_us)
            for name in ("first_event_us", "last_event_us", "first_known_us", "last_known_us")
        }
        return {"events": self.events, **fields, **times, "events_per_s": round(self.events_per_s, 1)}


def produce_flights(
    bootstrap: str,
    *,
    start: datetime | None = None,
    end: datetime | None = None,
    speed: float | None = None,
    late_share: float = 0.0,
    invalid_share: float = 0.0,
    seed: int = 0,
    partitions: int = DEFAULT_PARTITIONS,
    on_progress: Callable[[ProduceProgress], None] | None = None,
    stop: threading.Event | None = None,
) -> ProduceSummary:
    """Produce the flight events that become known in ``[start, end)``, in that order.

    Topics that are missing are created. Blocks until the broker has acknowledged each event.

    Args:
        bootstrap: Address of Kafka.
        start: Beginning of the range, with its offset from UTC; None is that of the data.
        end: End of the range, not in it; None is that of the data.
        speed: How many times faster than real time, from the first event of the range on; None is as fast as possible.
        late_share: Share of reports that become known late; see :mod:`jobs.flights.fault`.
        invalid_share: Share of reports that are corrupted.
        seed: Draws which; the same seed draws the same, whatever the range.
        partitions: Partitions of topics that are created.
        on_progress: Told about ten times a second how far it is; called in this thread.
        stop: Set from elsewhere, ends producing early and in good order.

    Raises:
        ConfigError: An argument is out of range, or the data are not installed. Nothing was sent.
        ServiceError: Kafka does not answer, or did not take an event; what comes after that event is not sent.
    """
    if speed is not None and not 0 < speed < math.inf:
        msg = f"`speed` is {speed}, expected more than 0 such as 3600 (an hour each second), or 'max'"
        raise ConfigError(msg)
    if partitions < 1:
        msg = f"`partitions` is {partitions}, expected 1 or more"
        raise ConfigError(msg)
    events = plan_events(
        start_us=MINUS_INFINITY_US if start is None else _to_us(start, field="start"),
        end_us=END_OF_TIME_US if end is None else _to_us(end, field="end"),
        late_share=late_share,
        invalid_share=invalid_share,
        seed=seed,
    )
    made = ensure_topics(bootstrap, [raw_topic(name) for name in TOPICS], partitions=partitions)
    check_retention(bootstrap, [name for name in TOPICS if name not in made])
    return _Run(bootstrap, events, speed=speed, on_progress=on_progress, stop=stop or threading.Event()).run()


def check_retention(bootstrap: str, topics: Sequence[str]) -> None:
    """Refuse topics that would delete the records, which carry the times of their events, as soon as they come.

    Raises:
        ServiceError: A topic keeps records for some time only.
    """
    admin = AdminClient(
        {"bootstrap.servers": bootstrap, "client.id": "headrace-produce", "log_level": _SILENT}, logger=_log
    )
    resources = [ConfigResource(ResourceType.TOPIC, name) for name in topics]
    for resource, described in admin.describe_configs(resources).items() if resources else ():
        try:
            retention_ms = int(described.result(timeout=_CONNECT_TIMEOUT_S)["retention.ms"].value)
        except KafkaException as exc:  # a cluster may keep its configuration to itself
            _log.warning("Cannot see how long topic %s keeps its records: %s", resource.name, exc.args[0].str())
            continue
        if retention_ms >= 0:
            msg = (
                f"topic {resource.name} keeps records for {retention_ms / 86_400_000:g} days, expected for good "
                "(retention.ms=-1): the flights are of 2013 and would be deleted at once; alter the topic, or delete "
                "it and let it be created"
            )
            raise ServiceError(msg)


class _Run:
    """One run over planned events."""

    def __init__(
        self,
        bootstrap: str,
        events: FlightEvents,
        *,
        speed: float | None,
        on_progress: Callable[[ProduceProgress], None] | None,
        stop: threading.Event,
    ) -> None:
        self._bootstrap = bootstrap
        self._events = events
        self._speed = speed
        self._on_progress = on_progress
        self._stop = stop
        self._sent = 0
        self._failed = 0
        self._first_failure: KafkaError | None = None
        self._first_known_us: int = events.plan["known_us"][0]
        self._known_us = self._first_known_us
        self._started_s = 0.0
        self._told_s = 0.0
        self._producer = Producer(
            {
                "bootstrap.servers": bootstrap,
                "client.id": "headrace-produce",
                "log_level": _SILENT,
                "enable.idempotence": True,
                # A broker that starts again knows no producer whose newest record is older than a day, as all of these
                # are, and takes any sequence number from it. With a second request under way, that one may be
                # accepted before the first is sent again, which librdkafka takes for an acknowledgement of both. Of
                # 87 kills of a broker 4 lost an event or a few so, with five requests under way; with one, 0 of 90.
                "max.in.flight": 1,
                "acks": "all",
                "partitioner": "murmur2_random",  # what Java's producers do, so that keys meet in one partition
                "linger.ms": 20,
                "compression.type": "zstd",
                "queue.buffering.max.kbytes": 64 * 1024,
                "message.timeout.ms": _DELIVERY_TIMEOUT_MS,
                "delivery.report.only.error": True,
                "on_delivery": self._count_failure,
            },
            logger=_log,
        )

    def run(self) -> ProduceSummary:
        self._started_s = time.monotonic()
        try:
            self._send_all()
            while self._producer.flush(_PROGRESS_INTERVAL_S) and not self._failed:
                self._tell()
        except KafkaException as exc:
            self._failed += 1
            self._first_failure = self._first_failure or exc.args[0]
        wall_s = time.monotonic() - self._started_s
        if self._failed:
            raise self._failure()
        self._tell(is_forced=True)
        return _summarise(
            self._events.plan.slice(0, self._sent), wall_s=wall_s, is_complete=self._sent == len(self._events)
        )

    def _send_all(self) -> None:
        due_us = END_OF_TIME_US if self._speed is None else self._first_known_us
        for start in range(0, len(self._events), _BATCH_EVENTS):
            batch = self._events.batch(start, start + _BATCH_EVENTS)
            columns = [batch[name].to_list() for name in ("topic", "key", "value", "known_us", "request_id")]
            for topic, key, value, known_us, request_id in zip(*columns, strict=True):
                if known_us > due_us:
                    due_us = self._await_due(known_us)
                if self._stop.is_set() or self._failed:
                    return
                # The record's timestamp is simulated, so freshness needs to be told when it was really sent.
                headers = [("request_id", request_id), (PRODUCED_TIME_HEADER, str(time.time_ns() // 1_000))]
                self._send(topic, value, key=key, timestamp=known_us // 1_000, headers=headers)
                self._sent += 1
                self._known_us = known_us
            self._producer.poll(0)
            self._tell()

    def _send(self, topic: str, value: bytes, **record: Any) -> None:
        while True:
            try:
                self._producer.produce(topic, value, **record)
            except BufferError:  # the broker is slower than we are: wait until it has taken some
                self._producer.poll(_PROGRESS_INTERVAL_S)
                self._tell()
            else:
                return

    def _await_due(self, known_us: int) -> int:
        """Wait until the event that becomes known at ``known_us`` is due; return the simulated time then."""
        speed = self._speed or 1.0
        deadline_s = self._started_s + (known_us - self._first_known_us) / 1e6 / speed
        while (remaining_s := deadline_s - time.monotonic()) > 0 and not self._failed:
            if self._stop.wait(min(remaining_s, _PROGRESS_INTERVAL_S)):
                break
            self._producer.poll(0)
            self._tell()
        return self._first_known_us + int((time.monotonic() - self._started_s) * 1e6 * speed)

    def _count_failure(self, error: KafkaError | None, _: Message) -> None:
        if error is not None:
            self._failed += 1
            self._first_failure = self._first_failure or error

    def _failure(self) -> ServiceError:
        self._producer.purge()
        self._producer.flush(1)
        reason = self._first_failure.str() if self._first_failure else "for an unknown reason"
        return ServiceError(
            f"Kafka at {self._bootstrap} did not take {self._failed} of {self._sent} events, the first because: "
            f"{reason}; producing stopped at {format_rfc3339(self._known_us)}. Look at the broker with "
            "`headrace services status`, then produce the range from there again"
        )

    def _tell(self, *, is_forced: bool = False) -> None:
        now_s = time.monotonic()
        if self._on_progress is None or not (is_forced or now_s - self._told_s >= _PROGRESS_INTERVAL_S):
            return
        self._told_s = now_s
        self._on_progress(
            ProduceProgress(
                sent=self._sent,
                total=len(self._events),
                known_us=self._known_us,
                wall_s=now_s - self._started_s,
            )
        )


def _to_us(moment: datetime, *, field: str) -> int:
    if moment.tzinfo is None:
        msg = f"`{field}` is {moment.isoformat()} without an offset from UTC, expected one, such as tzinfo=UTC"
        raise ConfigError(msg)
    return parse_rfc3339_us(moment.isoformat())


def _summarise(sent: pl.DataFrame, *, wall_s: float, is_complete: bool) -> ProduceSummary:
    reasons = {fault.name: fault.reason.value for fault in FAULTS}
    injected: dict[str, dict[str, int]] = {topic: {} for topic in TOPICS}
    rejected: dict[str, Counter[str]] = {topic: Counter() for topic in TOPICS}
    faults = sent.filter(pl.col("fault").is_not_null()).group_by("topic", "fault").len().sort("topic", "fault")
    for topic, fault, events in faults.iter_rows():
        injected[topic][fault] = events
        rejected[topic][reasons[fault]] += events
    topics = dict(sent.group_by("topic").len().iter_rows())
    delayed = dict(sent.group_by("topic").agg(pl.col("is_delayed").sum()).iter_rows())
    span = {
        f"{edge}_{name}_us": None if sent.is_empty() else int(getattr(sent[f"{name}_us"], aggregate)())
        for edge, aggregate in (("first", "min"), ("last", "max"))
        for name in ("event", "known")
    }
    return ProduceSummary(
        topics={topic: topics.get(topic, 0) for topic in TOPICS},
        delayed={topic: delayed.get(topic, 0) for topic in TOPICS},
        injected=injected,
        rejected={topic: dict(sorted(counts.items())) for topic, counts in rejected.items()},
        **span,
        wall_s=wall_s,
        is_complete=is_complete,
    )
