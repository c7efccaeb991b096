"""Events over HTTP to a real Kafka: what is answered is what stands on the topic."""

import contextlib
import json
import os
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest
from aiokafka.partitioner import murmur2
from prometheus_client import CollectorRegistry

from infra.local.process import wait_until
from jobs.topic_reader import read_topic
from schemas.source import EventSource
from schemas.view import FeatureView
from streams.observability.serving import ServingMetrics
from streams.pipeline import PartitionPipeline
from streams.serving import event_intake
from tests.integration.conftest import MakeServices
from tests.support.events import T0_MS, make_source, make_views
from tests.support.kafka import make_topic
from tests.support.serving import make_intake, serving

NDJSON = {"Content-Type": "application/x-ndjson"}
JSON = {"Content-Type": "application/json"}
PARTITIONS = 3
NO_REDIS = "redis://127.0.0.1:1/0"


def event(**fields: Any) -> bytes:
    return json.dumps({"key": "a", "at": T0_MS, "n": 1} | fields).encode()


@contextlib.contextmanager
def taking(
    views: list[FeatureView], brokers: str, redis_url: str, *, metrics: ServingMetrics | None = None, **options: Any
) -> Iterator[httpx.Client]:
    """Serve an API that takes events of views."""
    metrics = metrics or ServingMetrics(CollectorRegistry())
    intake = make_intake(views, brokers, redis_url, metrics=metrics, **options)
    with (
        serving(views, NO_REDIS, intake=intake, metrics=metrics) as url,
        httpx.Client(base_url=url, timeout=60) as client,
    ):
        yield client


@pytest.fixture(scope="module")
def source(kafka: str) -> EventSource:
    return make_source(make_topic(kafka, "http", partitions=PARTITIONS))


@pytest.fixture(scope="module")
def metrics() -> ServingMetrics:
    return ServingMetrics(CollectorRegistry())


@pytest.fixture(scope="module")
def client(kafka: str, redis_url: str, source: EventSource, metrics: ServingMetrics) -> Iterator[httpx.Client]:
    framed = make_source("test.framed", **{"x-framing": "confluent"})
    with taking([*make_views(source), *make_views(framed, "shop")], kafka, redis_url, metrics=metrics) as client:
        yield client


def records(brokers: str, topic: str) -> dict[tuple[int, int], tuple[bytes | None, bytes | None, dict[str, bytes]]]:
    """Key, value and headers of each record, by partition and offset."""
    return {
        (batch.partition, int(offset)): (batch.keys[at], batch.values[at], dict(batch.headers[at] or ()))
        for batch in read_topic(brokers, topic)
        for at, offset in enumerate(batch.offsets)
    }


