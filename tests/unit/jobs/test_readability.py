"""What commands print fits a terminal of 80 columns and reads as words."""

from collections import Counter
from io import StringIO

import pytest
from rich.console import Console

from infra.local.services import ServiceStatus
from jobs import get as get_module
from jobs import produce as produce_module
from jobs import services as services_module
from jobs.audit import Check, _letters, _verdict
from jobs.flights.producer import ProduceProgress
from jobs.get import format_age
from schemas.row import Pane
from streams.sinks.online import OnlineValue, Status

MINUTE_MS, DAY_MS = 60_000, 86_400_000
STATUSES = [
    ServiceStatus("kafka", "running", "127.0.0.1:9092", "Apache Kafka 4.4.0 (Java 17.0.15)", 234_567, 2_900, "/l"),
    ServiceStatus("redis", "running", "redis://127.0.0.1:6379/0", "Valkey 9.1.2", 234_568, 300, "/l"),
    ServiceStatus("triton", "unhealthy", "127.0.0.1:8001", "NVIDIA Triton 2.51.0", 234_569, 12_000, "/l"),
]


def test_services_fit_the_terminal_and_leave_out_who_makes_them() -> None:
    lines = [*services_module._rows(STATUSES), *map(services_module._line, STATUSES)]
    assert max(map(len, lines)) <= 80
    assert "Kafka 4.4.0 (Java 17.0.15)" in lines[1]
    assert not any("Apache" in line or "NVIDIA" in line for line in lines)


@pytest.mark.parametrize(
    ("age_ms", "text"),
    [
        (-5, "0 s"),
        (119_999, "119 s"),
        (2 * MINUTE_MS, "2 min"),
        (5 * 60 * MINUTE_MS, "5 h"),
        (2 * DAY_MS, "2 days"),
        (729 * DAY_MS, "729 days"),
        (5_075 * DAY_MS, "13 years"),
    ],
)
def test_an_age_is_told_in_one_unit(age_ms: int, text: str) -> None:
    assert format_age(age_ms) == text


def test_a_value_is_dated_without_colours_or_fractions(monkeypatch: pytest.MonkeyPatch) -> None:
    output = StringIO()
    monkeypatch.setattr(get_module, "Console", lambda: Console(file=output, force_terminal=True, width=80))
    value = OnlineValue(
        view="v",
        version=1,
        definition_hash="h",
        entity="JFK",
        status=Status.PRESENT,
        event_time_us=1_357_602_060_000_000,
        window_end_us=1_357_602_300_000_000,
        age_ms=5_075 * DAY_MS,
        pane=Pane.EARLY,
        pane_index=0,
        source_offset=7,
        features={"n": 1},
    )
    get_module._print(value)
    assert output.getvalue().splitlines()[1] == "as of 2013-01-07 23:41:00 UTC (EARLY), 13 years ago"


def test_the_progress_of_producing_fits_the_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    output = StringIO()
    console = Console(file=output, force_terminal=True, width=80, color_system=None)
    monkeypatch.setattr(produce_module, "Console", lambda **_: console)
    with produce_module._progress_bar("flights") as on_progress:
        on_progress(ProduceProgress(sent=336_776, total=1_010_328, known_us=1_357_602_060_000_000, wall_s=1.0))
    last = output.getvalue()
    for part in ("336,776/1,010,328", "2013-01-07 23:41", "336,776/s"):
        assert part in last


def test_dead_letters_are_told_in_words() -> None:
    assert _letters(Counter()) == "0 dead letters"
    assert _letters(Counter(late=1_200, decode_error=3)) == "1,203 dead letters (decode_error 3, late 1,200)"


def test_an_audit_ends_with_a_verdict() -> None:
    even, odd = Check(name="a", expected=1, actual=1), Check(name="b", expected=1, actual=2)
    assert "Everything adds up: 2 checks." in _verdict([even, even])
    told = _verdict([even, odd])
    assert "1 of 2 checks differ." in told
    assert "let the pipeline come to rest" in told
