"""Rows into session windows, one at a time."""

from collections.abc import Iterable

import pyarrow as pa

from streams.windowing.admission import Rejections
from streams.windowing.batch import InputBatch
from streams.windowing.duplicate import DuplicateMemory
from streams.windowing.intake import OutputTable, Taken, explain_duplicate, explain_late, explain_overflow
from streams.windowing.plan import Plan
from streams.windowing.row import RowSink, RowView
from streams.windowing.segment import Ints
from streams.windowing.session import SessionState
from streams.windowing.snapshot import Content, Selection


class SessionIntake:
    """State of a session view, and how rows get into it."""

    def __init__(self, plan: Plan, *, prefix: str, duplicates: DuplicateMemory | None) -> None:
        self._plan = plan
        self._state = SessionState(plan)
        self._output = OutputTable(plan, prefix=prefix)
        self._duplicates = duplicates

    def take_in(
        self, batch: InputBatch, candidates: Ints, time_us: Ints, *, watermark_us: int, rejections: Rejections
    ) -> Taken:
        """Judge, reject or admit each row (see :class:`streams.windowing.intake.Intake`)."""
        view = self._plan.view
        sink = RowSink(self._plan)
        row = RowView(batch, plan=self._plan, time_us=time_us)
        ids = None if view.source.event_id is None else batch.table.column(view.source.event_id).to_pylist()
        out_of_orderness_us, admitted = view.source.max_out_of_orderness_us, 0
        # Row by row: which session a row falls into hangs on the rows before it (see SessionState).
        for index in candidates.tolist():
            row.move_to(index)
            key, before_us = row.keys[index], watermark_us
            if ids is not None and self._is_duplicate(ids[index], row, watermark_us=before_us):
                explain_duplicate(view, index, ids[index], rejections)
                continue
            if self._state.is_late(row, key, watermark_us=before_us):
                explain_late(view, index, row.time_us, before_us, rejections)
                continue
            if (feature := self._state.overflowing(row, key, watermark_us=before_us)) is not None:
                explain_overflow(index, feature, rejections)
                continue
            watermark_us = max(before_us, row.time_us - out_of_orderness_us)
            self._state.add(
                row, key, before_us=before_us, after_us=watermark_us, sink=sink, has_as_of=view.emit != "on_close"
            )
            admitted += 1
            if self._duplicates is not None and ids is not None:
                self._duplicates.add([ids[index]], [row.time_us])
        if self._duplicates is not None:
            self._duplicates.forget(watermark_us)
        columns, makers = sink.to_columns()
        rows = self._output.of_batch(columns, makers, batch)
        return Taken(rows=rows, watermark_us=watermark_us, admitted=admitted)

    def _is_duplicate(self, event_id: object, row: RowView, *, watermark_us: int) -> bool:
        memory = self._duplicates
        return memory is not None and memory.is_duplicate(event_id, row.time_us, watermark_us=watermark_us)

    def advance(self, *, before_us: int, after_us: int, last_offset: int | None) -> pa.Table:
        """Move the watermark without a row and give what that fires."""
        sink = RowSink(self._plan)
        self._state.advance(before_us, after_us, maker=-1, sink=sink)
        columns, _ = sink.to_columns()
        return self._output.of_step(columns, last_offset=last_offset)

    def write(self, selection: Selection) -> Content:
        """Write the selected state."""
        return self._state.write(selection)

    def mark_told(self) -> None:
        """Begin to note changes anew."""
        self._state.mark_told()

    def read(self, contents: Iterable[Content], *, watermark_us: int) -> None:
        """Make parts, the newest first, the state of a view that has none."""
        self._state.read(contents, watermark_us=watermark_us)