class TestOne:
    @pytest.mark.parametrize("key", ["a", "b", "c", "ä", "a longer key of many bytes"])
    def test_an_event_stands_where_the_answer_says(
        self, client: httpx.Client, kafka: str, source: EventSource, key: str
    ) -> None:
        body = b" " + event(key=key, extra=[1, {"x": None}]) + b"\n"  # as it came, to the byte
        own = f"r{len(key)}"
        answer = client.post(f"/v1/events/{source.topic}", content=body, headers=JSON | {"X-Request-Id": own})
        assert answer.status_code == 200, answer.text
        told = answer.json()
        assert (told["request_id"], told["source"]) == (own, source.topic)
        found = records(kafka, source.topic)[told["partition"], told["offset"]]
        assert found == (key.encode(), body, {"request_id": own.encode()})
        assert told["partition"] == (murmur2(key.encode()) & 0x7FFFFFFF) % PARTITIONS

    @pytest.mark.parametrize(
        ("body", "code", "text"),
        [
            (b"no JSON", "decode_error", "send one JSON object"),
            (event(n=-1), "schema_violation", "-1 is less than the minimum of 0"),
            (event(key=None), "missing_key", "`key` is null; give the entity key"),
            (event(at=T0_MS // 1_000), "timestamp_unit", "where it would lie in s; convert it"),
            (event(at=4_000_000_000_000), "future_timestamp", "expected at most 1m; correct the clock"),
            (event() + b"\n" + event(), "decode_error", "the payload is no JSON"),
        ],
    )
    def test_a_refused_one_is_told_why_and_is_not_on_the_topic(
        self, client: httpx.Client, kafka: str, source: EventSource, *, body: bytes, code: str, text: str
    ) -> None:
        before = records(kafka, source.topic)
        answer = client.post(f"/v1/events/{source.topic}", content=body, headers=JSON)
        assert answer.status_code == 422
        assert answer.json()["error"]["code"] == code
        assert text in answer.json()["error"]["message"]
        assert records(kafka, source.topic) == before


class TestBatch:
    def test_each_row_has_its_outcome(self, client: httpx.Client, kafka: str, source: EventSource) -> None:
        good = [event(key=f"k{i}", n=i) for i in range(300)]
        lines = [*good[:100], b"", b"broken", *good[100:], event(n=-1), b"  ", event(at=None)]
        answer = client.post(
            f"/v1/events/{source.topic}", content=b"\r\n".join(lines), headers=NDJSON | {"X-Request-Id": "batch"}
        )
        assert answer.status_code == 207
        told = answer.json()
        rows = told.pop("rows")
        assert told == {
            "request_id": "batch",
            "source": source.topic,
            "accepted": 300,
            "refused": 3,
            "unavailable": 0,
        }
        assert [row["index"] for row in rows] == list(range(303))
        refused = {row["index"]: row["reason"] for row in rows if row["status"] == "refused"}
        assert refused == {100: "decode_error", 301: "schema_violation", 302: "missing_event_time"}
        assert all(rows[index]["detail"] and rows[index]["remedy"] for index in refused)
        found = records(kafka, source.topic)
        accepted = [row for row in rows if row["status"] == "accepted"]
        for value, row in zip(good, accepted, strict=True):
            _, payload, headers = found[row["partition"], row["offset"]]
            assert (payload or b"").rstrip() == value
            assert headers == {"request_id": f"batch:{row['index']}".encode()}

    def test_events_of_a_key_keep_their_order(self, client: httpx.Client, source: EventSource) -> None:
        body = b"\n".join(event(key=f"k{i % 7}", n=i) for i in range(5_000))
        answer = client.post(f"/v1/events/{source.topic}", content=body, headers=NDJSON)
        assert answer.status_code == 200, answer.text[:500]
        assert answer.json()["accepted"] == 5_000
        last: dict[int, int] = {}
        for row in answer.json()["rows"]:
            assert row["offset"] > last.get(row["partition"], -1)
            last[row["partition"]] = row["offset"]

    def test_many_at_once_lose_nothing(self, client: httpx.Client, kafka: str, source: EventSource) -> None:
        def send(request: int) -> list[tuple[int, int]]:
            body = b"\n".join(event(key=f"{request}-{i}", n=i) for i in range(20))
            answer = client.post(f"/v1/events/{source.topic}", content=body, headers=NDJSON)
            assert answer.status_code == 200, answer.text[:500]
            return [(row["partition"], row["offset"]) for row in answer.json()["rows"]]

        with ThreadPoolExecutor(16) as pool:
            places = [place for found in pool.map(send, range(100)) for place in found]
        found = records(kafka, source.topic)
        assert len(set(places)) == 2_000
        assert {found[place][0] for place in places} == {f"{r}-{i}".encode() for r in range(100) for i in range(20)}


class TestRequests:
    @pytest.mark.parametrize(
        ("path", "body", "headers", "status", "code"),
        [
            ("none", event(), JSON, 404, "not_found"),
            ("no/ne", event(), JSON, 404, "not_found"),
            ("test.framed", event(), JSON, 415, "unsupported_source"),
            ("", b"{}", {"Content-Type": "text/plain"}, 415, "unsupported_media_type"),
            ("", b"{}", {}, 415, "unsupported_media_type"),
            ("", b"{}", JSON | {"Content-Encoding": "gzip"}, 415, "unsupported_media_type"),
            ("", b"", NDJSON, 422, "invalid_request"),
            ("", b" \n\r\n", NDJSON, 422, "invalid_request"),
            ("", b"", JSON, 422, "decode_error"),
            ("", event(pad="x" * 2**20), JSON, 413, "too_large"),
            ("", b"{}\n" * 10_001, NDJSON, 413, "too_large"),
            ("", b"x" * (event_intake.MAX_BATCH_BYTES + 1), NDJSON, 413, "too_large"),
        ],
    )
    def test_what_is_no_such_request_is_told_so(
        self,
        client: httpx.Client,
        source: EventSource,
        *,
        path: str,
        body: bytes,
        headers: dict[str, str],
        status: int,
        code: str,
    ) -> None:
        answer = client.post(f"/v1/events/{path or source.topic}", content=body, headers=headers)
        assert (answer.status_code, answer.json()["error"]["code"]) == (status, code)
        assert answer.json()["request_id"] == answer.headers["X-Request-Id"]
        assert answer.headers["X-Model-Version"] == "none"

    def test_a_body_that_comes_in_parts_is_bounded_too(self, client: httpx.Client, source: EventSource) -> None:
        def parts() -> Iterator[bytes]:
            for _ in range(40):
                yield b"x" * 100_000

        answer = client.post(f"/v1/events/{source.topic}", content=parts(), headers=JSON)
        assert (answer.status_code, answer.json()["error"]["code"]) == (413, "too_large")

    def test_an_event_of_the_largest_size_goes_through(self, client: httpx.Client, source: EventSource) -> None:
        body = event(pad="")
        body = event(pad="x" * (2**20 - len(body)))
        assert len(body) == 2**20
        answer = client.post(f"/v1/events/{source.topic}", content=body, headers=JSON)
        assert answer.status_code == 200, answer.text

    def test_outcomes_are_counted(self, client: httpx.Client, source: EventSource, metrics: ServingMetrics) -> None:
        def counted(outcome: str) -> float:
            labels = {"source": source.topic, "outcome": outcome}
            return metrics.registry.get_sample_value("headrace_http_events_total", labels) or 0.0

        before = counted("accepted"), counted("decode_error")
        body = b"\n".join([event(), event(), b"broken"])
        client.post(f"/v1/events/{source.topic}", content=body, headers=NDJSON)
        assert (counted("accepted"), counted("decode_error")) == (before[0] + 2, before[1] + 1)


def test_the_request_id_goes_into_the_feature_row_that_the_event_makes(kafka: str, redis_url: str) -> None:
    source = make_source(make_topic(kafka, "traced"))
    views = make_views(source)
    with taking(views, kafka, redis_url) as client:
        body = b"\n".join(event(key=f"k{i}") for i in range(3))
        client.post(f"/v1/events/{source.topic}", content=body, headers=NDJSON | {"X-Request-Id": "many"})
        own = client.post(f"/v1/events/{source.topic}", content=event(key="k3"), headers=JSON).json()["request_id"]
    pipeline = PartitionPipeline(source, views, partition=0)
    found = {}
    for batch in read_topic(kafka, source.topic):
        processed = pipeline.process(batch, processing_time_us=0, computed_time_us=0, epoch=1)
        rows = processed.rows["by_key"]
        found.update(zip(rows.column("key").to_pylist(), rows.column("request_id").to_pylist(), strict=True))
    assert found == {"k0": "many:0", "k1": "many:1", "k2": "many:2", "k3": own}


class TestKafkaAway:
    def test_it_is_told_so_at_once_after_a_few_and_taken_when_it_is_back(
        self, make_services: MakeServices, redis_url: str
    ) -> None:
        services = make_services()
        brokers = services.up(["kafka"]).get("kafka")
        assert brokers is not None
        source = make_source(make_topic(brokers, "away"))
        body = b"\n".join(event(key=f"k{i}") for i in range(10)) + b"\nbroken"
        with taking(make_views(source), brokers, redis_url, delivery_timeout_s=1.5) as client:

            def send() -> httpx.Response:
                return client.post(f"/v1/events/{source.topic}", content=body, headers=NDJSON)

            assert send().json()["accepted"] == 10
            (running,) = [status for status in services.status() if status.name == "kafka"]
            assert running.pid is not None
            os.kill(running.pid, signal.SIGKILL)
            with ThreadPoolExecutor(8) as pool:
                answers = list(pool.map(lambda _: send(), range(16)))
            for answer in answers:
                assert answer.status_code == 503, answer.text
                assert answer.json()["error"]["code"] == "unavailable"
                assert int(answer.headers["Retry-After"]) >= 1
                assert answer.headers["X-Request-Id"]
            assert any("it is left alone" in send().json()["error"]["message"] for _ in range(3))
            services.up(["kafka"])
            answered: list[httpx.Response] = []

            def is_taken() -> bool:
                answered.append(send())
                return answered[-1].status_code == 207

            assert wait_until(is_taken, timeout_s=60)
            assert answered[-1].json()["accepted"] == 10
        places = [(row["partition"], row["offset"]) for row in answered[-1].json()["rows"][:10]]
        found = records(brokers, source.topic)
        assert [found[place][0] for place in places] == [f"k{i}".encode() for i in range(10)]

    def test_a_topic_that_is_not_there_is_no_reason_to_fail(self, kafka: str, redis_url: str) -> None:
        source = make_source("test.http.never.made")
        with taking(make_views(source), kafka, redis_url, delivery_timeout_s=1.5) as client:
            answer = client.post(f"/v1/events/{source.topic}", content=event(), headers=JSON)
        assert answer.status_code == 503
        assert "Kafka has not acknowledged 1 events" in answer.json()["error"]["message"]

    def test_events_that_are_too_large_for_the_topic_are_refused_by_themselves(
        self, kafka: str, redis_url: str
    ) -> None:
        source = make_source(make_topic(kafka, "narrow", config={"max.message.bytes": "5000"}))
        with taking(make_views(source), kafka, redis_url) as client:
            alone = client.post(f"/v1/events/{source.topic}", content=event(pad=os.urandom(9_000).hex()), headers=JSON)
            fits = client.post(f"/v1/events/{source.topic}", content=event(), headers=JSON)
        assert (alone.status_code, alone.json()["error"]["code"]) == (413, "too_large")
        assert fits.status_code == 200
