"""Looks at the online store all the while: what it has once shown, nothing older may follow."""

import asyncio
import threading
from typing import Self

from jobs.application import Application
from schemas.errors import SinkUnavailableError
from streams.sinks.online import OnlineReader

AIRPORTS = ("EWR", "JFK", "LGA")
PAUSE_S = 0.05


class Onlooker:
    """Reads the newest rows of three entities over and over, and notes each step back."""

    def __init__(self, application: Application, redis_url: str) -> None:
        self._view = application.view("airport_departures")
        self._redis_url = redis_url
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._look()), name="onlooker", daemon=True)
        self.looks = 0
        self.refused = 0
        self.steps_back: list[str] = []

    async def _look(self) -> None:
        seen: dict[str | int, tuple[int, int, int]] = {}
        async with OnlineReader(self._redis_url, timeout_s=1.0) as reader:
            while not self._stopping.is_set():
                await asyncio.sleep(PAUSE_S)
                try:
                    values = await reader.read(self._view, AIRPORTS, now_us=0)
                except SinkUnavailableError:
                    self.refused += 1
                    continue
                self.looks += 1
                for value in values:
                    order = (value.window_end_us or 0, value.pane_index or 0, value.source_offset or 0)
                    if order < (before := seen.get(value.entity, (0, 0, 0))):
                        self.steps_back.append(f"{value.entity}: {order} after {before}")
                    seen[value.entity] = order

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stopping.set()
        self._thread.join()
