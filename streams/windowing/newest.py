"""The N newest rows of each key by (event time, offset), in columns.

A batch lays out, key by key, the rows kept so far followed by the new ones. Where a key's rows came in order, the N
newest as of any row are a slice of that layout. Where not, the places of the N newest are listed for each row: side by
side, the first new row of all such keys, then the second …; a key with many rows, or one that begins anew, by itself.
"""

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Final

import numpy as np
import pyarrow as pa

from streams.windowing.columns import BatchColumns
from streams.windowing.newest_order import LONG, LaidKeys, NewestLists
from streams.windowing.segment import Array, Bools, Ints, expand, find_segments, search

_WORD_BYTES: Final = 8


@dataclass(frozen=True)
class KeyRows:
    """Rows of a batch sorted by (key, offset).

    Attributes:
        order: ``(n_rows,)`` position of each row in the batch.
        starts: First row of each key.
        lengths: Number of rows of each key, 1 or more.
        keys: The key of each segment.
        time_us: ``(n_rows,)`` event times in this order.
    """

    order: Ints
    starts: Ints
    lengths: Ints
    keys: Ints
    time_us: Ints

    @cached_property
    def last(self) -> Ints:
        """Last row of each key."""
        return self.starts + self.lengths - 1


@dataclass(frozen=True)
class Layout:
    """A batch laid out: for each key the rows kept before, then its new rows that pass.

    Attributes:
        starts: Where each key's rows begin.
        time_us, columns, valid: The rows.
        first: Where the N newest as of each row of ``KeyRows`` begin; meaningless for keys out of order.
        n_kept: How many they are.
        list_row: Row of ``listed`` for rows of keys that are out of order, else -1.
        listed: The places of the newest rows, ascending.
    """

    starts: Ints
    time_us: Ints
    columns: dict[str, Array]
    valid: dict[str, Bools]
    first: Ints
    n_kept: Ints
    list_row: Ints
    listed: Ints


@dataclass(frozen=True)
class NewestValues:
    """The newest rows of each query, oldest first.

    Attributes:
        n_kept: ``(n_queries,)``.
        columns: Values, ``(n_queries, N)`` each.
        valid: Where there is a row and its value is not null.
        time_us: Event times, ``(n_queries, N)``; without columns where no feature asks for them.
    """

    n_kept: Ints
    columns: dict[str, Array]
    valid: dict[str, Bools]
    time_us: Ints


