"""Columns of raw Kafka records: what the transport delivers and the pipeline decodes."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Final, overload

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

Headers = list[tuple[str, bytes]] | None

# Measured on CPython 3.11, allocations rounded up to 16 bytes.
_ROW_BYTES: Final = 40
"""Offset, time and three references."""
_OBJECT_BYTES: Final = 40
"""A key or a value, without its content."""
_HEADERS_BYTES: Final = 64
"""A record's list of headers."""
_HEADER_BYTES: Final = 160
"""A header, without its name and value."""


class PayloadColumn(Sequence[bytes | None]):
    """Payloads as one column, as an archive has them: what looks at all of them at once makes no object of each.

    Attributes:
        column: The payloads, ``pa.binary()``.
    """

    def __init__(self, column: pa.BinaryArray) -> None:
        self.column = column

    def __len__(self) -> int:
        return len(self.column)

    @overload
    def __getitem__(self, at: int) -> bytes | None: ...

    @overload
    def __getitem__(self, at: slice) -> "PayloadColumn": ...

    def __getitem__(self, at: int | slice) -> "bytes | PayloadColumn | None":
        if isinstance(at, slice):
            return PayloadColumn(self.column[at])
        value: bytes | None = self.column[at].as_py()
        return value

    def __iter__(self) -> Iterator[bytes | None]:
        values: list[bytes | None] = self.column.to_pylist()
        return iter(values)

    def count(self, value: object) -> int:
        """Count payloads; those that are absent without a look at any."""
        return int(self.column.null_count) if value is None else super().count(value)


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
    """

    topic: str
    partition: int
    offsets: NDArray[np.int64]
    broker_time_us: NDArray[np.int64]
    keys: Sequence[bytes | None]
    values: Sequence[bytes | None]
    headers: Sequence[Headers]
    next_offset: int

    @cached_property
    def size_bytes(self) -> int:
        """Memory that the records take as Python holds them: many times their content where that is short."""
        size = len(self) * _ROW_BYTES
        for column in (self.keys, self.values):
            n_absent = column.count(None)
            there: Iterable[Any] = filter(None, column) if n_absent else column
            size += (len(column) - n_absent) * _OBJECT_BYTES + sum(map(len, there))
        for headers in filter(None, self.headers):
            size += _HEADERS_BYTES + sum(_HEADER_BYTES + len(name) + len(value or b"") for name, value in headers)
        return size

    @cached_property
    def has_headers(self) -> bool:
        """Whether any record has headers."""
        return any(self.headers)

    def __len__(self) -> int:
        return len(self.offsets)

    @staticmethod
    def join(batches: "Sequence[RawBatch]") -> "RawBatch":
        """Make one batch of consecutive ones of a partition; at least one."""
        if len(batches) == 1:
            return batches[0]
        return RawBatch(
            topic=batches[0].topic,
            partition=batches[0].partition,
            offsets=np.concatenate([batch.offsets for batch in batches]),
            broker_time_us=np.concatenate([batch.broker_time_us for batch in batches]),
            keys=[key for batch in batches for key in batch.keys],
            values=[value for batch in batches for value in batch.values],
            headers=[headers for batch in batches for headers in batch.headers],
            next_offset=batches[-1].next_offset,
        )

    def take(self, positions: NDArray[np.int64]) -> "RawBatch":
        """Keep the records at ``positions``, which rise; at least one."""
        return RawBatch(
            topic=self.topic,
            partition=self.partition,
            offsets=self.offsets[positions],
            broker_time_us=self.broker_time_us[positions],
            keys=[self.keys[at] for at in positions],
            values=[self.values[at] for at in positions],
            headers=[self.headers[at] for at in positions],
            next_offset=self.next_offset,
        )
