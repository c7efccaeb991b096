"""The event-time engine: rows of one topic partition in, feature rows and dead letters out.

No I/O, no clock, no Kafka: the same object is driven by agents, replay and backfill. Its output is a function of the
rows and markers it was given, never of how they were cut into batches.
"""

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from schemas.errors import WindowingError
from schemas.row import Pane
from schemas.time import END_OF_TIME_US, MINUS_INFINITY_US
from schemas.view import FeatureView
from streams.windowing.admission import Rejections, Screen
from streams.windowing.batch import InputBatch
from streams.windowing.duplicate import DuplicateMemory
from streams.windowing.idleness import IdleClock
from streams.windowing.intake import Intake, Taken
from streams.windowing.plan import compile_view
from streams.windowing.result import StepCounts, StepResult, WatermarkMarker
from streams.windowing.session_intake import SessionIntake
from streams.windowing.sliding_intake import SlidingIntake
from streams.windowing.snapshot import read_snapshot, table_from_bytes, table_to_bytes, write_snapshot


class WindowEngine:
    """Computes one view over one topic partition.

    Attributes:
        view: The definition.
        source_partition: Number of the partition.
        watermark_us: Watermark after all rows given so far.
        last_offset: Offset of the last row given; None before the first.
    """

    def __init__(self, view: FeatureView, *, source_partition: int = 0) -> None:
        self.view = view
        self.source_partition = source_partition
        self.watermark_us = MINUS_INFINITY_US
        self.last_offset: int | None = None
        self._plan = compile_view(view)
        self._screen = Screen(view.source, key=view.entity.key)
        self._idle = IdleClock(timeout_us=view.source.idle_timeout_us, is_advancing=view.source.idle_advance)
        self._duplicates = None
        if (window_us := view.source.dedup_window_us) is not None:
            reach_us = self._plan.reach_us + self._plan.allowed_lateness_us
            self._duplicates = DuplicateMemory(window_us=window_us, reach_us=reach_us)
        prefix = f"{view.source.topic}-{source_partition}-"
        make_intake = SlidingIntake if view.gap_us is None else SessionIntake
        self._intake: Intake = make_intake(self._plan, prefix=prefix, duplicates=self._duplicates)

    def step(self, batch: pa.RecordBatch | pa.Table, *, processing_time_us: int) -> StepResult:
        """Take in a batch of rows in offset order.

        Args:
            batch: The contract's columns and ``schemas.row.INPUT_COLUMNS``.
            processing_time_us: When the batch was received; only idleness depends on it.

        Raises:
            SchemaMismatchError: A column is absent or of another type.
            WindowingError: Offsets do not rise.
        """
        rows = InputBatch(batch, plan=self._plan)
        rows.check_order(self.last_offset)
        rejections = Rejections()
        screened = self._screen.check(rows.table, rejections)
        with np.errstate(all="ignore"):
            taken = self._intake.take_in(
                rows,
                np.flatnonzero(screened.is_admissible),
                screened.time_us,
                watermark_us=self.watermark_us,
                rejections=rejections,
            )
        self.watermark_us = taken.watermark_us
        if len(rows.offsets):
            self.last_offset = int(rows.offsets[-1])
            self._idle.note_rows(processing_time_us=processing_time_us, watermark_us=self.watermark_us)
        return self._result(taken, rejections.to_table(rows.offsets))

    def close(self) -> StepResult:
        """Take the watermark to the end of time and fire everything that is left."""
        return self._advance_to(END_OF_TIME_US)

    # Idleness

    @property
    def is_idle(self) -> bool:
        """Whether the partition has stopped holding back a downstream minimum of watermarks."""
        return self._idle.is_idle

    def poll_idle(self, *, processing_time_us: int, is_caught_up: bool) -> StepResult | None:
        """Say that no rows have come, and let the partition become idle when that has been so for ``idle_timeout``.

        The agent calls it between batches. Where the source sets ``idle_advance``, an idle partition's watermark moves
        on with the clock from there; the result then carries a marker, which must be written to the changelog.

        Args:
            processing_time_us: Now.
            is_caught_up: Whether every row of the partition has been given: rows that wait, or a consumer that is
                paused, are backpressure and never idleness. False restarts the wait.

        Returns:
            What the move of the watermark fired; None when it did not move.
        """
        watermark_us = self._idle.poll(
            processing_time_us=processing_time_us, is_caught_up=is_caught_up, watermark_us=self.watermark_us
        )
        if watermark_us is None or watermark_us <= self.watermark_us:
            return None
        marker = WatermarkMarker(after_offset=self.last_offset, watermark_us=watermark_us)
        return self._advance_to(watermark_us, marker=marker)

    def advance(self, marker: WatermarkMarker) -> StepResult:
        """Move the watermark as a recorded marker says; a replay calls it after the row that the marker follows.

        Raises:
            WindowingError: The last row given is not the one that the marker follows.
        """
        if marker.after_offset != self.last_offset:
            got = f"marker follows offset {marker.after_offset}, but the last row given is {self.last_offset}"
            msg = f"{got}; give it where it stands in the changelog"
            raise WindowingError(msg)
        return self._advance_to(marker.watermark_us)

    def _advance_to(self, watermark_us: int, marker: WatermarkMarker | None = None) -> StepResult:
        before_us, self.watermark_us = self.watermark_us, max(self.watermark_us, watermark_us)
        with np.errstate(all="ignore"):
            rows = self._intake.advance(before_us=before_us, after_us=self.watermark_us, last_offset=self.last_offset)
        dead_letters = Rejections().to_table(np.empty(0, dtype=np.int64))
        return self._result(Taken(rows=rows, watermark_us=self.watermark_us), dead_letters, marker=marker)

    def _result(self, taken: Taken, dead_letters: pa.Table, *, marker: WatermarkMarker | None = None) -> StepResult:
        panes = {item["values"]: item["counts"] for item in pc.value_counts(taken.rows.column("pane")).to_pylist()}
        return StepResult(
            rows=taken.rows,
            dead_letters=dead_letters,
            watermark_us=self.watermark_us,
            counts=StepCounts(
                admitted=taken.admitted,
                rejected=dead_letters.num_rows,
                partially_late=taken.partially_late,
                without_as_of=taken.without_as_of,
                early=panes.get(Pane.EARLY.value, 0),
                on_time=panes.get(Pane.ON_TIME.value, 0),
                late=panes.get(Pane.LATE.value, 0),
                empty=panes.get(Pane.EMPTY.value, 0),
            ),
            marker=marker,
        )

    # State

    def snapshot(self) -> bytes:
        """State as versioned Arrow IPC bytes; idleness is not part of it, for a restart begins a new wait."""
        tables = self._intake.to_tables()
        tables["engine"] = pa.table(
            {
                "watermark_us": pa.array([self.watermark_us], pa.int64()),
                "last_offset": pa.array([self.last_offset], pa.int64()),
            }
        )
        if self._duplicates is not None:
            id_type = self.view.source.schema.arrow_schema.field(self.view.source.event_id).type
            tables["duplicates"] = self._duplicates.to_table(id_type)
        return write_snapshot({name: table_to_bytes(t) for name, t in tables.items()}, identity=self._identity())

    @classmethod
    def restore(cls, view: FeatureView, blob: bytes, *, source_partition: int = 0) -> "WindowEngine":
        """Make an engine that goes on where a snapshot was taken.

        Raises:
            StateVersionError: The snapshot is of another format, definition, topic or partition.
        """
        engine = cls(view, source_partition=source_partition)
        sections = read_snapshot(blob, identity=engine._identity())
        engine._load({name: table_from_bytes(content) for name, content in sections.items()})
        return engine

    def _load(self, tables: dict[str, pa.Table]) -> None:
        (engine,) = tables["engine"].to_pylist()
        self.watermark_us, self.last_offset = engine["watermark_us"], engine["last_offset"]
        if self._duplicates is not None:
            self._duplicates.from_table(tables["duplicates"])
        self._intake.from_tables(tables, watermark_us=self.watermark_us)

    def _identity(self) -> dict[str, str]:
        return {
            "view": self.view.name,
            "definition_hash": self.view.definition_hash,
            "topic": self.view.source.topic,
            "partition": str(self.source_partition),
        }
