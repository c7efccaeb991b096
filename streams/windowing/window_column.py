"""Window features of all keys, in columns: aggregates by cell, and the cells of each window."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Final

import numpy as np
import pyarrow as pa

from streams.windowing.bank import BankRows, CellBank
from streams.windowing.columns import BatchColumns, Pools
from streams.windowing.pane import Panes
from streams.windowing.plan import Plan, PlannedFeature, Scope
from streams.windowing.register import CellReads, CellRows
from streams.windowing.segment import Bools, Ints, expand, find_segments, newest_until, stable_argsort
from streams.windowing.snapshot import Content
from streams.windowing.stored_code import CodeReader, CodeWriter
from streams.windowing.tile import NO_CELL, TilePool

_VALUES_AT_ONCE: Final = 1 << 23
_QUERIES_AT_ONCE: Final = 1 << 15
"""So many that what is gathered for them stays in the cache."""
_LONGEST_CHAIN: Final = 16


@dataclass(frozen=True)
class WindowRows:
    """A batch taken in but not yet part of the state.

    Attributes:
        rows: Its rows by cell.
        aggregates: Running aggregates.
        is_new: Which of its cells the batch brought.
    """

    rows: CellRows
    aggregates: BankRows
    is_new: Bools

    @property
    def heads(self) -> Ints:
        """Position in the batch of each cell's first row."""
        return self.rows.order[self.rows.starts]


