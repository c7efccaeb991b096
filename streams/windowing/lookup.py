"""Columns of reference tables beside the rows of a batch: of each key, the newest row that holds at the event's time.

Rows of a reference are sorted once by (key, time). Keys become dense numbers column by column, times their rank among
all times of the reference, so that both together are one whole number, and a batch is one binary search.
"""

from collections.abc import Mapping

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from schemas.reference import ReferenceLookup
from streams.windowing.segment import Bools, Ints


class LookupColumns:
    """Adds the columns of the lookups of a view."""

    def __init__(self, lookups: Mapping[str, ReferenceLookup]) -> None:
        self._indexes = {name: _Index(lookup) for name, lookup in lookups.items()}

    def add(self, table: pa.Table, time_us: Ints) -> tuple[pa.Table, Bools]:
        """Add the columns, named ``<lookup>_<column>``; null where there is no row.

        Args:
            table: The rows, each column one chunk.
            time_us: Their event times.

        Returns:
            The table, and where some reference has no row.
        """
        is_missing = np.zeros(table.num_rows, dtype=np.bool_)
        for name, index in self._indexes.items():
            at = index.find(table, time_us)
            is_missing |= at < 0
            rows = pa.array(at, mask=at < 0)
            for field in index.values.schema:
                column = index.values.column(field.name).chunk(0).take(rows)
                table = table.append_column(f"{name}_{field.name}", column)
        return table, is_missing


class _Index:
    """Rows of a reference by key and time."""

    def __init__(self, lookup: ReferenceLookup) -> None:
        reference = lookup.reference
        table = reference.table
        self._on = lookup.on
        self._max_age_us = lookup.max_age_us
        self._key_values = [pc.unique(table.column(key).combine_chunks()) for key in reference.keys]
        valid_from_us = np.zeros(table.num_rows, dtype=np.int64)
        self._has_times = reference.valid_from is not None
        if reference.valid_from is not None:
            valid_from_us = table.column(reference.valid_from).to_numpy()
        self._times_us = np.unique(valid_from_us)
        code, _ = self._codes([table.column(key).combine_chunks() for key in reference.keys])
        place = code * (len(self._times_us) + 1) + np.searchsorted(self._times_us, valid_from_us) + 1
        order = np.argsort(place)
        self._code, self._place, self._valid_from_us = code[order], place[order], valid_from_us[order]
        # One chunk, if only of nothing.
        columns = [table.column(name).combine_chunks().take(pa.array(order)) for name in reference.value_schema.names]
        self.values = pa.table(columns, schema=reference.value_schema)

    def _codes(self, columns: list[pa.Array]) -> tuple[Ints, Bools]:
        """Number of each key, and where there is one; it means nothing elsewhere."""
        code = np.zeros(len(columns[0]), dtype=np.int64)
        is_known = np.ones(len(columns[0]), dtype=np.bool_)
        for column, known in zip(columns, self._key_values, strict=True):
            number = pc.fill_null(pc.index_in(column, value_set=known, skip_nulls=True), -1).to_numpy()
            is_known &= number >= 0
            code = code * (len(known) + 1) + number
        return code, is_known

    def find(self, table: pa.Table, time_us: Ints) -> Ints:
        """Row for each event, -1 for none."""
        code, is_known = self._codes([table.column(name).chunk(0) for name in self._on])
        rank = np.searchsorted(self._times_us, time_us, side="right")
        if not self._has_times:
            rank = np.full(len(code), len(self._times_us))
        at = np.searchsorted(self._place, code * (len(self._times_us) + 1) + rank, side="right") - 1
        if not len(self._place):
            return np.full(len(code), -1)
        is_found = is_known & (at >= 0) & (self._code[at] == code)
        if self._max_age_us is not None:
            is_found &= time_us - self._valid_from_us[at] < self._max_age_us
        found: Ints = np.where(is_found, at, -1)
        return found
