"""Files of history that lie in a view's table before they belong to it: one commit takes all of them in.

A backfill writes rows once, as Parquet files of the table that no reader sees; the commit then only names them. Writing
them to a table of their own and copying them over cost more than decoding, computing and writing together.

Names begin with that of the backfill and end in a token of the process that wrote: a process that is about to end and
one that does its work again never write the same file. What is left of a backfill that was given up is found by name.

A backfill that is not done says so in the table, ``_backfill/<name>``: whoever clears the table of files that belong to
nothing leaves those of its name. Readers and other engines take no notice of what begins with an underscore.
"""

import functools
import json
import operator
import re
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import date
from pathlib import Path
from typing import Any, Final
from uuid import uuid4

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.fs as pafs
import pyarrow.parquet as pq
from deltalake.fs import DeltaStorageHandler
from deltalake.transaction import AddAction

from streams.sinks.delta import mapped_errors, open_delta, recorded_version
from streams.sinks.file_stats import file_stats

DAY_COLUMN: Final = "event_date"
"""Column that a table is partitioned by: a directory for each day, and no column of its files."""
_RISING: Final = ("source_offset", "event_time", "broker_time")
"""Columns whose values are close to the one before: written as differences; a dictionary would be as long as they."""
_NAMES: Final = "request_id"
"""The same of text."""
_UNDER_WAY: Final = "_backfill"
"""Directory of a table with a file for each backfill that is not done."""


@dataclass(frozen=True, kw_only=True)
class StagedFile:
    """A file of rows of one partition and day.

    Attributes:
        path: Below the table.
        size_bytes: Its size.
        event_date: Day of event time of its rows, ISO 8601.
        partition: Partition of what the view reads.
        first_offset: Lowest source offset of its rows.
        last_offset: Highest.
        rows: How many.
        written_ms: When it was written, in milliseconds since the epoch.
        stats: What the table's log says of its columns, as Delta's JSON.
    """

    path: str
    size_bytes: int
    event_date: str
    partition: int
    first_offset: int
    last_offset: int
    rows: int
    written_ms: int
    stats: str

    def to_document(self) -> dict[str, Any]:
        """The file as JSON values, as which the constructor takes it too."""
        return asdict(self)

    def to_action(self) -> AddAction:
        """What a commit says to take it in."""
        return AddAction(
            path=self.path,
            size=self.size_bytes,
            partition_values={DAY_COLUMN: self.event_date},
            modification_time=self.written_ms,
            data_change=True,
            stats=self.stats,
        )


def open_files(uri: str, storage_options: Mapping[str, str] | None) -> pafs.FileSystem:
    """Open the files below a table or root, which need not be there."""
    options = None if storage_options is None else dict(storage_options)
    if "://" not in uri:
        Path(uri).mkdir(parents=True, exist_ok=True)
    with mapped_errors(uri):
        return pafs.PyFileSystem(DeltaStorageHandler(uri, options))


def backfills_under_way(files: pafs.FileSystem, uri: str) -> set[str]:
    """Name the backfills of a table that are not done, whoever runs them, interrupted ones among them.

    Raises:
        SinkUnavailableError: The storage does not answer.
    """
    with mapped_errors(uri):
        return {info.base_name for info in files.get_file_info(pafs.FileSelector(_UNDER_WAY, allow_not_found=True))}


def backfill_of(path: str) -> str | None:
    """Name the backfill that a file of a table was written by; None where it was none."""
    found = re.fullmatch(r"history-([^-]+)-\d+-[0-9a-f]+\..*", path.rpartition("/")[2])
    return None if found is None else found[1]


