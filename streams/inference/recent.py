"""Recent answers of a model, to be given again for the very same inputs while it does not answer."""

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from schemas.ladder import RecentAnswers


@dataclass(frozen=True, kw_only=True)
class _Batch:
    matrix: NDArray[np.float32]
    columns: Mapping[str, NDArray[Any]]
    is_valid: NDArray[np.bool_]
    time_us: int


class AnswerCache:
    """Keeps the newest answers, whole batches at a time: adding costs nothing, rows are indexed when one is asked for.

    Args:
        limits: How many answers, and how old.
    """

    def __init__(self, limits: RecentAnswers) -> None:
        self._limits = limits
        self._batches: deque[_Batch] = deque()
        self._n_rows = 0
        self._index: dict[bytes, tuple[_Batch, int]] = {}
        self._unindexed: deque[_Batch] = deque()

    def __len__(self) -> int:
        """Rows that are kept."""
        return self._n_rows

    def add(
        self,
        matrix: NDArray[np.float32],
        columns: Mapping[str, NDArray[Any]],
        *,
        is_valid: NDArray[np.bool_],
        now_us: int,
    ) -> None:
        """Keep the answers to a matrix; neither may be changed afterwards.

        Args:
            matrix: ``(n_rows, n_features)``.
            columns: ``(n_rows,)`` answers by output column.
            is_valid: ``(n_rows,)``, which of them are answers.
            now_us: The time.
        """
        batch = _Batch(matrix=matrix, columns=columns, is_valid=is_valid, time_us=now_us)
        self._batches.append(batch)
        self._unindexed.append(batch)
        self._n_rows += len(matrix)
        # The newest batch stays, however large: a micro-batch is bounded by itself.
        while len(self._batches) > 1 and self._n_rows > self._limits.rows:
            self._drop_oldest()

    def find(self, matrix: NDArray[np.float32], *, now_us: int) -> tuple[NDArray[np.int64], dict[str, NDArray[Any]]]:
        """Find answers to rows.

        Returns:
            Which rows have one, rising; and their answers by output column.
        """
        while self._batches and now_us - self._batches[0].time_us > self._limits.max_age_us:
            self._drop_oldest()
        while self._unindexed:
            batch = self._unindexed.popleft()
            keys = _keys(batch.matrix)
            self._index |= {keys[row]: (batch, row) for row in np.flatnonzero(batch.is_valid).tolist()}
        hits = [(row, hit) for row, key in enumerate(_keys(matrix)) if (hit := self._index.get(key)) is not None]
        rows = np.array([row for row, _ in hits], dtype=np.int64)
        if not hits:
            return rows, {}
        names = hits[0][1][0].columns
        return rows, {name: np.array([batch.columns[name][at] for _, (batch, at) in hits]) for name in names}

    def _drop_oldest(self) -> None:
        batch = self._batches.popleft()
        self._n_rows -= len(batch.matrix)
        if self._unindexed and self._unindexed[0] is batch:
            self._unindexed.popleft()
            return
        for key in _keys(batch.matrix):
            hit = self._index.get(key)
            if hit is not None and hit[0] is batch:
                del self._index[key]


def _keys(matrix: NDArray[np.float32]) -> list[bytes]:
    rows = np.ascontiguousarray(matrix)
    content, width = rows.tobytes(), rows.shape[1] * rows.itemsize
    return [content[start : start + width] for start in range(0, len(content), width)]
