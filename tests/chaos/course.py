"""What the chaos tests go along: the days of flights, and how everything is added up."""

import os
import random
import signal
from contextlib import AbstractContextManager
from datetime import UTC, datetime, timedelta

from jobs.role import Role
from jobs.topic_reader import read_topic
from tests.chaos.onlooker import Onlooker
from tests.support.running import RunningPipeline, differing

SEED = int(os.environ.get("PYTEST_CHAOS_SEED", "0")) or random.SystemRandom().randrange(1, 10**6)
DAY = timedelta(days=1)
LOAD_S = 8.0


class Course:
    """The days of flights that are still to come, and who looks on meanwhile."""

    def __init__(self, pipeline: RunningPipeline, onlooker: Onlooker) -> None:
        self.pipeline = pipeline
        self.onlooker = onlooker
        self.day = datetime(2013, 1, 1, tzinfo=UTC)

    def load(self, *, days: int = 1, takes_s: float = LOAD_S) -> AbstractContextManager[None]:
        start, self.day = self.day, self.day + days * DAY
        return self.pipeline.producing(start, self.day, takes_s=takes_s)

    def assert_balanced(self) -> None:
        """Add everything up: topics, stores, scores; and see that the online store never went back."""
        self.pipeline.until_drained()
        checks = self.pipeline.audit()
        assert differing(checks) == [], f"seed {SEED}, restarts: {self.pipeline.restarts}"
        found, sent = self.request_ids(), sum(summary.events for summary in self.pipeline.sent)
        assert found == sent, f"{found} events are on the raw topics, {sent} were sent; seed {SEED}"
        assert self.onlooker.looks > 0
        assert self.onlooker.steps_back == [], f"seed {SEED}"

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

    def kill(self, role: Role) -> bool:
        """Kill the worker of a role, unless it has just been; the supervisor starts it again."""
        process = self.pipeline.supervisor.process(role).process()
        if process is None:
            return False
        process.send_signal(signal.SIGKILL)
        return True


def report(**faults: int) -> None:
    """Tell which faults there were, and under which seed; pytest shows it with a failure, or with -s."""
    told = ", ".join(f"{name.replace('_', ' ')} {count}" for name, count in faults.items())
    print(f"seed {SEED}: {told}")  # noqa: T201
