"""The raw archive: every record of a topic, as it came, in a Delta table per topic; history that outlives Kafka's.

A table is ``<root>/raw.<topic>``, partitioned by the topic's partition. As in the feature tables each commit carries an
application transaction per partition, whose version is the last offset committed, so that each record is there once.
Reading gives the records back in log order, as the batches that a consumer of the topic would have got.
"""

import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.dataset as ds
from deltalake import CommitProperties, DeltaTable, Transaction, write_deltalake
from deltalake import exceptions as delta_errors

from schemas.errors import SchemaMismatchError, SinkUnavailableError
from schemas.row import TIMESTAMP
from streams.batch import Headers, PayloadColumn, RawBatch
from streams.ports import LogPart
from streams.sinks.delta import commit_until_alone, files_with, join_uri, mapped_errors, open_delta, recorded_version
from streams.sinks.offline import WRITER_PROPERTIES, CommitResult

_HEADER: Final = pa.struct([pa.field("name", pa.string()), pa.field("value", pa.binary())])
RAW_COLUMNS: Final = pa.schema(
    [
        pa.field("partition", pa.int32()),
        pa.field("offset", pa.int64()),
        pa.field("broker_time", TIMESTAMP),
        pa.field("key", pa.binary()),
        pa.field("value", pa.binary()),
        pa.field("headers", pa.list_(_HEADER)),
    ]
)
"""Columns of an archived record; ``broker_time`` is Kafka's record timestamp, ``value`` is null for a tombstone."""
_TOPIC: Final = "headrace.topic"
_READ_ROWS: Final = 50_000
_JOINED_ROWS: Final = 50_000
_JOINED_BYTES: Final = 64 * 2**20


def archive_uri(root: str | Path, topic: str) -> str:
    """Name the place of a topic's archive, e.g. ``/data/raw.shop.events``."""
    return join_uri(root, f"raw.{topic}")


class ArchiveWriter:
    """Appends raw records to the archives of their topics; each write is safe to repeat.

    Calls block on storage. One writer may be used by several threads.

    Args:
        root: Directory or object store URL that holds the tables.
        storage_options: Options of the object store, as delta-rs takes them.
        attempts: How often a commit is tried before a conflict is given up on.
    """

    def __init__(
        self, root: str | Path, *, storage_options: Mapping[str, str] | None = None, attempts: int = 10
    ) -> None:
        self._root = root
        self._storage_options = None if storage_options is None else dict(storage_options)
        self._attempts = attempts
        self._tables: dict[str, DeltaTable] = {}
        self._lock = threading.Lock()

    def write(self, batch: RawBatch) -> CommitResult:
        """Append the records that the archive does not have yet, in one commit; makes the table when there is none.

        Raises:
            SchemaMismatchError: The table is no archive of this topic.
            SinkConflictError: Other writers kept getting there first.
            SinkRejectedError: The table cannot take the write; trying again cannot help.
            SinkUnavailableError: The storage does not answer; the same write may be repeated.
        """
        uri = archive_uri(self._root, batch.topic)
        with self._lock:
            return commit_until_alone(
                lambda: self._append(batch, uri),
                uri=uri,
                attempts=self._attempts,
                forget=lambda: self._tables.pop(uri, None),
            )

    def _append(self, batch: RawBatch, uri: str) -> CommitResult:
        table = self._table(batch.topic, uri)
        app_id = _application_id(batch.topic, batch.partition)
        recorded = recorded_version(table, app_id)
        first = 0 if recorded is None else int(np.searchsorted(batch.offsets, recorded, side="right"))
        if first == len(batch):
            return CommitResult(rows=0, skipped=first, table_version=None)
        write_deltalake(
            table,
            _to_table(batch).slice(first),
            mode="append",
            writer_properties=WRITER_PROPERTIES,
            commit_properties=CommitProperties(app_transactions=[Transaction(app_id, int(batch.offsets[-1]))]),
        )
        return CommitResult(rows=len(batch) - first, skipped=first, table_version=table.version())

    def _table(self, topic: str, uri: str) -> DeltaTable:
        if uri not in self._tables:
            self._tables[uri] = _open(uri, topic, self._storage_options) or self._create(topic, uri)
        return self._tables[uri]

    def _create(self, topic: str, uri: str) -> DeltaTable:
        try:
            return DeltaTable.create(
                uri,
                schema=RAW_COLUMNS,
                mode="error",
                partition_by=["partition"],
                name=f"raw.{topic}",
                description=f"Every record of topic {topic}, as it came",
                configuration={_TOPIC: topic},
                storage_options=self._storage_options,
                raise_if_key_not_exists=False,
            )
        except delta_errors.DeltaError:
            # Another writer may have made it in between; then it is checked like any other.
            if (table := _open(uri, topic, self._storage_options)) is None:
                raise
            return table


