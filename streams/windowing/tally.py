"""How often each value occurs in each cell: what distinct, entropy and the extremes of text are made of.

The state is a short list of sorted runs of ``(cell, code, count)``. A batch appends one run; runs are merged when the
newer has grown to half of the older one, so that each entry is moved a logarithmic number of times.
"""

from dataclasses import dataclass
from typing import Final

import numpy as np

from streams.windowing.register import CellReads, CellRows
from streams.windowing.segment import Array, Bools, Ints, expand, find_segments, search, stable_argsort

MILLION: Final = 1_000_000
ENTROPY_DECIMALS: Final = 12
"""Entropy is rounded to this many decimals, so that the last bit of a machine's logarithm does not show."""


@dataclass(frozen=True)
class ValueCounts:
    """How often each value occurs in each query's cells, sorted by (query, code).

    Attributes:
        query: ``(n_entries,)``.
        code: ``(n_entries,)``.
        count: ``(n_entries,)`` 1 or more.
        n_queries: Number of queries.
    """

    query: Ints
    code: Ints
    count: Ints
    n_queries: int


@dataclass(frozen=True)
class TallyRows:
    """The rows of a batch that count, sorted by (cell, offset).

    Attributes:
        at: Position of each among ``CellRows``.
        cell: Cell of each.
        code: Value of each.
    """

    at: Ints
    cell: Ints
    code: Ints


Run = tuple[Ints, Ints, Ints]


class Tally:
    """Counts of the values of one column, over the rows that pass a filter, for every cell."""

    def __init__(self) -> None:
        self.runs: list[Run] = []

    def scan(self, rows: CellRows, codes: Ints, is_value: Bools) -> TallyRows:
        """Pick the rows that count; ``codes`` and ``is_value`` are in the order of ``rows``."""
        at = np.flatnonzero(is_value)
        return TallyRows(at, np.repeat(rows.cells, rows.lengths)[at], codes[at])

    def commit(self, rows: TallyRows) -> None:
        """Make the rows part of the state."""
        if len(rows.at):
            self._append(_combined(rows.cell, rows.code, np.ones(len(rows.at), dtype=np.int64)))

    def _append(self, run: Run) -> None:
        self.runs.append(run)
        while len(self.runs) > 1 and len(self.runs[-2][0]) <= 2 * len(self.runs[-1][0]):
            newer, older = self.runs.pop(), self.runs.pop()
            self.runs.append(_combined(*(np.concatenate(pair) for pair in zip(older, newer, strict=True))))

    def drop(self, is_live: Bools) -> None:
        """Forget cells that are no longer live."""
        self.runs = [tuple(part[is_live[run[0]]] for part in run) for run in self.runs]
        self.runs = [run for run in self.runs if len(run[0])]

    def move(self, cells: Ints, into: Ints) -> None:
        """Count under the cells ``into`` what has been counted under ``cells``."""
        size = 1 + max((int(run[0].max()) for run in self.runs if len(run[0])), default=0)
        target = np.full(max(size, int(cells.max(initial=-1)) + 1), -1, dtype=np.int64)
        target[cells] = into
        kept: list[Run] = []
        moved: list[Run] = []
        for cell, code, count in self.runs:
            moves = target[cell] >= 0
            kept.append((cell[~moves], code[~moves], count[~moves]))
            moved.append((target[cell[moves]], code[moves], count[moves]))
        if any(len(run[0]) for run in moved):
            self.runs = [run for run in kept if len(run[0])]
            self._append(_combined(*(np.concatenate(part) for part in zip(*moved, strict=True))))

    def of_cells(self, cells: Ints) -> ValueCounts:
        """How often each value occurs in each of these cells; a query is the position of a cell."""
        ones, nothing = np.ones(len(cells), dtype=np.int64), np.zeros(len(cells), dtype=np.int64)
        return self.read(CellReads(cells, nothing - 1, np.arange(len(cells)), ones, nothing, 0), None)

    def add(self, cell: Ints, code: Ints, count: Ints) -> None:
        """Take over counts of cells that have none."""
        if len(cell):
            self._append(_combined(cell, code, count))

    def renumber(self, number_of: Ints) -> None:
        """Number cells anew; they stay in their order."""
        self.runs = [(number_of[cell], code, count) for cell, code, count in self.runs]

    def recode(self, mapping: Ints) -> None:
        """Replace codes by other ones."""
        self.runs = [_combined(cell, mapping[code], count) for cell, code, count in self.runs]

    def read(self, reads: CellReads, rows: TallyRows | None) -> ValueCounts:
        """Count the values of each query's cells, each as of its version."""
        query = reads.owners
        parts: list[tuple[Ints, Ints, Ints]] = []
        for cells, codes, counts in self.runs:
            low = np.searchsorted(cells, reads.cells)
            owner, within = expand(np.searchsorted(cells, reads.cells, side="right") - low)
            at = low[owner] + within
            parts.append((query[owner], codes[at], counts[at]))
        if rows is not None and len(rows.at):
            touched = np.flatnonzero(reads.versions >= 0)
            order = np.argsort(rows.cell, kind="stable")
            cells = rows.cell[order]
            low = np.searchsorted(cells, reads.cells[touched])
            owner, within = expand(np.searchsorted(cells, reads.cells[touched], side="right") - low)
            at = order[low[owner] + within]
            is_before = rows.at[at] <= reads.versions[touched][owner]
            owner, at = owner[is_before], at[is_before]
            parts.append((query[touched][owner], rows.code[at], np.ones(len(at), dtype=np.int64)))
        if not parts:
            nothing = np.empty(0, dtype=np.int64)
            return ValueCounts(nothing, nothing, nothing, reads.n_queries)
        return ValueCounts(*_combined(*(np.concatenate(part) for part in zip(*parts, strict=True))), reads.n_queries)


