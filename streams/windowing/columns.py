"""A batch's columns as the aggregates read them: numpy arrays, with text and lists as codes."""

from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from streams.windowing.level import to_levels
from streams.windowing.plan import Plan
from streams.windowing.segment import Array, Bools, Ints
from streams.windowing.value_pool import ValuePool


class Pools:
    """The value pools of a view: of text and list columns, and of whatever is counted by value."""

    def __init__(self, plan: Plan) -> None:
        self.pools: dict[str, ValuePool] = {}
        for feature in plan.features:
            if feature.column is None or feature.input_type is None:
                continue
            is_coded = dtype_of(feature.input_type) is None and feature.function != "approx_distinct"
            if is_coded or feature.function in {"distinct", "entropy", "top_k"}:
                self.pools.setdefault(feature.column, ValuePool(feature.input_type))

        self._coded = {name for name, pool in self.pools.items() if dtype_of(pool.arrow_type) is None}

    def is_coded(self, column: str) -> bool:
        """Tell whether the column's values are kept as codes wherever they are kept."""
        return column in self._coded

    def to_arrow(self, column: str, arrow_type: pa.DataType, values: Array, is_valid: Bools) -> pa.Array:
        """Values of a column back in Arrow; null where not valid."""
        if dtype_of(arrow_type) is None:
            return self.pools[column].decode(values.astype(np.int64, copy=False), is_valid)
        return number_to_arrow(values, is_valid, arrow_type)


class BatchColumns:
    """Columns of the admitted rows of a batch, each converted once and only if it is read."""

    def __init__(self, table: pa.Table, *, plan: Plan, pools: Pools) -> None:
        self.table = table
        self._plan = plan
        self._pools = pools
        self._values: dict[str, tuple[Array, Bools]] = {}
        self._codes: dict[str, Ints] = {}
        self._levels: dict[str, Ints] = {}
        self._masks: dict[int | None, Bools] = {None: np.ones(table.num_rows, dtype=np.bool_)}
        self._counts: dict[tuple[str | None, int | None], Bools] = {}

    def passes(self, filter_index: int | None) -> Bools:
        """Rows that pass a filter of the plan."""
        if filter_index not in self._masks and filter_index is not None:
            self._masks[filter_index] = self._plan.filters[filter_index].mask(self.table)
        return self._masks[filter_index]

    def values(self, column: str) -> tuple[Array, Bools]:
        """Values of a column and where there is one; NaN is none, like null."""
        if column not in self._values:
            self._values[column] = self._convert(column)
        return self._values[column]

    def codes(self, column: str) -> Ints:
        """Code of each value in the column's pool."""
        if column not in self._codes:
            self._codes[column] = self._pools.pools[column].encode(self.array(column))
        return self._codes[column]

    def levels(self, column: str) -> Ints:
        """Level of each value; NaN and null have one without meaning."""
        if column not in self._levels:
            values, is_value = self.values(column)
            self._levels[column] = to_levels(np.where(is_value, values, 0))
        return self._levels[column]

    def array(self, column: str) -> pa.Array:
        """A column as it came, in one chunk."""
        chunked = self.table.column(column)
        return chunked.chunk(0) if chunked.num_chunks == 1 else chunked.combine_chunks()

    def is_value(self, column: str | None, filter_index: int | None) -> Bools:
        """Rows that count in an aggregate of this column under this filter."""
        place = (column, filter_index)
        if place not in self._counts:
            passes = self.passes(filter_index)
            self._counts[place] = passes if column is None else passes & self._has_value(column)
        return self._counts[place]

    def _has_value(self, column: str) -> Bools:
        array = self.array(column)
        if dtype_of(array.type) is None:
            # Not by way of the codes, which not every aggregate of a text needs.
            is_valid: Bools = pc.is_valid(array).to_numpy(zero_copy_only=False)
            return is_valid
        return self.values(column)[1]

    def _convert(self, column: str) -> tuple[Array, Bools]:
        array = self.array(column)
        is_valid = np.ones(len(array), dtype=np.bool_)
        if array.null_count:
            is_valid = pc.is_valid(array).to_numpy(zero_copy_only=False)
        dtype: Any = dtype_of(array.type)
        if dtype is None:
            return self.codes(column), is_valid
        values = pc.fill_null(array, pa.scalar(0, pa.int8()).cast(array.type)) if array.null_count else array
        numbers = values.to_numpy(zero_copy_only=False).astype(dtype, copy=False)
        if dtype == np.float64:
            is_valid = is_valid & ~np.isnan(numbers)
        return numbers, is_valid


def dtype_of(arrow_type: pa.DataType) -> Any:
    """Numpy type in which a column's values are kept; None for those that are kept as codes."""
    if pa.types.is_floating(arrow_type):
        return np.float64
    if pa.types.is_integer(arrow_type) or pa.types.is_boolean(arrow_type):
        return np.int64
    return None


def number_to_arrow(values: Array, is_valid: Bools | None, arrow_type: pa.DataType) -> pa.Array:
    """Numbers or truth values in Arrow; null where not valid."""
    mask = None if is_valid is None or is_valid.all() else ~is_valid
    if pa.types.is_boolean(arrow_type):
        values = values.astype(np.bool_)
    return pa.array(values, arrow_type, mask=mask)


def lists_to_arrow(items: pa.Array, lengths: Ints, arrow_type: pa.DataType) -> pa.Array:
    """Lists of these lengths, one after the other out of ``items``; an empty one is null."""
    edges = np.concatenate([[0], np.cumsum(lengths)])
    offsets = pa.array(edges, pa.int32(), mask=np.append(lengths == 0, np.False_))
    return pa.ListArray.from_arrays(offsets, items).cast(arrow_type)


def take_rows(table: pa.Table, rows: Ints) -> pa.Table:
    """Rows of a table in one chunk; the table itself where these are all of them."""
    return table if len(rows) == table.num_rows else table.take(pa.array(rows))
