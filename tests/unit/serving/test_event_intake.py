"""What requests with events may take from each other and from readers, over a Kafka that answers as it is told to."""

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any

import httpx
import pytest
from prometheus_client import CollectorRegistry

from schemas.errors import SinkUnavailableError
from streams.breaker import FAILURES
from streams.observability.serving import ServingMetrics
from streams.serving import event_intake
from streams.serving.api import make_api
from streams.serving.edge import App
from streams.serving.event_admission import make_admissions
from streams.serving.event_intake import EventIntake
from streams.serving.producer_key import ProducerKey, Rate
from streams.transport.event_producer import Delivered, EventRecord, Undelivered
from tests.support.events import make_source, make_views

NOW_US = 1_700_000_000_000_000
VALUE = b'{"key": "a", "shop": 3, "at": 1700000000000, "n": 1}'
TIMED_OUT = Undelivered("timed out")
QUEUE_IS_FULL = Undelivered("64 MiB wait for Kafka already", is_unsent=True)
KEY = ProducerKey(name="shop", digest="", sources=("*",), rate=Rate(10, 10), created_at="2026-01-01T00:00:00Z")
VIEWS = [*make_views(make_source("one")), *make_views(make_source("two", key="shop"), "shop")]


class FakeProducer:
    """Answers with what is said of a topic; delivers where nothing is."""

    def __init__(self) -> None:
        self.outcomes: dict[str, Undelivered] = {}

    async def send(
        self, topic: str, records: Sequence[EventRecord], *, timestamp_ms: int
    ) -> list[Delivered | Undelivered]:
        return [self.outcomes.get(topic, Delivered(0, timestamp_ms)) for _ in records]

    async def __aenter__(self) -> "FakeProducer":
        return self

    async def __aexit__(self, *_: object) -> None:
        """Nothing is under way."""


class FakeStore:
    """Is never asked."""

    async def __aenter__(self) -> "FakeStore":
        return self

    async def __aexit__(self, *_: object) -> None:
        """Nothing is open."""


class OpenGate:
    """Lets everybody in."""

    async def identify(self, _authorization: str | None, *, source: str) -> ProducerKey:
        return KEY

    async def take(self, _key: ProducerKey, *, events: int) -> list[Any]:
        return []


class HeldOnce:
    """Lets requests with an idempotency key wait, and then fail."""

    def __init__(self) -> None:
        self.has_come, self.may_go = asyncio.Event(), asyncio.Event()

    async def wait(self, _key: str, **_: Any) -> Any:
        self.has_come.set()
        await self.may_go.wait()
        msg = "nobody answered"
        raise SinkUnavailableError(msg)


class Rig:
    def __init__(self) -> None:
        self.producer, self.once = FakeProducer(), HeldOnce()
        self.metrics = ServingMetrics(CollectorRegistry())
        fakes: dict[str, Any] = {
            "store": FakeStore(),
            "gate": OpenGate(),
            "once": self.once,
            "make_producer": lambda: self.producer,
            "find_sent": None,
        }
        admissions, _ = make_admissions(VIEWS)
        self.intake = EventIntake(admissions, metrics=self.metrics, clock_us=lambda: NOW_US, **fakes)

    async def send(self, topic: str) -> object:
        (outcome,) = await self.intake.take(self.intake.find(topic), [VALUE], request_ids=["r"])
        return outcome

    def api(self) -> App:
        views = {view.name: view for view in VIEWS}

        def no_store() -> Any:
            pytest.fail("nobody reads here")

        return make_api(views, make_store=no_store, intake=self.intake, metrics=self.metrics)


@pytest.fixture
async def rig() -> AsyncIterator[Rig]:
    rig = Rig()
    async with rig.intake:
        yield rig


async def test_a_topic_that_takes_nothing_is_left_alone_and_the_others_are_not(rig: Rig) -> None:
    rig.producer.outcomes["one"] = TIMED_OUT
    for _ in range(FAILURES):
        with pytest.raises(SinkUnavailableError, match="timed out"):
            await rig.send("one")
    with pytest.raises(SinkUnavailableError, match="Kafka's topic one has not answered 5 times in a row"):
        await rig.send("one")
    assert isinstance(await rig.send("two"), Delivered)


async def test_a_queue_of_our_own_that_is_full_does_not_say_that_kafka_is_away(rig: Rig) -> None:
    rig.producer.outcomes["one"] = QUEUE_IS_FULL
    for _ in range(FAILURES + 1):
        with pytest.raises(SinkUnavailableError, match="64 MiB wait for Kafka already"):
            await rig.send("one")
    del rig.producer.outcomes["one"]
    assert isinstance(await rig.send("one"), Delivered)


async def _wait_for_key(rig: Rig, client: httpx.AsyncClient, _may_go: asyncio.Event) -> httpx.Response:
    return await client.post("/v1/events/one", content=VALUE, headers={"Idempotency-Key": "1"})


async def _wait_for_body(rig: Rig, client: httpx.AsyncClient, may_go: asyncio.Event) -> httpx.Response:
    async def body() -> AsyncIterator[bytes]:
        yield VALUE[:5]
        rig.once.has_come.set()
        await may_go.wait()
        yield VALUE[5:]

    return await client.post("/v1/events/one", content=body())


@pytest.mark.parametrize(("wait", "status"), [(_wait_for_key, 503), (_wait_for_body, 200)])
async def test_requests_that_wait_before_they_are_sent_are_counted_too(
    rig: Rig,
    monkeypatch: pytest.MonkeyPatch,
    wait: Callable[[Rig, httpx.AsyncClient, asyncio.Event], Any],
    status: int,
) -> None:
    monkeypatch.setattr(event_intake, "MAX_REQUESTS", 1)
    transport = httpx.ASGITransport(rig.api())  # type: ignore[arg-type]  # its own words for the same
    headers = {"Content-Type": "application/json"}
    async with httpx.AsyncClient(transport=transport, base_url="http://api", headers=headers) as client:
        waiting = asyncio.create_task(wait(rig, client, rig.once.may_go))
        await rig.once.has_come.wait()
        refused = await client.post("/v1/events/one", content=VALUE)
        assert refused.status_code == 503
        assert "1 requests with events are being worked on" in refused.json()["error"]["message"]
        assert (await client.get("/v1/views")).status_code == 200
        rig.once.may_go.set()
        assert (await waiting).status_code == status
        assert (await client.post("/v1/events/one", content=VALUE)).status_code == 200
