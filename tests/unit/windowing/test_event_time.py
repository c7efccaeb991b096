import numpy as np
import pyarrow as pa
import pytest

from schemas.time import parse_rfc3339_us
from streams.windowing.event_time import read_event_times

PLAUSIBLE = (parse_rfc3339_us("1990-01-01T00:00:00Z"), parse_rfc3339_us("2100-01-01T00:00:00Z"))


@pytest.mark.parametrize(
    ("unit_us", "value"), [(1, 1_704_067_200_000_000), (1_000, 1_704_067_200_000), (1_000_000, 1_704_067_200)]
)
def test_integers_are_read_in_their_unit(unit_us: int, value: int) -> None:
    times = read_event_times(pa.array([value, None]), unit_us=unit_us, plausible_us=PLAUSIBLE)

    assert times.time_us.tolist()[0] == 1_704_067_200_000_000
    assert times.is_usable.tolist() == [True, False]
    assert times.is_missing.tolist() == [False, True]


@pytest.mark.parametrize(
    ("value", "unit"),
    [
        (1_704_067_200, "s"),
        (1_704_067_200_000_000, "us"),
        (1_704_067_200_000_000_000, "ns"),
        (0, None),
        (-1, None),
        (2**63 - 1, None),
        (-(2**63), None),
    ],
)
def test_a_value_outside_the_range_is_told_by_the_unit_that_it_would_fit(value: int, unit: str | None) -> None:
    times = read_event_times(pa.array([value]), unit_us=1_000, plausible_us=PLAUSIBLE)

    assert not times.is_usable[0]
    assert times.other_unit.get(0) == unit


def test_the_plausible_range_is_half_open() -> None:
    low, high = PLAUSIBLE
    times = read_event_times(pa.array([low - 1, low, high - 1, high]), unit_us=1, plausible_us=PLAUSIBLE)

    assert times.is_usable.tolist() == [False, True, True, False]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("2024-01-01T00:00:00Z", "2024-01-01T00:00:00Z"),
        ("2024-01-01T02:00:00+02:00", "2024-01-01T00:00:00Z"),
        ("2023-12-31T22:30:00-01:30", "2024-01-01T00:00:00Z"),
        ("2024-01-01t00:00:00z", "2024-01-01T00:00:00Z"),
        ("2024-01-01 00:00:00.5Z", "2024-01-01T00:00:00.500000Z"),
        ("2024-01-01T00:00:00.123456Z", "2024-01-01T00:00:00.123456Z"),
        ("2024-01-01T00:00:00.123456999+00:00", "2024-01-01T00:00:00.123456Z"),
        ("2024-01-01T00:00:00.1234569-00:00", "2024-01-01T00:00:00.123456Z"),
    ],
)
def test_rfc_3339_text_is_read(text: str, expected: str) -> None:
    for column in (pa.array([text]), pa.array([text, "2024-02-30T00:00:00Z"])):
        times = read_event_times(column, unit_us=None, plausible_us=PLAUSIBLE)
        assert times.time_us[0] == parse_rfc3339_us(expected)
        assert times.is_usable[0]


@pytest.mark.parametrize(
    "text",
    [
        "",
        "now",
        "2024-01-01",
        "2024-01-01T00:00:00",
        "2024-13-01T00:00:00Z",
        "2024-02-30T00:00:00Z",
        "20240101T000000Z",
        "2024-01-01T25:00:00Z",
    ],
)
def test_other_text_is_unparsable(text: str) -> None:
    times = read_event_times(pa.array([text, None, "2024-01-01T00:00:00Z"]), unit_us=None, plausible_us=PLAUSIBLE)

    assert times.is_unparsable.tolist() == [True, False, False]
    assert times.is_missing.tolist() == [False, True, False]
    assert times.is_usable.tolist() == [False, False, True]


def test_text_before_1970_and_outside_the_range() -> None:
    times = read_event_times(pa.array(["1969-12-31T23:59:59.5Z"]), unit_us=None, plausible_us=(-(10**12), 0))
    far = read_event_times(pa.array(["1969-12-31T23:59:59.5Z"]), unit_us=None, plausible_us=PLAUSIBLE)

    assert times.time_us.tolist() == [-500_000]
    assert not far.is_usable[0]
    assert not far.is_unparsable[0]


def test_no_rows() -> None:
    for column, unit in ((pa.array([], pa.int64()), 1), (pa.array([], pa.string()), None)):
        times = read_event_times(column, unit_us=unit, plausible_us=PLAUSIBLE)
        assert times.time_us.dtype == np.int64
        assert len(times.time_us) == 0
