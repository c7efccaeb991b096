"""The ``headrace`` command."""

import sys

import typer
from typer.main import get_command

from jobs import (
    audit,
    bench_command,
    compute,
    consume,
    demo,
    get,
    produce,
    score_schema,
    services,
    topics_command,
    train,
    up,
    views_command,
    worker,
)
from schemas.errors import ConfigError, HeadraceError

app = typer.Typer(
    name="headrace",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
    help=(
        "Event-time features and scores from Kafka topics.\n\n"
        "Raw events become features (role features), go to Redis (online) and Delta Lake (offline), and trigger "
        "Triton (scoring).\n\n"
        "[bold]First steps[/bold]\n\n"
        "  headrace demo                  see all of it run on real flights\n\n"
        "  headrace up                    run everything on this machine, until Ctrl-C\n\n"
        "  headrace produce flights       send events\n\n"
        "  headrace consume scores.late_arrival\n\n"
        "  headrace get airport_departures JFK"
    ),
)
"""All commands, each from the module of its name."""

app.add_typer(services.app, name="services", rich_help_panel="Run")
app.command("up", rich_help_panel="Run")(up.up)
app.command("worker", rich_help_panel="Run")(worker.worker)
app.command("topics", rich_help_panel="Run")(topics_command.topics)
app.command("demo", rich_help_panel="Flights")(demo.demo)
app.add_typer(produce.app, name="produce", rich_help_panel="Flights")
app.command("train", rich_help_panel="Flights")(train.train)
app.command("views", rich_help_panel="Look")(views_command.views)
app.command("score-schema", rich_help_panel="Look")(score_schema.score_schema)
app.command("compute", rich_help_panel="Look")(compute.compute)
app.command("bench", rich_help_panel="Look")(bench_command.bench)
app.command("audit", rich_help_panel="Look")(audit.audit)
app.command("consume", rich_help_panel="Look")(consume.consume)
app.command("get", rich_help_panel="Look")(get.get)


def main() -> None:
    """Run the command line; an error of ours is one line and an exit code (2: nothing was done yet)."""
    try:
        get_command(app)()
    except HeadraceError as exc:
        typer.echo(f"headrace: {exc}", err=True)
        sys.exit(2 if isinstance(exc, ConfigError) else 1)


if __name__ == "__main__":
    main()
