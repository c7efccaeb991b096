import json
import threading
from typing import Any

import pytest
from confluent_kafka import KafkaError, Message

from jobs.flights import scoreboard as scoreboard_module
from jobs.flights.model import LATE_ARRIVAL
from jobs.flights.scoreboard import Scoreboard
from jobs.flights.views import landings
from schemas.errors import ServiceError
from tests.support.transport import make_message


class FakeConsumer:
    def __init__(self, _: Any) -> None:
        self.batches: list[list[Message]] = []
        self.has_read_all = threading.Event()
        self.closed = False
        made.append(self)

    def assign(self, _: Any) -> None:
        self.batches = list(queued)

    def consume(self, _: int, timeout: float) -> list[Message]:
        if self.batches:
            return self.batches.pop(0)
        self.has_read_all.set()
        threading.Event().wait(0.001)
        return []

    def close(self) -> None:
        self.closed = True


made: list[FakeConsumer] = []
queued: list[list[Message]] = []


@pytest.fixture(autouse=True)
def _fakes(monkeypatch: pytest.MonkeyPatch) -> None:
    made.clear()
    queued.clear()
    monkeypatch.setattr(scoreboard_module, "Consumer", FakeConsumer)


def score(flight: str, probability: float) -> Message:
    document = {"entity": flight, "late_probability": probability, "complete": True}
    return make_message((LATE_ARRIVAL.topic, 0), content=json.dumps(document).encode())


def landing(flight: str, delay: float) -> Message:
    return make_message((landings.topic, 0), content=json.dumps({"flight_id": flight, "arrival_delay": delay}).encode())


def test_scores_are_measured_against_the_landings_that_follow() -> None:
    queued.append([score("a", 0.9), score("b", 0.2), score("c", 0.3), landing("a", 60), landing("b", 0)])
    queued.append([landing("c", 40), make_message((landings.topic, 0), content=b"{corrupted")])
    board = Scoreboard("nobody", start_offsets={})
    assert made[0].has_read_all.wait(5)
    quality = board.quality()
    board.close()
    assert (quality.flights, quality.late_share) == (3, pytest.approx(2 / 3))
    assert quality.auc == 1.0
    assert quality.brier == pytest.approx((0.1**2 + 0.2**2 + 0.7**2) / 3)


@pytest.mark.parametrize(
    ("message", "told"),
    [
        (make_message((LATE_ARRIVAL.topic, 0), content=b'{"entity": "a"}'), "late_probability"),
        (make_message(("t", 0), failure=KafkaError(KafkaError.TOPIC_AUTHORIZATION_FAILED)), "AUTHORIZATION"),
    ],
)
def test_a_failure_while_following_shows(message: Message, told: str) -> None:
    queued.append([message])
    board = Scoreboard("nobody", start_offsets={})
    board._thread.join(5)
    with pytest.raises(ServiceError, match=rf"can no longer be followed: .*{told}"):
        board.quality()
    board.close()
    assert made[0].closed


def test_brokers_that_are_away_are_waited_for() -> None:
    queued.append([make_message(("t", 0), failure=KafkaError(KafkaError._ALL_BROKERS_DOWN))])
    queued.append([score("a", 0.9), landing("a", 60)])
    board = Scoreboard("nobody", start_offsets={})
    assert made[0].has_read_all.wait(5)
    assert board.quality().flights == 1
    board.close()
