import pyarrow as pa
from hypothesis import given
from hypothesis import strategies as st

from streams.inference.deadline import Pace, wait_us


def rows(*broker_time_us: int | None) -> pa.Table:
    return pa.table({"broker_time": pa.array(broker_time_us, pa.timestamp("us", "UTC"))})


def test_the_oldest_row_says_how_long_all_may_wait():
    assert wait_us(rows(1_000, 400, 700), freshness_us=500, reserve_us=150, now_us=600) == 400 + 500 - 150 - 600


def test_rows_that_are_late_already_do_not_wait():
    assert wait_us(rows(1_000), freshness_us=500, reserve_us=0, now_us=1_501) == 0
    assert wait_us(rows(1_000), freshness_us=500, reserve_us=501, now_us=1_000) == 0


def test_rows_of_unknown_age_say_nothing():
    assert wait_us(rows(None, None), freshness_us=500, reserve_us=0, now_us=600) is None
    assert wait_us(rows(), freshness_us=500, reserve_us=0, now_us=600) is None
    assert wait_us(rows(None, 600), freshness_us=500, reserve_us=0, now_us=600) == 500


def test_a_step_that_has_become_slower_is_believed_at_once_and_a_faster_one_by_and_by():
    pace = Pace()
    pace.took(100)
    pace.took(900)
    assert pace.us == 900
    pace.took(100)
    assert pace.us == 800
    for _ in range(60):
        pace.took(100)
    assert 100 <= pace.us < 110


@given(st.lists(st.integers(0, 10**9), min_size=1))
def test_a_pace_lies_between_the_fastest_and_the_slowest(took_us: list[int]):
    pace = Pace()
    for each in took_us:
        pace.took(each)
    assert took_us[-1] <= pace.us <= max(took_us)
