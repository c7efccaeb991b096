"""Single flights: what many readers ask for at the same time is fetched once, and together.

A reader's keys board the flight that leaves next, unless a flight that is on its way has them already; then the reader
waits for that one. So a key that a thousand readers want at once is one key of one call, whatever it is. While as many
flights as may be are on their way, keys gather for the next: the busier the store, the larger the calls.
"""

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Generic, TypeVar

from schemas.errors import SinkUnavailableError

Key = TypeVar("Key")
Value = TypeVar("Value")


@dataclass(eq=False)
class _Flight(Generic[Key, Value]):
    landed: asyncio.Future[Mapping[Key, Value]]
    keys: list[Key] = field(default_factory=list)


class Flights(Generic[Key, Value]):
    """Shares calls among the readers of one event loop.

    Args:
        fetch: Fetches the values of keys, in one call; what it leaves out, no reader gets.
        max_flying: How many calls may be on their way.
        max_keys: A flight with so many keys takes on no other reader's.
    """

    def __init__(
        self,
        fetch: Callable[[Sequence[Key]], Awaitable[Mapping[Key, Value]]],
        *,
        max_flying: int = 4,
        max_keys: int = 2_000,
    ) -> None:
        self._fetch = fetch
        self._max_flying = max_flying
        self._max_keys = max_keys
        self._by_key: dict[Key, _Flight[Key, Value]] = {}
        self._waiting: deque[_Flight[Key, Value]] = deque()
        self._flying: set[asyncio.Task[None]] = set()
        self._is_closed = False

    async def get(self, keys: Iterable[Key]) -> dict[Key, Value]:
        """Fetch values; those of one call of this method are in one call of ``fetch``, unless others have them already.

        Cancelling one reader takes nothing from the others.

        Raises:
            Exception: What ``fetch`` raised, to each of the flight's readers.
        """
        boarded: dict[_Flight[Key, Value], list[Key]] = {}
        own: _Flight[Key, Value] | None = None
        for key in keys:
            flight = self._by_key.get(key)
            if flight is None:
                flight = own = own or self._next()
                flight.keys.append(key)
                self._by_key[key] = flight
            boarded.setdefault(flight, []).append(key)
        if own is not None:
            # Not at once: who asks in the same turn of the loop comes along.
            asyncio.get_running_loop().call_soon(self._depart)
        found: dict[Key, Value] = {}
        for flight, its_keys in boarded.items():
            values = await asyncio.shield(flight.landed)
            found.update((key, values[key]) for key in its_keys if key in values)
        return found

    async def close(self) -> None:
        """Call off what is on its way or waits; its readers get a :class:`SinkUnavailableError`."""
        self._is_closed = True
        for task in self._flying:
            task.cancel()
        await asyncio.gather(*self._flying, return_exceptions=True)
        while self._waiting:
            self._call_off(self._waiting.popleft())

    def _next(self) -> _Flight[Key, Value]:
        if not self._waiting or len(self._waiting[-1].keys) >= self._max_keys:
            landed: asyncio.Future[Mapping[Key, Value]] = asyncio.get_running_loop().create_future()
            landed.add_done_callback(_mark_as_seen)
            self._waiting.append(_Flight(landed))
        return self._waiting[-1]

    def _depart(self) -> None:
        while self._waiting and len(self._flying) < self._max_flying and not self._is_closed:
            flight = self._waiting.popleft()
            task = asyncio.create_task(self._fly(flight))
            self._flying.add(task)
            task.add_done_callback(partial(self._land, flight))

    def _land(self, flight: _Flight[Key, Value], task: asyncio.Task[None]) -> None:
        self._flying.discard(task)
        self._call_off(flight)
        self._depart()

    async def _fly(self, flight: _Flight[Key, Value]) -> None:
        try:
            flight.landed.set_result(await self._fetch(flight.keys))
        except Exception as exc:  # it is its readers' to handle
            flight.landed.set_exception(exc)

    def _call_off(self, flight: _Flight[Key, Value]) -> None:
        """Let nobody board any more; those who still wait are told."""
        for key in flight.keys:
            if self._by_key.get(key) is flight:
                del self._by_key[key]
        if not flight.landed.done():
            msg = "the store was closed while it was read, expected it to stay open until all reads are done"
            flight.landed.set_exception(SinkUnavailableError(msg))


def _mark_as_seen(landed: asyncio.Future[Mapping[Key, Value]]) -> None:
    """Keep asyncio quiet about an error that nobody waited for, as all readers were cancelled."""
    if not landed.cancelled():
        landed.exception()
