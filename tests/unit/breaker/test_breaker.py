import asyncio

import pytest

from schemas.errors import SinkRejectedError, SinkUnavailableError
from streams import breaker as module
from streams.breaker import Breaker


class Clock:
    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now_s = 100.0
        monkeypatch.setattr("circuitbreaker.monotonic", lambda: self.now_s)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    return Clock(monkeypatch)


class Store:
    def __init__(self) -> None:
        self.calls = 0
        self.error: Exception | None = SinkUnavailableError("away")

    async def __call__(self) -> str:
        self.calls += 1
        await asyncio.sleep(0)
        if self.error is not None:
            raise self.error
        return "answer"


async def open_it(breaker: Breaker, store: Store) -> None:
    for _ in range(module.FAILURES):
        with pytest.raises(SinkUnavailableError, match="away"):
            await breaker.call(store)


async def test_a_store_that_does_not_answer_is_left_alone(clock: Clock) -> None:
    breaker, store = Breaker("Redis"), Store()
    await open_it(breaker, store)
    assert breaker.is_open
    with pytest.raises(SinkUnavailableError, match="Redis has not answered 5 times in a row") as caught:
        await breaker.call(store)
    assert caught.value.retry_after_ms == 1_000
    assert store.calls == module.FAILURES


async def test_after_the_pause_one_call_goes_ahead_and_the_others_are_turned_away(clock: Clock) -> None:
    breaker, store = Breaker("Redis"), Store()
    await open_it(breaker, store)
    clock.now_s += module.PAUSE_S
    store.error = None
    answers = await asyncio.gather(*(breaker.call(store) for _ in range(10)), return_exceptions=True)
    assert answers.count("answer") == 1
    assert store.calls == module.FAILURES + 1
    assert not breaker.is_open
    assert await breaker.call(store) == "answer"


async def test_a_probe_that_fails_leaves_it_alone_for_another_pause(clock: Clock) -> None:
    breaker, store = Breaker("Redis"), Store()
    await open_it(breaker, store)
    clock.now_s += module.PAUSE_S
    for _ in range(2):
        with pytest.raises(SinkUnavailableError):
            await breaker.call(store)
    assert store.calls == module.FAILURES + 1
    clock.now_s += module.PAUSE_S
    store.error = None
    assert await breaker.call(store) == "answer"


async def test_a_probe_that_is_cancelled_lets_another_one_go(clock: Clock) -> None:
    breaker, store = Breaker("Redis"), Store()
    await open_it(breaker, store)
    clock.now_s += module.PAUSE_S
    probe = asyncio.create_task(breaker.call(store))
    await asyncio.sleep(0)
    probe.cancel()
    with pytest.raises(asyncio.CancelledError):
        await probe
    store.error = None
    assert await breaker.call(store) == "answer"


async def test_what_is_refused_is_an_answer(clock: Clock) -> None:
    breaker, store = Breaker("Redis"), Store()
    store.error = SinkRejectedError("no")
    for _ in range(2 * module.FAILURES):
        with pytest.raises(SinkRejectedError):
            await breaker.call(store)
    assert not breaker.is_open
