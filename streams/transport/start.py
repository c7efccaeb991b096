"""Where a consumer group begins that has never committed an offset: at a time, at offsets, at either end.

Source: the consumer's ``offsetsForTimes``, which answers "the end" where no record is as young as the time.
"""

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Final

from confluent_kafka import Consumer, TopicPartition

from schemas.errors import ConfigError
from schemas.time import format_rfc3339, parse_rfc3339_us
from streams.transport.options import Partition

_ASK_TIMEOUT_S: Final = 15.0
_NUMBER: Final = re.compile(r"[+-]?\d+(\.\d+)?")
_PLACE: Final = re.compile(r"(?P<topic>[^:,=]+):(?P<partition>\d+)=(?P<offset>\d+)")
_UNITS_US: Final = {"seconds": 1_000_000, "milliseconds": 1_000, "microseconds": 1}
_PLAUSIBLE_US: Final = (parse_rfc3339_us("1990-01-01T00:00:00Z"), parse_rfc3339_us("2100-01-01T00:00:00Z"))
_FORMS: Final = (
    "`beginning`, `end`, a time such as 2026-01-31T09:00:00Z, or offsets such as shop.events:0=1200,shop.events:1=900"
)


class Edge(StrEnum):
    """An end of a topic."""

    BEGINNING = "beginning"
    END = "end"


@dataclass(frozen=True)
class StartAt:
    """Where a new group begins; one of the three.

    Attributes:
        edge: At this end of each partition.
        time_us: At the first record whose timestamp is this or later; at the end where there is none.
        offsets: At these offsets.
    """

    edge: Edge | None = None
    time_us: int | None = None
    offsets: Mapping[Partition, int] = field(default_factory=dict)

    @classmethod
    def parse(cls, text: str, *, topics: Collection[str]) -> "StartAt":
        """Read what a user gave.

        Args:
            text: The text.
            topics: Topics that the role reads.

        Raises:
            ConfigError: It is none of the forms, or names another topic.
        """
        if text in tuple(Edge):
            return cls(edge=Edge(text))
        if _NUMBER.fullmatch(text):
            raise ConfigError(_about_number(text))
        if "=" in text:
            return cls(offsets=_parse_offsets(text, topics=topics))
        try:
            return cls(time_us=parse_rfc3339_us(text))
        except ValueError as exc:
            msg = f"`--start-at` is {text!r}, expected {_FORMS} ({exc})"
            raise ConfigError(msg) from exc

    def resolve(self, consumer: Consumer, partitions: Collection[Partition]) -> dict[Partition, int]:
        """Find the offsets to begin at.

        Args:
            consumer: Asks the broker; called on the thread that owns it.
            partitions: Partitions of which the group has committed nothing.

        Raises:
            ConfigError: A partition is not named, or ends before the offset that is.
            KafkaException: The broker does not answer.
        """
        bounds = {
            tp: consumer.get_watermark_offsets(TopicPartition(*tp), timeout=_ASK_TIMEOUT_S) for tp in sorted(partitions)
        }
        if self.edge is not None:
            return {tp: found[self.edge is Edge.END] for tp, found in bounds.items()}
        if self.time_us is not None:
            # Kafka counts in milliseconds: a time between two of them begins at the later one.
            asked = [TopicPartition(*tp, -(-self.time_us // 1_000)) for tp in bounds]
            found = consumer.offsets_for_times(asked, timeout=_ASK_TIMEOUT_S) if asked else []
            # A negative offset says that no record is so young: the end, and never the start.
            return {
                (tp.topic, tp.partition): tp.offset if tp.offset >= 0 else bounds[tp.topic, tp.partition][1]
                for tp in found
            }
        return {tp: self._offset_in(tp, *found) for tp, found in bounds.items()}

    def _offset_in(self, tp: Partition, first: int, end: int) -> int:
        place = f"{tp[0]}:{tp[1]}"
        if (offset := self.offsets.get(tp)) is None:
            msg = f"`--start-at` names no offset of {place}, expected one for each partition; it has {first} to {end}"
            raise ConfigError(msg)
        if not first <= offset <= end:
            msg = f"`--start-at` is {place}={offset}, expected an offset from {first} to {end}, its end"
            raise ConfigError(msg)
        return offset


def _about_number(text: str) -> str:
    readings = {unit: int(float(text) * unit_us) for unit, unit_us in _UNITS_US.items()}
    times = [
        f"{format_rfc3339(time_us)} if it is in {unit}"
        for unit, time_us in readings.items()
        if _PLAUSIBLE_US[0] <= time_us < _PLAUSIBLE_US[1]
    ]
    meant = f"write {' or '.join(times)}" if times else "as a time it is before 1990 or after 2100 in every unit"
    return f"`--start-at` is {text!r}, a number without a unit, expected {_FORMS}; {meant}"


def _parse_offsets(text: str, *, topics: Collection[str]) -> dict[Partition, int]:
    offsets: dict[Partition, int] = {}
    for part in text.split(","):
        place = _PLACE.fullmatch(part.strip())
        if place is None:
            msg = f"`--start-at` has {part!r}, expected TOPIC:PARTITION=OFFSET, several with commas between"
            raise ConfigError(msg)
        if place["topic"] not in topics:
            msg = f"`--start-at` names topic {place['topic']!r}, expected one that the role reads: {sorted(topics)}"
            raise ConfigError(msg)
        offsets[place["topic"], int(place["partition"])] = int(place["offset"])
    return offsets
