"""From raw batches of a partition to feature rows and dead letters, or on to repartition topics: decode, admit, window.

Pure but for the engines' and routers' state: no I/O and no clock. The features agent, replay and backfill drive it.
"""

from collections import deque
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass, fields
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from schemas.row import CONTEXT_COLUMNS, ORIGIN_COLUMNS, TIMESTAMP, Reason
from schemas.source import EventSource
from schemas.view import FeatureView
from schemas.view_input import ViewInput
from streams.batch import RawBatch
from streams.repartition import ReadRows, RepartitionedRows, Routed, Router, SourceRows
from streams.windowing.engine import WindowEngine
from streams.windowing.result import StepCounts, StepResult, WatermarkMarker

_OF_ONE_VIEW = frozenset({Reason.MISSING_KEY, Reason.DUPLICATE, Reason.LATE, Reason.OVERFLOW})


@dataclass(frozen=True, kw_only=True)
class Processed:
    """What one raw batch became.

    Attributes:
        rows: Feature rows by view name, ``view.row_schema``.
        dead_letters: :data:`schemas.row.REJECTED_COLUMNS` and ``view``, in offset order; ``view`` is null where the
            reason holds for every view of the source.
        read: What was read of the batch, with the records of the sources.
        routed: What goes to repartition topics, by topic.
        counts: What became of the rows, by view name (see ``StepResult.counts``).
        watermarks_us: Watermark after the batch, by view name.
    """

    rows: Mapping[str, pa.Table]
    dead_letters: pa.Table
    read: ReadRows
    routed: Mapping[str, Routed]
    counts: Mapping[str, StepCounts]
    watermarks_us: Mapping[str, int]


@dataclass(frozen=True, kw_only=True)
class ViewStart:
    """Where one view goes on after a restart.

    Rows before ``emit_from`` that the state does not hold were already committed downstream: they are run through the
    engine again (it is deterministic) and what comes of them is dropped.

    Attributes:
        parts: State of the engine, as ``WindowEngine.restore_parts`` takes it; none of an empty one.
        begin: First source offset that is in the view.
        emit_from: First source offset whose rows go out.
        markers: Steps of the watermark after that state, in order, and maybe some before; what they fired has gone out.
    """

    parts: Sequence[bytes] = ()
    begin: int = 0
    emit_from: int = 0
    markers: Sequence[WatermarkMarker] = ()


@dataclass(frozen=True, kw_only=True)
class IdleStep:
    """What the watermark of one view fired as it moved on without a row.

    Attributes:
        rows: Feature rows, ``view.row_schema``.
        marker: What must be recorded with them.
        counts: What became of them.
    """

    rows: pa.Table
    marker: WatermarkMarker
    counts: StepCounts


