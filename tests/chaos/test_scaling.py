"""Workers come, freeze, wake up as zombies and go, all under load."""

import os
import random
import signal

from infra.local.process import exit_code, wait_until
from jobs.role import CONSUMERS, Role
from tests.chaos.course import SEED, Course, report
from tests.support.kafka import TIMEOUT_S

ZOMBIES = (Role.FEATURES, Role.SCORING)


def until_members(course: Course, role: Role, n_members: int) -> None:
    """Wait until a role's group is at rest with so many members, each with partitions."""

    def is_spread() -> bool:
        members = course.pipeline.members(role)
        return members is not None and len(members) == n_members and all(members)

    course.pipeline.until(is_spread, within_s=2 * TIMEOUT_S, what=f"{role} has {n_members} members with partitions")


def test_workers_that_join_under_load_get_their_share(course: Course) -> None:
    pipeline = course.pipeline
    draw, before = random.Random(f"{SEED} join"), len(pipeline.restarts)
    with course.load():
        for share, role in sorted((draw.uniform(0.0, 0.5), role) for role in CONSUMERS):
            pipeline.until_sent(share)
            pipeline.start_extra(role)
    for role in CONSUMERS:
        until_members(course, role, 2)
    with course.load(takes_s=3.0):
        pipeline.until_sent(1.0)
    course.assert_balanced()
    assert pipeline.restarts[before:] == []
    report(workers_joined=len(CONSUMERS))


def test_workers_frozen_past_their_session_change_nothing_when_they_wake(course: Course) -> None:
    pipeline = course.pipeline
    for role in set(ZOMBIES) - pipeline.extras.keys():
        pipeline.start_extra(role)
        until_members(course, role, 2)
    frozen = {role: pipeline.supervisor.process(role) for role in ZOMBIES}
    with course.load(takes_s=20.0):
        pipeline.until_sent(random.Random(f"{SEED} freeze").uniform(0.05, 0.2))
        for worker in frozen.values():
            os.kill(worker.pid, signal.SIGSTOP)
        for role in ZOMBIES:  # the other one has all its partitions
            until_members(course, role, 1)
        for worker in frozen.values():
            os.kill(worker.pid, signal.SIGCONT)
        # Fenced, it ends and is started again, or joins the group anew.
        for role in ZOMBIES:
            until_members(course, role, 2)
    course.assert_balanced()
    report(zombies=len(ZOMBIES), zombies_that_ended=sum(not worker.is_alive() for worker in frozen.values()))


def test_workers_that_leave_under_load_hand_all_over(course: Course) -> None:
    pipeline = course.pipeline
    if not pipeline.extras:
        pipeline.start_extra(Role.FEATURES)
        until_members(course, Role.FEATURES, 2)
    extras = dict(pipeline.extras)
    draw, before = random.Random(f"{SEED} leave"), len(pipeline.restarts)
    with course.load():
        for share, role in sorted((draw.uniform(0.1, 0.9), role) for role in extras):
            pipeline.until_sent(share)
            os.kill(extras[role].pid, signal.SIGTERM)
    for role, worker in extras.items():
        assert wait_until(lambda worker=worker: not worker.is_alive(), timeout_s=TIMEOUT_S), role  # type: ignore[misc]  # bound now
        assert exit_code(worker.pid) == 0, (pipeline.home / "logs" / f"extra-{role}.log").read_text()[-2_000:]
        del pipeline.extras[role]
    course.assert_balanced()
    assert pipeline.restarts[before:] == []
    report(workers_left=len(extras))
