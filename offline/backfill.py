"""Backfill: the rows that the live path would have made of records that have been, by the very engine of the live path.

A partition is read from the first record that is there, since windows, last rows and watermarks reach back; rows of
the records that are wanted go to files of the view's own table that no reader sees, until one commit takes all of them
in. Whatever the table holds already stays as it is: history ends at the first source offset of a partition that has a
row of the live path, and goes on where an earlier backfill ended.

Every record that is admitted has its as-of row, in a view that emits ``latest`` too: as if each micro-batch had had one
record. ``computed_time`` and ``epoch`` are null, for nothing was committed; all else is what the live path makes.

A partition goes on where it was interrupted: at each checkpoint

1. the rows since the last one are written to files;
2. the engine's state is put on disk, with the offset that it is at and the names of all files so far.

After a crash between the two the rows are made again from the older state; files that no state names are left out.
"""

import json
import os
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final

import pyarrow as pa

from schemas.errors import ConfigError, SchemaMismatchError
from schemas.view import FeatureView
from streams.pipeline import PartitionPipeline, Processed, ViewStart
from streams.ports import RecordLog
from streams.sinks.offline import History, OfflineWriter, complete_rows, is_apart
from streams.sinks.staging import Stage, StagedFile

CHECKPOINT_RECORDS: Final = 1_000_000
"""Records between two checkpoints, at most: what is done again after a crash."""
CHECKPOINT_ROWS: Final = 500_000
"""Rows that are held in memory, at most; and of one batch more."""


@dataclass(frozen=True, kw_only=True)
class PartitionPlan:
    """What is to be done for one partition.

    Attributes:
        partition: Its number.
        read: Offsets that are read, from the first record that is there.
        wanted: Source offsets whose rows are wanted.
        live_from: First source offset with a row of the live path in the view's own table; None where it has none.
        records: Records to read, at most.
        size_bytes: What they take as they are stored; None where that is not known.
    """

    partition: int
    read: range
    wanted: range
    live_from: int | None
    records: int
    size_bytes: int | None


def check_view(view: FeatureView) -> None:
    """See whether records alone decide the rows of a view.

    Raises:
        ConfigError: They do not.
    """
    if view.input.is_repartitioned:
        return  # whoever reads a source says on the repartition topic that it is idle
    source = view.sources[0]
    if source.idle_advance:
        msg = (
            f"rows of view {view.name} cannot be made anew: `idle_advance` of {source.topic} lets the clock close "
            "windows, expected a view whose rows its records decide alone; its live rows stand in the offline store"
        )
        raise ConfigError(msg)


def plan_backfill(
    view: FeatureView,
    log: RecordLog,
    *,
    from_us: int | None = None,
    to_us: int | None = None,
    writer: OfflineWriter,
) -> list[PartitionPlan]:
    """Plan by arrival: of each partition, the rows of the records from one record timestamp up to another.

    Args:
        view: The view.
        log: Where its records are read.
        from_us: Rows are wanted from the first record of that timestamp or later; all when None.
        to_us: Rows are wanted up to the first record of that timestamp or later; all when None.
        writer: The view's own table.

    Raises:
        ConfigError: The view cannot be back-filled, or what is wanted does not meet the history that is there.
        SinkError, ServiceError, SchemaMismatchError: The log cannot be read.
    """
    check_view(view)
    parts = log.parts()
    starts = {} if from_us is None else log.first_at(from_us)
    stops = {} if to_us is None else log.first_at(to_us)
    held = writer.history(view, parts)
    plans = []
    for number, part in sorted(parts.items()):
        stop = min(stops.get(number, part.offsets.stop), held.live_from.get(number, part.offsets.stop))
        wanted = _clipped(range(starts.get(number, part.offsets.start), stop), held.spans.get(number), partition=number)
        read = range(part.offsets.start, wanted.stop) if wanted else range(part.offsets.start, part.offsets.start)
        share = len(read) / max(len(part.offsets), 1)
        plans.append(
            PartitionPlan(
                partition=number,
                read=read,
                wanted=wanted,
                live_from=held.live_from.get(number),
                records=round(part.records * share),
                size_bytes=None if part.size_bytes is None else round(part.size_bytes * share),
            )
        )
    return plans


def _clipped(asked: range, span: range | None, *, partition: int) -> range:
    """Leave out what is history already, where that does not make two parts of it."""
    if not asked or span is None:
        return asked if asked else range(asked.start, asked.start)
    if is_apart(span, asked):
        msg = (
            f"rows of offsets {asked.start} to {asked.stop - 1} of partition {partition} are asked for, those of "
            f"{span.start} to {span.stop - 1} are history already, expected nothing between them; choose `--from` and "
            "`--to` so that they meet, or another root with `--into`"
        )
        raise ConfigError(msg)
    start = asked.start if asked.start < span.start else max(asked.start, span.stop)
    return range(start, max(start, asked.stop))


