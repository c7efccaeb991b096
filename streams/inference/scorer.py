"""Scores: as-of rows of a model's trigger view in, score rows out.

For each batch one read of the online store, one matrix, one call of the model server. A value that is from after the
event that is scored is not used: the store holds the newest row of an entity, and in a replay that may have run ahead.
"""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, TypeVar

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from schemas.errors import ConfigError, InferenceTimeoutError, InferenceUnavailableError, SinkUnavailableError
from schemas.model import OUTPUT_TYPES, ModelSpec, ServedVersion, ViewReference
from schemas.row import Pane, Reason
from schemas.score import Arm, ServedBy, score_row_schema
from schemas.text_time import with_text_times
from schemas.view import FeatureView
from streams.inference.lookup import ViewValues, of_trigger, plan_lookups, resolve_lookup
from streams.ports import Inference, ModelServer, OnlineReader
from streams.wire import encode_rows

logger = logging.getLogger(__name__)

Answer = TypeVar("Answer")

REJECTED_SCORES: Final = pa.schema(
    [pa.field("_row", pa.int64()), pa.field("reason", pa.string()), pa.field("detail", pa.string())]
)
"""Rows without a score: their index among the rows given, and why."""

_RETRYABLE: Final = (InferenceUnavailableError, InferenceTimeoutError, SinkUnavailableError)


@dataclass(frozen=True, kw_only=True)
class Scored:
    """What became of a batch: its rows are as many as scores, dead letters and ignored ones together.

    Attributes:
        scores: :func:`schemas.score.score_row_schema`, in the order of the rows.
        dead_letters: :data:`REJECTED_SCORES`, in the order of the rows.
        ignored: Rows that are not to be scored, by why: ``closing_pane``, ``other_definition``.
        lookup_ms: What reading the online store took, retries included.
        inference_ms: What the model server took, retries included.
        scored_rows: ``(n_scores,)`` int64, index of each score's row among the rows given.
    """

    scores: pa.Table
    dead_letters: pa.Table
    ignored: Mapping[str, int]
    scored_rows: NDArray[np.int64]
    lookup_ms: float = 0.0
    inference_ms: float = 0.0


