"""What the engine needs of the part that takes rows in, for either kind of view."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from schemas.row import MASK, Reason
from schemas.time import END_OF_TIME_US, MINUS_INFINITY_US, format_duration, format_rfc3339
from schemas.view import FeatureView
from streams.windowing.admission import Rejections
from streams.windowing.batch import InputBatch
from streams.windowing.plan import Plan, Scope
from streams.windowing.result import LAST_DATETIME_US
from streams.windowing.segment import Ints
from streams.windowing.snapshot import Content, Selection


@dataclass(frozen=True, kw_only=True)
class Taken:
    """What became of a batch.

    Attributes:
        rows: Rows of output, in order, with the view's ``engine_schema``.
        watermark_us: Watermark after the batch.
        admitted: Rows admitted.
        partially_late: Of those, the ones for which some of their windows had expired.
        without_as_of: Of those, the ones that get no as-of row though the emit mode asks for them.
    """

    rows: pa.Table
    watermark_us: int
    admitted: int = 0
    partially_late: int = 0
    without_as_of: int = 0


class Intake(Protocol):
    """State of a view over one partition, and how rows get into it."""

    def take_in(
        self,
        batch: InputBatch,
        candidates: Ints,
        time_us: Ints,
        *,
        watermark_us: int,
        moved_us: Ints | None,
        rejections: Rejections,
    ) -> Taken:
        """Judge rows in offset order against the watermark, reject or admit each, and give what they fire.

        Args:
            batch: The batch.
            candidates: Positions of the rows that passed the screen.
            time_us: Event time of each row of the batch.
            watermark_us: Watermark before the batch.
            moved_us: Where each record of the batch moves it to, before it is judged; None where rows move it by their
                own times. At least one record then.
            rejections: Where rejected rows are added.
        """

    def advance(self, *, before_us: int, after_us: int, last_offset: int | None) -> pa.Table:
        """Move the watermark without a row and give what that fires."""

    def write(self, selection: Selection) -> Content:
        """Write the selected state: all of it, that of the keys of a bucket, or what is new since ``mark_told``."""

    def mark_told(self) -> None:
        """Begin to note changes anew."""

    def read(self, contents: Iterable[Content], *, watermark_us: int) -> None:
        """Make parts, the newest first, the state of a view that has none; ``watermark_us`` is that of the newest."""


class OutputTable:
    """Adds to rows of output what is known of the rows that made them."""

    def __init__(self, plan: Plan, *, prefix: str) -> None:
        self._schema = plan.view.engine_schema
        self._derived = plan.view.derived
        self._inputs = [plan.key, *(f.name for f in plan.features if f.scope is not Scope.DERIVED)]
        self._prefix = prefix

    def of_batch(self, columns: dict[str, pa.Array], makers: Ints, batch: InputBatch) -> pa.Table:
        """Rows made by rows of a batch; ``makers`` are positions in it."""
        made = {
            "source_offset": pa.array(batch.offsets[makers], pa.int64()),
            "broker_time": batch.table.column("_broker_time").chunk(0).take(pa.array(makers, pa.int64())),
            "request_id": batch.request_ids(makers, prefix=self._prefix),
        }
        return self._lay_out(columns | made)

    def of_step(self, columns: dict[str, pa.Array], *, last_offset: int | None) -> pa.Table:
        """Rows made by a step of the watermark without a row: they carry the last offset before it."""
        n_rows = len(columns["pane"])
        request_id = None if last_offset is None else f"{self._prefix}{last_offset}"
        made = {
            "source_offset": pa.array([last_offset] * n_rows, pa.int64()),
            "broker_time": pa.nulls(n_rows, pa.int64()),
            "request_id": pa.array([request_id] * n_rows, pa.string()),
        }
        return self._lay_out(columns | made)

    def _lay_out(self, columns: dict[str, pa.Array]) -> pa.Table:
        if self._derived:
            columns |= self._derive(columns)
        watermark_us = pc.cast(columns["watermark"], pa.int64()).to_numpy()
        columns["watermark"] = pa.array(
            np.minimum(watermark_us, LAST_DATETIME_US), mask=watermark_us <= MINUS_INFINITY_US
        )
        return pa.Table.from_arrays(
            [_without_non_finite(columns[f.name].cast(f.type)) for f in self._schema], schema=self._schema
        )

    def _derive(self, columns: dict[str, pa.Array]) -> dict[str, pa.Array]:
        """Derived features of each row of output, of the features as they stand in it."""
        inputs = {name: columns[name].cast(self._schema.field(name).type) for name in self._inputs}
        table = pa.table({name: _without_non_finite(column) for name, column in inputs.items()})
        for name, expression in self._derived.items():
            table = table.append_column(name, _without_non_finite(expression.column(table)))
        return {name: table.column(name).combine_chunks() for name in self._derived}


def _without_non_finite(column: pa.Array) -> pa.Array:
    """Let NaN and the infinities be null, in lists too: JSON has no number for them, and every store has to agree."""
    if pa.types.is_list(column.type):
        values = _without_non_finite(column.values)
        if values.null_count == column.values.null_count:
            return column
        mask = column.is_null() if column.null_count else None
        return pa.ListArray.from_arrays(column.offsets, values, type=column.type, mask=mask)
    if not pa.types.is_floating(column.type):
        return column
    is_finite = pc.is_finite(column)
    if pc.all(is_finite, min_count=0).as_py():
        return column
    return pc.if_else(is_finite, column, pa.scalar(None, column.type))


def explain_duplicate(view: FeatureView, row: int, batch: InputBatch, rejections: Rejections) -> None:
    """Reject a row that repeats an admitted one."""
    source = view.sources[0]
    if view.input.is_repartitioned:
        source = view.input.source(batch.table.column("_source")[row].as_py())
    event_id = batch.table.column(source.event_id)[row].as_py()
    shown = MASK if source.event_id in source.schema.personal else repr(event_id)
    detail = f"`{source.event_id}` {shown} was admitted before, less than {source.dedup_window} apart"
    rejections.add(row, Reason.DUPLICATE, detail)


def explain_late(view: FeatureView, row: int, time_us: int, watermark_us: int, rejections: Rejections) -> None:
    """Reject a row whose windows had all expired."""
    because = f"its windows had expired: {_watermark(watermark_us)}, allowed lateness {view.allowed_lateness}"
    rejections.add(row, Reason.LATE, because, late_by_us=min(watermark_us - time_us, END_OF_TIME_US))


def explain_forgotten(row: int, time_us: int, watermark_us: int, rejections: Rejections, *, told_us: int) -> None:
    """Reject a row, late by more than ``told_us``, that a copy of it can't be told from any more."""
    because = (
        f"its event time is too old to tell it from a copy: {_watermark(watermark_us)}, expected less than "
        f"{format_duration(told_us)} after it (dedup_window, gap and allowed lateness)"
    )
    rejections.add(row, Reason.LATE, because, late_by_us=min(watermark_us - time_us, END_OF_TIME_US))


def _watermark(watermark_us: int) -> str:
    return f"watermark {format_rfc3339(min(watermark_us, LAST_DATETIME_US))}"


def explain_overflow(row: int, feature: str, rejections: Rejections) -> None:
    """Reject a row that would take an integer sum out of int64."""
    rejections.add(row, Reason.OVERFLOW, f"the sum `{feature}` would leave the range of int64")
