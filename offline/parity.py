"""Parity: what was served, against what the engine makes of the raw records anew, value by value and to the bit.

The rows of a partition are made again from the first record of its log, and compared a stretch of source offsets at a
time with those of the offline store, and with the values of the online store that came of these offsets. When a row was
committed (``computed_time``, ``epoch``) is no value.

What cannot be known is not judged, and counted: rows of records that the log has not (yet), and rows that are made anew
outside of the source offsets that the table has begun and ended with. Of the as-of rows of a view that emits ``latest``
the batches decided which are there: one that is not there is no difference, one that is there must be right.
"""

import struct
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import polars as pl
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.dataset as ds

from offline.backfill import PartitionPlan, as_of_each, check_view, make_pipeline, own_rows
from schemas.row import ORIGIN_COLUMNS, Pane
from schemas.view import FeatureView
from streams.ports import LogPart, RecordLog
from streams.sinks.delta import mapped_errors
from streams.sinks.offline import table_uri
from streams.sinks.online import OnlineValue, Status
from streams.sinks.pseudonym import NO_PSEUDONYMS, Pseudonyms

COMPARED_ROWS: Final = 200_000
"""Rows of a partition that are compared at a time, at least; this much is held in memory."""
MAX_MISMATCHES: Final = 1_000
"""Mismatches of a store that are kept whole; all of them are counted."""
_NO_VALUES: Final = ("computed_time", "epoch", "view", "view_version", "source_topic", "source_partition")
"""Columns that say when a row was committed, and those that are chosen by and so cannot differ."""


@dataclass(frozen=True, kw_only=True)
class Mismatch:
    """A value that was served and is not what the engine makes of the records.

    Attributes:
        store: ``offline`` or ``online``.
        kind: ``value``; ``missing`` (made anew, not served), ``unexpected`` (served, not made anew) or ``doubled``.
        entity: Entity key of the row.
        column: Which column differs; None where it is the row.
        served: What it is.
        recomputed: What it is made anew.
        lineage: Where the row comes from: of which record it was made, of which windows, by which definition.
    """

    store: str
    kind: str
    entity: str | int | None
    column: str | None
    served: Any
    recomputed: Any
    lineage: Mapping[str, Any]


@dataclass(kw_only=True)
class Comparison:
    """How one store compares.

    Attributes:
        store: ``offline`` or ``online``.
        rows: Rows that were compared.
        values: Values that were compared.
        mismatched: Mismatches that were found.
        not_judged: Rows that nothing could be said of.
        mismatches: The first of the mismatches.
    """

    store: str
    rows: int = 0
    values: int = 0
    mismatched: int = 0
    not_judged: int = 0
    mismatches: list[Mismatch] = field(default_factory=list)

    def found(self, mismatches: Iterable[Mismatch]) -> None:
        """Count mismatches, and keep the first."""
        for mismatch in mismatches:
            self.mismatched += 1
            if len(self.mismatches) < MAX_MISMATCHES:
                self.mismatches.append(mismatch)


class Reads(ABC):
    """Something that names rows of the view, and is compared with them as they are made anew."""

    @abstractmethod
    def see(self, made: pa.Table) -> None:
        """Compare what is of these rows, ``view.row_schema``, every entity's of some offsets."""

    @abstractmethod
    def finish(self, parts: Mapping[int, LogPart]) -> Comparison:
        """Judge what is left, once all rows have been seen; ``parts`` says what the log has."""


Online = Mapping[int, Sequence[OnlineValue]]
"""Values of the online store, by the partition that their entity is in."""


