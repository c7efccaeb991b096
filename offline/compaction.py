"""Compaction: one large file in place of several small ones of a partition, and each row is there once at any moment.

delta-rs does the same (``optimize``), but lets one pass that another has overtaken: removals that change no data are no
conflict to it (its pull request 3982; seen of 1.6.6), and each row is there twice. So here

1. the rows of some files are written to one file, which no commit names yet;
2. a commit takes it in and them out, made right after a version in which all of them are, or not at all.

The first takes as long as it takes; appends that come meanwhile make the second look again, and nothing else.
"""

import json
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, Final
from uuid import uuid4

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.dataset as ds
import pyarrow.fs as pafs
import pyarrow.parquet as pq
from deltalake import CommitProperties, DeltaTable
from deltalake.transaction import AddAction, RemoveAction

from schemas.errors import SinkRejectedError, SinkUnavailableError
from streams.sinks.archive import RAW_COLUMNS, read_in_log_order
from streams.sinks.delta import commit_until_alone, files_with, mapped_errors
from streams.sinks.file_stats import file_stats

_GROUP_ROWS: Final = 50_000
"""Rows of a row group, at most: what a reader has to hold."""
_GROUP_BYTES: Final = 64 * 2**20
"""Bytes of a row group in memory, at which it is complete."""
_LOG_ORDER: Final = "offset"


@dataclass(frozen=True, kw_only=True)
class SmallFiles:
    """Files of one partition that are to be one.

    Attributes:
        column: The partition column.
        value: Its value, as the table's log writes it.
        sizes: Size of each file in bytes, by its path below the table, in the order in which their rows are to be.
    """

    column: str
    value: str
    sizes: dict[str, int]


def plan_compaction(table: DeltaTable, *, target_bytes: int, is_archive: bool) -> list[SmallFiles]:
    """Find what there is to put together: files below half the target size, beside others that are too.

    Half of it is the bound, so that a file that missed the target by a little is not written each time anew. Files of
    an archive are put together with those next to them in the log alone, so that its files stay apart from each other.

    Args:
        table: The table.
        target_bytes: Size of a file that is large enough.
        is_archive: Whether it holds records of a topic, which have offsets.

    Raises:
        SinkRejectedError: A file of an archive does not say which offsets it has.
    """
    (column,) = table.metadata().partition_columns
    order = f"min.{_LOG_ORDER}" if is_archive else "modification_time"
    by_partition: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for action in files_with(table, order):
        by_partition[str(action[f"partition.{column}"])].append(action)
    plan = []
    for value, actions in sorted(by_partition.items()):
        gathered: list[dict[str, int]] = [{}]
        for action in sorted(actions, key=lambda action: (action[order], action["path"])):
            size_bytes = action["size_bytes"]
            is_small = size_bytes < target_bytes // 2
            if (not is_small and is_archive) or sum(gathered[-1].values()) + size_bytes * is_small > target_bytes:
                gathered.append({})
            if is_small:
                gathered[-1][action["path"]] = size_bytes
        plan += [SmallFiles(column=column, value=value, sizes=sizes) for sizes in gathered if len(sizes) > 1]
    return plan


def compact(
    table: DeltaTable,
    small: SmallFiles,
    *,
    files: pafs.FileSystem,
    sort_by: Sequence[str] = (),
    is_archive: bool,
    attempts: int,
) -> bool:
    """Put small files together; safe to repeat, and to be ended at any moment.

    Args:
        table: The table, which is read on to its newest version.
        small: The files.
        files: Those below the table.
        sort_by: Columns to sort the rows by, in memory; none: they stay in their order.
        is_archive: Whether the table holds records of a topic, which are put into log order.
        attempts: How often the commit is tried.

    Returns:
        Whether it was done; not where another compaction has taken some of the files.

    Raises:
        SinkConflictError: Other commits kept getting there first.
        SinkUnavailableError: The storage does not answer.
        SinkRejectedError: The file that was written has been removed by someone else.
    """
    directory = next(iter(small.sizes)).rpartition("/")[0]
    path = f"{directory}/part-{uuid4().hex}.zstd.parquet"
    rows = _read(table, small, sort_by=sort_by, is_archive=is_archive)
    try:
        with mapped_errors(table.table_uri):
            added = _write(rows, files=files, path=path, small=small)
    except BaseException as exc:
        _discard(files, path)
        # Stores say in ways of their own that a file is not there: another one has taken, and then removed it.
        if isinstance(exc, SinkUnavailableError) and not _is_whole(table, small):
            return False
        raise
    is_done = commit_until_alone(
        partial(_commit, table, small, added, files=files),
        uri=table.table_uri,
        attempts=attempts,
        forget=lambda: None,
    )
    if not is_done:
        _discard(files, path)
    return is_done


