"""``headrace get``: the online features of one entity."""

import asyncio
import json
import os
import time
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from jobs.application import load_application
from jobs.settings import Settings
from schemas.errors import ConfigError
from schemas.time import format_rfc3339
from schemas.view import FeatureView
from streams.sinks.online import OnlineReader, OnlineValue, Status


def get(
    view: Annotated[str, typer.Argument(help="Name of a feature view, see `headrace views`.")],
    key: Annotated[str, typer.Argument(help="Entity key, e.g. JFK.")],
    *,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON in place of a table.")] = False,
) -> None:
    """Print the newest online features of an entity, with their age.

    Exit code 1 when there are none.
    """
    settings = Settings.from_environment(os.environ)
    definition = load_application(settings.application).view(view)
    value = asyncio.run(_read(settings, definition, _entity_key(definition, key)))
    if as_json:
        typer.echo(json.dumps(_document(value), ensure_ascii=False))
    else:
        _print(value)
    if value.status is Status.MISSING:
        raise typer.Exit(1)


async def _read(settings: Settings, view: FeatureView, key: str | int) -> OnlineValue:
    async with OnlineReader(settings.address("redis"), pseudonyms=settings.pseudonyms([view])) as reader:
        (value,) = await reader.read(view, [key], now_us=time.time_ns() // 1_000)
    return value


def _entity_key(view: FeatureView, key: str) -> str | int:
    if str(view.feature_schema.field(view.entity.key).type) == "string":
        return key
    try:
        return int(key)
    except ValueError as exc:
        msg = f"key is {key!r}, expected a whole number as `{view.entity.key}` of view {view.name} is"
        raise ConfigError(msg) from exc


def _document(value: OnlineValue) -> dict[str, object]:
    return {
        "view": value.view,
        "version": value.version,
        "definition_hash": value.definition_hash,
        "entity": value.entity,
        "status": value.status,
        "event_time": None if value.event_time_us is None else format_rfc3339(value.event_time_us),
        "window_end": None if value.window_end_us is None else format_rfc3339(value.window_end_us),
        "age_ms": value.age_ms,
        "pane": value.pane,
        "features": value.features,
    }


def format_age(age_ms: int) -> str:
    """Write an age in the one unit that tells it, such as ``12 s``, ``5 h``, ``40 days`` or ``13 years``."""
    seconds = max(0, age_ms // 1_000)
    for limit_s, unit_s, unit in ((120, 1, "s"), (7_200, 60, "min"), (172_800, 3_600, "h")):
        if seconds < limit_s:
            return f"{seconds // unit_s} {unit}"
    days = seconds // 86_400
    return f"{days} days" if days < 730 else f"{int(days / 365.2425)} years"


def _print(value: OnlineValue) -> None:
    console = Console()
    console.print(f"[bold]{value.view}[/bold] v{value.version} {value.entity}: {value.status}", highlight=False)
    if value.event_time_us is None or value.age_ms is None:
        console.print(f"No row of this view (definition {value.definition_hash}) is stored under that key.")
        return
    moment = f"{format_rfc3339(value.event_time_us)[:19].replace('T', ' ')} UTC"
    console.print(f"as of {moment} ({value.pane}), {format_age(value.age_ms)} ago", highlight=False)
    table = Table(show_header=True, box=None, padding=(0, 2, 0, 0))
    table.add_column("feature", style="cyan")
    table.add_column("value")
    for name, feature in value.features.items():
        table.add_row(
            name, "null" if feature is None else f"{feature:.6g}" if isinstance(feature, float) else str(feature)
        )
    console.print(table)
