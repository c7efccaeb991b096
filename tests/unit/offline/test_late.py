"""How late rows have to count so that all dead letters are folded in."""

import pytest

from offline.late import lateness_us, with_late
from schemas.errors import ConfigError
from schemas.view import FeatureView
from streams.dead_letter import DeadLetter
from tests.support.scoring import TRIPS


def letter(late_by_us: int | str, *, view: str = TRIPS.name, reason: str = "late") -> DeadLetter:
    facts = {
        "reason": reason,
        "topic": "t",
        "partition": "0",
        "offset": "1",
        "view": view,
        "late_by_us": str(late_by_us),
    }
    return DeadLetter(topic="dlq.t", partition=0, offset=0, time_us=0, key=None, value=b"", headers=[], facts=facts)


def test_it_is_the_latest_of_the_views_own_late_letters_in_whole_seconds() -> None:
    letters = [letter(5), letter(7_000_001), letter(9_000_000, view="other"), letter(""), letter(8, reason="overflow")]
    assert lateness_us(letters, TRIPS) == 8_000_000
    assert lateness_us([letter(7_000_000)], TRIPS) == 8_000_000  # less than is what counts


def test_without_late_letters_there_is_nothing_to_fold_in() -> None:
    with pytest.raises(ConfigError, match="there are no dead letters of rows that were late for view trips"):
        lateness_us([letter(5, view="other")], TRIPS)


def test_a_view_that_waits_longer_is_another_definition_of_the_same_name() -> None:
    made: FeatureView = with_late(TRIPS, TRIPS.allowed_lateness_us + 1)
    assert (made.name, made.version) == (TRIPS.name, TRIPS.version)
    assert made.allowed_lateness_us == TRIPS.allowed_lateness_us + 1
    assert made.definition_hash != TRIPS.definition_hash


def test_what_a_view_waits_for_itself_is_refused() -> None:
    with pytest.raises(ConfigError, match="it waits for those itself"):
        with_late(TRIPS, TRIPS.allowed_lateness_us)
