"""Maintenance of the offline store's tables: few large files in place of many small ones, and none that is in no use.

Of a table, in this order, each safe to repeat and to be ended at any moment:

1. small files of a partition (a day, or a partition of a topic) are put together, a file a commit, and where that is
   asked for sorted by entity and event time (``offline/compaction.py``);
2. a checkpoint is written, and log files are removed that it makes needless and the table's log retention lets go;
3. files go that no version within the retention has, and those that never came to be in a version.

Commits of others do not hinder it, nor it them; application transactions, by which writers know what is in the table,
stay as they are. Files of a backfill that is not done are in no version yet; they stay, however old they are, for
as long as it says in the table that it is under way (``streams/sinks/staging.py``).
"""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Final

import pyarrow.fs as pafs
from deltalake import DeltaTable

from offline.compaction import compact, plan_compaction
from schemas.errors import SinkUnavailableError
from streams.sinks.delta import commit_until_alone, files_with, join_uri, mapped_errors, open_delta
from streams.sinks.staging import Stage, backfill_of, backfills_under_way, open_files

TARGET_BYTES: Final = 128 * 2**20
"""Size of a file that is large enough."""
RETENTION_HOURS: Final = 7 * 24
"""Age of a file that no version has any more, at which it goes: as long may a reader take for what it has begun."""
UNNAMED_HOURS: Final = 24
"""Least age of a file that was never in a version, at which it goes: a writer may be about to commit a younger one."""


class Kind(StrEnum):
    """What a table holds."""

    FEATURES = "features"
    ARCHIVE = "archive"
    SCORES = "scores"


_KINDS: Final = {"headrace.view": Kind.FEATURES, "headrace.topic": Kind.ARCHIVE, "headrace.model": Kind.SCORES}
"""By a property that the tables of that kind have."""


@dataclass(frozen=True, kw_only=True)
class FoundTable:
    """A table of the offline store.

    Attributes:
        name: Its place below the root, e.g. ``user_activity/v1``.
        uri: Its place.
        kind: What it holds.
        storage_options: Options of the object store, as delta-rs takes them.
    """

    name: str
    uri: str
    kind: Kind
    storage_options: Mapping[str, str] | None = field(default=None, repr=False)


@dataclass(frozen=True, kw_only=True)
class TableState:
    """How a table stands.

    Attributes:
        version: Its version.
        rows: Rows in it.
        files: Files in it.
        size_bytes: What they take.
        small_files: Files of less than half the target size, beside others of their partition that are too.
        partitions: How many partitions have such files.
        removable_files: Files that no version within the retention has, or that never were in one.
        backfills: Backfills that are not done, with how many files of theirs there are.
    """

    version: int
    rows: int
    files: int
    size_bytes: int
    small_files: int
    partitions: int
    removable_files: int
    backfills: Mapping[str, int]


@dataclass(frozen=True, kw_only=True)
class Maintained:
    """What was done to a table.

    Attributes:
        before: How it stood.
        after: How it stands.
        files_removed: Files that were put together.
        files_added: Files that they were put together to.
        files_deleted: Files that were deleted, which no version has any more.
    """

    before: TableState
    after: TableState
    files_removed: int
    files_added: int
    files_deleted: int


def find_tables(root: str, *, storage_options: Mapping[str, str] | None = None) -> list[FoundTable]:
    """Find the tables below the root of an offline store, by name; what Headrace has not made is left out.

    Raises:
        SinkUnavailableError: The storage does not answer.
    """
    files = open_files(root, storage_options)
    found = []
    for first in _directories(files, root, ""):
        # An archive is one level down, the table of a view's version two.
        places = [first] if _is_table(files, root, first) else _directories(files, root, first)
        for place in places:
            uri = join_uri(root, place)
            table = open_delta(uri, storage_options=storage_options) if _is_table(files, root, place) else None
            kind = None if table is None else _kind(table)
            if kind is not None:
                found.append(FoundTable(name=place, uri=uri, kind=kind, storage_options=storage_options))
    return sorted(found, key=lambda table: table.name)


def _directories(files: pafs.FileSystem, root: str, below: str) -> list[str]:
    with mapped_errors(root):
        infos = files.get_file_info(pafs.FileSelector(below, allow_not_found=True))
    names = [info.path.strip("/") for info in infos if info.type == pafs.FileType.Directory]
    return sorted(name for name in names if not name.rpartition("/")[2].startswith("_"))


def _is_table(files: pafs.FileSystem, root: str, place: str) -> bool:
    with mapped_errors(root):
        return bool(files.get_file_info(pafs.FileSelector(f"{place}/_delta_log", allow_not_found=True)))


def _kind(table: DeltaTable) -> Kind | None:
    configuration = table.metadata().configuration
    return next((kind for name, kind in _KINDS.items() if name in configuration), None)


def look(
    found: FoundTable,
    *,
    target_bytes: int = TARGET_BYTES,
    retention_hours: int = RETENTION_HOURS,
    unnamed_hours: int = UNNAMED_HOURS,
) -> TableState:
    """Tell how a table stands, and what maintenance would do.

    Raises:
        SinkUnavailableError: The storage does not answer, or the table has gone.
        SinkRejectedError: The table cannot be read.
    """
    files = open_files(found.uri, found.storage_options)
    # Before the table: a backfill that ends in between has put its files into the version that is read then.
    under_way = backfills_under_way(files, found.uri)
    table = _open(found)
    with mapped_errors(found.uri):
        actions = files_with(table, "num_records")
        plan = plan_compaction(table, target_bytes=target_bytes, is_archive=found.kind is Kind.ARCHIVE)
        gone, unnamed = _removable(table, files, retention_hours=retention_hours, unnamed_hours=unnamed_hours)
        staged = Counter(backfill_of(path) for path in _unnamed(table, hours=0)) if under_way else Counter()
    return TableState(
        version=table.version(),
        rows=sum(action["num_records"] for action in actions),
        files=len(actions),
        size_bytes=sum(action["size_bytes"] for action in actions),
        small_files=sum(len(small.sizes) for small in plan),
        partitions=len({small.value for small in plan}),
        removable_files=len(gone) + len(_without(unnamed, under_way)),
        backfills={name: staged[name] for name in sorted(under_way)},
    )