@dataclass(frozen=True)
class Archive:
    """A topic's archive, for reading.

    Attributes:
        root: Directory or object store URL that holds the tables.
        topic: The topic.
        storage_options: Options of the object store, as delta-rs takes them.
    """

    root: str
    topic: str
    storage_options: Mapping[str, str] | None = None

    def __str__(self) -> str:
        return f"archive {self._uri}"

    @property
    def is_there(self) -> bool:
        """Whether anything has been archived of the topic.

        Raises:
            SinkUnavailableError: The storage does not answer.
            SchemaMismatchError: The table is no archive of this topic.
        """
        return _open(self._uri, self.topic, self.storage_options) is not None

    def parts(self) -> dict[int, LogPart]:
        """Tell what is there, by partition.

        Raises:
            SinkUnavailableError: There is no such archive, or the storage does not answer.
            SchemaMismatchError: The table is no archive of this topic.
        """
        parts: dict[int, LogPart] = {}
        for number, files in self._files(self._open()).items():
            edges = range(files[0].offsets.start, max(file.offsets.stop for file in files))
            size_bytes = sum(file.size_bytes for file in files)
            parts[number] = LogPart(offsets=edges, records=sum(file.records for file in files), size_bytes=size_bytes)
        return parts

    def first_at(self, time_us: int) -> dict[int, int]:
        """Tell, by partition, the first offset with a record timestamp of this time or later; the end where none has.

        Raises:
            As for :meth:`parts`.
        """
        found = {number: part.offsets.stop for number, part in self.parts().items()}
        wanted = pc.field("broker_time") >= pa.scalar(time_us, pa.int64()).cast(TIMESTAMP)
        with mapped_errors(self._uri):
            rows = self._open().to_pyarrow_dataset().scanner(columns=["partition", "offset"], filter=wanted)
            for batch in rows.to_batches():
                first = pa.Table.from_batches([batch]).group_by("partition").aggregate([("offset", "min")])
                for row in first.to_pylist():
                    found[row["partition"]] = min(found[row["partition"]], row["offset_min"])
        return found

    def count(self, first_offsets: Mapping[int, int]) -> int:
        """Count the records from these offsets on; partitions that are not named are left out.

        Raises:
            As for :meth:`parts`.
        """
        rows = self._open().to_pyarrow_dataset()
        with mapped_errors(self._uri):
            return sum(
                rows.count_rows(filter=(pc.field("partition") == number) & (pc.field("offset") >= first))
                for number, first in first_offsets.items()
            )

    def read(self, partition: int, offsets: range) -> Iterator[RawBatch]:
        """Read records of a partition in log order.

        Files are read one after the other, those whose offsets overlap together. Compaction by other engines may put
        files together in any order: what they have mixed is sorted in memory. What compaction does meanwhile does not
        matter: the table is read as of when this began, whose files are there until it is vacuumed.

        Raises:
            As for :meth:`parts`.
        """
        table = self._open()
        files = [
            file
            for file in self._files(table).get(partition, ())
            if file.offsets.start < offsets.stop and file.offsets.stop > offsets.start
        ]
        with mapped_errors(self._uri):
            dataset = table.to_pyarrow_dataset()
            fragments = {
                _file_name(fragment.path): fragment
                for fragment in dataset.get_fragments(pc.field("partition") == partition)
            }
        held: list[pa.Table] = []
        for group in _overlapping(files):
            with mapped_errors(self._uri):
                mine = [fragments[_file_name(file.path)] for file in group]
                # Small files, and what is left of large ones, come together: a batch costs much beside its rows.
                for rows in read_in_log_order(dataset, mine, offsets):
                    held.append(rows)
                    if sum(map(len, held)) >= _JOINED_ROWS or sum(part.nbytes for part in held) >= _JOINED_BYTES:
                        yield _to_batch(pa.concat_tables(held), self.topic, partition)
                        held = []
        if held:
            yield _to_batch(pa.concat_tables(held), self.topic, partition)

    @property
    def _uri(self) -> str:
        return archive_uri(self.root, self.topic)

    def _open(self) -> DeltaTable:
        table = _open(self._uri, self.topic, self.storage_options)
        if table is None:
            msg = (
                f"there is no archive {self._uri}, expected the offline role to have written it; run `headrace worker "
                "--role offline`, or read the topic itself with `--source kafka`"
            )
            raise SinkUnavailableError(msg)
        return table

    def _files(self, table: DeltaTable) -> dict[int, list["_File"]]:
        """Files of each partition, by their first offset."""
        files: dict[int, list[_File]] = {}
        with mapped_errors(self._uri):
            actions = files_with(table, "num_records", "min.offset", "max.offset")
        for action in actions:
            found = _File(
                path=action["path"],
                offsets=range(action["min.offset"], action["max.offset"] + 1),
                records=action["num_records"],
                size_bytes=action["size_bytes"],
            )
            files.setdefault(int(action["partition.partition"]), []).append(found)
        return {number: sorted(found, key=lambda file: file.offsets.start) for number, found in sorted(files.items())}


