"""The offline store: every feature row of a view, once, in a Delta Lake table per view and version.

A table is ``<root>/<view>/v<version>``, partitioned by ``event_date``. Each commit carries an application transaction
per partition of the features topic, whose version is the last offset committed; rows at or below it are left out, so
that a repeat, a rewind or a second writer cannot put a row in twice. See ``infra/adr/0004-delta-idempotence.md``.
"""

import random
import re
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.dataset as ds
from deltalake import CommitProperties, DeltaTable, Transaction, WriterProperties, write_deltalake
from deltalake import exceptions as delta_errors

from schemas.errors import (
    SchemaMismatchError,
    SinkConflictError,
    SinkRejectedError,
    SinkUnavailableError,
)
from schemas.view import FeatureView
from streams.sinks.rows import check_rows

EVENT_DATE: Final = "event_date"
"""Partition column: the UTC day of ``event_time``."""

_VIEW: Final = "headrace.view"
_VERSION: Final = "headrace.view_version"
_HASH: Final = "headrace.definition_hash"
_PASSING: Final = re.compile(r"Generic (?!LocalFileSystem)\w+ error|os error (5|27|28|122)\b")
"""What delta-rs says of storage that fails in the middle of a write: an object store, or a disk that is full or broken
(EIO, EFBIG, ENOSPC, EDQUOT). It wraps them into errors of the table."""
_ANSI: Final = re.compile(r"\x1b\[[0-9;]*m|↳")


@dataclass(frozen=True, kw_only=True)
class CommitResult:
    """What became of a batch; true when something was committed.

    Attributes:
        rows: Rows that the commit appended.
        skipped: Rows that the table had already.
        table_version: Version of the table the commit made; None when nothing was committed.
    """

    rows: int
    skipped: int
    table_version: int | None

    def __bool__(self) -> bool:
        return self.table_version is not None


def table_uri(root: str | Path, view: FeatureView) -> str:
    """Name the place of a view's table, e.g. ``/data/features/user_activity/v1``."""
    return f"{str(root).rstrip('/')}/{view.name}/v{view.version}"


def table_schema(view: FeatureView) -> pa.Schema:
    """Columns of a view's table: those of its rows, and ``event_date``."""
    return view.row_schema.append(pa.field(EVENT_DATE, pa.date32()))


