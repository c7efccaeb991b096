"""Latencies of requests, as counts in bins that add up over batches and workers; by the size of the request.

A request of twice the rows takes up to twice as long. A canary gets other sizes than the champion, and a new champion
others than the one before, so that only requests of about one size are compared.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Final

import numpy as np

Latency = Mapping[int, Sequence[int]]
"""Counts by bins, by :func:`size_of` the request."""

BINS: Final = 176
_FIRST_MS: Final = 0.1
_PER_DOUBLING: Final = 8
"""Latencies are told apart by 9 %, from 0.1 ms to some seven minutes."""
_CHANCE: Final = 4.0
"""Standard deviations that are put down to chance."""


def size_of(rows: int) -> int:
    """Class of a request by its rows: up to 1, 2, 4, 8 and so on."""
    return (rows - 1).bit_length()


def bin_of(took_ms: float) -> int:
    """Bin of a latency."""
    place = math.ceil(math.log2(max(took_ms, _FIRST_MS) / _FIRST_MS) * _PER_DOUBLING)
    return min(place, BINS - 1)


def p99_ms(counts: Sequence[int]) -> float:
    """Time that 99 of 100 requests were answered within; NaN where there are none."""
    total = sum(counts)
    return _took_ms(counts, math.ceil(0.99 * total)) if total else math.nan


def is_slower(found: Sequence[int], expected: Sequence[int], *, times: float) -> bool:
    """Tell whether a p99 is above so many times another one for certain, however few requests there were of either.

    Of n requests n/100 are above their 99th percentile, with a standard deviation of sqrt(n)/10, and hardly ever as
    many as four of these above that, and three more where n is too small for a normal distribution. So it is the
    slowest of ``found`` but those that is compared. Of the two numbers of requests n is the smaller one: the p99 of few
    is soon exceeded.
    """
    total, n = sum(found), min(sum(found), sum(expected))
    share = 1 - math.ceil(n / 100 + _CHANCE * math.sqrt(n) / 10 + 3) / n if n else 0.0
    return share > 0 and _took_ms(found, max(1, math.floor(share * total))) > times * p99_ms(expected)


def _took_ms(counts: Sequence[int], rank: int) -> float:
    """What the request of a rank took, the fastest being the first."""
    place = int(np.searchsorted(np.cumsum(counts), rank))
    return float(_FIRST_MS * 2 ** (place / _PER_DOUBLING))
