"""The offline store: every feature row of a view, once, in a Delta Lake table per view and version.

A table is ``<root>/<view>/v<version>``, partitioned by ``event_date``. Each commit carries an application transaction
per partition of the features topic, whose version is the last offset committed; rows at or below it are left out, so
that a repeat, a rewind or a second writer cannot put a row in twice. History that a backfill has put in says in
transactions of its own which source offsets it is of; what the live path makes of those is left out too. See
``infra/adr/0004-delta-idempotence.md``.

A table is bitemporal: ``event_time`` is when what a row says was so, ``available_time`` from when on it could be read.
"""

import functools
import operator
import threading
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.dataset as ds
from deltalake import CommitProperties, DeltaTable, Transaction, WriterProperties, write_deltalake
from deltalake import Field as DeltaField
from deltalake import exceptions as delta_errors

from schemas.errors import SchemaMismatchError, SinkRejectedError, SinkUnavailableError
from schemas.row import TIMESTAMP
from schemas.time import END_OF_TIME_US
from schemas.view import FeatureView
from streams.sinks.delta import commit_until_alone, join_uri, mapped_errors, open_delta, recorded_version
from streams.sinks.rows import check_rows
from streams.sinks.staging import DAY_COLUMN, Stage, StagedFile

EVENT_DATE: Final = DAY_COLUMN
"""Partition column: the UTC day of ``event_time``."""

AVAILABLE_TIME: Final = "available_time"
"""From when on a row could be read; see :func:`available_times`."""

WRITER_PROPERTIES: Final = WriterProperties(compression="ZSTD")
_NONE_YET: Final = -1
_VIEW: Final = "headrace.view"
_VERSION: Final = "headrace.view_version"
_HASH: Final = "headrace.definition_hash"


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


@dataclass(frozen=True, kw_only=True)
class History:
    """What became of history that was given to a table.

    Attributes:
        spans: By partition, the source offsets that are history now; partitions without any are left out.
        live_from: By partition, the first source offset with a row of the live path; those without any are left out.
        rows: Rows that were added.
        table_version: Version of the table that it made; None where there was nothing to add.
    """

    spans: Mapping[int, range]
    live_from: Mapping[int, int]
    rows: int
    table_version: int | None


def table_uri(root: str | Path, view: FeatureView) -> str:
    """Name the place of a view's table, e.g. ``/data/features/user_activity/v1``."""
    return join_uri(root, view.name, f"v{view.version}")


def table_schema(view: FeatureView) -> pa.Schema:
    """Columns of a view's table: those of its rows, ``event_date`` and ``available_time``."""
    return view.row_schema.append(pa.field(EVENT_DATE, pa.date32())).append(pa.field(AVAILABLE_TIME, TIMESTAMP))


def available_times(rows: pa.Table, view: FeatureView) -> pa.ChunkedArray:
    """Tell from when on each row could be read, in event time: the same for a replay as for the live run.

    How far a partition had got when it made a row stands in the row: its watermark trails the newest event time by the
    source's bounded out-of-orderness. Before that, the row of an event that came out of order was not there, nor is a
    closing pane at its window's end. Processing time, which no replay can repeat, is left out (see ``computed_time``).
    """
    behind_us = view.input.max_out_of_orderness_us
    # At the end of time, to which a file is closed, there is nothing left to add to.
    watermark = pc.min_element_wise(rows["watermark"].cast(pa.int64()), END_OF_TIME_US - behind_us, skip_nulls=False)
    return pc.max_element_wise(rows["event_time"].cast(pa.int64()), pc.add(watermark, behind_us)).cast(TIMESTAMP)


