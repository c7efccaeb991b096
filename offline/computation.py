"""Runs a view over a file of events, through the very decoding, admission and engine of the live path.

One engine runs per partition, as in the live path (:mod:`offline.event_file` says which one a row is in); of a view by
way of a repartition topic there is one in all (:mod:`offline.repartitioned`). Output does not depend on how the input
is cut into batches: feature rows stand in the order of the event that made them, those that closing the input makes
come last, by partition.

The micro-batch of ``latest`` is the whole input: of the as-of rows the last of each key and partition is kept, at its
place. To know which that is takes the whole input, so ``latest`` holds back its output until the end, in a temporary
file where there is much of it; ``every_event`` and ``on_close`` hold back nothing.
"""

from collections.abc import Iterator
from dataclasses import KW_ONLY, dataclass, field, replace
from pathlib import Path
from tempfile import SpooledTemporaryFile
from typing import Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from offline.event_file import UNKNOWN_US, EventCut, EventFile
from offline.repartitioned import RepartitionDriver
from schemas.row import CONTEXT_COLUMNS, Pane
from schemas.source import EventSource
from schemas.view import FeatureView
from streams.batch import RawBatch
from streams.decoding import decode
from streams.windowing.engine import WindowEngine

DEAD_LETTER_COLUMNS: Final = pa.schema(
    [
        pa.field("topic", pa.string()),
        pa.field("partition", pa.int64()),
        pa.field("offset", pa.int64()),
        pa.field("reason", pa.string()),
        pa.field("detail", pa.string()),
        pa.field("late_by_us", pa.int64()),
        pa.field("view", pa.string()),
        pa.field("value", pa.string()),
    ]
)
"""Columns of a dead letter of a file; ``value`` is the row's JSON, with U+FFFD in place of bytes that are no UTF-8."""
_SPOOLED_BYTES: Final = 64 * 2**20
_REMEMBERED_ROWS: Final = 200_000


@dataclass(frozen=True, kw_only=True)
class DecodedCut:
    """A cut of a file after decoding.

    Attributes:
        events: Rows that pass the contract, as the engine takes them, in the order of the file.
        at: ``(n_events,)`` position of each in the cut.
        partitions: ``(n_events,)`` partition of each.
        rejected: :data:`schemas.row.REJECTED_COLUMNS` of the others, with numbers of rows in the file as ``_offset``.
    """

    events: pa.Table
    at: NDArray[np.int64]
    partitions: NDArray[np.int64]
    rejected: pa.Table

    @classmethod
    def of(cls, cut: EventCut, source: EventSource) -> "DecodedCut":
        """Decode a cut; it is a batch whose offsets are the numbers of the rows, which rise whatever the partitions."""
        batch = RawBatch(
            topic=source.topic,
            partition=0,
            offsets=cut.numbers,
            broker_time_us=cut.broker_time_us,
            keys=[None] * len(cut),
            values=cut.values,
            headers=[None] * len(cut),
            next_offset=cut.first_number + len(cut),
        )
        decoded = decode(batch, source.schema.as_plain_json)
        at = decoded.rows["_offset"].to_numpy() - cut.first_number
        events, broker_time_us = decoded.rows, cut.broker_time_us[at]
        known = pa.array(broker_time_us, mask=broker_time_us == UNKNOWN_US)
        for name, column in (("_offset", pa.array(cut.offsets[at])), ("_broker_time", known)):
            events = events.set_column(events.schema.get_field_index(name), name, column)
        return cls(events=events, at=at, partitions=cut.partitions[at], rejected=decoded.rejected)

    def by_partition(self) -> Iterator[tuple[int, pa.Table, NDArray[np.int64]]]:
        """Each partition with its events and their positions in the cut."""
        for partition in np.unique(self.partitions).tolist():
            mine = np.flatnonzero(self.partitions == partition)
            events = self.events if len(mine) == self.events.num_rows else self.events.take(pa.array(mine))
            yield partition, events, self.at[mine]


@dataclass(frozen=True, kw_only=True)
class Computed:
    """What one cut of the input, or its end, became.

    Attributes:
        rows: Feature rows, ``view.row_schema`` with ``computed_time`` and ``epoch`` null: nothing was committed.
        dead_letters: :data:`DEAD_LETTER_COLUMNS`, in the order of the input.
    """

    rows: pa.Table
    dead_letters: pa.Table


