"""Who may send events over HTTP and how many, and requests that are sent again; with a real Kafka and a real Redis."""

import asyncio
import contextlib
import json
import math
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any
from uuid import uuid4

import httpx
import pytest
import redis
from confluent_kafka import Producer
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from infra.local.port import accepts_connections, choose_ports
from infra.local.process import wait_until
from schemas.source import EventSource
from streams.serving import sent
from streams.serving.once import Once, StoredAnswer, fingerprint_of
from streams.serving.producer_key import KeyRing, ProducerKey, Rate, digest_of, make_secret
from streams.serving.producer_store import ProducerStore
from streams.serving.rate import TAKE, LocalLimits, limit_argument
from streams.transport.event_producer import Delivered, EventProducer, EventRecord, Undelivered
from tests.integration.conftest import MakeServices
from tests.integration.test_http_events import JSON, NDJSON, event, records, taking
from tests.integration.test_redis_access import give_rights
from tests.support.dying_server import SHORT, STEPS
from tests.support.events import make_source, make_views
from tests.support.kafka import make_topic


@dataclass
class Edge:
    """Sources, and where their producers are kept."""

    brokers: str
    redis_url: str
    source: EventSource
    other: EventSource
    prefix: str

    @contextlib.contextmanager
    def serving(self, **options: Any) -> Iterator[httpx.Client]:
        views = [*make_views(self.source), *make_views(self.other, "shop")]
        options = {"prefix": self.prefix, "is_open": False, **options}
        with taking(views, self.brokers, self.redis_url, **options) as client:
            yield client

    def change(self, make: Callable[[KeyRing], KeyRing]) -> KeyRing:
        async def change() -> KeyRing:
            async with ProducerStore(self.redis_url, self.prefix, timeout_s=5) as store:
                return await store.change_ring(make)

        return asyncio.run(change())

    def give_key(
        self, name: str = "shop", *, sources: tuple[str, ...] = ("*",), rate: int = 1_000_000, burst: int = 1_000_000
    ) -> dict[str, str]:
        """Make a key, and give the header that it is sent in."""
        secret = make_secret()
        key = ProducerKey(
            name=name,
            digest=digest_of(secret),
            sources=sources,
            rate=Rate(rate, burst),
            created_at="2026-01-01T00:00:00Z",
        )
        self.change(lambda ring: ring.with_key(key))
        return {"Authorization": f"Bearer {secret}"}

    def keys_of_events(self) -> list[str]:
        """The key of each record of the source."""
        return sorted((key or b"").decode() for key, _, _ in records(self.brokers, self.source.topic).values())


@pytest.fixture
def edge(kafka: str, redis_url: str) -> Edge:
    return Edge(
        kafka,
        redis_url,
        make_source(make_topic(kafka, "producers", partitions=2)),
        make_source(make_topic(kafka, "others"), key="shop"),
        f"test:{uuid4().hex}",
    )


def batch(count: int, *, name: str = "k") -> bytes:
    return b"\n".join(event(key=f"{name}{i}") for i in range(count))


