"""Files that tables of rows are written to: NDJSON, or Parquet under a name that ends in ``.parquet``.

The bytes depend on the rows alone, not on how many of them come at a time.
"""

import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO, Final, Protocol

import pyarrow as pa
import pyarrow.parquet as pq

from schemas.errors import ConfigError, SinkError
from streams.wire import encode_lines

_ROW_GROUP: Final = 100_000


class RowFile(Protocol):
    """Takes rows in order."""

    def write(self, rows: pa.Table) -> None:
        """Append rows."""
        ...


@contextmanager
def open_row_file(path: Path | None, schema: pa.Schema) -> Iterator[RowFile]:
    """Open a file, or standard output as NDJSON where there is no path.

    Raises:
        ConfigError: It cannot be opened; nothing has been done yet.
        SinkError: Writing to it failed.
    """
    if path is None:
        yield _Named(_Lines(sys.stdout.buffer), "standard output")
        return
    try:
        stream = path.open("wb")
    except OSError as exc:
        msg = f"{path} cannot be written: {exc.strerror or exc}; expected a file in a directory that exists"
        raise ConfigError(msg) from exc
    try:
        with _writing(path):
            file = _RowGroups(stream, schema) if path.suffix.lower() == ".parquet" else _Lines(stream)
        yield _Named(file, path)
        with _writing(path):
            file.close()
            stream.close()
    finally:
        with suppress(OSError):
            stream.close()


@contextmanager
def _writing(path: Path | str) -> Iterator[None]:
    try:
        yield
    except BrokenPipeError:
        raise  # whoever reads has seen enough
    except OSError as exc:
        reason = exc.strerror or exc
        msg = f"writing to {path} failed: {reason}; what is there is not whole, make room for it and run this again"
        raise SinkError(msg) from exc


class _Lines:
    def __init__(self, stream: BinaryIO) -> None:
        self._stream = stream

    def write(self, rows: pa.Table) -> None:
        rest = memoryview(encode_lines(rows))
        while rest:  # unbuffered standard output takes what it can at a time
            rest = rest[self._stream.write(rest) :]
        self._stream.flush()

    def close(self) -> None:
        """Everything has been written."""


class _RowGroups:
    """Parquet in row groups of one size."""

    def __init__(self, stream: BinaryIO, schema: pa.Schema) -> None:
        self._writer = pq.ParquetWriter(stream, schema)
        self._waiting = schema.empty_table()

    def write(self, rows: pa.Table) -> None:
        self._waiting = pa.concat_tables([self._waiting, rows])
        while self._waiting.num_rows >= _ROW_GROUP:
            self._write_group(self._waiting.slice(0, _ROW_GROUP))
            self._waiting = self._waiting.slice(_ROW_GROUP)

    def close(self) -> None:
        if self._waiting.num_rows:
            self._write_group(self._waiting)
        self._writer.close()

    def _write_group(self, rows: pa.Table) -> None:
        # In one chunk, since pages end where chunks do.
        self._writer.write_table(rows.combine_chunks(), row_group_size=_ROW_GROUP)


class _Named:
    """A file whose failures name it."""

    def __init__(self, file: RowFile, path: Path | str) -> None:
        self._file = file
        self._path = path

    def write(self, rows: pa.Table) -> None:
        with _writing(self._path):
            self._file.write(rows)
