"""What goes into the engine: a batch of one partition's rows in offset order, checked against its contract."""

from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from schemas.errors import SchemaMismatchError, WindowingError
from schemas.row import INPUT_COLUMNS, RECORD_COLUMNS
from streams.windowing.lookup import LookupColumns
from streams.windowing.number_text import number_texts
from streams.windowing.plan import Plan


class InputBatch:
    """Rows of one partition in offset order, each column one chunk of exactly the contract's type.

    Attributes:
        table: The input's columns and ``schemas.row.INPUT_COLUMNS``; behind a repartition topic ``RECORD_COLUMNS`` too.
        offsets: ``(n_rows,)`` int64.
    """

    def __init__(self, batch: pa.RecordBatch | pa.Table, *, plan: Plan) -> None:
        self._input = plan.view.input
        records = RECORD_COLUMNS if self._input.is_repartitioned else ()
        fields = {field.name: field for field in (*self._input.columns, *INPUT_COLUMNS, *records)}
        expected = pa.schema(fields.values())
        columns = [_column(batch, field) for field in expected]
        self.table = pa.Table.from_arrays(columns, schema=expected)
        if self.table.column("_offset").null_count:
            msg = "column `_offset` of the batch has nulls, expected the offset of each row"
            raise SchemaMismatchError(msg)
        self.offsets: npt.NDArray[np.int64] = self.table.column("_offset").to_numpy()

    def check_order(self, last_offset: int | None) -> None:
        """Refuse rows whose offsets do not rise, or that are not past ``last_offset``.

        Raises:
            WindowingError: A row was seen before, or rows were reordered on the way.
        """
        before = np.array([] if last_offset is None else [last_offset], dtype=np.int64)
        steps = np.diff(np.concatenate([before, self.offsets]))
        if len(steps) and steps.min() <= 0:
            row = int(np.argmax(steps <= 0)) + 1 - len(before)
            came_after = self.offsets[row - 1] if row else last_offset
            msg = f"offset {self.offsets[row]} came after {came_after}, expected rising offsets; seek past the last one"
            raise WindowingError(msg)

    def with_columns(self, lookups: LookupColumns, time_us: npt.NDArray[np.int64]) -> npt.NDArray[np.bool_]:
        """Add what is looked up at these event times, and tell which rows lack some of it."""
        self.table, is_missing = lookups.add(self.table, time_us)
        return is_missing

    @property
    def event_ids(self) -> pa.Array:
        """Event id of each row, by which copies are found."""
        name = "_event_id" if self._input.is_repartitioned else self._input.sources[0].event_id
        return self.table.column(name).chunk(0)

    def request_ids(self, rows: npt.NDArray[np.int64], *, prefix: str) -> pa.Array:
        """Request id of each of these rows: its own, else ``prefix`` and the offset."""
        column = self.table.column("_request_id").chunk(0)
        if column.null_count == len(column):
            return number_texts(self.offsets[rows], prefix=prefix)
        own = column.take(pa.array(rows, pa.int64()))
        return pc.coalesce(own, number_texts(self.offsets[rows], prefix=prefix)) if own.null_count else own


def _column(batch: pa.RecordBatch | pa.Table, field: pa.Field) -> Any:
    if field.name not in batch.schema.names:
        msg = f"column `{field.name}` is not in the batch ({batch.schema.names}), expected one of type {field.type}"
        raise SchemaMismatchError(msg)
    values = batch.column(field.name)
    if isinstance(values, pa.ChunkedArray):
        values = values.combine_chunks()
    if values.type == field.type:
        return values
    try:
        return pc.cast(values, field.type)
    except (pa.ArrowInvalid, pa.ArrowNotImplementedError) as exc:
        msg = f"column `{field.name}` of the batch is {values.type}, expected {field.type}: {exc}"
        raise SchemaMismatchError(msg) from exc
