"""``headrace backfill``: the features of records that have been, into the offline store."""

import json
import os
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from datetime import UTC, date, datetime
from enum import StrEnum
from typing import Annotated, Any, Final

import typer
from rich.console import Console
from rich.table import Table

from infra.local.state import claimed
from jobs.application import Application, load_recorded_application
from jobs.backfill_run import Job, Run, document_of
from jobs.dead_letters import Letters, choose_letters, choose_sources, letter_sources
from jobs.reach import reach_kafka
from jobs.settings import Settings
from offline import backfill as engine
from offline.late import lateness_us, with_late
from schemas.errors import ConfigError
from schemas.row import Reason
from schemas.time import parse_duration_us, parse_rfc3339_us
from schemas.view import FeatureView
from streams.ports import RecordLog
from streams.sinks.archive import Archive
from streams.sinks.offline import History, OfflineWriter, table_uri
from streams.transport.topic_log import TopicLog

_TRIED_RECORDS: Final = 100_000
"""Records of which a dry run tries how fast they go."""


class Source(StrEnum):
    """Where records are read."""

    DELTA = "delta"
    KAFKA = "kafka"


def backfill(
    view_name: Annotated[str, typer.Argument(metavar="VIEW", help="The feature view.")],
    *,
    from_: Annotated[
        str | None,
        typer.Option("--from", help="From the first record of this time on; a date or RFC 3339.", show_default="all"),
    ] = None,
    to: Annotated[
        str | None, typer.Option(help="Up to the first record of this time.", show_default="all that is there")
    ] = None,
    source: Annotated[
        Source, typer.Option(help="delta: the archive of the raw topic; kafka: the topic.")
    ] = Source.DELTA,
    into: Annotated[
        str | None,
        typer.Option(
            help="Root of another offline store to write to.", show_default="HEADRACE_DELTA, else <home>/delta"
        ),
    ] = None,
    late: Annotated[
        str | None,
        typer.Option(
            "--with-late",
            metavar="DURATION|all",
            help="Count rows that were too late by less than this, where they came; all: those of all dead letters. "
            "Needs `--into`.",
        ),
    ] = None,
    workers: Annotated[int, typer.Option(min=1, help="Processes, each with one partition at a time.")] = 1,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Say what would be done, and how long it would take.")
    ] = False,
    restart: Annotated[
        bool, typer.Option("--restart", help="Throw away what an interrupted backfill of the view has done.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON in place of a table.")] = False,
) -> None:
    """Compute the features of records that have been, by the engine of the live path.

    Rows go to files that no reader sees, then in one commit before the live rows that the view's table has: those stay
    as they are. For each partition it is said which source offsets the history is of, and where live rows begin. Times
    are record timestamps: what a log can be cut by. The engine reads from the first record that is there, since windows
    reach back. A backfill that was interrupted goes on where it was when it is started again; one that has ended can be
    continued at both of its ends.

    With `--with-late` rows count that were too late for the live path, in a store of their own: by a definition that
    waits longer, whose hash is told.
    """
    settings = Settings.from_environment(os.environ)
    application = load_recorded_application(settings.application)
    view = application.view(view_name)
    engine.check_view(view)
    wanted = {"from": moment_us(from_, "--from"), "to": moment_us(to, "--to")}
    if wanted["from"] is not None and wanted["to"] is not None and wanted["from"] >= wanted["to"]:
        msg = f"`--from` is {from_} and `--to` is {to}, expected the earlier one first"
        raise ConfigError(msg)
    settings.check_delta()
    log, target = record_log(source, settings, view), into or settings.delta
    late_us = None
    if late is not None:
        if target.rstrip("/") == settings.delta.rstrip("/"):
            msg = (
                f"`--with-late` makes other rows than those in {settings.delta}, expected `--into` with another root, "
                "where they are by themselves"
            )
            raise ConfigError(msg)
        late_us = _lateness_us(late, settings, application, view)
        view = with_late(view, late_us)
    job = Job(
        application=application.name,
        module=application.module,
        view=view.name,
        definition_hash=view.definition_hash,
        log=str(log),
        target=target,
        from_us=wanted["from"],
        to_us=wanted["to"],
        late_us=late_us,
    )
    writer = OfflineWriter(target, storage_options=settings.delta_options)

    def plan() -> list[engine.PartitionPlan]:
        return engine.plan_backfill(view, log, from_us=job.from_us, to_us=job.to_us, writer=writer)

    if dry_run:
        plans = plan()
        rate = _try_rate(view, log, plans, application=application.name)
        _print_plan(view, log, plans, rate=rate, workers=workers, as_json=as_json)
        return
    console = Console(stderr=True)
    directory = settings.home / "backfill" / f"{view.name}-v{view.version}"
    with claimed(directory, by=f"backfill {view.name}"):
        run = Run.begin(
            directory,
            job,
            plan,
            table=table_uri(target, view),
            restarts=restart,
            storage_options=settings.delta_options,
        )
        if run.is_resumed:
            console.print(f"going on with the backfill that was begun before ({directory})", soft_wrap=True)
        started_s = time.perf_counter()
        done = run.execute(view, log, workers=workers, console=console)
        while to is None and (further := engine.extend_plans(view, log, run.plans, writer=writer)):
            run.replan(further)
            done = run.execute(view, log, workers=workers, console=console)
        added = engine.finish_backfill(view, run.plans, done, stage=run.stage, writer=writer)
        run.end()
    _print_done(
        view,
        run.plans,
        done,
        added,
        target=target,
        took_s=time.perf_counter() - started_s,
        is_late_counted=late_us is not None,
        as_json=as_json,
    )


