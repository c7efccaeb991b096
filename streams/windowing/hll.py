"""HyperLogLog sketches of the values of a column, for every cell: the approximate number of distinct values.

The sketches are those of the ``datasketches`` library (Flajolet et al. 2007, with the estimators of Heule et al. 2013).
They are objects, so reads go query by query: some 1 us for cells of few values, 50 us for ones of thousands.

An estimate hangs on the set of values alone. The library's better estimator would hang on their order too, and on the
order in which a small sketch keeps them inside, which changes when it is serialised; so it is not used.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from datasketches import hll_sketch, hll_union, tgt_hll_type

from streams.windowing.register import CellReads, CellRows
from streams.windowing.segment import Bools, Ints, search

_TYPE: Final = tgt_hll_type.HLL_4
"""Four bits a bucket: half the memory of eight."""


def new_sketch(lg_k: int) -> Any:
    """Make an empty sketch of ``2 ** lg_k`` buckets."""
    return hll_sketch(lg_k, _TYPE)


def to_items(values: pa.Array) -> list[Any]:
    """Values as sketches take them in; the library would pass over an empty text, so none is given to it."""
    if pa.types.is_string(values.type):
        values = pc.binary_join_element_wise("=", values, "")
    elif pa.types.is_boolean(values.type):
        values = values.cast(pa.int8())
    items: list[Any] = values.to_pylist()
    return items


def dump_sketch(sketch: Any) -> bytes:
    """Serialise a sketch."""
    dumped: bytes = sketch.serialize_compact()
    return dumped


def load_sketch(dumped: bytes) -> Any:
    """Make a sketch out of its serialised form."""
    return hll_sketch.deserialize(dumped)


def merge_sketches(*sketches: Any, lg_k: int) -> Any:
    """Merge sketches into a new one."""
    return _union(sketches, lg_k).get_result(_TYPE)


def estimate(*sketches: Any, lg_k: int) -> int:
    """Estimate how many distinct values these sketches have seen together."""
    union = _union(sketches, lg_k)
    # Merged with itself, it gives up the estimator that goes by the order of the values for the one that does not. With
    # eight bits a bucket, which is what a union has inside, that takes two thirds of the time.
    union.update(union.get_result(tgt_hll_type.HLL_8))
    n_values: float = union.get_estimate()
    return round(n_values)


def _union(sketches: Iterable[Any], lg_k: int) -> Any:
    union = hll_union(lg_k)
    for sketch in sketches:
        union.update(sketch)
    return union


@dataclass(frozen=True)
class SketchRows:
    """The rows of a batch that count, sorted by (cell, offset).

    Attributes:
        at: Position of each among ``CellRows``, rising.
        items: Their values, as sketches take them in.
        cells: ``(n_rows,)`` cell of each row of ``CellRows``, whether it counts or not.
        starts: ``(n_rows,)`` first row of that cell.
    """

    at: Ints
    items: list[Any]
    cells: Ints
    starts: Ints


class Sketches:
    """Sketches of one column, over the rows that pass a filter, for every cell that has a value."""

    def __init__(self, lg_k: int) -> None:
        self._lg_k = lg_k
        self._sketches: dict[int, Any] = {}

    def scan(self, rows: CellRows, values: pa.Array, is_value: Bools) -> SketchRows:
        """Pick the rows that count; ``values`` are in the order of the batch, ``is_value`` in that of ``rows``."""
        at = np.flatnonzero(is_value)
        items = to_items(values.take(pa.array(rows.order[at])))
        return SketchRows(at, items, np.repeat(rows.cells, rows.lengths), np.repeat(rows.starts, rows.lengths))

    def commit(self, rows: SketchRows) -> None:
        """Make the rows part of the state."""
        for cell, item in zip(rows.cells[rows.at].tolist(), rows.items, strict=True):
            sketch = self._sketches.get(cell)
            if sketch is None:
                sketch = self._sketches[cell] = new_sketch(self._lg_k)
            sketch.update(item)

    def drop(self, is_live: Bools) -> None:
        """Forget cells that are no longer live."""
        self._sketches = {cell: sketch for cell, sketch in self._sketches.items() if is_live[cell]}

    def renumber(self, number_of: Ints) -> None:
        """Number cells anew."""
        self._sketches = {int(number_of[cell]): sketch for cell, sketch in self._sketches.items()}

    def move(self, cells: Ints, into: Ints) -> None:
        """Merge the sketches of ``cells`` into those of the cells ``into``."""
        for cell, target in zip(cells.tolist(), into.tolist(), strict=True):
            sketch, known = self._sketches.pop(cell, None), self._sketches.get(target)
            if sketch is not None:
                merged = sketch if known is None else merge_sketches(known, sketch, lg_k=self._lg_k)
                self._sketches[target] = merged

    def read(self, reads: CellReads, rows: SketchRows | None) -> Ints:
        """Estimate of each query, 0 for one without a value."""
        as_of = {} if rows is None else self._as_of(np.unique(reads.versions[reads.versions >= 0]), rows)
        pairs = list(zip(reads.cells.tolist(), reads.versions.tolist(), strict=True))
        estimates = np.zeros(reads.n_queries, dtype=np.int64)
        for query, (start, length) in enumerate(zip(reads.starts.tolist(), reads.lengths.tolist(), strict=True)):
            found = [
                self._sketches.get(cell) if version < 0 else as_of[version]
                for cell, version in pairs[start : start + length * reads.stride : reads.stride]
            ]
            if some := [sketch for sketch in found if sketch is not None]:
                estimates[query] = estimate(*some, lg_k=self._lg_k)
        return estimates

    def _as_of(self, versions: Ints, rows: SketchRows) -> dict[int, Any]:
        """Sketch of a cell as of each of these rows (rising), None where it has no value yet."""
        made: dict[int, Any] = {}
        starts = rows.starts[versions]
        first, stop = search(rows.at, starts), search(rows.at, versions, side="right")
        columns = versions, rows.cells[versions], starts, first, stop
        sketch, taken, open_start = None, 0, -1
        for version, cell, start, low, high in zip(*(column.tolist() for column in columns), strict=True):
            if start != open_start:
                sketch, taken, open_start = self._sketches.get(cell), low, start
            if high > taken:
                sketch = new_sketch(self._lg_k) if sketch is None else load_sketch(dump_sketch(sketch))
                for item in rows.items[taken:high]:
                    sketch.update(item)
                taken = high
            made[version] = sketch
        return made

    def to_table(self, cells: Ints) -> pa.Table:
        """Sketches of these cells as a table; cells are named by their position."""
        found = [(row, self._sketches.get(cell)) for row, cell in enumerate(cells.tolist())]
        named = [(row, dump_sketch(sketch)) for row, sketch in found if sketch is not None]
        return pa.table(
            {
                "row": pa.array([row for row, _ in named], pa.int64()),
                "sketch": pa.array([dumped for _, dumped in named], pa.binary()),
            }
        )

    def from_table(self, table: pa.Table, cells: Ints) -> None:
        """Take over sketches; the row named ``i`` is of the cell ``cells[i]``, or of none where that is below 0."""
        rows, dumped = table.column("row").to_pylist(), table.column("sketch").to_pylist()
        for row, sketch in zip(rows, dumped, strict=True):
            if cells[row] >= 0:
                self._sketches[int(cells[row])] = load_sketch(sketch)
