"""Which rows are the N newest as of each row, by (event time, offset).

Keys are gone through side by side: all first new rows, then all second ones. A new row has the highest offset, so it is
put behind those kept and sinks past the ones of a later event time, which few do. A key with many rows, or one that
begins anew after its first row, is gone through by itself; side by side it would hold up the others.
"""

from bisect import insort
from dataclasses import dataclass
from typing import Final

import numpy as np

from streams.windowing.record import put_rows
from streams.windowing.segment import Array, Bools, Ints

LONG: Final = 32
"""Keys with more new rows than this are better gone through by themselves."""
_NEVER: Final = -(2**63)


@dataclass(frozen=True)
class NewestOrder:
    """The newest rows as of each row of a batch.

    A row is named by its place: the rows kept before come first, N places a key, then the new ones.

    Attributes:
        lists: ``(n_lists, N)`` places of the newest rows, the newest last; what is before the rows kept has no meaning.
        n_kept: ``(n_lists,)`` how many they are.
        list_of: ``(n_rows,)`` list of each row of the batch.
    """

    lists: Ints
    n_kept: Ints
    list_of: Ints


class Lister:
    """Makes the lists of a batch: one for each key, before its rows, and one for each new row that passes."""

    def __init__(self, kept_us: Ints, n_before: Ints, *, passes: Bools, new_us: Ints, starts: Ints, lengths: Ints):
        """Lay the lists out.

        Args:
            kept_us: ``(n_keys, N)`` event times of the rows kept before, the newest last.
            n_before: How many these are.
            passes: ``(n_rows,)`` the rows of the batch that count, sorted by (key, offset).
            new_us: Event times of those that do.
            starts: First row of each key.
            lengths: Number of rows of each key.
        """
        n_keys, self._size = kept_us.shape
        self._n_keys, self._n_before = n_keys, n_before
        self._row_starts, self._row_lengths = starts, lengths
        so_far = np.cumsum(passes)
        self._first = so_far[starts] - passes[starts]
        self.n_new = so_far[starts + lengths - 1] - self._first
        self._passes, self._kept_us, self._new_us = passes, kept_us, new_us
        owner = np.repeat(np.arange(n_keys), lengths)
        is_before = so_far == self._first[owner]
        self._list_of = np.where(is_before, owner, n_keys - 1 + so_far)
        new_owner = np.repeat(np.arange(n_keys), self.n_new)
        rank = np.arange(len(new_us)) - self._first[new_owner]
        n_after = np.minimum(n_before[new_owner] + rank + 1, self._size)
        self._own = np.arange(n_keys * self._size).reshape(n_keys, self._size)
        self._lists = [np.concatenate([self._own, np.zeros((len(new_us), self._size), dtype=np.int64)])]
        self._n_kept = [n_before, n_after]
        self._n_lists = n_keys + len(new_us)

    def order(self) -> NewestOrder:
        """What has been listed."""
        return NewestOrder(np.concatenate(self._lists), np.concatenate(self._n_kept), self._list_of)

    def add_side_by_side(self, keys: Ints) -> None:
        """List the rows of these keys."""
        is_kept = np.arange(self._size) >= self._size - self._n_before[keys][:, None]
        times = list(np.where(is_kept, self._kept_us[keys], _NEVER).T.copy())
        places = list(self._own[keys].T.copy())
        left, row = self.n_new[keys], self._first[keys]
        while True:
            is_open = left > 0
            if not is_open.all():
                left, row = left[is_open], row[is_open]
                times, places = [column[is_open] for column in times], [column[is_open] for column in places]
            if not len(left):
                break
            times.append(self._new_us[row])
            places.append(self._own.size + row)
            _sink_newest(times, places)
            del times[0], places[0]
            put_rows(self._lists[0], self._n_keys + row, np.stack(places, axis=1))
            left, row = left - 1, row + 1

    def add_alone(self, key: int, is_reset: Bools) -> None:
        """List the rows of one key, a row at a time (1 us each); some may begin anew."""
        start, n_rows = int(self._row_starts[key]), int(self._row_lengths[key])
        n_before, new = int(self._n_before[key]), int(self._first[key])
        kept = [(int(self._kept_us[key, at]), key * self._size + at) for at in range(self._size - n_before, self._size)]
        lists, n_kept = np.zeros((n_rows, self._size), dtype=np.int64), np.zeros(n_rows, dtype=np.int64)
        rows = slice(start, start + n_rows)
        for turn, (is_new, passes) in enumerate(zip(is_reset[rows].tolist(), self._passes[rows].tolist(), strict=True)):
            if is_new and turn:
                kept = []
            if passes:
                insort(kept, (int(self._new_us[new]), self._own.size + new))
                new += 1
                if len(kept) > self._size:
                    kept.pop(0)
            lists[turn, self._size - len(kept) :] = [place for _, place in kept]
            n_kept[turn] = len(kept)
        self._list_of[rows] = self._n_lists + np.arange(n_rows)
        self._lists.append(lists)
        self._n_kept.append(n_kept)
        self._n_lists += n_rows


def _sink_newest(times: list[Array], places: list[Array]) -> None:
    """Let the last column sink past those of a later time, which stand in their order."""
    at = len(times) - 1
    late = np.flatnonzero(times[at] < times[at - 1])
    while len(late):
        for columns in (times, places):
            columns[at][late], columns[at - 1][late] = columns[at - 1][late], columns[at][late]
        at -= 1
        if at == 0:
            break
        late = late[times[at][late] < times[at - 1][late]]
