"""A circuit breaker around a store: while it does not answer, readers are told at once, and it is not asked.

The states are those of the ``circuitbreaker`` library, which would let everybody through once the pause is over; here
one call goes ahead, and the others wait for what becomes of it.
"""

from collections.abc import Awaitable, Callable
from typing import Final, TypeVar

from circuitbreaker import STATE_HALF_OPEN, CircuitBreaker

from schemas.errors import SinkUnavailableError

FAILURES: Final = 5
"""Failed calls in a row after which the store is not asked any more."""
PAUSE_S: Final = 1.0
"""Seconds until one call tries again."""

Answer = TypeVar("Answer")


class Breaker:
    """Counts calls that find a store unavailable; any other error is an answer.

    Args:
        name: Name of the store, for messages.
        failures: Failed calls in a row that open it.
        pause_s: Seconds until one call may try again.
    """

    def __init__(self, name: str, *, failures: int = FAILURES, pause_s: float = PAUSE_S) -> None:
        self._circuit = CircuitBreaker(
            failure_threshold=failures, recovery_timeout=pause_s, expected_exception=SinkUnavailableError, name=name
        )
        self._is_probing = False

    @property
    def is_open(self) -> bool:
        """Whether calls are turned away, but for one that probes."""
        return not self._circuit.closed

    async def call(self, work: Callable[[], Awaitable[Answer]]) -> Answer:
        """Do ``work``, unless the store is known not to answer.

        Raises:
            SinkUnavailableError: It does not answer, or did not a moment ago.
        """
        is_probe = self._circuit.state == STATE_HALF_OPEN
        if self._circuit.opened or (is_probe and self._is_probing):
            msg = (
                f"{self._circuit.name} has not answered {self._circuit.failure_count} times in a row: it is left alone"
            )
            raise SinkUnavailableError(msg, retry_after_ms=max(1, self._circuit.open_remaining) * 1_000)
        self._is_probing = is_probe
        try:
            with self._circuit:
                return await work()
        finally:
            if is_probe:
                self._is_probing = False
