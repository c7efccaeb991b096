"""``headrace freshness``: are features readable within the time that their views promise?"""

import asyncio
import json
import os
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Annotated, Any, Final

import pyarrow as pa
import pyarrow.compute as pc
import typer
from rich.console import Console
from rich.table import Table

from jobs.application import load_application
from jobs.reach import reach_kafka, reach_redis
from jobs.role import Role
from jobs.scrape import Samples, scrape
from jobs.settings import Settings
from jobs.topic_reader import end_offsets, read_topic
from schemas.row import TIMESTAMP
from schemas.view import FeatureView
from streams.observability.freshness import Stage
from streams.sinks.online import KEEP_TTLS, OnlineReader, OnlineValue, Status
from streams.sinks.rows import ORDER_COLUMNS
from streams.wire import decode_rows

BREACHED: Final = 3
"""Exit code of a breach: neither a wrong setting (2) nor a failure to look (1)."""
_KEYS_PER_READ: Final = 1_000


@dataclass(frozen=True, kw_only=True)
class Report:
    """How fresh a view is.

    Attributes:
        view: Its name.
        objective_ms: Time within which rows must be readable; None where there is no objective.
        objective_share: Share of the rows for which that must hold.
        written_rows: Rows that the online worker has written since it began; None where it does not answer.
        write_p50_ms: Median of their freshness at write, estimated from the histogram.
        write_p99_ms: 99th percentile.
        read_p99_ms: 99th percentile at read, of the rows that were read back.
        checked_rows: Newest rows on the view's topic that were looked for in the online store now.
        unreadable_rows: How many of them are not readable.
        oldest_unreadable_ms: How long ago the event of the oldest of them came to the broker, or, where no event made
            it, it was computed.
        breaches: Where the objective is breached: ``write``, ``read``, or ``now``.
    """

    view: str
    objective_ms: float | None
    objective_share: float
    written_rows: int | None
    write_p50_ms: float | None
    write_p99_ms: float | None
    read_p99_ms: float | None
    checked_rows: int
    unreadable_rows: int
    oldest_unreadable_ms: float | None
    breaches: tuple[str, ...]


