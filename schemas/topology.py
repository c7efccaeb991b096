"""What the views of an application read, together: sources, and the ways of their rows through repartition topics."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from schemas.errors import ConfigError
from schemas.source import EventSource
from schemas.view import FeatureView
from schemas.view_input import ViewInput


@dataclass(frozen=True, kw_only=True)
class Topology:
    """What views read.

    Attributes:
        sources: Sources by topic.
        views: Views by the topic that each reads, be it a source's or a repartition topic.
        inputs: What stands on each repartition topic.
        routes: By topic of a source, the repartition topics that its rows go on to.
    """

    sources: Mapping[str, EventSource]
    views: Mapping[str, Sequence[FeatureView]]
    inputs: Mapping[str, ViewInput]
    routes: Mapping[str, Sequence[str]]

    @property
    def topics(self) -> list[str]:
        """Every topic that is read: by an engine, or to be routed."""
        return sorted(self.views.keys() | self.routes.keys())


def connect(views: Sequence[FeatureView]) -> Topology:
    """Put together what views read.

    Raises:
        ConfigError: Two of them describe one topic in different ways.
    """
    sources: dict[str, EventSource] = {}
    by_topic: dict[str, list[FeatureView]] = {}
    inputs: dict[str, ViewInput] = {}
    routes: dict[str, dict[str, None]] = {}
    for view in views:
        for source in view.sources:
            if sources.setdefault(source.topic, source) != source:
                msg = (
                    f"view {view.name} describes topic {source.topic} otherwise than another view; share one "
                    "EventSource"
                )
                raise ConfigError(msg)
        topic = view.input.topic
        by_topic.setdefault(topic, []).append(view)
        if view.input.is_repartitioned:
            if inputs.setdefault(topic, view.input).definition_hash != view.input.definition_hash:
                msg = f"view {view.name} and another one read {topic} of different sources; rename a source's topic"
                raise ConfigError(msg)
            for source in view.sources:
                routes.setdefault(source.topic, {})[topic] = None
    return Topology(
        sources=sources,
        views=by_topic,
        inputs=inputs,
        routes={topic: list(ways) for topic, ways in routes.items()},
    )
