"""The event-time engine: rows of one topic partition in, feature rows and dead letters out.

No I/O, no clock, no Kafka: the same object is driven by agents, replay and backfill. Its output is a function of the rows
and markers it was given, never of how they were cut into batches.
"""

import json
from collections import Counter
from typing import Any

import numpy as np
import pyarrow as pa

from schemas.row import Pane, Reason
from schemas.time import END_OF_TIME_US, MINUS_INFINITY_US, format_rfc3339
from schemas.view import FeatureView
from streams.windowing.admission import Rejections, Screen
from streams.windowing.batch import InputBatch
from streams.windowing.duplicate import DuplicateMemory
from streams.windowing.plan import compile_view
from streams.windowing.result import StepCounts, StepResult, WatermarkMarker
from streams.windowing.row import RowSink, RowView
from streams.windowing.sliding import SlidingState
from streams.windowing.snapshot import read_snapshot, write_snapshot


class WindowEngine:
    """Computes one view over one topic partition."""

    def __init__(self, view: FeatureView, *, source_partition: int = 0) -> None:
        self.view = view
        self.source_partition = source_partition
        self.watermark_us = MINUS_INFINITY_US
        self.last_offset: int | None = None
        self._plan = compile_view(view)
        self._screen = Screen(view.source, key=view.entity.key)
        self._prefix = f"{view.source.topic}-{source_partition}-"
        self._state = SlidingState(self._plan)
        self._duplicates = None
        if (window_us := view.source.dedup_window_us) is not None:
            self._duplicates = DuplicateMemory(
                window_us=window_us, reach_us=self._plan.reach_us + self._plan.allowed_lateness_us
            )
        self._active_since_us: int | None = None

    def step(self, batch: pa.RecordBatch | pa.Table, *, processing_time_us: int) -> StepResult:
        """Take in a batch of rows in offset order.

        Args:
            batch: The contract's columns and ``schemas.row.INPUT_COLUMNS``.
            processing_time_us: When the batch was received; only idleness depends on it.

        Raises:
            SchemaMismatchError: A column is absent or of another type.
            WindowingError: Offsets do not rise.
        """
        source = self.view.source
        rows = InputBatch(batch, plan=self._plan)
        rows.check_order(self.last_offset)
        if len(rows.offsets):
            self._active_since_us = processing_time_us
        rejections = Rejections()
        sink = RowSink(self._plan)
        screened = self._screen.check(rows.table, rejections)
        view = RowView(rows, plan=self._plan, time_us=screened.time_us)
        ids = None if source.event_id is None else rows.table.column(source.event_id).to_pylist()
        partially_late = without_as_of = admitted = 0
        state = self._state
        for index in np.flatnonzero(screened.is_admissible).tolist():
            view.move_to(index)
            before_us, key = self.watermark_us, view.keys[index]
            if self._duplicates is not None and ids is not None:
                self._duplicates.forget(before_us)
                if self._duplicates.is_duplicate(ids[index], view.time_us, watermark_us=before_us):
                    rejections.add(
                        index,
                        Reason.DUPLICATE,
                        f"`{source.event_id}` {ids[index]!r} was admitted inside {source.dedup_window}",
                    )
                    continue
            if state.is_late(view, before_us):
                rejections.add(
                    index,
                    Reason.LATE,
                    f"all its windows had expired at the watermark {format_rfc3339(before_us)}",
                    late_by_us=before_us - view.time_us,
                )
                continue
            if (overflown := state.overflows(view, key, before_us)) is not None:
                rejections.add(index, Reason.OVERFLOW, f"`{overflown}` would leave int64")
                continue
            admitted += 1
            after_us = max(before_us, view.time_us - source.max_out_of_orderness_us)
            partially_late += state.is_partially_late(view, before_us)
            state.apply(view, key, before_us, after_us)
            state.advance(before_us, after_us, index, sink)
            self.watermark_us = after_us
            if self._duplicates is not None and ids is not None:
                self._duplicates.add(ids[index], view.time_us)
            if self.view.emit != "on_close":
                if state.has_as_of(view, before_us):
                    state.as_of(view, key, after_us, sink)
                else:
                    without_as_of += 1
        if len(rows.offsets):
            self.last_offset = int(rows.offsets[-1])
        table = sink.to_table(rows, prefix=self._prefix, last_offset=self.last_offset)
        return self._result(
            table,
            rejections.to_table(rows.offsets),
            admitted=admitted,
            partially_late=partially_late,
            without_as_of=without_as_of,
        )

    def advance(self, marker: WatermarkMarker) -> StepResult:
        """Move the watermark as a recorded marker says; a replay calls it where the marker stands in the changelog."""
        return self._advance_to(marker.watermark_us)

    def close(self) -> StepResult:
        """Take the watermark to the end of time and fire everything that is left."""
        return self._advance_to(END_OF_TIME_US)

    def _advance_to(self, watermark_us: int, marker: WatermarkMarker | None = None) -> StepResult:
        sink = RowSink(self._plan)
        before_us, self.watermark_us = self.watermark_us, max(self.watermark_us, watermark_us)
        self._state.advance(before_us, self.watermark_us, -1, sink)
        table = sink.to_table(None, prefix=self._prefix, last_offset=self.last_offset)
        return self._result(table, Rejections().to_table(np.empty(0, dtype=np.int64)), marker=marker)

    def _result(
        self, table: pa.Table, dead: pa.Table, marker: WatermarkMarker | None = None, **counts: int
    ) -> StepResult:
        panes = Counter(table.column("pane").to_pylist())
        return StepResult(
            rows=table,
            dead_letters=dead,
            watermark_us=self.watermark_us,
            counts=StepCounts(
                rejected=dead.num_rows,
                early=panes[Pane.EARLY],
                on_time=panes[Pane.ON_TIME],
                late=panes[Pane.LATE],
                empty=panes[Pane.EMPTY],
                **counts,
            ),
            marker=marker,
        )

    def snapshot(self) -> bytes:
        """State as versioned Arrow IPC bytes."""
        state: dict[str, Any] = {
            "watermark_us": self.watermark_us,
            "last_offset": self.last_offset,
            "state": self._state.dump(),
            "duplicates": None if self._duplicates is None else self._duplicates.dump(),
        }
        return write_snapshot({"rows": json.dumps(state).encode()}, identity=self._identity)

    @classmethod
    def restore(cls, view: FeatureView, blob: bytes, *, source_partition: int = 0) -> "WindowEngine":
        """Make an engine that goes on where a snapshot was taken.

        Raises:
            StateVersionError: The snapshot is of another format, definition, topic or partition.
        """
        engine = cls(view, source_partition=source_partition)
        state = json.loads(read_snapshot(blob, identity=engine._identity)["rows"])
        engine.watermark_us, engine.last_offset = state["watermark_us"], state["last_offset"]
        engine._state.load(state["state"])
        if engine._duplicates is not None:
            engine._duplicates.load(state["duplicates"])
        return engine

    @property
    def _identity(self) -> dict[str, str]:
        return {
            "view": self.view.name,
            "definition_hash": self.view.definition_hash,
            "topic": self.view.source.topic,
            "partition": str(self.source_partition),
        }