@dataclass
class Computation:
    """A view on its way through a file.

    Attributes:
        view: The view.
        emit: Emit mode in place of the view's own; None keeps that.

    Raises:
        ConfigError: The view makes no row in this emit mode.
    """

    view: FeatureView
    _: KW_ONLY
    emit: str | None = None
    _driven: FeatureView = field(init=False)
    _engines: dict[int, WindowEngine] = field(default_factory=dict, init=False)
    _driver: RepartitionDriver | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        self._driven = self.view if self.emit is None else replace(self.view, emit=self.emit)

    def _drive(self, file: EventFile, batch_rows: int) -> Iterator[Computed]:
        if not self.view.input.is_repartitioned:
            return map(self._step, file.cuts(batch_rows))
        self._driver = driver = RepartitionDriver(self._driven, file.partitions(batch_rows))
        self._engines[0] = driver.engine
        return (self._route(driver, cut) for cut in file.cuts(batch_rows))

    def _route(self, driver: RepartitionDriver, cut: EventCut) -> Computed:
        rows, rejected = driver.step(cut)
        return Computed(rows=self._with_context(rows, 0), dead_letters=self._dead_letters(rejected, cut))

    def run(self, path: Path, *, batch_rows: int = 50_000, closes: bool = False) -> Iterator[Computed]:
        """Compute cut by cut.

        Args:
            path: The input, Parquet if its name ends in ``.parquet`` and NDJSON otherwise.
            batch_rows: Rows of a cut.
            closes: Whether to take the watermark to the end of time after the last row.

        Raises:
            DecodeError: The file cannot be read, or a ``_partition``, ``_offset`` or ``_broker_time`` is none.
            SchemaMismatchError: The offsets of a partition do not rise.
        """
        is_latest = self._driven.emit == "latest"
        nothing = DEAD_LETTER_COLUMNS.empty_table()
        with _HeldRows(self.view) as held:
            for computed in self._drive(EventFile(path, self.view.sources), batch_rows):
                if is_latest:
                    held.add(computed.rows)
                    yield replace(computed, rows=self.view.row_schema.empty_table())
                else:
                    yield computed
            for rows in held.release():
                yield Computed(rows=rows, dead_letters=nothing)
        for partition in sorted(self._engines) if closes else ():
            rows = self._with_context(self._engines[partition].close().rows, partition)
            yield Computed(rows=rows, dead_letters=nothing)

    def _step(self, cut: EventCut) -> Computed:
        decoded = DecodedCut.of(cut, self.view.sources[0])
        rows, makers = [self.view.row_schema.empty_table()], [np.empty(0, np.int64)]
        rejected = [decoded.rejected]
        for partition, events, at in decoded.by_partition():
            result = self._engine(partition).step(events, processing_time_us=0)
            offsets = cut.offsets[at]
            rows.append(self._with_context(result.rows, partition))
            makers.append(at[np.searchsorted(offsets, result.rows["source_offset"].to_numpy())])
            if result.dead_letters.num_rows:
                late = at[np.searchsorted(offsets, result.dead_letters["_offset"].to_numpy())]
                rejected.append(result.dead_letters.set_column(0, "_offset", pa.array(late + cut.first_number)))
        made = pa.concat_tables(rows)
        if len(rows) > 2:
            made = made.take(pa.array(np.argsort(np.concatenate(makers), kind="stable")))
        return Computed(rows=made, dead_letters=self._dead_letters(pa.concat_tables(rejected), cut))

    def _engine(self, partition: int) -> WindowEngine:
        if partition not in self._engines:
            self._engines[partition] = WindowEngine(self._driven, source_partition=partition)
        return self._engines[partition]

    def _dead_letters(self, rejected: pa.Table, cut: EventCut) -> pa.Table:
        if not rejected.num_rows:
            return DEAD_LETTER_COLUMNS.empty_table()
        rejected = rejected.sort_by("_offset")
        at = rejected["_offset"].to_numpy() - cut.first_number
        columns = {
            "topic": [self.view.sources[source].topic for source in cut.sources[at].tolist()],
            "partition": cut.partitions[at],
            "offset": cut.offsets[at],
            "reason": rejected["reason"],
            "detail": rejected["detail"],
            "late_by_us": rejected["late_by_us"],
            "view": [self.view.name] * len(at),
            "value": [cut.values[position].decode("utf-8", "replace") for position in at.tolist()],
        }
        return pa.table(columns, schema=DEAD_LETTER_COLUMNS)

    def _with_context(self, rows: pa.Table, partition: int) -> pa.Table:
        values = {
            "view": self.view.name,
            "view_version": self.view.version,
            "definition_hash": self.view.definition_hash,
            "source_topic": self.view.input.topic,
            "source_partition": partition,
        }
        for column in CONTEXT_COLUMNS:
            scalar = pa.scalar(values.get(column.name), column.type)
            rows = rows.append_column(column, pa.repeat(scalar, rows.num_rows))
        return rows if self._driver is None else self._driver.with_origin(rows)


class _HeldRows:
    """Rows of ``latest`` until the end of the input, on disk when there are many."""

    def __init__(self, view: FeatureView) -> None:
        self._key = view.entity.key
        self._file = SpooledTemporaryFile(max_size=_SPOOLED_BYTES)  # noqa: SIM115 - __exit__ closes it
        options = pa.ipc.IpcWriteOptions(compression="lz4")
        self._writer = pa.ipc.new_stream(self._file, view.row_schema, options=options)
        self._count = 0
        self._as_of: list[pa.Table] = []
        self._limit = _REMEMBERED_ROWS

    def __enter__(self) -> "_HeldRows":
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def add(self, rows: pa.Table) -> None:
        """Hold rows back, and remember which as-of row of a key is the last."""
        numbers = np.arange(self._count, self._count + rows.num_rows)
        columns = {"key": rows[self._key], "partition": rows["source_partition"], "at": numbers}
        self._as_of.append(pa.table(columns).filter(pc.equal(rows["pane"], str(Pane.EARLY))))
        self._count += rows.num_rows
        self._writer.write_table(rows)
        if sum(table.num_rows for table in self._as_of) > self._limit:
            self._as_of = [self._last()]
            self._limit = 2 * self._as_of[0].num_rows + _REMEMBERED_ROWS

    def release(self) -> Iterator[pa.Table]:
        """All rows but the as-of rows that another one of the same key and partition follows."""
        last = self._last()["at"] if self._as_of else pa.chunked_array([], pa.int64())
        self._writer.close()
        self._file.seek(0)
        first = 0
        for batch in pa.ipc.open_stream(self._file):
            numbers = pa.array(np.arange(first, first + batch.num_rows))
            first += batch.num_rows
            kept = pc.or_(pc.not_equal(batch["pane"], str(Pane.EARLY)), pc.is_in(numbers, value_set=last))
            yield pa.Table.from_batches([batch.filter(kept)])

    def _last(self) -> pa.Table:
        last = pa.concat_tables(self._as_of).group_by(["key", "partition"]).aggregate([("at", "max")])
        return last.rename_columns(["key", "partition", "at"])
