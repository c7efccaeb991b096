"""What the API answers is what its OpenAPI document says, whatever is asked: schemathesis asks."""

import asyncio
from collections.abc import Iterator
from typing import Any

import hypothesis
import pytest
import schemathesis
from schemathesis import GenerationMode

from jobs.flights.model import LATE_ARRIVAL
from streams.sinks.online import OnlineWriter
from streams.sinks.score_store import ScoreWriter
from tests.integration.test_http_api import ACCOUNTS, COUNTS, USE_CASES, VIEWS
from tests.integration.test_score_store import score
from tests.support.feature_rows import make_rows
from tests.support.serving import serving

PREFIX = "schema"


@pytest.fixture(scope="module")
def api(redis_url: str) -> Iterator[Any]:
    async def fill() -> None:
        async with OnlineWriter(redis_url, PREFIX) as writer:
            await writer.write(make_rows(COUNTS, [{"user_id": "0", "n": 1}, {"user_id": "a"}]), view=COUNTS)
            await writer.write(make_rows(ACCOUNTS, [{"account": 0, "n": 3}]), view=ACCOUNTS)
        scores = ScoreWriter(redis_url, PREFIX)
        await scores.write([score("0")], offsets=[4], model=LATE_ARRIVAL, keep_us=3_600_000_000)
        await scores.close()

    asyncio.run(fill())
    with serving(VIEWS, redis_url, use_cases=USE_CASES, prefix=PREFIX, timeout_s=5.0) as url:
        yield schemathesis.openapi.from_url(f"{url}/openapi.json")


def holds_beyond_64_bits(body: Any) -> bool:
    """Bounds of 64 bits are rounded by schemathesis, to a number beyond them."""
    if isinstance(body, dict | list):
        return any(map(holds_beyond_64_bits, body.values() if isinstance(body, dict) else body))
    return isinstance(body, int | float) and not -(2**63) <= body < 2**63


ROUTES = [
    "GET /v1/views",
    "POST /v1/features",
    "GET /v1/features/{view}/{entity}",
    "GET /v1/flights/{flight_id}/late-arrival",
    "GET /v1/users/{user_id}/accounts/{account}/trips/{flight_id}",
]


@pytest.mark.parametrize(
    ("route", "mode"),
    # Any text is a flight or a user: in those routes nothing can be wrong.
    [
        *((route, GenerationMode.POSITIVE) for route in ROUTES),
        *((route, GenerationMode.NEGATIVE) for route in ROUTES[1:3]),
    ],
)
def test_every_answer_is_as_documented(api: Any, route: str, mode: GenerationMode) -> None:
    operations = {result.ok().label: result.ok() for result in api.get_all_operations()}
    assert list(operations) == ROUTES

    @hypothesis.given(case=operations[route].as_strategy(generation_mode=mode))
    @hypothesis.settings(max_examples=40, deadline=None, suppress_health_check=list(hypothesis.HealthCheck))
    def ask(case: Any) -> None:
        hypothesis.assume(not holds_beyond_64_bits(case.body))
        answer = case.call()
        if answer.text == "Invalid HTTP request received.":
            return  # no request at all, such as one with a line of 100 kB: the server answers before there is an API
        case.validate_response(answer)
        assert answer.headers["x-request-id"]
        assert answer.headers["x-model-version"]

    ask()