def compare(
    view: FeatureView,
    log: RecordLog,
    *,
    application: str,
    rows: ds.Dataset,
    root: str,
    spans: Mapping[int, range],
    online: Online | None,
    reads: Sequence[Reads] = (),
    pseudonyms: Pseudonyms = NO_PSEUDONYMS,
    is_sampled: Callable[[str | int], bool] | None = None,
    tell: Callable[[int], object] = lambda _: None,
) -> list[Comparison]:
    """Make the rows of a view anew and compare what was served.

    Args:
        view: The view.
        log: Where its records are read.
        application: Name of the application, whose records are read from a repartition topic.
        rows: The view's table of the offline store, as of one version.
        root: Root of the offline store, for messages.
        spans: By partition, from the first source offset that has a row in the table to the last.
        online: Values of the online store, read before the log's end is looked for; None to leave it out.
        reads: What else names rows of the view; sees those of all entities.
        pseudonyms: What stands online for personal values of views that ask for it.
        is_sampled: Whether rows of an entity are compared; None for all.
        tell: Told of each batch how many records it had.

    Raises:
        ConfigError: Records alone do not decide the view's rows.
        DecodeError, SinkError, ServiceError, SchemaMismatchError: The log or the table cannot be read.
    """
    check_view(view)
    offline = Comparison(store="offline")
    comparisons = [offline] if online is None else [offline, Comparison(store="online")]
    parts = log.parts()
    for number in sorted({*parts, *spans, *(online or {})}):
        offsets = parts[number].offsets if number in parts else range(0)
        span = spans.get(number, range(0))
        values = _by_place((online or {}).get(number, ()))
        for stretch, made in _stretches(view, log, number, offsets, application=application, tell=tell):
            for read in reads:
                read.see(made)
            chosen = made if is_sampled is None else _sample(made, view.entity.key, is_sampled)
            where = (pc.field("source_partition") == number) & (pc.field("source_offset") >= stretch.start)
            with mapped_errors(table_uri(root, view)):
                served = rows.to_table(filter=where & (pc.field("source_offset") < stretch.stop))
            if is_sampled is not None:
                served = _sample(served, view.entity.key, is_sampled)
            compare_rows(view, served, chosen, span=span, into=offline)
            if values:
                compare_online(view, values, pseudonyms.rows(view, chosen), into=comparisons[-1])
        outside = (pc.field("source_offset") < offsets.start) | (pc.field("source_offset") >= offsets.stop)
        with mapped_errors(table_uri(root, view)):
            offline.not_judged += rows.count_rows(filter=(pc.field("source_partition") == number) & outside)
        for place, value in values.items():
            if place[2] in offsets:
                comparisons[-1].rows += 1
                lineage = _online_lineage(view, value, partition=number)
                comparisons[-1].found([_of_row("online", "unexpected", value.entity, lineage)])
            else:
                comparisons[-1].not_judged += 1
    return [*comparisons, *(read.finish(parts) for read in reads)]


def _stretches(
    view: FeatureView,
    log: RecordLog,
    partition: int,
    offsets: range,
    *,
    application: str,
    tell: Callable[[int], object],
) -> Iterator[tuple[range, pa.Table]]:
    """Make the rows of a partition anew; each stretch of source offsets comes with all rows that are of it."""
    plan = PartitionPlan(
        partition=partition, read=offsets, wanted=offsets, live_from=None, records=len(offsets), size_bytes=None
    )
    pipeline = make_pipeline(as_of_each(view), plan, application=application, parts=[])
    held: list[pa.Table] = []
    start = offsets.start
    for batch in log.read(partition, offsets):
        made = pipeline.process(batch, processing_time_us=0, computed_time_us=None, epoch=None)
        held.append(own_rows(made.rows[view.name], view))
        tell(len(batch))
        if sum(table.num_rows for table in held) >= COMPARED_ROWS:
            yield range(start, batch.next_offset), pa.concat_tables(held)
            held, start = [], batch.next_offset
    # Records may be missing at the end (of aborted transactions, say); rows of the store there would have none.
    if start < offsets.stop:
        made_none = view.row_schema.empty_table()
        yield range(start, offsets.stop), pa.concat_tables(held) if held else made_none


def _sample(rows: pa.Table, key: str, is_sampled: Callable[[str | int], bool]) -> pa.Table:
    keys = rows[key].combine_chunks().dictionary_encode()
    if not rows.num_rows:
        return rows
    chosen = pa.array([is_sampled(value) for value in keys.dictionary.to_pylist()], pa.bool_())
    return rows.filter(chosen.take(keys.indices))


def compare_rows(view: FeatureView, served: pa.Table, made: pa.Table, *, span: range, into: Comparison) -> None:
    """Compare rows that were served with rows made anew of the same stretch of source offsets.

    Args:
        view: The view.
        served: Rows that were served, ``view.row_schema`` at least.
        made: Rows made anew, the same.
        span: Source offsets between which one that was not served is missing, and not just unknown.
        into: Takes what is found.
    """
    key = view.entity.key
    place = ["source_offset", key, "pane", "window_end", "pane_index"]
    names = [name for name in view.row_schema.names if name not in (*place, *_NO_VALUES)]
    there = _frame(served.select(view.row_schema.names), names)
    anew = _frame(made.select(view.row_schema.names), names)
    doubled = there.filter(there.select(place).is_duplicated()).unique(place, keep="first", maintain_order=True)
    into.found(_of_row("offline", "doubled", row[key], _lineage(view, row)) for row in doubled.iter_rows(named=True))
    there = there.unique(place, keep="first", maintain_order=True)
    both = there.join(anew.select([*place, *names]), on=place, how="inner", suffix="|made", nulls_equal=True)
    into.rows += there.height
    into.values += both.height * len(names)
    for name in names:
        kind = view.row_schema.field(name).type
        for row in both.filter(~pl.col(name).eq_missing(pl.col(f"{name}|made"))).iter_rows(named=True):
            got, expected = _shown(row[name], kind), _shown(row[f"{name}|made"], kind)
            into.found(
                [_of_value("offline", row[key], name, served=got, recomputed=expected, lineage=_lineage(view, row))]
            )
    unexpected = there.join(anew, on=place, how="anti", nulls_equal=True)
    for row in unexpected.iter_rows(named=True):
        into.found([_of_row("offline", "unexpected", row[key], _lineage(view, row))])
    missing = anew.join(there, on=place, how="anti", nulls_equal=True)
    if view.emit == "latest":
        missing = missing.filter(pl.col("pane") != Pane.EARLY.value)
    known = (pl.col("source_offset") >= span.start) & (pl.col("source_offset") < span.stop)
    into.not_judged += missing.filter(~known).height
    for row in missing.filter(known).iter_rows(named=True):
        into.found([_of_row("offline", "missing", row[key], _lineage(view, row))])


