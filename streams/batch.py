"""Columns of raw Kafka records: what the transport delivers and the pipeline decodes."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Headers = list[tuple[str, bytes]] | None


@dataclass(frozen=True, kw_only=True)
class RawBatch:
    """Consecutive records of one topic partition, as columns of equal length, in offset order.

    Attributes:
        topic: Topic the records came from.
        partition: Partition the records came from.
        offsets: ``(n_rows,)`` int64, rising; gaps are possible (compaction, transaction markers).
        broker_time_us: ``(n_rows,)`` int64, Kafka's record timestamps in microseconds.
        keys: Record keys.
        values: Payloads; None is a tombstone.
        headers: Record headers.
        next_offset: Where to go on reading after this batch.
        size_bytes: Bytes of keys and values together.
    """

    topic: str
    partition: int
    offsets: NDArray[np.int64]
    broker_time_us: NDArray[np.int64]
    keys: Sequence[bytes | None]
    values: Sequence[bytes | None]
    headers: Sequence[Headers]
    next_offset: int
    size_bytes: int

    def __len__(self) -> int:
        return len(self.offsets)

    def take(self, positions: NDArray[np.int64]) -> "RawBatch":
        """Keep the records at ``positions``, which rise; at least one."""
        keys, values = [self.keys[at] for at in positions], [self.values[at] for at in positions]
        return RawBatch(
            topic=self.topic,
            partition=self.partition,
            offsets=self.offsets[positions],
            broker_time_us=self.broker_time_us[positions],
            keys=keys,
            values=values,
            headers=[self.headers[at] for at in positions],
            next_offset=self.next_offset,
            size_bytes=sum(len(part) for column in (keys, values) for part in column if part is not None),
        )
