"""A namespace: views under names of their own, so that all that comes of them is apart from what is live.

Topics, consumer groups, transactional ids, tables and keys are called by the names of the application, its views and
its sources. A module that has :func:`views_in` as its ``VIEWS`` is an application that runs as any other, by the very
same workers, and all that it leaves is found by the namespace in its name.
"""

from collections.abc import Sequence
from dataclasses import replace

from jobs.application import load_application
from offline.backfill import as_of_each
from schemas.view import FeatureView


def source_in(namespace: str, topic: str) -> str:
    """Name the topic that stands in for one of raw events."""
    return f"{namespace}.{topic}"


def name_in(namespace: str, view: str) -> str:
    """Name the view that stands in for another."""
    return f"{namespace}_{view}"


def view_in(namespace: str, view: FeatureView) -> FeatureView:
    """Put a view that reads its source directly into a namespace; each event has its as-of row."""
    (source,) = view.sources
    return replace(
        as_of_each(view),
        name=name_in(namespace, view.name),
        source=replace(source, topic=source_in(namespace, source.topic)),
    )


def views_in(namespace: str, *, module: str, names: Sequence[str]) -> list[FeatureView]:
    """Put views of an application into a namespace.

    Raises:
        ConfigError: The application cannot be loaded, or has no such view.
    """
    application = load_application(module)
    return [view_in(namespace, application.view(name)) for name in names]


def module_text(namespace: str, *, module: str, names: Sequence[str]) -> str:
    """Write the module of an application that is these views in a namespace."""
    return (
        "from jobs.namespace import views_in\n\n"
        f"NAME = {namespace!r}\n"
        f"VIEWS = views_in({namespace!r}, module={module!r}, names={list(names)!r})\n"
    )