class Scorer:
    """Scores rows of one model's trigger view.

    Args:
        spec: The model's contract.
        served: The version that scores, from its card.
        views: The application's views by name; they must be those that the model pins.
        reader: The online store.
        model: The model server.
        arm: In which role the version scores.
        timeout_s: How long one call of the model server may take.
        attempts: How often a call that may be tried again is made before its error is raised.
        backoff_s: Wait before the second attempt; doubles with each further one.
        clock_ns: Monotonic clock, for latencies.
        sleep: Waits seconds.
    """

    def __init__(
        self,
        spec: ModelSpec,
        served: ServedVersion,
        *,
        views: Mapping[str, FeatureView],
        reader: OnlineReader,
        model: ModelServer,
        arm: Arm = Arm.CHAMPION,
        timeout_s: float = 5.0,
        attempts: int = 3,
        backoff_s: float = 0.2,
        clock_ns: Callable[[], int] = time.perf_counter_ns,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        if attempts < 1:
            msg = f"`attempts` is {attempts}, expected 1 or more"
            raise ConfigError(msg)
        spec.check_views(views)
        self._spec = spec
        self._served = served
        self._views = {reference: views[reference.name] for reference in spec.views}
        self._reader = reader
        self._model = model
        self._arm = arm
        self._timeout_s = timeout_s
        self._attempts = attempts
        self._backoff_s = backoff_s
        self._clock_ns = clock_ns
        self._sleep = sleep
        self._schema = score_row_schema(spec)

    async def score(self, rows: pa.Table, *, now_us: int, on_failure: Callable[[str], None] = lambda _: None) -> Scored:
        """Score the as-of rows among ``rows``; safe to repeat, nothing is kept between calls.

        Args:
            rows: Rows of the trigger view, ``view.row_schema``, from any partitions.
            now_us: The time at which scoring begins.
            on_failure: Told the service (``redis``, ``triton``) of each call that failed and may be tried again, also
                of those of a round that comes to nothing.

        Raises:
            SchemaMismatchError: The rows lack columns.
            SinkUnavailableError: The online store does not answer, after all attempts; keep the rows and call again.
            InferenceUnavailableError: The model does not answer, after all attempts; keep the rows and call again.
            InferenceTimeoutError: Likewise, too late.
            TensorMismatchError: The server refuses the matrix: its model is another one than the contract's.
        """
        spec = self._spec
        spec.check_row_columns(rows.column_names)
        asked, ignored = self._select(rows)
        asked, rejected = self._with_entity(asked)
        if not asked.num_rows:
            return Scored(
                scores=self._schema.empty_table(),
                dead_letters=_dead_letters(rejected),
                ignored=ignored,
                scored_rows=np.empty(0, np.int64),
            )
        began_ns = self._clock_ns()
        values = await self._retry(lambda: self._read(asked), failed=lambda: on_failure("redis"))
        read_ns = self._clock_ns()
        columns = {item.name: values[item.view].features[item.feature] for item in spec.inputs}
        matrix, is_complete = spec.matrix(columns, n_rows=asked.num_rows)
        ready_ns = self._clock_ns()
        inference = await self._retry(
            lambda: self._model.infer(matrix, timeout_s=self._timeout_s),
            failed=lambda: on_failure("triton"),
            recover=self._model.recover,
        )
        ended_ns = self._clock_ns()
        outputs, faults = read_outputs(spec, inference, n_rows=asked.num_rows)
        lookup_ms, inference_ms = (read_ns - began_ns) / 1e6, (ended_ns - ready_ns) / 1e6
        latency = _latency(asked, now_us=now_us, elapsed_ms=(ended_ns - began_ns) / 1e6)
        latency |= {"lookup": lookup_ms, "inference": inference_ms}
        scores = self._table(asked, outputs=outputs, values=values, is_complete=is_complete, latency=latency)
        scored_rows = asked["_row"].to_numpy()
        if faults:
            rejected += [(int(scored_rows[at]), Reason.INVALID_OUTPUT, fault) for at, fault in faults.items()]
            is_valid = np.ones(asked.num_rows, dtype=np.bool_)
            is_valid[list(faults)] = False
            scores, scored_rows = scores.filter(pa.array(is_valid)), scored_rows[is_valid]
        return Scored(
            scores=scores.cast(self._schema),
            dead_letters=_dead_letters(rejected),
            ignored=ignored,
            scored_rows=scored_rows,
            lookup_ms=lookup_ms,
            inference_ms=inference_ms,
        )

    def _select(self, rows: pa.Table) -> tuple[pa.Table, dict[str, int]]:
        """Keep the rows to score, with their index as ``_row``, and count the others."""
        trigger = self._spec.trigger
        is_version = pc.equal(rows["view_version"], trigger.version)
        is_pinned = pc.fill_null(
            pc.and_(is_version, pc.equal(rows["definition_hash"], trigger.definition_hash)), fill_value=False
        )
        is_as_of = pc.fill_null(pc.equal(rows["pane"], str(Pane.EARLY)), fill_value=False)
        is_asked = pc.and_(is_pinned, is_as_of)
        n_pinned, n_asked = (pc.sum(mask, min_count=0).as_py() for mask in (is_pinned, is_asked))
        ignored = {"closing_pane": n_pinned - n_asked, "other_definition": rows.num_rows - n_pinned}
        return rows.append_column("_row", pa.array(np.arange(rows.num_rows))).filter(is_asked), ignored

    def _with_entity(self, rows: pa.Table) -> tuple[pa.Table, list[tuple[int, Reason, str]]]:
        entity = rows[self._spec.entity].cast(pa.string())
        has_entity = pc.fill_null(pc.not_equal(entity, ""), fill_value=False)
        detail = f"`{self._spec.entity}` is null or empty, expected what is scored"
        lacking = rows["_row"].filter(pc.invert(has_entity)).to_pylist()
        return rows.filter(has_entity), [(row, Reason.MISSING_KEY, detail) for row in lacking]

    async def _read(self, rows: pa.Table) -> dict[ViewReference, ViewValues]:
        """Read what the model looks up, all views in one round trip."""
        plans = plan_lookups(self._spec, rows, views=self._views)
        time_us = rows["event_time"].combine_chunks().cast(pa.int64())
        answers: Sequence[Sequence[Any]] = [()] * len(plans)
        if any(plan.keys for plan in plans.values()):
            requests = [(plan.view, plan.keys) for plan in plans.values()]
            answers = await self._reader.read_many(requests, now_us=pc.max(time_us).as_py())
        values = {self._spec.trigger: of_trigger(self._spec, rows)}
        for (reference, plan), answer in zip(plans.items(), answers, strict=True):
            values[reference] = resolve_lookup(self._spec, reference, plan=plan, answers=answer, time_us=time_us)
        return values

    async def _retry(
        self,
        call: Callable[[], Awaitable[Answer]],
        *,
        failed: Callable[[], None],
        recover: Callable[[], Awaitable[None]] | None = None,
    ) -> Answer:
        """Make a call until it succeeds; tell of each that fails."""
        failures = 0
        while True:
            try:
                return await call()
            except _RETRYABLE as exc:
                failures += 1
                failed()
                if failures == self._attempts:
                    raise
                logger.warning("attempt %d of %d failed: %s", failures, self._attempts, exc)
                # A model that is slow is not gone: to load it anew would make it slower.
                is_gone = isinstance(exc, InferenceUnavailableError)
            await self._sleep(self._backoff_s * 2 ** (failures - 1))
            if recover is not None and is_gone:
                await recover()

    def _table(
        self,
        rows: pa.Table,
        *,
        outputs: Mapping[str, pa.Array],
        values: Mapping[ViewReference, ViewValues],
        is_complete: NDArray[np.bool_],
        latency: Mapping[str, Any],
    ) -> pa.Table:
        n_rows = rows.num_rows
        constants = {
            "model": self._spec.name,
            "model_version": self._served.version,
            "model_sha256": self._served.sha256,
            "arm": str(self._arm),
            "served_by": str(ServedBy.MODEL),
        }
        columns: dict[str, Any] = {
            "request_id": rows["request_id"],
            "entity": rows[self._spec.entity].cast(pa.string()),
            **{name: pa.repeat(value, n_rows) for name, value in constants.items()},
            **outputs,
            "event_time": rows["event_time"],
            "features": pa.StructArray.from_arrays(
                [_described(reference, values[reference]) for reference in self._spec.views],
                names=[reference.name for reference in self._spec.views],
            ),
            "complete": pa.array(is_complete),
            "watermark": rows["watermark"],
            "supersedes": pa.nulls(n_rows, pa.string()),
            "latency_ms": _struct(self._schema.field("latency_ms").type, latency, n_rows=n_rows),
        }
        return pa.table([columns[name] for name in self._schema.names], names=self._schema.names)


def encode_scores(scores: pa.Table) -> list[bytes]:
    """Encode scores as they go onto their topic: one JSON object each, by the published schema of the model."""
    return encode_rows(with_text_times(scores))


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


def read_outputs(spec: ModelSpec, inference: Inference, *, n_rows: int) -> tuple[dict[str, pa.Array], dict[int, str]]:
    """Turn tensors into output columns, and find the rows whose answer is no score.

    Returns:
        ``(n_rows,)`` arrays by output column; and what is wrong, by row, in order. The columns hold any value there.
    """
    faults: dict[int, str] = {}
    for rows, fault in inference.rejected:
        faults |= dict.fromkeys(rows, fault)
    columns = {}
    for output in spec.outputs:
        values = inference.outputs[output.tensor][:, output.index].astype(np.float64)
        is_wrong = ~np.isfinite(values)
        if output.minimum is not None:
            is_wrong |= values < output.minimum
        if output.maximum is not None:
            is_wrong |= values > output.maximum
        if output.type != "number":
            is_wrong |= values != np.rint(values)
        if output.type == "boolean":
            is_wrong |= (values != 0) & (values != 1)
        for row in np.flatnonzero(is_wrong).tolist():
            bounds = [b for b in (output.minimum, output.maximum) if b is not None]
            within = f" within {bounds}" if bounds else ""
            faults.setdefault(row, f"`{output.column}` is {values[row]:g}, expected a finite {output.type}{within}")
        usable = np.where(is_wrong, 0, inference.outputs[output.tensor][:, output.index])
        columns[output.column] = pa.array(usable).cast(OUTPUT_TYPES[output.type])
    return columns, dict(sorted(fault for fault in faults.items() if fault[0] < n_rows))


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


def _latency(rows: pa.Table, *, now_us: int, elapsed_ms: float) -> dict[str, Any]:
    """Latencies against the rows' own timestamps, which other machines' clocks may have made: never below 0."""
    broker_us, computed_us = (rows[name].combine_chunks().cast(pa.int64()) for name in ("broker_time", "computed_time"))
    return {
        "features": _ms_between(broker_us, computed_us),
        "queue": _ms_between(computed_us, now_us),
        "total": pc.add(_ms_between(broker_us, now_us), elapsed_ms),
    }


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


def _dead_letters(rejected: Sequence[tuple[int, Reason, str]]) -> pa.Table:
    rows = [{"_row": row, "reason": str(reason), "detail": detail} for row, reason, detail in sorted(rejected)]
    return pa.Table.from_pylist(rows, schema=REJECTED_SCORES)
