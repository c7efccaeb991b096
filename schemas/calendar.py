"""Days and hours of a time zone: where they begin, as numbers in a row.

A boundary is an instant at which the zone's clock shows a multiple of the slide, or jumps over one: where midnight does
not exist, the day begins when the clock goes on. One that comes less than a slide after the boundary before it, because
the clock was put back, is none: a midnight that comes twice begins the day the first time, but each of two hours
between 1 and 2 o'clock is an hour of its own.

Zones are those of the ``tzdata`` package, so that they are the same on every machine, and not the system's. Between two
changes of a zone's offset boundaries are a slide apart, so that a few hundred *pieces* are all that has to be known.
"""

import hashlib
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from functools import lru_cache
from importlib import resources
from itertools import pairwise
from typing import Final
from zoneinfo import ZoneInfo

import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[np.int64]

SECOND_US: Final = 1_000_000
HOUR_US: Final = 3_600 * SECOND_US
DAY_US: Final = 24 * HOUR_US
_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)
_FIRST_S: Final = -62_135_000_000
_LAST_S: Final = 253_402_000_000
"""Just inside the years 1 to 9999, all that a ``datetime`` knows."""
_DAY_S: Final = 86_400
_NEVER_US: Final = 2**60


@dataclass(frozen=True, eq=False)
class Calendar:
    """Boundaries of periods in a time zone, numbered without gaps.

    Attributes:
        slide_us: Length of a period between two changes of the offset.
        first_us: ``(n_pieces,)`` first boundary of each piece, rising.
        number: ``(n_pieces,)`` its number.
    """

    slide_us: int
    first_us: Ints
    number: Ints

    def number_at(self, time_us: Ints) -> Ints:
        """Number of the last boundary at or before each time."""
        piece = np.maximum(np.searchsorted(self.first_us, time_us, side="right") - 1, 0)
        number: Ints = self.number[piece] + (time_us - self.first_us[piece]) // self.slide_us
        # A change of the offset cuts the last period of a piece short or makes it longer.
        return np.minimum(number, np.append(self.number[1:] - 1, np.iinfo(np.int64).max)[piece])

    def boundary_us(self, number: Ints) -> Ints:
        """Time of each boundary."""
        piece = np.maximum(np.searchsorted(self.number, number, side="right") - 1, 0)
        time_us: Ints = self.first_us[piece] + (number - self.number[piece]) * self.slide_us
        return time_us

    @property
    def fingerprint(self) -> str:
        """16 hexadecimal digits of SHA-256 over all boundaries."""
        pieces = np.stack([self.first_us, self.number]).astype("<i8").tobytes()
        return hashlib.sha256(pieces).hexdigest()[:16]


def is_zone(name: str) -> bool:
    """Tell whether the ``tzdata`` package has a time zone of this name."""
    return name in _zone_names()


def local_us(zone: str, time_us: int) -> int:
    """What the zone's clock shows at a time, in microseconds since it showed 1970-01-01T00:00."""
    moment = (_EPOCH + timedelta(seconds=time_us // SECOND_US)).astimezone(_load_zone(zone))
    return time_us + _offset_us(moment)


def make_calendar(zone: str, *, slide_us: int, anchor_us: int, from_us: int, until_us: int) -> Calendar:
    """Find the boundaries of a zone.

    Args:
        zone: Name of the zone.
        slide_us: Length of a period; whole hours that divide a day, or whole days.
        anchor_us: A reading of the clock that is a boundary, as of :func:`local_us`.
        from_us: From when on changes of the offset are known; before, the offset is what it is then.
        until_us: Until when they are known.
    """
    segments = list(_segments(zone, from_us // SECOND_US, -(-until_us // SECOND_US)))
    shift = segments[0][1] - anchor_us
    number = (segments[0][0] + shift) // slide_us
    segments[0] = (number * slide_us - shift, segments[0][1])
    pieces: list[tuple[int, int]] = []
    previous_us, highest = segments[0][0] - slide_us, number - 1
    for (start_us, offset_us), (stop_us, _) in pairwise([*segments, (_NEVER_US, 0)]):
        shift = offset_us - anchor_us
        reading = start_us + shift
        if reading // slide_us > highest and reading % slide_us:
            pieces.append((start_us, number))
            number, previous_us = number + 1, start_us
        first_us = start_us + -reading % slide_us
        if (first_us + shift) // slide_us <= highest and first_us - previous_us < slide_us:
            first_us += slide_us
        if first_us < stop_us:
            pieces.append((first_us, number))
            n_more = (stop_us - 1 - first_us) // slide_us
            number, previous_us = number + n_more + 1, first_us + n_more * slide_us
        highest = max(highest, (stop_us - 1 + shift) // slide_us)
    first, numbers = np.array(pieces, dtype=np.int64).T.copy()
    return Calendar(slide_us, first, numbers)


@lru_cache(maxsize=64)
def _segments(zone: str, from_s: int, until_s: int) -> tuple[tuple[int, int], ...]:
    """Changes of a zone's offset: since when it is what, in microseconds.

    Days are looked at one by one, and halved where the offset changes: no zone changes it twice within a day.
    """
    info = _load_zone(zone)
    from_s, until_s = max(from_s, _FIRST_S), min(until_s, _LAST_S)

    def offset(second: int) -> int:
        return _offset_us(datetime.fromtimestamp(second, tz=info))

    found = [(from_s * SECOND_US, offset(from_s))]
    for day in range(from_s + _DAY_S, until_s + _DAY_S, _DAY_S):
        if (after := offset(day)) == found[-1][1]:
            continue
        low, high = day - _DAY_S, day
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if offset(middle) == found[-1][1] else (low, middle)
        found.append((high * SECOND_US, after))
    return tuple(found)


def _offset_us(moment: datetime) -> int:
    offset = moment.utcoffset()
    return 0 if offset is None else offset // timedelta(microseconds=1)


@lru_cache(maxsize=64)
def _load_zone(name: str) -> ZoneInfo:
    package, _, file = f"tzdata.zoneinfo.{name.replace('/', '.')}".rpartition(".")
    with resources.files(package).joinpath(file).open("rb") as stream:
        return ZoneInfo.from_file(stream, key=name)


@lru_cache(maxsize=1)
def _zone_names() -> frozenset[str]:
    return frozenset(resources.files("tzdata").joinpath("zones").read_text().splitlines())
