"""``headrace train``: train the model of the demo from the pipeline's own offline features."""

import json
import os
import time
from collections.abc import Mapping
from datetime import UTC, date, datetime
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from jobs.directory import see_writable
from jobs.flights import model as flights
from jobs.flights.views import VIEWS
from jobs.settings import Settings
from offline.card import ModelCard
from offline.model_store import ModelStore
from offline.training import (
    build_training_set,
    read_table_versions,
    read_tables,
    train_light_model,
    train_model,
    write_model,
)
from schemas.errors import ConfigError
from schemas.time import END_OF_TIME_US, parse_rfc3339_us


def train(
    *,
    delta: Annotated[
        str | None, typer.Option(help="Root of the offline store.", show_default="HEADRACE_DELTA, else <home>/delta")
    ] = None,
    until: Annotated[
        str | None,
        typer.Option(
            help="Train on what was known before this date or RFC 3339 time (UTC).", show_default="all there is"
        ),
    ] = None,
    repository: Annotated[
        Path | None, typer.Option(help="Model repository to write to.", show_default="HEADRACE_MODEL_REPOSITORY")
    ] = None,
    version: Annotated[int | None, typer.Option(help="Version to write.", min=1, show_default="the next one")] = None,
    calibrate: Annotated[
        bool, typer.Option("--calibrate", help="Keep rows out of the training, and put probabilities right by them.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON in place of a table.")] = False,
) -> None:
    """Train the late-arrival model on the offline features.

    It is measured on the later part and written for Triton. The features are joined as they stood when each flight
    departed: nothing that was known later gets into a row. A running Triton takes the new version once it is told to
    load the model, which the scoring role does when it starts.
    """
    settings = Settings.from_environment(os.environ)
    started = time.perf_counter()
    card = train_late_arrival(
        delta or settings.delta,
        repository or settings.model_repository,
        store=settings.model_store,
        until_us=END_OF_TIME_US if until is None else _moment_us(until),
        version=version,
        is_calibrated=calibrate,
        created_us=time.time_ns() // 1_000,
        storage_options=settings.delta_options,
    )
    _print(card, repository or settings.model_repository, took_s=time.perf_counter() - started, as_json=as_json)


def train_late_arrival(
    delta: str | Path,
    repository: Path,
    *,
    created_us: int,
    until_us: int = END_OF_TIME_US,
    version: int | None = None,
    is_calibrated: bool = False,
    store: str | None = None,
    storage_options: Mapping[str, str] | None = None,
) -> ModelCard:
    """Train the late-arrival model and its light model, and write both to a repository.

    Args:
        delta: Root of the offline store.
        repository: Model repository to write to.
        created_us: The time now, for the card.
        until_us: Rows with an event time from here on are not looked at.
        version: Version to write, the next one when None.
        is_calibrated: Whether the model's probabilities are put right by rows that are kept out of the training.
        store: Model store that takes the file too; None for none.
        storage_options: Options of the offline store's object store, as delta-rs takes them.

    Returns:
        The card; that of the version before, where nothing has changed since.

    Raises:
        ConfigError: There are too few rows, only one class, packages missing, or the repository takes no files.
        SinkError: There is no table, the storage does not answer, or the model cannot be written.
    """
    spec, label, views = flights.LATE_ARRIVAL, flights.LANDED_LATE, {view.name: view for view in VIEWS}
    see_writable(
        repository / spec.name,
        named=f"the model repository is {str(repository)!r}",
        remedy="; set HEADRACE_MODEL_REPOSITORY or `--repository` to one",
    )
    kept = None if store is None else ModelStore(store)
    at = read_table_versions(delta, spec, label, views=views, storage_options=storage_options)
    tables = read_tables(delta, spec, label, views=views, until_us=until_us, storage_options=storage_options)
    training_set = build_training_set(spec, label, views=views, tables=tables, table_versions=at)
    trained = train_model(spec, training_set, label=label, is_calibrated=is_calibrated)
    if spec.light is not None:
        # Before the model itself: there is never one whose light model is still missing.
        light = train_light_model(spec.light, training_set, label=label)
        write_model(
            repository, light, created_us=created_us, version=version, store=kept, description=flights.LIGHT_DESCRIPTION
        )
    return write_model(
        repository,
        trained,
        created_us=created_us,
        version=version,
        store=kept,
        description=flights.DESCRIPTION,
    )


def _moment_us(text: str) -> int:
    try:
        if len(text) == len("2013-03-01"):
            day = datetime.combine(date.fromisoformat(text), datetime.min.time(), UTC)
            return parse_rfc3339_us(day.isoformat())
        return parse_rfc3339_us(text)
    except ValueError as exc:
        msg = f"`--until` is {text!r}, expected a date such as 2013-03-01 or a time such as 2013-03-01T12:00:00Z"
        raise ConfigError(msg) from exc


def _print(card: ModelCard, repository: Path, *, took_s: float, as_json: bool) -> None:
    directory = repository / card.name / str(card.version)
    if as_json:
        document: dict[str, Any] = {
            "model": card.name,
            "version": card.version,
            "semver": card.semver,
            "sha256": card.sha256,
            "directory": str(directory),
            "training": card.training,
            "evaluation": card.evaluation,
            "took_s": round(took_s, 3),
        }
        typer.echo(json.dumps(document, indent=2))
        return
    table = Table("", "rows", "from", "until", "late", "AUC", "Brier", box=None, pad_edge=False)
    for name, part in (("training", card.training), ("evaluation", card.evaluation)):
        table.add_row(
            name,
            f"{part['rows']:,}",
            *(part[end][:10] for end in ("from", "until")),
            f"{part['base_rate']:.1%}",
            *(f"{part[metric]:.4f}" if metric in part else "" for metric in ("auc", "brier")),
        )
    console = Console()
    console.print(table)
    console.print(f"{directory} written in {took_s:.1f} s: {card.semver}", soft_wrap=True)
