"""The N newest rows of each key by (event time, offset), in columns.

A batch lays out, key by key, the rows kept so far followed by the new ones. Where rows came in order, which is nearly
always, the N newest as of any row are a slice of that layout. Keys with a row out of order are gone through row by row.
"""

from bisect import insort
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import pyarrow as pa

from streams.windowing.columns import BatchColumns
from streams.windowing.segment import Array, Bools, Ints, expand, find_segments


@dataclass(frozen=True)
class KeyRows:
    """Rows of a batch sorted by (key, offset).

    Attributes:
        order: ``(n_rows,)`` position of each row in the batch.
        starts: First row of each key.
        lengths: Number of rows of each key, 1 or more.
        keys: The key of each segment.
        time_us: ``(n_rows,)`` event times in this order.
        offset: ``(n_rows,)`` offsets in this order.
    """

    order: Ints
    starts: Ints
    lengths: Ints
    keys: Ints
    time_us: Ints
    offset: Ints

    @cached_property
    def last(self) -> Ints:
        """Last row of each key."""
        return self.starts + self.lengths - 1


@dataclass(frozen=True)
class Layout:
    """A batch laid out: for each key the rows kept before, then its new rows that pass.

    Attributes:
        starts: Where each key's rows begin.
        time_us, offset, columns, valid: The rows.
        first: Where the N newest as of each row of ``KeyRows`` begin; meaningless for keys out of order.
        n_kept: How many they are.
        listed: Their places for rows of keys that are out of order, by row of ``KeyRows``, -1 beyond ``n_kept``.
        is_listed: Which rows those are.
    """

    starts: Ints
    time_us: Ints
    offset: Ints
    columns: dict[str, Array]
    valid: dict[str, Bools]
    first: Ints
    n_kept: Ints
    listed: Ints
    is_listed: Bools


@dataclass(frozen=True)
class NewestValues:
    """The newest rows of each query, oldest first.

    Attributes:
        n_kept: ``(n_queries,)``.
        columns: Values, ``(n_queries, N)`` each.
        valid: Where there is a row and its value is not null.
    """

    n_kept: Ints
    columns: dict[str, Array]
    valid: dict[str, Bools]