def maintain(
    found: FoundTable,
    *,
    target_bytes: int = TARGET_BYTES,
    sort_by: Sequence[str] = (),
    retention_hours: int = RETENTION_HOURS,
    unnamed_hours: int = UNNAMED_HOURS,
    attempts: int = 20,
    tell: Callable[[str], object] = lambda line: None,
) -> Maintained:
    """Put small files together, write a checkpoint and remove what is in no use.

    Args:
        found: The table.
        target_bytes: Size of a file that is large enough.
        sort_by: Columns by which the rows of a file that is written are sorted, in memory; none: they stay in their
            order, those of an archive in that of the log.
        retention_hours: Age of a file that no version has any more, at which it goes.
        unnamed_hours: Least age of a file that never was in one.
        attempts: How often a commit is tried that meets another.
        tell: Takes a line about what is being done.

    Raises:
        SinkConflictError: Other commits kept getting there first.
        SinkUnavailableError: The storage does not answer, or the table has gone.
        SinkRejectedError: The table cannot be read or rewritten.
    """
    ages = {"retention_hours": retention_hours, "unnamed_hours": unnamed_hours}
    before = look(found, target_bytes=target_bytes, **ages)
    files, table = open_files(found.uri, found.storage_options), _open(found)
    is_archive = found.kind is Kind.ARCHIVE
    with mapped_errors(found.uri):
        plan = plan_compaction(table, target_bytes=target_bytes, is_archive=is_archive)
    removed = added = 0
    for small in plan:
        tell(f"{found.name}: {small.column}={small.value}, {len(small.sizes)} small files")
        if compact(table, small, files=files, sort_by=sort_by, is_archive=is_archive, attempts=attempts):
            removed += len(small.sizes)
            added += 1
    with mapped_errors(found.uri):
        table = _open(found)
        tell(f"{found.name}: checkpoint of version {table.version()}")
        table.create_checkpoint()
        table.cleanup_metadata()
    tell(f"{found.name}: removing what is in no use")
    deleted = _vacuum(found, attempts=attempts, **ages)
    after = look(found, target_bytes=target_bytes, **ages)
    return Maintained(before=before, after=after, files_removed=removed, files_added=added, files_deleted=deleted)


def cluster_columns(found: FoundTable) -> list[str]:
    """Name the columns by which a table of rows of entities is looked into: its first, the entity key, and event time.

    Raises:
        SinkUnavailableError: The storage does not answer, or the table has gone.
    """
    with mapped_errors(found.uri):
        key, *_ = (column.name for column in _open(found).schema().fields)
    return [key, "event_time"]


def drop_backfill(found: FoundTable, name: str) -> None:
    """Take a backfill for given up, so that its files go with what is in no use; safe to repeat.

    Raises:
        SinkUnavailableError: The storage does not answer.
    """
    Stage(found.uri, name=name, storage_options=found.storage_options).withdraw()


def _open(found: FoundTable) -> DeltaTable:
    table = open_delta(found.uri, storage_options=found.storage_options)
    if table is None:
        msg = f"there is no table {found.uri} any more, expected the one that was found before; run the command again"
        raise SinkUnavailableError(msg)
    return table


def _removable(
    table: DeltaTable, files: pafs.FileSystem, *, retention_hours: int, unnamed_hours: int
) -> tuple[set[str], set[str]]:
    """Tell the files that no version has within the retention, and those that never were in one and are old enough.

    The log names a file long after it has been deleted: those alone count that are still there.
    """
    named = set(table.vacuum(retention_hours, dry_run=True, enforce_retention_duration=False))
    there = set[str]()
    for directory in sorted({path.rpartition("/")[0] for path in named}):
        infos = files.get_file_info(pafs.FileSelector(directory, allow_not_found=True))
        there.update(info.path.strip("/") for info in infos)
    return named & there, _unnamed(table, hours=max(retention_hours, unnamed_hours))


def _unnamed(table: DeltaTable, *, hours: int) -> set[str]:
    """Tell the files of at least this age that the log does not name."""
    named = set(table.vacuum(0, dry_run=True, enforce_retention_duration=False))
    return set(table.vacuum(hours, dry_run=True, enforce_retention_duration=False, full=True)) - named


def _without(paths: set[str], under_way: set[str]) -> set[str]:
    return {path for path in paths if backfill_of(path) not in under_way}


def _vacuum(found: FoundTable, *, retention_hours: int, unnamed_hours: int, attempts: int) -> int:
    files = open_files(found.uri, found.storage_options)
    # Before the table, as in `look`.
    under_way = backfills_under_way(files, found.uri)
    table = _open(found)
    with mapped_errors(found.uri):
        gone, unnamed = _removable(table, files, retention_hours=retention_hours, unnamed_hours=unnamed_hours)
    unnamed = _without(unnamed, under_way)
    if gone:
        commit_until_alone(
            lambda: _open(found).vacuum(retention_hours, dry_run=False, enforce_retention_duration=False),
            uri=found.uri,
            attempts=attempts,
            forget=lambda: None,
        )
    with mapped_errors(found.uri):
        for path in sorted(unnamed):
            with suppress(FileNotFoundError):  # another maintenance was there first
                files.delete_file(path)
    return len(gone) + len(unnamed)
