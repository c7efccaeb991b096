"""``headrace topics``: make and check the topics of the application."""

import json
import os
from typing import Annotated

import typer

from jobs.application import load_recorded_application
from jobs.settings import Settings
from jobs.topics import DEFAULT_PARTITIONS, count_partitions, ensure_topics, plan_topics


def topics(
    *,
    partitions: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Partitions of new raw topics; others follow their source.",
            show_default=str(DEFAULT_PARTITIONS),
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON in place of a table.")] = False,
) -> None:
    """Create the topics that are missing, and check the others' partition counts."""
    settings = Settings.from_environment(os.environ)
    application = load_recorded_application(settings.application)
    planned = plan_topics(list(application.views.values()), list(application.models.values()))
    brokers = settings.address("kafka")
    created = ensure_topics(brokers, planned, partitions=partitions or DEFAULT_PARTITIONS)
    names = [topic.name for topic in planned]
    counts = count_partitions(brokers, names)
    if as_json:
        rows = [{"topic": name, "partitions": counts.get(name), "created": name in created} for name in names]
        typer.echo(json.dumps(rows, indent=2))
    else:
        width = max(map(len, names))
        for name in names:
            what = "created" if name in created else "was there"
            count = counts.get(name, 0)
            typer.echo(f"{name:<{width}}  {count:>3} partition{'s' if count != 1 else ' '}  {what}")
    other = [topic.name for topic in planned if not topic.like and counts.get(topic.name) not in (partitions, None)]
    if partitions is not None and other:
        typer.echo(
            f"{', '.join(other)}: there already, with another count than {partitions}, and left as they are. "
            "`--partitions` is for topics that are created: more partitions would move keys from one to another.",
            err=True,
        )
