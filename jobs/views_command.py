"""``headrace views``: what the application defines."""

import json
import os
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape

from jobs.application import load_application
from jobs.settings import Settings
from schemas.view import FeatureView


def views(*, as_json: Annotated[bool, typer.Option("--json", help="Print JSON in place of text.")] = False) -> None:
    """List the feature views with version, hash, owner, windows and columns."""
    application = load_application(Settings.from_environment(os.environ).application)
    if as_json:
        typer.echo(json.dumps([_document(view) for view in application.views.values()], indent=2))
        return
    console = Console(highlight=False)
    for view in application.views.values():
        owner = f"owner {escape(view.owner)}" if view.owner else "no owner"
        console.print(f"[bold cyan]{view.name}[/] v{view.version}  {view.definition_hash}  {owner}")
        console.print(
            f"  {view.entity.name} by {view.entity.key}, from {view.source.topic}, {view.describe_windows()}, "
            f"emits {view.emit}"
        )
        for field in view.feature_schema:
            if field.name != view.entity.key:
                console.print(f"    {field.name} [dim]{field.type}[/]")


def _document(view: FeatureView) -> dict[str, Any]:
    return {
        "view": view.name,
        "version": view.version,
        "definition_hash": view.definition_hash,
        "entity": view.entity.name,
        "key": view.entity.key,
        "source": view.source.topic,
        "windows": view.describe_windows(),
        "emit": view.emit,
        "owner": view.owner,
        "columns": {field.name: str(field.type) for field in view.feature_schema},
    }
