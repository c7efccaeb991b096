"""Decodes batches on a thread of its own while the agent is busy with those before them.

Most of decoding is done outside of Python's lock: what an agent does with one batch and the decoding of the next share
the machine's cores.
"""

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Generic, TypeVar

from streams.batch import RawBatch

T = TypeVar("T")


class ReadAhead(Generic[T]):
    """Batches that have come, and what reading makes of them.

    Args:
        read: Reads a batch; called from the thread, for one batch after the other. It depends on nothing that the agent
            changes.
    """

    def __init__(self, read: Callable[[RawBatch], T]) -> None:
        self._read = read
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="read-ahead")
        # By identity: batches of equal offsets may come again under another assignment, cut elsewhere.
        self._begun: dict[int, tuple[RawBatch, asyncio.Future[T]]] = {}

    def begin(self, batch: RawBatch) -> None:
        """Have a batch read; called on the event loop, in the order in which batches are taken."""
        reading = asyncio.get_running_loop().run_in_executor(self._thread, self._read, batch)
        self._begun[id(batch)] = batch, reading

    async def until_read(self, event: Any) -> None:
        """Wait until an event's batch has been read, well or not."""
        if (begun := self._begun.get(id(event.value))) is not None:
            await asyncio.wait([begun[1]])

    async def take(self, batch: RawBatch) -> T:
        """Give what reading made of a batch, and forget it; one that was not begun is read now.

        Raises:
            Exception: What reading it raised.
        """
        if (begun := self._begun.pop(id(batch), None)) is None:
            return self._read(batch)
        return await begun[1]

    def forget(self) -> None:
        """Forget what has come so far: it is void."""
        for _, reading in self._begun.values():
            reading.cancel()
        self._begun.clear()