def extend_plans(
    view: FeatureView, log: RecordLog, plans: Sequence[PartitionPlan], *, writer: OfflineWriter
) -> list[PartitionPlan] | None:
    """Reach on to the rows of a live path that has begun since; None where nothing is left between.

    Raises:
        SinkError, ServiceError, SchemaMismatchError: The log or the table cannot be read.
    """
    live_from = writer.history(view, [plan.partition for plan in plans]).live_from
    parts = log.parts()
    further = []
    for plan in plans:
        stop = min(live_from.get(plan.partition, 0), parts[plan.partition].offsets.stop)
        if plan.wanted and stop > plan.wanted.stop:
            read, wanted = range(plan.read.start, stop), range(plan.wanted.start, stop)
            records = plan.records + stop - plan.wanted.stop
            further.append(replace(plan, read=read, wanted=wanted, live_from=stop, records=records))
        else:
            further.append(plan)
    return further if further != list(plans) else None


@dataclass(kw_only=True)
class Progress:
    """How far a partition has come.

    Attributes:
        next_offset: Offset that is read next.
        records: Records read so far.
        rows: Rows made of those that are wanted.
        foreign: Records on a repartition topic that stand there for other definitions of the sources, or applications.
        copies: Records that were sent again for being late, and count where they came.
        dead_letters: Wanted records that are in no row, by reason.
        files: What has been written of the rows, as :meth:`StagedFile.to_document` has it.
    """

    next_offset: int
    records: int = 0
    rows: int = 0
    foreign: int = 0
    copies: int = 0
    dead_letters: dict[str, int] = field(default_factory=dict)
    files: list[dict[str, Any]] = field(default_factory=list)


Tell = Callable[[Progress], object]


class PartitionBackfill:
    """One partition of a backfill.

    Args:
        view: The view.
        log: Where its records are read.
        plan: What is to be done.
        application: Name of the application, whose records are read from a repartition topic.
        stage: Where its rows go.
        directory: Where checkpoints are kept.
        folds_late: Whether the view counts late rows (:func:`offline.late.with_late`).
    """

    def __init__(
        self,
        view: FeatureView,
        log: RecordLog,
        plan: PartitionPlan,
        *,
        application: str,
        stage: Stage,
        directory: Path,
        folds_late: bool = False,
    ) -> None:
        self._application = application
        self._view = view
        self._log = log
        self._plan = plan
        self._stage = stage
        self._path = directory / f"partition-{plan.partition}.state"
        self._driven = as_of_each(view)
        self._folds_late = folds_late

    def run(self, tell: Tell = lambda _: None) -> Progress:
        """Go on to the end of the plan; safe to repeat, and to be ended at any moment.

        Args:
            tell: Told of each batch how far it is.

        Raises:
            DecodeError: A record of a repartition topic is none of a router.
            SinkError, ServiceError, SchemaMismatchError: The log cannot be read, or the files not be written.
            StateVersionError: The checkpoint belongs to another definition.
        """
        progress, parts = self._restore()
        tell(progress)
        pipeline = make_pipeline(
            self._driven, self._plan, application=self._application, parts=parts, folds_late=self._folds_late
        )
        held: list[pa.Table] = []
        since = 0
        for batch in self._log.read(self._plan.partition, range(progress.next_offset, self._plan.read.stop)):
            made = pipeline.process(batch, processing_time_us=0, computed_time_us=None, epoch=None)
            rows = own_rows(made.rows[self._view.name], self._view)
            _count(progress, made, n_records=len(batch), n_rows=rows.num_rows)
            if self._folds_late:
                progress.copies += sum(self._view.name in views for views in made.read.late_for.values())
            progress.next_offset = batch.next_offset
            held.append(rows)
            since += len(batch)
            if since >= CHECKPOINT_RECORDS or sum(table.num_rows for table in held) >= CHECKPOINT_ROWS:
                self._checkpoint(progress, held, pipeline)
                held, since = [], 0
            tell(progress)
        if held:
            self._checkpoint(progress, held, pipeline)
        return progress

    def _checkpoint(self, progress: Progress, held: list[pa.Table], pipeline: PartitionPipeline) -> None:
        rows = pa.concat_tables(held)
        if rows.num_rows:
            written = self._stage.write(complete_rows(rows, self._view), partition=self._plan.partition)
            progress.files += [file.to_document() for file in written]
        head = json.dumps(progress.__dict__).encode()
        # Of this process alone: whoever does the partition again need not wait for one that is about to end.
        temporary = self._path.with_suffix(f".{os.getpid()}.new")
        with temporary.open("wb") as stream:
            stream.write(head + b"\n" + pipeline.engines[self._view.name].snapshot())
            stream.flush()
            os.fsync(stream.fileno())
        temporary.replace(self._path)

    def _restore(self) -> tuple[Progress, list[bytes]]:
        if not self._path.exists():
            return Progress(next_offset=self._plan.read.start), []
        head, _, state = self._path.read_bytes().partition(b"\n")
        found: dict[str, Any] = json.loads(head)
        return Progress(**found), [state]


