"""What a view reads: one topic that is keyed by its entity, or several, or others, by way of a repartition topic."""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Final

import pyarrow as pa

from schemas.entity import Entity
from schemas.errors import ConfigError
from schemas.source import EventSource

SOURCE_COLUMN: Final = "_source"
"""Column of a view over several sources that holds the topic which each event came from."""
_MAX_TOPIC: Final = 249
_MAX_BYTES: Final = 2**20
"""Bytes of a payload that leave room, in a record, for its key, its headers and where it comes from."""


@dataclass(frozen=True)
class ViewInput:
    """The sources of one entity, as a view reads them.

    A source that is not keyed by the entity, and each of several sources, goes through a repartition topic first: there
    the rows of all of them stand keyed by the entity, in one order that every replay sees again.

    Attributes:
        sources: In the order of their topics.
        entity: What the rows are keyed by.
    """

    sources: tuple[EventSource, ...]
    entity: Entity

    def __post_init__(self) -> None:
        topics = [source.topic for source in self.sources]
        if not topics or len(set(topics)) < len(topics):
            msg = f"`source` has the topics {topics}, expected one source or more, each of another topic"
            raise ConfigError(msg)
        for source in self.sources:
            if self.entity.key not in source.schema.fields:
                msg = (
                    f"entity key {self.entity.key!r} is no field of {source.contract}, "
                    f"expected one of {list(source.schema.fields)}"
                )
                raise ConfigError(msg)
        self._check_event_ids()
        for source in self.sources if self.is_repartitioned else ():
            if source.schema.max_bytes > _MAX_BYTES:
                msg = (
                    f"contract {source.contract} has `x-max-bytes` {source.schema.max_bytes}, expected at most "
                    f"{_MAX_BYTES} where rows go through a repartition topic; key the source by the entity"
                )
                raise ConfigError(msg)
        if len(self.topic) > _MAX_TOPIC:
            msg = f"topic {self.topic} has {len(self.topic)} characters, expected at most {_MAX_TOPIC}: shorten topics"
            raise ConfigError(msg)
        _ = self.columns

    def _check_event_ids(self) -> None:
        windows = {source.dedup_window_us for source in self.sources if source.event_id is not None}
        if len(windows) > 1:
            found = {source.topic: source.dedup_window for source in self.sources if source.event_id is not None}
            msg = f"sources of one view have the dedup windows {found}, expected the same `dedup_window` in all"
            raise ConfigError(msg)

    @property
    def is_repartitioned(self) -> bool:
        """Whether rows go through a repartition topic."""
        return len(self.sources) > 1 or self.sources[0].key not in (None, self.entity.key)

    @property
    def topic(self) -> str:
        """Topic that the view reads."""
        if not self.is_repartitioned:
            return self.sources[0].topic
        return f"repartition.{'--'.join(source.topic for source in self.sources)}.{self.entity.key}"

    @cached_property
    def columns(self) -> pa.Schema:
        """Columns of an event: those of all contracts, null where a source has none of that name.

        Raises:
            ConfigError: Two sources have a field of one name and different types.
        """
        fields: dict[str, tuple[pa.Field, str]] = {}
        for source in self.sources:
            for field in source.schema.arrow_schema:
                known, contract = fields.setdefault(field.name, (field, source.contract))
                if known.type != field.type:
                    msg = (
                        f"field {field.name!r} is {known.type} in {contract} and {field.type} in {source.contract}, "
                        "expected one type in all sources of a view; rename it in one of the contracts"
                    )
                    raise ConfigError(msg)
        own = [pa.field(SOURCE_COLUMN, pa.string())] if len(self.sources) > 1 else []
        return pa.schema([*(field for field, _ in fields.values()), *own])

    @property
    def max_out_of_orderness_us(self) -> int:
        """Largest bounded out-of-orderness of a source."""
        return max(source.max_out_of_orderness_us for source in self.sources)

    @property
    def dedup_window_us(self) -> int | None:
        """Event time for which an event id is remembered, None when off."""
        return next((s.dedup_window_us for s in self.sources if s.event_id is not None), None)

    @property
    def event_id_type(self) -> pa.DataType:
        """Type of the ids by which copies are told, which is text behind a repartition topic."""
        if self.is_repartitioned:
            return pa.string()
        return self.columns.field(self.sources[0].event_id).type

    @property
    def plausible_us(self) -> tuple[int, int]:
        """Range ``[from, until)`` that event times of any source lie in."""
        return min(s.plausible_from_us for s in self.sources), max(s.plausible_until_us for s in self.sources)

    def source(self, topic: str) -> EventSource:
        """Find a source by its topic."""
        return next(source for source in self.sources if source.topic == topic)

    @property
    def definition(self) -> dict[str, Any]:
        """What decides which rows are admitted, and when, as JSON values; equal where the decisions are."""
        if not self.is_repartitioned:
            return {"source": self.sources[0].definition}
        return {"sources": [source.definition for source in self.sources]}

    @cached_property
    def definition_hash(self) -> str:
        """Stable hash of what decides the records on a repartition topic."""
        return hash_definition({"entity_key": self.entity.key, **self.definition})


def hash_definition(definition: Mapping[str, Any]) -> str:
    """16 hexadecimal digits of SHA-256 over the definition's canonical JSON."""
    canonical = json.dumps(definition, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(canonical.encode()).hexdigest()[:16]
