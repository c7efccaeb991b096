"""Event ids remembered, to tell a row that was admitted before."""

import heapq
from typing import Any


class DuplicateMemory:
    """Event ids of admitted rows, each kept until a copy of it would be late anyway.

    A row is a duplicate iff an admitted row before it has the same id, their event times are less than ``window_us`` apart, and
    the watermark it is judged against is before that row's event time + ``window_us`` + ``reach_us``. Rows without an id
    are never duplicates.
    """

    def __init__(self, *, window_us: int, reach_us: int) -> None:
        self._window_us = window_us
        self._reach_us = reach_us
        self._times: dict[Any, list[int]] = {}
        self._expiry: list[tuple[int, Any]] = []

    def is_duplicate(self, event_id: Any, time_us: int, *, watermark_us: int) -> bool:
        """Tell whether the row repeats an admitted one."""
        return any(
            abs(time_us - earlier) < self._window_us and watermark_us < earlier + self._window_us + self._reach_us
            for earlier in self._times.get(event_id, ())
        )

    def add(self, event_id: Any, time_us: int) -> None:
        """Remember an admitted row."""
        if event_id is not None:
            self._times.setdefault(event_id, []).append(time_us)
            heapq.heappush(self._expiry, (time_us + self._window_us + self._reach_us, event_id))

    def forget(self, watermark_us: int) -> None:
        """Drop the ids whose copies would be late."""
        while self._expiry and self._expiry[0][0] <= watermark_us:
            _, event_id = heapq.heappop(self._expiry)
            times = self._times[event_id]
            times.remove(min(times))
            if not times:
                del self._times[event_id]

    def dump(self) -> list[Any]:
        """State as JSON values."""
        return [[event_id, times] for event_id, times in self._times.items()]

    def load(self, dumped: list[Any]) -> None:
        """Take over a dumped state."""
        for event_id, times in dumped:
            for time_us in times:
                self.add(event_id, time_us)
