"""Who answers whom in one generation of a rollout: the champion with its ladder, and a candidate beside it.

The candidate has no ladder of its own. A row that it has no valid answer to is the champion's, counts as the
candidate's failure, and costs nobody a score. In its shadow it is asked aside, a batch at a time, for what it would
have answered.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Final, Protocol, Self

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from schemas.errors import HeadraceError
from schemas.model import ServedVersion
from schemas.score import ServedBy
from streams.inference.answer import NOBODY, SERVED_BY, Answers
from streams.inference.rollout import Rollout, Stage, belongs_to_candidate
from streams.inference.rollout_log import Entry
from streams.inference.served_model import ServedModel
from streams.inference.tally import Tally, merged, score_bins
from streams.inference.vector import FeatureVectors

logger = logging.getLogger(__name__)

Rows = NDArray[np.int64]
_BY_MODEL: Final = SERVED_BY.index(ServedBy.MODEL)
_SHADOW_ROWS: Final = 1_024
"""Rows of a batch that are compared at most: one request, which the champion's next one does not wait for long."""


class Answering(Protocol):
    """A version in a role: :class:`ServedModel`, with a ladder or without."""

    @property
    def served(self) -> ServedVersion:
        """The version."""
        ...

    async def answer(
        self,
        vectors: FeatureVectors,
        *,
        rows: Rows | None = None,
        is_shed: NDArray[np.bool_] | None = None,
        failed: Callable[[], None] = lambda: None,
    ) -> Answers:
        """Answer rows; see :meth:`ServedModel.answer`."""
        ...


