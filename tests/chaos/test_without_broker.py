"""The last one: the broker does not come back.

Its name puts it behind the others, which need one.
"""

import os
import signal

from infra.local.process import wait_until
from jobs.role import CONSUMERS
from streams.agents.worker import DRAIN_S
from tests.chaos.course import Course


def test_workers_end_in_time_although_the_broker_is_gone(course: Course) -> None:
    pipeline = course.pipeline
    workers = [pipeline.supervisor.process(role) for role in CONSUMERS]
    pipeline.services.kill("kafka")
    for worker in workers:
        os.kill(worker.pid, signal.SIGTERM)
    assert wait_until(lambda: not any(worker.is_alive() for worker in workers), timeout_s=2 * DRAIN_S)
