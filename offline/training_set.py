"""Training sets: labels, each with the features that an online read at its moment would have returned.

The join is that of :mod:`offline.point_in_time`: a row counts from when it could be read, of those the newest by
(window_end, pane_index, source_offset), and nothing from after the label's time. A view's rows are read as of one
version of its table, those of the labels' entities alone; where they are many they go to disk by entity first, and are
joined a share of the entities at a time. Labels and what is joined to them are held in memory.
"""

import math
import tempfile
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import polars as pl
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.dataset as ds

from offline.point_in_time import read_as_of
from schemas.errors import ConfigError, SinkUnavailableError
from schemas.row import TIMESTAMP
from schemas.view import FeatureView
from streams.sinks.delta import mapped_errors
from streams.sinks.offline import open_table, table_uri
from streams.sinks.rows import ORDER_COLUMNS

HELD_ROWS: Final = 10_000_000
"""Rows of a view that are joined at a time, about."""


@dataclass(frozen=True, kw_only=True)
class JoinedSet:
    """A training set.

    Attributes:
        rows: The labels as they came, and for each view ``<view>__<feature>`` and ``<view>__status``
            (:class:`schemas.score.InputStatus`); features of missing and stale rows are null.
        manifest: What it was made of: of each view version, definition hash, version of its table, rows and shares.
    """

    rows: pa.Table
    manifest: Mapping[str, Any]


def join_features(
    labels: pa.Table,
    views: Sequence[FeatureView],
    *,
    root: str | Path,
    time: str = "event_time",
    keys: Mapping[str, str] | None = None,
    max_age_us: int | None = None,
    held_rows: int = HELD_ROWS,
    storage_options: Mapping[str, str] | None = None,
) -> JoinedSet:
    """Join features to labels, as of each label's time.

    Args:
        labels: One row a label, in any order, which is kept.
        views: The views.
        root: Root of the offline store.
        time: Column of the labels' times, a timestamp with a time zone.
        keys: By view name, the column of the labels that has its entity keys; without it, that of the key's own name.
        max_age_us: Age above which a row is stale; a view's ``ttl`` where that is shorter or this is None.
        held_rows: Rows of a view that are joined at a time, about.
        storage_options: Options of the object store, as delta-rs takes them.

    Raises:
        ConfigError: The labels do not have the columns that are named, or have those that are to be added.
        SchemaMismatchError: A view's table belongs to another definition.
        SinkUnavailableError: There is no table, or the storage does not answer.
    """
    times = _times(labels, time)
    if len({view.name for view in views}) != len(views) or not views:
        msg = f"views are {[view.name for view in views]}, expected at least one, and each once"
        raise ConfigError(msg)
    joined, told = labels, []
    newest = pc.max(times).as_py() if labels.num_rows else None
    for view in views:
        entity = _keys(labels, view, (keys or {}).get(view.name, view.entity.key))
        table = open_table(root, view, storage_options=storage_options)
        if table is None:
            msg = (
                f"there is no table {table_uri(root, view)}, expected the offline role or a backfill to have written it"
            )
            raise SinkUnavailableError(msg)
        with mapped_errors(table_uri(root, view)):
            rows = table.to_pyarrow_dataset()
            found, n_rows = _join_view(view, entity, times, rows, newest=newest, max_age_us=max_age_us, held=held_rows)
        for name in found.column_names:
            if name in labels.column_names:
                msg = f"the labels have a column {name!r}, expected none of that name: it is to be added; rename theirs"
                raise ConfigError(msg)
            joined = joined.append_column(name, found[name])
        statuses = found[f"{view.name}__status"].to_pylist()
        own = found.select([f"{view.name}__{name}" for name in view.definitions]).rename_columns([*view.definitions])
        told.append(describe_join(view, own, statuses=statuses, n_rows=n_rows, table_version=table.version()))
    manifest = {
        "labels": {
            "rows": labels.num_rows,
            "time": time,
            "from": _text(pc.min(times).as_py()) if labels.num_rows else None,
            "to": _text(newest),
        },
        "max_age_us": max_age_us,
        "views": told,
    }
    return JoinedSet(rows=joined, manifest=manifest)


