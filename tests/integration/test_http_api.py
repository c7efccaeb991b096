"""The HTTP API on a real server and a real Valkey."""

import asyncio
import json
from collections.abc import Iterator
from typing import Any
from uuid import uuid4

import httpx
import pytest
from prometheus_client import CollectorRegistry

from infra.local.process import wait_until
from jobs.flights.model import LATE_ARRIVAL
from schemas.aggregation import count, mean
from schemas.serving import Serving
from schemas.use_case import Lookup, UseCase
from streams.observability.serving import ServingMetrics
from streams.serving import edge
from streams.sinks.online import OnlineWriter
from streams.sinks.score_store import ScoreWriter
from tests.integration.test_score_store import score
from tests.support.feature_rows import T0_US, make_rows, make_view
from tests.support.redis import valkey
from tests.support.serving import serving

FEATURES = {"n": count().over("5m"), "average": mean("amount").over("5m")}
COUNTS = make_view("counts", features=FEATURES)
CRITICAL = make_view("critical", ttl="9s", features=FEATURES, serving=Serving(defaults={"n": 0}))
ACCOUNTS = make_view("accounts", key="account", features={"n": count().over("5m")})
VIEWS = [COUNTS, CRITICAL, ACCOUNTS]
USE_CASES = [
    UseCase("/v1/flights/{flight_id}/late-arrival", model=LATE_ARRIVAL),
    UseCase(
        "/v1/users/{user_id}/accounts/{account}/trips/{flight_id}",
        model=LATE_ARRIVAL,
        lookups=(Lookup(COUNTS, "user_id", ("n",)), Lookup(ACCOUNTS, "account")),
    ),
]
PREFIX = f"api{uuid4().hex}"


@pytest.fixture(scope="module")
def metrics() -> ServingMetrics:
    return ServingMetrics(CollectorRegistry())


@pytest.fixture(scope="module")
def url(redis_url: str, metrics: ServingMetrics) -> Iterator[str]:
    async def fill() -> None:
        async with OnlineWriter(redis_url, PREFIX) as writer:
            rows = [{"user_id": f"u{i}", "n": i, "average": i / 4} for i in range(1_000)]
            await writer.write(make_rows(COUNTS, rows), view=COUNTS)
            await writer.write(make_rows(ACCOUNTS, [{"account": -7, "n": 3}]), view=ACCOUNTS)
        scores = ScoreWriter(redis_url, PREFIX)
        await scores.write([score()], offsets=[4], model=LATE_ARRIVAL, keep_us=3_600_000_000)
        await scores.close()

    asyncio.run(fill())
    with serving(
        VIEWS,
        redis_url,
        use_cases=USE_CASES,
        metrics=metrics,
        model_version="7",
        prefix=PREFIX,
        clock_us=lambda: T0_US + 17 * 60_000_000,
        timeout_s=5.0,  # a busy machine is no store that is down
    ) as url:
        yield url


@pytest.fixture
async def critical(redis_url: str) -> None:
    """A value of a view with a short ``ttl``, which Redis soon forgets."""
    async with OnlineWriter(redis_url, PREFIX) as writer:
        await writer.write(make_rows(CRITICAL, [{"n": 5}]), view=CRITICAL)


@pytest.fixture
def client(url: str) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=url, timeout=30) as client:
        yield client


