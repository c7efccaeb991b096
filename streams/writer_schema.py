"""Schemas by which framed payloads were written, as a schema registry gives them by id.

What an id means never changes, so that what has been found is kept for good; that it is not known may change, and is
asked again after a while. A process has one registry, named once where it is put together (:func:`use_registry`).
"""

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Final, Protocol

from schemas.errors import ConfigError

_HEADER_BYTES: Final = 5
_UNKNOWN_S: Final = 10.0
_MAX_UNKNOWN: Final = 10_000


@dataclass(frozen=True, kw_only=True)
class WriterSchema:
    """A schema of a registry.

    Attributes:
        id: Its id.
        kind: ``AVRO``, ``PROTOBUF`` or ``JSON``.
        text: The schema, as it was registered.
        references: Names and texts of the schemas that it refers to, each after those that it refers to itself.
    """

    id: int
    kind: str
    text: str
    references: tuple[tuple[str, str], ...] = ()


class Registry(Protocol):
    """Gives schemas by id."""

    def find(self, schema_id: int) -> WriterSchema | None:
        """Give the schema of an id; None where the registry knows none.

        Raises:
            RegistryUnavailableError: It does not answer; may be tried again.
        """


@dataclass
class _Known:
    make: Callable[[], Registry] | None = None
    registry: Registry | None = None
    schemas: dict[int, WriterSchema] = field(default_factory=dict)
    unknown_s: dict[int, float] = field(default_factory=dict)


_known = _Known()


def use_registry(make: Callable[[], Registry] | None) -> None:
    """Name the registry of this process; it is made when the first id is met."""
    _known.__init__(make)  # type: ignore[misc]  # what another registry said of an id is not known of this one


def unframe(payload: bytes) -> tuple[int, bytes] | None:
    """Take the id of its schema off a payload; None where it has none."""
    if len(payload) < _HEADER_BYTES or payload[0] != 0:
        return None
    return int.from_bytes(payload[1:_HEADER_BYTES]), payload[_HEADER_BYTES:]


def find_writer(schema_id: int) -> WriterSchema | None:
    """Give the schema of an id; None where the registry knows none.

    Raises:
        ConfigError: No registry has been named.
        RegistryUnavailableError: It does not answer; may be tried again.
    """
    if (found := _known.schemas.get(schema_id)) is not None:
        return found
    if not _is_new(schema_id):
        return None
    if _known.make is None:
        msg = (
            'a contract says "x-framing": "confluent", expected the address of a schema registry; set '
            "HEADRACE_SCHEMA_REGISTRY"
        )
        raise ConfigError(msg)
    if _known.registry is None:
        _known.registry = _known.make()
    found = _known.registry.find(schema_id)
    if found is not None:
        _known.schemas[schema_id] = found
        return found
    if len(_known.unknown_s) >= _MAX_UNKNOWN:
        _known.unknown_s.clear()
    _known.unknown_s[schema_id] = time.monotonic()
    return None


def new_ids(payloads: Iterable[bytes | None]) -> Sequence[int]:
    """List the ids in framed payloads that would be asked of the registry."""
    heads = {payload[1:_HEADER_BYTES] for payload in payloads if payload and payload[0] == 0}
    ids = sorted(int.from_bytes(head) for head in heads if len(head) == _HEADER_BYTES - 1)
    return [schema_id for schema_id in ids if schema_id not in _known.schemas and _is_new(schema_id)]


def _is_new(schema_id: int) -> bool:
    return time.monotonic() - _known.unknown_s.get(schema_id, -_UNKNOWN_S) >= _UNKNOWN_S
