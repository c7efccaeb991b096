"""What a reader is told of one entity's features: the values, and how far they can be trusted. Pure."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from schemas.errors import ConfigError
from schemas.row import Pane
from schemas.view import FeatureView
from streams.sinks.online import Status, status_of
from streams.sinks.packing import UnpackedValue


class ValueSource(StrEnum):
    """Where a value was found."""

    CACHE = "cache"
    """In this process, which had read it from the online store."""
    ONLINE = "online"
    """In the online store."""
    OFFLINE = "offline"
    """In the offline store, as the view's ``fallback`` says."""
    NONE = "none"
    """Nowhere, or it could not be looked for; ``features`` holds defaults and nulls."""


@dataclass(frozen=True, kw_only=True)
class FeatureValue:
    """The features of one entity in one view, and how far they can be trusted.

    Attributes:
        view: Name of the view.
        version: Version of the view.
        definition_hash: Hash of the view's definition.
        entity: Entity key that was asked for.
        status: What a reader may make of it, at the moment of the read.
        source: Where it was found.
        features: What was asked for, by name. Features of a value that may not be used (missing, or stale and not asked
            for as such) are their defaults, or null.
        defaulted: Names of the features that are defaults of the view.
        completeness: Share of the features asked for that are values of the store and not null.
        is_closed: Whether the watermark had reached the window's end, so that only late rows can change the value; None
            when missing, as are all that follow.
        age_ms: Time of the read minus the event time, rounded down; below 0 where the event lies ahead.
        event_time_us: Event time of the row.
        window_end_us: End of the row's windows.
        pane: Why the row was made.
        watermark_us: Watermark at the row; None also while it is minus infinity.
        broker_time_us: When the event that made the row came to the broker; None also when unknown.
    """

    view: str
    version: int
    definition_hash: str
    entity: str | int
    status: Status
    source: ValueSource
    features: dict[str, Any]
    defaulted: tuple[str, ...]
    completeness: float
    is_closed: bool | None = None
    age_ms: int | None = None
    event_time_us: int | None = None
    window_end_us: int | None = None
    pane: Pane | None = None
    watermark_us: int | None = None
    broker_time_us: int | None = None


def asked_features(view: FeatureView, names: Sequence[str] | None) -> list[str]:
    """List the features to read: those named, or all of the view.

    Raises:
        ConfigError: A name is none of the view's.
    """
    if names is None:
        return list(view.definitions)
    if unknown := sorted(set(names) - view.definitions.keys()):
        msg = f"view {view.name} has no features {unknown}, expected some of {sorted(view.definitions)}"
        raise ConfigError(msg)
    return list(dict.fromkeys(names))


def resolve_value(
    found: UnpackedValue | None,
    *,
    view: FeatureView,
    entity: str | int,
    names: Sequence[str],
    ttl_us: int | None,
    source: ValueSource,
    now_us: int,
    is_stale_wanted: bool,
) -> FeatureValue:
    """Judge what was found by the time of the read.

    Args:
        found: What a store or the cache holds; None where it holds nothing.
        view: The view.
        entity: The entity.
        names: Features to give.
        ttl_us: The view's ``ttl``; it is read off once for many values.
        source: Where it was found.
        now_us: Time of the read.
        is_stale_wanted: Whether features of a stale value are given in place of defaults.
    """
    status = Status.MISSING if found is None else status_of(found, ttl_us=ttl_us, now_us=now_us)
    is_usable = status in (Status.PRESENT, Status.EMPTY) or (status is Status.STALE and is_stale_wanted)
    stored: Mapping[str, Any] = found.features if found is not None and is_usable else {}
    features = {name: stored.get(name) for name in names}
    known = sum(value is not None for value in features.values())
    defaults = view.serving.defaults
    defaulted = tuple(name for name, value in features.items() if value is None and name in defaults)
    for name in defaulted:
        features[name] = defaults[name]
    common: dict[str, Any] = {
        "view": view.name,
        "version": view.version,
        "definition_hash": view.definition_hash,
        "entity": entity,
        "status": status,
        "source": source if found is not None else ValueSource.NONE,
        "features": features,
        "defaulted": defaulted,
        "completeness": known / len(names) if names else 1.0,
    }
    if found is None:
        return FeatureValue(**common)
    return FeatureValue(
        **common,
        is_closed=found.watermark_us is not None and found.watermark_us >= found.window_end_us,
        age_ms=(now_us - found.event_time_us) // 1_000,
        event_time_us=found.event_time_us,
        window_end_us=found.window_end_us,
        pane=found.pane,
        watermark_us=found.watermark_us,
        broker_time_us=found.broker_time_us,
    )
