"""Days and hours of time zones, at the changes of clocks that calendars and newspapers tell of."""

import numpy as np
import pytest

from schemas.calendar import DAY_US, HOUR_US, Calendar, is_zone, local_us, make_calendar
from schemas.time import format_rfc3339, parse_rfc3339_us


def make(zone: str, *, slide_us: int = DAY_US, anchor_us: int = 0) -> Calendar:
    return make_calendar(
        zone,
        slide_us=slide_us,
        anchor_us=anchor_us,
        from_us=parse_rfc3339_us("1990-01-01T00:00:00Z"),
        until_us=parse_rfc3339_us("2100-01-01T00:00:00Z"),
    )


def boundaries(calendar: Calendar, after: str, *, n: int = 3) -> list[str]:
    first = calendar.number_at(np.array([parse_rfc3339_us(after)])) + 1
    return [format_rfc3339(time_us)[:16] for time_us in calendar.boundary_us(first + np.arange(n)).tolist()]


@pytest.mark.parametrize(
    ("zone", "after", "days"),
    [
        ("UTC", "2024-03-09T12:00:00Z", ["2024-03-10T00:00", "2024-03-11T00:00", "2024-03-12T00:00"]),
        ("America/New_York", "2024-03-09T12:00:00Z", ["2024-03-10T05:00", "2024-03-11T04:00", "2024-03-12T04:00"]),
        ("America/New_York", "2024-11-02T12:00:00Z", ["2024-11-03T04:00", "2024-11-04T05:00", "2024-11-05T05:00"]),
        ("Asia/Kolkata", "2024-01-01T00:00:00Z", ["2024-01-01T18:30", "2024-01-02T18:30", "2024-01-03T18:30"]),
        # No midnight: the clock went from 00:00 to 01:00.
        ("America/Sao_Paulo", "2018-11-03T12:00:00Z", ["2018-11-04T03:00", "2018-11-05T02:00", "2018-11-06T02:00"]),
        ("Africa/Cairo", "2024-04-25T12:00:00Z", ["2024-04-25T22:00", "2024-04-26T21:00", "2024-04-27T21:00"]),
        # At midnight back to 23:00 of the day before.
        ("America/Sao_Paulo", "2018-02-17T12:00:00Z", ["2018-02-18T03:00", "2018-02-19T03:00", "2018-02-20T03:00"]),
        # Midnight twice: from 01:00 back to 00:00, and from 00:01 back to 23:01.
        ("America/Havana", "2024-11-02T12:00:00Z", ["2024-11-03T04:00", "2024-11-04T05:00", "2024-11-05T05:00"]),
        ("America/St_Johns", "2006-10-28T12:00:00Z", ["2006-10-29T02:30", "2006-10-30T03:30", "2006-10-31T03:30"]),
        # No 30 December 2011: it is no day.
        ("Pacific/Apia", "2011-12-29T12:00:00Z", ["2011-12-30T10:00", "2011-12-31T10:00", "2012-01-01T10:00"]),
    ],
)
def test_a_day_begins_when_the_clock_first_comes_to_it(zone: str, after: str, days: list[str]) -> None:
    assert boundaries(make(zone), after) == days


@pytest.mark.parametrize(
    ("zone", "hours", "after", "ends"),
    [
        ("Asia/Kolkata", 1, "2024-01-01T00:00:00Z", ["2024-01-01T00:30", "2024-01-01T01:30", "2024-01-01T02:30"]),
        ("Asia/Kathmandu", 1, "2024-01-01T00:00:00Z", ["2024-01-01T00:15", "2024-01-01T01:15", "2024-01-01T02:15"]),
        # From 02:00 on to 03:00, and back to 01:00: every hour is one.
        ("America/New_York", 1, "2024-03-10T05:30:00Z", ["2024-03-10T06:00", "2024-03-10T07:00", "2024-03-10T08:00"]),
        ("America/New_York", 1, "2024-11-03T04:30:00Z", ["2024-11-03T05:00", "2024-11-03T06:00", "2024-11-03T07:00"]),
        # Quarters of a day of 5 and of 7 hours.
        ("America/New_York", 6, "2024-03-10T04:30:00Z", ["2024-03-10T05:00", "2024-03-10T10:00", "2024-03-10T16:00"]),
        ("America/New_York", 6, "2024-11-03T03:30:00Z", ["2024-11-03T04:00", "2024-11-03T11:00", "2024-11-03T17:00"]),
        # By half an hour: from 02:00 back to 01:30, and on to 02:30.
        (
            "Australia/Lord_Howe",
            1,
            "2024-04-06T13:30:00Z",
            ["2024-04-06T14:00", "2024-04-06T15:30", "2024-04-06T16:30"],
        ),
        (
            "Australia/Lord_Howe",
            1,
            "2024-10-05T14:00:00Z",
            ["2024-10-05T14:30", "2024-10-05T15:30", "2024-10-05T16:00"],
        ),
    ],
)
def test_hours_begin_at_the_full_hours_of_the_clock(zone: str, hours: int, after: str, ends: list[str]) -> None:
    assert boundaries(make(zone, slide_us=hours * HOUR_US), after) == ends


def test_days_may_begin_at_another_reading_of_the_clock() -> None:
    calendar = make(
        "America/New_York", anchor_us=local_us("America/New_York", parse_rfc3339_us("2013-06-01T08:00:00Z"))
    )

    assert boundaries(calendar, "2024-03-09T00:00:00Z") == ["2024-03-09T09:00", "2024-03-10T08:00", "2024-03-11T08:00"]


@pytest.mark.parametrize("slide_us", [HOUR_US, 6 * HOUR_US, DAY_US, 7 * DAY_US])
@pytest.mark.parametrize("zone", ["America/New_York", "Australia/Lord_Howe", "Africa/Casablanca", "Antarctica/Troll"])
def test_numbers_and_times_of_boundaries_belong_together(zone: str, slide_us: int) -> None:
    calendar = make(zone, slide_us=slide_us)
    numbers = np.arange(calendar.number[0] - 10, calendar.number[-1] + 10)
    times_us = calendar.boundary_us(numbers)

    assert (np.diff(times_us) > 0).all()
    assert (calendar.number_at(times_us) == numbers).all()
    assert (calendar.number_at(times_us - 1) == numbers - 1).all()


def test_zones_are_those_of_the_tz_database() -> None:
    assert is_zone("Europe/Berlin")
    assert not is_zone("Europe/berlin")
    assert not is_zone("../etc/passwd")
