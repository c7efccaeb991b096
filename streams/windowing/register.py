"""Mergeable aggregates in columns: one array element for each cell (a tile of a key, or a key's lifetime).

A batch is taken in by :meth:`Register.scan`: rows sorted by cell, and within a cell by offset. It gives the running
value after each row, so that any feature can be read as of any row of the batch; :meth:`Register.commit` then makes the
last ones the state. :meth:`Register.fold` merges, for each query, the cells of its window in time order.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar, Final

import numpy as np

from streams.windowing.decay import decay
from streams.windowing.segment import Array, Bools, Ints, Steps, scan, scan_linear

NEVER_US: Final = -(2**63)
"""Event time of no row."""


@dataclass(frozen=True)
class CellRows:
    """Rows of a batch sorted by (cell, offset).

    Attributes:
        order: ``(n_rows,)`` position of each row in the batch.
        starts: First row of each cell.
        lengths: Number of rows of each cell, 1 or more.
        cells: The cell of each segment.
        time_us: ``(n_rows,)`` event times in this order.
    """

    order: Ints
    starts: Ints
    lengths: Ints
    cells: Ints
    time_us: Ints

    @cached_property
    def ends(self) -> Ints:
        """Last row of each cell."""
        return self.starts + self.lengths - 1

    def part(self, first_cell: int, stop_cell: int) -> "tuple[CellRows, slice]":
        """The rows of some cells that lie side by side, and where they are."""
        stop = int(self.starts[stop_cell]) if stop_cell < len(self.starts) else len(self.order)
        rows = slice(int(self.starts[first_cell]), stop)
        cells = slice(first_cell, stop_cell)
        starts = self.starts[cells] - self.starts[first_cell]
        return CellRows(self.order[rows], starts, self.lengths[cells], self.cells[cells], self.time_us[rows]), rows


Places = Ints | slice
"""Positions, one by one or as a range."""


@dataclass(frozen=True)
class CellReads:
    """What queries read: for each a segment of cells in time order, each in the state or as of a row of the batch.

    Attributes:
        cells: ``(n_reads,)``.
        versions: ``(n_reads,)`` row (in the order of ``CellRows``) as of which the cell is read, -1 for the state.
        starts: First read of each query.
        lengths: Number of reads of each query, 0 or more.
        at_us: Event time that each query is evaluated at.
        span_us: Length of each query's window (or of all), 0 for one without.
        leaves: The same queries over the cells that theirs were merged from in this batch, where any were: what is
            counted by value moves only when the batch becomes part of the state.
        gathered: What the state holds of each cell, ``(n_reads, n_columns)``; None: it is read from there.
        stride: How far apart the reads of a query lie: 1, or the number of queries, all of which then have as many
            reads: the first one of each query, then the second ones …
    """

    cells: Ints
    versions: Ints
    starts: Ints
    lengths: Ints
    at_us: Ints
    span_us: Ints | int
    leaves: "CellReads | None" = None
    gathered: Ints | None = None
    stride: int = 1

    @classmethod
    def side_by_side(cls, cells: Ints, versions: Ints, *, at_us: Ints, span_us: Ints | int) -> "CellReads":
        """Reads of ``cells`` and ``versions``, ``(n_steps, n_queries)``."""
        n_steps, n_queries = cells.shape
        lengths = np.full(n_queries, n_steps)
        starts = np.arange(n_queries)
        return cls(cells.ravel(), versions.ravel(), starts, lengths, at_us, span_us, stride=max(n_queries, 1))

    @cached_property
    def steps(self) -> list[tuple[Places, Places]]:
        """Queries and reads, side by side from the oldest cell on."""
        n_queries = self.n_queries
        if not len(self.cells):
            return []
        if self.stride == n_queries or (len(self.cells) == n_queries and (self.lengths == 1).all()):
            return [(slice(0, n_queries), slice(at, at + n_queries)) for at in range(0, len(self.cells), n_queries)]
        return list(Steps(self.starts, self.lengths))

    @property
    def owners(self) -> Ints:
        """Query of each read."""
        if self.stride == 1:
            return np.repeat(np.arange(self.n_queries), self.lengths)
        return np.tile(np.arange(self.n_queries), len(self.cells) // self.stride)

    @property
    def n_queries(self) -> int:
        """Number of queries."""
        return len(self.lengths)

    @cached_property
    def _running(self) -> Ints:
        return np.flatnonzero(self.versions >= 0)

    def take(self, register: "Register", name: str, running: "Versions") -> Array:
        """Value of an array of the register at each read."""
        state = register.state[name]
        if self.gathered is None:
            values = state[self.cells]
        else:
            values = self.gathered[:, register.places[name]].view(state.dtype)
        if name in running and len(self._running):
            values[self._running] = running[name][self.versions[self._running]]
        return values


Versions = dict[str, Array]


class Register(ABC):
    """One aggregate over the rows that pass a filter, for every cell.

    ``neutral`` names the state's arrays, with the value of a cell that has no row.

    Attributes:
        state: The arrays, an element for each cell.
        places: Column of each among the columns of the bank.
        peak: No integer sum of a cell has been further from 0 than this; what overflow is guarded by.
    """

    neutral: ClassVar[dict[str, Any]]

    def __init__(self, dtypes: dict[str, Any] | None = None) -> None:
        self.peak = 0
        self._dtypes = dtypes or {}
        self.places: dict[str, int] = {}
        self.state: Versions = {name: np.empty(0, dtype=self._dtype(name)) for name in self.neutral}

    def _dtype(self, name: str) -> Any:
        return self._dtypes.get(name, np.int64)

    def _empty(self, name: str) -> Any:
        return self.neutral[name]

    def bind(self, records: Ints) -> None:
        """Let the columns of these records hold the state."""
        for name, values in self.state.items():
            self.state[name] = records[:, self.places[name]].view(values.dtype)

    def reset(self, cells: Ints) -> None:
        """Make these cells empty."""
        for name, values in self.state.items():
            values[cells] = self._empty(name)

    def commit(self, rows: CellRows, running: Versions) -> None:
        """Make the last running values the state."""
        for name, values in self.state.items():
            values[rows.cells] = running[name][rows.ends]

    @abstractmethod
    def scan(self, rows: CellRows, values: Array, is_value: Bools) -> Versions:
        """Running state after each row; ``values`` and ``is_value`` (it counts) are in the order of ``rows``."""

    @abstractmethod
    def merge(self, reads: CellReads, running: Versions) -> Versions:
        """Merged state of each query: what a cell would hold that had taken in what its cells hold."""

    def fold(self, reads: CellReads, running: Versions) -> Versions:
        """What the result of each query is made of."""
        return self.merge(reads, running)


class CountRegister(Register):
    """Number of rows that count."""

    neutral: ClassVar = {"n": 0}

    def scan(self, rows: CellRows, values: Array, is_value: Bools) -> Versions:
        """Add one for each row that counts."""
        del values
        ones = is_value.astype(np.int64)
        return {"n": scan(np.add, self.state["n"][rows.cells], ones, starts=rows.starts, lengths=rows.lengths)}

    def merge(self, reads: CellReads, running: Versions) -> Versions:
        """Add up."""
        return {"n": _fold(np.add, reads, reads.take(self, "n", running), 0)}


class ReduceRegister(Register):
    """Sum, smallest or largest: one numpy function and its neutral element, in int64 or float64."""

    neutral: ClassVar = {"value": None}

    def __init__(self, ufunc: np.ufunc, *, neutral: float, dtype: Any) -> None:
        self._ufunc = ufunc
        self._neutral = neutral
        super().__init__({"value": dtype})

    def _empty(self, name: str) -> Any:
        del name
        return self._neutral

    def scan(self, rows: CellRows, values: Array, is_value: Bools) -> Versions:
        """Take in each value that counts."""
        state = self.state["value"]
        # Adding 0 makes -0.0 0.0: which of two equal zeros came first must not show.
        effective = np.where(is_value, values, self._neutral).astype(state.dtype, copy=False) + state.dtype.type(0)
        running = scan(self._ufunc, state[rows.cells], effective, starts=rows.starts, lengths=rows.lengths)
        return {"value": running}

    def commit(self, rows: CellRows, running: Versions) -> None:
        """Make the last running values the state, and note how far integer sums have come."""
        super().commit(rows, running)
        if self._ufunc is np.add and running["value"].dtype == np.int64:
            sums = running["value"]
            self.peak = max(self.peak, int(sums.max(initial=0)), -int(sums.min(initial=0)))

    def merge(self, reads: CellReads, running: Versions) -> Versions:
        """Reduce the cells."""
        values = reads.take(self, "value", running)
        return {"value": _fold(self._ufunc, reads, values, self._neutral)}


class NewestRegister(ReduceRegister):
    """Event time of the newest row that counts."""

    def __init__(self) -> None:
        super().__init__(np.maximum, neutral=NEVER_US, dtype=np.int64)

    def scan(self, rows: CellRows, values: Array, is_value: Bools) -> Versions:
        """Take in the event time of each row that counts."""
        del values
        return super().scan(rows, rows.time_us, is_value)


class DecayRegister(Register):
    """Sum of values that each halve in weight with every half-life of age, as of the newest row that counts."""

    neutral: ClassVar = {"time_us": NEVER_US, "total": 0.0}

    def __init__(self, half_life_us: int) -> None:
        self._half_life_us = half_life_us
        super().__init__({"time_us": np.int64, "total": np.float64})

    def scan(self, rows: CellRows, values: Array, is_value: Bools) -> Versions:
        """Let the sum age with each row that is newer, and add the row by its own age."""
        times = np.where(is_value, rows.time_us, NEVER_US)
        before = self.state["time_us"][rows.cells]
        newest = scan(np.maximum, before, times, starts=rows.starts, lengths=rows.lengths)
        previous = np.concatenate([newest[:1], newest[:-1]])
        previous[rows.starts] = before
        factors = decay(np.where(previous == NEVER_US, 0, newest - previous), self._half_life_us)
        weights = decay(np.where(is_value, newest - times, 0), self._half_life_us)
        terms = np.where(is_value, values * weights, 0.0)
        initial = self.state["total"][rows.cells]
        total = scan_linear(initial, factors, terms, starts=rows.starts, lengths=rows.lengths)
        return {"time_us": newest, "total": total}

    def merge(self, reads: CellReads, running: Versions) -> Versions:
        """Let the older cells age to the newest row of each later one."""
        times = reads.take(self, "time_us", running)
        totals = reads.take(self, "total", running)
        newest, total = np.full(reads.n_queries, NEVER_US, dtype=np.int64), np.zeros(reads.n_queries)
        for queries, at in reads.steps:
            is_any = times[at] != NEVER_US
            older, later = _chosen(queries, is_any), _chosen(at, is_any)
            before = newest[older]
            factor = decay(np.where(before == NEVER_US, 0, times[later] - before), self._half_life_us)
            total[older] = total[older] * factor + totals[later]
            newest[older] = times[later]
        return {"time_us": newest, "total": total}

    def fold(self, reads: CellReads, running: Versions) -> Versions:
        """Let all age to when the query is evaluated."""
        merged = self.merge(reads, running)
        newest, total = merged["time_us"], merged["total"]
        has_value = newest != NEVER_US
        age_us = np.where(has_value, np.maximum(reads.at_us - newest, 0), 0)
        return {"has_value": has_value, "value": total * decay(age_us, self._half_life_us)}


class MomentsRegister(Register):
    """Count, mean and sum of squared deviations.

    Within a cell, sums of distances from the cell's first value (``shift``) and of their squares are kept, so that
    plain sums do; cells are merged by Chan's formula (Chan, Golub, LeVeque 1979).
    """

    neutral: ClassVar = {"n": 0, "shift": 0.0, "sum": 0.0, "squares": 0.0}

    def __init__(self) -> None:
        super().__init__({"n": np.int64, "shift": np.float64, "sum": np.float64, "squares": np.float64})

    def scan(self, rows: CellRows, values: Array, is_value: Bools) -> Versions:
        """Take in each value that counts."""
        state, shape = self.state, {"starts": rows.starts, "lengths": rows.lengths}
        n_before = state["n"][rows.cells]
        positions = np.where(is_value, np.arange(len(values)), len(values))
        first = np.minimum.reduceat(positions, rows.starts) if len(rows.starts) else rows.starts
        has_first = first <= rows.ends
        shift = state["shift"][rows.cells]
        is_new = (n_before == 0) & has_first
        shift[is_new] = values[first[is_new]]
        shifts = np.repeat(shift, rows.lengths)
        distance = np.where(is_value, values - shifts, 0.0)
        return {
            "n": scan(np.add, n_before, is_value.astype(np.int64), **shape),
            "shift": shifts,
            "sum": scan(np.add, state["sum"][rows.cells], distance, **shape),
            "squares": scan(np.add, state["squares"][rows.cells], distance * distance, **shape),
        }

    def merge(self, reads: CellReads, running: Versions) -> Versions:
        """Merge the moments of the cells; the mean is what further values are then measured from."""
        part = {name: reads.take(self, name, running) for name in self.state}
        n_part = part["n"]
        divisor = np.maximum(n_part, 1)
        mean_part = part["shift"] + part["sum"] / divisor
        squares_part = np.maximum(part["squares"] - part["sum"] * part["sum"] / divisor, 0.0)
        n, mean = np.zeros(reads.n_queries, dtype=np.int64), np.zeros(reads.n_queries)
        squares = np.zeros(reads.n_queries)
        for queries, at in reads.steps:
            n_old, n_new = n[queries], n[queries] + n_part[at]
            weight = n_part[at] / np.maximum(n_new, 1)
            is_first = n_old == 0
            delta = np.where(is_first | (n_part[at] == 0), 0.0, mean_part[at] - mean[queries])
            mean[queries] = np.where(is_first, mean_part[at], mean[queries] + delta * weight)
            squares[queries] += squares_part[at] + delta * delta * n_old * weight
            n[queries] = n_new
        return {"n": n, "shift": mean, "sum": np.zeros(reads.n_queries), "squares": squares}


class EdgeRegister(Register):
    """Value of the oldest or newest row by (event time, offset).

    Rows come in offset order, so among equal event times the newest row is the one that came last, the oldest the one
    that
    came first: offsets need not be kept.
    """

    neutral: ClassVar = {"time_us": None, "value": 0}

    def __init__(self, *, is_last: bool, dtype: Any) -> None:
        self._is_last = is_last
        self._never = -(2**63) if is_last else 2**63 - 1
        super().__init__({"time_us": np.int64, "value": dtype})

    def _empty(self, name: str) -> Any:
        return self._never if name == "time_us" else 0

    def scan(self, rows: CellRows, values: Array, is_value: Bools) -> Versions:
        """Let each row that counts replace an older (or newer) one."""
        ufunc = np.maximum if self._is_last else np.minimum
        times = np.where(is_value, rows.time_us, self._never)
        before = self.state["time_us"][rows.cells]
        running = scan(ufunc, before, times, starts=rows.starts, lengths=rows.lengths)
        previous = np.concatenate([running[:1], running[:-1]])
        previous[rows.starts] = before
        replaces = is_value & (times >= previous if self._is_last else times < previous)
        latest = np.maximum.accumulate(np.where(replaces, np.arange(len(values)), -1))
        is_own = latest >= np.repeat(rows.starts, rows.lengths)
        old = np.repeat(self.state["value"][rows.cells], rows.lengths)
        return {"time_us": running, "value": np.where(is_own, values[latest], old)}

    def merge(self, reads: CellReads, running: Versions) -> Versions:
        """Take the newest (or oldest) cell that has a value; cells come in time order."""
        times = reads.take(self, "time_us", running)
        values = reads.take(self, "value", running)
        time_us = np.full(reads.n_queries, self._never, dtype=np.int64)
        chosen = np.zeros(reads.n_queries, dtype=values.dtype)
        for queries, at in reads.steps:
            takes = times[at] != self._never
            if not self._is_last:
                takes &= time_us[queries] == self._never
            older, later = _chosen(queries, takes), _chosen(at, takes)
            chosen[older] = values[later]
            time_us[older] = times[later]
        return {"time_us": time_us, "value": chosen}

    def fold(self, reads: CellReads, running: Versions) -> Versions:
        """The value of that cell, and whether there is one."""
        merged = self.merge(reads, running)
        return {"has_value": merged["time_us"] != self._never, "value": merged["value"]}


def _chosen(places: Places, is_chosen: Bools) -> Ints:
    """Some of these positions."""
    return places.start + np.flatnonzero(is_chosen) if isinstance(places, slice) else places[is_chosen]


def _fold(ufunc: np.ufunc, reads: CellReads, values: Array, neutral: float) -> Array:
    result = np.full(reads.n_queries, neutral, dtype=values.dtype)
    for queries, at in reads.steps:
        result[queries] = ufunc(result[queries], values[at])
    return result
