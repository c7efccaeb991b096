"""One pipeline for all chaos tests: each goes on where the one before stopped, and adds up everything since."""

from collections.abc import Iterator

import pytest

from jobs import supervisor
from jobs.role import CONSUMERS
from tests.chaos.course import SEED, Course
from tests.chaos.onlooker import Onlooker
from tests.support.running import running_pipeline


@pytest.fixture(scope="package")
def course(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Course]:
    print(f"PYTEST_CHAOS_SEED={SEED}")  # noqa: T201 - pytest shows it with a failure
    with (
        pytest.MonkeyPatch.context() as patch,
        running_pipeline(tmp_path_factory.mktemp("chaos"), has_model=True) as pipeline,
    ):
        # Here workers are killed more often than a supervisor bears.
        patch.setattr(supervisor, "_BACKOFF_S", (0.0,) * 99)
        patch.setattr(supervisor, "_MOST_IN_WINDOW", 99)
        pipeline.make_topics(partitions=2)
        pipeline.supervisor.start(CONSUMERS)
        with Onlooker(pipeline.application, pipeline.redis) as onlooker:
            yield Course(pipeline, onlooker)
