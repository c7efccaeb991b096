"""Which rows are the N newest as of each row, for keys whose rows came out of order.

Most such keys have a few new rows in a batch: these are gone through side by side, all first new rows, then all second
ones. A key with many rows, or one that begins anew after its first row, is gone through by itself, a row at a time (1
us a row, measured; side by side it would hold up the others).
"""

from bisect import insort
from dataclasses import dataclass
from typing import Final

import numpy as np

from streams.windowing.segment import Bools, Ints, expand

LONG: Final = 32
"""Keys with more new rows than this are better gone through by themselves."""
_NEVER: Final = 2**63 - 1


@dataclass(frozen=True)
class LaidKeys:
    """A batch laid out key by key: the rows kept before, then the new rows that pass.

    Attributes:
        row_starts: First row of each key among the rows of the batch.
        row_lengths: Number of its rows.
        starts: Where each key's layout begins.
        n_before: Number of rows kept before, for each key.
        n_new: Number of its new rows that pass.
        n_passed: ``(n_rows,)`` number of rows of the key that pass, up to each row.
        place_of: ``(n_rows,)`` place of each row in the layout, -1 for those that do not pass.
        time_us: Event times in the layout.
    """

    row_starts: Ints
    row_lengths: Ints
    starts: Ints
    n_before: Ints
    n_new: Ints
    n_passed: Ints
    place_of: Ints
    time_us: Ints


class NewestLists:
    """Places in the layout of the N newest rows, ascending, as of rows of a batch.

    Attributes:
        list_row: ``(n_rows,)`` list of each row of the batch, -1 for rows that need none.
    """

    def __init__(self, size: int, *, n_rows: int) -> None:
        self._size = size
        self._parts: list[Ints] = []
        self._n_lists = 0
        self.list_row: Ints = np.full(n_rows, -1, dtype=np.int64)

    def listed(self) -> Ints:
        """All lists, ``(n_lists, N)``; what is beyond the number of rows kept has no meaning."""
        return np.concatenate(self._parts) if self._parts else np.empty((0, self._size), dtype=np.int64)

    def _append(self, lists: Ints) -> None:
        self._parts.append(lists)
        self._n_lists += len(lists)

    def add_side_by_side(self, keys: Ints, laid: LaidKeys) -> None:
        """List the rows of these keys: for each key a list before its first new row, and one after each."""
        if not len(keys):
            return
        n_lists = laid.n_new[keys] + 1
        first_list = np.cumsum(n_lists) - n_lists
        owner, within = expand(laid.row_lengths[keys])
        rows = laid.row_starts[keys][owner] + within
        self.list_row[rows] = self._n_lists + first_list[owner] + laid.n_passed[rows]
        lists = np.zeros((int(n_lists.sum()), self._size), dtype=np.int64)
        place = laid.starts[keys][:, None] + np.arange(self._size)
        is_kept = np.arange(self._size) < laid.n_before[keys][:, None]
        times = np.where(is_kept, laid.time_us[np.minimum(place, len(laid.time_us) - 1)], _NEVER)
        lists[first_list] = place
        for turn in range(int(laid.n_new[keys].max())):
            is_open = laid.n_new[keys] > turn
            if not is_open.all():
                keys, first_list, place, times = keys[is_open], first_list[is_open], place[is_open], times[is_open]
            new = laid.starts[keys] + laid.n_before[keys] + turn
            # The new row has the highest offset, so a stable sort by event time puts it where it belongs.
            times = np.concatenate([times, laid.time_us[new][:, None]], axis=1)
            place = np.concatenate([place, new[:, None]], axis=1)
            order = np.argsort(times, axis=1, kind="stable")
            is_full = laid.n_before[keys] + turn >= self._size
            order = np.where(is_full[:, None], order[:, 1:], order[:, :-1])
            times, place = np.take_along_axis(times, order, axis=1), np.take_along_axis(place, order, axis=1)
            lists[first_list + turn + 1] = place
        self._append(lists)

    def add_alone(self, key: int, laid: LaidKeys, *, is_reset: Bools, n_kept: Ints) -> None:
        """List the rows of one key, and say in ``n_kept`` how many are kept as of each."""
        start, first = int(laid.starts[key]), int(laid.row_starts[key])
        n_rows = int(laid.row_lengths[key])
        before = range(start, start + int(laid.n_before[key]))
        kept = [(int(laid.time_us[at]), at) for at in before]
        lists = np.zeros((n_rows, self._size), dtype=np.int64)
        for turn in range(n_rows):
            row = first + turn
            if is_reset[row] and turn:
                kept = []
            at = int(laid.place_of[row])
            if at >= 0:
                insort(kept, (int(laid.time_us[at]), at))
                if len(kept) > self._size:
                    kept.pop(0)
            lists[turn, : len(kept)] = [place for _, place in kept]
            n_kept[row] = len(kept)
        self.list_row[first : first + n_rows] = self._n_lists + np.arange(n_rows)
        self._append(lists)