def _commit(table: DeltaTable, small: SmallFiles, added: AddAction, *, files: pafs.FileSystem) -> bool:
    now_ms = time.time_ns() // 1_000_000
    removed = [
        RemoveAction(
            path=path,
            data_change=False,
            deletion_timestamp=now_ms,
            size=size_bytes,
            partition_values={small.column: small.value},
        )
        for path, size_bytes in small.sizes.items()
    ]
    if not _is_whole(table, small):
        # By this one, maybe, when the answer to an earlier try was lost.
        return added.path in _paths(table)
    (info,) = files.get_file_info([added.path])
    if info.size != added.size:
        msg = (
            f"{added.path} of {table.table_uri} is not there any more as it was written, expected nobody to remove "
            "files that are younger than a day; see who does, then run the command again"
        )
        raise SinkRejectedError(msg)
    table.create_write_transaction(
        [added, *removed],
        mode="append",
        schema=table.schema(),
        partition_by=[small.column],
        # No try but as of this very version: delta-rs would let it pass after another that took out the same files.
        commit_properties=CommitProperties(max_commit_retries=0),
    )
    return True


def _is_whole(table: DeltaTable, small: SmallFiles) -> bool:
    """See whether all of the files are in the table as of now."""
    with mapped_errors(table.table_uri):
        table.update_incremental()
    return small.sizes.keys() <= _paths(table)


def _paths(table: DeltaTable) -> set[str]:
    return set(pa.table(table.get_add_actions())["path"].to_pylist())


def _read(table: DeltaTable, small: SmallFiles, *, sort_by: Sequence[str], is_archive: bool) -> Iterator[pa.Table]:
    dataset = table.to_pyarrow_dataset()
    partition = pc.field(small.column)
    value = pa.scalar(small.value).cast(dataset.schema.field(small.column).type)
    # A file of a partition is told by what it is called: the log and Arrow write paths differently.
    fragments = {_name(fragment.path): fragment for fragment in dataset.get_fragments(partition == value)}
    mine = [fragments[_name(path)] for path in small.sizes]
    if is_archive:
        yield RAW_COLUMNS.empty_table()  # the columns, whatever rows there are
        yield from read_in_log_order(dataset, mine)
        return
    yield dataset.schema.empty_table()
    chosen = ds.FileSystemDataset(mine, dataset.schema, dataset.format, dataset.filesystem)
    if sort_by:
        yield chosen.to_table().sort_by([(column, "ascending") for column in sort_by])
        return
    for batch in chosen.to_batches(batch_size=_GROUP_ROWS):
        yield pa.Table.from_batches([batch])


def _write(rows: Iterator[pa.Table], *, files: pafs.FileSystem, path: str, small: SmallFiles) -> AddAction:
    described: list[pq.FileMetaData] = []
    parts = (part.drop_columns([small.column]) for part in rows)
    with files.open_output_stream(path) as stream:
        columns = next(parts).schema
        with pq.ParquetWriter(
            stream, columns, compression="zstd", store_schema=False, metadata_collector=described
        ) as writer:
            for group in _groups(parts):
                writer.write_table(group, row_group_size=_GROUP_ROWS)
        size_bytes = stream.tell()
    return AddAction(
        path=path,
        size=size_bytes,
        partition_values={small.column: small.value},
        modification_time=time.time_ns() // 1_000_000,
        data_change=False,
        stats=json.dumps(file_stats(described[0])),
    )


def _groups(parts: Iterator[pa.Table]) -> Iterator[pa.Table]:
    """Gather rows to row groups; what is more than one at once stays together."""
    held: list[pa.Table] = []
    for part in parts:
        held.append(part)
        if sum(map(len, held)) >= _GROUP_ROWS or sum(table.nbytes for table in held) >= _GROUP_BYTES:
            yield pa.concat_tables(held)
            held = []
    if held:
        yield pa.concat_tables(held)


def _discard(files: pafs.FileSystem, path: str) -> None:
    """Remove a file that no commit names; where that cannot be done it goes with what is in no use."""
    with suppress(OSError):
        files.delete_file(path)


def _name(path: str) -> str:
    return path.rpartition("/")[2]