class Arms:
    """Answers feature vectors by the champion and the candidate of one generation; belongs to one event loop.

    Args:
        entry: The generation, and the state in it.
        champion: The champion, with its ladder.
        candidate: The candidate, without a ladder; None where there is none.
        previous: The champion before one that is watched, without a ladder; None where there is none.
        seen: What this worker has seen of each version in the generation before, as it was started anew.
        clock_ns: Monotonic clock, for latencies.
    """

    def __init__(
        self,
        entry: Entry,
        *,
        champion: ServedModel,
        candidate: Answering | None = None,
        previous: Answering | None = None,
        seen: Mapping[str, Tally] | None = None,
        clock_ns: Callable[[], int] = time.perf_counter_ns,
    ) -> None:
        self.entry = entry
        self.spec = champion.spec
        self._champion = champion
        self._candidate = candidate
        self._previous = previous
        self._clock_ns = clock_ns
        self._n_under_way = 0
        self._is_idle = asyncio.Event()
        self._is_idle.set()
        self._shadowing: asyncio.Task[None] | None = None
        self.tallies = {
            model.served.version: merged([(seen or {}).get(model.served.version, Tally())])
            for model in (champion, *([] if candidate is None else [candidate]))
        }
        """What this worker has seen of each version, by its number; counted while something is decided by it."""

    @classmethod
    def of(cls, champion: ServedModel) -> Self:
        """Have one version answer all, without a rollout."""
        return cls(
            Entry(generation=0, state=Rollout(model=champion.spec.name, champion=champion.served)), champion=champion
        )

    async def answer(
        self,
        vectors: FeatureVectors,
        *,
        is_shed: NDArray[np.bool_] | None = None,
        failed: Callable[[], None] = lambda: None,
    ) -> Answers:
        """Answer rows, each by the version that its entity belongs to; see :meth:`ServedModel.answer`."""
        self._n_under_way += 1
        self._is_idle.clear()
        try:
            if self._candidate is None or self.entry.state.stage is not Stage.CANARY:
                return await self._answer_by_champion(vectors, is_shed=is_shed, failed=failed)
            return await self._answer_by_both(self._candidate, vectors, is_shed=is_shed, failed=failed)
        finally:
            self._n_under_way -= 1
            if not self._n_under_way:
                self._is_idle.set()

    async def close(self) -> None:
        """Wait until what is under way has ended, and end the shadow. The versions stay open."""
        await self._is_idle.wait()
        if self._shadowing is not None:
            self._shadowing.cancel()
            await asyncio.wait({self._shadowing})

    async def _answer_by_champion(
        self,
        vectors: FeatureVectors,
        *,
        rows: Rows | None = None,
        is_shed: NDArray[np.bool_] | None,
        failed: Callable[[], None],
    ) -> Answers:
        if self.entry.state.stage is Stage.STABLE:
            return await self._champion.answer(vectors, is_shed=is_shed, failed=failed)
        began_ns = self._clock_ns()
        counted = np.arange(len(vectors)) if rows is None else rows
        if is_shed is not None:
            counted = counted[~is_shed[counted]]
        try:
            answers = await self._champion.answer(vectors, rows=rows, is_shed=is_shed, failed=failed)
        except HeadraceError:
            await self._count(self._champion, None, counted, vectors, began_ns=began_ns)
            raise
        await self._count(self._champion, answers, counted, vectors, began_ns=began_ns)
        if self._candidate is not None and self.entry.state.stage is Stage.SHADOW:
            self._compare_aside(self._candidate, vectors, answers)
        return answers

    async def _answer_by_both(
        self,
        candidate: Answering,
        vectors: FeatureVectors,
        *,
        is_shed: NDArray[np.bool_] | None,
        failed: Callable[[], None],
    ) -> Answers:
        entities = vectors.rows[self.spec.entity].cast(pa.string()).to_pylist()
        is_canary = belongs_to_candidate(self.entry.state, entities)
        # What is shed goes down the champion's ladder at once: the candidate has none.
        is_given = is_canary if is_shed is None else is_canary & ~is_shed
        given, others = np.flatnonzero(is_given), np.flatnonzero(~is_given)
        asked = asyncio.ensure_future(self._ask(candidate, vectors, given, failed=failed))
        try:
            answers = Answers.empty(self.spec, self._champion.served, n_rows=len(vectors))
            if others.size:
                answers = await self._answer_by_champion(vectors, rows=others, is_shed=is_shed, failed=failed)
            answers = answers.joined(await asked)
        finally:
            asked.cancel()
            await asyncio.gather(asked, return_exceptions=True)
        left = given[answers.served_by[given] == NOBODY]
        if left.size:
            answers = answers.joined(await self._champion.answer(vectors, rows=left, failed=failed))
        return replace(answers, is_canary=is_canary)

    async def _ask(
        self, candidate: Answering, vectors: FeatureVectors, rows: Rows, *, failed: Callable[[], None] = lambda: None
    ) -> Answers:
        """Ask the candidate; what it does not answer is left to nobody, and counted."""
        answers = Answers.empty(self.spec, candidate.served, n_rows=len(vectors))
        if not rows.size:
            return answers
        began_ns = self._clock_ns()
        try:
            answers = await candidate.answer(vectors, rows=rows, failed=failed)
        except HeadraceError as exc:
            logger.warning(
                "version %s of %s, which is tried, does not answer %d rows: %s",
                *(candidate.served.version, self.spec.name, rows.size, exc),
            )
        await self._count(candidate, answers, rows, vectors, began_ns=began_ns)
        return answers

    def _compare_aside(self, candidate: Answering, vectors: FeatureVectors, answers: Answers) -> None:
        """Ask the candidate aside for what the champion has answered, unless it is still being asked for others."""
        rows = np.flatnonzero(answers.served_by == _BY_MODEL)[:_SHADOW_ROWS]
        if rows.size and (self._shadowing is None or self._shadowing.done()):
            self._shadowing = asyncio.create_task(self._compare(candidate, vectors, answers, rows))
            self._shadowing.add_done_callback(self._tell_fault)

    async def _compare(self, candidate: Answering, vectors: FeatureVectors, answers: Answers, rows: Rows) -> None:
        found = await self._ask(candidate, vectors, rows)
        both = rows[found.served_by[rows] == _BY_MODEL]
        differences = [
            np.abs(found.columns[name][both].astype(np.float64) - answers.columns[name][both].astype(np.float64))
            for name in answers.columns
        ]
        self.tallies[candidate.served.version].compare(np.max(differences, axis=0))

    def _tell_fault(self, shadowing: asyncio.Task[None]) -> None:
        """A fault of the comparison itself must neither end scoring nor stay unseen."""
        if not shadowing.cancelled() and (error := shadowing.exception()) is not None:
            logger.error("the shadow of %s could not be compared", self.spec.name, exc_info=error)

    async def _count(
        self, model: Answering, answers: Answers | None, rows: Rows, vectors: FeatureVectors, *, began_ns: int
    ) -> None:
        """Count what a version has answered to rows that it was given; nothing at all where there are no answers.

        Rows that it did not answer at all are its failures where the version that it is judged by answers meanwhile:
        else it is the server that is away, or has too much to do.
        """
        if not rows.size:
            return
        took_ms = (self._clock_ns() - began_ns) / 1e6
        output = self.spec.outputs[0]
        valid = rows[:0] if answers is None else rows[answers.served_by[rows] == _BY_MODEL]
        failures = rows.size - valid.size
        invalid = 0 if answers is None else int(np.isin(rows, list(answers.faults)).sum())
        if failures > invalid and not await self._is_other_answering(model, vectors, rows[:1]):
            failures = invalid
        if not valid.size + failures:
            return
        values = np.empty(0) if answers is None else answers.columns[output.column][valid]
        self.tallies[model.served.version].add(
            rows=valid.size + failures, failures=failures, took_ms=took_ms, scores=score_bins(output, values)
        )

    async def _is_other_answering(self, model: Answering, vectors: FeatureVectors, rows: Rows) -> bool:
        """Tell whether the version that this one is judged by answers some rows."""
        other = (self._candidate or self._previous) if model is self._champion else self._champion
        if other is None:
            return False
        try:
            answers = await other.answer(vectors, rows=rows)
        except HeadraceError:
            return False
        return bool((answers.served_by[rows] == _BY_MODEL).all())
