"""``headrace score-schema``: the published JSON Schema of a model's scores."""

import os
from pathlib import Path
from typing import Annotated

import typer

from jobs.application import load_application
from jobs.settings import Settings
from schemas.errors import ConfigError
from schemas.score import record_score_schema, render_score_schema


def score_schema(
    model: Annotated[str, typer.Argument(help="Name of a model, e.g. late_arrival.")],
    *,
    write: Annotated[bool, typer.Option("--write", help="Record it under schemas/scores/ of this directory.")] = False,
) -> None:
    """Print the JSON Schema that every score of a model passes.

    It is of draft 2020-12, as the model's contract says.
    """
    models = load_application(Settings.from_environment(os.environ).application).models
    if model not in models:
        msg = f"model is {model!r}, expected one of {sorted(models)}"
        raise ConfigError(msg)
    if write:
        directory = Path("schemas") / "scores"
        directory.mkdir(parents=True, exist_ok=True)
        typer.echo(str(record_score_schema(models[model], directory)))
    else:
        typer.echo(render_score_schema(models[model]), nl=False)