class TestKeys:
    def test_who_has_no_good_key_is_told_so_and_nothing_is_sent(self, edge: Edge) -> None:
        good = edge.give_key(sources=(edge.other.topic,))
        cases: list[tuple[dict[str, str], str, int, str, str]] = [
            ({}, edge.source.topic, 401, "unauthenticated", "no key was given, expected `Authorization: Bearer KEY`"),
            ({}, "none", 401, "unauthenticated", "no key was given"),
            ({"Authorization": "Basic YTpi"}, edge.source.topic, 401, "unauthenticated", "is no bearer token"),
            ({"Authorization": "Bearer"}, edge.source.topic, 401, "unauthenticated", "is no bearer token"),
            ({"Authorization": "Bearer hrk_x"}, edge.source.topic, 401, "unauthenticated", "none that is known here"),
            (
                {"Authorization": good["Authorization"][:-1]},
                edge.other.topic,
                401,
                "unauthenticated",
                "see that all of it was sent",
            ),
            (good, edge.source.topic, 403, "forbidden", f"expected one of ['{edge.other.topic}']"),
        ]
        with edge.serving() as client:
            for headers, topic, status, code, text in cases:
                answer = client.post(f"/v1/events/{topic}", content=event(), headers=JSON | headers)
                error = answer.json()["error"]
                assert (answer.status_code, error["code"]) == (status, code), error
                assert text in error["message"]
                assert ("WWW-Authenticate" in answer.headers) == (status == 401)
            body = event(shop=3)
            assert client.post(f"/v1/events/{edge.other.topic}", content=body, headers=JSON | good).status_code == 200
        assert edge.keys_of_events() == []

    def test_a_key_is_good_at_once_and_no_more_once_it_is_revoked(self, edge: Edge) -> None:
        with edge.serving() as one, edge.serving() as two:

            def send(client: httpx.Client, key: dict[str, str]) -> httpx.Response:
                return client.post(f"/v1/events/{edge.source.topic}", content=event(), headers=JSON | key)

            first, second = edge.give_key("first"), edge.give_key("second")
            assert [send(client, key).status_code for client in (one, two) for key in (first, second)] == [200] * 4
            edge.change(lambda ring: ring.with_revoked("first", at="2026-02-01T00:00:00Z"))
            for client in (one, two):
                answer = send(client, first)
                assert answer.status_code == 401
                assert "the key of first was revoked at 2026-02-01T00:00:00Z" in answer.json()["error"]["message"]
                assert send(client, second).status_code == 200
            third = edge.give_key("first")
            assert [send(client, third).status_code for client in (one, two)] == [200, 200]
        assert len(edge.keys_of_events()) == 8

    def test_redis_has_no_key_that_could_be_sent(self, edge: Edge) -> None:
        secret = edge.give_key()["Authorization"].removeprefix("Bearer ")
        with redis.Redis.from_url(edge.redis_url) as client:
            stored = b"".join(client.get(key) or b"" for key in client.scan_iter(f"{edge.prefix}:*"))
        assert digest_of(secret).encode() in stored
        assert secret.encode() not in stored
        assert secret.removeprefix("hrk_").encode() not in stored

    def test_changes_at_the_same_time_lose_none(self, edge: Edge) -> None:
        with ThreadPoolExecutor(8) as pool:
            list(pool.map(lambda n: edge.give_key(f"k{n}"), range(8)))
        ring = edge.change(lambda ring: ring.with_revoked("k3", at="2026-02-01T00:00:00Z"))
        assert sorted(key.name for key in ring.keys) == [f"k{n}" for n in range(8)]
        assert ring.version == 9

    def test_an_open_edge_takes_events_without_a_key_and_none_with_a_wrong_one(self, edge: Edge) -> None:
        with edge.serving(is_open=True) as client:
            path = f"/v1/events/{edge.source.topic}"
            assert client.post(path, content=event(), headers=JSON).status_code == 200
            wrong = JSON | {"Authorization": "Bearer hrk_x"}
            assert client.post(path, content=event(), headers=wrong).status_code == 401


