"""Which row would take an integer sum of a session view out of int64 (see :mod:`streams.windowing.overflow`)."""

from bisect import insort
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import pyarrow as pa

from streams.windowing.columns import BatchColumns
from streams.windowing.overflow import fits_int64
from streams.windowing.plan import Plan, PlannedFeature, Scope
from streams.windowing.segment import Ints
from streams.windowing.session import SessionState


@dataclass(frozen=True)
class SessionSums:
    """The rows of a batch that are about to be taken in.

    Attributes:
        table: Their columns.
        key: Number of the key of each.
        time_us: Event times.
        before_us: Watermark that each was judged against.
        node: Cell of the session that each falls into.
        parents: The cells that each new cell is merged from.
    """

    table: pa.Table
    key: Ints
    time_us: Ints
    before_us: Ints
    node: Ints
    parents: dict[int, list[int]]


class SessionOverflowGuard:
    """Watches the integer sums of a session view."""

    def __init__(self, plan: Plan, *, state: SessionState) -> None:
        self._plan = plan
        self._state = state
        self._features = [f for f in plan.features if f.is_integer_sum]

    def first_overflow(self, rows: SessionSums) -> tuple[int, str] | None:
        """Find the first row that would take a sum out of int64, and that sum's name."""
        if not self._features or not rows.table.num_rows:
            return None
        columns = BatchColumns(rows.table, plan=self._plan, pools=self._state.pools)
        if not any(self._is_in_reach(feature, columns) for feature in self._features):
            return None
        found = [(row, f.name) for f in self._features if (row := self._walk(f, rows, columns)) is not None]
        # Of sums that the same row takes out, the one that is defined first is named.
        return min(found, key=lambda item: item[0], default=None)

    def _is_in_reach(self, feature: PlannedFeature, columns: BatchColumns) -> bool:
        """Tell whether the sum could leave int64 in this batch, from how far sums have come and the values' sizes."""
        values = columns.values(feature.source)[0]
        largest = max(int(values.max(initial=0)), -int(values.min(initial=0)))
        if feature.scope is Scope.WINDOW:
            bound = self._state.bank.sum_peak(feature) * max(int(self._state.is_live.sum()), 1)
        else:
            bound = self._state.windowless.sum_bound(feature, largest)
        return not fits_int64(bound + largest * len(values))

    def _walk(self, feature: PlannedFeature, rows: SessionSums, columns: BatchColumns) -> int | None:
        """Go through the rows, exactly; next to never."""
        passes, (values, is_value) = columns.passes(feature.filter_index), columns.values(feature.source)
        numbers = [int(v) if is_one else 0 for v, is_one in zip(values.tolist(), is_value.tolist(), strict=True)]
        add = {Scope.WINDOW: self._sessions, Scope.LIFETIME: self._lifetimes, Scope.LAST: self._newest}[feature.scope]
        return next(iter(add(feature, rows, passes.tolist(), numbers)), None)

    def _sessions(
        self, feature: PlannedFeature, rows: SessionSums, passes: list[bool], numbers: list[int]
    ) -> Iterator[int]:
        kept, totals = self._state.bank.sums(feature), dict[int, int]()
        for row, node in enumerate(rows.node.tolist()):
            for cell in (*rows.parents.get(node, ()), node):
                if cell not in totals:
                    older = rows.parents.get(cell, ())
                    totals[cell] = sum(totals[parent] for parent in older)
                    if cell < len(kept):
                        totals[cell] = int(kept[cell])
            totals[node] += numbers[row] if passes[row] else 0
            # A row that merges sessions is what takes their sum out, even where it adds nothing.
            if not fits_int64(totals[node]):
                yield row

    def _lifetimes(
        self, feature: PlannedFeature, rows: SessionSums, passes: list[bool], numbers: list[int]
    ) -> Iterator[int]:
        totals: dict[int, int] = {}
        for row, key, is_anew in self._by_key(rows):
            if is_anew:
                totals[key] = 0
            elif key not in totals:
                totals[key] = int(self._state.windowless.lifetime_sums(feature, np.array([key]))[0])
            totals[key] += numbers[row] if passes[row] else 0
            if not fits_int64(totals[key]):
                yield row

    def _newest(
        self, feature: PlannedFeature, rows: SessionSums, passes: list[bool], numbers: list[int]
    ) -> Iterator[int]:
        newest: dict[int, list[tuple[int, int, int]]] = {}
        for row, key, is_anew in self._by_key(rows):
            if is_anew:
                newest[key] = []
            elif key not in newest:
                newest[key] = self._state.windowless.newest_values(feature, key)
            if passes[row]:
                insort(newest[key], (int(rows.time_us[row]), row, numbers[row]))
                del newest[key][: -feature.last]
                if not fits_int64(sum(value for *_, value in newest[key])):
                    yield row

    def _by_key(self, rows: SessionSums) -> Iterator[tuple[int, int, bool]]:
        """Each row with its key, and whether that begins anew with it."""
        windowless = self._state.windowless
        windowless.grow(self._state.keys.capacity)
        newest_us: dict[int, int] = {}
        columns = rows.key.tolist(), rows.time_us.tolist(), rows.before_us.tolist()
        for row, (key, time_us, before_us) in enumerate(zip(*columns, strict=True)):
            known_us = newest_us.get(key, windowless.newest_of(key))
            is_anew = not windowless.is_alive_at(known_us, before_us)
            newest_us[key] = time_us if is_anew else max(known_us, time_us)
            yield row, key, is_anew
