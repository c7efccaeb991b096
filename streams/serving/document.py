"""What the HTTP API takes and gives, as JSON: the models make its OpenAPI, and check what comes in."""

from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

from schemas.time import format_rfc3339
from streams.serving.score import ScoreValue
from streams.serving.store import MAX_ENTITIES
from streams.serving.value import FeatureValue

MAX_QUERIES = 20


def _whole(number: Any) -> Any:
    """JSON tells 5.0 and 5 not apart."""
    return int(number) if isinstance(number, float) and number.is_integer() else number


EntityKey = (
    Annotated[str, Field(min_length=1, max_length=1_000)]
    | Annotated[int, Field(ge=-(2**63), le=2**63 - 1), BeforeValidator(_whole)]
)
Names = Annotated[list[str], Field(min_length=1, max_length=1_000)]
Status = Literal["present", "stale", "empty", "missing"]
RequestId = Annotated[str, Field(description="Names the request; also in the header `X-Request-Id`.")]
Time = Annotated[str, Field(json_schema_extra={"format": "date-time"})]


class _Closed(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)


class QueryDocument(_Closed):
    """What is asked for of one view."""

    view: str = Field(description="Name of a view, see `/v1/views`.")
    entities: list[EntityKey] = Field(min_length=1, max_length=MAX_ENTITIES)
    features: Names | None = Field(default=None, description="Names of the features; all when left out.")


class ReadDocument(_Closed):
    """Queries that are answered together, in one round trip to the online store."""

    queries: list[QueryDocument] = Field(min_length=1, max_length=MAX_QUERIES)
    stale: bool = Field(default=False, description="Give features of stale values in place of defaults.")


class ValueDocument(_Closed):
    """The features of one entity in one view, and how far they can be trusted."""

    entity: str | int
    status: Status = Field(description="Judged at the moment of the read.")
    source: Literal["cache", "online", "offline", "none"] = Field(description="Where it was found.")
    age_ms: int | None = Field(description="Time of the read minus the event time; null when missing.")
    completeness: float = Field(ge=0, le=1, description="Share of the features that are stored values and not null.")
    is_closed: bool | None = Field(description="Whether the watermark had reached the window's end.")
    event_time: Time | None
    window_end: Time | None
    watermark: Time | None
    pane: Literal["EARLY", "ON_TIME", "LATE", "EMPTY"] | None
    features: dict[str, Any]
    defaulted: list[str] = Field(description="Features that are defaults of the view.")


class ViewValuesDocument(_Closed):
    """Values of one view, in the order of the entities asked for."""

    view: str
    version: int
    definition_hash: str
    values: list[ValueDocument]


class AnswerDocument(_Closed):
    """Answers in the order of the queries."""

    request_id: RequestId
    results: list[ViewValuesDocument]


class ScoreDocument(_Closed):
    """The newest score of an entity."""

    model: str
    entity: str
    status: Literal["present", "stale", "missing"]
    age_ms: int | None
    event_time: Time | None
    score: dict[str, Any] | None = Field(description="As on the topic of scores; null when missing.")


class UseCaseDocument(_Closed):
    """What a question is answered with."""

    request_id: RequestId
    score: ScoreDocument | None = Field(description="The newest score; null where no model answers the question.")
    features: list[ViewValuesDocument]


class TakenDocument(_Closed):
    """An event that all replicas of its partition have."""

    request_id: RequestId
    source: str
    partition: int
    offset: int


class RowDocument(_Closed):
    """What became of one event of a batch; place of an accepted one, reason and remedy of any other."""

    index: int = Field(ge=0, description="Its number in the batch, from 0; blank lines do not count.")
    status: Literal["accepted", "refused", "unavailable"] = Field(
        description="`unavailable`: Kafka has not acknowledged it; send it again."
    )
    partition: int | None = None
    offset: int | None = None
    reason: str | None = Field(default=None, description="A reason code of dead letters, `too_large` or `unavailable`.")
    detail: str | None = None
    remedy: str | None = None


class BatchDocument(_Closed):
    """What became of each event of a batch, in its order."""

    request_id: RequestId
    source: str
    accepted: int
    refused: int
    unavailable: int
    rows: list[RowDocument]


class ViewDocument(_Closed):
    """A view, and how it is read."""

    view: str
    version: int
    definition_hash: str
    entity: str
    key: str
    features: dict[str, str] = Field(description="Type of each feature.")
    ttl: str | None
    freshness: str | None
    defaults: dict[str, Any]
    owner: str


class ViewsDocument(_Closed):
    """The views that can be read."""

    request_id: RequestId
    views: list[ViewDocument]


class ProblemDocument(_Closed):
    """What went wrong, and what to do."""

    code: str
    message: str


class ErrorDocument(_Closed):
    """An answer that is none."""

    request_id: RequestId
    error: ProblemDocument


def value_document(value: FeatureValue) -> dict[str, Any]:
    """Write a value as :class:`ValueDocument` says; by hand, since thousands are written at a time."""
    return {
        "entity": value.entity,
        "status": value.status,
        "source": value.source,
        "age_ms": value.age_ms,
        "completeness": value.completeness,
        "is_closed": value.is_closed,
        "event_time": _time(value.event_time_us),
        "window_end": _time(value.window_end_us),
        "watermark": _time(value.watermark_us),
        "pane": value.pane,
        "features": value.features,
        "defaulted": value.defaulted,
    }


def score_document(value: ScoreValue) -> dict[str, Any]:
    """Write a score as :class:`ScoreDocument` says."""
    return {
        "model": value.model,
        "entity": value.entity,
        "status": value.status,
        "age_ms": value.age_ms,
        "event_time": _time(value.event_time_us),
        "score": value.score,
    }


def _time(time_us: int | None) -> str | None:
    return None if time_us is None else format_rfc3339(time_us)