class WindowColumns:
    """State of the window features of a sliding view.

    Attributes:
        horizon: All tiles before this one have been dropped; None: none have.
    """

    def __init__(self, plan: Plan, *, pools: Pools) -> None:
        self._plan = plan
        self.features = [f for f in plan.features if f.scope is Scope.WINDOW]
        self.tiles = TilePool()
        self.bank = CellBank(self.features, pools=pools)
        self.horizon: int | None = None
        self._is_changed: Bools = np.empty(0, dtype=np.bool_)
        self._grow()
        self.bank.reset(np.array([NO_CELL]))

    def ends(self, tile: Ints) -> tuple[Ints, Ints]:
        """First and last window end that holds each tile."""
        per_slide = self._plan.tiles_per_slide
        return tile // per_slide + 1, (tile + self._plan.max_tiles) // per_slide

    def scan(self, columns: BatchColumns, *, place: Ints, ids: Ints, tile: Ints, time_us: Ints) -> WindowRows:
        """Take in a batch.

        Args:
            columns: Its columns.
            place: Position of each row's key in ``ids``.
            ids: Distinct keys of the batch.
            tile: Tile of each row.
            time_us: Event time of each row.
        """
        low = int(tile.min())
        order = stable_argsort(tile - low, int(tile.max()) - low + 1)
        order = order[stable_argsort(place[order], len(ids))]
        starts, lengths = find_segments(place[order], tile[order])
        heads = order[starts]
        cells, new = self.tiles.find_or_add(ids[place[heads]], tile[heads])
        self._grow()
        self.bank.reset(cells[new])
        self.tiles.mark_batch(cells)
        is_new = np.zeros(len(cells), dtype=np.bool_)
        is_new[new] = True
        rows = CellRows(order, starts, lengths, cells, time_us[order])
        return WindowRows(rows, self.bank.scan(columns, rows), is_new)

    def _grow(self) -> None:
        if self.tiles.capacity > len(self._is_changed):
            self.bank.grow(self.tiles.capacity)
            more = np.zeros(self.tiles.capacity - len(self._is_changed), dtype=np.bool_)
            self._is_changed = np.concatenate([self._is_changed, more])

    def commit(self, batch: WindowRows) -> None:
        """Make a batch part of the state."""
        self.bank.commit(batch.aggregates)
        self.tiles.clear_batch(batch.rows.cells)
        self._is_changed[batch.rows.cells] = True

    def drop_before(self, tile: int) -> None:
        """Drop all tiles before ``tile``."""
        self.horizon = tile if self.horizon is None else max(self.horizon, tile)
        if len(self.tiles.drop_before(tile)):
            self.bank.drop(self.tiles.is_live)

    def renumber(self, keys: Ints, number_of: Ints) -> None:
        """Number cells anew, without room for others (see :meth:`TilePool.renumber`)."""
        kept = self.tiles.renumber(keys, number_of)
        self.bank.renumber(kept, capacity=self.tiles.capacity)
        is_changed = np.zeros(self.tiles.capacity, dtype=np.bool_)
        is_changed[: len(kept)] = self._is_changed[kept]
        self._is_changed = is_changed

    def read(self, panes: Panes, as_of: Ints, *, at_us: Ints, batch: WindowRows | None) -> dict[str, pa.Array]:
        """Value of each window feature for each pane, as of a row of the batch (-1: before it).

        ``at_us`` is the event time that each is evaluated at.
        """
        if not self.features:
            return {}
        parts = [
            self._read_some(Panes(panes.key[some], panes.end[some]), as_of[some], at_us[some], batch)
            for some in (slice(at, at + _QUERIES_AT_ONCE) for at in range(0, max(len(panes), 1), _QUERIES_AT_ONCE))
        ]
        if len(parts) == 1:
            return parts[0]
        return {f.name: pa.concat_arrays([part[f.name] for part in parts]) for f in self.features}

    def _read_some(self, panes: Panes, as_of: Ints, at_us: Ints, batch: WindowRows | None) -> dict[str, pa.Array]:
        chains = self.tiles.walk(panes.key, most=_LONGEST_CHAIN)
        if chains is None:
            return self._read_sorted(panes, as_of, at_us, batch)
        values: dict[str, pa.Array] = {}
        stop = panes.end * self._plan.tiles_per_slide
        for size, members in self._by_size():
            cells, segments = chains.window(stop - size, stop)
            versions = self._versions(segments.ravel(), np.tile(as_of, len(cells)), batch).reshape(segments.shape)
            span_us = self._plan.span_us(panes.end, size)
            reads = CellReads.side_by_side(cells, versions, at_us=at_us, span_us=span_us)
            values |= self.bank.read(members, reads, batch.aggregates if batch else None)
        return values

    def _read_sorted(self, panes: Panes, as_of: Ints, at_us: Ints, batch: WindowRows | None) -> dict[str, pa.Array]:
        """Read windows whose chains differ much in length: only cells that are there are looked at."""
        asked, place = np.unique(panes.key, return_inverse=True)
        index = self.tiles.index(asked)
        values: dict[str, pa.Array] = {}
        stop = panes.end * self._plan.tiles_per_slide
        for size, members in self._by_size():
            low, high = index.window(place, stop - size, stop)
            parts: list[dict[str, pa.Array]] = []
            for chunk in _chunks(high - low, at_once=max(1, _VALUES_AT_ONCE // (1 + self.bank.n_columns))):
                lengths = (high - low)[chunk]
                owner, within = expand(lengths)
                cells = index.cells[low[chunk][owner] + within]
                versions = self._versions(self.tiles.segment[cells], as_of[chunk][owner], batch)
                span_us = self._plan.span_us(panes.end[chunk], size)
                reads = CellReads(cells, versions, np.cumsum(lengths) - lengths, lengths, at_us[chunk], span_us)
                parts.append(self.bank.read(members, reads, batch.aggregates if batch else None))
            values |= {f.name: pa.concat_arrays([part[f.name] for part in parts]) for f in members}
        return values

    def _by_size(self) -> Iterator[tuple[int, list[PlannedFeature]]]:
        for size in sorted({f.n_tiles for f in self.features}):
            yield size, [f for f in self.features if f.n_tiles == size]

    def _versions(self, segments: Ints, as_of: Ints, batch: WindowRows | None) -> Ints:
        """Row of ``CellRows`` as of which each cell is to be read, -1 for the state before the batch."""
        versions = np.full(len(segments), -1, dtype=np.int64)
        if batch is not None:
            rows, touched = batch.rows, np.flatnonzero(segments >= 0)
            segment = segments[touched]
            versions[touched] = newest_until(segment, as_of[touched], rows.order, rows.starts, rows.lengths)
        return versions

    def sum_bound(self, feature: PlannedFeature) -> int:
        """No window's sum is further from 0 than this."""
        return self.bank.sum_peak(feature) * self._plan.max_tiles

    def cells_of(self, keys: Ints) -> tuple[Ints, Ints]:
        """Cells of these distinct keys, key by key, and how many each has."""
        index = self.tiles.index(keys)
        return index.cells, index.lengths

    def changed_cells(self) -> Ints:
        """Live cells that have changed since the last :meth:`mark_told`, by key and tile."""
        cells = np.flatnonzero(self._is_changed & self.tiles.is_live)
        keys, tiles = self.tiles.key[cells], self.tiles.tile[cells]
        order = stable_argsort(tiles - tiles.min(), int(np.ptp(tiles)) + 1) if len(cells) else cells
        by_key: Ints = cells[order[stable_argsort(keys[order], int(keys.max(initial=0)) + 1)]]
        return by_key

    def mark_told(self) -> None:
        """Begin to note changes anew."""
        self._is_changed[:] = False

    def write(self, cells: Ints, row_of_key: Ints, content: Content, *, codes: CodeWriter) -> None:
        """Write the state of these cells, which are sorted by key and tile; keys are named by ``row_of_key``."""
        owners = {"key": pa.array(row_of_key[self.tiles.key[cells]]), "tile": pa.array(self.tiles.tile[cells])}
        self.bank.write(cells, content, codes=codes, name="tiles", owners=owners)
        content.facts["horizon"] = self.horizon

    def read_part(self, content: Content, ids: Ints, *, codes: CodeReader) -> None:
        """Take over the tiles that are not here yet (parts come newest first); the key named ``i`` is ``ids[i]``."""
        horizon = content.facts["horizon"]
        if horizon is not None and (self.horizon is None or horizon > self.horizon):
            self.horizon = horizon
        keys, tile = ids[content.column("tiles", "key")], content.column("tiles", "tile")
        rows = np.arange(len(tile)) if self.horizon is None else np.flatnonzero(tile >= self.horizon)
        found, new = self.tiles.find_or_add(keys[rows], tile[rows])
        self._grow()
        self.bank.reset(found[new])
        cells = np.full(len(tile), -1, dtype=np.int64)
        cells[rows[new]] = found[new]
        self.bank.read_part(content, cells, codes=codes, name="tiles")


def _chunks(lengths: Ints, *, at_once: int) -> Iterable[slice]:
    """Cut queries so that no part reads more than a bounded number of cells at once."""
    ends = np.cumsum(lengths)
    start = 0
    while start < len(lengths):
        before = int(ends[start - 1]) if start else 0
        stop = max(start + 1, int(np.searchsorted(ends, before + at_once, side="right")))
        yield slice(start, stop)
        start = stop
    if not len(lengths):
        yield slice(0, 0)
