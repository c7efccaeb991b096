"""The event-time engine: rows of one topic partition in, feature rows and dead letters out.

No I/O, no clock, no Kafka: the same object is driven by agents, replay and backfill. Its output is a function of the rows
and markers it was given, never of how they were cut into batches.
"""

from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from schemas.row import Pane, Reason
from schemas.time import END_OF_TIME_US, MINUS_INFINITY_US, format_rfc3339
from schemas.view import FeatureView
from streams.windowing.admission import Rejections, Screen
from streams.windowing.batch import InputBatch
from streams.windowing.columns import take_rows
from streams.windowing.duplicate import DuplicateMemory
from streams.windowing.plan import compile_view
from streams.windowing.result import LAST_DATETIME_US, StepCounts, StepResult, WatermarkMarker
from streams.windowing.segment import Bools, Ints
from streams.windowing.sliding import AdmittedRows, OutputRows, SlidingState
from streams.windowing.snapshot import read_snapshot, table_from_bytes, table_to_bytes, write_snapshot

_NO_ROWS = np.empty(0, dtype=np.int64)


@dataclass(frozen=True)
class _Judged:
    """Rows that passed the screen, judged against the watermark.

    Attributes:
        rows: Positions in the batch.
        time_us: Event times.
        before_us: Watermark that each was judged against.
        after_us: Watermark after each.
        is_duplicate: Rejected as duplicates.
        is_late: Rejected as late.
        is_partially_late: Admitted, though some of its windows had expired.
    """

    rows: Ints
    time_us: Ints
    before_us: Ints
    after_us: Ints
    is_duplicate: Bools
    is_late: Bools
    is_partially_late: Bools

    @property
    def is_admitted(self) -> Bools:
        """Neither duplicate nor late."""
        return ~(self.is_duplicate | self.is_late)


