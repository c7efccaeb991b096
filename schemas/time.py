"""Time as Headrace keeps it: int64 microseconds since the Unix epoch, UTC."""

import re
from datetime import UTC, datetime, timedelta
from typing import Final

from schemas.errors import ConfigError

MINUS_INFINITY_US: Final = -(2**63)
"""Watermark of a partition that has admitted no row yet."""
END_OF_TIME_US: Final = 2**63 - 1
"""Watermark after which no row can be on time."""
MAX_DURATION_US: Final = 36_500 * 86_400_000_000
"""A hundred years: sums of times and durations stay inside 64 bits."""

_UNITS_US: Final = {
    "us": 1,
    "ms": 1_000,
    "s": 1_000_000,
    "m": 60_000_000,
    "h": 3_600_000_000,
    "d": 86_400_000_000,
    "w": 604_800_000_000,
}
_DURATION = re.compile(r"(\d+)(us|ms|s|m|h|d|w)")
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_MICROSECOND = timedelta(microseconds=1)


def parse_duration_us(text: str, *, field: str) -> int:
    """Read a duration such as ``"5m"``, ``"1h30m"`` or ``"250ms"``.

    Args:
        text: Whole numbers each followed by a unit: us, ms, s, m, h, d or w.
        field: Name of the field being read, for the error message.

    Returns:
        The duration in microseconds, 0 to :data:`MAX_DURATION_US`.

    Raises:
        ConfigError: ``text`` is not such a duration.
    """
    parts = _DURATION.findall(text) if isinstance(text, str) else []
    if not parts or "".join(number + unit for number, unit in parts) != text:
        msg = f"`{field}` is {text!r}, expected a duration such as '5m', '1h30m' or '250ms' (us, ms, s, m, h, d, w)"
        raise ConfigError(msg)
    duration_us = sum(int(number) * _UNITS_US[unit] for number, unit in parts)
    if duration_us > MAX_DURATION_US:
        msg = f"`{field}` is {text}, expected at most {format_duration(MAX_DURATION_US)}"
        raise ConfigError(msg)
    return duration_us


def format_duration(duration_us: int) -> str:
    """Write a duration the way :func:`parse_duration_us` reads it, largest units first."""
    if duration_us == 0:
        return "0s"
    parts, rest = [], duration_us
    for unit in ("d", "h", "m", "s", "ms", "us"):
        count, rest = divmod(rest, _UNITS_US[unit])
        if count:
            parts.append(f"{count}{unit}")
    return "".join(parts)


def parse_rfc3339_us(text: str) -> int:
    """Read an RFC 3339 date-time with its offset.

    Raises:
        ValueError: It is not one, or it has no offset.
    """
    if not isinstance(text, str):
        msg = f"{text!r} is no text, expected RFC 3339 such as '2013-01-01T10:00:00Z'"
        raise ValueError(msg)
    moment = datetime.fromisoformat(text)
    if moment.tzinfo is None:
        msg = f"{text!r} has no UTC offset, expected RFC 3339 such as '2013-01-01T10:00:00Z'"
        raise ValueError(msg)
    return (moment - _EPOCH) // _MICROSECOND


def format_rfc3339(time_us: int) -> str:
    """Write a time as RFC 3339 in UTC with microseconds, e.g. ``2013-01-01T10:00:00.000000Z``."""
    return (_EPOCH + time_us * _MICROSECOND).replace(tzinfo=None).isoformat(timespec="microseconds") + "Z"
