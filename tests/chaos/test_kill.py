"""Whatever is killed in the middle of the load, nothing is lost and nothing comes twice.

Workers and services are killed by process id with SIGKILL, on a schedule that is drawn from a seed; workers are
started again by their supervisor. The sums are those of ``headrace audit``, which reads what is committed on the topics
(aborted transactions do not show), in Delta and in Redis.
"""

import random

from infra.local.service import SERVICE_NAMES
from jobs.role import CONSUMERS, Role
from tests.chaos.course import SEED, Course, report


def test_workers_killed_under_load(course: Course) -> None:
    draw = random.Random(SEED)
    schedule = sorted((draw.uniform(0.05, 0.9), role) for role in (*CONSUMERS, Role.FEATURES, Role.SCORING))
    pipeline, before, kills = course.pipeline, len(course.pipeline.restarts), 0
    with course.load():
        for share, role in schedule:
            pipeline.until_sent(share)
            kills += course.kill(role)
    course.assert_balanced()
    restarts = pipeline.restarts[before:]
    assert {line.split()[1] for line in restarts} == set(CONSUMERS)
    assert all("was killed by SIGKILL" in line for line in restarts), restarts
    report(workers_killed=kills)


def test_stores_killed_under_load_and_started_again(course: Course) -> None:
    draw = random.Random(f"{SEED} stores")
    pipeline = course.pipeline
    kills = sorted((draw.uniform(0.05, 0.4), name) for name in ("redis", "triton"))
    starts = sorted((draw.uniform(0.5, 0.9), name) for name in ("redis", "triton"))
    before = len(pipeline.restarts)
    with course.load():
        for share, name in kills:
            pipeline.until_sent(share)
            pipeline.services.kill(name)
        for share, name in starts:
            pipeline.until_sent(share)
            pipeline.services.start(name)
    course.assert_balanced()
    assert pipeline.restarts[before:] == [], "a worker waits for a store, it does not fail"


def test_the_broker_killed_under_load_and_started_again(course: Course) -> None:
    pipeline = course.pipeline
    with course.load():
        pipeline.until_sent(random.Random(f"{SEED} broker").uniform(0.2, 0.6))
        pipeline.services.kill("kafka")
        assert not pipeline.services.status(["kafka"])[0].is_healthy
        pipeline.services.start("kafka")
    course.assert_balanced()


def test_everything_killed_at_once_under_load(course: Course) -> None:
    pipeline = course.pipeline
    with course.load():
        pipeline.until_sent(random.Random(f"{SEED} all").uniform(0.2, 0.6))
        for role in CONSUMERS:
            course.kill(role)
        for name in SERVICE_NAMES:
            pipeline.services.kill(name)
        for name in SERVICE_NAMES:
            pipeline.services.start(name)
    course.assert_balanced()
