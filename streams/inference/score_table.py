"""Score rows: answers, what they were made of, and how long each stage took, as columns."""

from collections.abc import Mapping
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from schemas.model import ModelSpec, ViewReference
from schemas.score import Arm
from schemas.text_time import with_text_times
from streams.inference.answer import NOBODY, SERVED_BY, Answers
from streams.inference.lookup import ViewValues
from streams.inference.vector import FeatureVectors
from streams.wire import encode_rows

_ARMS = pa.array([str(Arm.CHAMPION), str(Arm.CANARY)])
_SERVED_BY = pa.array([str(served_by) for served_by in SERVED_BY])


def make_scores(
    spec: ModelSpec,
    vectors: FeatureVectors,
    answers: Answers,
    *,
    schema: pa.Schema,
    latency: Mapping[str, Any],
) -> pa.Table:
    """Make the score of each row; null in `served_by` where nobody has answered it.

    Args:
        spec: The model's contract.
        vectors: The rows.
        answers: Their answers.
        schema: :func:`schemas.score.score_row_schema`.
        latency: Milliseconds by stage, a number or ``(n_rows,)`` each.
    """
    rows, n_rows = vectors.rows, len(vectors)
    version_of = pa.array(answers.version_of)
    columns: dict[str, Any] = {
        "request_id": rows["request_id"],
        "entity": rows[spec.entity].cast(pa.string()),
        "model": pa.repeat(spec.name, n_rows),
        "model_version": pa.array([served.version for served in answers.versions]).take(version_of),
        "model_sha256": pa.array([served.sha256 for served in answers.versions]).take(version_of),
        "arm": _ARMS.take(pa.array(answers.is_canary.astype(np.int8))),
        "served_by": _SERVED_BY.take(pa.array(answers.served_by, mask=answers.served_by == NOBODY)),
        **{o.column: pa.array(o.published(answers.columns[o.column])) for o in spec.published_outputs},
        **{item.column: item.decide(answers.columns[item.output]) for item in spec.decisions},
        "event_time": rows["event_time"],
        "features": pa.StructArray.from_arrays(
            [_described(reference, vectors.values[reference]) for reference in spec.views],
            names=[reference.name for reference in spec.views],
        ),
        "complete": pa.array(vectors.is_complete),
        "watermark": rows["watermark"],
        "supersedes": pa.nulls(n_rows, pa.string()),
        "latency_ms": _struct(schema.field("latency_ms").type, latency, n_rows=n_rows),
    }
    return pa.table([columns[name] for name in schema.names], names=schema.names)


def encode_scores(scores: pa.Table) -> list[bytes]:
    """Encode scores as they go onto their topic: one JSON object each, by the published schema of the model."""
    return encode_rows(with_text_times(scores))


def latency_of(rows: pa.Table, *, now_us: int, elapsed_ms: float) -> dict[str, Any]:
    """Latencies against the rows' own timestamps, which other machines' clocks may have made: never below 0."""
    broker_us, computed_us = (rows[name].combine_chunks().cast(pa.int64()) for name in ("broker_time", "computed_time"))
    return {
        "features": _ms_between(broker_us, computed_us),
        "queue": _ms_between(computed_us, now_us),
        "total": pc.add(_ms_between(broker_us, now_us), elapsed_ms),
    }


def with_total_latency(scores: pa.Table, *, broker_time: pa.ChunkedArray | pa.Array, now_us: int) -> pa.Table:
    """Say that the scores leave now: ``latency_ms.total`` is what a consumer sees up to there.

    Args:
        scores: The scores.
        broker_time: ``(n_scores,)`` when the event of each came to the broker; null where unknown.
        now_us: The time.
    """
    latency = scores["latency_ms"].combine_chunks()
    arrow = latency.type
    stages = {stage.name: pc.struct_field(latency, stage.name) for stage in arrow}
    stages["total"] = _ms_between(broker_time.cast(pa.int64()), now_us)
    position = scores.schema.get_field_index("latency_ms")
    return scores.set_column(position, scores.schema.field(position), _struct(arrow, stages, n_rows=scores.num_rows))


def _described(reference: ViewReference, values: ViewValues) -> pa.Array:
    n_rows = len(values.status)
    return pa.StructArray.from_arrays(
        [
            pa.repeat(reference.version, n_rows),
            pa.repeat(reference.definition_hash, n_rows),
            values.event_time,
            values.age_ms,
            values.status,
        ],
        names=["version", "hash", "event_time", "age_ms", "status"],
    )


def _ms_between(earlier_us: Any, later_us: Any) -> Any:
    duration_us = pc.subtract(later_us, earlier_us).cast(pa.float64())
    spans = pc.max_element_wise(pc.divide(duration_us, 1_000.0), 0.0, skip_nulls=False)
    return spans.combine_chunks() if isinstance(spans, pa.ChunkedArray) else spans


def _struct(arrow: pa.StructType, columns: Mapping[str, Any], *, n_rows: int) -> pa.Array:
    arrays = [
        columns[field.name] if isinstance(columns[field.name], pa.Array) else pa.repeat(columns[field.name], n_rows)
        for field in arrow
    ]
    return pa.StructArray.from_arrays(arrays, fields=list(arrow))
