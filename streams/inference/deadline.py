"""When rows have to go to the model for their scores to be fresh enough."""

from typing import Final

import pyarrow as pa
import pyarrow.compute as pc

_FORGOTTEN: Final = 8
"""A step that has become faster is believed after about so many times."""


class Pace:
    """How long a step takes: what takes longer is believed at once, what takes less by and by.

    Attributes:
        us: Microseconds that the step is to be given.
    """

    def __init__(self) -> None:
        self.us = 0

    def took(self, took_us: int) -> None:
        """Take note of how long it has taken."""
        self.us = max(took_us, self.us - (self.us - took_us) // _FORGOTTEN)


def wait_us(rows: pa.Table, *, freshness_us: int, reserve_us: int, now_us: int) -> int | None:
    """Tell how long rows may wait before they go to the model, 0 or more; None where no row says how old it is.

    Args:
        rows: The rows, with ``broker_time``.
        freshness_us: How old an event may be, since it came to the broker, when readers see its score.
        reserve_us: What scoring and committing take.
        now_us: The time, by the clock of ``broker_time``.
    """
    oldest_us = pc.min(rows["broker_time"].cast(pa.int64())).as_py()
    return None if oldest_us is None else max(0, oldest_us + freshness_us - reserve_us - now_us)