class TestRates:
    def test_who_sends_too_much_is_told_how_long_to_wait_and_others_are_not_hindered(self, edge: Edge) -> None:
        slow, fast = edge.give_key("slow", rate=1, burst=5), edge.give_key("fast")
        with edge.serving() as client:

            def send(count: int, key: dict[str, str]) -> httpx.Response:
                return client.post(f"/v1/events/{edge.source.topic}", content=batch(count), headers=NDJSON | key)

            first = send(5, slow)
            assert first.status_code == 200
            assert first.headers["RateLimit-Policy"].startswith('"client";q=5;w=5, "global";q=1000000')
            assert '"client";r=0;t=5, "global";r=' in first.headers["RateLimit"]
            limited = send(5, slow)
            assert (limited.status_code, limited.json()["error"]["code"]) == (429, "rate_limited")
            assert "at 1 a second for the key of slow" in limited.json()["error"]["message"]
            assert 1 <= int(limited.headers["Retry-After"]) <= 5
            assert limited.headers["RateLimit"].startswith('"client";r=')
            larger = send(6, slow)
            assert (larger.status_code, larger.json()["error"]["code"]) == (413, "too_large")
            assert send(100, fast).status_code == 200
        assert len(edge.keys_of_events()) == 105

    def test_all_together_have_a_limit_too(self, edge: Edge) -> None:
        one, two = edge.give_key("one"), edge.give_key("two")
        with edge.serving(global_rate=Rate(1, 10)) as client:
            path = f"/v1/events/{edge.source.topic}"
            assert client.post(path, content=batch(6), headers=NDJSON | one).status_code == 200
            assert client.post(path, content=batch(4), headers=NDJSON | two).status_code == 200
            limited = client.post(path, content=batch(10), headers=NDJSON | two)
        assert limited.status_code == 429
        assert "at 1 a second for all producers together" in limited.json()["error"]["message"]

    def test_servers_share_the_limits_however_many_send_at_once(self, edge: Edge) -> None:
        key = edge.give_key(rate=1, burst=50)
        started_s = time.monotonic()
        with edge.serving() as one, edge.serving() as two:

            def send(number: int) -> int:
                client = (one, two)[number % 2]
                answer = client.post(f"/v1/events/{edge.source.topic}", content=batch(1), headers=NDJSON | key)
                return answer.status_code

            with ThreadPoolExecutor(16) as pool:
                answers = Counter(pool.map(send, range(120)))
        allowed = 50 + math.ceil(time.monotonic() - started_s)
        assert answers.keys() == {200, 429}
        assert 50 <= answers[200] <= allowed
        assert len(edge.keys_of_events()) == answers[200]

    @given(
        st.lists(st.tuples(st.integers(1, 1_000_000), st.integers(1, 50)), min_size=2, max_size=2),
        st.lists(st.tuples(st.integers(0, 3_000_000), st.integers(1, 10)), min_size=1, max_size=25),
    )
    @settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
    def test_the_script_decides_as_the_process_does(
        self, redis_url: str, rates: list[tuple[int, int]], requests: list[tuple[int, int]]
    ) -> None:
        clock, expiry = "redis.call('TIME')", "math.ceil(after[i] / 1000) + 1"
        assert (TAKE.count(clock), TAKE.count(expiry)) == (1, 1)
        script = TAKE.replace(clock, "{ARGV[5], ARGV[6]}").replace(expiry, "60000")
        named = [(f"test:{uuid4().hex}:{{t}}:{n}", Rate(*rate)) for n, rate in enumerate(rates)]
        limits = LocalLimits()
        now_us = 1_700_000_000_000_000
        with redis.Redis.from_url(redis_url) as client:
            for later_us, events in requests:
                now_us += later_us
                is_taken, *ahead, version = client.eval(
                    script,
                    3,
                    *(key for key, _ in named),
                    f"test:{uuid4().hex}:{{t}}:none",
                    events,
                    *(limit_argument(rate) for _, rate in named),
                    b"",
                    now_us // 1_000_000,
                    now_us % 1_000_000,
                )
                expected = limits.take(named, events=events, now_us=now_us)
                assert (is_taken == b"1", [float(us) for us in ahead]) == expected
                assert version == b""


