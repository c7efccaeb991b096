"""The commands ``headrace topics plan|apply|doc``."""

import json
import os
from collections import Counter
from collections.abc import Sequence
from importlib import metadata
from typing import Annotated, Any

import typer

from jobs.application import load_recorded_application
from jobs.async_api import describe_topics
from jobs.settings import Settings
from jobs.topic_changes import Action, TopicChange, apply_changes, check_refusals, compare_topics
from jobs.topics import DEFAULT_PARTITIONS, application_topics

CHANGES_PENDING = 3
"""Exit code of a plan that has something to do."""

app = typer.Typer(
    name="topics",
    help="Make the topics of the application, and keep them as it wants them.",
    add_completion=False,
    no_args_is_help=True,
)

_Partitions = Annotated[
    int | None,
    typer.Option(
        min=1,
        help="Partitions of new raw topics of which TOPICS says no other; others follow their source.",
        show_default=str(DEFAULT_PARTITIONS),
    ),
]
_Json = Annotated[bool, typer.Option("--json", help="Print JSON in place of a table.")]


@app.command()
def plan(*, partitions: _Partitions = None, as_json: _Json = False) -> None:
    """Show what `topics apply` would create or change, and change nothing.

    The exit code is 0 if nothing is to be done, 3 if something is, and 2 if a change is refused because it would cost
    records.
    """
    _, changes = _compare(partitions)
    _print(changes, partitions, as_json=as_json, is_done=False)
    check_refusals(changes)
    if any(change.action is not Action.KEEP for change in changes):
        raise typer.Exit(CHANGES_PENDING)


@app.command("apply")
def apply_(*, partitions: _Partitions = None, as_json: _Json = False) -> None:
    """Create the topics that are missing, and change those that are otherwise than wanted.

    What would cost records, or move keys to other partitions, is refused with exit code 2, and then nothing is done.
    """
    brokers, changes = _compare(partitions)
    apply_changes(brokers, changes)
    _print(changes, partitions, as_json=as_json, is_done=True)


@app.command()
def doc() -> None:
    """Print all topics as an AsyncAPI 3 document: what stands on each, in which format. Needs no Kafka."""
    application = load_recorded_application(Settings.from_environment(os.environ).application)
    document = describe_topics(application, version=metadata.version("headrace"))
    typer.echo(json.dumps(document, indent=2, ensure_ascii=False))


def _compare(partitions: int | None) -> tuple[str, list[TopicChange]]:
    settings = Settings.from_environment(os.environ)
    topics = application_topics(load_recorded_application(settings.application))
    brokers = settings.address("kafka")
    return brokers, compare_topics(brokers, topics, partitions=partitions or DEFAULT_PARTITIONS)


def _print(changes: Sequence[TopicChange], partitions: int | None, *, as_json: bool, is_done: bool) -> None:
    if as_json:
        typer.echo(json.dumps([_document(change) for change in changes], indent=2))
    else:
        words = {**{action: str(action) for action in Action}, **(_DONE if is_done else {})}
        width = max(len(change.topic.name) for change in changes)
        for change in changes:
            count = f"{change.partitions:>3} partition{'s' if change.partitions != 1 else ' '}"
            typer.echo(f"{change.topic.name:<{width}}  {count}  {words[change.action]}")
            for line in _details(change):
                typer.echo(f"    {line}")
        counts = Counter(words[change.action] for change in changes)
        typer.echo(", ".join(f"{count} {what}" for what, count in counts.items()))
    raw = [change for change in changes if change.topic.is_raw and change.topic.partitions is None]
    other = [change.topic.name for change in raw if change.partitions_now not in (partitions, None)]
    if partitions is not None and other:
        typer.echo(
            f"{', '.join(other)}: there already, with another count than {partitions}, and left as they are. "
            "`--partitions` is for topics that are created: more partitions would move keys from one to another.",
            err=True,
        )


_DONE = {Action.CREATE: "created", Action.CHANGE: "changed", Action.KEEP: "as it was"}


def _details(change: TopicChange) -> list[str]:
    """Say what is to change, one thing a line."""
    if change.partitions_now is None:
        return [f"{key}={value}" for key, (_, value) in change.config.items()]
    lines = [f"{key} from {now} to {value}" for key, (now, value) in change.config.items()]
    if change.partitions != change.partitions_now:
        lines.insert(0, f"partitions from {change.partitions_now} to {change.partitions}")
    return lines


def _document(change: TopicChange) -> dict[str, Any]:
    return {
        "topic": change.topic.name,
        "action": str(change.action),
        "partitions": change.partitions,
        "partitions_now": change.partitions_now,
        "config": {key: {"now": now, "wanted": wanted} for key, (now, wanted) in change.config.items()},
        "refused": list(change.refusals),
    }
