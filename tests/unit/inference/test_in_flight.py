import asyncio

import pytest

from schemas.errors import InferenceError
from streams.inference.in_flight import InFlight


class Bench:
    """Calls that answer when they are told, and a record of what is handed on."""

    def __init__(self, *, places: int = 2) -> None:
        self.asked: dict[str, asyncio.Future[str]] = {}
        self.began: list[str] = []
        self.handed_on: list[tuple[str, str]] = []
        self.failures = 0
        self.in_flight = InFlight[str, str](self.call, hand_on=self.hand_on, places=places, failed=self.fail)

    async def call(self, item: str) -> str:
        self.began.append(item)
        return await self.asked.setdefault(item, asyncio.get_running_loop().create_future())

    async def hand_on(self, item: str, made: str) -> None:
        self.handed_on.append((item, made))

    def fail(self) -> None:
        self.failures += 1

    async def answer(self, item: str, made: str | Exception) -> None:
        future = self.asked.setdefault(item, asyncio.get_running_loop().create_future())
        if isinstance(made, Exception):
            future.set_exception(made)
        else:
            future.set_result(made)
        await settled_loop()


async def settled_loop() -> None:
    for _ in range(10):
        await asyncio.sleep(0)


async def test_what_is_made_is_handed_on_in_the_order_in_which_it_began():
    bench = Bench()
    await bench.in_flight.put("a")
    await bench.in_flight.put("b")
    await bench.answer("b", "B")
    assert bench.handed_on == []

    await bench.answer("a", "A")

    assert bench.handed_on == [("a", "A"), ("b", "B")]


async def test_a_place_is_free_once_its_item_is_handed_on():
    bench = Bench()
    await bench.in_flight.put("a")
    await bench.in_flight.put("b")
    third = asyncio.ensure_future(bench.in_flight.put("c"))
    room = asyncio.ensure_future(bench.in_flight.room())
    await bench.answer("b", "B")
    assert not third.done()
    assert not room.done()

    await bench.answer("a", "A")

    await third
    await room
    assert bench.began == ["a", "b", "c"]


async def test_nothing_is_handed_on_behind_a_call_that_fails_and_nothing_more_is_taken():
    bench = Bench(places=3)
    for item in ("a", "b", "c"):
        await bench.in_flight.put(item)
    await bench.answer("c", "C")
    await bench.answer("b", ValueError("no B"))
    await bench.answer("a", "A")

    with pytest.raises(ValueError, match="no B"):
        await bench.in_flight.settle()
    with pytest.raises(ValueError, match="no B"):
        await bench.in_flight.put("d")
    with pytest.raises(ValueError, match="no B"):
        bench.in_flight.check()
    assert bench.handed_on == [("a", "A")]
    assert bench.began == ["a", "b", "c"]
    assert bench.failures == 1
    await bench.in_flight.room()  # those that failed hold no places


async def test_an_item_that_is_given_up_before_it_has_a_place_is_a_gap():
    bench = Bench(places=1)
    await bench.in_flight.put("a")
    waiting = asyncio.ensure_future(bench.in_flight.put("b"))
    await settled_loop()
    waiting.cancel()
    await bench.answer("a", "A")

    with pytest.raises(InferenceError, match="given up while it waited for a place"):
        await bench.in_flight.put("c")
    assert bench.handed_on == [("a", "A")]


async def test_what_is_cancelled_is_not_handed_on_and_is_no_failure():
    bench = Bench()
    await bench.in_flight.put("a")
    await bench.in_flight.put("b")
    await bench.answer("b", "B")

    await bench.in_flight.cancel()

    assert bench.handed_on == []
    assert bench.failures == 0
    await bench.in_flight.settle()


async def test_there_is_nothing_to_wait_for_where_nothing_is_on_the_way():
    await Bench().in_flight.settle()