class TestOnce:
    def test_a_request_that_is_repeated_gets_the_first_answer(self, edge: Edge) -> None:
        key, headers = edge.give_key(), {"Idempotency-Key": '"ab"'}
        body = batch(3) + b"\nbroken"
        with edge.serving() as one, edge.serving() as two:
            path = f"/v1/events/{edge.source.topic}"
            first = one.post(path, content=body, headers=NDJSON | key | headers | {"X-Request-Id": "first"})
            assert first.status_code == 207
            assert "Idempotency-Replayed" not in first.headers
            for client in (one, two):
                again = client.post(path, content=body, headers=NDJSON | key | {"Idempotency-Key": "ab"})
                assert (again.status_code, again.content) == (207, first.content)
                assert again.headers["Idempotency-Replayed"] == "true"
                assert again.headers["X-Request-Id"] != "first"
            single = [
                one.post(path, content=event(key="s"), headers=JSON | key | {"Idempotency-Key": "s"}) for _ in "ab"
            ]
            assert single[0].content == single[1].content
        assert edge.keys_of_events() == ["k0", "k1", "k2", "s"]

    def test_a_key_is_one_of_its_producer_and_of_one_request(self, edge: Edge) -> None:
        mine, yours = edge.give_key("mine"), edge.give_key("yours")
        once = {"Idempotency-Key": "1"}
        with edge.serving() as client:
            path = f"/v1/events/{edge.source.topic}"
            for key in (mine, yours):
                assert client.post(path, content=event(), headers=JSON | key | once).status_code == 200
            other = client.post(path, content=event(n=2), headers=JSON | mine | once)
            as_batch = client.post(path, content=event(), headers=NDJSON | mine | once)
            elsewhere = client.post(f"/v1/events/{edge.other.topic}", content=event(), headers=JSON | mine | once)
            for answer in (other, as_batch, elsewhere):
                assert (answer.status_code, answer.json()["error"]["code"]) == (422, "idempotency_key_reused")
            for wrong in ("", '""', "a b", "x" * 256):
                answer = client.post(path, content=event(), headers=JSON | mine | {"Idempotency-Key": wrong})
                assert (answer.status_code, answer.json()["error"]["code"]) == (422, "invalid_request"), wrong
        assert edge.keys_of_events() == ["a", "a"]

    def test_of_those_that_run_at_once_one_is_sent_and_all_get_its_answer(self, edge: Edge) -> None:
        key = edge.give_key()
        with edge.serving() as one, edge.serving() as two:

            def send(number: int) -> httpx.Response:
                client, request = (one, two)[number % 2], number // 8
                headers = NDJSON | key | {"Idempotency-Key": f"r{request}"}
                body = batch(20, name=f"r{request}-")
                return client.post(f"/v1/events/{edge.source.topic}", content=body, headers=headers)

            with ThreadPoolExecutor(16) as pool:
                answers = list(pool.map(send, range(80)))
        assert {answer.status_code for answer in answers} == {200}
        for request in range(10):
            assert len({answer.content for answer in answers[8 * request : 8 * request + 8]}) == 1
        assert edge.keys_of_events() == sorted(f"r{request}-{i}" for request in range(10) for i in range(20))

    def test_what_was_refused_leaves_the_key_free(self, edge: Edge) -> None:
        key = edge.give_key() | {"Idempotency-Key": "1"}
        with edge.serving() as client:
            path = f"/v1/events/{edge.source.topic}"
            for _ in range(2):
                answer = client.post(path, content=event(n=-1), headers=JSON | key)
                assert (answer.status_code, answer.json()["error"]["code"]) == (422, "schema_violation")
            assert client.post(path, content=event(n=1), headers=JSON | key).status_code == 200
        assert edge.keys_of_events() == ["a"]

    def test_an_answer_is_kept_for_its_time(self, edge: Edge) -> None:
        key = edge.give_key() | {"Idempotency-Key": "1"}
        with edge.serving(keep_s=0.5) as client, redis.Redis.from_url(edge.redis_url) as store:
            path = f"/v1/events/{edge.source.topic}"
            assert client.post(path, content=event(), headers=JSON | key).status_code == 200
            (kept,) = store.keys(f"{edge.prefix}:producers:once:*")
            assert 0 < store.pttl(kept) <= 500
            assert wait_until(lambda: not store.exists(kept), timeout_s=30)
            assert client.post(path, content=event(n=2), headers=JSON | key).status_code == 200
        assert edge.keys_of_events() == ["a", "a"]


