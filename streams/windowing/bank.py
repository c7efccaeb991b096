"""The aggregates of a set of features, kept for cells.

Registers and tallies are shared: the mean and the sum of a column under the same filter are made of the same two
registers.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

import numpy as np
import pyarrow as pa

from streams.windowing.columns import BatchColumns, Pools, dtype_of, lists_to_arrow, number_to_arrow
from streams.windowing.hll import Sketches, SketchRows
from streams.windowing.level import from_levels
from streams.windowing.plan import PlannedFeature
from streams.windowing.record import grown_rows
from streams.windowing.register import (
    NEVER_US,
    CellReads,
    CellRows,
    CountRegister,
    DecayRegister,
    EdgeRegister,
    MomentsRegister,
    NewestRegister,
    ReduceRegister,
    Register,
    Versions,
)
from streams.windowing.segment import Array, Bools, Ints
from streams.windowing.snapshot import Content
from streams.windowing.stored_code import CodeReader, CodeWriter
from streams.windowing.tally import (
    ENTROPY_DECIMALS,
    Tally,
    TallyRows,
    ValueCounts,
    count_distinct,
    entropy_bits,
    extreme_rank,
    nth_entries,
    quantile_ppm,
    top_entries,
)

Place = tuple[str, str | None, int | None, tuple[Any, ...]]
"""Kind of aggregate, column, filter, parameters of the kind: what two features may share."""

_SECOND_US: Final = 1_000_000
_INT64: Final = np.iinfo(np.int64)


@dataclass(frozen=True)
class _Merged:
    """What results are made of.

    Attributes:
        fold: Gives the merged state of a kind of aggregate that a feature is made of, for each query.
        at_us: Event time that each query is evaluated at.
        span_us: Length of its window.
    """

    fold: Callable[[str, PlannedFeature], Any]
    at_us: Ints
    span_us: Ints | int


@dataclass(frozen=True)
class CellMerge:
    """Cells of a batch that begin as the merger of others.

    Attributes:
        first: Number of the first of them among the cells of ``CellRows``; those that they are merged from come before.
        stop: Number after the last one.
        reads: What each is merged from, in time order.
    """

    first: int
    stop: int
    reads: CellReads


@dataclass(frozen=True)
class BankRows:
    """A batch taken in but not yet part of the state."""

    rows: CellRows
    running: dict[Place, Versions]
    tallied: dict[Place, TallyRows]
    sketched: dict[Place, SketchRows]


class CellBank:
    """Aggregates of some features, by cell."""

    def __init__(self, features: list[PlannedFeature], *, pools: Pools) -> None:
        self.features = features
        self._pools = pools
        self.registers: dict[Place, Register] = {}
        self.tallies: dict[Place, Tally] = {}
        self.sketches: dict[Place, Sketches] = {}
        self._results: dict[str, Callable[[PlannedFeature, _Merged], pa.Array]] = {
            "count": self._count,
            "sum": self._reduced,
            "mean": self._mean,
            "min": self._extreme,
            "max": self._extreme,
            "rate": self._rate,
            "time_since_last": self._age,
            "decayed_sum": self._decayed,
            "variance": self._spread,
            "stddev": self._spread,
            "first": self._edge,
            "last": self._edge,
            "distinct": self._distinct,
            "entropy": self._entropy,
            "top_k": self._top,
            "quantile": self._quantile,
            "approx_distinct": self._estimated,
        }
        for feature in features:
            self._add(feature)
        self.n_columns = 0
        for register in self.registers.values():
            register.places = {name: self.n_columns + number for number, name in enumerate(register.state)}
            self.n_columns += len(register.state)
        self._records: Ints = np.empty((0, self.n_columns), dtype=np.int64)

    def _add(self, feature: PlannedFeature) -> None:
        for kind in _KINDS[feature.function](feature):
            place = _place(kind, feature)
            if kind in _TALLIED:
                self.tallies.setdefault(place, Tally())
            elif kind == "hll":
                self.sketches.setdefault(place, Sketches(feature.parameters["lg_k"]))
            elif place not in self.registers:
                self.registers[place] = _make_register(kind, feature)

    @property
    def counts_values(self) -> bool:
        """Whether anything is counted by value."""
        return bool(self.tallies or self.sketches)

    def grow(self, capacity: int) -> None:
        """Make room for cells below ``capacity``; new ones have to be reset before they are used.

        What is kept of a cell lies side by side, as it is read: of a million keys each array costs a cache miss a cell.
        """
        self._records = grown_rows(self._records, capacity)
        for register in self.registers.values():
            register.bind(self._records)

    def renumber(self, kept: Ints, *, capacity: int) -> None:
        """Number cells anew: the cell ``kept[i]`` becomes the cell ``i``; all that hold anything are among them."""
        number_of = np.full(len(self._records), -1, dtype=np.int64)
        number_of[kept] = np.arange(len(kept))
        self._records = grown_rows(self._records.take(kept, axis=0), capacity)
        for register in self.registers.values():
            register.bind(self._records)
        for tally in self.tallies.values():
            tally.renumber(number_of)
        for sketches in self.sketches.values():
            sketches.renumber(number_of)

    def reset(self, cells: Any) -> None:
        """Make new cells empty."""
        for register in self.registers.values():
            register.reset(cells)

    def drop(self, is_live: Bools) -> None:
        """Forget cells that are no longer live."""
        for tally in self.tallies.values():
            tally.drop(is_live)
        for sketches in self.sketches.values():
            sketches.drop(is_live)

    def scan(self, columns: BatchColumns, rows: CellRows, merges: Sequence[CellMerge] = ()) -> BankRows:
        """Take in a batch: running values after each row, for reads as of it.

        Args:
            columns: Its columns.
            rows: Its rows by cell.
            merges: Cells that begin as mergers of others, in the order of ``rows``.
        """
        running: dict[Place, Versions] = {}
        for place, register in self.registers.items():
            values, is_value = self._inputs(columns, place, rows)
            if merges:
                running[place] = _scan_in_turn(register, rows, values, is_value, merges)
            else:
                running[place] = register.scan(rows, values, is_value)
        tallied = {}
        for place, tally in self.tallies.items():
            kind, column, filter_index, _ = place
            is_value = columns.is_value(column, filter_index)[rows.order]
            codes = columns.codes(column or "") if kind == "tally" else columns.levels(column or "")
            tallied[place] = tally.scan(rows, codes[rows.order], is_value)
        sketched = {}
        for place, sketches in self.sketches.items():
            _, column, filter_index, _ = place
            is_value = columns.is_value(column, filter_index)[rows.order]
            sketched[place] = sketches.scan(rows, columns.array(column or ""), is_value)
        return BankRows(rows, running, tallied, sketched)

    def _inputs(self, columns: BatchColumns, place: Place, rows: CellRows) -> Any:
        _, column, filter_index, _ = place
        is_value = columns.is_value(column, filter_index)[rows.order]
        return (is_value if column is None else columns.values(column)[0][rows.order]), is_value

    def commit(self, batch: BankRows) -> None:
        """Make a batch part of the state."""
        for place, register in self.registers.items():
            register.commit(batch.rows, batch.running[place])
        for place, tally in self.tallies.items():
            tally.commit(batch.tallied[place])
        for place, sketches in self.sketches.items():
            sketches.commit(batch.sketched[place])

    def move(self, cells: Ints, into: Ints) -> None:
        """Let cells take over what is counted by value in others; registers have been merged before."""
        for tally in self.tallies.values():
            tally.move(cells, into)
        for sketches in self.sketches.values():
            sketches.move(cells, into)

    def read(self, features: list[PlannedFeature], reads: CellReads, batch: BankRows | None) -> dict[str, pa.Array]:
        """Value of each of these features for each query."""
        folded: dict[Place, Any] = {}
        leaves = reads if reads.leaves is None else reads.leaves
        # Row by row, and not column by column: a quarter of the time, for rows lie apart.
        reads = replace(reads, gathered=self._records.take(reads.cells, axis=0))

        def fold(kind: str, feature: PlannedFeature) -> Any:
            place = _place(kind, feature)
            if place not in folded:
                if kind in _TALLIED:
                    folded[place] = self.tallies[place].read(leaves, batch.tallied[place] if batch else None)
                elif kind == "hll":
                    folded[place] = self.sketches[place].read(leaves, batch.sketched[place] if batch else None)
                else:
                    folded[place] = self.registers[place].fold(reads, batch.running[place] if batch else {})
            return folded[place]

        return {f.name: self._results[f.function](f, _Merged(fold, reads.at_us, reads.span_us)) for f in features}

    def write(
        self, cells: Ints, content: Content, *, codes: CodeWriter, name: str, owners: dict[str, pa.Array]
    ) -> None:
        """Write the state of these cells: a row of a table each (after the columns ``owners``), and its tallies."""
        columns = dict(owners)
        for number, (place, register) in enumerate(self.registers.items()):
            for part, values in register.state.items():
                chosen = values[cells]
                if part == "value" and self._is_coded(place):
                    chosen = codes.store(place[1] or "", chosen)
                columns[f"{number}.{part}"] = pa.array(chosen)
        content.tables[name] = pa.table(columns)
        content.facts[f"{name}.peaks"] = [register.peak for register in self.registers.values()]
        for number, (place, tally) in enumerate(self.tallies.items()):
            counts = tally.of_cells(cells)
            code = codes.store(place[1] or "", counts.code) if place[0] == "tally" else counts.code
            columns = {"row": pa.array(counts.query), "code": pa.array(code), "count": pa.array(counts.count)}
            content.tables[f"{name}.tally.{number}"] = pa.table(columns)
        for number, sketches in enumerate(self.sketches.values()):
            content.tables[f"{name}.hll.{number}"] = sketches.to_table(cells)

    def read_part(self, content: Content, cells: Ints, *, codes: CodeReader, name: str) -> None:
        """Take over a state: the row ``i`` becomes the cell ``cells[i]``, which is empty, or none where that is -1."""
        rows = np.flatnonzero(cells >= 0)
        peaks = content.facts[f"{name}.peaks"]
        for number, (place, register) in enumerate(self.registers.items()):
            register.peak = max(register.peak, peaks[number])
            for part, values in register.state.items():
                stored = content.column(name, f"{number}.{part}")[rows]
                is_coded = part == "value" and self._is_coded(place)
                values[cells[rows]] = codes.load(place[1] or "", stored) if is_coded else stored
        for number, (place, tally) in enumerate(self.tallies.items()):
            row, code, count = (content.column(f"{name}.tally.{number}", part) for part in ("row", "code", "count"))
            keep = cells[row] >= 0
            code = codes.load(place[1] or "", code[keep]) if place[0] == "tally" else code[keep]
            tally.add(cells[row[keep]], code, count[keep])
        for number, sketches in enumerate(self.sketches.values()):
            if (table := content.tables.get(f"{name}.hll.{number}")) is not None:
                sketches.from_table(table, cells)

    def _is_coded(self, place: Place) -> bool:
        return place[1] is not None and self._pools.is_coded(place[1])

    def sum_peak(self, feature: PlannedFeature) -> int:
        """No cell's integer sum of this feature has been further from 0 than this."""
        return self.registers[_place("sum", feature)].peak

    def sums(self, feature: PlannedFeature) -> Ints:
        """Sums of an integer sum, by cell."""
        return self.registers[_place("sum", feature)].state["value"]

    def used_codes(self, column: str) -> list[Array]:
        """Codes of a column's pool that the state holds."""
        used: list[Array] = [run[1] for tally in self._pooled_tallies(column) for run in tally.runs]
        if self._pools.is_coded(column):
            used += [
                r.state["value"] for place, r in self.registers.items() if place[1] == column and "value" in r.state
            ]
        return used

    def _pooled_tallies(self, column: str) -> list[Tally]:
        return [tally for place, tally in self.tallies.items() if place[:2] == ("tally", column)]

    def recode(self, column: str, mapping: Ints) -> None:
        """Replace the codes of a column's pool."""
        for tally in self._pooled_tallies(column):
            tally.recode(mapping)
        if self._pools.is_coded(column):
            for place, register in self.registers.items():
                if place[1] == column and "value" in register.state:
                    register.state["value"][:] = mapping[register.state["value"]]

    def _count(self, feature: PlannedFeature, merged: _Merged) -> pa.Array:
        return number_to_arrow(merged.fold("count", feature)["n"], None, feature.result_type)

    def _reduced(self, feature: PlannedFeature, merged: _Merged) -> pa.Array:
        values = merged.fold(feature.function, feature)["value"]
        return number_to_arrow(values, merged.fold("count", feature)["n"] > 0, feature.result_type)

    def _mean(self, feature: PlannedFeature, merged: _Merged) -> pa.Array:
        total = merged.fold("float_sum" if _is_integer(feature) else "sum", feature)["value"]
        n_values = merged.fold("count", feature)["n"]
        return number_to_arrow(total / np.maximum(n_values, 1), n_values > 0, feature.result_type)

    def _rate(self, feature: PlannedFeature, merged: _Merged) -> pa.Array:
        n_rows = merged.fold("count", feature)["n"]
        seconds = merged.span_us / _SECOND_US
        if feature.column is None:
            return number_to_arrow(n_rows / seconds, None, feature.result_type)
        total = merged.fold("float_sum" if _is_integer(feature) else "sum", feature)["value"]
        return number_to_arrow(total / seconds, n_rows > 0, feature.result_type)

    def _age(self, feature: PlannedFeature, merged: _Merged) -> pa.Array:
        newest_us = merged.fold("newest", feature)["value"]
        return number_to_arrow(np.maximum(merged.at_us - newest_us, 0), newest_us != NEVER_US, feature.result_type)

    def _decayed(self, feature: PlannedFeature, merged: _Merged) -> pa.Array:
        decayed = merged.fold("decayed", feature)
        return number_to_arrow(decayed["value"], decayed["has_value"], feature.result_type)

    def _extreme(self, feature: PlannedFeature, merged: _Merged) -> pa.Array:
        if not _is_coded(feature):
            return self._reduced(feature, merged)
        pool = self._pools.pools[feature.source]
        code, has_value = extreme_rank(merged.fold("tally", feature), pool.ranks(), is_max=feature.function == "max")
        return pool.decode(code, has_value)

    def _spread(self, feature: PlannedFeature, merged: _Merged) -> pa.Array:
        moments = merged.fold("moments", feature)
        variance = moments["squares"] / np.maximum(moments["n"], 1)
        values = np.sqrt(variance) if feature.function == "stddev" else variance
        return number_to_arrow(values, moments["n"] > 0, feature.result_type)

    def _edge(self, feature: PlannedFeature, merged: _Merged) -> pa.Array:
        edge = merged.fold(feature.function, feature)
        return self._pools.to_arrow(feature.source, feature.result_type, edge["value"], edge["has_value"])

    def _distinct(self, feature: PlannedFeature, merged: _Merged) -> pa.Array:
        return number_to_arrow(count_distinct(merged.fold("tally", feature)), None, feature.result_type)

    def _entropy(self, feature: PlannedFeature, merged: _Merged) -> pa.Array:
        counts: ValueCounts = merged.fold("tally", feature)
        bits = entropy_bits(counts.query, counts.count, counts.n_queries, decimals=ENTROPY_DECIMALS)
        return number_to_arrow(*bits, feature.result_type)

    def _top(self, feature: PlannedFeature, merged: _Merged) -> pa.Array:
        counts: ValueCounts = merged.fold("tally", feature)
        pool = self._pools.pools[feature.source]
        rank = pool.ranks()[counts.code] if len(counts.code) else counts.code
        k, n_queries = feature.parameters["k"], counts.n_queries
        best, lengths = top_entries(counts.query, counts.count, rank, n_queries=n_queries, k=k)
        items = pool.decode(counts.code[best], np.ones(len(best), dtype=np.bool_))
        return lists_to_arrow(items, lengths, feature.result_type)

    def _quantile(self, feature: PlannedFeature, merged: _Merged) -> pa.Array:
        counts: ValueCounts = merged.fold("levels", feature)
        ppm = quantile_ppm(feature.parameters["q"])
        entry, has_value = nth_entries(counts.query, counts.count, n_queries=counts.n_queries, ppm=ppm)
        levels = counts.code[entry] if len(counts.code) else entry
        return number_to_arrow(from_levels(levels), has_value, feature.result_type)

    def _estimated(self, feature: PlannedFeature, merged: _Merged) -> pa.Array:
        return number_to_arrow(merged.fold("hll", feature), None, feature.result_type)