def record_log(source: Source, settings: Settings, view: FeatureView) -> RecordLog:
    """Name the log that a view's records are read from."""
    topic = view.input.topic
    if source is Source.KAFKA:
        return TopicLog(settings.address("kafka"), topic)
    return Archive(settings.delta, topic, settings.delta_options)


def _lateness_us(text: str, settings: Settings, application: Application, view: FeatureView) -> int:
    """Tell how late rows are to count, from what was asked for: a duration, or as late as the dead letters are."""
    if text != "all":
        return parse_duration_us(text, field="--with-late")
    brokers = settings.address("kafka")
    reach_kafka(brokers)
    sources = choose_sources(letter_sources(application), [source.topic for source in view.sources])
    choice = choose_letters(application, reasons=[Reason.LATE], views=[view.name])
    letters = (letter for source in sources for letter in Letters(brokers, source, choice))
    return lateness_us(letters, view)


def _try_rate(
    view: FeatureView, log: RecordLog, plans: Sequence[engine.PartitionPlan], *, application: str
) -> float | None:
    """Run the first records of the largest partition, writing nothing; records a second, None where there are none."""
    plan = max(plans, key=lambda plan: plan.records, default=None)
    if plan is None or not plan.records:
        return None
    return engine.measure_rate(
        view, log, plan, application=application, n_records=_TRIED_RECORDS, clock_s=time.perf_counter
    )


def moment_us(text: str | None, option: str) -> int | None:
    """Read a date, or a time in RFC 3339, that an option was given; None where it was not.

    Raises:
        ConfigError: It is neither.
    """
    if text is None:
        return None
    try:
        if len(text) == len("2013-03-01"):
            return parse_rfc3339_us(datetime.combine(date.fromisoformat(text), datetime.min.time(), UTC).isoformat())
        return parse_rfc3339_us(text)
    except ValueError as exc:
        msg = f"`{option}` is {text!r}, expected a date such as 2013-03-01 or a time such as 2013-03-01T12:00:00Z"
        raise ConfigError(msg) from exc


