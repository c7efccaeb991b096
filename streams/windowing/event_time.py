"""Event times out of raw columns: integers in a declared unit, or RFC 3339 text, to microseconds."""

from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from schemas.field import EVENT_TIME_UNITS_US
from schemas.time import parse_rfc3339_us

_INT64_MIN: Final = -(2**63)
_INT64_MAX: Final = 2**63 - 1
_RFC3339: Final = r"^\d{4}-\d{2}-\d{2}[Tt ]\d{2}:\d{2}:\d{2}(\.\d+)?([Zz]|[+-]\d{2}:\d{2})$"
_RFC3339_PLAIN: Final = r"^\d{4}-\d{2}-\d{2}T\d{2}:\d{2}:\d{2}(\.\d{1,6})?(Z|[+-]\d{2}:\d{2})$"


@dataclass(frozen=True)
class EventTimes:
    """Event times of a batch.

    Attributes:
        time_us: ``(n_rows,)`` microseconds; meaningless where ``is_usable`` is false.
        is_usable: ``(n_rows,)`` a time that lies in the plausible range.
        is_unparsable: ``(n_rows,)`` text that is no RFC 3339 date-time.
        is_missing: ``(n_rows,)`` null.
        other_unit: Unit that would make the value plausible, by row; only for integer times outside the range.
    """

    time_us: npt.NDArray[np.int64]
    is_usable: npt.NDArray[np.bool_]
    is_unparsable: npt.NDArray[np.bool_]
    is_missing: npt.NDArray[np.bool_]
    other_unit: dict[int, str]


def read_event_times(column: pa.Array, *, unit_us: int | None, plausible_us: tuple[int, int]) -> EventTimes:
    """Read a column of event times.

    Args:
        column: int64 in units of ``unit_us``, or text.
        unit_us: Microseconds of one unit of an integer column; None for text.
        plausible_us: Range ``[from, until)`` that an event time must lie in.
    """
    if unit_us is None:
        return _read_text(column, plausible_us=plausible_us)
    is_missing = pc.is_null(column).to_numpy(zero_copy_only=False)
    values: npt.NDArray[np.int64] = pc.fill_null(column, 0).to_numpy(zero_copy_only=False)
    low, high = _bounds(plausible_us, unit_us * 1_000)
    is_usable = (values >= low) & (values < high) & ~is_missing
    other_unit: dict[int, str] = {}
    if not is_usable.all():
        is_outside = ~is_usable & ~is_missing
        for unit, nanoseconds in ({"ns": 1} | {u: us * 1_000 for u, us in EVENT_TIME_UNITS_US.items()}).items():
            low, high = _bounds(plausible_us, nanoseconds)
            fits = is_outside & (values >= low) & (values < high)
            other_unit.update(dict.fromkeys(np.flatnonzero(fits).tolist(), unit))
        values = np.where(is_usable, values, 0)
    nothing = np.zeros(len(values), dtype=np.bool_)
    return EventTimes(values * unit_us, is_usable, nothing, is_missing, other_unit)


def _bounds(plausible_us: tuple[int, int], unit_ns: int) -> tuple[int, int]:
    """Range ``[low, high)`` of values in a unit that lie in the plausible range, kept inside int64."""
    low, high = (-(-edge * 1_000 // unit_ns) for edge in plausible_us)
    return max(low, _INT64_MIN), min(high, _INT64_MAX)


def _read_text(column: pa.Array, *, plausible_us: tuple[int, int]) -> EventTimes:
    is_missing = pc.is_null(column).to_numpy(zero_copy_only=False)
    matches = pc.match_substring_regex(column, pattern=_RFC3339_PLAIN)
    is_plain = pc.fill_null(matches, fill_value=False).to_numpy(zero_copy_only=False)
    time_us = np.zeros(len(column), dtype=np.int64)
    is_parsed = is_plain.copy()
    rows = np.flatnonzero(~is_plain & ~is_missing)
    try:
        plain = column.filter(pa.array(is_plain))
        parsed = pc.cast(pc.cast(plain, pa.timestamp("us", tz="UTC")), pa.int64())
        time_us[is_plain] = parsed.to_numpy(zero_copy_only=False)
    except pa.ArrowInvalid:
        # Well-formed but impossible (30 February): Arrow refuses the whole column, so each row is read by itself.
        rows = np.flatnonzero(~is_missing)
        is_parsed[:] = False
    for row in rows.tolist():
        if (value := _read_one(column[row])) is not None:
            time_us[row], is_parsed[row] = value, True
    low, high = plausible_us
    is_usable = is_parsed & (time_us >= low) & (time_us < high)
    return EventTimes(time_us, is_usable, ~is_parsed & ~is_missing, is_missing, {})


def _read_one(value: Any) -> int | None:
    if not pc.match_substring_regex(value, pattern=_RFC3339).as_py():
        return None
    text = value.as_py().upper().replace(" ", "T")
    head, dot, tail = text.partition(".")
    if dot:
        # fromisoformat reads at most six digits of a fraction; what is finer than a microsecond is cut off.
        digits = tail.rstrip("Z").split("+")[0].split("-")[0]
        text = f"{head}.{digits[:6]:0<6}{tail[len(digits) :]}"
    try:
        return parse_rfc3339_us(text)
    except (ValueError, OverflowError):
        return None
