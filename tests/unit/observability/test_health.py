import pytest

from streams.observability.health import Health, Progress, Verdict

P0, P1 = ("t", 0), ("t", 1)


@pytest.fixture
def progress() -> Progress:
    return Progress(stall_timeout_s=60)


def test_a_worker_that_starts_is_live_and_not_yet_ready() -> None:
    health = Health()
    assert health.live() == Verdict(is_good=True)
    assert health.ready() == Verdict(is_good=False, reasons=("the worker is starting",))
    health.waits_for([])
    assert health.ready().is_good


def test_what_stands_still_is_neither_live_nor_ready() -> None:
    health = Health()
    health.waits_for(["redis does not answer"])
    assert health.live().is_good
    health.stalled(["t-0 stands still"])
    assert health.live().reasons == ("t-0 stands still",)
    assert health.ready().reasons == ("t-0 stands still", "redis does not answer")


def test_a_partition_that_stands_still_while_rows_wait_is_told_once_the_time_is_up(progress: Progress) -> None:
    assert progress.look(0, done={P0: 10}, ends={P0: 11}) == []
    assert progress.look(59, done={P0: 10}, ends={P0: 500}) == []
    (stall,) = progress.look(60, done={P0: 10}, ends={P0: 500})
    assert stall == "t-0 has stood at offset 10 for 60 s, 490 offsets before its end"


def test_a_partition_that_makes_headway_is_fine_however_far_behind_it_is(progress: Progress) -> None:
    for now_s in range(0, 600, 50):
        assert progress.look(now_s, done={P0: now_s}, ends={P0: 1_000_000}) == []


def test_a_partition_at_its_end_may_rest_and_has_its_time_once_rows_come(progress: Progress) -> None:
    for now_s in range(0, 600, 50):
        assert progress.look(now_s, done={P0: 10}, ends={P0: 10}) == []
    assert progress.look(600, done={P0: 10}, ends={P0: 11}) == []
    assert progress.look(609, done={P0: 10}, ends={P0: 11}) == []
    assert progress.look(610, done={P0: 10}, ends={P0: 11}) != []


def test_a_partition_that_stands_still_is_told_although_another_runs(progress: Progress) -> None:
    progress.look(0, done={P0: 10, P1: 0}, ends={P0: 11, P1: 99})
    (stall,) = progress.look(60, done={P0: 10, P1: 50}, ends={P0: 11, P1: 99})
    assert stall.startswith("t-0 ")


def test_a_partition_that_was_away_begins_anew(progress: Progress) -> None:
    progress.look(0, done={P0: 10}, ends={P0: 11})
    progress.look(50, done={}, ends={P0: 11})
    assert progress.look(70, done={P0: 10}, ends={P0: 11}) == []


def test_an_excuse_begins_anew(progress: Progress) -> None:
    progress.look(0, done={P0: 10}, ends={P0: 11})
    progress.excuse()
    assert progress.look(70, done={P0: 10}, ends={P0: 11}) == []
    assert progress.look(130, done={P0: 10}, ends={P0: 11}) != []


def test_where_the_end_is_not_known_nothing_is_judged(progress: Progress) -> None:
    progress.look(0, done={P0: 10}, ends={})
    assert progress.look(600, done={P0: 10}, ends={}) == []
