"""The event-time engine: rows of one topic partition in, feature rows and dead letters out.

No I/O, no clock, no Kafka: the same object is driven by agents, replay and backfill. Its output is a function of the
rows and markers it was given, never of how they were cut into batches.
"""

from collections.abc import Iterable, Iterator
from itertools import chain

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from schemas.errors import WindowingError
from schemas.row import Pane
from schemas.time import END_OF_TIME_US, MINUS_INFINITY_US
from schemas.view import FeatureView
from streams.windowing.admission import Rejections, Screen, read_admitted
from streams.windowing.batch import InputBatch
from streams.windowing.bucket import N_BUCKETS
from streams.windowing.duplicate import DuplicateMemory
from streams.windowing.idleness import IdleClock
from streams.windowing.input_watermark import InputWatermarks
from streams.windowing.intake import Intake, Taken
from streams.windowing.lookup import LookupColumns
from streams.windowing.plan import compile_view
from streams.windowing.result import StepCounts, StepResult, WatermarkMarker
from streams.windowing.session_intake import SessionIntake
from streams.windowing.sliding_intake import SlidingIntake
from streams.windowing.snapshot import (
    Content,
    PartHeader,
    PartKind,
    Selection,
    newest_first,
    read_header,
    read_part,
    write_part,
)


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
        self._n_changes = 0
        self._has_untold = False
        self._plan = compile_view(view)
        self._inputs: InputWatermarks | None = None
        if view.input.is_repartitioned:
            self._inputs = InputWatermarks([source.topic for source in view.sources])
        self._lookups = LookupColumns(view.lookups) if view.lookups else None
        source = view.sources[0]
        self._screen = Screen(source, key=view.entity.key)
        # Behind a repartition topic, whoever reads a source says when it is idle.
        timeout_us = None if self._inputs is not None else source.idle_timeout_us
        self._idle = IdleClock(timeout_us=timeout_us, is_advancing=source.idle_advance)
        self._duplicates = None
        if (window_us := view.input.dedup_window_us) is not None:
            reach_us = self._plan.reach_us + self._plan.allowed_lateness_us
            if view.gap_us is not None:
                # A session takes in rows that are up to the window older than the id that they repeat.
                reach_us += window_us
            self._duplicates = DuplicateMemory(window_us=window_us, reach_us=reach_us)
        prefix = f"{view.input.topic}-{source_partition}-"
        make_intake = SlidingIntake if view.gap_us is None else SessionIntake
        self._intake: Intake = make_intake(self._plan, prefix=prefix, duplicates=self._duplicates)

    def step(self, batch: pa.RecordBatch | pa.Table, *, processing_time_us: int) -> StepResult:
        """Take in a batch of rows in offset order.

        Args:
            batch: The input's columns and ``schemas.row.INPUT_COLUMNS``; behind a repartition topic ``RECORD_COLUMNS``
                too, of rows that have been admitted before they were sent there.
            processing_time_us: When the batch was received; only idleness depends on it.

        Raises:
            SchemaMismatchError: A column is absent or of another type.
            WindowingError: Offsets do not rise.
        """
        rows = InputBatch(batch, plan=self._plan)
        rows.check_order(self.last_offset)
        rejections = Rejections()
        moved_us = None
        if self._inputs is None:
            screened = self._screen.check(rows.table, rejections)
        else:
            screened = read_admitted(rows.table)
            if len(rows.offsets):
                moved_us = self._inputs.move(rows.table, watermark_us=self.watermark_us)
        candidates = np.flatnonzero(screened.is_admissible)
        without_reference = 0
        if self._lookups is not None:
            without_reference = int(rows.with_columns(self._lookups, screened.time_us)[candidates].sum())
        with np.errstate(all="ignore"):
            taken = self._intake.take_in(
                rows,
                candidates,
                screened.time_us,
                watermark_us=self.watermark_us,
                moved_us=moved_us,
                rejections=rejections,
            )
        self.watermark_us = taken.watermark_us
        if len(rows.offsets):
            self.last_offset = int(rows.offsets[-1])
            self._has_untold = True
            self._idle.note_rows(processing_time_us=processing_time_us, watermark_us=self.watermark_us)
        return self._result(taken, rejections.to_table(rows.offsets), without_reference=without_reference)

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
        self._has_untold = True
        with np.errstate(all="ignore"):
            rows = self._intake.advance(before_us=before_us, after_us=self.watermark_us, last_offset=self.last_offset)
        dead_letters = Rejections().to_table(np.empty(0, dtype=np.int64))
        return self._result(Taken(rows=rows, watermark_us=self.watermark_us), dead_letters, marker=marker)

    def _result(
        self,
        taken: Taken,
        dead_letters: pa.Table,
        *,
        marker: WatermarkMarker | None = None,
        without_reference: int = 0,
    ) -> StepResult:
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
                without_reference=without_reference,
                early=panes.get(Pane.EARLY.value, 0),
                on_time=panes.get(Pane.ON_TIME.value, 0),
                late=panes.get(Pane.LATE.value, 0),
                empty=panes.get(Pane.EMPTY.value, 0),
            ),
            marker=marker,
        )

    # State

    def snapshot(self) -> bytes:
        """All of the state, as versioned Arrow IPC bytes; idleness is not part of it: a restart begins a new wait."""
        return self._write(Selection(PartKind.WHOLE))

    def changes(self) -> bytes:
        """What has changed since the last call; of a new engine, since it began.

        It costs what has changed: keys that got a row, and of those only the tiles and panes that changed; what is gone
        costs nothing. Each call gives the next number to what it tells (see ``read_header``), so the bytes must be
        kept; where they were lost, the engine has to be restored from what was kept.
        """
        self._n_changes += 1
        blob = self._write(Selection(PartKind.CHANGES))
        self._intake.mark_told()
        if self._duplicates is not None:
            self._duplicates.mark_told()
        self._has_untold = False
        return blob

    def bucket(self, number: int) -> bytes:
        """All of the state of one of the ``N_BUCKETS`` buckets of keys.

        Taken right after :meth:`changes`, with no step between, at the same place of the log. When every bucket has
        been written after some changes, these and all before them may be thrown away.

        Raises:
            WindowingError: There was a step since the last changes, or there is no such bucket.
        """
        if not 0 <= number < N_BUCKETS:
            msg = f"bucket {number} was asked for, expected 0 to {N_BUCKETS - 1}"
            raise WindowingError(msg)
        if self._has_untold:
            msg = f"bucket {number} was asked for after a step, expected right after changes(); call that first"
            raise WindowingError(msg)
        return self._write(Selection(PartKind.BUCKET, number))

    def _write(self, selection: Selection) -> bytes:
        content = self._intake.write(selection)
        content.facts |= {"watermark_us": self.watermark_us, "last_offset": self.last_offset}
        if self._duplicates is not None:
            content.tables["duplicates"] = self._duplicates.write(selection, self.view.input.event_id_type)
        if self._inputs is not None:
            content.facts["inputs"] = self._inputs.inputs()
        header = PartHeader(kind=selection.kind, number=self._n_changes, bucket=selection.bucket)
        return write_part(header, content, identity=self._identity())

    @classmethod
    def restore(cls, view: FeatureView, blob: bytes, *, source_partition: int = 0) -> "WindowEngine":
        """Make an engine that goes on where a snapshot was taken.

        Raises:
            StateVersionError: The snapshot is of another format, definition, topic or partition.
        """
        return cls.restore_parts(view, [blob], source_partition=source_partition)

    @classmethod
    def restore_parts(cls, view: FeatureView, parts: Iterable[bytes], *, source_partition: int = 0) -> "WindowEngine":
        """Make an engine that goes on where the newest of these parts was taken.

        Args:
            view: The definition.
            parts: Changes, buckets and snapshots of one engine (and of those restored from it) in any order: the newest
                of each bucket, and all changes after it. More than that does no harm; none at all is a new engine.
            source_partition: Number of the partition.

        Returns:
            The engine; ``last_offset`` tells where in the log to go on.

        Raises:
            StateVersionError: A part is of another format, definition, topic or partition; or changes are missing.
        """
        engine = cls(view, source_partition=source_partition)
        identity = engine._identity()
        blobs = list(parts)
        order, engine._n_changes = newest_first(read_header(blob, identity=identity) for blob in blobs)
        engine._read(read_part(blobs[position], identity=identity) for position in order)
        return engine

    def _read(self, contents: Iterator[Content]) -> None:
        if (newest := next(contents, None)) is None:
            return
        self.watermark_us, self.last_offset = newest.facts["watermark_us"], newest.facts["last_offset"]
        if self._inputs is not None:
            self._inputs.read(newest.facts["inputs"])
        self._intake.read(map(self._read_shared, chain([newest], contents)), watermark_us=self.watermark_us)
        if self._duplicates is not None:
            self._duplicates.mark_told()

    def _read_shared(self, content: Content) -> Content:
        """Take over what does not belong to the windows; parts are gone through once, for they are large."""
        if self._duplicates is not None and (table := content.tables.get("duplicates")) is not None:
            self._duplicates.read_part(table, watermark_us=self.watermark_us)
        return content

    def _identity(self) -> dict[str, str]:
        return {
            "view": self.view.name,
            "definition_hash": self.view.definition_hash,
            "topic": self.view.input.topic,
            "partition": str(self.source_partition),
        }
