"""What becomes of the thread that tells of events when something goes wrong in it."""

import asyncio
import queue
from collections.abc import Callable
from typing import Any

import pytest
from confluent_kafka import KafkaError, KafkaException

from streams.transport.event_producer import Delivered, EventProducer, EventRecord, Undelivered

RECORD = EventRecord(key=b"k", value=b"{}", headers=[])
WAIT_S = 20.0


class Acknowledged:
    """A record that stands at an offset."""

    def __init__(self, offset: int) -> None:
        self._offset = offset

    def partition(self) -> int:
        return 0

    def offset(self) -> int:
        return self._offset


class Unreadable(Acknowledged):
    """A record that cannot be asked."""

    def partition(self) -> int:
        msg = "no such record"
        raise RuntimeError(msg)


class FakeClient:
    """Tells of each record what is next on its list, in the thread that polls."""

    def __init__(self, outcomes: list[tuple[KafkaError | None, Acknowledged]]) -> None:
        self._outcomes = outcomes
        self._told: queue.Queue[Callable[[], None]] = queue.Queue()

    def produce(self, *_: Any, on_delivery: Callable[[KafkaError | None, Acknowledged], None], **__: Any) -> None:
        outcome = self._outcomes.pop(0)
        self._told.put(lambda: on_delivery(*outcome))

    def poll(self, timeout_s: float) -> None:
        try:
            tell = self._told.get(timeout=timeout_s) if timeout_s else self._told.get_nowait()
        except queue.Empty:
            return
        tell()

    def flush(self, _timeout_s: float) -> int:
        return 0

    def __len__(self) -> int:
        return 0


async def send(producer: EventProducer) -> Delivered | Undelivered:
    (outcome,) = await asyncio.wait_for(producer.send("t", [RECORD], timestamp_ms=1), WAIT_S)
    return outcome


async def test_a_callback_that_fails_leaves_no_later_event_waiting(caplog: pytest.LogCaptureFixture) -> None:
    client = FakeClient([(None, Unreadable(0)), (None, Acknowledged(1))])
    async with EventProducer("none", make_producer=lambda _: client) as producer:
        assert await send(producer) == Undelivered("Kafka has not said where it is")
        assert await send(producer) == Delivered(0, 1)
    assert "no such record" in caplog.text


async def test_where_no_client_can_take_the_place_of_one_that_failed_events_are_told_of_and_it_is_tried_again() -> None:
    fatal = KafkaError(KafkaError.OUT_OF_ORDER_SEQUENCE_NUMBER, "out of order", fatal=True)
    failing = FakeClient([(fatal, Acknowledged(0)), (fatal, Acknowledged(0))])
    makes: list[FakeClient | KafkaException] = [
        failing,
        KafkaException(KafkaError(KafkaError._CRIT_SYS_RESOURCE, "no threads left")),
        FakeClient([(None, Acknowledged(7))]),
    ]

    def make(_: dict[str, Any]) -> FakeClient:
        made = makes.pop(0)
        if isinstance(made, KafkaException):
            raise made
        return made

    async with EventProducer("none", make_producer=make) as producer:
        for _ in range(2):
            assert await send(producer) == Undelivered("out of order")
        assert await send(producer) == Delivered(0, 7)