def _print_plan(
    view: FeatureView,
    log: RecordLog,
    plans: Sequence[engine.PartitionPlan],
    *,
    rate: float | None,
    workers: int,
    as_json: bool,
) -> None:
    records = sum(plan.records for plan in plans)
    n_processes = max(1, min(workers, sum(1 for plan in plans if plan.wanted), os.cpu_count() or 1))
    # A partition is not shared out: it takes at least as long as the largest of them.
    longest = max((plan.records for plan in plans), default=0)
    estimate_s = None if rate is None else max(records / n_processes, longest) / rate
    if as_json:
        document = {
            "view": view.name,
            "version": view.version,
            "definition_hash": view.definition_hash,
            "allowed_lateness": view.allowed_lateness,
            "log": str(log),
            "records": records,
            "estimated_s": None if estimate_s is None else round(estimate_s, 1),
            "partitions": [document_of(plan) for plan in plans],
        }
        typer.echo(json.dumps(document, indent=2))
        return
    table = Table("partition", "reads", "records", "bytes", "rows of", "live from", box=None, pad_edge=False)
    for plan in plans:
        table.add_row(
            str(plan.partition),
            _span(plan.read),
            f"{plan.records:,}",
            "" if plan.size_bytes is None else f"{plan.size_bytes:,}",
            _span(plan.wanted) if plan.wanted else "nothing to add",
            "" if plan.live_from is None else str(plan.live_from),
        )
    console = Console()
    console.print(table)
    console.print(f"{view.name} v{view.version} from {log}: {records:,} records", soft_wrap=True)
    if estimate_s is not None:
        console.print(
            f"about {estimate_s:,.1f} s in {n_processes} process{'es' if n_processes > 1 else ''}, by the speed of "
            f"{min(_TRIED_RECORDS, records):,} of them",
            soft_wrap=True,
        )


def _span(offsets: range) -> str:
    return f"{offsets.start} to {offsets.stop - 1}" if offsets else "none"


def _print_done(
    view: FeatureView,
    plans: Sequence[engine.PartitionPlan],
    done: Mapping[int, engine.Progress],
    added: History,
    *,
    target: str,
    took_s: float,
    is_late_counted: bool,
    as_json: bool,
) -> None:
    records = sum(progress.records for progress in done.values())
    reasons = sum((Counter(progress.dead_letters) for progress in done.values()), Counter[str]())
    copies = sum(progress.copies for progress in done.values())
    partitions = [_outcome(plan, done, added) for plan in plans]
    if as_json:
        document = {
            "view": view.name,
            "version": view.version,
            "definition_hash": view.definition_hash,
            "allowed_lateness": view.allowed_lateness,
            "table": table_uri(target, view),
            "table_version": added.table_version,
            "records": records,
            "rows_added": added.rows,
            "dead_letters": dict(sorted(reasons.items())),
            "copies": copies,
            "took_s": round(took_s, 3),
            "partitions": partitions,
        }
        typer.echo(json.dumps(document, indent=2))
        return
    table = Table("partition", "history of", "live from", "rows made", box=None, pad_edge=False)
    for found in partitions:
        live_from = "" if found["live_from"] is None else str(found["live_from"])
        table.add_row(str(found["partition"]), _span(range(*found["history"])), live_from, f"{found['rows']:,}")
    console = Console()
    console.print(table)
    by_reason = ", ".join(f"{reason} {number:,}" for reason, number in sorted(reasons.items()))
    letters = f"{reasons.total():,} records in no row" + (f" ({by_reason})" if by_reason else "")
    speed = f"{records / max(took_s, 1e-9):,.0f} records/s"
    console.print(f"{records:,} records in {took_s:.1f} s, {speed}; {letters}", soft_wrap=True)
    where = f"{table_uri(target, view)}, version {added.table_version}"
    console.print(f"{added.rows:,} rows added to {where}" if added.rows else "no rows to add", soft_wrap=True)
    if is_late_counted:
        console.print(
            f"rows that were late count: definition {view.definition_hash}, of `allowed_lateness` "
            f"{view.allowed_lateness}; {copies:,} that had been sent again for it are left out",
            soft_wrap=True,
        )
    for found in partitions:
        if found["missing"]:
            missing = _span(range(*found["missing"]))
            said = (
                f"partition {found['partition']}: offsets {missing} are neither history nor live; back-fill up to there"
            )
            console.print(said, soft_wrap=True)


def _outcome(plan: engine.PartitionPlan, done: Mapping[int, engine.Progress], added: History) -> dict[str, Any]:
    live_from = added.live_from.get(plan.partition)
    span = added.spans.get(plan.partition, range(plan.wanted.start, plan.wanted.start))
    is_apart = bool(span) and live_from is not None and live_from > span.stop
    return {
        "partition": plan.partition,
        "history": [span.start, span.stop],
        "live_from": live_from,
        "missing": [span.stop, live_from] if is_apart else None,
        "rows": done[plan.partition].rows if plan.partition in done else 0,
    }