def _frame(rows: pa.Table, names: Sequence[str]) -> pl.DataFrame:
    """Lay out rows so that equal means the same bits: polars holds -0.0 and 0.0 for equal."""
    for name in names:
        at = rows.schema.get_field_index(name)
        if rows.schema.field(at).type == pa.float64():
            column = pa.chunked_array([chunk.view(pa.int64()) for chunk in rows[name].chunks], pa.int64())
            rows = rows.set_column(at, name, column)
    return pl.DataFrame(rows)


def _shown(value: Any, kind: pa.DataType) -> Any:
    """A value as it is: a number that is compared by its bits is one again."""
    return struct.unpack("d", struct.pack("q", value))[0] if value is not None and kind == pa.float64() else value


Place = tuple[int | None, int | None, int | None, str | int]
"""Window end, pane index, source offset and entity of an online value."""


def _by_place(values: Collection[OnlineValue]) -> dict[Place, OnlineValue]:
    """Put values by the order that Redis keeps them by, and their entity; there is no row of a missing one."""
    return {
        (value.window_end_us, value.pane_index, value.source_offset, value.entity): value
        for value in values
        if value.status is not Status.MISSING
        and value.window_end_us is not None
        and value.pane_index is not None
        and value.source_offset is not None
    }


def compare_online(view: FeatureView, values: dict[Place, OnlineValue], made: pa.Table, *, into: Comparison) -> None:
    """Compare the values whose rows are among these, and take them off."""
    wanted = pa.array(list({place[2] for place in values}), pa.int64())
    rows = made.filter(pc.is_in(made["source_offset"], value_set=wanted))
    times = {name: rows[name].cast(pa.int64()) for name in ("window_end", "event_time", "watermark", "broker_time")}
    for name, column in times.items():
        rows = rows.set_column(rows.schema.get_field_index(name), name, column)
    for row in rows.to_pylist():
        place = (row["window_end"], row["pane_index"], row["source_offset"], row[view.entity.key])
        if (value := values.get(place)) is None or value.pane != row["pane"]:
            continue
        del values[place]
        served = {
            "event_time": value.event_time_us,
            "watermark": value.watermark_us,
            "broker_time": value.broker_time_us,
            **value.features,
        }
        lineage = _online_lineage(view, value, partition=row["source_partition"])
        into.rows += 1
        into.values += len(served)
        into.found(
            _of_value("online", value.entity, name, served=got, recomputed=row[name], lineage=lineage)
            for name, got in served.items()
            if _bits(got) != _bits(row[name])
        )


def _bits(value: Any) -> Any:
    """What is read from JSON and what comes from Arrow, alike: numbers by their bits, lists by their items."""
    if isinstance(value, list):
        return [_bits(item) for item in value]
    return value.hex() if isinstance(value, float) else value


def _lineage(view: FeatureView, row: Mapping[str, Any]) -> dict[str, Any]:
    names = ["source_partition", "source_offset", "pane", "pane_index", "window_end"]
    names += [name for name in ("window_start", *ORIGIN_COLUMNS.names) if name in row]
    return {
        "source_topic": view.input.topic,
        **{name: row[name] for name in names},
        "definition": f"{view.name} v{view.version} {view.definition_hash}",
    }


def _online_lineage(view: FeatureView, value: OnlineValue, *, partition: int) -> dict[str, Any]:
    return {
        "source_topic": view.input.topic,
        "source_partition": partition,
        "source_offset": value.source_offset,
        "pane": value.pane,
        "pane_index": value.pane_index,
        "window_end": value.window_end_us,
        "definition": f"{view.name} v{view.version} {value.definition_hash}",
    }


def _of_row(store: str, kind: str, entity: str | int | None, lineage: Mapping[str, Any]) -> Mismatch:
    return Mismatch(store=store, kind=kind, entity=entity, column=None, served=None, recomputed=None, lineage=lineage)


def _of_value(
    store: str, entity: str | int, column: str, *, served: Any, recomputed: Any, lineage: Mapping[str, Any]
) -> Mismatch:
    return Mismatch(
        store=store,
        kind="value",
        entity=entity,
        column=column,
        served=served,
        recomputed=recomputed,
        lineage=lineage,
    )
