"""The command ``headrace produce``."""

import json
import math
import os
import signal
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from types import FrameType
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from infra.local.port import split_address
from jobs.flights.producer import DEFAULT_PARTITIONS, ProduceProgress, ProduceSummary, produce_flights
from jobs.settings import Settings
from schemas.errors import ConfigError, ServiceError
from schemas.time import format_rfc3339

__all__ = ["ProduceProgress", "ProduceSummary", "app", "produce_flights"]

app = typer.Typer(name="produce", help="Put events of real input on Kafka.", no_args_is_help=True, add_completion=False)


@app.callback()
def _group() -> None:
    """Put events of real input on Kafka."""


@app.command()
def flights(
    *,
    start: Annotated[
        str | None,
        typer.Option(
            "--from",
            metavar="TIME",
            help="Beginning of the range: 2013-02-01, or RFC 3339.",
            show_default="that of the data",
        ),
    ] = None,
    end: Annotated[
        str | None,
        typer.Option("--to", metavar="TIME", help="End of the range, not in it.", show_default="that of the data"),
    ] = None,
    speed: Annotated[
        str, typer.Option(metavar="N|max", help="How many times faster than real time, or as fast as possible.")
    ] = "max",
    late_share: Annotated[
        float, typer.Option(min=0, max=1, help="Share of reports that arrive up to 6 hours late.")
    ] = 0.0,
    invalid_share: Annotated[
        float, typer.Option(min=0, max=1, help="Share of reports with a corrupted payload.")
    ] = 0.0,
    seed: Annotated[int, typer.Option(help="Draws which reports are late or corrupted.")] = 0,
    partitions: Annotated[int, typer.Option(min=1, help="Partitions of topics that are created.")] = DEFAULT_PARTITIONS,
    brokers: Annotated[
        str | None,
        typer.Option(
            metavar="HOST:PORT",
            help="Address of Kafka.",
            show_default="HEADRACE_KAFKA, or else the local service's",
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the summary as JSON.")] = False,
) -> None:
    """Replay the flights that left New York in 2013, each event when it would have become known.

    A departure goes to flights.departed, keyed by airport; a landing to
    flights.landed, keyed by aircraft. Times are UTC, and the range is one of
    the times at which events become known. Ctrl-C stops in good order.

    A month at once:

      headrace produce flights --from 2013-01-01 --to 2013-02-01

    An hour each second, with trouble:

      headrace produce flights --speed 3600 --late-share 0.02
      --invalid-share 0.01
    """
    arguments: dict[str, Any] = {
        "start": _read_time(start, option="--from"),
        "end": _read_time(end, option="--to"),
        "speed": read_speed(speed),
    }
    for address in brokers.split(",") if brokers else ():
        _check_address(address)
    bootstrap = brokers or Settings.from_environment(os.environ).address("kafka")
    with stop_on_signal() as stop, _progress_bar("flights") as on_progress:
        summary = produce_flights(
            bootstrap,
            **arguments,
            late_share=late_share,
            invalid_share=invalid_share,
            seed=seed,
            partitions=partitions,
            on_progress=on_progress,
            stop=stop,
        )
    if as_json:
        typer.echo(json.dumps({"kafka": bootstrap, **summary.to_json()}, indent=2))
    else:
        _print_summary(summary, bootstrap)
    if not summary.is_complete:
        typer.echo("Stopped before the end of the range.", err=True)
        raise typer.Exit(130)


def _read_time(text: str | None, *, option: str) -> datetime | None:
    if text is None:
        return None
    try:
        moment = datetime.fromisoformat(text)
    except ValueError as exc:
        msg = f"{option} is {text!r}, expected a day such as 2013-02-01 or a time such as 2013-02-01T06:00:00Z, in UTC"
        raise ConfigError(msg) from exc
    return moment if moment.tzinfo else moment.replace(tzinfo=UTC)


def _check_address(address: str) -> None:
    try:
        split_address(address, service="Kafka")
    except ServiceError as exc:
        msg = f"--brokers has {address!r}, expected host:port, several with commas between"
        raise ConfigError(msg) from exc


def read_speed(text: str) -> float | None:
    """Read how many times faster than real time; None for as fast as possible.

    Raises:
        ConfigError: It is neither.
    """
    if text == "max":
        return None
    msg = f"--speed is {text!r}, expected a number above 0 such as 3600 (an hour each second), or 'max'"
    try:
        speed = float(text)
    except ValueError as exc:
        raise ConfigError(msg) from exc
    if not 0 < speed < math.inf:
        raise ConfigError(msg)
    return speed


@contextmanager
def stop_on_signal() -> Iterator[threading.Event]:
    """Have Ctrl-C and SIGTERM set an event, for as long as the block takes."""
    stop = threading.Event()

    def ask_to_stop(_: int, __: FrameType | None) -> None:
        stop.set()

    before = {number: signal.signal(number, ask_to_stop) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield stop
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextmanager
def _progress_bar(title: str) -> Iterator[Callable[[ProduceProgress], None]]:
    console = Console(stderr=True)
    bar = Progress(
        TextColumn("{task.description}"),
        BarColumn(bar_width=10),
        TextColumn("{task.fields[counted]}"),
        TextColumn("{task.fields[simulated]}"),
        TextColumn("{task.fields[rate]:,.0f}/s"),
        TimeRemainingColumn(compact=True),
        console=console,
        disable=not console.is_terminal,
    )
    task = bar.add_task(title, total=None, counted="", simulated="", rate=0.0)

    def on_progress(progress: ProduceProgress) -> None:
        bar.update(
            task,
            total=progress.total,
            completed=progress.sent,
            counted=f"{progress.sent:,}/{progress.total:,}",
            simulated=format_rfc3339(progress.known_us)[:16].replace("T", " "),
            rate=progress.sent / progress.wall_s if progress.wall_s else 0.0,
        )

    with bar:
        yield on_progress


def _print_summary(summary: ProduceSummary, bootstrap: str) -> None:
    table = Table("topic", "events", "delayed", "corrupted", box=None, pad_edge=False)
    for column in table.columns[1:]:
        column.justify = "right"
    for topic, events in summary.topics.items():
        faults = sum(summary.injected[topic].values())
        table.add_row(topic, f"{events:,}", f"{summary.delayed[topic]:,}", f"{faults:,}")
    console = Console(highlight=False, soft_wrap=True)
    console.print(table)
    if summary.first_event_us is not None and summary.last_event_us is not None:
        console.print(f"event time {format_rfc3339(summary.first_event_us)} to {format_rfc3339(summary.last_event_us)}")
    totals = Counter[str]()
    for counts in summary.injected.values():
        totals.update(counts)
    if totals:
        console.print("corrupted: " + ", ".join(f"{count:,} {name}" for name, count in totals.items()))
    took = f"{summary.wall_s:.1f} s, {summary.events_per_s:,.0f} events/s"
    console.print(f"{summary.events:,} events to Kafka at {bootstrap} in {took}")
