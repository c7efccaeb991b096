"""From raw batches of one source partition to feature rows and dead letters: decode, admit, window.

Pure but for the engines' state: no I/O and no clock. The features agent, replay and backfill drive it.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from schemas.row import CONTEXT_COLUMNS, TIMESTAMP, Reason
from schemas.source import EventSource
from schemas.view import FeatureView
from streams.batch import RawBatch
from streams.decoding import arrival_times_us, decode
from streams.windowing.engine import WindowEngine
from streams.windowing.result import StepCounts

_OF_ONE_VIEW = frozenset({Reason.MISSING_KEY, Reason.DUPLICATE, Reason.LATE, Reason.OVERFLOW})


@dataclass(frozen=True, kw_only=True)
class Processed:
    """What one raw batch became.

    Attributes:
        rows: Feature rows by view name, ``view.row_schema``.
        dead_letters: :data:`schemas.row.REJECTED_COLUMNS` and ``view``, in offset order; ``view`` is null where the
            reason holds for every view of the source.
        counts: What became of the rows, by view name (see ``StepResult.counts``).
        watermarks_us: Watermark after the batch, by view name.
    """

    rows: Mapping[str, pa.Table]
    dead_letters: pa.Table
    counts: Mapping[str, StepCounts]
    watermarks_us: Mapping[str, int]


@dataclass(frozen=True, kw_only=True)
class ViewStart:
    """Where one view goes on after a restart.

    Rows from ``next_offset`` up to ``emit_from`` were already committed downstream: they are run through the engine
    again (it is deterministic) and what comes of them is dropped.

    Attributes:
        state: Snapshot of the engine, None for an empty one.
        next_offset: First source offset that is not in ``state``.
        emit_from: First source offset whose rows go out.
    """

    state: bytes | None = None
    next_offset: int = 0
    emit_from: int = 0


class PartitionPipeline:
    """One partition of a source, with one engine per view.

    Args:
        source: The event source.
        views: The views over it.
        partition: The partition.
        starts: Where each view starts; a view that is not named starts empty at the first row, emitting all.
        reject_from: First source offset whose row goes to the dead letters where it is bad for every view: a view that
            starts late goes over rows that are there already.
    """

    def __init__(
        self,
        source: EventSource,
        views: Sequence[FeatureView],
        *,
        partition: int,
        starts: Mapping[str, ViewStart] | None = None,
        reject_from: int = 0,
    ) -> None:
        self.source = source
        self.partition = partition
        self._reject_from = reject_from
        self._views = {view.name: view for view in views}
        self._starts = {view.name: (starts or {}).get(view.name, ViewStart()) for view in views}
        self._engines = {view.name: self._engine(view) for view in views}

    @property
    def resume_offset(self) -> int:
        """Source offset that the pipeline must be fed from: the earliest that one of its views still needs."""
        return min(start.next_offset for start in self._starts.values())

    def _engine(self, view: FeatureView) -> WindowEngine:
        state = self._starts[view.name].state
        if state is None:
            return WindowEngine(view, source_partition=self.partition)
        return WindowEngine.restore(view, state, source_partition=self.partition)

    def process(self, batch: RawBatch, *, processing_time_us: int, computed_time_us: int, epoch: int) -> Processed:
        """Run one raw batch through; batches come in offset order without gaps in time."""
        decoded = decode(batch, self.source.schema)
        arrived_us = arrival_times_us(batch)
        rows, counts, watermarks = {}, {}, {}
        undecoded = decoded.rejected.append_column("view", pa.nulls(decoded.rejected.num_rows, pa.string()))
        rejected = [_from_offset(undecoded, "_offset", self._reject_from)]
        seen: set[tuple[int, str]] = set()
        for name, engine in self._engines.items():
            start = self._starts[name]
            fresh = _from_offset(decoded.rows, "_offset", start.next_offset)
            result = engine.step(fresh, processing_time_us=processing_time_us)
            made = _from_offset(result.rows, "source_offset", start.emit_from)
            made = _with_arrival(made, batch, arrived_us)
            rows[name] = self._with_context(made, self._views[name], computed_time_us=computed_time_us, epoch=epoch)
            rejected.append(self._of_view(result.dead_letters, name, seen))
            counts[name] = result.counts
            watermarks[name] = result.watermark_us
        dead_letters = pa.concat_tables(rejected).sort_by("_offset")
        return Processed(rows=rows, dead_letters=dead_letters, counts=counts, watermarks_us=watermarks)

    def snapshots(self) -> dict[str, bytes]:
        """State of each engine, by view name."""
        return {name: engine.snapshot() for name, engine in self._engines.items()}

    def _of_view(self, dead_letters: pa.Table, view: str, seen: set[tuple[int, str]]) -> pa.Table:
        """Name the view where the reason is its own; keep one of each reason that holds for all views of the source."""
        emit_from = self._starts[view].emit_from
        keep, views = [], []
        for offset, reason in zip(
            dead_letters.column("_offset").to_pylist(), dead_letters.column("reason").to_pylist(), strict=True
        ):
            is_own = reason in _OF_ONE_VIEW
            is_new = offset >= (emit_from if is_own else self._reject_from)
            keep.append(is_new and (is_own or (offset, reason) not in seen))
            views.append(view if is_own else None)
            if not is_own:
                seen.add((offset, reason))
        named = dead_letters.append_column("view", pa.array(views, pa.string()))
        return named.filter(pa.array(keep, pa.bool_()))

    def _with_context(self, rows: pa.Table, view: FeatureView, *, computed_time_us: int, epoch: int) -> pa.Table:
        values: dict[str, Any] = {
            "view": view.name,
            "view_version": view.version,
            "definition_hash": view.definition_hash,
            "source_topic": self.source.topic,
            "source_partition": self.partition,
            "computed_time": computed_time_us,
            "epoch": epoch,
        }
        for field in CONTEXT_COLUMNS:
            rows = rows.append_column(field, pa.repeat(pa.scalar(values[field.name], field.type), rows.num_rows))
        return rows


def _with_arrival(rows: pa.Table, batch: RawBatch, arrived_us: NDArray[np.int64]) -> pa.Table:
    """Let ``broker_time`` say when the row that made each row came to the broker."""
    if not rows.num_rows:
        return rows
    made_by = np.searchsorted(batch.offsets, rows.column("source_offset").to_numpy())
    column = pa.array(arrived_us[made_by]).cast(TIMESTAMP)
    return rows.set_column(rows.schema.get_field_index("broker_time"), rows.schema.field("broker_time"), column)


def _from_offset(rows: pa.Table, column: str, offset: int) -> pa.Table:
    if not rows.num_rows or rows.column(column)[0].as_py() >= offset:
        return rows
    return rows.filter(pc.greater_equal(rows.column(column), offset))
