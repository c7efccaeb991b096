"""What a reader is told of an entity's newest score. Pure."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from schemas.model import ModelSpec
from schemas.time import parse_rfc3339_us
from streams.sinks.online import Status


@dataclass(frozen=True, kw_only=True)
class ScoreValue:
    """The newest score of an entity.

    Attributes:
        model: Name of the model.
        entity: Entity that was asked for.
        status: ``present``, ``stale`` (the scored event is older than was asked for) or ``missing``.
        score: The score as it stands on its topic; None when missing, as are all that follow.
        age_ms: Time of the read minus the event time, rounded down.
        event_time_us: Event time of the scored event.
    """

    model: str
    entity: str
    status: Status
    score: Mapping[str, Any] | None = None
    age_ms: int | None = None
    event_time_us: int | None = None


def resolve_score(
    score: Mapping[str, Any] | None, *, model: ModelSpec, entity: str, ttl_us: int | None, now_us: int
) -> ScoreValue:
    """Judge a score by the time of the read."""
    if score is None:
        return ScoreValue(model=model.name, entity=entity, status=Status.MISSING)
    event_time_us = parse_rfc3339_us(score["event_time"])
    is_stale = ttl_us is not None and now_us - event_time_us > ttl_us
    return ScoreValue(
        model=model.name,
        entity=entity,
        status=Status.STALE if is_stale else Status.PRESENT,
        score=score,
        age_ms=(now_us - event_time_us) // 1_000,
        event_time_us=event_time_us,
    )
