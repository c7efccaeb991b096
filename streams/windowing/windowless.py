"""Last-N and lifetime features of one key: no window, evaluated wherever a row is made.

The state of a key is alive under a watermark while ``newest event time + state_ttl`` is past it. A row that finds it
dead begins anew; a row of output that finds it dead shows it empty.
"""

from bisect import insort
from dataclasses import dataclass, field
from typing import Any

from streams.windowing.accumulator import Accumulator, fits_int64, make_accumulator
from streams.windowing.plan import Plan, PlannedFeature, Scope
from streams.windowing.row import RowView


@dataclass
class WindowlessState:
    """State of the windowless features of one key.

    Attributes:
        newest_us: Event time of the key's newest row; None before its first.
        lifetime: An accumulator for each lifetime feature.
        newest: For each last-N group, its rows as ``(event time, offset, *column values)``, ascending.
    """

    newest_us: int | None = None
    lifetime: list[Accumulator] = field(default_factory=list)
    newest: list[list[tuple[Any, ...]]] = field(default_factory=list)


class WindowlessPlan:
    """How to keep and evaluate the windowless features of a view."""

    def __init__(self, plan: Plan) -> None:
        self.ttl_us = plan.view.state_ttl_us
        self.lifetime = [f for f in plan.features if f.scope is Scope.LIFETIME]
        last = [f for f in plan.features if f.scope is Scope.LAST]
        self.groups = list(dict.fromkeys((f.filter_index, f.last) for f in last))
        self.members: list[list[PlannedFeature]] = [
            [f for f in last if (f.filter_index, f.last) == group] for group in self.groups
        ]
        self.is_empty = not self.lifetime and not last

    def new_state(self) -> WindowlessState:
        """State of a key that has no row."""
        lifetime = [make_accumulator(f) for f in self.lifetime]
        return WindowlessState(None, lifetime, [[] for _ in self.groups])

    def is_alive(self, state: WindowlessState, watermark_us: int) -> bool:
        """Tell whether the state still counts under a watermark; a view without such features has none."""
        if self.is_empty:
            return False
        return state.newest_us is not None and state.newest_us + self.ttl_us > watermark_us

    def update(self, state: WindowlessState, row: RowView, *, watermark_us: int) -> None:
        """Take in a row; ``watermark_us`` is the watermark it was judged against."""
        if not self.is_alive(state, watermark_us):
            fresh = self.new_state()
            state.newest_us, state.lifetime, state.newest = None, fresh.lifetime, fresh.newest
        state.newest_us = row.time_us if state.newest_us is None else max(state.newest_us, row.time_us)
        order = (row.time_us, row.offset)
        for feature, accumulator in zip(self.lifetime, state.lifetime, strict=True):
            if row.feeds(feature):
                accumulator.update(row.value(feature), order)
        for (filter_index, size), members, rows in zip(self.groups, self.members, state.newest, strict=True):
            if row.passes(filter_index):
                insort(rows, (*order, [row.value(f) for f in members]))
                if len(rows) > size:
                    rows.pop(0)

    def overflows(self, state: WindowlessState, row: RowView, *, watermark_us: int) -> str | None:
        """Name the integer sum that the row would take out of int64, if any."""
        if not self.is_alive(state, watermark_us):
            return None
        for feature, accumulator in zip(self.lifetime, state.lifetime, strict=True):
            is_fed = feature.is_integer_sum and row.feeds(feature)
            if is_fed and not fits_int64(accumulator.integer_total() + row.value(feature)):
                return feature.name
        for (filter_index, size), members, rows in zip(self.groups, self.members, state.newest, strict=True):
            for position, feature in enumerate(members):
                if not feature.is_integer_sum or not row.passes(filter_index):
                    continue
                after = sorted(
                    [*((r[:2], r[2][position]) for r in rows), ((row.time_us, row.offset), row.value(feature))]
                )
                if not fits_int64(sum(value or 0 for _, value in after[-size:])):
                    return feature.name
        return None

    def results(self, state: WindowlessState, *, at_us: int, watermark_us: int) -> dict[str, Any]:
        """Value of each windowless feature under a watermark, evaluated at an event time."""
        if not self.is_alive(state, watermark_us):
            state = self.new_state()
        values = {f.name: a.result(at_us, 0) for f, a in zip(self.lifetime, state.lifetime, strict=True)}
        for members, rows in zip(self.members, state.newest, strict=True):
            for position, feature in enumerate(members):
                accumulator = make_accumulator(feature)
                for time_us, offset, columns in rows:
                    if feature.column is None or columns[position] is not None:
                        accumulator.update(columns[position], (time_us, offset))
                values[feature.name] = accumulator.result(at_us, 0)
        return values

    def dump(self, state: WindowlessState) -> list[Any]:
        """State as JSON values."""
        return [state.newest_us, [a.dump() for a in state.lifetime], state.newest]

    def load(self, dumped: list[Any]) -> WindowlessState:
        """State out of JSON values."""
        state = self.new_state()
        state.newest_us, lifetime, newest = dumped
        for accumulator, values in zip(state.lifetime, lifetime, strict=True):
            accumulator.load(values)
        state.newest = [[tuple(row) for row in rows] for rows in newest]
        return state
