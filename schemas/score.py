"""The score row: its Arrow schema, and the JSON Schema published for consumers of a score topic.

The JSON Schema of ``late_arrival@1`` is the file ``schemas/scores/late_arrival@1.json``, generated from the model's
:class:`~schemas.model.ModelSpec` (see :mod:`schemas.generated_contract`).
"""

from enum import StrEnum
from typing import Any, Final

import pyarrow as pa

from schemas.model import ModelSpec
from schemas.output import OUTPUT_TYPES, Decision, ModelOutput
from schemas.row import TIMESTAMP

LATENCY_STAGES: Final = {
    "features": "event in the broker until its feature row was computed",
    "queue": "feature row computed until its scoring began",
    "lookup": "read of the online store, for the whole batch",
    "inference": "call of the model server, for the whole batch, retries included",
    "total": "event in the broker until its score was written; readers see it with the next commit",
}
"""What each stage of ``latency_ms`` spans. ``features``, ``queue`` and ``total`` compare clocks of several machines."""


class Arm(StrEnum):
    """Whose the entity is. What a canary has no valid answer to is the champion's, and ``model_version`` says so."""

    CHAMPION = "champion"
    CANARY = "canary"
    SHADOW = "shadow"


class ServedBy(StrEnum):
    """What the score came from."""

    MODEL = "model"
    CACHE = "cache"
    LIGHT_MODEL = "light_model"
    RULES = "rules"


class InputStatus(StrEnum):
    """What became of a view's values in one score: used where ``present`` or ``empty``, else missing."""

    PRESENT = "present"
    """There was a row, young enough."""
    EMPTY = "empty"
    """The entity has no event left in the view's windows: counts are 0, other windowed features have no value."""
    MISSING = "missing"
    """The online store has no row of the entity, or the event names no entity."""
    STALE = "stale"
    """The row is older than the model's ``max_age`` or the view's ``ttl``, against the event time scored."""
    AHEAD = "ahead"
    """The row is from after the event that is scored, which must not look into its future."""


_VIEW_TYPE: Final = pa.struct(
    [
        pa.field("version", pa.int64()),
        pa.field("hash", pa.string()),
        pa.field("event_time", TIMESTAMP),
        pa.field("age_ms", pa.int64()),
        pa.field("status", pa.string()),
    ]
)
_TIME: Final[dict[str, Any]] = {"type": "string", "format": "date-time"}


def score_row_schema(spec: ModelSpec) -> pa.Schema:
    """Arrow schema of the model's scores."""
    return pa.schema(
        [
            pa.field("request_id", pa.string(), nullable=False),
            pa.field("entity", pa.string(), nullable=False),
            pa.field("model", pa.string(), nullable=False),
            pa.field("model_version", pa.string(), nullable=False),
            pa.field("model_sha256", pa.string(), nullable=False),
            pa.field("arm", pa.string(), nullable=False),
            pa.field("served_by", pa.string(), nullable=False),
            *(pa.field(output.column, OUTPUT_TYPES[output.type], nullable=False) for output in spec.published_outputs),
            *(pa.field(decision.column, pa.string(), nullable=False) for decision in spec.decisions),
            pa.field("event_time", TIMESTAMP, nullable=False),
            pa.field("features", pa.struct([pa.field(v.name, _VIEW_TYPE) for v in spec.views]), nullable=False),
            pa.field("complete", pa.bool_(), nullable=False),
            pa.field("watermark", TIMESTAMP),
            pa.field("supersedes", pa.string()),
            pa.field("latency_ms", pa.struct([pa.field(s, pa.float64()) for s in LATENCY_STAGES]), nullable=False),
        ]
    )


def score_json_schema(spec: ModelSpec) -> dict[str, Any]:
    """JSON Schema (draft 2020-12) of one score of the model, as it stands on its topic."""
    properties: dict[str, Any] = {
        "request_id": {
            "type": "string",
            "minLength": 1,
            "description": "Request, or topic-partition-offset of the event.",
        },
        "entity": {
            "type": "string",
            "minLength": 1,
            "description": f"What was scored: `{spec.entity}`; also the record's key.",
        },
        "model": {"const": spec.name},
        "model_version": {"type": "string", "pattern": "^[1-9][0-9]*$", "description": "Version on the model server."},
        "model_sha256": {"type": "string", "pattern": "^[0-9a-f]{64}$", "description": "SHA-256 of the model file."},
        "arm": {"enum": [str(arm) for arm in Arm]},
        "served_by": {"enum": [str(served_by) for served_by in ServedBy]},
        **{output.column: _output_schema(output) for output in spec.published_outputs},
        **{decision.column: _decision_schema(decision) for decision in spec.decisions},
        "event_time": {**_TIME, "description": "Event time of the event that was scored."},
        "features": _closed(
            {view.name: {"$ref": "#/$defs/view"} for view in spec.views}, description="What was read, by feature view."
        ),
        "complete": {
            "type": "boolean",
            "description": "Whether every input had a value; if not, it was scored without.",
        },
        "watermark": {
            "type": ["string", "null"],
            "format": "date-time",
            "description": "Watermark of the scored row's partition; null before the first.",
        },
        "supersedes": {"type": ["string", "null"], "description": "Request whose score this one replaces."},
        "latency_ms": _closed(
            {
                stage: {"type": ["number", "null"], "minimum": 0, "description": f"Milliseconds: {meaning}."}
                for stage, meaning in LATENCY_STAGES.items()
            },
            description="Milliseconds by stage; null where a timestamp is unknown.",
        ),
    }
    view = _closed(
        {
            "version": {"type": "integer", "minimum": 1},
            "hash": {"type": "string", "pattern": "^[0-9a-f]{16}$", "description": "Definition hash."},
            "event_time": {
                "type": ["string", "null"],
                "format": "date-time",
                "description": "Of the row; null if none.",
            },
            "age_ms": {
                "type": ["integer", "null"],
                "description": "Event time scored less event time of the row; below 0 if the row is ahead.",
            },
            "status": {"enum": [str(status) for status in InputStatus]},
        }
    )
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": spec.reference,
        "description": f"One score of model {spec.name}, on topic {spec.topic}.",
        **_closed(properties),
        "$defs": {"view": view},
    }


def _closed(properties: dict[str, Any], **keywords: Any) -> dict[str, Any]:
    return {
        "type": "object",
        **keywords,
        "properties": properties,
        "required": list(properties),
        "additionalProperties": False,
    }


def _output_schema(output: ModelOutput) -> dict[str, Any]:
    rounded = "" if output.rounded_to is None else f"Rounded to multiples of {output.rounded_to:g}."
    rules = {
        "minimum": output.minimum,
        "maximum": output.maximum,
        "enum": list(output.values) or None,
        "description": f"{output.description} {rounded}".strip() or None,
    }
    return {"type": output.type, **{keyword: value for keyword, value in rules.items() if value is not None}}


def _decision_schema(decision: Decision) -> dict[str, Any]:
    steps = [f"from {threshold:g} on {label}" for threshold, label in decision.at_least]
    said = f"By `{decision.output}`: {decision.below}, {', '.join(steps)}."
    return {"enum": list(decision.labels), "description": f"{decision.description} {said}".strip()}
