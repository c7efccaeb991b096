"""``headrace topics``: make and check the topics of the application."""

import os
from typing import Annotated

import typer

from jobs.application import load_recorded_application
from jobs.settings import Settings
from jobs.topics import ensure_topics, plan_topics


def topics(
    *,
    partitions: Annotated[
        int, typer.Option(min=1, help="Partitions of new raw topics; others follow their source.")
    ] = 4,
) -> None:
    """Create the topics that are missing, and check the others' partition counts."""
    settings = Settings.from_environment(os.environ)
    application = load_recorded_application(settings.application)
    planned = plan_topics(list(application.views.values()), list(application.models.values()))
    created = ensure_topics(settings.address("kafka"), planned, partitions=partitions)
    for topic in planned:
        typer.echo(f"{topic.name}  {'created' if topic.name in created else 'was there'}")
