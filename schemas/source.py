"""Where events come from, and what their times may look like."""

import re
from dataclasses import KW_ONLY, dataclass
from functools import cached_property
from typing import Any, Final

import pyarrow as pa

from schemas.contract import Contract, load_contract
from schemas.errors import ConfigError
from schemas.field import EVENT_TIME_UNITS_US
from schemas.time import parse_duration_us, parse_rfc3339_us

_TOPIC: Final = re.compile(r"[a-zA-Z0-9._-]{1,249}")


@dataclass(frozen=True)
class EventSource:
    """A Kafka topic of raw events.

    Attributes:
        topic: Topic name.
        contract: ``name@version`` of its contract (see :mod:`schemas.contract`).
        key: Column that its records are keyed by, an empty text where they are keyed by none; left out, they are keyed
            by the entity of each view that reads them. Views of another entity read it by way of a repartition topic.
        event_time: Column that holds the event time.
        max_out_of_orderness: How far behind the newest event a row may come and still be on time.
        idle_timeout: Processing time without rows after which a partition is idle; None switches idleness off.
        idle_advance: Whether an idle partition's own watermark moves on with the clock.
        max_future_skew: How far an event time may lie after Kafka's record timestamp; None switches the guard off.
        plausible_from: Earliest plausible event time, RFC 3339.
        plausible_until: End (exclusive) of plausible event times, RFC 3339.
        event_id: Column that identifies an event, for de-duplication.
        dedup_window: Copies of an ``event_id`` whose event times are less than this apart are duplicates; needs
            ``event_id``. In a session view, rows with an id that are further behind than it (and the gap and the
            allowed lateness) are late, since a copy of them could not be told.
    """

    topic: str
    _: KW_ONLY
    contract: str
    key: str | None = None
    event_time: str = "event_time"
    max_out_of_orderness: str = "0s"
    idle_timeout: str | None = None
    idle_advance: bool = False
    max_future_skew: str | None = "1m"
    plausible_from: str = "1990-01-01T00:00:00Z"
    plausible_until: str = "2100-01-01T00:00:00Z"
    event_id: str | None = None
    dedup_window: str | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.topic, str) or not _TOPIC.fullmatch(self.topic) or self.topic in {".", ".."}:
            msg = f"`topic` is {self.topic!r}, expected a name of 1 to 249 letters, digits, '.', '_' and '-'"
            raise ConfigError(msg)
        self._check_event_time()
        for field in ("max_out_of_orderness", "idle_timeout", "max_future_skew", "dedup_window"):
            if getattr(self, field) is not None or field == "max_out_of_orderness":
                parse_duration_us(getattr(self, field), field=field)
        if self.idle_timeout_us == 0:
            msg = "`idle_timeout` is 0s, expected more than 0; leave it out to switch idleness off"
            raise ConfigError(msg)
        if not isinstance(self.idle_advance, bool):
            msg = f"`idle_advance` is {self.idle_advance!r}, expected True or False"
            raise ConfigError(msg)
        if self.idle_advance and self.idle_timeout is None:
            msg = "`idle_advance` is True without `idle_timeout`, expected an idle timeout such as '30s'"
            raise ConfigError(msg)
        self._check_event_id()
        if self.key and self.key not in list(self.schema.fields):
            msg = (
                f"`key` is {self.key!r}, expected a field of {self.contract}: {list(self.schema.fields)}, or '' where "
                "the records are keyed by none of them"
            )
            raise ConfigError(msg)
        for field in ("plausible_from", "plausible_until"):
            try:
                parse_rfc3339_us(getattr(self, field))
            except ValueError as exc:
                msg = f"`{field}` is {getattr(self, field)!r}, expected RFC 3339 such as '1990-01-01T00:00:00Z'"
                raise ConfigError(msg) from exc
        if self.plausible_from_us >= self.plausible_until_us:
            msg = f"`plausible_from` {self.plausible_from} is not before `plausible_until` {self.plausible_until}"
            raise ConfigError(msg)

    def _check_event_time(self) -> None:
        if self.event_time not in list(self.schema.fields):
            fields = list(self.schema.fields)
            msg = f"`event_time` is {self.event_time!r}, expected a field of {self.contract}: {fields}"
            raise ConfigError(msg)
        if self.event_time in self.schema.personal:
            msg = (
                f"event time `{self.event_time}` of {self.contract} is marked x-pii, expected another field: rows, "
                "watermarks and dead letters tell event times"
            )
            raise ConfigError(msg)
        arrow = self.schema.arrow_schema.field(self.event_time).type
        unit = self.schema.fields[self.event_time].get("x-unit")
        if pa.types.is_integer(arrow) and unit not in EVENT_TIME_UNITS_US:
            msg = (
                f'integer event time `{self.event_time}` of {self.contract} has unit {unit!r}, expected "x-unit" in '
                f"its contract to be one of {sorted(EVENT_TIME_UNITS_US)}"
            )
            raise ConfigError(msg)
        if not pa.types.is_integer(arrow) and not pa.types.is_string(arrow):
            msg = f"event time `{self.event_time}` of {self.contract} is {arrow}, expected integer or RFC 3339 text"
            raise ConfigError(msg)

    def _check_event_id(self) -> None:
        if (self.event_id is None) != (self.dedup_window is None):
            msg = "`event_id` and `dedup_window` go together, expected both or neither"
            raise ConfigError(msg)
        if self.dedup_window_us == 0:
            msg = "`dedup_window` is 0s, expected more than 0; leave it and `event_id` out to admit copies"
            raise ConfigError(msg)
        if self.event_id is not None and self.event_id not in list(self.schema.fields):
            msg = f"`event_id` is {self.event_id!r}, expected a field of {self.contract}: {list(self.schema.fields)}"
            raise ConfigError(msg)
        arrow = None if self.event_id is None else self.schema.arrow_schema.field(self.event_id).type
        if arrow is not None and not pa.types.is_string(arrow) and not pa.types.is_integer(arrow):
            msg = f"event id `{self.event_id}` of {self.contract} is {arrow}, expected text or an integer"
            raise ConfigError(msg)

    @cached_property
    def schema(self) -> Contract:
        """The contract of the payloads."""
        return load_contract(self.contract)

    @property
    def event_time_unit_us(self) -> int | None:
        """Microseconds of the unit of an integer event time; None when event times are text."""
        unit = self.schema.fields[self.event_time].get("x-unit")
        return None if unit is None else EVENT_TIME_UNITS_US[unit]

    @property
    def max_out_of_orderness_us(self) -> int:
        """Bounded out-of-orderness in microseconds."""
        return parse_duration_us(self.max_out_of_orderness, field="max_out_of_orderness")

    @property
    def idle_timeout_us(self) -> int | None:
        """Idle timeout in microseconds of processing time, None when off."""
        return None if self.idle_timeout is None else parse_duration_us(self.idle_timeout, field="idle_timeout")

    @property
    def max_future_skew_us(self) -> int | None:
        """Future guard in microseconds, None when off."""
        skew = self.max_future_skew
        return None if skew is None else parse_duration_us(skew, field="max_future_skew")

    @property
    def dedup_window_us(self) -> int | None:
        """Event time for which an event id is remembered, None when off."""
        return None if self.dedup_window is None else parse_duration_us(self.dedup_window, field="dedup_window")

    @property
    def plausible_from_us(self) -> int:
        """Earliest plausible event time."""
        return parse_rfc3339_us(self.plausible_from)

    @property
    def plausible_until_us(self) -> int:
        """End (exclusive) of plausible event times."""
        return parse_rfc3339_us(self.plausible_until)

    @property
    def definition(self) -> dict[str, Any]:
        """What decides which rows are admitted, and when, as JSON values; equal where the decisions are."""
        return {
            "topic": self.topic,
            "event_time": self.event_time,
            "max_out_of_orderness_us": self.max_out_of_orderness_us,
            "idle_timeout_us": self.idle_timeout_us,
            "idle_advance": self.idle_advance,
            "max_future_skew_us": self.max_future_skew_us,
            "plausible_from_us": self.plausible_from_us,
            "plausible_until_us": self.plausible_until_us,
            "event_id": self.event_id,
            "dedup_window_us": self.dedup_window_us,
            "contract": self.schema.definition,
        }

    @property
    def dead_letter_topic(self) -> str:
        """Topic that takes the rows which are in no feature."""
        return f"dlq.{self.topic}"
