"""``headrace tables``: how the tables of the offline store stand, and their upkeep."""

import json
import os
import re
from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Annotated, Any, Final

import typer
from rich.console import Console
from rich.table import Table

from jobs.settings import Settings
from offline.maintenance import (
    FoundTable,
    Kind,
    Maintained,
    TableState,
    cluster_columns,
    drop_backfill,
    find_tables,
    look,
    maintain,
)
from schemas.errors import ConfigError, SinkError
from schemas.time import parse_duration_us

app = typer.Typer(
    no_args_is_help=True, help="Tables of the offline store: how they stand, and their upkeep.", rich_markup_mode="rich"
)
_UNITS: Final = {"kB": 2**10, "MB": 2**20, "GB": 2**30}
_HOUR_US: Final = 3_600_000_000

Names = Annotated[
    list[str] | None,
    typer.Argument(metavar="[TABLE]...", help="Such as user_activity/v1 or raw.shop.events; else all."),
]
TargetSize = Annotated[str, typer.Option("--target-size", help="Size of a file that is large enough: 128MB, 1GB.")]
Retention = Annotated[
    str,
    typer.Option(
        help="Age of files that no version has any more, at which they go: as long may a reader take, and as far back "
        "can a table be read as it was. 1h at least."
    ),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON in place of a table.")]


@app.command("list")
def list_(
    names: Names = None,
    *,
    target_size: TargetSize = "128MB",
    retention: Retention = "7d",
    as_json: AsJson = False,
) -> None:
    """List the tables with what they hold, and what there is to maintain."""
    settings, found, options = _begin(names, target_size, retention)
    states = [(table, look(table, **options)) for table in found]
    if as_json:
        typer.echo(json.dumps([_document(table, state) for table, state in states], indent=2))
        return
    _print_states(states, settings.delta)


@app.command("maintain")
def maintain_(
    names: Names = None,
    *,
    target_size: TargetSize = "128MB",
    retention: Retention = "7d",
    cluster: Annotated[
        bool,
        typer.Option(
            "--cluster", help="Sort the files of features and scores that are written by entity and event time."
        ),
    ] = False,
    drop: Annotated[
        str | None,
        typer.Option("--drop-backfill", help="Take this backfill for given up; its files go once a day old."),
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Say what would be done, and do nothing.")] = False,
    as_json: AsJson = False,
) -> None:
    """Put small files together, write checkpoints and remove files that are in no use.

    It may run beside writers, readers and backfills, and be ended and run again at any moment. A table that cannot be
    maintained does not keep the others from it; exit code 1 then.
    """
    settings, found, options = _begin(names, target_size, retention)
    if dry_run:
        states = [(table, look(table, **options)) for table in found]
        dropped = None if drop is None else _find_backfill(states, drop)
        if as_json:
            typer.echo(json.dumps([_document(table, state) for table, state in states], indent=2))
        else:
            _print_states(states, settings.delta)
            if dropped is not None:
                typer.echo(f"{dropped.name}: backfill {drop} would be dropped; its files go once a day old")
            typer.echo("nothing was done")
        return
    if drop is not None:
        drop_backfill(_find_backfill([(table, look(table, **options)) for table in found], drop), drop)
    console, failed = Console(stderr=True), False
    done: list[tuple[FoundTable, Maintained]] = []
    with console.status("") as status:
        for table in found:
            try:
                columns = cluster_columns(table) if cluster and table.kind is not Kind.ARCHIVE else ()
                done.append((table, maintain(table, sort_by=columns, tell=_tell(console, status), **options)))
            except SinkError as exc:
                failed = True
                typer.echo(f"headrace: {table.name}: {exc}", err=True)
    if as_json:
        typer.echo(json.dumps([{"table": table.name, **asdict(result)} for table, result in done], indent=2))
    else:
        _print_done(done)
    if failed:
        raise typer.Exit(1)


def _begin(names: Sequence[str] | None, target_size: str, retention: str) -> tuple[Settings, list[FoundTable], Any]:
    settings = Settings.from_environment(os.environ)
    options = {"target_bytes": _bytes(target_size), "retention_hours": _hours(retention)}
    settings.check_delta()
    found = find_tables(settings.delta, storage_options=settings.delta_options)
    if unknown := sorted(set(names or ()) - {table.name for table in found}):
        there = ", ".join(table.name for table in found) or "none"
        msg = f"there is no table {unknown[0]} below {settings.delta}, expected one of: {there}"
        raise ConfigError(msg)
    return settings, [table for table in found if not names or table.name in names], options


def _find_backfill(states: Sequence[tuple[FoundTable, TableState]], name: str) -> FoundTable:
    """Find the table that a backfill is of."""
    under_way = {backfill: table for table, state in states for backfill in state.backfills}
    if name not in under_way:
        msg = f"no backfill {name} is under way, expected one of: {', '.join(sorted(under_way)) or 'none'}"
        raise ConfigError(msg)
    return under_way[name]


def _bytes(text: str) -> int:
    found = re.fullmatch(r"(\d+)(kB|MB|GB)", text)
    if found is None or not int(found[1]):
        msg = f"`--target-size` is {text!r}, expected a size such as 128MB"
        raise ConfigError(msg)
    return int(found[1]) * _UNITS[found[2]]


def _hours(text: str) -> int:
    hours, rest = divmod(parse_duration_us(text, field="--retention"), _HOUR_US)
    if hours < 1 or rest:
        msg = (
            f"`--retention` is {text!r}, expected whole hours, 1h at least; readers need the files that they have begun"
        )
        raise ConfigError(msg)
    return hours


def _tell(console: Console, status: Any) -> Callable[[str], object]:
    return status.update if console.is_terminal else lambda line: console.print(line, highlight=False)


def _document(table: FoundTable, state: TableState) -> dict[str, Any]:
    return {"table": table.name, "kind": table.kind, **asdict(state)}


def _print_states(states: Sequence[tuple[FoundTable, TableState]], root: str) -> None:
    console = Console()
    if not states:
        console.print(f"there is no table below {root}; the offline role and backfills write them", soft_wrap=True)
        return
    shown = Table("table", "version", "rows", "files", "size", "small", "removable", box=None, pad_edge=False)
    for table, state in states:
        numbers = (state.version, state.rows, state.files)
        last = (state.small_files, state.removable_files)
        shown.add_row(table.name, *map("{:,}".format, numbers), _size(state.size_bytes), *map("{:,}".format, last))
    console.print(shown)
    for table, state in states:
        for name, n_files in state.backfills.items():
            console.print(f"{table.name}: backfill {name} is not done; {n_files:,} files stay for it", soft_wrap=True)


def _print_done(done: Sequence[tuple[FoundTable, Maintained]]) -> None:
    shown = Table("table", "version", "files", "", "size", "", "deleted", box=None, pad_edge=False)
    for table, result in done:
        before, after = result.before, result.after
        shown.add_row(
            table.name,
            f"{after.version:,}",
            f"{before.files:,}",
            f"-> {after.files:,}",
            _size(before.size_bytes),
            f"-> {_size(after.size_bytes)}",
            f"{result.files_deleted:,}",
        )
    Console().print(shown)


def _size(size_bytes: int) -> str:
    unit = next((unit for unit in reversed(_UNITS) if size_bytes >= _UNITS[unit]), "kB")
    return f"{size_bytes / _UNITS[unit]:.1f} {unit}"