class NewestRows:
    """Keeps the N newest rows that pass a filter, for every key.

    They are kept in the order of (event time, offset); offsets need not be, for a new row has the highest.
    """

    def __init__(self, *, size: int, filter_index: int | None, dtypes: dict[str, type], has_times: bool) -> None:
        self.size = size
        self._has_times = has_times
        self.filter_index = filter_index
        self._dtypes = dtypes
        n_flag_words = -(-size // _WORD_BYTES)
        widths = [1, size, *(size for _ in dtypes), *(n_flag_words for _ in dtypes)]
        self._edges: list[int] = np.cumsum([0, *widths]).tolist()
        self._words: Ints = np.zeros((0, self._edges[-1]), dtype=np.int64)
        self.n_kept, self.time_us, self.columns, self.valid = self._split(self._words)

    def grow(self, n_keys: int) -> None:
        """Make room for keys below ``n_keys``; what is kept of a key lies side by side, as it is read."""
        words = np.zeros((n_keys, self._edges[-1]), dtype=np.int64)
        words[: len(self._words)] = self._words
        self._words = words
        self.n_kept, self.time_us, self.columns, self.valid = self._split(words)

    def _split(self, words: Ints) -> tuple[Ints, Ints, dict[str, Array], dict[str, Bools]]:
        """Number of rows kept, event times, values and whether there is one, of keys by their words."""
        parts = iter([words[:, start:stop] for start, stop in itertools.pairwise(self._edges)])
        n_kept, time_us = next(parts)[:, 0], next(parts)
        columns: dict[str, Array] = {name: next(parts).view(dtype) for name, dtype in self._dtypes.items()}
        return n_kept, time_us, columns, {name: next(parts).view(np.bool_)[:, : self.size] for name in self._dtypes}

    def reset(self, keys: Ints) -> None:
        """Forget the rows of these keys."""
        self.n_kept[keys] = 0

    def to_table(self, ids: Ints, codes: dict[str, Callable[[Array], Array]]) -> pa.Table:
        """State as a table of one row for each row kept; keys are named by their position in ``ids``.

        ``codes`` tells how to store the codes of the columns that have them.
        """
        key, at = np.nonzero(np.arange(self.size) < self.n_kept[ids][:, None])
        columns = {"key": key, "time_us": self.time_us[ids[key], at]}
        for number, name in enumerate(self.columns):
            values = self.columns[name][ids[key], at]
            columns |= {
                f"{number}.value": codes[name](values) if name in codes else values,
                f"{number}.valid": self.valid[name][ids[key], at],
            }
        return pa.table({name: pa.array(values) for name, values in columns.items()})

    def from_table(self, table: pa.Table, ids: Ints, codes: dict[str, Callable[[Array], Array]]) -> None:
        """Take over a state of keys that have none; the key named ``i`` is ``ids[i]``, or none where that is -1."""
        columns = {name: table.column(name).to_numpy() for name in table.column_names}
        keep = np.flatnonzero(ids[columns["key"]] >= 0)
        columns = {name: values[keep] for name, values in columns.items()}
        starts, lengths = find_segments(columns["key"])
        _, at = expand(lengths)
        keys = ids[columns["key"]]
        self.n_kept[keys[starts]] = lengths
        self.time_us[keys, at] = columns["time_us"]
        for number, name in enumerate(self.columns):
            values = columns[f"{number}.value"]
            self.columns[name][keys, at] = codes[name](values) if name in codes else values
            self.valid[name][keys, at] = columns[f"{number}.valid"]

    def scan(self, columns: BatchColumns, rows: KeyRows, is_reset: Bools) -> Layout:
        """Lay a batch out; ``is_reset`` tells the rows that find the state of their key dead and begin anew."""
        passes = columns.passes(self.filter_index)[rows.order]
        before, before_us, before_columns, before_valid = self._split(self._words.take(rows.keys, axis=0))
        n_before = np.where(is_reset[rows.starts], 0, before)
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
        new_rows = rows.order[passes]

        def laid(kept: Array, fresh: Array) -> Array:
            out = np.empty(total, dtype=kept.dtype)
            out[old_at] = kept[old_owner, old_within]
            out[new_at] = fresh
            return out

        time_us = laid(before_us, rows.time_us[passes])
        n_versions = n_before[owner] + n_passed
        n_kept = np.minimum(n_versions, self.size)
        lists = NewestLists(self.size, n_rows=len(owner))
        disordered, restarted = self._find_disordered(rows, is_reset, time_us, lengths)
        if len(disordered) or len(restarted):
            is_long = n_new[disordered] > LONG
            place_of = np.full(len(owner), -1, dtype=np.int64)
            place_of[passes] = new_at
            laid_keys = LaidKeys(rows.starts, rows.lengths, starts, n_before, n_new, n_passed, place_of, time_us)
            lists.add_side_by_side(disordered[~is_long], laid_keys)
            for key in np.union1d(disordered[is_long], restarted).tolist():
                lists.add_alone(key, laid_keys, is_reset=is_reset, n_kept=n_kept)
        return Layout(
            starts=starts,
            time_us=time_us,
            columns={c: laid(kept, columns.values(c)[0][new_rows]) for c, kept in before_columns.items()},
            valid={c: laid(kept, columns.values(c)[1][new_rows]) for c, kept in before_valid.items()},
            first=starts[owner] + np.maximum(n_versions - self.size, 0),
            n_kept=n_kept,
            list_row=lists.list_row,
            listed=lists.listed(),
        )

    def _find_disordered(self, rows: KeyRows, is_reset: Bools, time_us: Ints, lengths: Ints) -> tuple[Ints, Ints]:
        """Keys with a row out of order, and apart from those the keys that begin anew after their first row."""
        key_of = np.repeat(np.arange(len(rows.keys)), lengths)
        is_disordered = np.zeros(len(rows.keys), dtype=np.bool_)
        is_disordered[key_of[1:][(time_us[1:] < time_us[:-1]) & (key_of[1:] == key_of[:-1])]] = True
        is_restarted = np.zeros(len(rows.keys), dtype=np.bool_)
        later = is_reset.copy()
        later[rows.starts] = False
        is_restarted[search(rows.starts, np.flatnonzero(later), side="right") - 1] = True
        return np.flatnonzero(is_disordered & ~is_restarted), np.flatnonzero(is_restarted)

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
        time_us = np.zeros((len(keys), self.size if self._has_times else 0), dtype=np.int64)
        if self._has_times:
            time_us[in_state] = self.time_us[keys[in_state]]
            if layout is not None and len(in_batch) and len(layout.time_us):
                time_us[in_batch] = layout.time_us[places]
        return NewestValues(n_kept, columns, valid, time_us)

    def _places(self, layout: Layout, rows: Ints) -> Ints:
        places: Ints = layout.first[rows][:, None] + np.arange(self.size)
        if len(layout.listed):
            list_row = layout.list_row[rows]
            is_listed = list_row >= 0
            places[is_listed] = layout.listed[list_row[is_listed]]
        return np.clip(places, 0, max(len(layout.time_us) - 1, 0))

    def commit(self, rows: KeyRows, layout: Layout) -> None:
        """Make the newest rows as of each key's last row the state."""
        last, keys = rows.last, rows.keys
        self.n_kept[keys] = layout.n_kept[last]
        if len(layout.time_us):
            places = self._places(layout, last)
            self.time_us[keys] = layout.time_us[places]
            for name, values in self.columns.items():
                values[keys] = layout.columns[name][places]
                self.valid[name][keys] = layout.valid[name][places]