class TestGeneric:
    def test_one_entity_with_all_that_is_known_of_it(self, client: httpx.Client) -> None:
        answer = client.get("/v1/features/counts/u3")
        assert answer.status_code == 200
        document = answer.json()
        assert document["request_id"] == answer.headers["X-Request-Id"]
        assert document["results"] == [
            {
                "view": "counts",
                "version": 1,
                "definition_hash": COUNTS.definition_hash,
                "values": [
                    {
                        "entity": "u3",
                        "status": "present",
                        "source": document["results"][0]["values"][0]["source"],
                        "age_ms": 17 * 60_000,
                        "completeness": 1.0,
                        "is_closed": False,
                        "event_time": "2023-11-14T22:13:20.000000Z",
                        "window_end": "2023-11-14T22:13:20.000000Z",
                        "watermark": "2023-11-14T22:13:15.000000Z",
                        "pane": "EARLY",
                        "features": {"n": 3, "average": 0.75},
                        "defaulted": [],
                    }
                ],
            }
        ]
        assert document["results"][0]["values"][0]["source"] in ("online", "cache")

    def test_a_thousand_entities_and_several_views_are_one_request(self, client: httpx.Client) -> None:
        queries = [
            {"view": "counts", "entities": [f"u{i}" for i in range(1_000)], "features": ["n"]},
            {"view": "accounts", "entities": [-7, 2**62]},
        ]
        many, accounts = client.post("/v1/features", json={"queries": queries}).json()["results"]
        assert [value["features"] for value in many["values"]] == [{"n": i} for i in range(1_000)]
        assert [(value["entity"], value["status"]) for value in accounts["values"]] == [
            (-7, "present"),
            (2**62, "missing"),
        ]

    @pytest.mark.usefixtures("critical")
    def test_a_value_of_17_minutes_under_a_ttl_of_seconds_is_stale_and_withheld(self, client: httpx.Client) -> None:
        (value,) = client.get("/v1/features/critical/u1").json()["results"][0]["values"]
        assert (value["status"], value["features"], value["defaulted"]) == ("stale", {"n": 0, "average": None}, ["n"])
        (value,) = client.get("/v1/features/critical/u1", params={"stale": True}).json()["results"][0]["values"]
        assert (value["status"], value["features"]["n"]) == ("stale", 5)

    def test_whole_numbers_and_keys_with_slashes_are_entities(self, client: httpx.Client) -> None:
        (value,) = client.get("/v1/features/accounts/-7").json()["results"][0]["values"]
        assert (value["entity"], value["features"]) == (-7, {"n": 3})
        (value,) = client.get("/v1/features/counts/a%2Fb/c").json()["results"][0]["values"]
        assert (value["entity"], value["status"]) == ("a/b/c", "missing")

    def test_the_views_are_listed_with_how_they_are_read(self, client: httpx.Client) -> None:
        views = {view["view"]: view for view in client.get("/v1/views").json()["views"]}
        assert views.keys() == {"counts", "critical", "accounts"}
        assert (views["critical"]["ttl"], views["critical"]["defaults"]) == ("9s", {"n": 0})
        assert (views["accounts"]["key"], views["accounts"]["features"]) == ("account", {"n": "int64"})


class TestUseCases:
    def test_a_score_answers_with_the_version_of_its_model(self, client: httpx.Client) -> None:
        answer = client.get("/v1/flights/UA1/late-arrival")
        document = answer.json()
        assert answer.headers["X-Model-Version"] == "3"
        assert (document["score"]["status"], document["score"]["entity"]) == ("present", "UA1")
        assert document["score"]["score"]["late_probability"] == 0.5
        assert document["features"] == []

    def test_no_score_is_missing_and_the_version_that_scores_is_named(self, client: httpx.Client) -> None:
        answer = client.get("/v1/flights/none/late-arrival")
        assert (answer.status_code, answer.headers["X-Model-Version"]) == (200, "7")
        assert answer.json()["score"] == {
            "model": "late_arrival",
            "entity": "none",
            "status": "missing",
            "age_ms": None,
            "event_time": None,
            "score": None,
        }

    def test_score_and_features_come_together(self, client: httpx.Client) -> None:
        document = client.get("/v1/users/u9/accounts/-7/trips/UA1").json()
        assert document["score"]["status"] == "present"
        assert [result["values"][0]["features"] for result in document["features"]] == [{"n": 9}, {"n": 3}]


