"""Calls on the way side by side, and what they give, handed on in the order in which they began."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Generic, TypeVar

from schemas.errors import InferenceError

Item = TypeVar("Item")
Made = TypeVar("Made")


class InFlight(Generic[Item, Made]):
    """Makes calls, several at once; belongs to one event loop.

    Nothing is handed on past a gap: where a call fails, or an item is given up before it had a place, what is behind it
    fails too, and nothing more is taken.

    Args:
        call: Makes something of an item.
        hand_on: Given each item and what was made of it, one after the other, in the order of :meth:`put`.
        places: How many items may be on the way, up to where they are handed on.
        failed: Told once that :meth:`check` has something to raise.
    """

    def __init__(
        self,
        call: Callable[[Item], Awaitable[Made]],
        *,
        hand_on: Callable[[Item, Made], Awaitable[None]],
        places: int,
        failed: Callable[[], None],
    ) -> None:
        self._call = call
        self._hand_on = hand_on
        self._failed = failed
        self._places = asyncio.Semaphore(places)
        self._running: set[asyncio.Task[None]] = set()
        self._last: asyncio.Task[None] | None = None
        self._fault: BaseException | None = None

    async def room(self) -> None:
        """Wait until there is a free place; it is not kept."""
        async with self._places:
            pass

    async def put(self, item: Item) -> None:
        """Begin with an item, once there is a place for it.

        Raises:
            Exception: What a call, or handing on, has failed with.
        """
        try:
            await self._places.acquire()
        except asyncio.CancelledError:
            self._fail(InferenceError("a batch was given up while it waited for a place; the worker must start again"))
            raise
        if self._fault is not None:
            self._places.release()
            raise self._fault
        self._last = asyncio.create_task(self._run(item, after=self._last))
        self._running.add(self._last)
        self._last.add_done_callback(self._end)

    async def settle(self) -> None:
        """Wait until all items are handed on.

        Raises:
            Exception: What a call, or handing on, has failed with.
        """
        while self._running:
            await asyncio.wait(self._running)
        self.check()

    async def cancel(self) -> None:
        """End all calls; nothing of them is handed on any more."""
        for task in self._running:
            task.cancel()
        await asyncio.gather(*self._running, return_exceptions=True)

    def check(self) -> None:
        """Raise what a call, or handing on, has failed with, if one has."""
        if self._fault is not None:
            raise self._fault

    async def _run(self, item: Item, *, after: asyncio.Task[None] | None) -> None:
        made = await self._call(item)
        if after is not None:
            await asyncio.wait({after})
            after.result()
        await self._hand_on(item, made)

    def _end(self, task: asyncio.Task[None]) -> None:
        self._running.discard(task)
        if task is self._last:
            self._last = None
        if not task.cancelled() and (fault := task.exception()) is not None:
            self._fail(fault)
        self._places.release()

    def _fail(self, fault: BaseException) -> None:
        if self._fault is None:
            self._fault = fault
            self._failed()
