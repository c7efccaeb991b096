"""What is scored and waits to be written: a chunk leaves as a whole, since its offset stands for all of its rows."""

from dataclasses import dataclass
from typing import Generic, TypeVar

from streams.inference.batcher import MicroBatch
from streams.inference.scorer import Scored

Chunk = TypeVar("Chunk")


@dataclass(frozen=True, kw_only=True)
class Part(Generic[Chunk]):
    """Rows of a batch that leave together.

    Attributes:
        batch: The batch.
        scored: What became of those rows, which it names by their index in the batch.
    """

    batch: MicroBatch[Chunk]
    scored: Scored


class Outbox(Generic[Chunk]):
    """Keeps what has been scored until the chunks that it came in are scored whole. Pure; the order of rows stays."""

    def __init__(self) -> None:
        self._held: list[Part[Chunk]] = []

    def add(self, batch: MicroBatch[Chunk], scored: Scored) -> list[Part[Chunk]]:
        """Add the next batch, and take what may leave: all rows up to the last one of ``batch.completed``.

        Args:
            batch: The batch, in the order of the batcher.
            scored: What became of its rows.
        """
        last, n_rows = batch.spans[-1], batch.rows.num_rows
        is_complete = bool(batch.completed) and last.chunk is batch.completed[-1]
        stop = n_rows if is_complete else last.start if batch.completed else 0
        if stop == 0 and n_rows:
            self._held.append(Part(batch=batch, scored=scored))
            return []
        ready = [*self._held, Part(batch=batch, scored=scored.between(0, stop))]
        self._held = [Part(batch=batch, scored=scored.between(stop, n_rows))] if stop < n_rows else []
        return ready