def _scan_in_turn(
    register: Register, rows: CellRows, values: Array, is_value: Bools, merges: Sequence[CellMerge]
) -> Versions:
    """Scan cells, and before those that are merged from others, merge what these hold after their last row."""
    running: Versions = {name: np.empty(len(rows.order), dtype=part.dtype) for name, part in register.state.items()}

    def scan(first: int, stop: int) -> None:
        if first < stop:
            part, at = rows.part(first, stop)
            for name, scanned in register.scan(part, values[at], is_value[at]).items():
                running[name][at] = scanned

    scan(0, merges[0].first)
    for merge in merges:
        for name, merged in register.merge(merge.reads, running).items():
            register.state[name][rows.cells[merge.first : merge.stop]] = merged
        scan(merge.first, merge.stop)
    return running


def _place(kind: str, feature: PlannedFeature) -> Place:
    parameters = tuple(sorted(feature.parameters.items())) if kind in _PARAMETRIC else ()
    return kind, feature.column, feature.filter_index, parameters


def _make_register(kind: str, feature: PlannedFeature) -> Register:
    is_integer = _is_integer(feature)
    dtype: Any = np.int64 if feature.input_type is None else dtype_of(feature.input_type) or np.int64
    highest: float = _INT64.max if is_integer else np.inf
    lowest: float = _INT64.min if is_integer else -np.inf
    makers: dict[str, Callable[[], Register]] = {
        "count": CountRegister,
        "sum": lambda: ReduceRegister(np.add, neutral=0, dtype=np.int64 if is_integer else np.float64),
        "float_sum": lambda: ReduceRegister(np.add, neutral=0.0, dtype=np.float64),
        "min": lambda: ReduceRegister(np.minimum, neutral=highest, dtype=dtype),
        "max": lambda: ReduceRegister(np.maximum, neutral=lowest, dtype=dtype),
        "moments": MomentsRegister,
        "newest": NewestRegister,
        "decayed": lambda: DecayRegister(feature.parameters["half_life_us"]),
        "first": lambda: EdgeRegister(is_last=False, dtype=dtype),
        "last": lambda: EdgeRegister(is_last=True, dtype=dtype),
    }
    return makers[kind]()


