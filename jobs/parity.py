"""``headrace parity``: is what was served what the engine makes of the raw records?"""

import asyncio
import hashlib
import json
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from datetime import datetime
from pathlib import Path
from typing import Annotated, Any, Final

import pyarrow as pa
import pyarrow.dataset as ds
import typer
from prometheus_client import CollectorRegistry, Gauge
from rich.console import Console
from rich.table import Table

from jobs.application import load_application
from jobs.backfill import Source, record_log
from jobs.metrics_file import write_metrics_file
from jobs.reach import reach_redis
from jobs.record_bar import record_bar
from jobs.recorded_scores import read_scores
from jobs.settings import Settings
from offline.parity import Comparison, Mismatch, Online, compare
from schemas.view import FeatureView
from streams.ports import RecordLog
from streams.sinks.delta import mapped_errors
from streams.sinks.offline import scan_features, table_uri
from streams.sinks.online import OnlineReader, OnlineValue
from streams.sinks.pseudonym import NO_PSEUDONYMS, Pseudonyms

DIFFERENT: Final = 3
"""Exit code where values differ: neither a wrong setting (2) nor a failure to look (1)."""
_KEYS_PER_READ: Final = 1_000


def parity(
    view_name: Annotated[str, typer.Argument(metavar="VIEW", help="The feature view.")],
    *,
    source: Annotated[
        Source, typer.Option(help="delta: the archive of the raw topic; kafka: the topic.")
    ] = Source.DELTA,
    sample: Annotated[float, typer.Option(min=0.0, max=1.0, help="Share of the entities whose rows to compare.")] = 1.0,
    online: Annotated[bool, typer.Option("--online/--no-online", help="Compare the online store too.")] = True,
    scores: Annotated[
        bool, typer.Option("--scores", help="Compare which rows the scores say that they were made of.")
    ] = False,
    shown: Annotated[int, typer.Option("--list", min=0, help="How many mismatches to list.")] = 20,
    metrics_file: Annotated[
        Path | None,
        typer.Option(help="Write metrics here, for the textfile collector of Prometheus' node exporter."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON in place of a table.")] = False,
) -> None:
    """Make what was served anew from the raw records, by the same engine, and compare it value by value.

    Rows of the offline store and values of the online store are compared to the bit. What the log has no records of
    (yet) is not judged, and counted. A sample of entities saves comparing, not computing: watermarks need every record.
    With `--scores` each score of a model that reads the view is compared too: the row that it says it was made of must
    be one that the records make. Exit code 3 where something differs.
    """
    settings = Settings.from_environment(os.environ)
    application = load_application(settings.application)
    view = application.view(view_name)
    settings.check_delta()
    rows = scan_features(settings.delta, view, storage_options=settings.delta_options)
    log = record_log(source, settings, view)

    def is_sampled(entity: str | int) -> bool:
        digest = hashlib.blake2b(str(entity).encode(), digest_size=8).digest()
        return int.from_bytes(digest) < sample * 2**64

    with mapped_errors(table_uri(settings.delta, view)):
        spans, entities = look(rows, view, is_sampled)
    values, pseudonyms = None, NO_PSEUDONYMS
    if online:
        pseudonyms = settings.pseudonyms([view])
        redis_url = settings.address("redis")
        reach_redis(redis_url)
        values = asyncio.run(read_online(view, entities, redis_url=redis_url, pseudonyms=pseudonyms))
    comparisons = _compare(
        view,
        log,
        application=application.name,
        rows=rows,
        root=settings.delta,
        spans=spans,
        online=values,
        reads=read_scores(application, view, settings) if scores else (),
        pseudonyms=pseudonyms,
        is_sampled=None if sample == 1.0 else is_sampled,
    )
    if metrics_file is not None:
        _write_metrics(metrics_file, view, comparisons)
    if as_json:
        typer.echo(json.dumps(_document(view, log, comparisons, shown=shown), indent=2, default=str))
    else:
        print_comparisons(comparisons, shown=shown, said=f"{view.name} v{view.version}, made anew from {log}")
    if any(comparison.mismatched for comparison in comparisons):
        raise typer.Exit(DIFFERENT)


def _compare(view: FeatureView, log: RecordLog, **options: Any) -> list[Comparison]:
    console = Console(stderr=True)
    bar = record_bar(console)
    with bar:
        task = bar.add_task(view.name, total=sum(part.records for part in log.parts().values()))
        return compare(view, log, tell=lambda records: bar.advance(task, records), **options)


def look(
    rows: ds.Dataset, view: FeatureView, is_sampled: Callable[[str | int], bool]
) -> tuple[dict[int, range], dict[int, set[str | int]]]:
    """Tell the source offsets that a table has rows of, from the first to the last, and its entities, by partition."""
    spans: dict[int, range] = {}
    entities: dict[int, set[str | int]] = {}
    key = view.entity.key
    for batch in rows.to_batches(columns=["source_partition", "source_offset", key]):
        table = pa.Table.from_batches([batch])
        edges = table.group_by("source_partition").aggregate([("source_offset", "min"), ("source_offset", "max")])
        for row in edges.to_pylist():
            found = range(row["source_offset_min"], row["source_offset_max"] + 1)
            before = spans.get(row["source_partition"], found)
            spans[row["source_partition"]] = range(min(before.start, found.start), max(before.stop, found.stop))
        for row in table.group_by(["source_partition", key]).aggregate([]).to_pylist():
            if is_sampled(row[key]):
                entities.setdefault(row["source_partition"], set()).add(row[key])
    return spans, entities


async def read_online(
    view: FeatureView, entities: dict[int, set[str | int]], *, redis_url: str, pseudonyms: Pseudonyms
) -> Online:
    """Read the online values of entities, by the partition that they are in.

    Raises:
        SinkError: The online store cannot be read.
    """
    now_us = time.time_ns() // 1_000
    values: dict[int, list[OnlineValue]] = {}
    async with OnlineReader(redis_url, pseudonyms=pseudonyms) as reader:
        for partition, found in entities.items():
            keys = sorted(found, key=str)
            values[partition] = []
            for at in range(0, len(keys), _KEYS_PER_READ):
                values[partition] += await reader.read(view, keys[at : at + _KEYS_PER_READ], now_us=now_us)
    return values


def _write_metrics(path: Path, view: FeatureView, comparisons: Sequence[Comparison]) -> None:
    registry = CollectorRegistry()
    labels = ["view", "version", "store"]
    gauges = {
        "rows": Gauge("headrace_parity_rows", "Served rows compared with rows made anew", labels, registry=registry),
        "values": Gauge("headrace_parity_values", "Values compared", labels, registry=registry),
        "mismatched": Gauge("headrace_parity_mismatches", "Values and rows that differ", labels, registry=registry),
        "not_judged": Gauge("headrace_parity_rows_not_judged", "Rows without records", labels, registry=registry),
    }
    for comparison in comparisons:
        for name, gauge in gauges.items():
            gauge.labels(view.name, str(view.version), comparison.store).set(getattr(comparison, name))
    checked = Gauge("headrace_parity_checked_timestamp_seconds", "When parity was checked", ["view"], registry=registry)
    checked.labels(view.name).set_to_current_time()
    write_metrics_file(path, registry)


def _document(view: FeatureView, log: RecordLog, comparisons: Sequence[Comparison], *, shown: int) -> dict[str, Any]:
    return {
        "view": view.name,
        "version": view.version,
        "log": str(log),
        "stores": [
            {**asdict(comparison), "mismatches": [asdict(found) for found in comparison.mismatches[:shown]]}
            for comparison in comparisons
        ],
    }


def print_comparisons(comparisons: Sequence[Comparison], *, shown: int, said: str) -> None:
    """Print comparisons as a table, below it what they are of, and the first differences."""
    console = Console()
    table = Table("store", "rows", "values", "mismatches", "not judged", box=None, pad_edge=False)
    for found in comparisons:
        counts = (found.rows, found.values, found.mismatched, found.not_judged)
        table.add_row(found.store, *(f"{count:,}" for count in counts))
    console.print(table)
    console.print(said, soft_wrap=True)
    listed = [mismatch for found in comparisons for mismatch in found.mismatches][:shown]
    for mismatch in listed:
        console.print(_said(mismatch), soft_wrap=True, markup=False, highlight=False)
    if (left := sum(found.mismatched for found in comparisons) - len(listed)) > 0:
        console.print(f"and {left:,} more; `--list {shown + left}` shows them", soft_wrap=True)


def _said(mismatch: Mismatch) -> str:
    lineage = ", ".join(f"{name} {_text(value)}" for name, value in mismatch.lineage.items())
    what = {
        "missing": "a row is missing",
        "unexpected": "a row that the records do not make",
        "doubled": "a row is there more than once",
        "value": f"{mismatch.column} is {_text(mismatch.served)}, expected {_text(mismatch.recomputed)}",
    }
    return f"{mismatch.store}, {mismatch.entity}: {what[mismatch.kind]} ({lineage})"


def _text(value: Any) -> str:
    return value.isoformat() if isinstance(value, datetime) else str(value)
