"""Each role is killed between every two steps of its commit, under load."""

import random
import re
from collections import Counter

from jobs.role import CONSUMERS
from tests.chaos.course import SEED, Course, report
from tests.support.dying_worker import STEPS

MOST_LOADS = 30
MOST_TIMES = 3


def deaths_in_logs(course: Course) -> Counter[tuple[str, str]]:
    found: Counter[tuple[str, str]] = Counter()
    for role in CONSUMERS:
        log = (course.pipeline.home / "logs" / f"worker-{role}.log").read_text()
        found.update((role, step) for step in re.findall(r"dies as scheduled: (\w+)", log))
    return found


def test_workers_killed_between_the_steps_of_their_commits(course: Course) -> None:
    draw = random.Random(f"{SEED} steps")
    supervisor = course.pipeline.supervisor
    expected = Counter((role, step) for role, steps in STEPS.items() for step in steps)
    for role, steps in STEPS.items():
        supervisor.deaths[role] = [(step, draw.randint(1, MOST_TIMES)) for step in draw.sample(steps, len(steps))]
    schedule = {role: list(deaths) for role, deaths in supervisor.deaths.items()}
    for role in CONSUMERS:
        course.kill(role)
    for _ in range(MOST_LOADS):
        with course.load(takes_s=6.0):
            course.pipeline.until_sent(1.0)
        if deaths_in_logs(course) == expected:
            break
    course.assert_balanced()
    assert deaths_in_logs(course) == expected, f"seed {SEED}: {schedule}"
    report(deaths_at_steps=expected.total())