def _combined(owner: Ints, code: Ints, count: Ints) -> Run:
    """Sort by (owner, code) and add up equal ones."""
    if not len(owner):
        return owner, code, count
    order = stable_argsort(code, int(code.max()) + 1)
    order = order[stable_argsort(owner[order], int(owner.max()) + 1)]
    owner, code = owner[order], code[order]
    starts, _ = find_segments(owner, code)
    return owner[starts], code[starts], np.add.reduceat(count[order], starts)


def quantile_ppm(q: float) -> int:
    """A quantile in millionths, which ranks are counted out by without rounding."""
    return round(q * MILLION)


def count_distinct(counts: ValueCounts) -> Ints:
    """Number of distinct values of each query."""
    return np.bincount(counts.query, minlength=counts.n_queries)


def entropy_bits(query: Ints, count: Ints, n_queries: int, *, decimals: int) -> tuple[Array, Bools]:
    """Shannon entropy of each query's values in bits, and whether it has any.

    Terms are added in ascending order of the counts, so the order of values never shows.
    """
    order = stable_argsort(count, int(count.max()) + 1) if len(count) else count
    order = order[stable_argsort(query[order], n_queries)]
    query, count = query[order], count[order].astype(np.float64)
    total = np.bincount(query, weights=count, minlength=n_queries)
    weighted = np.bincount(query, weights=count * np.log2(count), minlength=n_queries)
    has_value = total > 0
    safe = np.where(has_value, total, 1.0)
    return np.round(np.log2(safe) - weighted / safe, decimals) + 0.0, has_value


def top_entries(query: Ints, count: Ints, rank: Ints, *, n_queries: int, k: int) -> tuple[Ints, Ints]:
    """Entries of each query's ``k`` most frequent values, the most frequent first and ties by rank; and how many."""
    order = np.lexsort((rank, -count, query))
    n_values = np.bincount(query, minlength=n_queries)
    _, place = expand(n_values)
    return order[place < k], np.minimum(n_values, k)


def nth_entries(query: Ints, count: Ints, *, n_queries: int, ppm: int) -> tuple[Ints, Bools]:
    """Entry at a quantile (in millionths) of each query's values, and whether it has any.

    Entries are sorted by (query, value). The quantile is the smallest value that has at least that share of the values
    at or below it.
    """
    total = np.bincount(query, weights=count, minlength=n_queries).astype(np.int64)
    has_value = total > 0
    rank = np.maximum(-(-ppm * total // MILLION), 1)
    entry = search(np.cumsum(count), np.cumsum(total) - total + rank)
    return np.where(has_value, entry, 0), has_value


def extreme_rank(counts: ValueCounts, ranks: Ints, *, is_max: bool) -> tuple[Ints, Bools]:
    """Code of each query's smallest or largest value, and whether it has any."""
    code, has_value = np.zeros(counts.n_queries, dtype=np.int64), np.zeros(counts.n_queries, dtype=np.bool_)
    if len(counts.query):
        starts, _ = find_segments(counts.query)
        ufunc = np.maximum if is_max else np.minimum
        by_rank = np.empty(len(ranks), dtype=np.int64)
        by_rank[ranks] = np.arange(len(ranks))
        queries = counts.query[starts]
        code[queries] = by_rank[ufunc.reduceat(ranks[counts.code], starts)]
        has_value[queries] = True
    return code, has_value
