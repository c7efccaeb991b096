"""A circuit breaker around a service: while it does not answer, callers are told at once, and it is not asked.

The states are those of the ``circuitbreaker`` library, which would let everybody through once the pause is over; here
one call goes ahead, and the others wait for what becomes of it.
"""

from collections.abc import Awaitable, Callable
from typing import Final, TypeVar

from circuitbreaker import STATE_HALF_OPEN, CircuitBreaker

from schemas.errors import SinkUnavailableError

FAILURES: Final = 5
"""Failed calls in a row after which the service is not asked any more."""
PAUSE_S: Final = 1.0
"""Seconds until one call tries again."""

Answer = TypeVar("Answer")


def store_unavailable(message: str, retry_after_ms: int) -> Exception:
    """Make the error of a store that is left alone."""
    return SinkUnavailableError(message, retry_after_ms=retry_after_ms)


class Breaker:
    """Counts calls that find a service unavailable; any other error is an answer.

    Args:
        name: Name of the service, for messages.
        failures: Failed calls in a row that open it.
        pause_s: Seconds until one call may try again.
        counted: Errors that say that the service is unavailable.
        refuse: Makes the error of a call that is turned away, from a message and in how many milliseconds to try again.
    """

    def __init__(
        self,
        name: str,
        *,
        failures: int = FAILURES,
        pause_s: float = PAUSE_S,
        counted: tuple[type[Exception], ...] = (SinkUnavailableError,),
        refuse: Callable[[str, int], Exception] = store_unavailable,
    ) -> None:
        self._circuit = CircuitBreaker(
            failure_threshold=failures, recovery_timeout=pause_s, expected_exception=counted, name=name
        )
        self._refuse = refuse
        self._is_probing = False

    @property
    def is_open(self) -> bool:
        """Whether calls are turned away, but for one that probes."""
        return not self._circuit.closed

    async def call(self, work: Callable[[], Awaitable[Answer]]) -> Answer:
        """Do ``work``, unless the service is known not to answer.

        Raises:
            SinkUnavailableError: It does not answer, or did not a moment ago; ``refuse`` may make another error of it.
        """
        is_probe = self._circuit.state == STATE_HALF_OPEN
        if self._circuit.opened or (is_probe and self._is_probing):
            msg = (
                f"{self._circuit.name} has not answered {self._circuit.failure_count} times in a row: it is left alone"
            )
            raise self._refuse(msg, max(1, self._circuit.open_remaining) * 1_000)
        self._is_probing = is_probe
        try:
            with self._circuit:
                return await work()
        finally:
            if is_probe:
                self._is_probing = False