def _join_view(
    view: FeatureView,
    entity: pa.ChunkedArray,
    times: pa.ChunkedArray,
    rows: ds.Dataset,
    *,
    newest: Any,
    max_age_us: int | None,
    held: int,
) -> tuple[pa.Table, int]:
    """Read the rows of the labels' entities, and join them; returns what is added, and how many rows that were."""
    key = view.entity.key
    columns = list(dict.fromkeys([key, *view.definitions, "pane", "event_time", "watermark", *ORDER_COLUMNS]))
    # No row of a later event is known at an earlier time. Days are left out by the partitions of the table.
    where = None if newest is None else (pc.field("event_date") <= newest.date()) & (pc.field("event_time") <= newest)
    asked = pl.DataFrame(pa.table({"key": entity})).with_row_index("at").with_columns(_share=pl.lit(0, pl.UInt64))
    n_shares = max(1, math.ceil(rows.count_rows(filter=where) / held))
    asked = asked.with_columns(_share=pl.col("key").hash(seed=0) % n_shares)
    wanted = pc.unique(entity).drop_null()
    n_rows, parts = 0, []
    schema = pa.schema([view.row_schema.field(name) for name in columns])
    with ExitStack() as stack:
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="headrace-join-")))
        writers = [
            stack.enter_context(pa.ipc.new_stream(str(directory / f"{share}.arrow"), schema))
            for share in range(n_shares if n_shares > 1 else 0)
        ]
        kept: list[pa.Table] = []
        for batch in rows.to_batches(columns=columns, filter=where):
            own = pa.Table.from_batches([batch]).cast(schema)
            own = own.filter(pc.is_in(own[key], value_set=wanted))
            n_rows += own.num_rows
            if not writers:
                kept.append(own)
                continue
            shares = (pl.Series(own[key]).hash(seed=0) % n_shares).to_arrow()
            for share, writer in enumerate(writers):
                if (mine := own.filter(pc.equal(shares, share))).num_rows:
                    writer.write_table(mine)
        for writer in writers:
            writer.close()
        for share in range(n_shares):
            at = asked.filter((pl.col("_share") == share) | (pl.col("key").is_null() & (share == 0)))["at"].to_arrow()
            if writers:
                with pa.ipc.open_stream(str(directory / f"{share}.arrow")) as reader:
                    history = reader.read_all()
            else:
                history = pa.concat_tables(kept) if kept else schema.empty_table()
            found = read_as_of(entity.take(at), times.take(at), history, view=view, max_age_us=max_age_us)
            named = {f"{view.name}__{name}": found.features[name] for name in view.definitions}
            parts.append(pa.table({"_at": at, **named, f"{view.name}__status": found.status}))
    return pa.concat_tables(parts).sort_by("_at").drop_columns(["_at"]), n_rows


def _times(labels: pa.Table, name: str) -> pa.ChunkedArray:
    _see(labels, name, "times")
    kind = labels.schema.field(name).type
    if not pa.types.is_timestamp(kind) or kind.tz is None or labels[name].null_count:
        nulls = f" with {labels[name].null_count} nulls" if labels[name].null_count else ""
        msg = f"labels have {name} as {kind}{nulls}, expected a timestamp with a time zone in every row"
        raise ConfigError(msg)
    return labels[name].cast(TIMESTAMP, safe=False)


def _keys(labels: pa.Table, view: FeatureView, name: str) -> pa.ChunkedArray:
    _see(labels, name, f"keys of view {view.name}")
    kind = view.row_schema.field(view.entity.key).type
    try:
        return labels[name].cast(kind)
    except pa.ArrowException as exc:
        msg = f"labels have {name} as {labels.schema.field(name).type}, expected {kind} for view {view.name}: {exc}"
        raise ConfigError(msg) from exc


def _see(labels: pa.Table, name: str, what: str) -> None:
    if name not in labels.column_names:
        msg = f"labels have columns {labels.column_names}, expected {name!r} for the {what} among them; name theirs"
        raise ConfigError(msg)


def describe_join(
    view: FeatureView, found: pa.Table, *, statuses: Sequence[str], n_rows: int, table_version: int | None
) -> dict[str, Any]:
    """Say what was joined of a view, for a manifest.

    Args:
        view: The view.
        found: The features that were joined, a row a label.
        statuses: Status of each of them.
        n_rows: Rows of the view that were read.
        table_version: Version of its table.
    """
    n_labels = max(found.num_rows, 1)
    return {
        "view": view.name,
        "version": view.version,
        "definition_hash": view.definition_hash,
        "table_version": table_version,
        "rows": n_rows,
        "status_shares": {status: count / n_labels for status, count in sorted(Counter(statuses).items())},
        "null_shares": {name: found[name].null_count / n_labels for name in found.column_names},
    }


def _text(moment: Any) -> str | None:
    return None if moment is None else moment.isoformat()
