"""Admission: which rows may enter a feature, in the order the design fixes, each refusal with its reason.

What a row alone decides (key, time, plausibility, future) is screened here for a whole batch at once. What depends on
the rows before it (duplicate, late, overflow) is decided by the engine, which adds to the same :class:`Rejections`.

An event time that is text but no RFC 3339 date-time is a ``schema_violation``: the value is there, and it is not what
its contract says.
"""

from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from schemas.row import REJECTED_COLUMNS, Reason
from schemas.source import EventSource
from schemas.time import format_rfc3339
from streams.windowing.event_time import EventTimes, read_event_times

_SHOWN: Final = 80


@dataclass
class Rejections:
    """Dead letters of one step, collected in any order."""

    rows: list[tuple[int, Reason, str, int | None]] = field(default_factory=list)

    def add(self, row: int, reason: Reason, detail: str, *, late_by_us: int | None = None) -> None:
        """Reject the row at this position of the batch."""
        self.rows.append((row, reason, detail, late_by_us))

    def to_table(self, offsets: npt.NDArray[np.int64]) -> pa.Table:
        """Lay them out as ``schemas.row.REJECTED_COLUMNS``, in offset order."""
        ordered = sorted(self.rows)
        columns = [
            offsets[[row for row, *_ in ordered]],
            [reason.value for _, reason, *_ in ordered],
            [detail for _, _, detail, _ in ordered],
            [late_by_us for *_, late_by_us in ordered],
        ]
        arrays = [pa.array(values, fld.type) for values, fld in zip(columns, REJECTED_COLUMNS, strict=True)]
        return pa.Table.from_arrays(arrays, schema=REJECTED_COLUMNS)


@dataclass(frozen=True)
class Screened:
    """A batch after the checks that each row decides alone.

    Attributes:
        time_us: ``(n_rows,)`` event times; meaningless for rejected rows.
        is_admissible: ``(n_rows,)`` rows that none of these checks rejects.
    """

    time_us: npt.NDArray[np.int64]
    is_admissible: npt.NDArray[np.bool_]


class Screen:
    """The checks that each row decides alone, for one source and one entity key column."""

    def __init__(self, source: EventSource, *, key: str) -> None:
        self._source = source
        self._key = key
        self._unit_us = source.event_time_unit_us
        self._plausible_us = (source.plausible_from_us, source.plausible_until_us)
        self._skew_us = source.max_future_skew_us

    def check(self, batch: pa.Table, rejections: Rejections) -> Screened:
        """Screen a batch (each column one chunk), adding what it rejects to ``rejections``."""
        column = batch.column(self._source.event_time).chunk(0)
        times = read_event_times(column, unit_us=self._unit_us, plausible_us=self._plausible_us)
        is_keyless = pc.is_null(batch.column(self._key).chunk(0)).to_numpy(zero_copy_only=False)
        is_admissible = times.is_usable & ~is_keyless
        is_future = np.zeros(len(is_admissible), dtype=np.bool_)
        if self._skew_us is not None:
            broker = batch.column("_broker_time").chunk(0)
            limit = pc.fill_null(broker, 2**63 - 1).to_numpy(zero_copy_only=False)
            is_future = is_admissible & (times.time_us - self._skew_us > limit)
            is_admissible &= ~is_future
        if not is_admissible.all():
            for row in np.flatnonzero(~is_admissible).tolist():
                rejections.add(row, *self._explain(row, batch, times, is_keyless=bool(is_keyless[row])))
        return Screened(times.time_us, is_admissible)

    def _explain(self, row: int, batch: pa.Table, times: EventTimes, *, is_keyless: bool) -> tuple[Reason, str]:
        name = self._source.event_time
        value = _show(batch.column(name)[row].as_py())
        span = f"{self._source.plausible_from} to {self._source.plausible_until}"
        if times.is_unparsable[row]:
            return Reason.SCHEMA_VIOLATION, f"`{name}` is {value}, expected an RFC 3339 date-time with its UTC offset"
        if is_keyless:
            return Reason.MISSING_KEY, f"`{self._key}` is null"
        if times.is_missing[row]:
            return Reason.MISSING_EVENT_TIME, f"`{name}` is null"
        declared = "" if self._unit_us is None else f" in {self._source.schema.fields[name]['x-unit']}"
        if row in times.other_unit:
            return Reason.TIMESTAMP_UNIT, (
                f"`{name}` is {value}{declared}, expected {span}, where it would lie in {times.other_unit[row]}"
            )
        if not times.is_usable[row]:
            in_any = "" if self._unit_us is None else ", in no unit"
            return Reason.IMPLAUSIBLE_TIME, f"`{name}` is {value}{declared}, expected {span}{in_any}"
        ahead_us = int(times.time_us[row]) - batch.column("_broker_time")[row].as_py()
        return Reason.FUTURE_TIMESTAMP, (
            f"event time {format_rfc3339(int(times.time_us[row]))} is {ahead_us} us after the record timestamp, "
            f"expected at most {self._source.max_future_skew}"
        )


def read_admitted(batch: pa.Table) -> Screened:
    """Tell which records behind a repartition topic are events: they were screened before they were sent there."""
    is_event = batch.column("_is_event").chunk(0).to_numpy(zero_copy_only=False)
    return Screened(pc.fill_null(batch.column("_time").chunk(0), 0).to_numpy(), is_event)


def _show(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}…"