def freshness(
    names: Annotated[
        list[str] | None, typer.Argument(metavar="VIEW", help="Names of views; all when left out.", show_default=False)
    ] = None,
    *,
    rows: Annotated[int, typer.Option(min=1, help="Newest rows of each partition to look for.")] = 200,
    metrics_port: Annotated[
        int | None, typer.Option(help="Port of the online worker's metrics.", show_default="9102")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON in place of a table.")] = False,
) -> None:
    """Check that features are readable within the time that their views promise.

    What the online worker has measured in the last minute, at write and at read, and what is readable now: the newest
    rows on each view's topic are looked for in the online store, whatever the workers say. A view's promise is
    `Serving(freshness=..., freshness_share=...)`. Exit code 3 when one is breached.
    """
    settings = Settings.from_environment(os.environ)
    application = load_application(settings.application)
    views = [application.view(name) for name in names] if names else list(application.views.values())
    brokers, redis_url = settings.address("kafka"), settings.address("redis")
    reach_kafka(brokers)
    reach_redis(redis_url)
    port = settings.role_metrics_port(Role.ONLINE) if metrics_port is None else metrics_port
    samples = scrape([port] if port else [])
    reports = asyncio.run(_report(views, settings, brokers=brokers, rows=rows, samples=samples))
    if as_json:
        typer.echo(json.dumps([asdict(report) for report in reports], indent=2))
    else:
        _print(reports)
        if not samples.by_name:
            typer.echo(f"No online worker answers on port {port}: what it has measured is not known.", err=True)
    if any(report.breaches for report in reports):
        raise typer.Exit(BREACHED)


async def _report(
    views: Sequence[FeatureView], settings: Settings, *, brokers: str, rows: int, samples: Samples
) -> list[Report]:
    async with OnlineReader(settings.address("redis"), pseudonyms=settings.pseudonyms(views)) as reader:
        return [_judge(view, await _look(view, reader, brokers=brokers, rows=rows), samples) for view in views]


@dataclass(frozen=True)
class _Found:
    checked: int
    waiting_ms: list[float]
    """How long rows that are not readable have waited: since their event came or, made by none, they were computed."""


async def _look(view: FeatureView, reader: OnlineReader, *, brokers: str, rows: int) -> _Found:
    newest = _newest_rows(view, brokers=brokers, rows=rows)
    entities = list(dict.fromkeys(row[view.entity.key] for row in newest))
    values: dict[Any, OnlineValue] = {}
    for start in range(0, len(entities), _KEYS_PER_READ):
        part = entities[start : start + _KEYS_PER_READ]
        values.update(zip(part, await reader.read(view, part, now_us=0), strict=True))
    now_us = time.time_ns() // 1_000
    kept_since_us = None if view.ttl_us is None else now_us - KEEP_TTLS * view.ttl_us
    checked, waiting_ms = 0, []
    for row in newest:
        value = values[row[view.entity.key]]
        is_gone = value.status is Status.MISSING and kept_since_us is not None
        if is_gone and row["computed_time"] < (kept_since_us or 0):
            continue  # it has expired, as it should
        checked += 1
        stored = (value.window_end_us, value.pane_index, value.source_offset)
        if None in stored or stored < tuple(row[name] for name in ORDER_COLUMNS):
            # What a silent partition fires, no event made: it has waited since it was computed.
            came_us = row["computed_time"] if row["broker_time"] is None else row["broker_time"]
            waiting_ms.append((now_us - came_us) / 1_000)
    return _Found(checked, waiting_ms)


def _newest_rows(view: FeatureView, *, brokers: str, rows: int) -> list[dict[str, Any]]:
    times = ("window_end", "broker_time", "computed_time")
    schema = pa.schema(
        [
            view.feature_schema.field(view.entity.key),
            *(pa.field(name, TIMESTAMP) for name in times),
            pa.field("pane_index", pa.int64()),
            pa.field("source_offset", pa.int64()),
            pa.field("definition_hash", pa.string()),
        ]
    )
    starts = {number: max(0, end - rows) for number, end in end_offsets(brokers, view.topic).items()}
    found: list[dict[str, Any]] = []
    for batch in read_topic(brokers, view.topic, start_offsets=starts):
        table = decode_rows(batch.values, schema)
        table = table.filter(pc.equal(table["definition_hash"], view.definition_hash))
        plain = [c.cast(pa.int64()) if pa.types.is_timestamp(c.type) else c for c in table.columns]
        found += pa.table(plain, names=table.column_names).to_pylist()
    return found


def _judge(view: FeatureView, found: _Found, samples: Samples) -> Report:
    serving = view.serving
    bound_ms = None if serving.freshness_us is None else serving.freshness_us / 1_000
    breaches: list[str] = []
    if bound_ms is not None:
        breached = samples.values("headrace_freshness_breached", "stage", view=view.name)
        breaches += [str(stage) for stage in Stage if breached.get(stage)]
        beyond = sum(age_ms > bound_ms for age_ms in found.waiting_ms)
        if found.checked and 1 - beyond / found.checked < serving.freshness_share:
            breaches.append("now")
    quantiles = {
        name: samples.quantile(metric, q, view=view.name)
        for name, metric, q in (
            ("write_p50_ms", "headrace_freshness_seconds", 0.5),
            ("write_p99_ms", "headrace_freshness_seconds", 0.99),
            ("read_p99_ms", "headrace_read_freshness_seconds", 0.99),
        )
    }
    written = samples.total("headrace_freshness_seconds_count", view=view.name) if samples.by_name else None
    return Report(
        view=view.name,
        objective_ms=bound_ms,
        objective_share=serving.freshness_share,
        written_rows=None if written is None else int(written),
        **{name: None if value is None else value * 1_000 for name, value in quantiles.items()},
        checked_rows=found.checked,
        unreadable_rows=len(found.waiting_ms),
        oldest_unreadable_ms=max(found.waiting_ms, default=None),
        breaches=tuple(breaches),
    )


def _print(reports: Sequence[Report]) -> None:
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False)
    for title in ("view", "objective", "written", "p50", "p99", "p99 read", "looked for", "unreadable", "verdict"):
        table.add_column(title, justify="left" if title in ("view", "verdict") else "right", no_wrap=True)
    for report in reports:
        verdict = "[green]met[/]" if not report.breaches else f"[bold red]breached: {', '.join(report.breaches)}[/]"
        table.add_row(
            report.view,
            "" if report.objective_ms is None else f"{report.objective_share:.1%} in {report.objective_ms:,.0f} ms",
            "" if report.written_rows is None else f"{report.written_rows:,}",
            *(
                "" if ms is None else f"{ms:,.0f} ms"
                for ms in (report.write_p50_ms, report.write_p99_ms, report.read_p99_ms)
            ),
            f"{report.checked_rows:,}",
            f"{report.unreadable_rows:,}"
            + ("" if report.oldest_unreadable_ms is None else f", oldest {report.oldest_unreadable_ms:,.0f} ms"),
            "" if report.objective_ms is None else verdict,
        )
    console = Console(highlight=False)
    console.width = max(console.width, 120)
    console.print(table)
