"""The N newest rows of each key by (event time, offset), in columns.

A batch is laid out: the rows kept so far, N places a key, followed by the new ones. Which of these places are the N
newest as of each row is listed by :mod:`streams.windowing.newest_order`.
"""

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Final

import numpy as np
import pyarrow as pa

from streams.windowing.columns import BatchColumns
from streams.windowing.newest_order import LONG, Lister, NewestOrder
from streams.windowing.record import grown_rows, put_rows, zero_rows
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
    """A batch laid out: the rows kept before, key by key, then the new rows that pass.

    Attributes:
        time_us, columns, valid: The rows.
        order: The places of the newest ones as of each row of ``KeyRows``.
    """

    time_us: Ints
    columns: dict[str, Array]
    valid: dict[str, Bools]
    order: NewestOrder


@dataclass(frozen=True)
class NewestValues:
    """The newest rows of each query, the newest in the last place.

    Attributes:
        n_kept: ``(n_queries,)``.
        columns: Values, ``(n_queries, N)`` each.
        valid: Where there is a row and its value is not null.
        time_us: Event times, ``(n_queries, N)``; without meaning where no feature asks for them.
    """

    n_kept: Ints
    columns: dict[str, Array]
    valid: dict[str, Bools]
    time_us: Ints


class NewestRows:
    """Keeps the N newest rows that pass a filter, for every key.

    They are kept in the order of (event time, offset), the newest in the last place; offsets need not be, for a new row
    has the highest.
    """

    def __init__(self, *, size: int, filter_index: int | None, dtypes: dict[str, type], has_times: bool) -> None:
        self.size = size
        self._has_times = has_times
        self.filter_index = filter_index
        self._dtypes = dtypes
        n_flag_words = -(-size // _WORD_BYTES)
        widths = [1, size, *(size for _ in dtypes), *(n_flag_words for _ in dtypes)]
        self._edges: list[int] = np.cumsum([0, *widths]).tolist()
        self._words: Ints = zero_rows(0, self._edges[-1])
        self.n_kept, self.time_us, self.columns, self.valid = self._split(self._words)

    def grow(self, n_keys: int) -> None:
        """Make room for keys below ``n_keys``; what is kept of a key lies side by side, as it is read."""
        self._words = grown_rows(self._words, n_keys)
        self.n_kept, self.time_us, self.columns, self.valid = self._split(self._words)

    def renumber(self, keys: Ints) -> None:
        """Let the key ``keys[i]`` be the key ``i``, and make room for no others."""
        self._words = grown_rows(self._words.take(keys, axis=0), len(keys))
        self.n_kept, self.time_us, self.columns, self.valid = self._split(self._words)

    def _split(self, words: Ints) -> tuple[Ints, Ints, dict[str, Array], dict[str, Bools]]:
        """Number of rows kept, event times, values and whether there is one, of keys by their words."""
        parts = iter([words[:, start:stop] for start, stop in itertools.pairwise(self._edges)])
        n_kept, time_us = next(parts)[:, 0], next(parts)
        columns: dict[str, Array] = {name: next(parts).view(dtype) for name, dtype in self._dtypes.items()}
        return n_kept, time_us, columns, {name: next(parts).view(np.bool_)[:, : self.size] for name in self._dtypes}

    def _is_row(self, n_kept: Ints) -> Bools:
        """Places that hold a row."""
        is_row: Bools = np.arange(self.size) >= self.size - n_kept[:, None]
        return is_row

    def reset(self, keys: Ints) -> None:
        """Forget the rows of these keys."""
        self._words[keys] = 0

    def to_table(self, ids: Ints, codes: dict[str, Callable[[Array], Array]]) -> pa.Table:
        """State as a table of one row for each row kept; keys are named by their position in ``ids``.

        ``codes`` tells how to store the codes of the columns that have them.
        """
        key, at = np.nonzero(self._is_row(self.n_kept[ids]))
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
        _, within = expand(lengths)
        at = self.size - np.repeat(lengths, lengths) + within
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
        is_whole = bool(passes.all())
        new_rows, new_us = (rows.order, rows.time_us) if is_whole else (rows.order[passes], rows.time_us[passes])
        lister = Lister(before_us, n_before, passes=passes, new_us=new_us, starts=rows.starts, lengths=rows.lengths)
        is_alone = lister.n_new > LONG
        later = is_reset.copy()
        later[rows.starts] = False
        if later.any():
            is_alone[search(rows.starts, np.flatnonzero(later), side="right") - 1] = True
        lister.add_side_by_side(np.flatnonzero(~is_alone))
        for key in np.flatnonzero(is_alone).tolist():
            lister.add_alone(key, is_reset)

        def laid(kept: Array, fresh: Array) -> Array:
            return np.concatenate([kept.ravel(), fresh[new_rows]])

        return Layout(
            time_us=np.concatenate([before_us.ravel(), new_us]),
            columns={c: laid(kept, columns.values(c)[0]) for c, kept in before_columns.items()},
            valid={c: laid(kept, columns.values(c)[1]) for c, kept in before_valid.items()},
            order=lister.order(),
        )

    def read(self, keys: Ints, versions: Ints, layout: Layout | None) -> NewestValues:
        """Newest rows of each key, as of a row of ``KeyRows`` or (-1) of the state."""
        in_state = np.flatnonzero(versions < 0)
        if layout is None or len(in_state) == len(keys):
            return self._of_state(keys)
        if not len(in_state):
            return self._of_batch(versions, layout)
        in_batch = np.flatnonzero(versions >= 0)
        place = np.empty(len(keys), dtype=np.int64)
        place[np.concatenate([in_state, in_batch])] = np.arange(len(keys))
        old, new = self._of_state(keys[in_state]), self._of_batch(versions[in_batch], layout)
        return NewestValues(
            n_kept=np.concatenate([old.n_kept, new.n_kept]).take(place),
            columns={c: np.concatenate([old.columns[c], new.columns[c]]).take(place, axis=0) for c in old.columns},
            valid={c: np.concatenate([old.valid[c], new.valid[c]]).take(place, axis=0) for c in old.valid},
            time_us=np.concatenate([old.time_us, new.time_us]).take(place, axis=0),
        )

    def _of_state(self, keys: Ints) -> NewestValues:
        n_kept, time_us, columns, valid = self._split(self._words.take(keys, axis=0))
        is_row = self._is_row(n_kept)
        return NewestValues(n_kept, columns, {name: has_value & is_row for name, has_value in valid.items()}, time_us)

    def _of_batch(self, versions: Ints, layout: Layout) -> NewestValues:
        order = layout.order
        lists = order.list_of[versions]
        n_kept, places = order.n_kept[lists], order.lists.take(lists, axis=0)
        is_row = self._is_row(n_kept)
        return NewestValues(
            n_kept,
            {name: values.take(places) for name, values in layout.columns.items()},
            {name: has_value.take(places) & is_row for name, has_value in layout.valid.items()},
            layout.time_us.take(places) if self._has_times else places,
        )

    def commit(self, rows: KeyRows, layout: Layout) -> None:
        """Make the newest rows as of each key's last row the state."""
        order = layout.order
        lists = order.list_of[rows.last]
        places = order.lists.take(lists, axis=0)
        words = np.zeros((len(lists), self._edges[-1]), dtype=np.int64)
        n_kept, time_us, columns, valid = self._split(words)
        n_kept[:], time_us[:] = order.n_kept[lists], layout.time_us.take(places)
        is_row = self._is_row(n_kept)
        for name, values in columns.items():
            values[:], valid[name][:] = layout.columns[name].take(places), layout.valid[name].take(places) & is_row
        put_rows(self._words, rows.keys, words)
