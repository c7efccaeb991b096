"""Where the tiles of each key are: cells of a pool, chained by key from the newest tile to the oldest.

Only tiles that have a row have a cell, so memory and the cost of a window follow the tiles that exist and not the
number of slides in a window. In order, a key's new tile is put in front of its chain, which looks at one cell. Where
all chains are short and about as long, they are walked side by side, and a window is a mask; else cells are sorted by
key.
"""

from dataclasses import dataclass
from typing import Final

import numpy as np

from streams.windowing.record import grown_rows, next_capacity, put_rows, zero_rows
from streams.windowing.segment import Bools, Ints, expand, search

NO_CELL: Final = 0
"""A cell that is never in use: what holds the neutral value of each aggregate, and ends each chain."""
_NO_RECORD: Final = (-(2**63), NO_CELL, -1, 0)
"""Its tile, which is before all others, the next in the chain, itself, no place in a batch, and no key."""
_FIRST_CAPACITY: Final = 1_024
_STEPS: Final = 3
_LEAST_FILLED: Final = 4
"""Chains are walked side by side while one in so many of the places that this takes is a cell."""


@dataclass(frozen=True)
class Chains:
    """Cells of the key of each query, side by side.

    Attributes:
        cells: ``(depth, n_queries)`` the newest cell of each first, ``NO_CELL`` for none.
        tiles: Their tiles.
        segments: Where each stands among the cells of the batch, -1 for those that it has no row of.
    """

    cells: list[Ints]
    tiles: list[Ints]
    segments: list[Ints]

    def window(self, first_tile: Ints, stop_tile: Ints) -> tuple[Ints, Ints]:
        """Cells with ``first_tile <= tile < stop_tile``, ``(n_steps, n_queries)`` and the oldest first; their segments.

        A query has ``NO_CELL`` wherever it has no cell that others have.
        """
        cells: list[Ints] = []
        segments: list[Ints] = []
        for cell, tile, segment in reversed(list(zip(self.cells, self.tiles, self.segments, strict=True))):
            is_inside = (tile >= first_tile) & (tile < stop_tile)
            if is_inside.all():
                cells.append(cell)
                segments.append(segment)
            elif is_inside.any():
                cells.append(np.where(is_inside, cell, NO_CELL))
                segments.append(np.where(is_inside, segment, -1))
        shape = len(cells), len(first_tile)
        nothing = np.empty(shape, dtype=np.int64)
        return (np.stack(cells), np.stack(segments)) if cells else (nothing, nothing)


@dataclass(frozen=True)
class CellIndex:
    """Cells of some keys, sorted by (key, tile).

    Attributes:
        cells: ``(n_cells,)``.
        lengths: Number of cells of each key.
        tiles: ``(n_cells,)``.
        codes: ``(n_cells,)`` position of the key and tile in one rising number.
    """

    cells: Ints
    lengths: Ints
    tiles: Ints
    codes: Ints
    _distinct: Ints
    _span: int
    _low: int

    def window(self, keys: Ints, first_tile: Ints, stop_tile: Ints) -> tuple[Ints, Ints]:
        """Range ``[low, high)`` of each key's cells with ``first_tile <= tile < stop_tile``; keys by position."""
        stop = np.cumsum(self.lengths)[keys]
        start = stop - self.lengths[keys]
        # Most windows reach the key's newest tile, and begin at one of its oldest: look there before searching.
        high = stop.copy()
        inner = np.flatnonzero(self._is_at_or_after(stop - 1, stop_tile) & (stop > start))
        high[inner] = self._search(keys[inner], stop_tile[inner])
        low = start.copy()
        left = self._not_yet(np.arange(len(keys)), low, high, first_tile)
        for _ in range(_STEPS):
            low[left] += 1
            left = self._not_yet(left, low, high, first_tile)
        low[left] = self._search(keys[left], first_tile[left])
        return np.minimum(low, high), high

    def _not_yet(self, queries: Ints, low: Ints, high: Ints, first_tile: Ints) -> Ints:
        """Queries whose cell at ``low`` is before their window."""
        queries = queries[low[queries] < high[queries]]
        return queries[~self._is_at_or_after(low[queries], first_tile[queries])]

    def _is_at_or_after(self, at: Ints, tiles: Ints) -> Bools:
        is_after: Bools = self.tiles[at] >= tiles if len(self.tiles) else np.zeros(len(at), dtype=np.bool_)
        return is_after

    def _search(self, keys: Ints, tiles: Ints) -> Ints:
        is_sparse = len(self._distinct) > 0
        place = search(self._distinct, tiles) if is_sparse else np.clip(tiles - self._low, 0, self._span)
        return search(self.codes, keys * (self._span + 1) + place)


