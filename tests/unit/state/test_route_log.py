"""How far sources have been routed: written in the epoch, read again, never mistaken for that of another definition."""

import asyncio
import dataclasses
from typing import Any

import pytest

from schemas.entity import Entity
from schemas.errors import StateVersionError
from schemas.view_input import ViewInput
from streams.repartition import RouteState
from streams.state import route_log
from streams.state.route_log import read_routes, route_topic, write_route
from tests.support.builders import make_source

INPUT = ViewInput((make_source(key="kind"),), Entity("thing", key="key"))
CHANGED = ViewInput((make_source(key="kind", max_out_of_orderness="9s"),), Entity("thing", key="key"))
DONE = RouteState(next_offset=7, watermark_us=5, broker_time_us=4, is_idle=True, told_us=5, is_told_idle=True)


class Log:
    """The topic, as the records that were written to it."""

    def __init__(self) -> None:
        self.records: list[tuple[bytes | None, bytes | None]] = []

    def begin(self) -> int:
        return 1

    async def write(self, topic: str, *, key: bytes | None, value: bytes | None, **_: Any) -> None:
        assert topic == "state.repartition.test.events.key"
        self.records.append((key, value))


@dataclasses.dataclass
class Message:
    content: tuple[bytes | None, bytes | None]

    def key(self) -> bytes | None:
        return self.content[0]

    def value(self) -> bytes | None:
        return self.content[1]

    def topic(self) -> str:
        return "state.repartition.test.events.key"

    def partition(self) -> int:
        return 1

    def offset(self) -> int:
        return 3


@pytest.fixture
def log(monkeypatch: pytest.MonkeyPatch) -> Log:
    made = Log()

    def read_all(_: Any, records: Any) -> None:
        sink = records[route_topic(INPUT), 1]
        for content in made.records:
            sink.add(Message(content))

    monkeypatch.setattr(route_log, "count_partitions", lambda _, topics: dict.fromkeys(topics, 2))
    monkeypatch.setattr(route_log, "read_committed", read_all)
    return made


def write(log: Log, view_input: ViewInput, state: RouteState, *, partition: int = 3, application: str = "shop") -> None:
    place = {"application": application, "source": "test.events", "partition": partition}
    asyncio.run(write_route(log, view_input, state, **place))


def read(*inputs: ViewInput) -> dict[tuple[str, str, int], RouteState]:
    return read_routes({}, inputs, application="shop")


def test_the_newest_place_of_each_partition_is_read_again(log: Log) -> None:
    write(log, INPUT, RouteState())
    write(log, INPUT, DONE)
    write(log, INPUT, RouteState(next_offset=2), partition=0)

    assert read(INPUT) == {
        (INPUT.topic, "test.events", 3): DONE,
        (INPUT.topic, "test.events", 0): RouteState(next_offset=2),
    }


def test_another_application_has_places_of_its_own(log: Log) -> None:
    write(log, INPUT, DONE, application="other")

    assert read(INPUT) == {}


def test_a_changed_source_begins_anew(log: Log) -> None:
    write(log, INPUT, DONE)

    assert CHANGED.topic == INPUT.topic
    assert read(CHANGED) == {}


@pytest.mark.parametrize("record", [(b"position", b"{}"), (None, b"{}"), (b"%h/shop/test.events/3", b'{"offset": 1}')])
def test_what_is_no_place_is_refused_with_what_to_do(log: Log, record: tuple[bytes | None, bytes]) -> None:
    key, value = record
    log.records.append((key and key.replace(b"%h", INPUT.definition_hash.encode()), value))

    with pytest.raises(StateVersionError, match=r"@3 is no place of a source .*delete state\.repartition\."):
        read(INPUT)


def test_nothing_is_asked_of_the_broker_where_nothing_is_routed() -> None:
    assert read() == {}