class PartitionPipeline:
    """One partition of a source or of a repartition topic: an engine for each view, a router for each way on.

    Args:
        source: What is read: an event source, or what stands on a repartition topic.
        views: The views over it.
        partition: The partition.
        application: Name of the application, whose rows are read from a repartition topic.
        routers: Of a source, where its rows go on to, each with the views that read it there.
        starts: Where each view starts; a view that is not named starts empty at the first row, emitting all.
        reject_from: First source offset whose row goes to the dead letters where it is bad for every view: a view that
            starts late goes over rows that are there already.
        folds_late: Whether the views count late rows where they came: what was sent again for that is left out.
    """

    def __init__(
        self,
        source: EventSource | ViewInput,
        views: Sequence[FeatureView],
        *,
        partition: int,
        application: str = "",
        routers: Mapping[Router, Sequence[FeatureView]] | None = None,
        starts: Mapping[str, ViewStart] | None = None,
        reject_from: int = 0,
        folds_late: bool = False,
    ) -> None:
        self.source = source
        self.partition = partition
        self.routers = dict(routers or {})
        self._application = application
        self._reject_from = reject_from
        self._folds_late = folds_late
        self._views = {view.name: view for view in views}
        self._starts = {view.name: (starts or {}).get(view.name, ViewStart()) for view in views}
        self.engines = {
            view.name: WindowEngine.restore_parts(view, self._starts[view.name].parts, source_partition=partition)
            for view in views
        }
        self._next_offsets = {
            name: max(self._starts[name].begin, _after(engine.last_offset)) for name, engine in self.engines.items()
        }
        self._markers = {name: deque(start.markers) for name, start in self._starts.items()}
        for name in self.engines:
            self._replay_markers(name)

    @property
    def resume_offset(self) -> int:
        """Offset that the pipeline must be fed from: the earliest that one of its views or routers still needs."""
        return min([*self._next_offsets.values(), *(router.next_offset for router in self.routers)])

    def process(
        self,
        batch: RawBatch,
        *,
        processing_time_us: int,
        computed_time_us: int | None,
        epoch: int | None,
        read: ReadRows | None = None,
    ) -> Processed:
        """Run one raw batch through; batches come in offset order without gaps in time.

        ``computed_time_us`` and ``epoch`` go into the rows; None where nothing is committed, as in a backfill. ``read``
        is what :func:`read_rows` made of the batch, where that has been done.
        """
        if read is None:
            read = read_rows(batch, self.source, application=self._application)
        rows, counts, watermarks = {}, {}, {}
        undecoded = read.rejected.append_column("view", pa.nulls(read.rejected.num_rows, pa.string()))
        rejected = [_from_offset(undecoded, "_offset", self._reject_from)]
        seen: set[tuple[int, str]] = set()
        for name in self.engines:
            start = self._starts[name]
            meant = _meant_for(read, {name}, leaves_out=read.late_for if self._folds_late else {})
            fresh = _from_offset(meant, "_offset", self._next_offsets[name])
            result = self._step(name, fresh, processing_time_us=processing_time_us)
            made = _from_offset(result.rows, "source_offset", start.emit_from)
            context = self._with_context(made, self._views[name], computed_time_us=computed_time_us, epoch=epoch)
            rows[name] = _with_origin(context, read)
            rejected.append(self._of_view(result.dead_letters, name, seen, emit_from=start.emit_from))
            counts[name] = result.counts
            watermarks[name] = result.watermark_us
        routed = {}
        for router, views in self.routers.items():
            rows_on = _meant_for(read, {view.name for view in views})
            routed[router.topic] = router.route(batch, rows_on, processing_time_us=processing_time_us)
            rejected += [self._of_view(routed[router.topic].rejected, view.name, seen) for view in views]
        return Processed(
            rows=rows,
            dead_letters=pa.concat_tables(rejected).sort_by("_offset"),
            read=read,
            routed=routed,
            counts=counts,
            watermarks_us=watermarks,
        )

    def poll_idle(
        self, *, processing_time_us: int, computed_time_us: int, epoch: Callable[[], int], is_caught_up: bool
    ) -> dict[str, IdleStep]:
        """Let an idle partition be told of where its rows go on to, and its watermark move on with the clock.

        Args:
            processing_time_us: Now.
            computed_time_us: Goes into the rows.
            epoch: Begins the epoch that the rows go into, and gives its number; called where there are any.
            is_caught_up: Whether all that is on the topic has been processed: a backlog is never idleness.

        Returns:
            By view name, the steps that were taken.
        """
        steps = {}
        for router in self.routers:
            router.poll_idle(processing_time_us=processing_time_us, is_caught_up=is_caught_up)
        for name, engine in self.engines.items():
            result = engine.poll_idle(processing_time_us=processing_time_us, is_caught_up=is_caught_up)
            if result is not None and result.marker is not None:
                rows = self._with_context(
                    result.rows, self._views[name], computed_time_us=computed_time_us, epoch=epoch()
                )
                steps[name] = IdleStep(rows=rows, marker=result.marker, counts=result.counts)
        return steps

    def _step(self, view: str, rows: pa.Table, *, processing_time_us: int) -> StepResult:
        """Run rows through an engine; on the way, take the recorded steps of the watermark where they were taken."""
        engine, markers = self.engines[view], self._markers[view]
        results = []
        while markers:
            after_offset = markers[0].after_offset
            is_before = pc.less_equal(rows.column("_offset"), after_offset)
            if not pc.any(is_before).as_py():
                break
            results.append(engine.step(rows.filter(is_before), processing_time_us=processing_time_us))
            rows = rows.filter(pc.invert(is_before))
            self._replay_markers(view)
        results.append(engine.step(rows, processing_time_us=processing_time_us))
        return results[0] if len(results) == 1 else _joined(results)

    def _replay_markers(self, view: str) -> None:
        engine, markers = self.engines[view], self._markers[view]
        while markers and _after(markers[0].after_offset) <= _after(engine.last_offset):
            marker = markers.popleft()
            if marker.after_offset == engine.last_offset:
                engine.advance(marker)

    def _of_view(
        self, dead_letters: pa.Table, view: str, seen: set[tuple[int, str]], *, emit_from: int = 0
    ) -> pa.Table:
        """Name the view where the reason is its own; keep one of each reason that holds for all views of the source."""
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

    def _with_context(
        self, rows: pa.Table, view: FeatureView, *, computed_time_us: int | None, epoch: int | None
    ) -> pa.Table:
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


def read_rows(batch: RawBatch, source: EventSource | ViewInput, *, application: str) -> ReadRows:
    """Decode one raw batch of a source or of a repartition topic.

    Raises:
        DecodeError: A record of a repartition topic is none of a router.
    """
    if isinstance(source, EventSource):
        return SourceRows(batch, source)
    return RepartitionedRows(batch, source, application=application)


def _after(offset: int | None) -> int:
    return 0 if offset is None else offset + 1


def _joined(results: Sequence[StepResult]) -> StepResult:
    return StepResult(
        rows=pa.concat_tables([result.rows for result in results]),
        dead_letters=pa.concat_tables([result.dead_letters for result in results]),
        watermark_us=results[-1].watermark_us,
        counts=StepCounts(
            **{f.name: sum(getattr(result.counts, f.name) for result in results) for f in fields(StepCounts)}
        ),
    )


def _meant_for(read: ReadRows, views: Set[str], *, leaves_out: Mapping[int, Set[str]] | None = None) -> pa.Table:
    """Leave out what was sent again for other views alone, and more: these have counted it the first time."""
    others = [offset for offset, addressed in read.addressed.items() if not addressed & views]
    others += [offset for offset, late_for in (leaves_out or {}).items() if late_for & views]
    if not others:
        return read.rows
    return read.rows.filter(pc.invert(pc.is_in(read.rows.column("_offset"), value_set=pa.array(others, pa.int64()))))


def _with_origin(rows: pa.Table, read: ReadRows) -> pa.Table:
    """Let ``broker_time`` say when the record that made each row came to the broker, and name a routed one."""
    made_by = rows.column("source_offset").to_numpy()
    column = read.arrived_us(made_by).cast(TIMESTAMP)
    rows = rows.set_column(rows.schema.get_field_index("broker_time"), rows.schema.field("broker_time"), column)
    for name, origin in read.origins(made_by).items():
        rows = rows.append_column(ORIGIN_COLUMNS.field(name), origin)
    return rows


def _from_offset(rows: pa.Table, column: str, offset: int) -> pa.Table:
    if not rows.num_rows or rows.column(column)[0].as_py() >= offset:
        return rows
    return rows.filter(pc.greater_equal(rows.column(column), offset))
