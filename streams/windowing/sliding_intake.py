"""Rows into sliding windows, a batch at a time: judged against the watermark, each against the rows before it."""

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import pyarrow as pa

from streams.windowing.admission import Rejections
from streams.windowing.batch import InputBatch
from streams.windowing.columns import take_rows
from streams.windowing.duplicate import DuplicateMemory
from streams.windowing.intake import OutputTable, Taken, explain_duplicate, explain_late, explain_overflow
from streams.windowing.plan import Plan
from streams.windowing.query import AdmittedRows, Prepared
from streams.windowing.segment import Bools, Ints
from streams.windowing.sliding import SlidingState
from streams.windowing.sliding_part import read_sliding, write_sliding
from streams.windowing.snapshot import Content, Selection
from streams.windowing.watermark_path import WatermarkPath

_NO_ROWS: Ints = np.empty(0, dtype=np.int64)


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
        is_overflow: Rejected as overflows.
        overflows: The sums that these would take out of int64, by position in the batch.
    """

    rows: Ints
    time_us: Ints
    before_us: Ints
    after_us: Ints
    is_duplicate: Bools
    is_late: Bools
    is_partially_late: Bools
    is_overflow: Bools
    overflows: dict[int, str]

    @property
    def is_admitted(self) -> Bools:
        """Not rejected."""
        return ~(self.is_duplicate | self.is_late | self.is_overflow)


class SlidingIntake:
    """State of a sliding view, and how rows get into it."""

    def __init__(self, plan: Plan, *, prefix: str, duplicates: DuplicateMemory | None) -> None:
        self._plan = plan
        self._state = SlidingState(plan)
        self._output = OutputTable(plan, prefix=prefix)
        self._duplicates = duplicates
        self._out_of_orderness_us = plan.view.input.max_out_of_orderness_us

    def take_in(
        self,
        batch: InputBatch,
        candidates: Ints,
        time_us: Ints,
        *,
        watermark_us: int,
        moved_us: Ints | None,
        rejections: Rejections,
    ) -> Taken:
        """Judge, reject or admit each row (see :class:`streams.windowing.intake.Intake`)."""
        overflows: dict[int, str] = {}
        while True:
            judged = self._judge(
                batch, candidates, time_us[candidates], watermark_us, moved_us=moved_us, overflows=overflows
            )
            admitted = judged.rows[judged.is_admitted]
            if not len(admitted) and moved_us is None:
                self._explain(judged, batch, rejections)
                return Taken(rows=self._plan.view.engine_schema.empty_table(), watermark_us=watermark_us)
            prepared = self._prepare(judged, batch, watermark_us, moved_us)
            # A row that overflows moves no watermark either, so those after it are judged anew.
            if (overflow := self._state.first_overflow(prepared)) is None:
                break
            overflows[int(admitted[overflow[0]])] = overflow[1]
        self._explain(judged, batch, rejections)
        watermark_us = prepared.rows.path.end_us
        if self._duplicates is not None:
            self._duplicates.add(self._ids(batch, admitted).to_pylist(), prepared.rows.time_us.tolist())
            self._duplicates.forget(watermark_us)
        emit = self._plan.view.emit
        output = self._state.process(prepared, emit=emit)
        makers = admitted[output.maker] if moved_us is None else output.maker
        without_as_of = prepared.first <= self._plan.expired_ends(prepared.rows.path.before_us)
        return Taken(
            rows=self._output.of_batch(output.columns, makers, batch),
            watermark_us=watermark_us,
            admitted=len(admitted),
            partially_late=int(judged.is_partially_late.sum()),
            without_as_of=0 if emit == "on_close" else int(without_as_of.sum()),
        )

    def _prepare(self, judged: _Judged, batch: InputBatch, watermark_us: int, moved_us: Ints | None) -> Prepared:
        is_admitted = judged.is_admitted
        admitted = judged.rows[is_admitted]
        if moved_us is None:
            path = WatermarkPath.by_rows(judged.before_us[is_admitted], judged.after_us[is_admitted])
        else:
            path = WatermarkPath.by_records(watermark_us, moved_us, admitted)
        table = take_rows(batch.table, admitted) if len(admitted) else None
        return self._state.prepare(AdmittedRows(table, judged.time_us[is_admitted], path))

    def _judge(
        self,
        batch: InputBatch,
        rows: Ints,
        time_us: Ints,
        watermark_us: int,
        *,
        moved_us: Ints | None,
        overflows: dict[int, str],
    ) -> _Judged:
        """Judge each row against the watermark before it; a row that is rejected moves it for nobody.

        A late row needs no care: its windows end at or before the watermark, so its event time is before it too.
        """
        alone_us = time_us - self._out_of_orderness_us if moved_us is None else moved_us[rows]
        is_overflow = np.isin(rows, list(overflows)) if overflows else np.zeros(len(rows), dtype=np.bool_)
        is_duplicate = np.zeros(len(rows), dtype=np.bool_)
        if self._duplicates is not None:
            is_duplicate = self._duplicates.find(
                self._ids(batch, rows),
                time_us,
                watermark_us=alone_us,
                start_us=watermark_us if moved_us is None else None,
                is_rejected=is_overflow,
                is_late=self._is_late,
            )
        moves_nothing = is_duplicate | is_overflow
        if moved_us is None:
            after_us = np.maximum.accumulate(np.where(moves_nothing, watermark_us, np.maximum(alone_us, watermark_us)))
            before_us = np.concatenate([[watermark_us], after_us[:-1]])[: len(rows)].astype(np.int64)
        else:
            before_us = after_us = alone_us
        _, first, last = self._state.tiles_of(time_us)
        expired = self._plan.expired_ends(before_us)
        is_late = (last <= expired) & ~moves_nothing
        is_partially_late = (first <= expired) & ~is_late & ~moves_nothing
        return _Judged(
            rows, time_us, before_us, after_us, is_duplicate, is_late, is_partially_late, is_overflow, overflows
        )

    def _is_late(self, time_us: int, watermark_us: int) -> bool:
        _, _, last = self._state.tiles_of(np.array([time_us]))
        return int(last[0]) <= self._plan.expired(watermark_us)

    def _ids(self, batch: InputBatch, rows: Ints) -> pa.Array:
        return batch.event_ids.take(pa.array(rows))

    def _explain(self, judged: _Judged, batch: InputBatch, rejections: Rejections) -> None:
        view = self._plan.view
        for position in np.flatnonzero(judged.is_duplicate).tolist():
            row = int(judged.rows[position])
            explain_duplicate(view, row, batch, rejections)
        for position in np.flatnonzero(judged.is_late).tolist():
            time_us, before_us = int(judged.time_us[position]), int(judged.before_us[position])
            explain_late(view, int(judged.rows[position]), time_us, before_us, rejections)

        for row, feature in judged.overflows.items():
            explain_overflow(row, feature, rejections)

    def advance(self, *, before_us: int, after_us: int, last_offset: int | None) -> pa.Table:
        """Move the watermark without a row and give what that fires."""
        step = AdmittedRows(None, _NO_ROWS, WatermarkPath.single(before_us, after_us))
        output = self._state.process(self._state.prepare(step), emit="on_close")
        return self._output.of_step(output.columns, last_offset=last_offset)

    def write(self, selection: Selection) -> Content:
        """Write the selected state."""
        return write_sliding(self._state, selection)

    def mark_told(self) -> None:
        """Begin to note changes anew."""
        self._state.mark_told()

    def read(self, contents: Iterable[Content], *, watermark_us: int) -> None:
        """Make parts, the newest first, the state of a view that has none."""
        read_sliding(self._state, contents, watermark_us=watermark_us)