class Stage:
    """The files of one backfill in a view's table.

    Args:
        uri: The table.
        name: Name of the backfill.
        storage_options: Options of the object store, as delta-rs takes them.
    """

    def __init__(self, uri: str, *, name: str, storage_options: Mapping[str, str] | None = None) -> None:
        self.name = name
        self._uri = uri
        self._storage_options = storage_options
        self._files = open_files(uri, storage_options)

    def announce(self) -> None:
        """Say that the backfill is under way, before its first file is written; safe to repeat.

        Raises:
            SinkUnavailableError: The storage does not answer.
        """
        path = f"{_UNDER_WAY}/{self.name}"
        # With a buffer: without one the stream would hand delta-rs something else than the bytes that it takes.
        with mapped_errors(self._uri), self._files.open_output_stream(path, buffer_size=4_096) as stream:
            stream.write(json.dumps({"announced_ms": time.time_ns() // 1_000_000}).encode())

    def withdraw(self) -> None:
        """Say that it is done or given up; safe to repeat.

        Raises:
            SinkUnavailableError: The storage does not answer.
        """
        self._remove({f"{_UNDER_WAY}/{self.name}"})

    def write(self, rows: pa.Table, *, partition: int) -> list[StagedFile]:
        """Write rows that have the columns of the table, a file for each day of event time.

        Raises:
            SinkUnavailableError: The storage does not answer.
        """
        with mapped_errors(self._uri):
            return [self._write_day(day, part, partition=partition) for day, part in _by_day(rows)]

    def read(self, file: StagedFile) -> pa.Table:
        """Read a file's rows, with the columns of the table.

        Raises:
            SinkUnavailableError: It is not there any more, or the storage does not answer.
        """
        with mapped_errors(self._uri), self._files.open_input_file(file.path) as stream:
            rows = pq.read_table(stream)
        day = pa.scalar(date.fromisoformat(file.event_date), pa.date32())
        return rows.append_column(DAY_COLUMN, pa.repeat(day, rows.num_rows))

    def choose(self, files: Sequence[StagedFile], wanted: Mapping[int, Sequence[range]]) -> list[StagedFile]:
        """Choose files whose rows are of these source offsets; one that others are in too is written without them.

        Args:
            files: The files.
            wanted: By partition, spans of source offsets.

        Raises:
            SinkUnavailableError: A file is not there any more, or the storage does not answer.
        """
        chosen = []
        for file in files:
            spans = wanted.get(file.partition, ())
            if any(span.start <= file.first_offset and file.last_offset < span.stop for span in spans):
                chosen.append(file)
            elif any(span.start <= file.last_offset and file.first_offset < span.stop for span in spans):
                offset = pc.field("source_offset")
                rows = self.read(file).filter(
                    functools.reduce(operator.or_, [(offset >= span.start) & (offset < span.stop) for span in spans])
                )
                chosen += self.write(rows, partition=file.partition) if rows.num_rows else []
        return chosen

    def absent(self, files: Sequence[StagedFile]) -> list[StagedFile]:
        """Tell which of these files are not there as they were written."""
        if not files:
            return []
        with mapped_errors(self._uri):
            found = self._files.get_file_info([file.path for file in files])
        return [file for file, info in zip(files, found, strict=True) if info.size != file.size_bytes]

    def remove(self, files: Sequence[StagedFile]) -> None:
        """Remove files that no commit took in; safe to repeat."""
        self._remove({file.path for file in files})

    @property
    def transaction(self) -> str:
        """Name of the application transaction of the commit that takes the files in."""
        return f"headrace:backfill:{self.name}"

    def clear(self, *, keep: Sequence[StagedFile] = ()) -> None:
        """Remove the files of the backfill, unless a commit has taken some in; safe to repeat.

        Args:
            keep: Those that are still wanted.

        Raises:
            SinkUnavailableError: The storage does not answer.
        """
        table = open_delta(self._uri, storage_options=self._storage_options)
        if table is not None and recorded_version(table, self.transaction) is not None:
            return
        with mapped_errors(self._uri):
            found = self._files.get_file_info(pafs.FileSelector("", recursive=True, allow_not_found=True))
        mine = {info.path for info in found if backfill_of(info.path) == self.name}
        self._remove(mine - {file.path for file in keep})

    def _remove(self, paths: set[str]) -> None:
        with mapped_errors(self._uri):
            for path in sorted(paths):
                try:
                    self._files.delete_file(path)
                except FileNotFoundError:
                    continue

    def _write_day(self, day: date, rows: pa.Table, *, partition: int) -> StagedFile:
        path = f"{DAY_COLUMN}={day.isoformat()}/history-{self.name}-{partition}-{uuid4().hex}.zstd.parquet"
        plain = [name for name in rows.column_names if name not in (*_RISING, _NAMES)]
        described: list[pq.FileMetaData] = []
        with self._files.open_output_stream(path) as stream:
            pq.write_table(
                rows,
                stream,
                row_group_size=max(rows.num_rows, 1),
                compression="zstd",
                compression_level=1,
                use_dictionary=plain,
                column_encoding={**dict.fromkeys(_RISING, "DELTA_BINARY_PACKED"), _NAMES: "DELTA_BYTE_ARRAY"},
                store_schema=False,
                metadata_collector=described,
            )
            size_bytes = stream.tell()
        offsets = pc.min_max(rows["source_offset"]).as_py()
        return StagedFile(
            path=path,
            size_bytes=size_bytes,
            event_date=day.isoformat(),
            partition=partition,
            first_offset=offsets["min"],
            last_offset=offsets["max"],
            rows=rows.num_rows,
            written_ms=time.time_ns() // 1_000_000,
            stats=json.dumps(file_stats(described[0])),
        )


def _by_day(stored: pa.Table) -> Iterator[tuple[date, pa.Table]]:
    """Each day with its rows in their order, less the column that the day's directory says."""
    rows = stored.drop_columns([DAY_COLUMN])
    days = stored[DAY_COLUMN].combine_chunks()
    found = pc.unique(days).to_pylist()
    if len(found) == 1:
        yield found[0], rows
        return
    numbers = days.cast(pa.int32()).to_numpy(zero_copy_only=False)
    order = np.argsort(numbers, kind="stable")
    for part in np.split(order, np.flatnonzero(np.diff(numbers[order])) + 1):
        if len(part):
            yield days[int(part[0])].as_py(), rows.take(pa.array(part))
