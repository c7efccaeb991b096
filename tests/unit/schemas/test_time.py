import pytest

from schemas.errors import ConfigError
from schemas.time import format_duration, format_rfc3339, parse_duration_us, parse_rfc3339_us


@pytest.mark.parametrize(
    ("text", "duration_us"),
    [
        ("0s", 0),
        ("1us", 1),
        ("250ms", 250_000),
        ("5m", 300_000_000),
        ("1h30m", 5_400_000_000),
        ("2d", 172_800_000_000),
        ("1w", 604_800_000_000),
    ],
)
def test_durations_are_read_and_written(text: str, duration_us: int) -> None:
    assert parse_duration_us(text, field="slide") == duration_us
    assert parse_duration_us(format_duration(duration_us), field="slide") == duration_us


@pytest.mark.parametrize("text", ["", "5", "m", "5 m", "-5m", "1.5h", "5M", "5m ", "5mm", None, 5])
def test_what_is_no_duration_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match=r"`slide` is .* expected a duration such as '5m'"):
        parse_duration_us(text, field="slide")


@pytest.mark.parametrize(
    ("text", "time_us"),
    [
        ("1970-01-01T00:00:00Z", 0),
        ("1969-12-31T23:59:59.999999Z", -1),
        ("2013-01-01T12:00:00.5+02:00", 1_357_034_400_500_000),
    ],
)
def test_date_times_are_read_and_written(text: str, time_us: int) -> None:
    assert parse_rfc3339_us(text) == time_us
    assert parse_rfc3339_us(format_rfc3339(time_us)) == time_us


def test_a_date_time_without_offset_is_refused() -> None:
    with pytest.raises(ValueError, match="has no UTC offset"):
        parse_rfc3339_us("2013-01-01T12:00:00")


def test_years_before_1000_are_written_with_four_digits() -> None:
    assert format_rfc3339(parse_rfc3339_us("0099-01-01T00:00:00Z")).endswith("99-01-01T00:00:00.000000Z")
