"""What the roles have in common: one event after the other, and an end without a commit where one fails."""

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import faust
import pytest
from prometheus_client import CollectorRegistry

from streams.agents.worker import consume, consumer_config, create_app
from streams.observability.metrics import Metrics
from streams.transport.options import ConsumerOptions
from tests.support.transport import make_batch


class FakeStream:
    """A stream of events, as an agent sees it."""

    def __init__(self, *events: Any) -> None:
        self._events = events

    def noack(self) -> "FakeStream":
        return self

    async def events(self) -> Any:
        for event in self._events:
            yield event


def make_event(first_offset: int, *, generation: int = 1) -> Any:
    event = SimpleNamespace(
        value=make_batch([b"x"] * 5, first_offset=first_offset),
        message=SimpleNamespace(generation_id=generation),
        acked=False,
    )
    event.ack = lambda: setattr(event, "acked", True)
    return event


@pytest.fixture
def options() -> ConsumerOptions:
    return ConsumerOptions(kafka={})


@pytest.fixture
async def app(options: ConsumerOptions) -> faust.App:
    made = create_app(
        "test", brokers="127.0.0.1:1", options=options, metrics=Metrics(CollectorRegistry()), commit_interval_s=1.0
    )
    made._consumer = SimpleNamespace(is_current=lambda event: event.message.generation_id == 1)
    return made


async def run_agent(app: faust.App, *events: Any) -> None:
    (agent,) = app.agents.values()
    await agent.fun(FakeStream(*events))


async def test_events_are_handled_in_order(app: faust.App) -> None:
    handled = []

    async def handle(event: Any) -> None:
        handled.append(int(event.value.offsets[0]))

    consume(app, "t", handle)
    await run_agent(app, make_event(0), make_event(5), make_event(10))
    assert handled == [0, 5, 10]


async def test_an_event_of_an_assignment_that_is_over_is_left_out(app: faust.App) -> None:
    handled = []

    async def handle(event: Any) -> None:
        handled.append(int(event.value.offsets[0]))

    consume(app, "t", handle)
    await run_agent(app, make_event(0, generation=0), make_event(5))
    assert handled == [5]


async def test_an_event_whose_partitions_go_while_it_waits_is_left_out(app: faust.App) -> None:
    handled = []
    lock = asyncio.Lock()

    async def handle(event: Any) -> None:
        handled.append(event)

    consume(app, "t", handle, lock=lock)
    event = make_event(0)
    async with lock:
        agent = asyncio.ensure_future(run_agent(app, event))
        await asyncio.sleep(0)
        event.message.generation_id = 0
    await agent
    assert handled == []


async def test_a_failure_ends_the_worker_and_nothing_is_handled_or_committed_any_more(
    app: faust.App, options: ConsumerOptions, caplog: pytest.LogCaptureFixture
) -> None:
    handled = []

    async def handle(event: Any) -> None:
        handled.append(event)
        msg = "a bad batch"
        raise ValueError(msg)

    consume(app, "t", handle)
    first, second = make_event(0), make_event(5)
    with pytest.raises(ValueError, match="a bad batch"):
        await run_agent(app, first)
    assert options.has_failed
    assert str(app.crash_reason) == "a bad batch"
    assert not first.acked
    assert "t-0, offsets 0 to 4: failed" in caplog.text
    await run_agent(app, second)  # as Faust does, which starts an agent that failed again
    assert handled == [first]


def test_the_consumer_takes_committed_data_alone_and_commits_nothing_by_itself() -> None:
    config = consumer_config("features", brokers="a:1")
    assert config["group.id"] == "headrace.features"
    assert config["isolation.level"] == "read_committed"
    assert config["enable.auto.commit"] is False
    assert config["enable.auto.offset.store"] is False
    assert config["auto.offset.reset"] == "error"
    assert config["session.timeout.ms"] < config["max.poll.interval.ms"]


def names_in(directory: Path) -> list[str]:
    return [path.name for path in directory.iterdir()]


async def test_a_worker_leaves_no_directories_where_it_runs(
    app: faust.App, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    await app.on_first_start()
    assert names_in(tmp_path) == []
