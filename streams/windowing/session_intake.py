"""Rows into session windows, a batch at a time: judged against the watermark, each against the rows before it.

An open session takes in a row however old it is, but event ids are remembered for a bounded time. Where copies are to
be found, a row with an id that is so old that its first copy may be forgotten is late: else a copy would count twice.
"""

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from schemas.row import Pane
from streams.windowing.admission import Rejections
from streams.windowing.batch import InputBatch
from streams.windowing.columns import take_rows
from streams.windowing.duplicate import DuplicateMemory
from streams.windowing.intake import (
    OutputTable,
    Taken,
    explain_duplicate,
    explain_forgotten,
    explain_late,
    explain_overflow,
)
from streams.windowing.plan import Plan
from streams.windowing.segment import Bools, Ints
from streams.windowing.session import SessionRows, SessionState
from streams.windowing.session_layout import NO_LAYOUT, Layout, Sessions, empty_layout, hold, lay_out, with_walk
from streams.windowing.session_overflow import SessionOverflowGuard, SessionSums
from streams.windowing.session_part import read_sessions, write_sessions
from streams.windowing.session_walk import SessionWalk
from streams.windowing.snapshot import Content, Selection
from streams.windowing.watermark_path import WatermarkPath

_MOST_TURNS: Final = 32
"""So many mergers may follow upon each other in a session within a batch: each costs a scan of its own."""
_NO_ROWS: Ints = np.empty(0, dtype=np.int64)


@dataclass(frozen=True)
class _Judged:
    """Rows that passed the screen, judged.

    Attributes:
        before_us: Watermark that each was judged against.
        after_us: Watermark after each.
        is_duplicate: Rejected as duplicates.
        layout: The others, and which of them are late.
    """

    before_us: Ints
    after_us: Ints
    is_duplicate: Bools
    layout: Layout


@dataclass(frozen=True)
class _Candidates:
    """Rows that passed the screen.

    Attributes:
        rows: Positions in the batch.
        key: Number of the key of each.
        time_us: Event times.
        ids: Event ids; None where they are not asked for.
        held: Open sessions of these keys.
    """

    rows: Ints
    key: Ints
    time_us: Ints
    ids: pa.Array | None
    held: Sessions


@dataclass(frozen=True)
class _Moves:
    """Where the records of a batch move the watermark to, from one of them on and until another."""

    all_us: Ints
    start: int
    stop: int

    @property
    def moved_us(self) -> Ints:
        return self.all_us[self.start : self.stop]

    def at(self, records: Ints) -> Ints:
        return self.all_us[records]

    def until(self, record: int) -> "_Moves":
        return _Moves(self.all_us, self.start, record)

    def since(self, record: int) -> "_Moves":
        return _Moves(self.all_us, record, self.stop)


