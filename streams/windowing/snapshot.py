"""State of an engine as bytes: Arrow IPC streams, each of which names its format, its view and what part it is.

A checksum (CRC-32) follows the stream: a part that was damaged is refused, never misread.

There are three kinds of part. A *whole* is all of the state; a *bucket* all of the state of the keys that fall into it
(:mod:`streams.windowing.bucket`); *changes* are what has changed since the changes before. Changes are numbered from 1
on, and a whole or a bucket carries the number of the changes that it follows: it holds what they and all before them
told. The state is then the newest of every bucket and all changes after it, a bucket that was never written being
empty at number 0.

Parts say what state a key or a tile has, never how it changed, so the newest that names one is right. What is gone is
not listed: the horizon of tiles and the watermark, which every part carries, tell it.
"""

import json
import zlib
from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Final

import pyarrow as pa

from schemas.errors import StateVersionError
from streams.windowing.bucket import N_BUCKETS

FORMAT_VERSION: Final = 3
_SCHEMA: Final = pa.schema([pa.field("section", pa.string()), pa.field("content", pa.large_binary())])
_OPTIONS: Final = pa.ipc.IpcWriteOptions(compression="zstd")
_CHECKSUM_BYTES: Final = 4


class PartKind(StrEnum):
    """What a part holds."""

    WHOLE = "whole"
    BUCKET = "bucket"
    CHANGES = "changes"


@dataclass(frozen=True, kw_only=True)
class PartHeader:
    """What a part is.

    Attributes:
        kind: What it holds.
        number: Number of the changes that it is; of a whole or a bucket, of those that it follows.
        bucket: Number of the bucket; None for other kinds.
    """

    kind: PartKind
    number: int
    bucket: int | None = None


@dataclass
class Content:
    """What stands in a part.

    Attributes:
        facts: Single values, as JSON has them.
        tables: Tables by section; one without rows may be left out.
    """

    facts: dict[str, Any] = field(default_factory=dict)
    tables: dict[str, pa.Table] = field(default_factory=dict)

    def column(self, section: str, name: str) -> Any:
        """Numbers of a column; of a section that was left out, none."""
        table = self.tables.get(section)
        return pa.array([], pa.int64()).to_numpy() if table is None else table.column(name).to_numpy()


@dataclass(frozen=True)
class Selection:
    """Which state to write.

    Attributes:
        kind: What kind of part.
        bucket: The bucket, for that kind.
    """

    kind: PartKind
    bucket: int | None = None


def write_part(header: PartHeader, content: Content, *, identity: dict[str, str]) -> bytes:
    """Write a part; ``identity`` says whose state it is."""
    metadata = {
        "format_version": str(FORMAT_VERSION),
        **identity,
        "kind": header.kind.value,
        "number": str(header.number),
        "bucket": "" if header.bucket is None else str(header.bucket),
        "facts": json.dumps(content.facts),
    }
    tables = {name: table for name, table in content.tables.items() if table.num_rows}
    contents = [_pack(table).to_pybytes() for table in tables.values()]
    packed = pa.table([list(tables), contents], schema=_SCHEMA.with_metadata(metadata))
    blob: bytes = _pack(packed, _OPTIONS).to_pybytes()
    return blob + _checksum(blob)


def read_header(blob: bytes, *, identity: dict[str, str] | None = None) -> PartHeader:
    """Tell what a part is, which does not read what it holds.

    Raises:
        StateVersionError: It is no part, damaged, of another format version, or of another view, definition or
            partition than ``identity`` says.
    """
    metadata = _metadata(blob, identity or {})
    kind, bucket = PartKind(metadata["kind"]), metadata["bucket"]
    return PartHeader(kind=kind, number=int(metadata["number"]), bucket=int(bucket) if bucket else None)


def read_part(blob: bytes, *, identity: dict[str, str]) -> Content:
    """Read what a part holds.

    Raises:
        StateVersionError: As for :func:`read_header`.
    """
    metadata = _metadata(blob, identity)
    packed = pa.ipc.open_stream(pa.py_buffer(blob)).read_all()
    sections = zip(packed.column("section").to_pylist(), packed.column("content"), strict=True)
    tables = {name: pa.ipc.open_stream(content.as_buffer()).read_all() for name, content in sections}
    return Content(json.loads(metadata["facts"]), tables)


def _metadata(blob: bytes, identity: dict[str, str]) -> dict[str, str]:
    stream, checksum = memoryview(blob)[:-_CHECKSUM_BYTES], blob[-_CHECKSUM_BYTES:]
    if checksum != _checksum(stream):
        msg = (
            f"state snapshot of {len(blob)} bytes is damaged, or of another format than {FORMAT_VERSION}: its checksum "
            f"is {checksum.hex() or 'missing'}, expected {_checksum(stream).hex()}; rebuild the state from the log"
        )
        raise StateVersionError(msg)
    schema = pa.ipc.open_stream(pa.py_buffer(blob)).schema
    metadata = {key.decode(): value.decode() for key, value in (schema.metadata or {}).items()}
    for name, expected in {"format_version": str(FORMAT_VERSION), **identity}.items():
        if metadata.get(name) != expected:
            msg = (
                f"state snapshot has {name} {metadata.get(name)!r}, expected {expected!r}; "
                "rebuild the state from the log, or restore it with the definition it was made by"
            )
            raise StateVersionError(msg)
    return metadata


def _checksum(stream: bytes | memoryview) -> bytes:
    return zlib.crc32(stream).to_bytes(_CHECKSUM_BYTES, "big")


def newest_first(headers: Iterable[PartHeader]) -> tuple[list[int], int]:
    """Choose the parts that make up a state.

    Returns:
        Positions of these parts, the newest first, and the number of the newest changes.

    Raises:
        StateVersionError: Changes are missing that some bucket needs.
    """
    headers = list(headers)
    full: dict[int, int] = {}
    changes: dict[int, int] = {}
    for position, header in enumerate(headers):
        if header.kind is PartKind.CHANGES:
            changes[header.number] = position
            continue
        for bucket in range(N_BUCKETS) if header.bucket is None else (header.bucket,):
            if bucket not in full or headers[full[bucket]].number <= header.number:
                full[bucket] = position
    numbers = [headers[full[bucket]].number if bucket in full else 0 for bucket in range(N_BUCKETS)]
    newest = max([*numbers, *changes])
    needed = range(min(numbers) + 1, newest + 1)
    if missing := [number for number in needed if number not in changes]:
        msg = (
            f"changes {missing[0]} of the state are missing ({len(missing)} of {len(needed)} that follow its oldest "
            "bucket); its changelog was cut: rebuild the state from the log"
        )
        raise StateVersionError(msg)
    chosen = [*(changes[number] for number in needed), *set(full.values())]
    # At one number, what is full comes before the changes that lead to it: they add nothing.
    return sorted(chosen, key=lambda at: (-headers[at].number, headers[at].kind is PartKind.CHANGES)), newest


def _pack(table: pa.Table, options: pa.ipc.IpcWriteOptions | None = None) -> pa.Buffer:
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, table.schema, options=options) as writer:
        writer.write_table(table)
    return sink.getvalue()
