"""Puts records of logs on the topics of a namespace: in arrival order, at a speed, as they came.

Payloads, keys, headers and record timestamps are those of the originals, so that admission decides the same. Marks of
records that had been sent again name views by what they are called there.
"""

import heapq
import operator
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np
from confluent_kafka import KafkaException, Producer
from numpy.typing import NDArray

from jobs.namespace import name_in, source_in
from schemas.errors import ServiceError
from streams.batch import Headers
from streams.dead_letter import LATE_FOR_HEADER, VIEWS_HEADER
from streams.ports import RecordLog

_FLUSH_S: Final = 60.0
_TELL_RECORDS: Final = 2_000
_LARGEST_RECORD: Final = 1_000_000_000


@dataclass(frozen=True, kw_only=True)
class Section:
    """What of a partition of a topic is replayed.

    Attributes:
        topic: The topic, as it is live.
        partition: The partition.
        read: Offsets from the first record that is there.
        wanted: Offsets that the replay is for, at its speed; those before are gone over as fast as possible.
    """

    topic: str
    partition: int
    read: range
    wanted: range


@dataclass
class Feed:
    """What has been put on topics.

    Attributes:
        originals: By topic (as it is live) and partition, the offset of each record, in its order.
        records: How many records that are.
    """

    originals: dict[tuple[str, int], NDArray[np.int64]] = field(default_factory=dict)
    records: int = 0


def feed(
    brokers: str,
    logs: Mapping[str, RecordLog],
    sections: list[Section],
    *,
    namespace: str,
    speed: float | None,
    stop: threading.Event,
    tell: Callable[[int], object] = lambda _: None,
) -> Feed:
    """Put the records of sections on the topics of a namespace; ends early once ``stop`` is set.

    Args:
        brokers: Kafka bootstrap servers.
        logs: By topic, where its records are read.
        sections: What to replay.
        namespace: Of the topics.
        speed: How many times faster than the record timestamps of what is wanted; None for as fast as possible.
        stop: Set when it is to end.
        tell: Told how many records more there are.

    Raises:
        ServiceError: The broker does not take a record.
        SinkError, SchemaMismatchError: A log cannot be read.
    """
    failures: list[str] = []
    offsets: dict[tuple[str, int], list[int]] = {(section.topic, section.partition): [] for section in sections}
    producer = Producer(
        {
            "bootstrap.servers": brokers,
            "enable.idempotence": True,
            "compression.type": "lz4",
            "linger.ms": 5,
            "message.max.bytes": _LARGEST_RECORD,
            "log_level": 2,
        }
    )

    def on_delivery(error: Any, _: object) -> None:
        if error is not None:
            failures.append(error.str())

    pace = Pace(speed, stop)
    n_records = 0
    streams = [_records(logs[section.topic], section) for section in sections]
    for due_us, (topic, number), offset, time_us, key, value, headers, is_wanted in heapq.merge(
        *streams, key=operator.itemgetter(0, 1, 2)
    ):
        if is_wanted:
            pace.wait(due_us)
        if stop.is_set() or failures:
            break
        record: dict[str, Any] = {
            "key": key,
            "value": value,
            "headers": renamed(headers, namespace),
            "partition": number,
            "timestamp": time_us // 1_000,
            "on_delivery": on_delivery,
        }
        try:
            if not _produce(
                producer, source_in(namespace, topic), record, is_over=lambda: stop.is_set() or bool(failures)
            ):
                break
        except KafkaException as exc:
            failures.append(exc.args[0].str())
            break
        offsets[topic, number].append(offset)
        n_records += 1
        if n_records % _TELL_RECORDS == 0:
            tell(_TELL_RECORDS)
    try:
        left = producer.flush(_FLUSH_S)
    except KafkaException as exc:
        failures.append(exc.args[0].str())
        left = 0
    if failures or left:
        why = failures[0] if failures else f"{left:,} records are not acknowledged within {_FLUSH_S:.0f} s"
        msg = f"Kafka at {brokers} does not take what is replayed: {why}; see `headrace services status`"
        raise ServiceError(msg)
    tell(n_records % _TELL_RECORDS)
    return Feed(originals={place: np.array(found, np.int64) for place, found in offsets.items()}, records=n_records)


def _produce(producer: Producer, topic: str, record: dict[str, Any], *, is_over: Callable[[], bool]) -> bool:
    """Hand a record to a producer, once there is room for it; False where all is over before."""
    while not is_over():
        try:
            producer.produce(topic, **record)
        except BufferError:
            producer.poll(0.1)
        else:
            producer.poll(0)
            return True
    return False


_Record = tuple[int, tuple[str, int], int, int, bytes | None, bytes | None, Headers, bool]
"""When it may go at the earliest, its topic and partition, its offset there, its timestamp, key, payload, headers, and
whether it is wanted."""


def _records(log: RecordLog, section: Section) -> Iterator[_Record]:
    """Yield the records of a section in log order, each with when it may go at the earliest."""
    latest_us = 0
    place = (section.topic, section.partition)
    for batch in log.read(section.partition, section.read):
        for position, offset in enumerate(batch.offsets.tolist()):
            time_us = int(batch.broker_time_us[position])
            latest_us = max(latest_us, time_us)
            key, value, headers = batch.keys[position], batch.values[position], batch.headers[position]
            # Timestamps may go back in a log, its order may not.
            yield latest_us, place, offset, time_us, key, value, headers, offset in section.wanted


class Pace:
    """Has each record wait for its time, from the first one that waits on."""

    def __init__(
        self, speed: float | None, stop: threading.Event, *, clock_s: Callable[[], float] = time.monotonic
    ) -> None:
        self._speed = speed
        self._stop = stop
        self._clock_s = clock_s
        self._begun: tuple[float, int] | None = None

    def wait(self, time_us: int) -> None:
        """Wait until the record's time has come, or the end."""
        if self._speed is None:
            return
        self._begun = self._begun or (self._clock_s(), time_us)
        started_s, first_us = self._begun
        left_s = started_s + (time_us - first_us) / 1_000_000 / self._speed - self._clock_s()
        if left_s > 0:
            self._stop.wait(left_s)


def renamed(headers: Headers, namespace: str) -> list[tuple[str, bytes | None]] | None:
    """Headers of a record, with the views that it is meant for by their names in the namespace."""
    if not headers:
        return None
    renamed: list[tuple[str, bytes | None]] = []
    for name, value in headers:
        names = value.decode("utf-8", "replace").split(",") if value and name in (VIEWS_HEADER, LATE_FOR_HEADER) else []
        renamed.append((name, ",".join(name_in(namespace, view) for view in names).encode() if names else value))
    return renamed