def _count(progress: Progress, made: Processed, *, n_records: int, n_rows: int) -> None:
    progress.records += n_records
    progress.rows += n_rows
    # Of a repartition topic none is rejected here: what is not among its rows belongs to other definitions.
    progress.foreign += n_records - made.read.rows.num_rows - made.read.rejected.num_rows
    reasons = Counter(progress.dead_letters)
    reasons.update(made.dead_letters["reason"].to_pylist())
    progress.dead_letters = dict(reasons)


def measure_rate(
    view: FeatureView,
    log: RecordLog,
    plan: PartitionPlan,
    *,
    application: str,
    n_records: int,
    clock_s: Callable[[], float],
) -> float | None:
    """Run the first records of a partition, writing nothing; records a second, None where there are none.

    Raises:
        DecodeError, SinkError, ServiceError, SchemaMismatchError: As for :meth:`PartitionBackfill.run`.
    """
    driven = as_of_each(view)
    pipeline = make_pipeline(driven, plan, application=application, parts=[])
    read, started_s = 0, clock_s()
    for batch in log.read(plan.partition, plan.read):
        pipeline.process(batch, processing_time_us=0, computed_time_us=None, epoch=None)
        read += len(batch)
        if read >= n_records:
            break
    return read / max(clock_s() - started_s, 1e-9) if read else None


def own_rows(rows: pa.Table, view: FeatureView) -> pa.Table:
    """Put rows under the view's own definition, whatever the emit mode that they were made in."""
    at = rows.schema.get_field_index("definition_hash")
    return rows.set_column(at, rows.schema.field(at), pa.repeat(pa.scalar(view.definition_hash), rows.num_rows))


def as_of_each(view: FeatureView) -> FeatureView:
    """Have every event's as-of row, where the live path leaves it to its batches which it makes."""
    return replace(view, emit="every_event") if view.emit == "latest" else view


def make_pipeline(
    driven: FeatureView, plan: PartitionPlan, *, application: str, parts: Sequence[bytes], folds_late: bool = False
) -> PartitionPipeline:
    """Make the engine of one partition; rows and dead letters of what is not wanted are left out."""
    return PartitionPipeline(
        driven.input if driven.input.is_repartitioned else driven.sources[0],
        [driven],
        partition=plan.partition,
        application=application,
        starts={driven.name: ViewStart(parts=parts, emit_from=plan.wanted.start)},
        reject_from=plan.wanted.start,
        folds_late=folds_late,
    )


def finish_backfill(
    view: FeatureView,
    plans: list[PartitionPlan],
    done: Mapping[int, Progress],
    *,
    stage: Stage,
    writer: OfflineWriter,
) -> History:
    """Put the rows that were made before those that the view's table has, in one commit.

    Args:
        view: The view.
        plans: What was to be done.
        done: What was done, by partition.
        stage: Where their files are.
        writer: The view's own table.

    Raises:
        SchemaMismatchError: No record was of the view's definition; or a table is not.
        SinkError: The commit cannot be made.
    """
    records, foreign = sum(p.records for p in done.values()), sum(p.foreign for p in done.values())
    if view.input.is_repartitioned and records and records == foreign:
        msg = (
            f"none of {records:,} records on {view.input.topic} stands there for this application and the present "
            "definition of its sources, expected some: run the features role, which routes all of them, then back-fill"
        )
        raise SchemaMismatchError(msg)
    if not any(progress.rows for progress in done.values()):
        return writer.history(view, [plan.partition for plan in plans])
    read = {plan.partition: plan.wanted for plan in plans}
    files = [StagedFile(**document) for progress in done.values() for document in progress.files]
    stage.clear(keep=files)  # what processes have left that were ended
    return writer.add_history(stage, files, view=view, read=read)