class TestRefusals:
    @pytest.mark.parametrize(
        ("method", "path", "content", "status", "code", "message"),
        [
            ("GET", "/nothing", None, 404, "not_found", "Not Found"),
            ("GET", "/v1/features/none/u1", None, 404, "not_found", "there is no view 'none', expected one of"),
            ("DELETE", "/v1/features", None, 405, "method_not_allowed", "Method Not Allowed"),
            ("GET", "/v1/features/counts/u1?feature=m", None, 422, "invalid_request", "has no features ['m']"),
            ("GET", "/v1/features/counts/u1?stale=perhaps", None, 422, "invalid_request", "query.stale"),
            ("GET", "/v1/features/accounts/seven", None, 422, "invalid_request", "expected a whole number"),
            ("GET", f"/v1/features/accounts/{2**63}", None, 422, "invalid_request", "expected a whole number"),
            ("GET", "/v1/users/u1/accounts/x/trips/y", None, 422, "invalid_request", "expected a whole number"),
            ("POST", "/v1/features", b"\xff", 400, "invalid_request", "parsing the body"),
            ("POST", "/v1/features", b"{", 422, "invalid_request", "JSON"),
            ("POST", "/v1/features", b"{}", 422, "invalid_request", "body.queries"),
            ("POST", "/v1/features", {"queries": []}, 422, "invalid_request", "body.queries"),
            (
                "POST",
                "/v1/features",
                {"queries": [{"view": "counts", "entities": []}]},
                422,
                "invalid_request",
                "entities",
            ),
            (
                "POST",
                "/v1/features",
                {"queries": [{"view": "counts", "entities": ["u"] * 1_001}]},
                422,
                "invalid_request",
                "entities",
            ),
            (
                "POST",
                "/v1/features",
                {"queries": [{"view": "counts", "entities": ["u"] * 1_000}] * 11},
                422,
                "invalid_request",
                "11000 entities are asked for, expected 10000",
            ),
            (
                "POST",
                "/v1/features",
                {"queries": [{"view": "counts", "entities": [1]}]},
                422,
                "invalid_request",
                "text",
            ),
            (
                "POST",
                "/v1/features",
                {"queries": [{"view": "accounts", "entities": ["1"]}]},
                422,
                "invalid_request",
                "whole",
            ),
            (
                "POST",
                "/v1/features",
                {"queries": [{"view": "counts", "entities": [2**70]}]},
                422,
                "invalid_request",
                "",
            ),
            (
                "POST",
                "/v1/features",
                b'{"queries": [{"view": "counts", "entities": ["\\ud800"]}]}',
                422,
                "invalid_request",
                "",
            ),
            ("POST", "/v1/features", b"x" * 1_048_577, 413, "too_large", "expected no more; split the request"),
        ],
    )
    def test_a_wrong_request_is_told_what_is_wrong(  # noqa: PLR0917  # the table above has so many columns
        self, client: httpx.Client, method: str, path: str, content: Any, status: int, code: str, message: str
    ) -> None:
        body = content if isinstance(content, bytes) or content is None else json.dumps(content).encode()
        headers = {"Content-Type": "application/json", "X-Request-Id": "mine-1"}
        answer = client.request(method, path, content=body, headers=headers)
        assert (answer.status_code, answer.json()["error"]["code"]) == (status, code)
        assert message in answer.json()["error"]["message"]
        assert answer.json()["request_id"] == answer.headers["X-Request-Id"] == "mine-1"
        assert answer.headers["X-Model-Version"] == "7"

    def test_a_body_that_grows_beyond_the_bound_is_refused_too(self, client: httpx.Client) -> None:
        def chunks() -> Iterator[bytes]:
            for _ in range(40):
                yield b" " * 65_536

        answer = client.post("/v1/features", content=chunks(), headers={"Content-Type": "application/json"})
        assert answer.status_code == 413

    @pytest.mark.parametrize("given", ["", "with space", "a" * 129, "ü"])
    def test_a_request_id_that_is_not_plain_is_replaced(self, client: httpx.Client, given: str) -> None:
        answer = client.get("/v1/views", headers={"X-Request-Id": given.encode("latin-1")})
        assert len(answer.headers["X-Request-Id"]) == 32

    def test_more_requests_than_are_worked_on_are_told_to_come_again(
        self, redis_url: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(edge.Edge.__init__, "__kwdefaults__", {"max_in_flight": 0})
        with serving([COUNTS], redis_url, prefix=PREFIX) as url:
            answer = httpx.get(f"{url}/v1/views")
        assert (answer.status_code, answer.headers["Retry-After"]) == (503, "1")
        assert answer.json()["error"]["code"] == "overloaded"
        assert answer.headers["X-Model-Version"] == "none"

    def test_a_failure_of_the_server_is_answered_and_named_in_the_log(
        self, redis_url: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
    ) -> None:
        monkeypatch.setattr("streams.serving.api._view_document", lambda view: 1 / 0)
        with serving([COUNTS], redis_url, prefix=PREFIX) as url:
            answer = httpx.get(f"{url}/v1/views", headers={"X-Request-Id": "mine-2"})
        assert (answer.status_code, answer.json()["error"]["code"]) == (500, "internal")
        assert answer.headers["X-Request-Id"] == "mine-2"
        assert "request mine-2 /v1/views failed" in caplog.text


class TestRedisAway:
    def test_defaults_answer_where_there_are_and_503_where_not(self) -> None:
        server = valkey()
        server.start()
        url = f"redis://127.0.0.1:{server.port}/0"
        server.stop()
        with serving(VIEWS, url, use_cases=USE_CASES) as api, httpx.Client(base_url=api, timeout=30) as client:
            (value,) = client.get("/v1/features/critical/u1?feature=n").json()["results"][0]["values"]
            assert (value["status"], value["source"], value["features"]) == ("missing", "none", {"n": 0})
            for path in ("/v1/features/critical/u1", "/v1/features/counts/u1", "/v1/flights/UA1/late-arrival"):
                answer = client.get(path)
                assert (answer.status_code, answer.json()["error"]["code"]) == (503, "unavailable")
                assert int(answer.headers["Retry-After"]) >= 1


@pytest.mark.usefixtures("critical")
def test_requests_and_reads_are_metered(client: httpx.Client, metrics: ServingMetrics) -> None:
    def value(name: str, **labels: str) -> float:
        return metrics.registry.get_sample_value(name, labels) or 0.0

    labels = {"view": "critical", "status": "stale", "source": "online"}
    before = value("headrace_online_reads_total", **labels)
    client.get("/v1/features/critical/u1")
    client.get("/v1/features/none/u1")
    assert value("headrace_online_reads_total", **labels) == before + 1
    assert value("headrace_online_read_age_seconds_count", view="critical") >= 1
    route = "/v1/features/{view}/{entity:path}"
    # A request is counted once its answer is out.
    assert wait_until(lambda: value("headrace_http_requests_total", route=route, status="404") >= 1, timeout_s=10)
    assert value("headrace_http_requests_total", route=route, status="200") >= 1
    assert value("headrace_http_request_duration_seconds_count", route=route) >= 2


async def test_a_load_of_six_hundred_requests_is_answered_right(url: str) -> None:
    """Bounded: 50 callers, each with one request at a time; each answer is compared with what was written."""
    numbers = iter(range(600))

    async def call(client: httpx.AsyncClient) -> int:
        answered = 0
        for i in numbers:
            entity = i * 37 % 1_000
            answer = await client.get(f"/v1/features/counts/u{entity}", headers={"X-Request-Id": f"load-{i}"})
            assert answer.status_code == 200, answer.text
            document = answer.json()
            assert document["request_id"] == f"load-{i}"
            (value,) = document["results"][0]["values"]
            assert value["features"] == {"n": entity, "average": entity / 4}
            answered += 1
        return answered

    async with httpx.AsyncClient(base_url=url, timeout=60) as client:
        assert sum(await asyncio.gather(*(call(client) for _ in range(50)))) == 600
