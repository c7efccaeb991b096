"""What is said of services that do not answer."""

import pytest

from jobs.reach import reach_kafka, reach_redis
from schemas.errors import ServiceError

NOWHERE = "127.0.0.1:1"


def test_a_kafka_that_does_not_answer_is_named_with_what_to_do() -> None:
    with pytest.raises(ServiceError, match=f"no Kafka answers at {NOWHERE}: .* HEADRACE_KAFKA names another"):
        reach_kafka(NOWHERE)


@pytest.mark.parametrize("login", ["user:secret@", ":secret@"])
def test_a_redis_that_does_not_answer_is_named_without_its_login(login: str) -> None:
    with pytest.raises(
        ServiceError, match=f"no Redis answers at redis://{NOWHERE}/0: .* HEADRACE_REDIS names"
    ) as raised:
        reach_redis(f"redis://{login}{NOWHERE}/0")
    assert "secret" not in str(raised.value)