@dataclass(frozen=True, kw_only=True)
class _File:
    path: str
    offsets: range
    records: int
    size_bytes: int


def _overlapping(files: Sequence[_File]) -> Iterator[list[_File]]:
    """Put files whose offsets overlap together; they come, and go, by their first offset."""
    group: list[_File] = []
    stop = 0
    for file in files:
        if group and file.offsets.start >= stop:
            yield group
            group = []
        group.append(file)
        stop = max(stop, file.offsets.stop)
    if group:
        yield group


def read_in_log_order(
    dataset: ds.FileSystemDataset, fragments: Sequence[ds.Fragment], offsets: range | None = None
) -> Iterator[pa.Table]:
    """Read files of one partition of an archive in log order, as :data:`RAW_COLUMNS`.

    Args:
        dataset: The archive.
        fragments: The files, by their first offset.
        offsets: Which records; None for all. Files whose rows are not in order are sorted in memory.
    """
    wanted = None
    if offsets is not None:
        wanted = (pc.field("offset") >= offsets.start) & (pc.field("offset") < offsets.stop)
    chosen = ds.FileSystemDataset(fragments, dataset.schema, dataset.format, dataset.filesystem)
    order = chosen.to_table(columns=["offset"])["offset"].to_numpy()
    scanner = chosen.scanner(columns=RAW_COLUMNS.names, filter=wanted, batch_size=_READ_ROWS)
    if (np.diff(order) <= 0).any():
        rows = scanner.to_table().sort_by("offset")
        batches: Any = (rows.slice(at, _READ_ROWS) for at in range(0, rows.num_rows, _READ_ROWS))
    else:
        batches = (pa.Table.from_batches([batch]) for batch in scanner.to_batches())
    for rows in batches:
        if rows.num_rows:
            yield rows


def _file_name(path: str) -> str:
    """Tell a file of a partition by what it is called, which is unique: the log and Arrow write paths differently."""
    return path.rpartition("/")[2]


def _open(uri: str, topic: str, storage_options: Mapping[str, str] | None) -> DeltaTable | None:
    table = open_delta(uri, storage_options=storage_options)
    if table is not None and (got := table.metadata().configuration.get(_TOPIC)) != topic:
        msg = f"table {uri} says it is the archive of {got!r}, expected {topic!r}; move it away, or name another root"
        raise SchemaMismatchError(msg)
    return table


def _application_id(topic: str, partition: int) -> str:
    return f"headrace:raw.{topic}:{partition}"


def _to_table(batch: RawBatch) -> pa.Table:
    headers = None
    if batch.has_headers:
        headers = [
            None if found is None else [{"name": name, "value": value} for name, value in found]
            for found in batch.headers
        ]
    columns = [
        pa.repeat(pa.scalar(batch.partition, pa.int32()), len(batch)),
        pa.array(batch.offsets),
        pa.array(batch.broker_time_us).cast(TIMESTAMP),
        pa.array(batch.keys, pa.binary()),
        pa.array(batch.values, pa.binary()),
        pa.nulls(len(batch), RAW_COLUMNS.field("headers").type)
        if headers is None
        else pa.array(headers, RAW_COLUMNS.field("headers").type),
    ]
    return pa.table(columns, schema=RAW_COLUMNS)


def _to_batch(rows: pa.Table, topic: str, partition: int) -> RawBatch:
    offsets = rows["offset"].to_numpy()
    headers: list[Headers] = [None] * rows.num_rows
    if rows["headers"].null_count < rows.num_rows:
        headers = [
            None if found is None else [(header["name"], header["value"]) for header in found]
            for found in rows["headers"].to_pylist()
        ]
    return RawBatch(
        topic=topic,
        partition=partition,
        offsets=offsets,
        broker_time_us=rows["broker_time"].cast(pa.int64()).to_numpy(),
        keys=_payloads(rows["key"]),
        values=_payloads(rows["value"]),
        headers=headers,
        next_offset=int(offsets[-1]) + 1,
    )


def _payloads(column: pa.ChunkedArray) -> Sequence[bytes | None]:
    whole = column.combine_chunks()
    if isinstance(whole, pa.ChunkedArray):  # more bytes than one array has offsets for
        values: list[bytes | None] = column.to_pylist()
        return values
    return PayloadColumn(whole)
