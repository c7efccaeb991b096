"""The commands ``headrace services up|down|status``."""

import json
import os
from dataclasses import asdict
from typing import Annotated

import typer

from infra.local.port import without_login
from infra.local.service import SERVICE_NAMES
from infra.local.services import ServiceStatus
from jobs.settings import Settings

app = typer.Typer(
    name="services",
    help="Run Kafka, Redis and Triton on this machine, without Docker.",
    add_completion=False,
    no_args_is_help=True,
)

_Only = Annotated[
    list[str] | None,
    typer.Argument(metavar="SERVICE", help="kafka, redis, triton; all of them when left out.", show_default=False),
]
_Json = Annotated[bool, typer.Option("--json", help="Print JSON in place of a table.")]


@app.command()
def up(only: _Only = None, *, as_json: _Json = False) -> None:
    """Start what is not there yet, wait until all is healthy, and leave it running.

    Data, logs and state live in .headrace/ (HEADRACE_HOME). A service whose address is given (HEADRACE_KAFKA,
    HEADRACE_REDIS, HEADRACE_TRITON) is checked and used, never started or stopped.
    """
    settings = Settings.from_environment(os.environ)
    services = settings.local_services(notify=lambda line: typer.echo(line, err=True))
    ready: list[ServiceStatus] = []

    def on_ready(status: ServiceStatus) -> None:
        ready.append(status)
        if not as_json:
            typer.echo(_line(status))

    services.up(only or SERVICE_NAMES, on_ready=on_ready)
    if as_json:
        typer.echo(json.dumps([_document(status) for status in ready], indent=2))
    elif any(status.log for status in ready):
        typer.echo(f"Logs are in {settings.home / 'logs'}")


@app.command()
def down(only: _Only = None) -> None:
    """End the services that `up` started; their data stays."""
    settings = Settings.from_environment(os.environ)
    ended = settings.local_services().down(only or SERVICE_NAMES)
    typer.echo(f"Ended {', '.join(ended)}." if ended else f"Nothing of {settings.home} was running.")


@app.command()
def status(only: _Only = None, *, as_json: _Json = False) -> None:
    """Check the health of each service; exit code 1 when one is not healthy."""
    settings = Settings.from_environment(os.environ)
    statuses = settings.local_services().status(only or SERVICE_NAMES)
    if as_json:
        typer.echo(json.dumps([_document(status) for status in statuses], indent=2))
    else:
        typer.echo("\n".join(_rows(statuses)))
        if any(entry.log for entry in statuses):
            typer.echo(f"Logs are in {settings.home / 'logs'}")
        for entry in statuses:
            if entry.detail:
                typer.echo(f"{entry.name}: {entry.detail}", err=True)
    if not all(entry.is_healthy for entry in statuses):
        raise typer.Exit(1)


def _document(status: ServiceStatus) -> dict[str, object]:
    return {**asdict(status), "address": None if status.address is None else without_login(status.address)}


def _line(status: ServiceStatus) -> str:
    if status.state == "given":
        how = "given, healthy"
    else:
        how = "already up" if status.took_ms is None else f"up in {status.took_ms / 1_000:.1f} s"
    return f"{status.name:<7} {without_login(status.address or ''):<24}  {_version(status):<26}  {how}"


def _rows(statuses: list[ServiceStatus]) -> list[str]:
    cells = [("SERVICE", "STATE", "ADDRESS", "PID", "VERSION")]
    for entry in statuses:
        pid = "" if entry.pid is None else str(entry.pid)
        cells.append((entry.name, entry.state, without_login(entry.address or ""), pid, _version(entry)))
    widths = [max(len(row[column]) for row in cells) for column in range(len(cells[0]))]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in cells]


def _version(status: ServiceStatus) -> str:
    """Leave out who makes it, so that a row fits a terminal of 80 columns; JSON has it all."""
    return status.version.removeprefix("Apache ").removeprefix("NVIDIA ")
