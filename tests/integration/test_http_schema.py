"""What the API answers is what its OpenAPI document says, whatever is asked: schemathesis asks."""

import asyncio
from collections.abc import Iterator
from typing import Any
from uuid import uuid4

import hypothesis
import pytest
import schemathesis
from schemathesis import GenerationMode
from schemathesis.specs.openapi.checks import negative_data_rejection

from jobs.flights.model import LATE_ARRIVAL
from schemas.source import EventSource
from streams.sinks.online import OnlineWriter
from streams.sinks.score_store import ScoreWriter
from tests.integration.test_http_api import ACCOUNTS, COUNTS, USE_CASES, VIEWS
from tests.integration.test_http_producers import Edge
from tests.integration.test_score_store import score
from tests.support.builders import make_contract
from tests.support.events import FIELDS, T0_MS, make_source
from tests.support.feature_rows import make_rows
from tests.support.kafka import make_topic
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


@pytest.fixture(scope="module")
def edge(kafka: str, redis_url: str) -> Edge:
    fields = {
        **FIELDS,
        "key": {"type": "string"},
        "at": {"type": "integer", "x-unit": "ms", "minimum": T0_MS, "maximum": T0_MS + 1_000},
        "n": {"type": "integer", "minimum": 0, "maximum": 1_000},
    }
    contract = make_contract(fields, required=["key", "at", "n"])
    source = EventSource(make_topic(kafka, "schema"), contract=contract, key="key", event_time="at")
    return Edge(kafka, redis_url, source, make_source(make_topic(kafka, "other"), key="shop"), f"test:{uuid4().hex}")


@pytest.fixture(scope="module")
def events(edge: Edge) -> Iterator[Any]:
    with edge.serving() as client:
        yield schemathesis.openapi.from_url(f"{client.base_url}/openapi.json")[f"/v1/events/{edge.source.topic}"]


@pytest.fixture(scope="module")
def key(edge: Edge) -> dict[str, str]:
    return edge.give_key()


@pytest.mark.parametrize(
    ("mode", "has_key", "statuses"),
    [
        (GenerationMode.POSITIVE, True, {200}),
        (GenerationMode.NEGATIVE, True, {422}),
        (GenerationMode.POSITIVE, False, {401}),
        (GenerationMode.NEGATIVE, False, {401}),
    ],
)
def test_every_answer_to_events_is_as_documented(
    events: Any, key: dict[str, str], *, mode: GenerationMode, has_key: bool, statuses: set[int]
) -> None:
    @hypothesis.given(case=events["POST"].as_strategy(generation_mode=mode))
    @hypothesis.settings(max_examples=60, deadline=None, suppress_health_check=list(hypothesis.HealthCheck))
    def send(case: Any) -> None:
        if has_key:
            case.headers.update(key)
            if mode is GenerationMode.POSITIVE and "Idempotency-Key" in case.headers:
                case.headers["Idempotency-Key"] = uuid4().hex  # one that was another request's is refused
        answer = case.call()
        if answer.text == "Invalid HTTP request received.":
            return  # as above
        # A good key in place of a wrong one may leave nothing that is wrong.
        case.validate_response(answer, excluded_checks=[negative_data_rejection] if has_key else [])
        assert answer.headers["x-request-id"]
        assert answer.headers["x-model-version"]
        assert answer.status_code < 500, answer.text
        seen.add(answer.status_code)

    seen: set[int] = set()
    send()
    assert seen >= statuses
