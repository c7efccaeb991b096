"""What decoding makes of a batch, whatever the format of its payloads."""

from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from schemas.row import INPUT_COLUMNS, PRODUCED_TIME_HEADER, REQUEST_ID_HEADER, Reason
from streams.batch import RawBatch


@dataclass(frozen=True, kw_only=True)
class DecodedBatch:
    """Columns of the rows that pass the contract, and the rows that do not.

    Attributes:
        rows: The contract's columns and :data:`schemas.row.INPUT_COLUMNS`, in offset order.
        rejected: :data:`schemas.row.REJECTED_COLUMNS`, in offset order.
    """

    rows: pa.Table
    rejected: pa.Table


def reject(batch: RawBatch, position: int, reason: Reason, detail: str) -> dict[str, Any]:
    """Make a row of :data:`schemas.row.REJECTED_COLUMNS`."""
    return {"_offset": int(batch.offsets[position]), "reason": reason.value, "detail": detail, "late_by_us": None}


def with_input_columns(columns: pa.Table, *, batch: RawBatch, positions: pa.Array) -> pa.Table:
    """Add :data:`schemas.row.INPUT_COLUMNS` of the records at ``positions``."""
    request_ids = pa.nulls(len(batch), pa.string())
    if batch.has_headers:
        request_ids = pa.array([_request_id(headers) for headers in batch.headers], pa.string())
    values = [pa.array(batch.offsets, pa.int64()), pa.array(batch.broker_time_us, pa.int64()), request_ids]
    for field, column in zip(INPUT_COLUMNS, values, strict=True):
        columns = columns.append_column(field, column if len(positions) == len(batch) else column.take(positions))
    return columns


def arrival_times_us(batch: RawBatch) -> NDArray[np.int64]:
    """Tell when each record came to the broker: its timestamp, or what its ``produced_time`` header says.

    Returns:
        ``(n_rows,)`` int64, microseconds since the epoch.
    """
    arrived = batch.broker_time_us.copy()
    for position, headers in enumerate(batch.headers if batch.has_headers else ()):
        for name, value in headers or ():
            if name == PRODUCED_TIME_HEADER and value is not None and value.isdigit() and len(value) < 19:
                arrived[position] = int(value)
    return arrived


def _request_id(headers: list[tuple[str, bytes]] | None) -> str | None:
    for name, value in headers or ():
        if name == REQUEST_ID_HEADER and value is not None:
            return value.decode("utf-8", "replace")
    return None
