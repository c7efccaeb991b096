"""Which events of a request may go on their topic: what a row alone decides, by the checks of the live path. Pure.

Whether an event is late, a duplicate or an overflow hangs on the events before it in its partition; that is decided
where its windows are, and told on the dead-letter topic.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import pyarrow as pa

from schemas.errors import ConfigError
from schemas.row import Reason
from schemas.source import EventSource
from schemas.topology import connect
from schemas.view import FeatureView
from streams.batch import RawBatch
from streams.decoding import decode
from streams.windowing.admission import Rejections, Screen
from streams.wire import encode_keys

_REMEDIES: Final = {
    Reason.DECODE_ERROR: "send one JSON object, in UTF-8",
    Reason.SCHEMA_VIOLATION: "correct it, or send it to the source whose contract it follows",
    Reason.MISSING_KEY: "give the entity key",
    Reason.MISSING_EVENT_TIME: "say when it happened",
    Reason.TIMESTAMP_UNIT: "convert it to the unit of the contract",
    Reason.IMPLAUSIBLE_TIME: "correct the clock that it comes from",
    Reason.FUTURE_TIMESTAMP: "correct the clock that it comes from, or send it once its time has come",
}


@dataclass(frozen=True)
class AdmittedEvent:
    """An event that may go on the topic, by its key."""

    key: bytes | None
    value: bytes


@dataclass(frozen=True)
class Refusal:
    """Why an event may not, and what to do."""

    reason: str
    detail: str
    remedy: str


class EventAdmission:
    """Admits events of one source.

    An event that every view of the source would refuse is refused; one that some views refuse, as it lacks their entity
    key, is for them to refuse.

    Args:
        source: The source.
        views: The views that read it, at least one.

    Raises:
        ConfigError: Its events cannot be sent as JSON, or what they are keyed by is not clear.
    """

    def __init__(self, source: EventSource, views: Sequence[FeatureView]) -> None:
        self.source = source
        contract = source.schema
        if contract.format != "json" or contract.is_framed:
            framed = " with the id of a schema before them" if contract.is_framed else ""
            msg = (
                f"source {source.topic} has payloads in {contract.format}{framed}, expected plain JSON; put them on "
                "Kafka by a client that writes them"
            )
            raise ConfigError(msg)
        entity_keys = list(dict.fromkeys(view.entity.key for view in views))
        if source.key is None and len(entity_keys) > 1:
            msg = (
                f"source {source.topic} is read by entities with the keys {entity_keys} and does not say by which its "
                "records are keyed, expected `key` in its EventSource"
            )
            raise ConfigError(msg)
        self._key = entity_keys[0] if source.key is None else source.key
        self._screens = [Screen(source, key=key) for key in entity_keys]

    def admit(self, values: Sequence[bytes], *, now_us: int) -> list[AdmittedEvent | Refusal]:
        """Judge events, in their order.

        Args:
            values: Their payloads.
            now_us: What their record timestamp will be, in microseconds, by which the future guard goes.
        """
        batch = RawBatch(
            topic=self.source.topic,
            partition=0,
            offsets=np.arange(len(values)),
            broker_time_us=np.full(len(values), now_us),
            keys=[None] * len(values),
            values=values,
            headers=[None] * len(values),
            next_offset=len(values),
        )
        decoded = decode(batch, self.source.schema)
        found: dict[int, AdmittedEvent | Refusal] = {
            letter["_offset"]: _refusal(Reason(letter["reason"]), letter["detail"])
            for letter in decoded.rejected.to_pylist()
        }
        if decoded.rows.num_rows:
            rows = decoded.rows.combine_chunks()
            refused = self._screened(rows)
            keys = encode_keys(rows.column(self._key)) if self._key else [None] * rows.num_rows
            for row, (position, key) in enumerate(zip(rows.column("_offset").to_pylist(), keys, strict=True)):
                found[position] = refused.get(row) or AdmittedEvent(key, values[position])
        return [found[position] for position in range(len(values))]

    def _screened(self, rows: pa.Table) -> dict[int, Refusal]:
        """Find the rows that no view takes."""
        refused: dict[int, Refusal] | None = None
        for screen in self._screens:
            rejections = Rejections()
            screen.check(rows, rejections)
            own = {row: _refusal(reason, detail) for row, reason, detail, _ in rejections.rows}
            refused = own if refused is None else {row: refused[row] for row in refused.keys() & own.keys()}
        return refused or {}


def make_admissions(
    views: Sequence[FeatureView],
) -> tuple[dict[str, EventAdmission], dict[str, str]]:
    """Make the admission of each source that views read.

    Returns:
        The admissions by topic, and of each source that has none, why.
    """
    admissions, without = {}, {}
    for topic, source in sorted(connect(views).sources.items()):
        try:
            admissions[topic] = EventAdmission(source, [view for view in views if source in view.sources])
        except ConfigError as exc:
            without[topic] = str(exc)
    return admissions, without


def _refusal(reason: Reason, detail: str) -> Refusal:
    return Refusal(reason.value, detail, _REMEDIES[reason])
