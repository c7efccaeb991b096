"""Admits events of requests that come at the same time together: a call takes as long for one event as for a hundred.

Nothing waits for company: what has come when the event loop gets to it goes in one call. What becomes of an event does
not hang on the others (``tests/property/test_decoding_knows_no_batch.py``).
"""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

from streams.serving.event_admission import AdmittedEvent, EventAdmission, Refusal

THREAD_BYTES: Final = 65_536
"""From so many bytes on events of a request are judged by themselves, in a thread, so that readers need not wait."""
_CALL_BYTES: Final = 2 * THREAD_BYTES
"""Requests that are judged together have no more bytes than this, or than this and the last of them."""


@dataclass(frozen=True)
class Judged:
    """Events as they were judged, in order, and the record timestamp by which they were."""

    events: Sequence[AdmittedEvent | Refusal]
    now_us: int


@dataclass(frozen=True)
class _Waiting:
    values: Sequence[bytes]
    judged: "asyncio.Future[Judged]"


class JointAdmission:
    """Admits events of one source; belongs to one event loop.

    Args:
        admission: Of the source.
        now_us: The time that records get.
    """

    def __init__(self, admission: EventAdmission, *, now_us: Callable[[], int]) -> None:
        self._admission = admission
        self._now_us = now_us
        self._waiting: list[_Waiting] = []

    async def admit(self, values: Sequence[bytes]) -> Judged:
        """Judge the events of a request, in their order."""
        if sum(map(len, values)) >= THREAD_BYTES:
            now_us = self._now_us()
            return Judged(await asyncio.to_thread(self._admission.admit, values, now_us=now_us), now_us)
        loop = asyncio.get_running_loop()
        if not self._waiting:
            loop.call_soon(self._judge)
        waiting = _Waiting(values, loop.create_future())
        self._waiting.append(waiting)
        return await waiting.judged

    def _judge(self) -> None:
        n_requests, n_bytes = 0, 0
        while n_requests < len(self._waiting) and n_bytes < _CALL_BYTES:
            n_bytes += sum(map(len, self._waiting[n_requests].values))
            n_requests += 1
        requests, self._waiting = self._waiting[:n_requests], self._waiting[n_requests:]
        if self._waiting:
            asyncio.get_running_loop().call_soon(self._judge)
        now_us = self._now_us()
        try:
            found = self._admission.admit([value for request in requests for value in request.values], now_us=now_us)
        except Exception as exc:  # each of them is told
            for request in requests:
                if not request.judged.done():
                    request.judged.set_exception(exc)
            return
        start = 0
        for request in requests:
            end = start + len(request.values)
            if not request.judged.done():  # its caller may be gone
                request.judged.set_result(Judged(found[start:end], now_us))
            start = end
