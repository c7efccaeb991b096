"""Micro-batches: rows wait for others until a batch is full or the first of them has to go.

Pure: time is told, nothing is awaited, and no row is lost, doubled or reordered. The scoring agent adds what arrives,
sleeps until :attr:`MicroBatcher.next_deadline_us`, and takes what is due.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import accumulate
from typing import Generic, TypeVar

import pyarrow as pa

from schemas.errors import ConfigError

Chunk = TypeVar("Chunk")


@dataclass(frozen=True, kw_only=True)
class Span(Generic[Chunk]):
    """Consecutive rows of a batch that came in one chunk.

    Attributes:
        chunk: The chunk.
        start: Where the first of them is in the batch.
        n_rows: How many they are.
        start_in_chunk: Where the first of them is in the chunk.
    """

    chunk: Chunk
    start: int
    n_rows: int
    start_in_chunk: int


@dataclass(frozen=True, kw_only=True)
class MicroBatch(Generic[Chunk]):
    """Consecutive rows that go to the model together.

    Attributes:
        rows: The rows, in the order in which they were added.
        completed: Those chunks whose last row is in here, in order: once this batch and those before it are
            done, these chunks are.
        spans: Where the rows came from, in order.
    """

    rows: pa.Table
    completed: tuple[Chunk, ...]
    spans: tuple[Span[Chunk], ...]


@dataclass(frozen=True, kw_only=True)
class _Piece(Generic[Chunk]):
    rows: pa.Table
    chunk: Chunk
    start_in_chunk: int
    deadline_us: int
    is_last: bool


class MicroBatcher(Generic[Chunk]):
    """Fills micro-batches.

    Args:
        max_rows: Rows in a batch at most.
        max_bytes: Arrow bytes in a batch at most; a single row that is larger is a batch of its own.
        max_wait_us: How long a row waits for others at most.
    """

    def __init__(self, *, max_rows: int, max_bytes: int, max_wait_us: int) -> None:
        for name, value, least in (
            ("max_rows", max_rows, 1),
            ("max_bytes", max_bytes, 1),
            ("max_wait_us", max_wait_us, 0),
        ):
            if value < least:
                msg = f"`{name}` is {value}, expected {least} or more"
                raise ConfigError(msg)
        self._max_rows = max_rows
        self._max_bytes = max_bytes
        self._max_wait_us = max_wait_us
        self._pieces: list[_Piece[Chunk]] = []
        self._n_rows = 0
        self._n_bytes = 0

    def __len__(self) -> int:
        """Rows that wait."""
        return self._n_rows

    @property
    def next_deadline_us(self) -> int | None:
        """When what waits is due; None when nothing waits."""
        return min((piece.deadline_us for piece in self._pieces), default=None)

    def add(
        self, rows: pa.Table, *, chunk: Chunk, now_us: int, deadline_us: int | None = None
    ) -> list[MicroBatch[Chunk]]:
        """Add a chunk of rows and take the batches that it fills.

        Args:
            rows: The rows, all chunks of one schema; none is fine.
            chunk: What names the chunk; comes out with the last of its rows.
            now_us: The time.
            deadline_us: When they must go; ``now_us + max_wait_us`` where that is sooner or this is None.
        """
        latest_us = now_us + self._max_wait_us
        deadline_us = latest_us if deadline_us is None else min(deadline_us, latest_us)
        return list(self._fill(rows, chunk=chunk, deadline_us=deadline_us))

    def take_due(self, now_us: int) -> MicroBatch[Chunk] | None:
        """Take what waits if its deadline has come."""
        deadline_us = self.next_deadline_us
        return None if deadline_us is None or now_us < deadline_us else self.take()

    def take(self) -> MicroBatch[Chunk] | None:
        """Take what waits, due or not; None when nothing does."""
        if not self._pieces:
            return None
        pieces, self._pieces, self._n_rows, self._n_bytes = self._pieces, [], 0, 0
        starts = accumulate((piece.rows.num_rows for piece in pieces), initial=0)
        return MicroBatch(
            rows=pa.concat_tables([piece.rows for piece in pieces]),
            completed=tuple(piece.chunk for piece in pieces if piece.is_last),
            spans=tuple(
                Span(chunk=piece.chunk, start=start, n_rows=piece.rows.num_rows, start_in_chunk=piece.start_in_chunk)
                for piece, start in zip(pieces, starts, strict=False)
            ),
        )

    def _fill(self, rows: pa.Table, *, chunk: Chunk, deadline_us: int) -> Iterator[MicroBatch[Chunk]]:
        rest = rows
        while True:
            fitting = self._fitting(rest)
            if fitting == 0 and rest.num_rows and self._pieces:
                yield from self._taken()
                continue
            start_in_chunk = rows.num_rows - rest.num_rows
            piece, rest = rest.slice(0, max(fitting, 1)), rest.slice(max(fitting, 1))
            self._pieces.append(
                _Piece(
                    rows=piece,
                    chunk=chunk,
                    start_in_chunk=start_in_chunk,
                    deadline_us=deadline_us,
                    is_last=not rest.num_rows,
                )
            )
            self._n_rows += piece.num_rows
            self._n_bytes += piece.nbytes
            if self._n_rows >= self._max_rows or self._n_bytes >= self._max_bytes:
                yield from self._taken()
            if not rest.num_rows:
                return

    def _taken(self) -> Iterator[MicroBatch[Chunk]]:
        if (batch := self.take()) is not None:
            yield batch

    def _fitting(self, rows: pa.Table) -> int:
        """How many of the first rows fit into the batch that is being filled."""
        most: int = min(rows.num_rows, self._max_rows - self._n_rows)
        room = self._max_bytes - self._n_bytes
        if rows.slice(0, most).nbytes <= room:
            return most
        least = 0
        while most - least > 1:
            middle = (least + most) // 2
            if rows.slice(0, middle).nbytes <= room:
                least = middle
            else:
                most = middle
        return least
