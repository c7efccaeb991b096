"""Last-N and lifetime features of all keys, in columns.

The state of a key is alive at a time that ``newest event time + state_ttl`` is past. A row that finds it dead, at the
watermark before the row, begins anew; a row of output that finds it dead, at its own event time, shows it empty.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Final

import numpy as np
import pyarrow as pa

from streams.windowing.bank import BankRows, CellBank
from streams.windowing.columns import BatchColumns, Pools, dtype_of
from streams.windowing.newest import KeyRows, Layout, NewestRows
from streams.windowing.newest_aggregate import TIMED, aggregate_newest
from streams.windowing.plan import Plan, PlannedFeature, Scope
from streams.windowing.record import next_capacity
from streams.windowing.register import CellReads, CellRows
from streams.windowing.segment import Array, Bools, Ints, Places, newest_until, scan, search
from streams.windowing.snapshot import Content
from streams.windowing.stored_code import CodeReader, CodeWriter

NEVER_US: Final = -(2**62)
_NONE: Final = -1


@dataclass(frozen=True)
class WindowlessRows:
    """A batch taken in but not yet part of the state.

    Attributes:
        rows: Its rows by key.
        newest_us: Newest event time of the key as of each row.
        cell: Lifetime cell as of each row.
        lifetime: The lifetime aggregates.
        layouts: The last-N rows, for each group of features.
        dead_cells: Lifetime cells that a later one replaces.
    """

    rows: KeyRows
    newest_us: Ints
    cell: Ints
    lifetime: BankRows | None
    layouts: list[Layout]
    dead_cells: Ints


class WindowlessColumns:
    """State of the windowless features of a view."""

    def __init__(self, plan: Plan, *, pools: Pools) -> None:
        self._pools = pools
        self._ttl_us = plan.view.state_ttl_us
        self._lifetime = [f for f in plan.features if f.scope is Scope.LIFETIME]
        last = [f for f in plan.features if f.scope is Scope.LAST]
        self.is_empty = not last and not self._lifetime
        self.newest_us = np.empty(0, dtype=np.int64)
        self.cell_of = np.empty(0, dtype=np.int64)
        self._is_changed: Bools = np.empty(0, dtype=np.bool_)
        self._places = Places()
        self.bank = CellBank(self._lifetime, pools=pools)
        self.n_cells = 0
        self.free_cells = np.empty(0, dtype=np.int64)
        self._value_peaks = {f.name: 0 for f in last if f.is_integer_sum}
        self.groups: list[NewestRows] = []
        self._members: list[list[PlannedFeature]] = []
        for filter_index, size in dict.fromkeys((f.filter_index, f.last) for f in last):
            members = [f for f in last if (f.filter_index, f.last) == (filter_index, size)]
            dtypes = {f.column: dtype_of(f.input_type) or np.int64 for f in members if f.column is not None}
            has_times = any(f.function in TIMED for f in members)
            self.groups.append(NewestRows(size=size, filter_index=filter_index, dtypes=dtypes, has_times=has_times))
            self._members.append(members)

    def grow(self, n_keys: int) -> None:
        """Make room for keys below ``n_keys``."""
        if self.is_empty or n_keys <= len(self.newest_us):
            return
        size = next_capacity(len(self.newest_us), n_keys, fewest=64)
        more = size - len(self.newest_us)
        self.newest_us = np.concatenate([self.newest_us, np.full(more, NEVER_US, dtype=np.int64)])
        self.cell_of = np.concatenate([self.cell_of, np.full(more, _NONE, dtype=np.int64)])
        self._is_changed = np.concatenate([self._is_changed, np.zeros(more, dtype=np.bool_)])
        for group in self.groups:
            group.grow(size)

    def renumber(self, keys: Ints) -> None:
        """Let the key ``keys[i]`` be the key ``i``, and make room for no others; none but these has a state."""
        if self.is_empty:
            return
        self.grow(int(keys.max(initial=-1)) + 1)
        self.newest_us, self._is_changed, cells = self.newest_us[keys], self._is_changed[keys], self.cell_of[keys]
        has_cell = cells != _NONE
        kept = np.sort(cells[has_cell])
        cells[has_cell] = search(kept, cells[has_cell])
        self.cell_of, self.n_cells, self.free_cells = cells, len(kept), kept[:0]
        self.bank.renumber(kept, capacity=len(kept))
        self._places = Places()
        for group in self.groups:
            group.renumber(keys)

    def is_alive(self, newest_us: Ints, at_us: Ints | int) -> Bools:
        """Tell whether state with this newest event time still counts."""
        alive: Bools = (newest_us != NEVER_US) & (newest_us + self._ttl_us > at_us)
        return alive

    def release(self, keys: Ints) -> None:
        """Forget keys whose state is dead."""
        if self.is_empty:
            return
        self.newest_us[keys] = NEVER_US
        cells = self.cell_of[keys]
        self._free(cells[cells != _NONE])
        self.cell_of[keys] = _NONE
        for group in self.groups:
            group.reset(keys)

    def scan(self, columns: BatchColumns, rows: KeyRows, *, watermark_us: Ints) -> WindowlessRows:
        """Take in a batch; ``watermark_us`` is what each row (in the order of ``rows``) was judged against."""
        base = self.newest_us[rows.keys]
        newest = scan(np.maximum, base, rows.time_us, starts=rows.starts, lengths=rows.lengths)
        before = np.concatenate([newest[:1], newest[:-1]])
        before[rows.starts] = base
        is_reset = ~self.is_alive(before, watermark_us)
        lifetime, cell, dead = None, np.empty(0, dtype=np.int64), np.empty(0, dtype=np.int64)
        if self._lifetime:
            lifetime, cell, dead = self._scan_lifetime(columns, rows, is_reset)
        layouts = [group.scan(columns, rows, is_reset) for group in self.groups]
        return WindowlessRows(rows, newest, cell, lifetime, layouts, dead)

    def _scan_lifetime(self, columns: BatchColumns, rows: KeyRows, is_reset: Bools) -> tuple[BankRows, Ints, Ints]:
        is_start = is_reset.copy()
        is_start[rows.starts] = True
        starts = np.flatnonzero(is_start)
        lengths = np.diff(np.append(starts, len(rows.order)))
        keys = np.repeat(rows.keys, rows.lengths)[starts]
        is_new = is_reset[starts]
        cells = self.cell_of[keys]
        dead = cells[is_new & (cells != _NONE)]
        cells[is_new] = self._allocate(int(is_new.sum()))
        cell_rows = CellRows(rows.order, starts, lengths, cells, rows.time_us)
        last_cell = np.zeros(len(starts), dtype=np.bool_)
        last_cell[np.append(np.flatnonzero(np.diff(keys)), len(keys) - 1)] = True
        return self.bank.scan(columns, cell_rows), np.repeat(cells, lengths), np.union1d(dead, cells[~last_cell])

    def _allocate(self, n_cells: int) -> Ints:
        if n_cells > len(self.free_cells):
            size = next_capacity(self.n_cells, self.n_cells + n_cells, fewest=64)
            self.free_cells = np.concatenate([self.free_cells, np.arange(self.n_cells, size)])
            self.n_cells = size
            self.bank.grow(size)
        cells, self.free_cells = self.free_cells[:n_cells], self.free_cells[n_cells:]
        self.bank.reset(cells)
        return cells

    def _free(self, cells: Ints) -> None:
        if len(cells):
            is_live = np.ones(self.n_cells, dtype=np.bool_)
            is_live[cells] = False
            self.bank.drop(is_live)
            self.free_cells = np.concatenate([self.free_cells, cells])

    def commit(self, batch: WindowlessRows) -> None:
        """Make a batch part of the state."""
        rows = batch.rows
        last = rows.last
        self.newest_us[rows.keys] = batch.newest_us[last]
        self._is_changed[rows.keys] = True
        if batch.lifetime is not None:
            self.bank.commit(batch.lifetime)
            self.cell_of[rows.keys] = batch.cell[last]
            self._free(batch.dead_cells)
        for group, layout in zip(self.groups, batch.layouts, strict=True):
            group.commit(rows, layout)

    def versions(self, keys: Ints, as_of: Ints, batch: WindowlessRows | None) -> Ints:
        """Row of ``KeyRows`` as of which each key is to be read, -1 for the state before the batch.

        ``as_of`` are positions among the rows of the batch.
        """
        versions = np.full(len(keys), -1, dtype=np.int64)
        if batch is None:
            return versions
        rows = batch.rows
        self._places.grow(len(self.newest_us))
        self._places.mark(rows.keys)
        segment = self._places.of(keys)
        self._places.clear(rows.keys)
        touched = np.flatnonzero(segment >= 0)
        versions[touched] = newest_until(segment[touched], as_of[touched], rows.order, rows.starts, rows.lengths)
        return versions

    def read(self, keys: Ints, versions: Ints, *, at_us: Ints, batch: WindowlessRows | None) -> dict[str, pa.Array]:
        """Value of each windowless feature for each query.

        Args:
            keys: Key of each query.
            versions: Row of ``KeyRows`` as of which it is read, -1 for the state.
            at_us: Event time that it is evaluated at, and the state is to be alive at. The watermark may have leapt far
                past the end of the pane that it closes.
            batch: The batch the versions are of.
        """
        if self.is_empty:
            return {}
        newest, cells = self.newest_us[keys], self.cell_of[keys]
        in_batch = np.flatnonzero(versions >= 0)
        if batch is not None and len(in_batch):
            newest[in_batch] = batch.newest_us[versions[in_batch]]
            if batch.lifetime is not None:
                cells[in_batch] = batch.cell[versions[in_batch]]
        is_alive = self.is_alive(newest, at_us)
        values: dict[str, pa.Array] = {}
        if self._lifetime:
            values |= self._read_lifetime(cells, versions, is_alive, at_us, batch)
        for position, (group, members) in enumerate(zip(self.groups, self._members, strict=True)):
            newest_rows = group.read(keys, versions, batch.layouts[position] if batch else None)
            newest_rows.n_kept[~is_alive] = 0
            for valid in newest_rows.valid.values():
                valid[~is_alive] = False
            values |= {f.name: aggregate_newest(f, newest_rows, at_us=at_us, pools=self._pools) for f in members}
        return values

    def _read_lifetime(
        self, cells: Ints, versions: Ints, is_alive: Bools, at_us: Ints, batch: WindowlessRows | None
    ) -> dict[str, pa.Array]:
        has_cell = is_alive & (cells != _NONE)
        lengths = has_cell.astype(np.int64)
        starts = np.cumsum(lengths) - lengths
        reads = CellReads(cells[has_cell], versions[has_cell], starts, lengths, at_us, 0)
        return self.bank.read(self._lifetime, reads, batch.lifetime if batch else None)

    # Integer overflow

    def sum_bound(self, feature: PlannedFeature, largest: int) -> int:
        """No sum of this feature is further from 0 than this, when no new value is further than ``largest``."""
        if feature.scope is Scope.LIFETIME:
            return self.bank.sum_peak(feature)
        self._value_peaks[feature.name] = max(self._value_peaks[feature.name], largest)
        return self._value_peaks[feature.name] * feature.last

    def is_alive_at(self, newest_us: int, watermark_us: int) -> bool:
        """Tell whether a key's state with this newest event time counts under a watermark."""
        return newest_us != NEVER_US and newest_us + self._ttl_us > watermark_us

    def newest_of(self, key: int) -> int:
        """Newest event time of a key; ``NEVER_US`` if it has none (-1: an unknown key)."""
        return NEVER_US if self.is_empty or key < 0 else int(self.newest_us[key])

    def lifetime_sums(self, feature: PlannedFeature, keys: Ints) -> Ints:
        """Integer sums of a lifetime feature, 0 for keys without one."""
        cells = self.cell_of[keys]
        sums = self.bank.sums(feature)
        if not len(sums):
            return np.zeros(len(keys), dtype=np.int64)
        return np.where(cells == _NONE, 0, sums[cells])

    def newest_values(self, feature: PlannedFeature, key: int) -> list[tuple[int, int, int]]:
        """Event time, rank below 0 and value (0 for null) of the rows that a last-N feature of a key runs over."""
        for group, members in zip(self.groups, self._members, strict=True):
            if feature in members:
                kept = slice(group.size - int(group.n_kept[key]), None)
                values = np.where(group.valid[feature.source][key, kept], group.columns[feature.source][key, kept], 0)
                columns = group.time_us[key, kept], np.arange(-len(values), 0), values
                return list(zip(*(column.tolist() for column in columns), strict=True))
        return []

    def changed_keys(self) -> Ints:
        """Keys whose state has changed since the last :meth:`mark_told`."""
        return np.flatnonzero(self._is_changed & (self.newest_us != NEVER_US))

    def mark_told(self) -> None:
        """Begin to note changes anew."""
        self._is_changed[:] = False

    def known(self, ids: Ints) -> Ints:
        """Those of these keys that have a state."""
        return ids[:0] if self.is_empty else ids[self.newest_us[ids] != NEVER_US]

    def write(self, ids: Ints, row_of_key: Ints, content: Content, *, codes: CodeWriter) -> None:
        """Write the state of these keys, all of which have one; they are named by ``row_of_key``."""
        if self.is_empty:
            return
        columns = {"key": pa.array(row_of_key[ids]), "newest_us": pa.array(self.newest_us[ids])}
        content.tables["windowless"] = pa.table(columns)
        content.facts["value_peaks"] = self._value_peaks
        cells = self.cell_of[ids]
        rows = np.flatnonzero(cells != _NONE)
        self.bank.write(cells[rows], content, codes=codes, name="lifetime", owners={"row": pa.array(rows)})
        for number, group in enumerate(self.groups):
            content.tables[f"last.{number}"] = group.to_table(ids, self._coded(group, codes.store))

    def read_part(self, content: Content, ids: Ints, *, codes: CodeReader) -> None:
        """Take over the state of keys that have none yet: parts come newest first; key ``i`` of it is ``ids[i]``."""
        if self.is_empty:
            return
        self.grow(int(ids.max(initial=-1)) + 1)
        for name, peak in content.facts["value_peaks"].items():
            self._value_peaks[name] = max(self._value_peaks[name], peak)
        keys = ids[content.column("windowless", "key")]
        is_new = self.newest_us[keys] == NEVER_US
        self.newest_us[keys[is_new]] = content.column("windowless", "newest_us")[is_new]
        keys = np.where(is_new, keys, _NONE)
        owners = keys[content.column("lifetime", "row")]
        cells = np.full(len(owners), _NONE, dtype=np.int64)
        rows = np.flatnonzero(owners != _NONE)
        cells[rows] = self._allocate(len(rows))
        self.cell_of[owners[rows]] = cells[rows]
        self.bank.read_part(content, cells, codes=codes, name="lifetime")
        for number, group in enumerate(self.groups):
            if (table := content.tables.get(f"last.{number}")) is not None:
                group.from_table(table, keys, self._coded(group, codes.load))

    def _coded(
        self, group: NewestRows, translate: Callable[[str, Array], Array]
    ) -> dict[str, Callable[[Array], Array]]:
        """How to translate the codes of each column of a group that has them."""
        return {name: partial(translate, name) for name in group.columns if self._pools.is_coded(name)}

    def used_codes(self, column: str) -> list[Array]:
        """Codes of a column's pool that the state holds."""
        kept = [g.columns[column][g.valid[column]] for g in self.groups if column in g.columns]
        return [*(kept if self._pools.is_coded(column) else []), *self.bank.used_codes(column)]

    def recode(self, column: str, mapping: Ints) -> None:
        """Replace the codes of a column's pool."""
        self.bank.recode(column, mapping)
        if self._pools.is_coded(column):
            for group in self.groups:
                if column in group.columns:
                    values, valid = group.columns[column], group.valid[column]
                    values[valid] = mapping[values[valid]]
                    values[~valid] = 0
