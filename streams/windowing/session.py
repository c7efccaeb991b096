"""Sessions of all keys of a partition, a batch of columns at a time.

A session's aggregates are a cell, like a tile's. What happens to sessions is found first, from times alone
(:mod:`streams.windowing.session_layout`); then all rows are scanned by cell, and every row of output is read from that.

- A session fires ``ON_TIME`` when the watermark first reaches its end.
- A row that changes a session which has fired, or that makes one whose end is already reached, fires ``LATE`` at once;
  there is no slide here to collect changes by. Each fired session that the row merges away or extends first fires
  ``EMPTY`` under its old bounds, so that a reader can take it back. If the new end is yet to be reached, ``ON_TIME``
  follows when it is.
- ``pane_index`` goes on from the highest of the sessions merged, so the newest row of a session always has the highest.
- A row that merges sessions opens a cell that begins as their merger, in time order; then it takes the new row. Cells
  are scanned in as many turns as such rows follow upon each other in a session.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Final

import numpy as np
import pyarrow as pa

from streams.windowing.bank import BankRows, CellBank, CellMerge
from streams.windowing.columns import BatchColumns, Pools
from streams.windowing.key_table import KeyTable
from streams.windowing.newest import KeyRows
from streams.windowing.plan import Plan, Scope
from streams.windowing.query import OutputRows
from streams.windowing.register import CellReads, CellRows
from streams.windowing.segment import Bools, Ints, find_segments, search, stable_argsort
from streams.windowing.session_layout import EARLY, KINDS, NO_SESSIONS, Firings, Layout, Sessions
from streams.windowing.watermark_path import WatermarkPath
from streams.windowing.windowless_column import WindowlessColumns, WindowlessRows

_NOTHING: Final[Ints] = np.empty(0, dtype=np.int64)
_PANES: Final = np.array(KINDS, dtype=object)
_FIRST_CAPACITY: Final = 1_024


@dataclass(frozen=True)
class SessionRows:
    """The admitted rows of a batch, in offset order; or none, and a single step of the watermark.

    Attributes:
        table: Columns of the contract, None for a step.
        key: Number of the key of each row.
        time_us: Event times.
        path: The watermark over them.
    """

    table: pa.Table | None
    key: Ints
    time_us: Ints
    path: WatermarkPath


@dataclass(frozen=True)
class _Scanned:
    """Rows of a batch by cell, and what they make of the aggregates.

    Attributes:
        version: Place of each row in the order by cell.
        aggregates: Running aggregates; None without rows.
        windowless: The rows by key; None without rows or such features.
        ancestors: For each cell that is merged from others, these and what they are merged from, with the last place of
            each.
    """

    version: Ints
    aggregates: BankRows | None
    windowless: WindowlessRows | None
    ancestors: dict[int, list[tuple[int, int]]]


class SessionState:
    """State of a session view over one partition."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.pools = Pools(plan)
        self.keys = KeyTable(plan.view.columns.field(plan.key).type)
        self.windowless = WindowlessColumns(plan, pools=self.pools)
        self.features = [f for f in plan.features if f.scope is Scope.WINDOW]
        self.bank = CellBank(self.features, pools=self.pools)
        self.cells = NO_SESSIONS
        self.is_live: Bools = np.empty(0, dtype=np.bool_)
        self._free = _NOTHING
        self._n_since_sweep = 0
        self._is_changed: Bools = np.empty(0, dtype=np.bool_)

    @property
    def capacity(self) -> int:
        """Number of cells there is room for; numbers from there on are new cells of a batch."""
        return len(self.is_live)

    def held(self, keys: Ints, *, watermark_us: int) -> Sessions:
        """Live sessions of these keys that have not expired."""
        is_asked = np.zeros(self.keys.capacity, dtype=np.bool_)
        is_asked[keys] = True
        live = np.flatnonzero(self.is_live)
        live = live[is_asked[self.cells.key[live]]]
        return self.cells.take(live[self.cells.end_us[live] + self.plan.allowed_lateness_us > watermark_us])

    def process(self, rows: SessionRows, layout: Layout, *, emit: str) -> OutputRows:
        """Take in a batch, laid out with :attr:`capacity` as the first new cell, and give the rows of output."""
        layout = layout.renumbered(self.capacity, self._allocate(layout.n_new(self.capacity)))
        scanned = self._scan(rows, layout)
        others = self._reached(layout, rows)
        firings = layout.firings.joined(Firings.on_time(others, np.full(len(others), -1)))
        output = self._output(rows, layout, firings, scanned, emit=emit)
        self.cells.n_fired[others.node] += 1
        self._note_changes(rows.key, others.key)
        self._commit(rows, layout, scanned)
        return output

    def _allocate(self, n_cells: int) -> Ints:
        if n_cells > len(self._free):
            before = self.capacity
            size = max(_FIRST_CAPACITY, 2 * before, before + n_cells)
            more = np.zeros(size - before, dtype=np.int64)
            self._free = np.concatenate([self._free, np.arange(before, size)])
            self.cells = self.cells.joined(Sessions(np.arange(before, size), more, more, more, more))
            self.is_live = np.concatenate([self.is_live, more.astype(np.bool_)])
            self.bank.grow(size)
        cells, self._free = self._free[:n_cells], self._free[n_cells:]
        self.bank.reset(cells)
        return cells

    def _scan(self, rows: SessionRows, layout: Layout) -> _Scanned:
        if rows.table is None:
            return _Scanned(_NOTHING, None, None, {})
        columns = BatchColumns(rows.table, plan=self.plan, pools=self.pools)
        self.windowless.grow(self.keys.capacity)
        windowless = None
        if not self.windowless.is_empty:
            order = stable_argsort(rows.key, self.keys.capacity)
            starts, lengths = find_segments(rows.key[order])
            key_rows = KeyRows(order, starts, lengths, rows.key[order[starts]], rows.time_us[order])
            windowless = self.windowless.scan(columns, key_rows, watermark_us=rows.path.before_us[order])
        turn = layout.turns
        distinct, place = np.unique(layout.row.node, return_inverse=True)
        turns = np.array([turn.get(cell, 0) for cell in distinct.tolist()], dtype=np.int64) if turn else 0 * distinct
        by_turn = np.argsort(turns, kind="stable")
        rank = np.empty(len(distinct), dtype=np.int64)
        rank[by_turn] = np.arange(len(distinct))
        order = stable_argsort(rank[place], len(distinct))
        starts, lengths = find_segments(rank[place][order])
        cell_rows = CellRows(order, starts, lengths, distinct[by_turn], rows.time_us[order])
        version = np.empty(len(order), dtype=np.int64)
        version[order] = np.arange(len(order))
        last = dict(zip(cell_rows.cells.tolist(), cell_rows.ends.tolist(), strict=True)) if turn else {}
        merges = list(_merges(cell_rows.cells, turns[by_turn], layout.parents, last))
        ancestors: dict[int, list[tuple[int, int]]] = {}
        for cell, parents in layout.parents.items():
            before = [older for parent in parents for older in ancestors.get(parent, ())]
            ancestors[cell] = [*before, *((parent, last.get(parent, -1)) for parent in parents)]
        return _Scanned(version, self.bank.scan(columns, cell_rows, merges), windowless, ancestors)

    def _note_changes(self, *keys: Ints) -> None:
        more = self.keys.capacity - len(self._is_changed)
        self._is_changed = np.concatenate([self._is_changed, np.zeros(more, dtype=np.bool_)])
        for some in keys:
            self._is_changed[some] = True

    def _reached(self, layout: Layout, rows: SessionRows) -> Sessions:
        """Sessions that no row of the batch is near and whose ends the watermark reaches in it."""
        end_us = self.cells.end_us
        is_due = self.is_live & (end_us > rows.path.start_us) & (end_us <= rows.path.end_us)
        is_due[layout.near] = False
        return self.cells.take(np.flatnonzero(is_due))

    # Rows of output

    def _output(
        self, rows: SessionRows, layout: Layout, firings: Firings, scanned: _Scanned, *, emit: str
    ) -> OutputRows:
        plan = self.plan
        early = np.arange(len(rows.key)) if emit != "on_close" and rows.table is not None else _NOTHING
        if emit == "latest":
            newest = np.full(self.keys.capacity, -1, dtype=np.int64)
            newest[rows.key] = early
            early = early[newest[rows.key] == early]
        n_early = np.full(len(early), 2), np.full(len(early), EARLY)
        queries = firings.joined(Firings(layout.row.take(early), early, *n_early, early))
        path, is_on_time = rows.path, queries.phase == 1
        steps = np.append(path.step, -1)[queries.maker]
        maker = np.where(queries.maker < 0, search(path.after_us, queries.sessions.end_us), steps)
        newest_row = np.where(queries.maker < 0, path.n_shown[maker] - 1, queries.maker)
        rank = np.where(is_on_time, self.keys.ranks(queries.sessions.key), 0) if len(firings.maker) else 0 * maker
        end_us = np.where(is_on_time, queries.sessions.end_us, 0)
        phase = np.where(is_on_time, -1, queries.phase) if path.moves_first else queries.phase
        order = np.lexsort((rank, end_us, phase, maker))
        queries, maker, newest_row = queries.take(order), maker[order], newest_row[order]
        shown, is_early = queries.sessions, queries.kind == EARLY
        watermark_us = path.after_us[maker]
        at_us = shown.end_us.copy()
        at_us[is_early] = rows.time_us[newest_row[is_early]]
        columns = {plan.key: self._keys_of(shown.key, newest_row, is_early, rows)}
        reads = self._reads(queries, at_us, scanned)
        columns |= self.bank.read(self.features, reads, scanned.aggregates)
        versions = self.windowless.versions(shown.key, newest_row, scanned.windowless)
        columns |= self.windowless.read(shown.key, versions, at_us=at_us, batch=scanned.windowless)
        own = pa.array(newest_row, pa.int64(), mask=~is_early)
        for feature in plan.features:
            if feature.scope is Scope.EVENT:
                values = rows.table.column(feature.column).combine_chunks() if rows.table is not None else None
                columns[feature.name] = (
                    pa.nulls(len(maker), feature.result_type) if values is None else values.take(own)
                )
        columns |= {
            "event_time": pa.array(at_us),
            "window_end": pa.array(shown.end_us),
            "window_start": pa.array(shown.start_us),
            "pane": pa.DictionaryArray.from_arrays(queries.kind, pa.array(_PANES)).dictionary_decode(),
            "pane_index": pa.array(shown.n_fired),
            "is_final": pa.array(shown.end_us + plan.allowed_lateness_us <= watermark_us),
            "watermark": pa.array(watermark_us),
        }
        return OutputRows(maker, columns)

    def _keys_of(self, key: Ints, row: Ints, is_early: Bools, rows: SessionRows) -> pa.Array:
        """Entity keys: of as-of rows straight from the batch, of closing panes from the key table."""
        if rows.table is None or not is_early.any():
            return self.keys.to_arrow(key)
        given = rows.table.column(self.plan.key).combine_chunks()
        source, closing = row.copy(), np.flatnonzero(~is_early)
        source[closing] = len(given) + np.arange(len(closing))
        known = self.keys.to_arrow(key[closing])
        return (pa.concat_arrays([given, known]) if len(closing) else given).take(pa.array(source))

    def _reads(self, queries: Firings, at_us: Ints, scanned: _Scanned) -> CellReads:
        shown = queries.sessions
        has_cell = shown.node >= 0
        lengths = has_cell.astype(np.int64)
        versions = np.full(len(lengths), -1, dtype=np.int64)
        of_row = np.flatnonzero(queries.as_of >= 0)
        versions[of_row] = scanned.version[queries.as_of[of_row]]
        span_us = shown.end_us - shown.start_us
        cells, versions = shown.node[has_cell], versions[has_cell]
        starts = np.cumsum(lengths) - lengths
        leaves = None
        if scanned.ancestors and self.bank.counts_values:
            older = [scanned.ancestors.get(cell, []) for cell in cells.tolist()]
            n_leaves = lengths.copy()
            n_leaves[has_cell] += np.array([len(ancestors) for ancestors in older], dtype=np.int64)
            own = zip(cells.tolist(), versions.tolist(), strict=True)
            flat = [leaf for ancestors, one in zip(older, own, strict=True) for leaf in (*ancestors, one)]
            leaf_cells, leaf_versions = np.array(flat, dtype=np.int64).reshape(-1, 2).T.copy()
            leaves = CellReads(leaf_cells, leaf_versions, np.cumsum(n_leaves) - n_leaves, n_leaves, at_us, span_us)
        return CellReads(cells, versions, starts, lengths, at_us, span_us, leaves)

    # Going on

    def _commit(self, rows: SessionRows, layout: Layout, scanned: _Scanned) -> None:
        if scanned.windowless is not None:
            self.windowless.commit(scanned.windowless)
        if scanned.aggregates is not None:
            self.bank.commit(scanned.aggregates)
        left = layout.left
        if scanned.ancestors and self.bank.counts_values:
            merged = [(older, cell) for cell in left.node.tolist() for older, _ in scanned.ancestors.get(cell, ())]
            moved, into = np.array(merged, dtype=np.int64).reshape(-1, 2).T
            self.bank.move(moved, into)
        touched = np.concatenate([layout.near, layout.row.node])
        was_live = self.is_live.copy()
        was_live[touched] = True
        self.is_live[touched] = False
        self.is_live[left.node] = True
        self.cells.assign(left)
        after_us = rows.path.end_us
        self._drop(was_live, after_us)
        self._n_since_sweep += len(rows.key)
        if self._n_since_sweep >= max(_FIRST_CAPACITY, len(self.keys)):
            self._sweep(after_us)
        for column, pool in self.pools.pools.items():
            if pool.wants_compaction:
                mapping = pool.compact([*self.bank.used_codes(column), *self.windowless.used_codes(column)])
                self.bank.recode(column, mapping)
                self.windowless.recode(column, mapping)

    def _drop(self, was_live: Bools, watermark_us: int) -> None:
        """Free the cells of sessions that have expired, and of those that are no longer live."""
        self.is_live &= self.cells.end_us + self.plan.allowed_lateness_us > watermark_us
        dead = np.flatnonzero(was_live & ~self.is_live)
        if len(dead):
            self.bank.drop(self.is_live)
            self._free = np.concatenate([self._free, dead])

    def _sweep(self, watermark_us: int) -> None:
        """Forget keys that have nothing left; looked at again after as many rows as there are keys."""
        is_idle = np.zeros(self.keys.capacity, dtype=np.bool_)
        known = self.keys.live_ids()
        is_idle[known] = True
        is_idle[self.cells.key[self.is_live]] = False
        if not self.windowless.is_empty:
            self.windowless.grow(self.keys.capacity)
            is_idle[known] &= ~self.windowless.is_alive(self.windowless.newest_us[known], watermark_us)
        idle = np.flatnonzero(is_idle)
        self._is_changed[idle[idle < len(self._is_changed)]] = False
        self.windowless.release(idle)
        self.keys.release(idle)
        self._n_since_sweep = 0

    # What the parts of the state are made of (:mod:`streams.windowing.session_part`)

    def changed_keys(self) -> Ints:
        """Keys of which anything has changed since the last :meth:`mark_told`."""
        return np.flatnonzero(self._is_changed)

    def mark_told(self) -> None:
        """Begin to note changes anew."""
        self._is_changed[:] = False
        self.windowless.mark_told()

    def add(self, sessions: Sessions) -> Ints:
        """Take over sessions, whose nodes say nothing yet, and give their cells."""
        cells = self._allocate(len(sessions))
        self.cells.assign(replace(sessions, node=cells))
        self.is_live[cells] = True
        return cells

    def drop_expired(self, watermark_us: int) -> None:
        """Drop what has expired under a watermark, and release keys that have nothing left."""
        self._drop(self.is_live.copy(), watermark_us)
        self._sweep(watermark_us)


def _merges(cells: Ints, turns: Ints, parents: dict[int, list[int]], last: dict[int, int]) -> Iterator[CellMerge]:
    """What the cells of each turn but the first are merged from."""
    starts, lengths = find_segments(turns)
    for first, stop in zip(starts.tolist(), (starts + lengths).tolist(), strict=True):
        if turns[first] == 0:
            continue
        older = [parents[cell] for cell in cells[first:stop].tolist()]
        n_parents = np.array([len(group) for group in older], dtype=np.int64)
        flat = np.array([parent for group in older for parent in group], dtype=np.int64)
        versions = np.array([last.get(parent, -1) for parent in flat.tolist()], dtype=np.int64)
        at_us = np.zeros(len(older), dtype=np.int64)
        reads = CellReads(flat, versions, np.cumsum(n_parents) - n_parents, n_parents, at_us, 0)
        yield CellMerge(first, stop, reads)
