"""Definitions and batches for tests, in few words."""

import contextlib
import hashlib
import itertools
import json
import tempfile
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import pyarrow as pa

from schemas.contract import load_contract
from schemas.row import INPUT_COLUMNS, RECORD_COLUMNS
from schemas.source import EventSource
from schemas.view import FeatureView
from streams.windowing import StepResult, WindowEngine

Row = dict[str, Any]

EVENT_FIELDS: Mapping[str, Any] = {
    "key": {"type": ["string", "null"]},
    "at": {"type": ["integer", "null"], "x-unit": "s"},
    "id": {"type": ["string", "null"]},
    "kind": {"type": ["string", "null"]},
    "n": {"type": ["integer", "null"]},
    "x": {"type": ["number", "null"]},
    "flag": {"type": ["boolean", "null"]},
    "tags": {"type": ["array", "null"], "items": {"type": "string"}},
}
"""Fields of the events that most tests use; ``at`` is the event time, in seconds."""


def make_contract(fields: Mapping[str, Any] = EVENT_FIELDS, **more: Any) -> str:
    """Put a contract where it is found and return its reference; equal documents have equal references."""
    document = {"type": "object", "properties": dict(fields), **more}
    text = json.dumps(document)
    reference = f"test_{hashlib.sha256(text.encode()).hexdigest()[:12]}@1"
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "schemas" / "events" / f"{reference}.json"
        path.parent.mkdir(parents=True)
        path.write_text(text)
        with contextlib.chdir(directory):
            load_contract(reference)
    return reference


def make_source(fields: Mapping[str, Any] = EVENT_FIELDS, **settings: Any) -> EventSource:
    """Make a source whose plausible times reach back before 1970."""
    defaults: dict[str, Any] = {
        "event_time": "at",
        "max_future_skew": None,
        "plausible_from": "1900-01-01T00:00:00Z",
        "plausible_until": "2100-01-01T00:00:00Z",
    }
    return EventSource("test.events", **{"contract": make_contract(fields)} | defaults | settings)


def make_batch(view: FeatureView, rows: Iterable[Row]) -> pa.Table:
    """Lay rows out as the engine takes them; absent columns are null."""
    records = RECORD_COLUMNS if view.input.is_repartitioned else ()
    fields = {field.name: field for field in (*view.columns, *INPUT_COLUMNS, *records)}
    schema = pa.schema(fields.values())
    return pa.Table.from_pylist([{name: row.get(name) for name in schema.names} for row in rows], schema=schema)


def run_engine(
    view: FeatureView, rows: list[Row], *, splits: Iterable[int] = (), close: bool = False, restore: bool = False
) -> tuple[pa.Table, pa.Table, list[StepResult]]:
    """Run rows through a new engine, in batches that end before each of ``splits``.

    With ``restore``, each batch is taken by an engine that was restored from the snapshot of the one before.

    Returns:
        All feature rows, all dead letters, and the result of each step.
    """
    engine = WindowEngine(view)
    edges = [0, *sorted(set(splits)), len(rows)]
    results = []
    for start, stop in itertools.pairwise(edges):
        results.append(engine.step(make_batch(view, rows[start:stop]), processing_time_us=0))
        if restore:
            engine = WindowEngine.restore(view, engine.snapshot())
    if close:
        results.append(engine.close())
    return (
        pa.concat_tables([r.rows for r in results]).combine_chunks(),
        pa.concat_tables([r.dead_letters for r in results]).combine_chunks(),
        results,
    )


def to_rows(table: pa.Table) -> list[Row]:
    """Rows as dicts, times as microseconds."""
    columns = [
        column.cast(pa.int64()) if pa.types.is_timestamp(column.type) else column for column in table.itercolumns()
    ]
    return pa.table(columns, names=table.column_names).to_pylist()
