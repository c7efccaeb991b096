"""The commands ``headrace schemas show|record|check``."""

import json
import os
from typing import Annotated

import typer

from jobs.application import Application, contracts_of, load_application
from jobs.settings import Settings
from schemas.errors import ConfigError
from schemas.evolution import check_evolution, record_contracts
from schemas.generated_contract import avro_schema, check_generated, record_generated, render_contracts
from schemas.model import ModelSpec
from schemas.view import FeatureView

app = typer.Typer(
    name="schemas",
    help="Contracts: what events, features and scores look like, and what may change of it.",
    add_completion=False,
    no_args_is_help=True,
)


@app.command()
def show(
    topic: Annotated[str, typer.Argument(help="Of features or scores, e.g. scores.late_arrival.")],
    *,
    avro: Annotated[bool, typer.Option("--avro", help="Print the Avro schema, not the JSON Schema.")] = False,
) -> None:
    """Print the contract that every record of a topic of features or scores passes.

    It is generated from the view or model, as JSON Schema of draft 2020-12 or as Avro.
    """
    definitions = {definition.topic: definition for definition in _definitions(_application())}
    if topic not in definitions:
        msg = f"topic is {topic!r}, expected one of {sorted(definitions)}"
        raise ConfigError(msg)
    if avro:
        typer.echo(json.dumps(avro_schema(definitions[topic]), indent=2))
    else:
        typer.echo(render_contracts(definitions[topic])[".json"], nl=False)


@app.command()
def record() -> None:
    """Record the contracts that are not yet, below schemas/ of this directory; all are checked first.

    Those of events in recorded/, those generated of views and models in features/ and scores/, as JSON Schema and Avro.
    """
    application = _application()
    contracts, definitions = contracts_of(application.views.values()), _definitions(application)
    check_evolution(contracts)
    for path in [*record_generated(definitions), *record_contracts(contracts)]:
        typer.echo(f"recorded {path}")
    typer.echo(f"{len(contracts)} contracts of events and {len(definitions)} of features and scores are recorded")


@app.command()
def check() -> None:
    """Check that contracts are as they were recorded, and that new versions fit the old ones.

    As a contract's `x-compatibility` says: BACKWARD (the default), FORWARD, FULL or NONE. The exit code is 2 if one
    does not. Workers check the same when they start.
    """
    application = _application()
    contracts, definitions = contracts_of(application.views.values()), _definitions(application)
    without = [*check_evolution(contracts), *check_generated(definitions)]
    notice = f"; not recorded: {', '.join(without)} (`headrace schemas record`)" if without else ""
    typer.echo(f"{len(contracts) + len(definitions)} contracts are as recorded and fit those before them{notice}")


def _application() -> Application:
    return load_application(Settings.from_environment(os.environ).application)


def _definitions(application: Application) -> list[FeatureView | ModelSpec]:
    return [*application.views.values(), *application.models.values()]
