"""One served version of a model with its ladder: every row is answered by the highest rung that can.

From the top: the model; its recent answers to the same inputs; the light model, on the server and then in the worker;
rules. A row goes down because the model did not answer in time, failed, is known to be away, was too busy, or answered
that row with something that is no score.
"""

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum

import numpy as np
from numpy.typing import NDArray

from schemas.errors import HeadraceError, InferenceTimeoutError, InferenceUnavailableError
from schemas.model import ModelSpec, ServedVersion
from schemas.score import ServedBy
from streams.inference.answer import NOBODY, Answers, Columns, read_outputs
from streams.inference.guard import GuardedModel
from streams.inference.recent import AnswerCache
from streams.inference.vector import FeatureVectors

logger = logging.getLogger(__name__)

Matrix = NDArray[np.float32]
Rows = NDArray[np.int64]


class Cause(StrEnum):
    """Why a row went down the ladder."""

    TIMEOUT = "timeout"
    """The model did not answer in time."""
    ERROR = "error"
    """It failed."""
    BREAKER = "breaker"
    """It is known not to answer, and was not asked."""
    OVERLOAD = "overload"
    """The row was too old to wait for it."""
    INVALID_OUTPUT = "invalid_output"
    """It answered, but this row with something that is no score, or failed on this row alone."""


@dataclass(frozen=True, kw_only=True)
class LightRung:
    """A place where the light model runs.

    Attributes:
        model: The light model there.
        is_local: Whether it is the worker itself: what is shed must not go to a server that is too busy.
    """

    model: GuardedModel
    is_local: bool


