"""When a partition without rows is idle, and how far its watermark may then move."""

from schemas.time import MINUS_INFINITY_US


class IdleClock:
    """Watches processing time between the rows of one partition; the time is always given, never asked for.

    Attributes:
        is_idle: Whether the partition is idle now.
    """

    def __init__(self, *, timeout_us: int | None, is_advancing: bool) -> None:
        self.is_idle = False
        self._timeout_us = timeout_us
        self._is_advancing = is_advancing
        self._quiet_since_us: int | None = None
        self._watermark_us = MINUS_INFINITY_US

    def note_rows(self, *, processing_time_us: int, watermark_us: int) -> None:
        """Rows have come: the wait begins anew."""
        self.is_idle = False
        self._quiet_since_us = processing_time_us
        self._watermark_us = watermark_us

    def poll(self, *, processing_time_us: int, is_caught_up: bool, watermark_us: int) -> int | None:
        """No rows have come. Tell where the watermark may move to; None: it stays.

        An idle partition's watermark moves on with the clock from the moment it became idle. One that has never had a
        row has no event time to move on from, and stays at minus infinity.
        """
        if self._timeout_us is None:
            return None
        if not is_caught_up or self._quiet_since_us is None:
            self.note_rows(processing_time_us=processing_time_us, watermark_us=watermark_us)
            return None
        idle_us = processing_time_us - self._quiet_since_us - self._timeout_us
        if idle_us < 0:
            return None
        self.is_idle = True
        if not self._is_advancing or self._watermark_us == MINUS_INFINITY_US:
            return None
        return self._watermark_us + idle_us
