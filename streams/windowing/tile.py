"""Where the tiles of each key are: cells of a pool, chained by key from the newest tile to the oldest.

Only tiles that have a row have a cell, so memory and the cost of a window follow the tiles that exist and not the
number of slides in a window. In order, a key's new tile is put in front of its chain, which looks at one cell.
"""

from dataclasses import dataclass
from typing import Final

import numpy as np

from streams.windowing.segment import Bools, Ints, expand, search

_NONE: Final = -1
_FIRST_CAPACITY: Final = 1_024
_STEPS: Final = 3


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
    """Cells of all live tiles of all keys."""

    def __init__(self) -> None:
        self.is_live = np.empty(0, dtype=np.bool_)
        # Side by side, as they are read.
        self._records = np.empty((0, 3), dtype=np.int64)
        self.key, self.tile, self._older = self._records.T
        self._head = np.empty(0, dtype=np.int64)
        self._free = np.empty(0, dtype=np.int64)

    @property
    def capacity(self) -> int:
        """Number of cells there is room for."""
        return len(self.tile)

    def has_tiles(self, keys: Ints) -> Bools:
        """Tell which keys have a tile."""
        has_tiles: Bools = self._head[keys] != _NONE
        return has_tiles

    def grow_keys(self, n_keys: int) -> None:
        """Make room for keys below ``n_keys``."""
        if n_keys > len(self._head):
            size = max(n_keys, 2 * len(self._head))
            self._head = np.concatenate([self._head, np.full(size - len(self._head), _NONE, dtype=np.int64)])

    def live_cells(self) -> Ints:
        """All live cells."""
        return np.flatnonzero(self.is_live)

    def find_or_add(self, keys: Ints, tiles: Ints) -> tuple[Ints, Ints]:
        """Cell of each (key, tile); these must be distinct, each key's side by side with its tiles rising.

        Returns:
            The cells, and the positions of those that are new.
        """
        n_groups = len(keys)
        at = self._head[keys]
        newer = np.full(n_groups, _NONE, dtype=np.int64)
        open_groups = np.flatnonzero(at != _NONE)
        while len(open_groups):
            cells = at[open_groups]
            is_past = self.tile[cells] > tiles[open_groups]
            open_groups, cells = open_groups[is_past], cells[is_past]
            newer[open_groups] = cells
            at[open_groups] = self._older[cells]
            open_groups = open_groups[at[open_groups] != _NONE]
        is_found = at != _NONE
        is_found[is_found] = self.tile[at[is_found]] == tiles[is_found]
        new = np.flatnonzero(~is_found)
        if len(new):
            at[new] = self._link(keys[new], tiles[new], older=at[new], newer=newer[new])
        return at, new

    def _link(self, keys: Ints, tiles: Ints, *, older: Ints, newer: Ints) -> Ints:
        cells = self._allocate(len(keys))
        self.key[cells], self.tile[cells], self.is_live[cells] = keys, tiles, True
        # New tiles of a key that fall into the same gap of its chain are linked to each other, oldest first.
        joins = np.zeros(len(keys), dtype=np.bool_)
        joins[1:] = (keys[1:] == keys[:-1]) & (newer[1:] == newer[:-1]) & (older[1:] == older[:-1])
        self._older[cells] = older
        self._older[cells[1:][joins[1:]]] = cells[:-1][joins[1:]]
        is_last = np.ones(len(keys), dtype=np.bool_)
        is_last[:-1] = ~joins[1:]
        is_front = is_last & (newer == _NONE)
        self._head[keys[is_front]] = cells[is_front]
        is_inner = is_last & (newer != _NONE)
        self._older[newer[is_inner]] = cells[is_inner]
        return cells

    def _allocate(self, n_cells: int) -> Ints:
        if n_cells > len(self._free):
            before = self.capacity
            size = max(_FIRST_CAPACITY, 2 * before, before + n_cells)
            self._free = np.concatenate([self._free, np.arange(before, size)])
            records = np.zeros((size, 3), dtype=np.int64)
            records[:before] = self._records
            self._records = records
            self.key, self.tile, self._older = records.T
            self.is_live = np.concatenate([self.is_live, np.zeros(size - before, dtype=np.bool_)])
        cells, self._free = self._free[:n_cells], self._free[n_cells:]
        return cells

    def drop_before(self, tile: int) -> Ints:
        """Free the cells of all tiles before ``tile`` and return them."""
        dead = np.flatnonzero(self.is_live & (self.tile < tile))
        if len(dead):
            self.is_live[dead] = False
            live = self.live_cells()
            older = self._older[live]
            is_cut = older != _NONE
            is_cut[is_cut] = ~self.is_live[older[is_cut]]
            self._older[live[is_cut]] = _NONE
            keys = self.key[dead]
            heads = self._head[keys]
            is_gone = heads != _NONE
            is_gone[is_gone] = ~self.is_live[heads[is_gone]]
            self._head[keys[is_gone]] = _NONE
            self._free = np.concatenate([self._free, dead])
        return dead

    def index(self, keys: Ints) -> CellIndex:
        """Index the cells of these distinct keys; queries name a key by its position in ``keys``."""
        owners, cells, at_tiles = [], [], []
        places, at = np.arange(len(keys), dtype=np.int64), self._head[keys]
        while True:
            is_open = at != _NONE
            places, at = places[is_open], at[is_open]
            if not len(at):
                break
            owners.append(places)
            cells.append(at)
            _, tile, older = self._records.take(at, axis=0).T
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