class WindowEngine:
    """Computes one view over one topic partition.

    Attributes:
        view: The definition.
        source_partition: Number of the partition.
        watermark_us: Watermark after all rows given so far.
        last_offset: Offset of the last row given; None before the first.
    """

    def __init__(self, view: FeatureView, *, source_partition: int = 0) -> None:
        self.view = view
        self.source_partition = source_partition
        self.watermark_us = MINUS_INFINITY_US
        self.last_offset: int | None = None
        self._plan = compile_view(view)
        self._screen = Screen(view.source, key=view.entity.key)
        self._prefix = f"{view.source.topic}-{source_partition}-"
        self._state = SlidingState(self._plan)
        self._out_of_orderness_us = view.source.max_out_of_orderness_us
        self._duplicates = None
        if (window_us := view.source.dedup_window_us) is not None:
            reach_us = self._plan.reach_us + self._plan.allowed_lateness_us
            self._duplicates = DuplicateMemory(window_us=window_us, reach_us=reach_us)

    def step(self, batch: pa.RecordBatch | pa.Table, *, processing_time_us: int) -> StepResult:
        """Take in a batch of rows in offset order.

        Args:
            batch: The contract's columns and ``schemas.row.INPUT_COLUMNS``.
            processing_time_us: When the batch was received; only idleness depends on it.

        Raises:
            SchemaMismatchError: A column is absent or of another type.
            WindowingError: Offsets do not rise.
        """
        del processing_time_us
        rows = InputBatch(batch, plan=self._plan)
        rows.check_order(self.last_offset)
        rejections = Rejections()
        screened = self._screen.check(rows.table, rejections)
        candidates = np.flatnonzero(screened.is_admissible)
        with np.errstate(all="ignore"):
            outputs, counts = self._take_in(rows, candidates, screened.time_us, rejections)
            if len(rows.offsets):
                self.last_offset = int(rows.offsets[-1])
            table = self._table(outputs, rows)
        return self._result(table, rejections.to_table(rows.offsets), counts)

    def _take_in(
        self, batch: InputBatch, candidates: Ints, time_us: Ints, rejections: Rejections
    ) -> tuple[list[OutputRows], dict[str, int]]:
        """Judge rows and process those admitted; outputs name their makers by position in the batch."""
        judged = self._judge(batch, candidates, time_us[candidates])
        admitted = judged.rows[judged.is_admitted]
        prepared = None
        if len(admitted):
            rows = AdmittedRows(
                take_rows(batch.table, admitted),
                judged.time_us[judged.is_admitted],
                batch.offsets[admitted],
                judged.before_us[judged.is_admitted],
                judged.after_us[judged.is_admitted],
            )
            prepared = self._state.prepare(rows)
            if self._state.might_overflow(prepared):
                if len(candidates) > 1:
                    return self._take_in_singly(batch, candidates, time_us, rejections)
                if (feature := self._state.overflowing(prepared)) is not None:
                    rejections.add(int(admitted[0]), Reason.OVERFLOW, f"`{feature}` would leave the range of int64")
                    return [], {}
        self._explain(judged, batch, rejections)
        if prepared is None:
            return [], {}
        if self._duplicates is not None and self.view.source.event_id is not None:
            ids = batch.table.column(self.view.source.event_id).chunk(0).take(pa.array(admitted))
            self._duplicates.add(ids.to_pylist(), prepared.rows.time_us.tolist())
            self._duplicates.forget(int(judged.after_us[-1]))
        self.watermark_us = int(judged.after_us[-1])
        output = self._state.process(prepared, emit=self.view.emit)
        has_as_of = prepared.first > self._plan.expired_ends(prepared.rows.before_us)
        counts = {
            "admitted": len(admitted),
            "partially_late": int(judged.is_partially_late.sum()),
            "without_as_of": 0 if self.view.emit == "on_close" else int((~has_as_of).sum()),
        }
        return [OutputRows(admitted[output.maker], output.columns)], counts

    def _take_in_singly(
        self, batch: InputBatch, candidates: Ints, time_us: Ints, rejections: Rejections
    ) -> tuple[list[OutputRows], dict[str, int]]:
        outputs: list[OutputRows] = []
        counts: dict[str, int] = {}
        for position in range(len(candidates)):
            one, more = self._take_in(batch, candidates[position : position + 1], time_us, rejections)
            outputs += one
            counts = {name: counts.get(name, 0) + more.get(name, 0) for name in counts | more}
        return outputs, counts

    def _judge(self, batch: InputBatch, rows: Ints, time_us: Ints) -> _Judged:
        """Judge each row against the watermark before it; a row that is rejected moves it for nobody.

        A late row needs no care: its windows end at or before the watermark, so its event time is before it too.
        """
        alone_us = time_us - self._out_of_orderness_us
        is_duplicate = np.zeros(len(rows), dtype=np.bool_)
        event_id = self.view.source.event_id
        if self._duplicates is not None and event_id is not None:
            is_duplicate = self._duplicates.find(
                batch.table.column(event_id).chunk(0).take(pa.array(rows)),
                time_us,
                watermark_us=alone_us,
                start_us=self.watermark_us,
                is_late=self._is_late,
            )
        raised = np.where(is_duplicate, self.watermark_us, np.maximum(alone_us, self.watermark_us))
        after_us = np.maximum.accumulate(raised)
        before_us = np.concatenate([[self.watermark_us], after_us[:-1]])[: len(rows)].astype(np.int64)
        _, first, last = self._state.tiles_of(time_us)
        expired = self._plan.expired_ends(before_us)
        is_late = (last <= expired) & ~is_duplicate
        is_partially_late = (first <= expired) & ~is_late & ~is_duplicate
        return _Judged(rows, time_us, before_us, after_us, is_duplicate, is_late, is_partially_late)

    def _explain(self, judged: _Judged, batch: InputBatch, rejections: Rejections) -> None:
        source = self.view.source
        for position in np.flatnonzero(judged.is_duplicate).tolist():
            row = int(judged.rows[position])
            shown = batch.table.column(source.event_id)[row].as_py()
            detail = f"`{source.event_id}` {shown!r} was admitted before, less than {source.dedup_window} apart"
            rejections.add(row, Reason.DUPLICATE, detail)
        for position in np.flatnonzero(judged.is_late).tolist():
            before_us = int(judged.before_us[position])
            watermark = format_rfc3339(min(before_us, LAST_DATETIME_US))
            detail = f"its windows had expired: watermark {watermark}, allowed lateness {self.view.allowed_lateness}"
            late_by_us = min(before_us - int(judged.time_us[position]), END_OF_TIME_US)
            rejections.add(int(judged.rows[position]), Reason.LATE, detail, late_by_us=late_by_us)

    def _is_late(self, time_us: int, watermark_us: int) -> bool:
        _, _, last = self._state.tiles_of(np.array([time_us]))
        return int(last[0]) <= self._plan.expired(watermark_us)

    def advance(self, marker: WatermarkMarker) -> StepResult:
        """Move the watermark as a recorded marker says; a replay calls it where the marker stands in the changelog."""
        return self._advance_to(marker.watermark_us)

    def close(self) -> StepResult:
        """Take the watermark to the end of time and fire everything that is left."""
        return self._advance_to(END_OF_TIME_US)

    def _advance_to(self, watermark_us: int, marker: WatermarkMarker | None = None) -> StepResult:
        before_us, self.watermark_us = self.watermark_us, max(self.watermark_us, watermark_us)
        step = AdmittedRows(None, _NO_ROWS, _NO_ROWS, np.array([before_us]), np.array([self.watermark_us]))
        with np.errstate(all="ignore"):
            output = self._state.process(self._state.prepare(step), emit=self.view.emit)
            table = self._table([output], None)
        return self._result(table, Rejections().to_table(_NO_ROWS), {}, marker=marker)

    # Laying out

    def _table(self, outputs: list[OutputRows], batch: InputBatch | None) -> pa.Table:
        schema = self.view.engine_schema
        tables = []
        for output in outputs:
            n_rows = len(output.maker)
            columns = dict(output.columns)
            watermark = pc.cast(columns["watermark"], pa.int64()).to_numpy()
            columns["watermark"] = pa.array(
                np.minimum(watermark, LAST_DATETIME_US), mask=watermark <= MINUS_INFINITY_US
            )
            if batch is not None:
                columns["source_offset"] = pa.array(batch.offsets[output.maker])
                columns["broker_time"] = batch.table.column("_broker_time").chunk(0).take(pa.array(output.maker))
                columns["request_id"] = batch.request_ids(output.maker, prefix=self._prefix)
            else:
                request_id = None if self.last_offset is None else f"{self._prefix}{self.last_offset}"
                columns["source_offset"] = pa.array([self.last_offset] * n_rows, pa.int64())
                columns["broker_time"] = pa.nulls(n_rows, pa.int64())
                columns["request_id"] = pa.array([request_id] * n_rows, pa.string())
            arrays = [columns[field.name].cast(field.type) for field in schema]
            tables.append(pa.Table.from_arrays(arrays, schema=schema))
        if not tables:
            return schema.empty_table()
        return tables[0] if len(tables) == 1 else self._without_repeats(pa.concat_tables(tables).combine_chunks())

    def _without_repeats(self, table: pa.Table) -> pa.Table:
        """Of the as-of rows of a batch that was taken in row by row, keep what the emit mode asks for."""
        if self.view.emit != "latest":
            return table
        is_early = pc.equal(table.column("pane"), Pane.EARLY.value).to_numpy()
        rows = np.flatnonzero(is_early)
        codes = (
            table.column(self._plan.key).combine_chunks().take(pa.array(rows)).dictionary_encode().indices.to_numpy()
        )
        newest = np.full(int(codes.max(initial=-1)) + 1, -1, dtype=np.int64)
        newest[codes] = rows
        is_early[newest] = False
        return table.filter(pa.array(~is_early))

    def _result(
        self, table: pa.Table, dead: pa.Table, counts: dict[str, int], marker: WatermarkMarker | None = None
    ) -> StepResult:
        panes = {item["values"]: item["counts"] for item in pc.value_counts(table.column("pane")).to_pylist()}
        return StepResult(
            rows=table,
            dead_letters=dead,
            watermark_us=self.watermark_us,
            counts=StepCounts(
                rejected=dead.num_rows,
                early=panes.get(Pane.EARLY.value, 0),
                on_time=panes.get(Pane.ON_TIME.value, 0),
                late=panes.get(Pane.LATE.value, 0),
                empty=panes.get(Pane.EMPTY.value, 0),
                **counts,
            ),
            marker=marker,
        )

    # State

    def snapshot(self) -> bytes:
        """State as versioned Arrow IPC bytes."""
        tables = self._state.to_tables()
        tables["engine"] = pa.table(
            {
                "watermark_us": pa.array([self.watermark_us], pa.int64()),
                "last_offset": pa.array([self.last_offset], pa.int64()),
            }
        )
        if self._duplicates is not None:
            tables["duplicates"] = self._duplicates.to_table(self._id_type)
        return write_snapshot({name: table_to_bytes(t) for name, t in tables.items()}, identity=self._identity)

    @classmethod
    def restore(cls, view: FeatureView, blob: bytes, *, source_partition: int = 0) -> "WindowEngine":
        """Make an engine that goes on where a snapshot was taken.

        Raises:
            StateVersionError: The snapshot is of another format, definition, topic or partition.
        """
        engine = cls(view, source_partition=source_partition)
        sections = read_snapshot(blob, identity=engine._identity)
        tables = {name: table_from_bytes(content) for name, content in sections.items()}
        engine._load(tables)
        return engine

    def _load(self, tables: dict[str, pa.Table]) -> None:
        (engine,) = tables["engine"].to_pylist()
        self.watermark_us, self.last_offset = engine["watermark_us"], engine["last_offset"]
        if self._duplicates is not None:
            self._duplicates.from_table(tables["duplicates"])
        self._state.from_tables(tables)

    @property
    def _id_type(self) -> pa.DataType:
        return self.view.source.schema.arrow_schema.field(self.view.source.event_id).type

    @property
    def _identity(self) -> dict[str, str]:
        return {
            "view": self.view.name,
            "definition_hash": self.view.definition_hash,
            "topic": self.view.source.topic,
            "partition": str(self.source_partition),
        }
