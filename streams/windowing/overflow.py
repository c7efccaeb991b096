"""Which row would take an integer sum out of int64.

Such a row is a dead letter, so the sums after it, and even the watermark, hang on it. Nearly never is there one, so the
question is asked in three steps, each cheaper than what follows: can any sum of the view come so far at all; if so, for
which keys; and only for those keys, row by row in Python's integers, which row is the first.
"""

from bisect import insort
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np
import pyarrow as pa

from streams.windowing.columns import BatchColumns
from streams.windowing.key_table import KeyTable
from streams.windowing.plan import Plan, PlannedFeature, Scope
from streams.windowing.segment import Ints, expand
from streams.windowing.window_column import WindowColumns
from streams.windowing.windowless_column import WindowlessColumns

_FAR: Final = float(2**62)
"""Sums below this in float64 are surely inside int64."""


@dataclass(frozen=True)
class GuardedRows:
    """The rows of a batch that are about to be taken in.

    Attributes:
        columns: Their columns.
        keys: Distinct keys.
        place: Position of each row's key among them.
        time_us: Event times.
        before_us: Watermark that each was judged against.
        tile: Tile of each row.
        first: First window end that holds each row and is not expired.
        last: Last window end that holds it.
    """

    columns: BatchColumns
    keys: pa.Array
    place: Ints
    time_us: Ints
    before_us: Ints
    tile: Ints
    first: Ints
    last: Ints


@dataclass
class _Sums:
    """Exact sums of one feature of one key."""

    tiles: dict[int, int] = field(default_factory=dict)
    total: int = 0
    newest: list[tuple[int, int, int]] = field(default_factory=list)


def fits_int64(value: int) -> bool:
    """Tell whether a whole number lies in the range of int64."""
    return -(2**63) <= value < 2**63


class OverflowGuard:
    """Watches the integer sums of a sliding view."""

    def __init__(self, plan: Plan, *, keys: KeyTable, windows: WindowColumns, windowless: WindowlessColumns) -> None:
        self._plan = plan
        self._keys = keys
        self._windows = windows
        self._windowless = windowless
        self._features = [f for f in plan.features if f.is_integer_sum]

    def is_in_reach(self, rows: GuardedRows) -> bool:
        """Tell whether any sum could leave int64 in this batch, from how far sums have come and the values' sizes."""
        is_in_reach = False
        for feature in self._features:
            values = rows.columns.values(feature.source)[0]
            largest = max(int(values.max(initial=0)), -int(values.min(initial=0)))
            if feature.scope is Scope.WINDOW:
                bound = self._windows.sum_bound(feature)
            else:
                bound = self._windowless.sum_bound(feature, largest)
            is_in_reach |= not fits_int64(bound + largest * len(values))
        return is_in_reach

    def first_overflow(self, rows: GuardedRows) -> tuple[int, str] | None:
        """Find the first row that would take a sum out of int64, and that sum's name."""
        ids = self._keys.find(rows.keys)
        size = np.zeros(len(ids))
        for feature in self._features:
            values = rows.columns.values(feature.source)[0].astype(np.float64)
            own = np.bincount(rows.place, weights=np.abs(values), minlength=len(ids))
            size = np.maximum(size, own + self._kept_size(feature, ids))
        is_near = size >= _FAR
        found: list[tuple[int, str]] = []
        for key in np.flatnonzero(is_near).tolist():
            found += self._walk(rows, np.flatnonzero(rows.place == key), int(ids[key]))
        return min(found, default=None)

    def _kept_size(self, feature: PlannedFeature, ids: Ints) -> Any:
        """Sum of the sizes of what each key holds of a feature."""
        size = np.zeros(len(ids))
        known = np.flatnonzero(ids >= 0)
        if feature.scope is Scope.WINDOW:
            cells, lengths = self._windows.cells_of(ids[known])
            owner, _ = expand(lengths)
            sums = np.abs(self._windows.bank.sums(feature)[cells].astype(np.float64))
            size[known] = np.bincount(owner, weights=sums, minlength=len(known))
        elif feature.scope is Scope.LIFETIME:
            size[known] = np.abs(self._windowless.lifetime_sums(feature, ids[known]).astype(np.float64))
        else:
            size[known] = [
                sum(abs(value) for *_, value in self._windowless.newest_values(feature, key))
                for key in ids[known].tolist()
            ]
        return size

    def _walk(self, rows: GuardedRows, positions: Ints, key: int) -> Iterator[tuple[int, str]]:
        """Go through the rows of one key; the sums are exact, so this is row by row (and next to never)."""
        sums = {f.name: self._load(f, key) for f in self._features}
        newest_us = self._windowless.newest_of(key)
        for row in positions.tolist():
            time_us, before_us = int(rows.time_us[row]), int(rows.before_us[row])
            if not self._windowless.is_alive_at(newest_us, before_us):
                for feature in self._features:
                    sums[feature.name].total, sums[feature.name].newest = 0, []
                newest_us = time_us
            newest_us = max(newest_us, time_us)
            for feature in self._features:
                if not self._add(feature, sums[feature.name], rows, row):
                    yield row, feature.name
                    return

    def _load(self, feature: PlannedFeature, key: int) -> _Sums:
        if key < 0:
            return _Sums()
        if feature.scope is Scope.WINDOW:
            cells, _ = self._windows.cells_of(np.array([key]))
            tiles = self._windows.tiles.tile[cells].tolist()
            return _Sums(tiles=dict(zip(tiles, self._windows.bank.sums(feature)[cells].tolist(), strict=True)))
        if feature.scope is Scope.LIFETIME:
            return _Sums(total=int(self._windowless.lifetime_sums(feature, np.array([key]))[0]))
        return _Sums(newest=self._windowless.newest_values(feature, key))

    def _add(self, feature: PlannedFeature, sums: _Sums, rows: GuardedRows, row: int) -> bool:
        """Add a row to the sums of a feature; False if one of them would leave int64."""
        if not rows.columns.passes(feature.filter_index)[row]:
            return True
        values, is_value = rows.columns.values(feature.source)
        value = int(values[row]) if is_value[row] else 0
        if feature.scope is Scope.LIFETIME:
            sums.total += value
            return fits_int64(sums.total)
        if feature.scope is Scope.LAST:
            insort(sums.newest, (int(rows.time_us[row]), row, value))
            del sums.newest[: -feature.last]
            return fits_int64(sum(kept for *_, kept in sums.newest))
        per_slide, tile = self._plan.tiles_per_slide, int(rows.tile[row])
        for end in range(int(rows.first[row]), int(rows.last[row]) + 1):
            start, stop = end * per_slide - feature.n_tiles, end * per_slide
            if start <= tile:
                # What stands in a window was checked when it came: its sum is in range, even where a cell has wrapped.
                window = sum(total for at, total in sums.tiles.items() if start <= at < stop)
                if not fits_int64((window + 2**63) % 2**64 - 2**63 + value):
                    return False
        sums.tiles[tile] = sums.tiles.get(tile, 0) + value
        return True
