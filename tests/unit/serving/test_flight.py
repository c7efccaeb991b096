import asyncio
from collections.abc import Mapping, Sequence

import pytest

from schemas.errors import SinkUnavailableError
from streams.serving.flight import Flights


class Store:
    """Holds each call until it is let go."""

    def __init__(self) -> None:
        self.calls: list[list[int]] = []
        self.gates: list[asyncio.Future[None]] = []
        self.called = asyncio.Event()

    async def fetch(self, keys: Sequence[int]) -> Mapping[int, str]:
        gate: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.calls.append(list(keys))
        self.gates.append(gate)
        self.called.set()
        await gate
        return {key: f"v{key}" for key in keys if key >= 0}

    async def until_called(self, times: int) -> None:
        while len(self.calls) < times:
            self.called.clear()
            await self.called.wait()


async def test_a_thousand_readers_of_one_key_are_one_call_of_one_key() -> None:
    store = Store()
    flights = Flights(store.fetch)
    early = [asyncio.create_task(flights.get([7])) for _ in range(500)]
    await store.until_called(1)
    late = [asyncio.create_task(flights.get([7])) for _ in range(500)]
    await asyncio.sleep(0)
    store.gates[0].set_result(None)
    answers = await asyncio.gather(*early, *late)
    assert answers == [{7: "v7"}] * 1_000
    assert store.calls == [[7]]


async def test_a_key_that_has_landed_is_fetched_anew() -> None:
    store = Store()
    flights = Flights(store.fetch)
    for n in range(2):
        reading = asyncio.create_task(flights.get([1]))
        await store.until_called(n + 1)
        store.gates[n].set_result(None)
        await reading
    assert store.calls == [[1], [1]]


async def test_keys_of_one_reader_go_together_and_with_those_of_others() -> None:
    store = Store()
    flights = Flights(store.fetch)
    readers = [asyncio.create_task(flights.get([n, n + 1, -1])) for n in range(3)]
    await store.until_called(1)
    store.gates[0].set_result(None)
    assert await asyncio.gather(*readers) == [{n: f"v{n}", n + 1: f"v{n + 1}"} for n in range(3)]
    assert store.calls == [[0, 1, -1, 2, 3]]


async def test_while_all_are_flying_keys_gather_for_the_next_flight() -> None:
    store = Store()
    flights = Flights(store.fetch, max_flying=1)
    first = asyncio.create_task(flights.get([0]))
    await store.until_called(1)
    rest = [asyncio.create_task(flights.get([n])) for n in range(1, 50)]
    await asyncio.sleep(0)
    assert store.calls == [[0]]
    store.gates[0].set_result(None)
    await first
    await store.until_called(2)
    store.gates[1].set_result(None)
    await asyncio.gather(*rest)
    assert store.calls == [[0], list(range(1, 50))]


async def test_a_full_flight_takes_on_no_other_reader() -> None:
    store = Store()
    flights = Flights(store.fetch, max_keys=3)
    readers = [asyncio.create_task(flights.get([n, n + 1, n + 2, n + 3])) for n in (0, 10)]
    await store.until_called(2)
    for gate in store.gates:
        gate.set_result(None)
    await asyncio.gather(*readers)
    assert store.calls == [[0, 1, 2, 3], [10, 11, 12, 13]]


async def test_an_error_is_told_to_each_reader_and_not_kept() -> None:
    calls = 0

    async def fail_once(keys: Sequence[int]) -> Mapping[int, str]:
        nonlocal calls
        calls += 1
        await asyncio.sleep(0)
        if calls == 1:
            msg = "away"
            raise SinkUnavailableError(msg)
        return dict.fromkeys(keys, "back")

    flights = Flights(fail_once)
    answers = await asyncio.gather(*(flights.get([1]) for _ in range(3)), return_exceptions=True)
    assert [str(answer) for answer in answers] == ["away"] * 3
    assert await flights.get([1]) == {1: "back"}


async def test_a_reader_that_is_cancelled_takes_nothing_from_the_others() -> None:
    store = Store()
    flights = Flights(store.fetch)
    leader, follower = asyncio.create_task(flights.get([1])), asyncio.create_task(flights.get([1]))
    await store.until_called(1)
    leader.cancel()
    with pytest.raises(asyncio.CancelledError):
        await leader
    store.gates[0].set_result(None)
    assert await follower == {1: "v1"}


async def test_an_error_that_nobody_waits_for_any_more_is_quiet() -> None:
    store = Store()
    flights = Flights(store.fetch)
    reader = asyncio.create_task(flights.get([1]))
    await store.until_called(1)
    reader.cancel()
    with pytest.raises(asyncio.CancelledError):
        await reader
    store.gates[0].set_exception(SinkUnavailableError("away"))
    await flights.close()


async def test_closing_tells_the_readers_on_board_and_those_that_wait() -> None:
    store = Store()
    flights = Flights(store.fetch, max_flying=1)
    flying = asyncio.create_task(flights.get([1]))
    await store.until_called(1)
    waiting = asyncio.create_task(flights.get([2]))
    await asyncio.sleep(0)
    await flights.close()
    for reader in (flying, waiting):
        with pytest.raises(SinkUnavailableError, match="closed while it was read"):
            await reader
    assert store.calls == [[1]]