class ServedModel:
    """Answers feature vectors by one version of a model, or by what stands in for it.

    Args:
        spec: The model's contract.
        served: The version.
        model: The version, asked only while it answers.
        light: The light model, in the order in which its places are tried; each is asked only where the one before it
            does not answer.
        clock_us: The time, for the age of recent answers.
    """

    def __init__(
        self,
        spec: ModelSpec,
        served: ServedVersion,
        *,
        model: GuardedModel,
        light: Sequence[LightRung] = (),
        clock_us: Callable[[], int] = lambda: time.monotonic_ns() // 1_000,
    ) -> None:
        self.spec = spec
        self.served = served
        self._model = model
        self._light = list(light)
        self._cache = None if spec.rungs.cache is None else AnswerCache(spec.rungs.cache)
        self._clock_us = clock_us
        self._is_started = False

    async def answer(
        self,
        vectors: FeatureVectors,
        *,
        rows: Rows | None = None,
        is_shed: NDArray[np.bool_] | None = None,
        failed: Callable[[], None] = lambda: None,
    ) -> Answers:
        """Answer rows.

        Args:
            vectors: The batch.
            rows: The rows of it to answer, rising, at least one; all where it is left out.
            is_shed: ``(n_rows,)``, rows that are too old to wait for the model; none where it is left out.
            failed: Told of each call of a server that fails.

        Returns:
            The answers. A row without one is among the faults: the model answered it with no score, and the rungs that
            would are waived.

        Raises:
            InferenceUnavailableError: The model does not answer, and rungs that would are waived: keep the rows.
            InferenceTimeoutError: Likewise, not in time.
            TensorMismatchError: The server refuses the matrix as such: it has another model than the contract's.
        """
        self._start()
        n_rows = len(vectors)
        answers = Answers.empty(self.spec, self.served, n_rows=n_rows)
        asked = rows = np.arange(n_rows) if rows is None else rows
        if is_shed is not None and is_shed[rows].any():
            await self._descend(answers, rows[is_shed[rows]], vectors, cause=Cause.OVERLOAD, failed=failed)
            # Where no rung answers what is shed, it waits for the model all the same: nothing is lost.
            asked = rows[answers.served_by[rows] == NOBODY]
        if not asked.size:
            return answers
        matrix = vectors.matrix if asked.size == n_rows else vectors.matrix[asked]
        was_open = self._model.is_open
        try:
            columns, faults = await self._ask(matrix, failed=failed)
        except (InferenceUnavailableError, InferenceTimeoutError) as exc:
            is_slow = isinstance(exc, InferenceTimeoutError)
            cause = Cause.BREAKER if was_open else Cause.TIMEOUT if is_slow else Cause.ERROR
            await self._descend(answers, asked, vectors, cause=cause, failed=failed)
            if (answers.served_by[rows] == NOBODY).any():
                raise
            return answers
        if not faults:
            answers.put(asked, columns, by=ServedBy.MODEL)
            return answers
        is_valid = np.ones(asked.size, dtype=np.bool_)
        is_valid[list(faults)] = False
        answers.put(asked[is_valid], {n: values[is_valid] for n, values in columns.items()}, by=ServedBy.MODEL)
        await self._descend(answers, asked[~is_valid], vectors, cause=Cause.INVALID_OUTPUT, failed=failed)
        told = {int(asked[row]): fault for row, fault in faults.items()}
        return replace(answers, faults=told)

    async def close(self) -> None:
        """End what goes on aside."""
        for model in (self._model, *(rung.model for rung in self._light)):
            await model.close()

    def _start(self) -> None:
        """Get the light model ready, for the time when it is needed."""
        if not self._is_started:
            self._is_started = True
            for rung in self._light:
                if not rung.is_local:
                    rung.model.probe()

    async def _ask(self, matrix: Matrix, *, failed: Callable[[], None]) -> tuple[Columns, dict[int, str]]:
        inference = await self._model.infer(matrix, failed=failed)
        columns, faults = read_outputs(self.spec, inference, n_rows=len(matrix))
        if self._cache is not None:
            is_valid = np.ones(len(matrix), dtype=np.bool_)
            is_valid[list(faults)] = False
            self._cache.add(matrix, columns, is_valid=is_valid, now_us=self._clock_us())
        return columns, faults

    async def _descend(
        self, answers: Answers, rows: Rows, vectors: FeatureVectors, *, cause: Cause, failed: Callable[[], None]
    ) -> None:
        """Have the rungs below the model answer ``rows``, as far as they can."""
        left = rows
        if self._cache is not None and cause is not Cause.INVALID_OUTPUT:
            found, columns = self._cache.find(vectors.matrix[left], now_us=self._clock_us())
            left = self._take(answers, left, found, columns, by=ServedBy.CACHE, cause=cause)
        for rung in self._light:
            if not left.size or (cause is Cause.OVERLOAD and not rung.is_local):
                continue
            try:
                inference = await rung.model.infer(vectors.matrix[left], failed=failed)
            except HeadraceError as exc:
                logger.warning("light model of %s does not answer, what is below it does: %s", self.spec.name, exc)
                continue
            columns, faults = read_outputs(self.spec, inference, n_rows=left.size)
            found = np.setdiff1d(np.arange(left.size), list(faults)).astype(np.int64)
            valid = {name: values[found] for name, values in columns.items()}
            left = self._take(answers, left, found, valid, by=ServedBy.LIGHT_MODEL, cause=cause)
        if left.size and self.spec.rungs.rules:
            columns = self._by_rules(left, vectors)
            left = self._take(answers, left, np.arange(left.size), columns, by=ServedBy.RULES, cause=cause)

    def _take(self, answers: Answers, left: Rows, found: Rows, columns: Columns, *, by: ServedBy, cause: Cause) -> Rows:
        if not found.size:
            return left
        answers.put(left[found], columns, by=by)
        answers.fallen[str(cause), str(by)] += found.size
        return np.delete(left, found)

    def _by_rules(self, rows: Rows, vectors: FeatureVectors) -> Columns:
        hits = self.spec.rules.first_hits(vectors.columns, n_rows=len(vectors))[rows]
        rules = self.spec.rungs.rules
        return {
            output.column: np.array([rule.then[output.column] for rule in rules])[hits] for output in self.spec.outputs
        }