def complete_rows(rows: pa.Table, view: FeatureView) -> pa.Table:
    """Give rows (``view.row_schema``) the other columns of their table."""
    stored = rows.select(view.row_schema.names)
    stored = stored.append_column(pa.field(EVENT_DATE, pa.date32()), stored["event_time"].cast(pa.date32()))
    return stored.append_column(pa.field(AVAILABLE_TIME, TIMESTAMP), available_times(stored, view))


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
        stored, uri = complete_rows(rows, view), table_uri(self._root, view)
        with self._lock:
            return commit_until_alone(
                lambda: self._append(stored, view=view, partition=partition, offsets=row_offsets),
                uri=uri,
                attempts=self._attempts,
                # Someone else committed: what is recorded must be read again before anything is written.
                forget=lambda: self._tables.pop(uri, None),
            )

    def stage(self, view: FeatureView, *, name: str) -> Stage:
        """Open the files of a backfill of this name, which lie in the view's table before they belong to it."""
        return Stage(table_uri(self._root, view), name=name, storage_options=self._storage_options)

    def add_history(
        self, stage: Stage, files: Sequence[StagedFile], *, view: FeatureView, read: Mapping[int, range]
    ) -> History:
        """Put history before the rows of the table, in one commit: all of it becomes visible at once, or nothing does.

        The rows that are there stay as they are. History ends where those of the live path begin, or where it has been
        read to, and can be continued at both of its ends; what the live path computes of it later is left out by
        :meth:`write`. While this commits, no other writer of these partitions can: either sees what the other did.

        Args:
            stage: Where the files are; those that the commit does not take in are removed.
            files: Rows of :func:`table_schema`, of these source offsets and maybe more.
            view: The view that the rows belong to.
            read: By partition of what the view reads, the source offsets whose rows are wanted.

        Raises:
            As for :meth:`write`; also SinkRejectedError where it does not meet the history that is there, or files are
                not there any more.
        """
        uri = table_uri(self._root, view)
        with self._lock:
            return commit_until_alone(
                lambda: self._add_history(stage, files, view=view, read=read),
                uri=uri,
                attempts=self._attempts,
                forget=lambda: self._tables.pop(uri, None),
            )

    def _add_history(
        self, stage: Stage, files: Sequence[StagedFile], *, view: FeatureView, read: Mapping[int, range]
    ) -> History:
        self._tables.pop(table_uri(self._root, view), None)
        table = self._open(view) or self._create(view)
        held = _held(table, view, read)
        if recorded_version(table, stage.transaction) is not None:
            return held  # by an earlier try, whose answer was lost
        spans, taken = dict(held.spans), dict[int, list[range]]()
        for number, wanted in read.items():
            added = range(wanted.start, min(wanted.stop, held.live_from.get(number, wanted.stop)))
            span = held.spans.get(number, added)
            if is_apart(span, added):
                msg = (
                    f"history of offsets {added.start} to {added.stop - 1} of partition {number} does not meet that of "
                    f"{span.start} to {span.stop - 1}, which {table_uri(self._root, view)} has; add what is between too"
                )
                raise SinkRejectedError(msg)
            pieces = [added]
            if number in held.spans:
                pieces = [
                    range(added.start, min(added.stop, span.start)),
                    range(max(added.start, span.stop), added.stop),
                ]
            if found := [piece for piece in pieces if piece]:
                taken[number] = found
                spans[number] = range(min(span.start, added.start), max(span.stop, added.stop))
        chosen = stage.choose(files, taken)
        kept = {file.path for file in chosen}
        if not chosen:
            stage.remove([file for file in files if file.path not in kept])
            return held
        if gone := stage.absent(chosen):
            msg = (
                f"{len(gone)} of {len(chosen)} files of the backfill are not in {table_uri(self._root, view)} any more "
                f"({gone[0].path}), maybe a vacuum took them; begin it again with `--restart`"
            )
            raise SinkRejectedError(msg)
        transactions = [Transaction(stage.transaction, 1)]
        for number in taken:
            live = _or_none_yet(recorded_version(table, application_id(view, number)))
            first_id, last_id = history_ids(view, number)
            # The live path's own transaction, unchanged: so that its commits and this one cannot pass each other.
            transactions += [
                Transaction(application_id(view, number), live),
                Transaction(first_id, spans[number].start),
                Transaction(last_id, spans[number].stop - 1),
            ]
        if _schema_mode(table) is not None:
            table.alter.add_columns([DeltaField.from_arrow(table_schema(view).field(AVAILABLE_TIME))])
        table.create_write_transaction(
            [file.to_action() for file in chosen],
            mode="append",
            schema=table.schema(),
            partition_by=[EVENT_DATE],
            commit_properties=CommitProperties(app_transactions=transactions),
        )
        table.update_incremental()
        stage.remove([file for file in files if file.path not in kept])
        n_rows = sum(file.rows for file in chosen)
        return History(spans=spans, live_from=held.live_from, rows=n_rows, table_version=table.version())

    def last_offset(self, view: FeatureView, partition: int) -> int | None:
        """Read the last offset of a features-topic partition whose rows are in the table; None when there is none.

        Raises:
            SchemaMismatchError: The table belongs to another definition.
            SinkUnavailableError: The storage does not answer.
        """
        uri = table_uri(self._root, view)
        with self._lock, mapped_errors(uri):
            self._tables.pop(uri, None)
            table = self._open(view)
            recorded = None if table is None else recorded_version(table, application_id(view, partition))
            return None if recorded == _NONE_YET else recorded

    def history(self, view: FeatureView, partitions: Iterable[int]) -> History:
        """Tell what of these partitions of what the view reads is history, and where the live path's rows begin.

        Raises:
            SchemaMismatchError: The table belongs to another definition.
            SinkUnavailableError: The storage does not answer.
        """
        uri = table_uri(self._root, view)
        with self._lock, mapped_errors(uri):
            self._tables.pop(uri, None)
            table = self._open(view)
            if table is None:
                return History(spans={}, live_from={}, rows=0, table_version=None)
            return _held(table, view, partitions)

    def _append(self, rows: pa.Table, *, view: FeatureView, partition: int, offsets: pa.Array) -> CommitResult:
        table = self._open(view) or self._create(view)
        app_id = application_id(view, partition)
        is_fresh = pc.greater(offsets, _or_none_yet(recorded_version(table, app_id)))
        span = _span(table, view, partition) or range(0)
        made_by = rows["source_offset"]
        is_live = pc.or_(pc.less(made_by, span.start), pc.greater_equal(made_by, span.stop))
        fresh = rows.filter(pc.and_(is_fresh, is_live))
        if fresh.num_rows == 0:
            return CommitResult(rows=0, skipped=rows.num_rows, table_version=None)
        # The rows and the offset become visible in the same commit, or neither does. A commit with this transaction id
        # made since `table` was read fails ours: two writers cannot both think a row new.
        write_deltalake(
            table,
            fresh,
            mode="append",
            schema_mode=_schema_mode(table),
            writer_properties=WRITER_PROPERTIES,
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


def history_ids(view: FeatureView, partition: int) -> tuple[str, str]:
    """Name the application transactions whose versions are the first and the last source offset of the history."""
    application = application_id(view, partition)
    return f"{application}:history_from", f"{application}:history"


def is_apart(span: range, added: range) -> bool:
    """See whether there is something between two spans of offsets; there is nothing beside an empty one."""
    return bool(span and added) and (added.start > span.stop or added.stop < span.start)


def open_table(
    root: str | Path, view: FeatureView, *, storage_options: Mapping[str, str] | None = None
) -> DeltaTable | None:
    """Open a view's table, or return None when there is none.

    Raises:
        SchemaMismatchError: The table belongs to another view or definition.
        SinkUnavailableError: The storage does not answer.
    """
    uri = table_uri(root, view)
    table = open_delta(uri, storage_options=storage_options)
    if table is None:
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
    with mapped_errors(uri):
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
    with mapped_errors(table_uri(root, view)):
        return (
            _with_available_time(rows.to_table(filter=where), view)
            .select(table_schema(view).names)
            .cast(table_schema(view))
        )


def _with_available_time(rows: pa.Table, view: FeatureView) -> pa.Table:
    """Say when rows that were written before tables said so could be read."""
    told = rows[AVAILABLE_TIME] if AVAILABLE_TIME in rows.column_names else pa.nulls(rows.num_rows, TIMESTAMP)
    if not told.null_count:
        return rows
    filled = pc.coalesce(told, available_times(rows, view))
    return rows.drop_columns([AVAILABLE_TIME] if AVAILABLE_TIME in rows.column_names else []).append_column(
        AVAILABLE_TIME, filled
    )


def _or_none_yet(recorded: int | None) -> int:
    return _NONE_YET if recorded is None else recorded


def _schema_mode(table: DeltaTable) -> Literal["merge"] | None:
    """A table that was made before it had all columns gets them with the next rows."""
    return None if AVAILABLE_TIME in (field.name for field in table.schema().fields) else "merge"


def _span(table: DeltaTable, view: FeatureView, partition: int) -> range | None:
    first, last = (recorded_version(table, name) for name in history_ids(view, partition))
    return None if first is None or last is None else range(first, last + 1)


def _held(table: DeltaTable, view: FeatureView, partitions: Iterable[int]) -> History:
    """Tell what a table has of these partitions."""
    numbers = set(partitions)
    spans = {number: span for number in numbers if (span := _span(table, view, number)) is not None}
    where = ~_of_offsets({number: [span] for number, span in spans.items()}) if spans else None
    first: dict[int, int] = {}
    columns = ["source_partition", "source_offset"]
    for batch in table.to_pyarrow_dataset().to_batches(columns=columns, filter=where):
        found = pa.Table.from_batches([batch]).group_by("source_partition").aggregate([("source_offset", "min")])
        for row in found.to_pylist():
            number = row["source_partition"]
            first[number] = min(first.get(number, row["source_offset_min"]), row["source_offset_min"])
    live_from = {number: offset for number, offset in first.items() if number in numbers}
    return History(spans=spans, live_from=live_from, rows=0, table_version=None)


def _of_offsets(wanted: Mapping[int, Sequence[range]]) -> ds.Expression:
    number, offset = pc.field("source_partition"), pc.field("source_offset")
    ranges = [(number == n) & (offset >= o.start) & (offset < o.stop) for n, spans in wanted.items() for o in spans]
    return functools.reduce(operator.or_, ranges)
