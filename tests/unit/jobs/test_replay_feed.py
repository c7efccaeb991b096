"""How the records of a replay are paced, and what their headers say in its namespace."""

import threading

import pytest

from jobs.replay_feed import Pace, renamed


class Waits(threading.Event):
    """An event that is waited for on a clock of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.now_s = 100.0
        self.waited: list[float] = []

    def wait(self, timeout: float | None = None) -> bool:
        assert timeout is not None
        self.waited.append(timeout)
        self.now_s += timeout
        return False


def test_records_wait_as_long_as_they_are_apart_by_their_timestamps_at_the_speed() -> None:
    stop = Waits()
    pace = Pace(10.0, stop, clock_s=lambda: stop.now_s)
    for second in (1_000, 1_005, 1_005, 1_030):
        pace.wait(second * 1_000_000)
    assert stop.waited == pytest.approx([0.5, 2.5])


def test_a_replay_that_is_behind_does_not_wait_until_it_has_caught_up() -> None:
    stop = Waits()
    pace = Pace(1.0, stop, clock_s=lambda: stop.now_s)
    pace.wait(0)
    stop.now_s += 10.0  # the broker was slow
    for second in (3, 9, 12):
        pace.wait(second * 1_000_000)
    assert stop.waited == pytest.approx([2.0])


def test_as_fast_as_possible_nothing_waits() -> None:
    stop = Waits()
    pace = Pace(None, stop, clock_s=lambda: stop.now_s)
    for second in (0, 5):
        pace.wait(second * 1_000_000)
    assert stop.waited == []


def test_views_that_a_record_is_meant_for_are_called_as_in_the_namespace() -> None:
    headers = [("headrace.views", b"a,b"), ("headrace.late_for", b"b"), ("trace", b"a"), ("headrace.origin", b"t-0-1")]
    assert renamed(headers, "ns") == [
        ("headrace.views", b"ns_a,ns_b"),
        ("headrace.late_for", b"ns_b"),
        ("trace", b"a"),
        ("headrace.origin", b"t-0-1"),
    ]
    assert renamed(None, "ns") is None
