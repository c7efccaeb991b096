"""``headrace views``: what the application defines."""

import json
import os
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape

from jobs.application import load_application
from jobs.settings import Settings
from schemas.errors import ConfigError
from schemas.registry import Record, check_recorded, find_record, record_definitions
from schemas.view import FeatureView


def views(
    *,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON in place of text.")] = False,
    check: Annotated[
        bool, typer.Option("--check", help="Refuse a definition that differs from the one recorded under its version.")
    ] = False,
    record: Annotated[
        bool, typer.Option("--record", help="Record the definitions that are not yet, in schemas/definitions.")
    ] = False,
) -> None:
    """List the feature views, and whether they are recorded.

    With version, hash, owner, windows and columns. Once the definition of a view's version is recorded it can't change:
    `--check`, `headrace up`, `worker` and `topics` refuse another one. Raise the version to change it.
    """
    if check and record:
        msg = "`--check` and `--record` are both given, expected one of them: recording checks first"
        raise ConfigError(msg)
    application = load_application(Settings.from_environment(os.environ).application)
    defined = list(application.views.values())
    written = record_definitions(defined) if record else []
    records = check_recorded(defined) if check or record else {view.name: find_record(view) for view in defined}
    if as_json:
        typer.echo(json.dumps([_document(view, records[view.name]) for view in defined], indent=2))
        return
    console = Console(highlight=False)
    if check or record:
        for path in written:
            console.print(f"recorded {escape(str(path))}", soft_wrap=True)
        without = [view.name for view in defined if records[view.name] is None]
        notice = f"; not recorded: {', '.join(without)} (`headrace views --record`)" if without else ""
        console.print(f"{len(defined) - len(without)} of {len(defined)} views are as recorded{notice}", soft_wrap=True)
        return
    for view in defined:
        _print(console, view, records[view.name])


def _print(console: Console, view: FeatureView, record: Record | None) -> None:
    owner = f"owner {escape(view.owner)}" if view.owner else "no owner"
    if record is None:
        notice = "[yellow]not recorded[/]"
    else:
        is_same = record.definition_hash == view.definition_hash
        notice = "recorded" if is_same else f"[bold red]changed, recorded as {record.definition_hash}[/]"
    head = f"[bold cyan]{view.name}[/] v{view.version}  {view.definition_hash}  {owner}  {notice}"
    console.print(head, soft_wrap=True)
    sources = ", ".join(source.topic for source in view.sources)
    by_way = f" by way of {view.input.topic}" if view.input.is_repartitioned else ""
    console.print(f"  {view.entity.name} (key {view.entity.key}), from {sources}{by_way}", soft_wrap=True)
    console.print(f"  {view.describe_windows()}, emits {view.emit}", soft_wrap=True)
    columns = [field for field in view.feature_schema if field.name != view.entity.key]
    width = max((len(field.name) for field in columns), default=0)
    for field in columns:
        console.print(f"    {field.name:<{width}}  [dim]{field.type}[/]", soft_wrap=True)


def _document(view: FeatureView, record: Record | None) -> dict[str, Any]:
    return {
        "view": view.name,
        "version": view.version,
        "definition_hash": view.definition_hash,
        "recorded": record is not None,
        "recorded_hash": None if record is None else record.definition_hash,
        "entity": view.entity.name,
        "key": view.entity.key,
        "sources": [source.topic for source in view.sources],
        "reads": view.input.topic,
        "windows": view.describe_windows(),
        "emit": view.emit,
        "owner": view.owner,
        "columns": {field.name: str(field.type) for field in view.feature_schema},
    }
