"""No worker can write a file any more: no Delta table, no lineage, no log. Then there is room again."""

import random

import psutil

from jobs.role import CONSUMERS, Role
from tests.chaos.course import SEED, Course, report


def set_largest_file(course: Course, n_bytes: int) -> None:
    """Let writes of the workers fail beyond a size of the file, as on a disk that is full."""
    for role in CONSUMERS:
        process = course.pipeline.supervisor.process(role).process()
        assert process is not None
        process.rlimit(psutil.RLIMIT_FSIZE, (n_bytes, psutil.RLIM_INFINITY))


def retries(course: Course) -> float:
    return course.pipeline.scrape(Role.OFFLINE).total("headrace_store_retries_total", store="delta")


def test_a_full_disk_loses_nothing_and_ends_nobody(course: Course) -> None:
    pipeline = course.pipeline
    pipeline.until(lambda: pipeline.scrape(Role.OFFLINE).by_name != {}, within_s=60, what="the offline role is there")
    draw, before, retried = random.Random(f"{SEED} disk"), len(pipeline.restarts), retries(course)
    with course.load():
        pipeline.until_sent(draw.uniform(0.05, 0.4))
        set_largest_file(course, 0)
        pipeline.until_sent(1.0)
    # What has come meanwhile is stored once its time is up, which fails.
    pipeline.until(lambda: retries(course) > retried, within_s=60, what="the offline role has met the full disk")
    assert pipeline.scrape(Role.FEATURES).by_name != {}
    set_largest_file(course, psutil.RLIM_INFINITY)
    course.assert_balanced()
    assert pipeline.restarts[before:] == [], "a worker waits for room, it does not fail"
    report(workers_without_disk=len(CONSUMERS), delta_writes_failed=int(retries(course) - retried))
