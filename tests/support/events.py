"""Sources whose events come over HTTP: topics of their own, and views that read them."""

from typing import Any

from schemas.aggregation import count, last
from schemas.entity import Entity
from schemas.source import EventSource
from schemas.view import FeatureView
from tests.support.builders import make_contract

FIELDS: dict[str, Any] = {
    "key": {"type": ["string", "null"]},
    "shop": {"type": ["integer", "null"]},
    "at": {"type": ["integer", "null"], "x-unit": "ms", "minimum": 0},
    "n": {"type": "integer", "minimum": 0},
}
T0_MS = 1_700_000_000_000


def make_source(topic: str = "test.events", *, key: str | None = "key", **contract: Any) -> EventSource:
    return EventSource(
        topic, contract=make_contract(FIELDS, **{"required": ["n"]} | contract), key=key, event_time="at"
    )


def make_views(source: EventSource, *keys: str) -> list[FeatureView]:
    """Make a view of each entity key."""
    return [
        FeatureView(
            f"by_{key}",
            version=1,
            entity=Entity(key, key=key),
            source=source,
            slide="1m",
            emit="every_event",
            features={"seen": count().over("5m"), "n": last("n").over(last=1)},
        )
        for key in keys or ("key",)
    ]
