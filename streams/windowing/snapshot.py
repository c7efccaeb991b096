"""State of an engine as bytes: one Arrow IPC stream that names its format, its view and its sections."""

from typing import Final

import pyarrow as pa

from schemas.errors import StateVersionError

FORMAT_VERSION: Final = 1
_SCHEMA: Final = pa.schema([pa.field("section", pa.string()), pa.field("content", pa.binary())])


def write_snapshot(sections: dict[str, bytes], *, identity: dict[str, str]) -> bytes:
    """Pack named sections; ``identity`` says whose state it is."""
    metadata = {"format_version": str(FORMAT_VERSION), **identity}
    table = pa.table([list(sections), list(sections.values())], schema=_SCHEMA.with_metadata(metadata))
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table)
    packed: bytes = sink.getvalue().to_pybytes()
    return packed


def read_snapshot(blob: bytes, *, identity: dict[str, str]) -> dict[str, bytes]:
    """Unpack the sections of a snapshot that must have this identity.

    Raises:
        StateVersionError: It is no snapshot, of another format version, or of another view, definition or partition.
    """
    try:
        table = pa.ipc.open_stream(pa.py_buffer(blob)).read_all()
    except (pa.ArrowInvalid, OSError) as exc:
        msg = f"state snapshot can't be read ({exc}), expected an Arrow IPC stream; rebuild the state from the log"
        raise StateVersionError(msg) from exc
    got = {key.decode(): value.decode() for key, value in (table.schema.metadata or {}).items()}
    for field, expected in {"format_version": str(FORMAT_VERSION), **identity}.items():
        if got.get(field) != expected:
            msg = (
                f"state snapshot has {field} {got.get(field)!r}, expected {expected!r}; "
                "rebuild the state from the log, or restore it with the definition it was made by"
            )
            raise StateVersionError(msg)
    return dict(zip(table.column("section").to_pylist(), table.column("content").to_pylist(), strict=True))


def table_to_bytes(table: pa.Table) -> bytes:
    """Write a table as an Arrow IPC stream."""
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table)
    packed: bytes = sink.getvalue().to_pybytes()
    return packed


def table_from_bytes(content: bytes) -> pa.Table:
    """Read a table from an Arrow IPC stream."""
    return pa.ipc.open_stream(pa.py_buffer(content)).read_all()
