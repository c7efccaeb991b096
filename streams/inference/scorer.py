"""Scores: as-of rows of a model's trigger view in, score rows out.

For each batch one read of the online store, one matrix, one call of the model server. A value that is from after the
event that is scored is not used: the store holds the newest row of an entity, and in a replay that may have run ahead.
"""

import logging
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Final, Self

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from schemas.row import Pane, Reason
from schemas.score import score_row_schema
from streams.inference.answer import NOBODY
from streams.inference.arms import Arms
from streams.inference.score_table import latency_of, make_scores
from streams.inference.vector import FeatureVectors, VectorReader, ages_us

logger = logging.getLogger(__name__)

REJECTED_SCORES: Final = pa.schema(
    [pa.field("_row", pa.int64()), pa.field("reason", pa.string()), pa.field("detail", pa.string())]
)
"""Rows without a score: their index among the rows given, and why."""


@dataclass(frozen=True, kw_only=True)
class Scored:
    """What became of a batch: its rows are as many as scores, dead letters and ignored ones together.

    Attributes:
        scores: :func:`schemas.score.score_row_schema`, in the order of the rows.
        dead_letters: :data:`REJECTED_SCORES`, in the order of the rows.
        ignored: Rows that are not to be scored, by why: ``closing_pane``, ``other_definition``.
        lookup_ms: What reading the online store took, retries included.
        inference_ms: What the model took, or what stood in for it, retries included.
        scored_rows: ``(n_scores,)`` int64, index of each score's row among the rows given.
        fallen: Scores that the model did not make, by why and by what made them.
    """

    scores: pa.Table
    dead_letters: pa.Table
    ignored: Mapping[str, int]
    scored_rows: NDArray[np.int64]
    lookup_ms: float = 0.0
    inference_ms: float = 0.0
    fallen: Counter[tuple[str, str]] = field(default_factory=Counter)

    def between(self, start: int, stop: int) -> Self:
        """Keep what became of the rows ``start`` to ``stop``; what is only counted stays with the first row."""
        first, last = np.searchsorted(self.scored_rows, [start, stop])
        position = self.dead_letters["_row"]
        is_kept = pc.and_(pc.greater_equal(position, start), pc.less(position, stop))
        return replace(
            self,
            scores=self.scores.slice(first, last - first),
            dead_letters=self.dead_letters.filter(is_kept),
            scored_rows=self.scored_rows[first:last],
            ignored=self.ignored if start == 0 else {},
            fallen=self.fallen if start == 0 else Counter(),
        )


class Scorer:
    """Scores rows of one model's trigger view.

    Args:
        arms: Who answers whom.
        vectors: Reads its feature vectors.
        clock_ns: Monotonic clock, for latencies.
    """

    def __init__(
        self,
        arms: Arms,
        *,
        vectors: VectorReader,
        clock_ns: Callable[[], int] = time.perf_counter_ns,
    ) -> None:
        self._spec = arms.spec
        self._arms = arms
        self._vectors = vectors
        self._clock_ns = clock_ns
        self._schema = score_row_schema(arms.spec)

    @property
    def arms(self) -> Arms:
        """Who answers whom at present."""
        return self._arms

    def use(self, arms: Arms) -> None:
        """Have others answer from the next batch on; those that are under way end on the present ones."""
        self._arms = arms

    async def score(self, rows: pa.Table, *, now_us: int, on_failure: Callable[[str], None] = lambda _: None) -> Scored:
        """Score the as-of rows among ``rows``; safe to repeat.

        Args:
            rows: Rows of the trigger view, ``view.row_schema``, from any partitions.
            now_us: The time at which scoring begins.
            on_failure: Told the service (``redis``, ``triton``) of each call that failed and may be tried again, also
                of those of a round that comes to nothing.

        Raises:
            SchemaMismatchError: The rows lack columns.
            SinkUnavailableError: The online store does not answer, after all attempts; keep the rows and call again.
            InferenceUnavailableError: The model does not answer, nor may anything else; keep the rows and call again.
            InferenceTimeoutError: Likewise, too late.
            TensorMismatchError: The server refuses the matrix: its model is another one than the contract's.
        """
        self._spec.check_row_columns(rows.column_names)
        asked, ignored = self._select(rows)
        asked, rejected = self._with_entity(asked)
        began_ns = self._clock_ns()
        if asked.num_rows:
            vectors = await self._vectors.read(asked, failed=lambda: on_failure("redis"))
            vectors, lacking = self._with_inputs(vectors)
            rejected += lacking
            asked = vectors.rows
        if not asked.num_rows:
            return Scored(
                scores=self._schema.empty_table(),
                dead_letters=_dead_letters(rejected),
                ignored=ignored,
                scored_rows=np.empty(0, np.int64),
            )
        read_ns = self._clock_ns()
        answers = await self._arms.answer(
            vectors, is_shed=self._too_old(asked, now_us=now_us), failed=lambda: on_failure("triton")
        )
        ended_ns = self._clock_ns()
        lookup_ms, inference_ms = (read_ns - began_ns) / 1e6, (ended_ns - read_ns) / 1e6
        latency = latency_of(asked, now_us=now_us, elapsed_ms=(ended_ns - began_ns) / 1e6)
        latency |= {"lookup": lookup_ms, "inference": inference_ms}
        scored_rows = asked["_row"].to_numpy()
        is_answered = answers.served_by != NOBODY
        scores = make_scores(
            self._spec,
            vectors,
            answers,
            schema=self._schema,
            latency=latency,
        )
        if answers.faults:
            row, fault = next(iter(answers.faults.items()))
            request = asked["request_id"][row].as_py()
            logger.warning(
                "model %s: no valid answer to %d of %d rows, such as %s: %s",
                *(self._spec.name, len(answers.faults), asked.num_rows, request, fault),
            )
            unanswered = [(at, fault) for at, fault in answers.faults.items() if not is_answered[at]]
            rejected += [(int(scored_rows[at]), Reason.INVALID_OUTPUT, fault) for at, fault in unanswered]
            scores, scored_rows = scores.filter(pa.array(is_answered)), scored_rows[is_answered]
        return Scored(
            scores=scores.cast(self._schema),
            dead_letters=_dead_letters(rejected),
            ignored=ignored,
            scored_rows=scored_rows,
            lookup_ms=lookup_ms,
            inference_ms=inference_ms,
            fallen=answers.fallen,
        )

    def _too_old(self, rows: pa.Table, *, now_us: int) -> NDArray[np.bool_] | None:
        shed_after_us = self._spec.rungs.shed_after_us
        return None if shed_after_us is None else ages_us(rows, now_us=now_us) >= shed_after_us

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

    def _with_inputs(self, vectors: FeatureVectors) -> tuple[FeatureVectors, list[tuple[int, Reason, str]]]:
        if self._spec.on_incomplete == "score":
            return vectors, []
        is_lacking = np.isnan(vectors.matrix).any(axis=1)
        places = vectors.rows["_row"].to_numpy()
        lacking = [
            (int(places[row]), Reason.INCOMPLETE_INPUT, f"no value for {vectors.lacking(row)}, expected all inputs")
            for row in np.flatnonzero(is_lacking).tolist()
        ]
        return vectors.where(~is_lacking), lacking


def _dead_letters(rejected: Sequence[tuple[int, Reason, str]]) -> pa.Table:
    rows = [{"_row": row, "reason": str(reason), "detail": detail} for row, reason, detail in sorted(rejected)]
    return pa.Table.from_pylist(rows, schema=REJECTED_SCORES)