def _is_integer(feature: PlannedFeature) -> bool:
    return feature.input_type is not None and bool(pa.types.is_integer(feature.input_type))


def _is_coded(feature: PlannedFeature) -> bool:
    return feature.input_type is not None and dtype_of(feature.input_type) is None


def _extreme_kinds(feature: PlannedFeature) -> list[str]:
    return ["tally"] if _is_coded(feature) else ["count", feature.function]


_TALLIED: Final = frozenset({"tally", "levels"})
"""Kinds that count by value, a code of the pool or a level."""

_PARAMETRIC: Final = frozenset({"decayed", "hll"})
"""Kinds whose state hangs on the feature's parameters."""

_KINDS: Final[dict[str, Callable[[PlannedFeature], list[str]]]] = {
    "count": lambda _: ["count"],
    "sum": lambda _: ["count", "sum"],
    "mean": lambda f: ["count", "float_sum" if _is_integer(f) else "sum"],
    "rate": lambda f: ["count"] if f.column is None else ["count", "float_sum" if _is_integer(f) else "sum"],
    "time_since_last": lambda _: ["newest"],
    "decayed_sum": lambda _: ["decayed"],
    "min": _extreme_kinds,
    "max": _extreme_kinds,
    "variance": lambda _: ["moments"],
    "stddev": lambda _: ["moments"],
    "first": lambda _: ["first"],
    "last": lambda _: ["last"],
    "distinct": lambda _: ["tally"],
    "entropy": lambda _: ["tally"],
    "top_k": lambda _: ["tally"],
    "quantile": lambda _: ["levels"],
    "approx_distinct": lambda _: ["hll"],
}
