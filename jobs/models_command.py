"""``headrace models``: the versions of models, from their cards to what serves."""

import json
import os
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape

from jobs.application import load_application
from jobs.models_bench import bench
from jobs.models_rollout import add_commands
from jobs.settings import Settings
from offline.card import read_card, versions
from offline.model_store import ModelStore
from offline.verify import verify_models
from schemas.errors import ConfigError

app = typer.Typer(help="Versions of models: their cards and files, and which of them serves.", no_args_is_help=True)

Repository = Annotated[
    Path | None, typer.Option(help="Model repository to look at.", show_default="HEADRACE_MODEL_REPOSITORY")
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON in place of text.")]


@app.command()
def verify(
    *,
    repository: Repository = None,
    cards_only: Annotated[
        bool, typer.Option("--cards-only", help="Check the cards where the files are in the model store alone.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Check that each model is the one of its card, and that the views make what it reads.

    Refused, with exit code 2: a file with another hash, a feature that no view makes under that definition, and a card
    that lacks something.
    """
    settings = Settings.from_environment(os.environ)
    application = load_application(settings.application)
    found = verify_models(
        repository or settings.model_repository,
        models=application.served_models,
        views=application.views,
        needs_files=not cards_only,
    )
    if as_json:
        typer.echo(json.dumps([asdict(each) for each in found], indent=2))
    console = Console(highlight=False)
    faults = [fault for each in found for fault in each.faults]
    if not as_json:
        for each in found:
            state = f"[red]{len(each.faults)} faults[/]" if each.faults else "as its card says"
            console.print(f"{each.model} version {each.version} ({each.semver or '?'}): {state}", soft_wrap=True)
            for fault in each.faults:
                console.print(f"  {escape(fault)}", soft_wrap=True)
    if faults:
        msg = f"{len(faults)} faults in {len(found)} model versions, expected none; the first: {faults[0]}"
        raise ConfigError(msg)


@app.command()
def fetch(*, repository: Repository = None) -> None:
    """Get the files that the cards name from the model store, each checked by its hash."""
    settings = Settings.from_environment(os.environ)
    application = load_application(settings.application)
    if settings.model_store is None:
        msg = "HEADRACE_MODEL_STORE is not set, expected the directory or URL that `headrace train` has written to"
        raise ConfigError(msg)
    store = ModelStore(settings.model_store)
    place = repository or settings.model_repository
    for name in application.served_models:
        for version in versions(place, name):
            is_new = store.fetch(place, read_card(place, name, version))
            typer.echo(f"{name} version {version}: {'fetched' if is_new else 'is there'}")


add_commands(app)
app.command()(bench)
