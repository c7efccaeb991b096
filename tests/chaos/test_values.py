"""After all that: every feature row and dead letter is what the oracle makes of the raw topics, once."""

import pytest

from tests.chaos.course import SEED, Course
from tests.support.recomputation import compare

VIEWS = ("airport_departures", "aircraft_landings")
"""Those that read their source directly: through a repartition topic, the order of partitions decides too."""


@pytest.fixture(scope="module")
def rested(course: Course) -> Course:
    if not course.pipeline.sent:
        with course.load():
            course.pipeline.until_sent(1.0)
    course.assert_balanced()
    return course


@pytest.mark.parametrize("view", VIEWS)
def test_all_rows_are_those_of_the_oracle(rested: Course, view: str) -> None:
    sides = compare(rested.pipeline.kafka, rested.pipeline.application.view(view))
    assert sides.differences() == [], f"seed {SEED}"
    assert len(sides.expected) > len(sides.expected_letters) > 0