class NewestRows:
    """Keeps the N newest rows that pass a filter, for every key."""

    def __init__(self, *, size: int, filter_index: int | None, dtypes: dict[str, type]) -> None:
        self.size = size
        self.filter_index = filter_index
        self.n_kept = np.empty(0, dtype=np.int64)
        self.time_us = np.empty((0, size), dtype=np.int64)
        self.offset = np.empty((0, size), dtype=np.int64)
        self.columns = {name: np.empty((0, size), dtype=dtype) for name, dtype in dtypes.items()}
        self.valid = {name: np.empty((0, size), dtype=np.bool_) for name in dtypes}

    def grow(self, n_keys: int) -> None:
        """Make room for keys below ``n_keys``."""
        self.n_kept = _grown(self.n_kept, n_keys)
        self.time_us, self.offset = _grown(self.time_us, n_keys), _grown(self.offset, n_keys)
        self.columns = {name: _grown(values, n_keys) for name, values in self.columns.items()}
        self.valid = {name: _grown(values, n_keys) for name, values in self.valid.items()}

    def reset(self, keys: Ints) -> None:
        """Forget the rows of these keys."""
        self.n_kept[keys] = 0

    def to_table(self, ids: Ints) -> pa.Table:
        """State as a table of one row for each row kept; keys are named by their position in ``ids``."""
        key, at = np.nonzero(np.arange(self.size) < self.n_kept[ids][:, None])
        columns = {"key": key, "time_us": self.time_us[ids[key], at], "offset": self.offset[ids[key], at]}
        for number, name in enumerate(self.columns):
            columns |= {
                f"{number}.value": self.columns[name][ids[key], at],
                f"{number}.valid": self.valid[name][ids[key], at],
            }
        return pa.table({name: pa.array(values) for name, values in columns.items()})

    def from_table(self, table: pa.Table, ids: Ints) -> None:
        """Take over a state; there is room for these keys."""
        columns = {name: table.column(name).to_numpy() for name in table.column_names}
        starts, lengths = find_segments(columns["key"])
        _, at = expand(lengths)
        keys = ids[columns["key"]]
        self.n_kept[keys[starts]] = lengths
        self.time_us[keys, at], self.offset[keys, at] = columns["time_us"], columns["offset"]
        for number, name in enumerate(self.columns):
            self.columns[name][keys, at] = columns[f"{number}.value"]
            self.valid[name][keys, at] = columns[f"{number}.valid"]

    def scan(self, columns: BatchColumns, rows: KeyRows, is_reset: Bools) -> Layout:
        """Lay a batch out; ``is_reset`` tells the rows that find the state of their key dead and begin anew."""
        passes = columns.passes(self.filter_index)[rows.order]
        n_before = np.where(is_reset[rows.starts], 0, self.n_kept[rows.keys])
        owner = np.repeat(np.arange(len(rows.keys)), rows.lengths)
        so_far = np.cumsum(passes)
        before_key = so_far[rows.starts] - passes[rows.starts]
        n_passed = so_far - before_key[owner]
        n_new = n_passed[rows.last]
        lengths = n_before + n_new
        ends = np.cumsum(lengths)
        starts = ends - lengths
        total = int(ends[-1]) if len(ends) else 0
        old_owner, old_within = expand(n_before)
        old_at, new_at = starts[old_owner] + old_within, (starts + n_before)[owner[passes]] + n_passed[passes] - 1
        old_rows, new_rows = rows.keys[old_owner], rows.order[passes]

        def laid(kept: Array, fresh: Array) -> Array:
            out = np.empty(total, dtype=kept.dtype)
            out[old_at] = kept[old_rows, old_within]
            out[new_at] = fresh
            return out

        time_us, offset = laid(self.time_us, rows.time_us[passes]), laid(self.offset, rows.offset[passes])
        n_versions = n_before[owner] + n_passed
        key_of = np.repeat(np.arange(len(rows.keys)), lengths)
        is_disordered = np.zeros(len(rows.keys), dtype=np.bool_)
        goes_back = (time_us[1:] < time_us[:-1]) & (key_of[1:] == key_of[:-1])
        is_disordered[key_of[1:][goes_back]] = True
        is_later = np.ones(len(owner), dtype=np.bool_)
        is_later[rows.starts] = False
        is_disordered[owner[is_reset & is_later]] = True
        is_listed = is_disordered[owner]
        n_kept = np.minimum(n_versions, self.size)
        listed = np.full((int(is_listed.sum()), self.size), -1, dtype=np.int64)
        if len(listed):
            places = np.full(len(owner), -1, dtype=np.int64)
            places[passes] = new_at
            n_kept[is_listed] = self._list_rows(
                rows, is_reset, is_disordered, starts, n_before, places, time_us, offset, listed
            )
        return Layout(
            starts=starts,
            time_us=time_us,
            offset=offset,
            columns={c: laid(kept, columns.values(c)[0][new_rows]) for c, kept in self.columns.items()},
            valid={c: laid(kept, columns.values(c)[1][new_rows]) for c, kept in self.valid.items()},
            first=starts[owner] + np.maximum(n_versions - self.size, 0),
            n_kept=n_kept,
            listed=listed,
            is_listed=is_listed,
        )

    def _list_rows(
        self,
        rows: KeyRows,
        is_reset: Bools,
        is_disordered: Bools,
        starts: Ints,
        n_before: Ints,
        places: Ints,
        time_us: Ints,
        offset: Ints,
        listed: Ints,
    ) -> list[int]:
        """Go through the keys out of order row by row: where a row belongs depends on all before it (1 us a row)."""
        counts: list[int] = []
        for key in np.flatnonzero(is_disordered).tolist():
            kept = [(int(time_us[at]), int(offset[at]), at) for at in range(starts[key], starts[key] + n_before[key])]
            first = int(rows.starts[key])
            for row in range(first, first + int(rows.lengths[key])):
                if is_reset[row] and row > first:
                    kept = []
                at = int(places[row])
                if at >= 0:
                    insort(kept, (int(time_us[at]), int(offset[at]), at))
                    if len(kept) > self.size:
                        kept.pop(0)
                listed[len(counts), : len(kept)] = [place for *_, place in kept]
                counts.append(len(kept))
        return counts

    def read(self, keys: Ints, versions: Ints, layout: Layout | None) -> NewestValues:
        """Newest rows of each key, as of a row of ``KeyRows`` or (-1) of the state."""
        in_batch = np.flatnonzero(versions >= 0)
        in_state = np.flatnonzero(versions < 0)
        n_kept = np.zeros(len(keys), dtype=np.int64)
        n_kept[in_state] = self.n_kept[keys[in_state]]
        places = np.empty((0, self.size), dtype=np.int64)
        if layout is not None and len(in_batch):
            rows = versions[in_batch]
            n_kept[in_batch] = layout.n_kept[rows]
            places = self._places(layout, rows)
        is_row = np.arange(self.size) < n_kept[:, None]
        columns: dict[str, Array] = {}
        valid: dict[str, Bools] = {}
        for name, state in self.columns.items():
            values = np.zeros((len(keys), self.size), dtype=state.dtype)
            has_value = np.zeros((len(keys), self.size), dtype=np.bool_)
            values[in_state], has_value[in_state] = state[keys[in_state]], self.valid[name][keys[in_state]]
            if layout is not None and len(in_batch) and len(layout.time_us):
                values[in_batch], has_value[in_batch] = layout.columns[name][places], layout.valid[name][places]
            columns[name], valid[name] = values, has_value & is_row
        return NewestValues(n_kept, columns, valid)

    def _places(self, layout: Layout, rows: Ints) -> Ints:
        places: Ints = layout.first[rows][:, None] + np.arange(self.size)
        if layout.is_listed.any():
            list_row = np.cumsum(layout.is_listed) - 1
            is_listed = layout.is_listed[rows]
            places[is_listed] = layout.listed[list_row[rows[is_listed]]]
        return np.clip(places, 0, max(len(layout.time_us) - 1, 0))

    def commit(self, rows: KeyRows, layout: Layout) -> None:
        """Make the newest rows as of each key's last row the state."""
        last, keys = rows.last, rows.keys
        self.n_kept[keys] = layout.n_kept[last]
        if len(layout.time_us):
            places = self._places(layout, last)
            self.time_us[keys], self.offset[keys] = layout.time_us[places], layout.offset[places]
            for name, values in self.columns.items():
                values[keys] = layout.columns[name][places]
                self.valid[name][keys] = layout.valid[name][places]


def _grown(values: Array, n_rows: int) -> Array:
    grown = np.zeros((n_rows, *values.shape[1:]), dtype=values.dtype)
    grown[: len(values)] = values
    return grown