class OfflineWriter:
    """Appends feature rows to Delta tables; each write is safe to repeat.

    Calls block on storage: from an event loop, run them in a thread. One writer may be used by several threads; writes
    to a table happen one after the other.

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

    def write(
        self, rows: pa.Table, *, view: FeatureView, partition: int, offsets: Sequence[int] | pa.Array
    ) -> CommitResult:
        """Append the rows that the table does not have yet, in one commit; makes the table when there is none.

        Args:
            rows: Feature rows of ``view.row_schema``. Further columns are ignored.
            view: The view that the rows belong to.
            partition: Partition of the features topic that the rows came from.
            offsets: Offset of each row in that partition. Rows that share an offset go into one write.

        Raises:
            SchemaMismatchError: The rows, or the table, belong to another view, version or definition.
            SinkConflictError: Other writers kept getting there first.
            SinkRejectedError: The table cannot take the write; trying again cannot help.
            SinkUnavailableError: The storage does not answer; the same write may be repeated.
        """
        check_rows(rows, view=view)
        if len(offsets) != rows.num_rows:
            msg = f"got {len(offsets)} offsets for {rows.num_rows} rows of view {view.name}, expected one for each row"
            raise SinkRejectedError(msg)
        if rows.num_rows == 0:
            return CommitResult(rows=0, skipped=0, table_version=None)
        row_offsets = pa.array(offsets, pa.int64()) if not isinstance(offsets, pa.Array) else offsets
        stored = rows.select(view.row_schema.names)
        stored = stored.append_column(pa.field(EVENT_DATE, pa.date32()), stored["event_time"].cast(pa.date32()))
        uri, app_id = table_uri(self._root, view), application_id(view, partition)
        with self._lock:
            for attempt in range(self._attempts):
                with _mapped_errors(uri):
                    try:
                        return self._append(stored, view=view, app_id=app_id, offsets=row_offsets)
                    except delta_errors.CommitFailedError:
                        # Someone else committed: what is recorded must be read again before anything is written.
                        self._tables.pop(uri, None)
                time.sleep(random.uniform(0, min(0.01 * 2**attempt, 0.5)))  # noqa: S311  # spreads retries, hides nothing
        msg = f"commit to {uri} met another one {self._attempts} times; see whether two consumer groups write it"
        raise SinkConflictError(msg)

    def last_offset(self, view: FeatureView, partition: int) -> int | None:
        """Read the last offset of a features-topic partition whose rows are in the table; None when there is none.

        Raises:
            SchemaMismatchError: The table belongs to another definition.
            SinkUnavailableError: The storage does not answer.
        """
        uri = table_uri(self._root, view)
        with self._lock, _mapped_errors(uri):
            self._tables.pop(uri, None)
            table = self._open(view)
            return None if table is None else _recorded(table, application_id(view, partition))

    def _append(self, rows: pa.Table, *, view: FeatureView, app_id: str, offsets: pa.Array) -> CommitResult:
        table = self._open(view) or self._create(view)
        recorded = _recorded(table, app_id)
        fresh = rows if recorded is None else rows.filter(pc.greater(offsets, recorded))
        if fresh.num_rows == 0:
            return CommitResult(rows=0, skipped=rows.num_rows, table_version=None)
        # The rows and the offset become visible in the same commit, or neither does. A commit with this transaction id
        # made since `table` was read fails ours: two writers cannot both think a row new.
        write_deltalake(
            table,
            fresh,
            mode="append",
            writer_properties=WriterProperties(compression="ZSTD"),
            commit_properties=CommitProperties(app_transactions=[Transaction(app_id, pc.max(offsets).as_py())]),
        )
        return CommitResult(rows=fresh.num_rows, skipped=rows.num_rows - fresh.num_rows, table_version=table.version())

    def _open(self, view: FeatureView) -> DeltaTable | None:
        uri = table_uri(self._root, view)
        if uri not in self._tables:
            table = open_table(self._root, view, storage_options=self._storage_options)
            if table is None:
                return None
            self._tables[uri] = table
        return self._tables[uri]

    def _create(self, view: FeatureView) -> DeltaTable:
        uri = table_uri(self._root, view)
        try:
            self._tables[uri] = DeltaTable.create(
                uri,
                schema=table_schema(view),
                mode="error",
                partition_by=[EVENT_DATE],
                name=f"{view.name}_v{view.version}",
                description=f"Features of {view.entity.name}: {view.describe_windows()}",
                configuration={_VIEW: view.name, _VERSION: str(view.version), _HASH: view.definition_hash},
                storage_options=self._storage_options,
                raise_if_key_not_exists=False,
            )
        except delta_errors.DeltaError:
            # Another writer may have made it in between; then it is checked like any other.
            if self._open(view) is None:
                raise
        return self._tables[uri]


def application_id(view: FeatureView, partition: int) -> str:
    """Name the application transaction of a features-topic partition, e.g. ``headrace:user_activity:v1:0``."""
    return f"headrace:{view.name}:v{view.version}:{partition}"


def open_table(
    root: str | Path, view: FeatureView, *, storage_options: Mapping[str, str] | None = None
) -> DeltaTable | None:
    """Open a view's table, or return None when there is none.

    Raises:
        SchemaMismatchError: The table belongs to another view or definition.
        SinkUnavailableError: The storage does not answer.
    """
    uri = table_uri(root, view)
    options = None if storage_options is None else dict(storage_options)
    with _mapped_errors(uri):
        try:
            table = DeltaTable(uri, storage_options=options)
        except delta_errors.TableNotFoundError:
            return None
    made_by = table.metadata().configuration
    if (got := made_by.get(_HASH)) != view.definition_hash:
        msg = (
            f"table {uri} has definition {got}, expected {view.definition_hash} of view {view.name} "
            f"v{view.version}; raise the view's version, so that the new definition gets a table of its own"
        )
        raise SchemaMismatchError(msg)
    return table


def scan_features(
    root: str | Path, view: FeatureView, *, storage_options: Mapping[str, str] | None = None
) -> ds.Dataset:
    """Open a view's rows as a lazy dataset of its newest table version; filters on ``event_date`` skip whole days.

    Raises:
        SchemaMismatchError: The table belongs to another view or definition.
        SinkUnavailableError: There is no table (yet), or the storage does not answer.
    """
    uri = table_uri(root, view)
    table = open_table(root, view, storage_options=storage_options)
    if table is None:
        msg = f"there is no table {uri}, expected the offline role or a backfill to have written it"
        raise SinkUnavailableError(msg)
    with _mapped_errors(uri):
        return table.to_pyarrow_dataset()


def read_features(
    root: str | Path,
    view: FeatureView,
    *,
    where: ds.Expression | None = None,
    storage_options: Mapping[str, str] | None = None,
) -> pa.Table:
    """Read a view's rows into memory, of :func:`table_schema` and in no particular order.

    Args:
        root: As for :class:`OfflineWriter`.
        view: The view.
        where: Which rows, e.g. ``pc.field("event_date") >= date(2013, 1, 1)``; None for all.
        storage_options: As for :class:`OfflineWriter`.

    Raises:
        SchemaMismatchError: The table belongs to another view or definition.
        SinkUnavailableError: There is no table (yet), or the storage does not answer.
    """
    rows = scan_features(root, view, storage_options=storage_options)
    with _mapped_errors(table_uri(root, view)):
        return rows.to_table(filter=where).cast(table_schema(view))


def _recorded(table: DeltaTable, application: str) -> int | None:
    recorded: int | None = table.transaction_version(application)
    return recorded


@contextmanager
def _mapped_errors(uri: str) -> Iterator[None]:
    try:
        yield
    except delta_errors.SchemaMismatchError as exc:
        msg = f"table {uri} has other columns than its view ({_plain(exc)}); raise the view's version"
        raise SchemaMismatchError(msg) from exc
    except OSError as exc:
        msg = f"storage of {uri} is not available: {_plain(exc)}"
        raise SinkUnavailableError(msg) from exc
    except delta_errors.DeltaError as exc:
        if _PASSING.search(str(exc)):
            msg = f"storage of {uri} fails: {_plain(exc)}"
            raise SinkUnavailableError(msg) from exc
        msg = f"table {uri} refused the write: {_plain(exc)}"
        raise SinkRejectedError(msg) from exc


def _plain(exc: BaseException) -> str:
    return " ".join(_ANSI.sub(" ", str(exc)).split())