class HalfProducer(EventProducer):
    """Sends half of the records, and fails before anybody is told."""

    async def send(self, topic: str, records: list[EventRecord], *, timestamp_ms: int) -> list[Delivered | Undelivered]:
        await super().send(topic, records[: len(records) // 2], timestamp_ms=timestamp_ms)
        msg = "the process is to die here"
        raise RuntimeError(msg)


class TestFirstThatDied:
    def test_what_it_had_sent_is_found_and_the_rest_is_sent(self, edge: Edge, monkeypatch: pytest.MonkeyPatch) -> None:
        key = edge.give_key()
        headers, path = NDJSON | key | {"Idempotency-Key": "1"}, f"/v1/events/{edge.source.topic}"
        body = b"broken\n" + batch(50)
        with edge.serving(producer=HalfProducer, **SHORT) as client:
            died = client.post(path, content=body, headers=headers | {"X-Request-Id": "first"})
            assert died.status_code == 500
        before = records(edge.brokers, edge.source.topic)
        assert len(before) == 25
        with edge.serving(**SHORT) as client:
            answers = send_until_answered(client, path, body, headers)
            again = client.post(path, content=body, headers=headers)
        assert {answer.status_code for answer in answers[:-1]} <= {409}
        told = answers[-1].json()
        assert (answers[-1].status_code, told["accepted"], told["refused"]) == (207, 50, 1)
        assert again.content == answers[-1].content
        after = records(edge.brokers, edge.source.topic)
        assert {place: after[place] for place in before} == before
        assert edge.keys_of_events() == sorted(f"k{i}" for i in range(50))
        for index, row in enumerate(told["rows"][1:]):
            name, _, carried = after[row["partition"], row["offset"]]
            assert name == f"k{index}".encode()
            assert carried["request_id"] == f"first:{index + 1}".encode()
        monkeypatch.setattr(sent, "MAX_RECORDS", 10)
        with edge.serving(producer=HalfProducer, **SHORT) as client:
            other = headers | {"Idempotency-Key": "2"}
            assert client.post(path, content=body, headers=other).status_code == 500
        with edge.serving(**SHORT) as client:
            refused = send_until_answered(client, path, body, other)[-1]
        assert refused.status_code == 503
        assert "expected 10 at most to look through" in refused.json()["error"]["message"]

    def test_an_answer_that_could_not_be_stored_is_found_again(
        self, edge: Edge, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        async def forget(*_: Any) -> None:
            """Redis was away."""

        key = edge.give_key()
        headers, path = JSON | key | {"Idempotency-Key": "1"}, f"/v1/events/{edge.source.topic}"
        with edge.serving(**SHORT) as client:
            with monkeypatch.context() as patch:
                patch.setattr(Once, "store", forget)
                first = client.post(path, content=event(), headers=headers)
            answers = send_until_answered(client, path, event(), headers)
        assert (answers[-1].status_code, answers[-1].json()) == (200, first.json())
        assert edge.keys_of_events() == ["a"]

    def test_who_asks_meanwhile_is_told_when_to_come_again(self, edge: Edge) -> None:
        async def claim(name: str, fingerprint: str) -> None:
            async with ProducerStore(edge.redis_url, edge.prefix, timeout_s=5) as store:
                once = Once(store)
                mine = {"client": "shop", "fingerprint": fingerprint, "request_id": "r", "now_ms": 1}
                assert not isinstance(await once.claim(name, **mine), StoredAnswer)

        key = edge.give_key()
        body = event()
        fingerprint = asyncio.run(fingerprint_of(edge.source.topic, "application/json", body))
        asyncio.run(claim("1", fingerprint))
        with edge.serving(delivery_timeout_s=0.1) as client:
            headers = JSON | key | {"Idempotency-Key": "1"}
            answer = client.post(f"/v1/events/{edge.source.topic}", content=body, headers=headers)
        assert (answer.status_code, answer.json()["error"]["code"]) == (409, "in_progress")
        assert 1 <= int(answer.headers["Retry-After"]) <= 60
        assert edge.keys_of_events() == []


def test_headers_that_another_program_gave_are_none_of_a_claim(kafka: str) -> None:
    topic = make_topic(kafka, "foreign")
    producer = Producer({"bootstrap.servers": kafka})
    foreign = [None, b"", b"\xff", b"tag", b"tag:", b"tag:x", b"tag:-1", b"tag:1 ", b"tag:" + b"1" * 5_000, b"other:1"]
    for value in [*foreign, b"tag:3"]:
        producer.produce(topic, b"{}", headers=[(sent.ONCE_HEADER, value)], partition=0)
    assert producer.flush(30) == 0
    assert sent.find_sent(kafka, topic, tag="tag", since_ms=60_000) == {3: Delivered(0, len(foreign))}


@pytest.mark.parametrize("step", STEPS)
def test_a_process_that_is_killed_at_any_step_leaves_nothing_twice(edge: Edge, step: str) -> None:
    body, path = batch(40) + b"\nbroken", f"/v1/events/{edge.source.topic}"
    headers = NDJSON | edge.give_key() | {"Idempotency-Key": "1"}
    (port,) = choose_ports({"api": 0}).values()
    arguments = [step, edge.brokers, edge.redis_url, edge.source.topic, edge.prefix, str(port)]
    process = subprocess.Popen([sys.executable, "-m", "tests.support.dying_server", *arguments])
    try:
        assert wait_until(lambda: accepts_connections(f"127.0.0.1:{port}", service="it"), timeout_s=60)
        with pytest.raises(httpx.TransportError):
            httpx.post(f"http://127.0.0.1:{port}{path}", content=body, headers=headers, timeout=60)
        assert process.wait(60) == -signal.SIGKILL
    finally:
        process.kill()
        process.wait()
    with edge.serving(**SHORT) as client:
        answers = send_until_answered(client, path, body, headers)
    told = answers[-1].json()
    assert (answers[-1].status_code, told["accepted"], told["refused"]) == (207, 40, 1), told
    assert ("Idempotency-Replayed" in answers[-1].headers) == (step == "stored")
    assert edge.keys_of_events() == sorted(f"k{i}" for i in range(40))
    found = records(edge.brokers, edge.source.topic)
    for row in told["rows"][:-1]:
        assert found[row["partition"], row["offset"]][0] == f"k{row['index']}".encode()


def send_until_answered(client: httpx.Client, path: str, body: bytes, headers: dict[str, str]) -> list[httpx.Response]:
    """Send again while the first request may be under way."""
    answers: list[httpx.Response] = []

    def is_answered() -> bool:
        answers.append(client.post(path, content=body, headers=headers))
        return answers[-1].status_code != 409

    assert wait_until(is_answered, timeout_s=60)
    return answers


class TestRedisAway:
    def test_known_keys_go_on_and_what_needs_redis_waits(self, kafka: str, make_services: MakeServices) -> None:
        services = make_services()
        url = services.up(["redis"]).get("redis")
        assert url is not None
        source = make_source(make_topic(kafka, "redisless"))
        edge = Edge(kafka, url, source, make_source(make_topic(kafka, "unused"), key="shop"), "test:away")
        known = edge.give_key("known", rate=1, burst=30)
        path = f"/v1/events/{source.topic}"
        with edge.serving(timeout_s=1.0) as client:

            def send(body: bytes, key: dict[str, str], **further: str) -> httpx.Response:
                return client.post(path, content=body, headers=NDJSON | key | further)

            assert send(batch(10, name="before"), known).status_code == 200
            unknown, once = edge.give_key("unknown"), {"Idempotency-Key": "1"}
            (running,) = [status for status in services.status() if status.name == "redis"]
            assert running.pid is not None
            os.kill(running.pid, signal.SIGKILL)
            assert send(batch(25, name="away"), known).status_code == 200
            limited = send(batch(25, name="more"), known)
            assert limited.status_code == 429
            stranger = send(batch(1, name="no"), unknown)
            assert (stranger.status_code, stranger.json()["error"]["code"]) == (503, "unavailable")
            assert "whether the key is a good one cannot be told now" in stranger.json()["error"]["message"]
            doubtful = send(batch(1, name="once"), known, **once)
            assert (doubtful.status_code, doubtful.json()["error"]["code"]) == (503, "unavailable")
            assert int(doubtful.headers["Retry-After"]) >= 1
            services.up(["redis"])
            answered: list[httpx.Response] = []

            def is_taken() -> bool:
                answered.append(send(batch(1, name="once"), known, **once))
                return answered[-1].status_code == 200

            assert wait_until(is_taken, timeout_s=60)
            assert send(batch(1, name="new"), unknown).status_code == 200
        expected = [f"before{i}" for i in range(10)] + [f"away{i}" for i in range(25)] + ["once0", "new0"]
        assert edge.keys_of_events() == sorted(expected)


@pytest.mark.parametrize("service", ["kafka", "redis"])
def test_requests_are_sent_once_though_a_service_is_killed_meanwhile(
    kafka: str, redis_url: str, make_services: MakeServices, service: str
) -> None:
    services = make_services()
    address = services.up([service]).get(service)
    assert address is not None
    brokers, url = (address, redis_url) if service == "kafka" else (kafka, address)
    source = make_source(make_topic(brokers, "once"))
    edge = Edge(brokers, url, source, make_source(make_topic(brokers, "unused"), key="shop"), f"test:{uuid4().hex}")
    key = edge.give_key()
    with edge.serving(timeout_s=1.0, **SHORT) as client:

        def send(number: int) -> httpx.Response:
            headers = NDJSON | key | {"Idempotency-Key": f"r{number}"}
            body = batch(10, name=f"r{number}-")
            return client.post(f"/v1/events/{source.topic}", content=body, headers=headers)

        assert send(0).status_code == 200
        (running,) = [status for status in services.status() if status.name == service]
        assert running.pid is not None
        with ThreadPoolExecutor(8) as pool:
            sending = [pool.submit(send, number) for number in range(1, 60)]
            sending[10].result()
            os.kill(running.pid, signal.SIGKILL)
            first = Counter(future.result().status_code for future in sending)
        assert first.keys() <= {200, 409, 503}
        assert first[503] > 0, first
        services.up([service])
        final: dict[int, httpx.Response] = {}

        def are_taken() -> bool:
            for number in set(range(60)) - final.keys():
                if (answer := send(number)).status_code == 200:
                    final[number] = answer
            return len(final) == 60

        assert wait_until(are_taken, timeout_s=120)
    found = records(brokers, source.topic)
    assert edge.keys_of_events() == sorted(f"r{number}-{i}" for number in range(60) for i in range(10))
    for number, answer in final.items():
        for row in answer.json()["rows"]:
            assert found[row["partition"], row["offset"]][0] == f"r{number}-{row['index']}".encode()


def test_a_user_with_the_named_rights_can_do_all_of_it(kafka: str, make_services: MakeServices) -> None:
    url = make_services().up(["redis"]).get("redis") or ""
    with redis.Redis.from_url(url) as admin:
        give_rights(admin)
    source = make_source(make_topic(kafka, "rights"))
    other = make_source(make_topic(kafka, "unused"), key="shop")
    edge = Edge(kafka, url.replace("://", "://headrace:secret@"), source, other, "headrace")
    key = edge.give_key() | {"Idempotency-Key": "1"}
    with edge.serving() as client:
        answers = [client.post(f"/v1/events/{source.topic}", content=event(), headers=JSON | key) for _ in "ab"]
    assert [answer.status_code for answer in answers] == [200, 200], answers[0].text
    assert answers[0].content == answers[1].content


def test_the_answer_of_a_large_batch_is_kept_small(edge: Edge) -> None:
    key = edge.give_key() | {"Idempotency-Key": "1"}
    with edge.serving() as client, redis.Redis.from_url(edge.redis_url) as store:
        path = f"/v1/events/{edge.source.topic}"
        first = client.post(path, content=batch(10_000), headers=NDJSON | key)
        again = client.post(path, content=batch(10_000), headers=NDJSON | key)
        (kept,) = store.keys(f"{edge.prefix}:producers:once:*")
        size = store.strlen(kept)
    assert (first.status_code, json.loads(first.content)["accepted"]) == (200, 10_000)
    assert again.content == first.content
    assert size < len(first.content) / 4
