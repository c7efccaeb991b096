"""Dead letters: what they carry, the same for every role that makes them."""

import hashlib
from dataclasses import dataclass
from typing import Any, Final

from streams.batch import RawBatch
from streams.ports import EpochWriter
from streams.transport.epoch import MAX_RECORD_BYTES

HEAD_BYTES: Final = 64 * 2**10
"""What is kept of a key or value of a record that is too large for a dead letter."""
_OWN_BYTES: Final = 64 * 2**10
"""Room for the headers that say why, and for what Kafka adds."""
_FACT_BYTES: Final = 4 * 2**10
"""Longest of those headers: a detail may quote the record."""


@dataclass(frozen=True)
class _Original:
    key: bytes | None
    value: bytes | None
    headers: list[tuple[str, Any]]


async def write_dead_letter(epoch: EpochWriter, topic: str, batch: RawBatch, position: int, **facts: Any) -> None:
    """Write a record to a dead-letter topic: its key, bytes and headers, where it came from, and why it is there.

    A record that is too large for Kafka together with that (a source may take larger ones than a dead-letter topic) is
    cut: the worker must get past it, and the whole of it still stands where the headers say it came from.
    ``headrace.cut`` names what was cut; ``headrace.value_bytes`` and ``headrace.value_sha256`` (of a key likewise) are
    those of the original.

    Args:
        epoch: The open epoch.
        topic: The dead-letter topic.
        batch: The batch with the record.
        position: Where the record is in the batch.
        facts: ``reason``, ``detail`` and whatever else is known; None is left out.
    """
    original = _Original(batch.keys[position], batch.values[position], list(batch.headers[position] or ()))
    origin = {"topic": batch.topic, "partition": batch.partition, "offset": int(batch.offsets[position])}
    kept, cut = _cut(original) if _size(original) > MAX_RECORD_BYTES - _OWN_BYTES else (original, {})
    told = {**facts, **origin, **cut}
    own = [(f"headrace.{name}", str(fact).encode()[:_FACT_BYTES]) for name, fact in told.items() if fact is not None]
    await epoch.write_output(topic, key=kept.key, value=kept.value, headers=[*kept.headers, *own])


def _size(record: _Original) -> int:
    headers = sum(len(name) + len(content or b"") for name, content in record.headers)
    return len(record.key or b"") + len(record.value or b"") + headers


def _cut(record: _Original) -> tuple[_Original, dict[str, Any]]:
    facts: dict[str, Any] = {}
    cut = []
    kept = {"key": record.key, "value": record.value}
    for name, content in kept.items():
        if content is not None and len(content) > HEAD_BYTES:
            kept[name] = content[:HEAD_BYTES]
            facts |= {f"{name}_bytes": len(content), f"{name}_sha256": hashlib.sha256(content).hexdigest()}
            cut.append(name)
    headers = record.headers
    if _size(_Original(None, None, headers)) > HEAD_BYTES:
        headers = []
        cut.append("headers")
    return _Original(kept["key"], kept["value"], headers), {"cut": ",".join(cut), **facts}