class TilePool:
    """Cells of all live tiles of all keys.

    Attributes:
        is_live: ``(capacity,)``.
        tile, key, segment: Of each cell its tile, its key, and where it stands among those of the batch.
    """

    def __init__(self) -> None:
        self._records = zero_rows(_FIRST_CAPACITY, 4)
        self._records[NO_CELL] = _NO_RECORD
        self.tile, self._older, self.segment, self.key = self._records.T
        self.is_live = np.zeros(_FIRST_CAPACITY, dtype=np.bool_)
        self._head = np.empty(0, dtype=np.int64)
        self._free = np.empty(0, dtype=np.int64)
        self._n_begun = 1

    @property
    def capacity(self) -> int:
        """Number of cells there is room for."""
        return len(self._records)

    def has_tiles(self, keys: Ints) -> Bools:
        """Tell which keys have a tile."""
        has_tiles: Bools = self._head[keys] != NO_CELL
        return has_tiles

    def grow_keys(self, n_keys: int) -> None:
        """Make room for keys below ``n_keys``."""
        if n_keys > len(self._head):
            size = next_capacity(len(self._head), n_keys, fewest=_FIRST_CAPACITY)
            self._head = grown_rows(self._head.reshape(-1, 1), size).ravel()

    def live_cells(self) -> Ints:
        """All live cells."""
        return np.flatnonzero(self.is_live)

    def mark_batch(self, cells: Ints) -> None:
        """Note where each of these stands among the cells of the batch."""
        self.segment[cells] = np.arange(len(cells))

    def clear_batch(self, cells: Ints) -> None:
        """Forget what was marked."""
        self.segment[cells] = -1

    def find_or_add(self, keys: Ints, tiles: Ints) -> tuple[Ints, Ints]:
        """Cell of each (key, tile); these must be distinct, each key's side by side with its tiles rising.

        Returns:
            The cells, and the positions of those that are new.
        """
        at: Ints = self._head.take(keys)
        tile, older, *_ = self._records.take(at, axis=0).T
        newer = np.full(len(keys), NO_CELL, dtype=np.int64)
        is_found = tile == tiles
        open_groups = np.flatnonzero(tile > tiles)
        older = older[open_groups]
        while len(open_groups):
            newer[open_groups], at[open_groups] = at[open_groups], older
            tile, older, *_ = self._records.take(older, axis=0).T
            is_found[open_groups] = tile == tiles[open_groups]
            is_past = tile > tiles[open_groups]
            open_groups, older = open_groups[is_past], older[is_past]
        new = np.flatnonzero(~is_found)
        if len(new):
            at[new] = self._link(keys[new], tiles[new], older=at[new], newer=newer[new])
        return at, new

    def _link(self, keys: Ints, tiles: Ints, *, older: Ints, newer: Ints) -> Ints:
        cells = self._allocate(len(keys))
        # New tiles of a key that fall into the same gap of its chain are linked to each other, oldest first.
        joins = np.zeros(len(keys), dtype=np.bool_)
        joins[1:] = (keys[1:] == keys[:-1]) & (newer[1:] == newer[:-1]) & (older[1:] == older[:-1])
        behind = older.copy()
        behind[1:][joins[1:]] = cells[:-1][joins[1:]]
        put_rows(self._records, cells, np.stack([tiles, behind, np.full(len(keys), -1), keys], axis=1))
        self.is_live[cells] = True
        is_last = np.ones(len(keys), dtype=np.bool_)
        is_last[:-1] = ~joins[1:]
        is_front = is_last & (newer == NO_CELL)
        self._head[keys[is_front]] = cells[is_front]
        is_inner = is_last & (newer != NO_CELL)
        self._older[newer[is_inner]] = cells[is_inner]
        return cells

    def _allocate(self, n_cells: int) -> Ints:
        reused, self._free = self._free[:n_cells], self._free[n_cells:]
        begun, self._n_begun = self._n_begun, self._n_begun + n_cells - len(reused)
        if self._n_begun > self.capacity:
            size = next_capacity(self.capacity, self._n_begun, fewest=_FIRST_CAPACITY)
            self._records = grown_rows(self._records, size)
            self.tile, self._older, self.segment, self.key = self._records.T
            self.is_live = np.concatenate([self.is_live, np.zeros(size - len(self.is_live), dtype=np.bool_)])
        return np.concatenate([reused, np.arange(begun, self._n_begun)])

    def drop_before(self, tile: int) -> Ints:
        """Free the cells of all tiles before ``tile`` and return them."""
        live = self.live_cells()
        is_dead = self.tile[live] < tile
        dead: Ints = live[is_dead]
        if len(dead):
            self.is_live[dead] = False
            live = live[~is_dead]
            self._older[live[~self.is_live[self._older[live]]]] = NO_CELL
            keys = self.key[dead]
            self._head[keys[~self.is_live[self._head[keys]]]] = NO_CELL
            self._free = np.concatenate([self._free, dead])
        return dead

    def renumber(self, keys: Ints, number_of: Ints) -> Ints:
        """Number cells anew, without room for others, and give the old number of each new one, ``NO_CELL`` first.

        Args:
            keys: Old numbers of the keys, which have been numbered anew.
            number_of: New number of each old one.
        """
        kept = np.append(NO_CELL, self.live_cells())
        cell_of = np.zeros(self.capacity, dtype=np.int64)
        cell_of[kept] = np.arange(len(kept))
        tile, older, segment, key = self._records.take(kept[1:], axis=0).T
        self._records = zero_rows(max(len(kept), _FIRST_CAPACITY), 4)
        self._records[NO_CELL] = _NO_RECORD
        self._records[1 : len(kept)] = np.stack([tile, cell_of[older], segment, number_of[key]], axis=1)
        self.tile, self._older, self.segment, self.key = self._records.T
        self.is_live = np.zeros(self.capacity, dtype=np.bool_)
        self.is_live[1 : len(kept)] = True
        self._head = cell_of[self._head[keys]]
        self._free, self._n_begun = kept[:0], len(kept)
        return kept

    def walk(self, keys: Ints, *, most: int) -> Chains | None:
        """Cells of each of these keys (repeats allowed); None where one has more than ``most``, or few have many."""
        cells: list[Ints] = []
        tiles: list[Ints] = []
        segments: list[Ints] = []
        at: Ints = self._head.take(keys)
        n_found = 0
        while n_open := np.count_nonzero(at):
            n_found += n_open
            if len(cells) == most or _LEAST_FILLED * n_found < (len(cells) + 1) * len(keys):
                return None
            tile, older, segment, _ = self._records.take(at, axis=0).T
            cells.append(at)
            tiles.append(tile)
            segments.append(segment)
            at = older
        return Chains(cells, tiles, segments)

    def index(self, keys: Ints) -> CellIndex:
        """Index the cells of these distinct keys; queries name a key by its position in ``keys``."""
        owners, cells, at_tiles = [], [], []
        places, at = np.arange(len(keys), dtype=np.int64), self._head[keys]
        while True:
            is_open = at != NO_CELL
            places, at = places[is_open], at[is_open]
            if not len(at):
                break
            owners.append(places)
            cells.append(at)
            tile, older, *_ = self._records.take(at, axis=0).T
            at_tiles.append(tile)
            at = older
        lengths = np.zeros(len(keys), dtype=np.int64)
        for step in owners:
            lengths[step] += 1
        ends = np.cumsum(lengths)
        total = int(ends[-1]) if len(ends) else 0
        flat, tiles = np.empty(total, dtype=np.int64), np.empty(total, dtype=np.int64)
        for step, (owner, cell, tile) in enumerate(zip(owners, cells, at_tiles, strict=True)):
            places = ends[owner] - 1 - step
            flat[places], tiles[places] = cell, tile
        owner, _ = expand(lengths)
        low, high = (int(tiles.min()), int(tiles.max())) if total else (0, 0)
        span = high - low + 1
        if span.bit_length() + len(keys).bit_length() < 62:
            codes = owner * (span + 1) + (tiles - low)
            return CellIndex(flat, lengths, tiles, codes, _distinct=np.empty(0, np.int64), _span=span, _low=low)
        distinct, place = np.unique(tiles, return_inverse=True)
        span = len(distinct)
        codes = owner * (span + 1) + place
        return CellIndex(flat, lengths, tiles, codes, _distinct=distinct, _span=span, _low=0)