class SessionIntake:
    """State of a session view, and how rows get into it."""

    def __init__(self, plan: Plan, *, prefix: str, duplicates: DuplicateMemory | None) -> None:
        self._plan = plan
        self._state = SessionState(plan)
        self._guard = SessionOverflowGuard(plan, state=self._state)
        self._output = OutputTable(plan, prefix=prefix)
        self._duplicates = duplicates
        self._out_of_orderness_us = plan.view.input.max_out_of_orderness_us
        # From a row's event time to the watermark at which no copy of it can be told any more.
        self._told_us = (plan.view.input.dedup_window_us or 0) + plan.gap_us + plan.allowed_lateness_us

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
        parts: list[Taken] = []
        size = len(candidates)
        moves = None if moved_us is None else _Moves(moved_us, 0, len(moved_us))
        while True:
            within = moves if moves is None or size >= len(candidates) else moves.until(int(candidates[size]))
            n_rows, taken = self._take_in(
                batch, candidates[:size], time_us, watermark_us, moves=within, rejections=rejections
            )
            parts.append(taken)
            if moves is not None and n_rows < len(candidates):
                moves = moves.since(int(candidates[n_rows]))
            watermark_us = taken.watermark_us
            if n_rows == len(candidates):
                return parts[0] if len(parts) == 1 else self._joined(parts)
            # Where mergers follow upon each other without end, a batch is taken in as smaller ones.
            candidates, size = candidates[n_rows:], 2 * n_rows

    def _joined(self, parts: list[Taken]) -> Taken:
        """What became of a batch that was taken in as several; each has kept the last as-of rows of its own."""
        rows = pa.concat_tables([part.rows for part in parts]).combine_chunks()
        if self._plan.view.emit == "latest" and rows.num_rows:
            is_early = pc.equal(rows.column("pane"), Pane.EARLY.value).to_numpy()
            keys = rows.column(self._plan.key).combine_chunks().dictionary_encode()
            codes, early = keys.indices.to_numpy(), np.flatnonzero(is_early)
            newest = np.full(len(keys.dictionary), -1, dtype=np.int64)
            newest[codes[early]] = early
            rows = rows.filter(pa.array(~is_early | (newest[codes] == np.arange(len(codes)))))
        return Taken(rows=rows, watermark_us=parts[-1].watermark_us, admitted=sum(part.admitted for part in parts))

    def _take_in(
        self,
        batch: InputBatch,
        candidates: Ints,
        time_us: Ints,
        watermark_us: int,
        *,
        moves: _Moves | None,
        rejections: Rejections,
    ) -> tuple[int, Taken]:
        """Take in these rows, or the first of them, and say how many."""
        given = self._candidates(batch, candidates, time_us[candidates], watermark_us)
        overflows: dict[int, str] = {}
        while True:
            is_overflow = np.zeros(len(candidates), dtype=np.bool_)
            is_overflow[list(overflows)] = True
            judged = self._judge(given, watermark_us, moves, is_overflow)
            if (n_rows := judged.layout.n_rows_within(_MOST_TURNS)) < len(candidates):
                within = None if moves is None else moves.until(int(candidates[n_rows]))
                return self._take_in(
                    batch, candidates[:n_rows], time_us, watermark_us, moves=within, rejections=rejections
                )
            is_admitted = ~(judged.layout.is_late | judged.is_duplicate | is_overflow)
            admitted = candidates[is_admitted]
            table = take_rows(batch.table, admitted)
            # A row that overflows moves no watermark either, so those after it are judged anew.
            overflow = self._first_overflow(table, given, judged, is_admitted)
            if overflow is None:
                break
            overflows[int(np.flatnonzero(is_admitted)[overflow[0]])] = overflow[1]
        self._explain(batch, given, judged, overflows, rejections)
        if not len(admitted) and moves is None:
            nothing = self._plan.view.engine_schema.empty_table()
            return len(candidates), Taken(rows=nothing, watermark_us=watermark_us)
        times_us = given.time_us[is_admitted]
        if moves is None:
            path = WatermarkPath.by_rows(judged.before_us[is_admitted], judged.after_us[is_admitted])
        else:
            path = WatermarkPath.by_records(watermark_us, moves.moved_us, admitted - moves.start)
        watermark_us = path.end_us
        if self._duplicates is not None and given.ids is not None:
            self._duplicates.add(given.ids.filter(pa.array(is_admitted)).to_pylist(), times_us.tolist())
            self._duplicates.forget(watermark_us)
        rows = SessionRows(table if len(admitted) else None, given.key[is_admitted], times_us, path)
        output = self._state.process(rows, judged.layout.without(~is_admitted), emit=self._plan.view.emit)
        makers = admitted[output.maker] if moves is None else moves.start + output.maker
        made = self._output.of_batch(output.columns, makers, batch)
        return len(candidates), Taken(rows=made, watermark_us=watermark_us, admitted=len(admitted))

    def _candidates(self, batch: InputBatch, rows: Ints, time_us: Ints, watermark_us: int) -> _Candidates:
        encoded = batch.table.column(self._plan.key).combine_chunks().take(pa.array(rows)).dictionary_encode()
        ids = self._state.keys.intern(encoded.dictionary)
        key = ids[encoded.indices.to_numpy()] if len(rows) else _NO_ROWS
        event_ids = None
        if self._duplicates is not None:
            event_ids = batch.event_ids.take(pa.array(rows))
        return _Candidates(rows, key, time_us, event_ids, self._state.held(ids, watermark_us=watermark_us))

    def _judge(self, given: _Candidates, watermark_us: int, moves: _Moves | None, is_overflow: Bools) -> _Judged:
        """Judge each row against the watermark before it; a row that is rejected moves it for nobody.

        A late row needs no care: its session would end at or before the watermark, so its event time is before it too.
        """
        if self._duplicates is not None and given.ids is not None and self._duplicates.may_repeat(given.ids):
            return self._judge_copies(given, given.ids, watermark_us, moves, is_overflow, memory=self._duplicates)
        if moves is None:
            alone_us = np.where(is_overflow, watermark_us, given.time_us - self._out_of_orderness_us)
            after_us = np.maximum.accumulate(np.maximum(alone_us, watermark_us))
            edges_us = np.concatenate([[watermark_us], after_us]).astype(np.int64)
        else:
            after_us = moves.at(given.rows)
            edges_us = np.append(after_us, moves.moved_us[-1])
        is_forgotten = self._is_forgotten(given, edges_us[:-1])
        kept = np.flatnonzero(~is_overflow & ~is_forgotten)
        layout = lay_out(
            given.key[kept],
            given.time_us[kept],
            np.append(edges_us[:-1][kept], edges_us[-1]),
            given.held,
            start_us=watermark_us,
            gap_us=self._plan.gap_us,
            allowed_lateness_us=self._plan.allowed_lateness_us,
            first_node=self._state.capacity,
        )
        is_duplicate = np.zeros(len(given.rows), dtype=np.bool_)
        layout = layout.among(kept, given.key)
        layout.is_late[is_forgotten & ~is_overflow] = True
        return _Judged(edges_us[:-1], after_us, is_duplicate, layout)

    def _is_forgotten(self, given: _Candidates, before_us: Ints) -> Bools:
        """Rows with an id of which a first copy may be forgotten under the watermark before them."""
        if given.ids is None:
            return np.zeros(len(given.rows), dtype=np.bool_)
        has_id = pc.is_valid(given.ids).to_numpy(zero_copy_only=False)
        is_forgotten: Bools = has_id & (given.time_us + self._told_us <= before_us)
        return is_forgotten

    def _judge_copies(
        self,
        given: _Candidates,
        ids: pa.Array,
        watermark_us: int,
        moves: _Moves | None,
        is_overflow: Bools,
        *,
        memory: DuplicateMemory,
    ) -> _Judged:
        """Judge rows one by one, where whether one is a copy hangs on whether another one was admitted."""
        n_rows = len(given.rows)
        layout = empty_layout(given.key, near=given.held.node)
        is_duplicate = np.zeros(n_rows, dtype=np.bool_)
        before_us, after_us = np.empty(n_rows, dtype=np.int64), np.empty(n_rows, dtype=np.int64)
        walk = SessionWalk(
            gap_us=self._plan.gap_us,
            allowed_lateness_us=self._plan.allowed_lateness_us,
            first_node=self._state.capacity,
        )
        hold(walk, given.held, groups=given.held.key, watermark_us=watermark_us)
        seen: defaultdict[object, list[int]] = defaultdict(list)
        columns = zip(given.key.tolist(), given.time_us.tolist(), ids.to_pylist(), is_overflow.tolist(), strict=True)
        moved_us = None if moves is None else moves.at(given.rows).tolist()
        for row, (key, time_us, event_id, overflows) in enumerate(columns):
            watermark_us = watermark_us if moved_us is None else moved_us[row]
            before_us[row] = watermark_us
            if not overflows:
                is_duplicate[row] = event_id is not None and memory.is_duplicate(
                    event_id, time_us, watermark_us=watermark_us, before=seen[event_id]
                )
                is_forgotten = event_id is not None and time_us + self._told_us <= watermark_us
                if is_duplicate[row]:
                    pass
                elif not is_forgotten and walk.add(row, group=key, key=key, time_us=time_us, before_us=watermark_us):
                    seen[event_id].append(time_us)
                    if moves is None:
                        watermark_us = max(watermark_us, time_us - self._out_of_orderness_us)
                else:
                    layout.is_late[row] = True
            after_us[row] = watermark_us
        watermark_us = watermark_us if moves is None else int(moves.moved_us[-1])
        return _Judged(before_us, after_us, is_duplicate, with_walk(layout, walk, watermark_us=watermark_us))

    def _first_overflow(
        self, table: pa.Table, given: _Candidates, judged: _Judged, is_admitted: Bools
    ) -> tuple[int, str] | None:
        layout = judged.layout
        sums = SessionSums(
            table,
            given.key[is_admitted],
            given.time_us[is_admitted],
            judged.before_us[is_admitted],
            layout.row.node[is_admitted],
            layout.parents,
        )
        return self._guard.first_overflow(sums)

    def _explain(
        self,
        batch: InputBatch,
        given: _Candidates,
        judged: _Judged,
        overflows: dict[int, str],
        rejections: Rejections,
    ) -> None:
        view = self._plan.view
        for position in np.flatnonzero(judged.is_duplicate).tolist():
            row = int(given.rows[position])
            explain_duplicate(view, row, batch, rejections)
        if judged.layout.is_late.any():
            self._explain_late(given, judged, rejections)
        for position, feature in overflows.items():
            explain_overflow(int(given.rows[position]), feature, rejections)

    def _explain_late(self, given: _Candidates, judged: _Judged, rejections: Rejections) -> None:
        is_forgotten = self._is_forgotten(given, judged.before_us)
        for position in np.flatnonzero(judged.layout.is_late).tolist():
            row, time_us, before_us = (int(n[position]) for n in (given.rows, given.time_us, judged.before_us))
            if is_forgotten[position]:
                explain_forgotten(row, time_us, before_us, rejections, told_us=self._told_us)
            else:
                explain_late(self._plan.view, row, time_us, before_us, rejections)

    def advance(self, *, before_us: int, after_us: int, last_offset: int | None) -> pa.Table:
        """Move the watermark without a row and give what that fires."""
        step = SessionRows(None, _NO_ROWS, _NO_ROWS, WatermarkPath.single(before_us, after_us))
        output = self._state.process(step, NO_LAYOUT, emit="on_close")
        return self._output.of_step(output.columns, last_offset=last_offset)

    def write(self, selection: Selection) -> Content:
        """Write the selected state."""
        return write_sessions(self._state, selection)

    def mark_told(self) -> None:
        """Begin to note changes anew."""
        self._state.mark_told()

    def read(self, contents: Iterable[Content], *, watermark_us: int) -> None:
        """Make parts, the newest first, the state of a view that has none."""
        read_sessions(self._state, contents, watermark_us=watermark_us)
