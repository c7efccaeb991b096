"""All commands, each loaded from its module when it is asked for: listing them must not take a second."""

import importlib
import re
import sys
from dataclasses import dataclass
from importlib import metadata
from typing import Annotated, Any, Final

import typer
from typer.core import TyperCommand, TyperGroup
from typer.main import get_command

from schemas.errors import ConfigError, HeadraceError


@dataclass(frozen=True)
class _Entry:
    """Where a command is, under which heading it stands, and the first sentence of its help."""

    module: str
    attribute: str
    panel: str
    summary: str


COMMANDS: Final = {
    "services": _Entry("services", "app", "Run", "Run Kafka, Redis and Triton on this machine, without Docker."),
    "up": _Entry("up", "up", "Run", "Run all on this machine until Ctrl-C: services, topics, a worker of each role."),
    "worker": _Entry("worker", "worker", "Run", "Run one worker of one role, until SIGTERM."),
    "topics": _Entry(
        "topics_command", "app", "Run", "Make the topics of the application, and keep them as it wants them."
    ),
    "keys": _Entry("keys_command", "app", "Run", "Keys of those who send events over HTTP."),
    "backfill": _Entry(
        "backfill",
        "backfill",
        "Offline",
        "Compute the features of records that have been, by the engine of the live path.",
    ),
    "parity": _Entry(
        "parity",
        "parity",
        "Offline",
        "Make what was served anew from the raw records, by the same engine, and compare it value by value.",
    ),
    "drift": _Entry(
        "drift",
        "drift",
        "Offline",
        "Compare the distribution of a model's inputs with that of its training set, by windows of event time.",
    ),
    "replay": _Entry(
        "replay",
        "replay",
        "Offline",
        "Put records through the live path once more, under names of their own, and compare with what was live.",
    ),
    "tables": _Entry(
        "tables_command", "app", "Offline", "Tables of the offline store: how they stand, and their upkeep."
    ),
    "training-set": _Entry(
        "training_set",
        "training_set",
        "Offline",
        "Join features to labels, each as an online read at the label's time would have returned them.",
    ),
    "demo": _Entry(
        "demo", "demo", "Flights", "Run all of Headrace on real flights, and check at the end that everything adds up."
    ),
    "produce": _Entry("produce", "app", "Flights", "Put events of real input on Kafka."),
    "train": _Entry("train", "train", "Flights", "Train the late-arrival model on the offline features."),
    "models": _Entry(
        "models_command", "app", "Offline", "Versions of models: their cards and files, and which of them serves."
    ),
    "views": _Entry("views_command", "views", "Look", "List the feature views, and whether they are recorded."),
    "schemas": _Entry(
        "schemas_command",
        "app",
        "Look",
        "Contracts: what events, features and scores look like, and what may change of it.",
    ),
    "compute": _Entry("compute", "compute", "Look", "Compute a view over a file of events, without any service."),
    "snapshot": _Entry(
        "snapshot",
        "snapshot",
        "Look",
        "Write what stands on a compacted topic now as a reference table that views can look up.",
    ),
    "bench": _Entry("bench_command", "bench", "Look", "Measure how fast it is, next to what it is compared with."),
    "audit": _Entry("audit", "audit", "Look", "Check that topics, stores and scores add up, to the row."),
    "consume": _Entry("consume", "consume", "Look", "Print the committed records of a topic, one JSON object a line."),
    "dlq": _Entry("dlq", "app", "Look", "Look at rows that are in no feature or score, and send them again."),
    "freshness": _Entry(
        "freshness", "freshness", "Look", "Check that features are readable within the time that their views promise."
    ),
    "get": _Entry("get", "get", "Look", "Print the newest online features of an entity, with their age."),
}
"""By name, in the order of the help."""


class _Commands(TyperGroup):
    """Lists the commands by the table, and loads the one that is asked for."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        for name, entry in COMMANDS.items():
            self.add_command(TyperCommand(name, help=entry.summary, rich_help_panel=entry.panel))

    def resolve_command(self, ctx: Any, args: list[str]) -> tuple[str | None, Any, list[str]]:
        name, command, rest = super().resolve_command(ctx, args)
        return name, command if name is None else load_command(name), rest


app = typer.Typer(
    name="headrace",
    cls=_Commands,
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
)
"""The command line."""


def _print_version(is_asked: bool) -> None:
    if is_asked:
        typer.echo(f"headrace {metadata.version('headrace')}")
        raise typer.Exit


@app.callback(
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
    )
)
def _headrace(
    *,
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Take the options that stand before a command."""


def load_command(name: str) -> Any:
    """Load a command from its module, its help ready to be wrapped to any width."""
    entry = COMMANDS[name]
    loaded = getattr(importlib.import_module(f"jobs.{entry.module}"), entry.attribute)
    if not isinstance(loaded, typer.Typer):
        single = typer.Typer(add_completion=False, rich_markup_mode="rich")
        single.command(name)(loaded)
        loaded = single
    command = get_command(loaded)
    command.name = name
    for each in (command, *getattr(command, "commands", {}).values()):
        each.help = _unwrapped(each.help or "")
    return command


def _unwrapped(text: str) -> str:
    """Put each paragraph of a docstring on one line; indented lines, such as examples, keep theirs."""
    return re.sub(r"(?<=\S)\n(?=[^\s])", " ", text)


def run() -> None:
    """Run a command; an error of ours is one line and an exit code (2: nothing was done yet)."""
    try:
        get_command(app)()
    except HeadraceError as exc:
        typer.echo(f"headrace: {exc}", err=True)
        sys.exit(2 if isinstance(exc, ConfigError) else 1)
