"""Whatever is killed in the middle of the load, nothing is lost and nothing comes twice.

Workers and services are killed by process id with SIGKILL, on a schedule that is drawn from a seed; workers are
started again by their supervisor. The sums are those of ``headrace audit``, which reads what is committed on the topics
(aborted transactions do not show), in Delta and in Redis. Each test goes on where the one before stopped, so that its
sums are over everything since the first.
"""

import os
import random
import signal
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta

import pytest

from infra.local.process import wait_until
from infra.local.service import SERVICE_NAMES
from jobs.role import Role
from jobs.topic_reader import read_topic
from streams.agents.worker import DRAIN_S
from tests.support.running import RunningPipeline, differing, running_pipeline

SEED = int(os.environ.get("PYTEST_CHAOS_SEED", "0")) or random.SystemRandom().randrange(1, 10**6)
DAY = timedelta(days=1)
LOAD_S = 8.0


class Course:
    """The days of flights that are still to come."""

    def __init__(self, pipeline: RunningPipeline) -> None:
        self.pipeline = pipeline
        self.day = datetime(2013, 1, 1, tzinfo=UTC)

    def load(self, *, days: int = 1, takes_s: float = LOAD_S) -> "Iterator[None]":
        start, self.day = self.day, self.day + days * DAY
        return self.pipeline.producing(start, self.day, takes_s=takes_s)  # type: ignore[return-value]  # a context

    def assert_balanced(self) -> None:
        self.pipeline.until_drained()
        checks = self.pipeline.audit()
        assert differing(checks) == [], f"seed {SEED}, restarts: {self.pipeline.restarts}"
        assert self.request_ids() == sum(summary.events for summary in self.pipeline.sent)

    def request_ids(self) -> int:
        """Count what is on the raw topics, each event once.

        The broker forgets a producer whose newest record is older than a day, and these are of 2013: a producer that
        tries again after the broker was killed may write a batch twice. The pipeline takes that for two events.
        """
        topics = {source.topic for view in self.pipeline.application.views.values() for source in view.sources}
        return sum(
            len(
                {
                    dict(headers or ())["request_id"]
                    for batch in read_topic(self.pipeline.kafka, topic)
                    for headers in batch.headers
                }
            )
            for topic in topics
        )


@pytest.fixture(scope="module")
def course(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Course]:
    print(f"PYTEST_CHAOS_SEED={SEED}")  # noqa: T201 - pytest shows it with a failure
    with running_pipeline(tmp_path_factory.mktemp("chaos"), has_model=True) as pipeline:
        pipeline.make_topics(partitions=2)
        pipeline.supervisor.start(list(Role))
        yield Course(pipeline)


def test_workers_killed_under_load(course: Course) -> None:
    draw = random.Random(SEED)
    schedule = sorted((draw.uniform(0.05, 0.9), role) for role in (*Role, Role.FEATURES, Role.SCORING))
    pipeline = course.pipeline
    with course.load():
        for share, role in schedule:
            pipeline.until_sent(share)
            process = pipeline.supervisor.process(role).process()
            if process is not None:  # else it has just been killed
                process.send_signal(signal.SIGKILL)
    course.assert_balanced()
    assert {line.split()[1] for line in pipeline.restarts} == set(Role)
    assert all("was killed by SIGKILL" in line for line in pipeline.restarts), pipeline.restarts


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
        for role in Role:
            if (process := pipeline.supervisor.process(role).process()) is not None:
                process.send_signal(signal.SIGKILL)
        for name in SERVICE_NAMES:
            pipeline.services.kill(name)
        for name in SERVICE_NAMES:
            pipeline.services.start(name)
    course.assert_balanced()


def test_workers_end_in_time_although_the_broker_is_gone(course: Course) -> None:
    pipeline = course.pipeline
    workers = [pipeline.supervisor.process(role) for role in Role]
    pipeline.services.kill("kafka")
    for worker in workers:
        os.kill(worker.pid, signal.SIGTERM)
    assert wait_until(lambda: not any(worker.is_alive() for worker in workers), timeout_s=2 * DRAIN_S)
