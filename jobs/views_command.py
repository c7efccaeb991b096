"""``headrace views``: what the application defines."""

import json
import os
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from jobs.application import load_application
from jobs.settings import Settings


def views(*, as_json: Annotated[bool, typer.Option("--json", help="Print JSON in place of a table.")] = False) -> None:
    """List the feature views with version, hash, owner, windows and columns."""
    application = load_application(Settings.from_environment(os.environ).application)
    listed = [
        {
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
        for view in application.views.values()
    ]
    if as_json:
        typer.echo(json.dumps(listed, indent=2))
        return
    table = Table(box=None, padding=(0, 2, 0, 0))
    for heading in ("view", "version", "hash", "entity", "source", "windows", "emit", "owner", "features"):
        table.add_column(heading, overflow="fold")
    for row in listed:
        names = [name for name in row["columns"] if name != row["key"]]  # type: ignore[attr-defined]  # a dict, see above
        table.add_row(
            str(row["view"]),
            f"v{row['version']}",
            str(row["definition_hash"]),
            str(row["key"]),
            str(row["source"]),
            str(row["windows"]),
            str(row["emit"]),
            str(row["owner"]),
            ", ".join(names),
        )
    Console().print(table)
