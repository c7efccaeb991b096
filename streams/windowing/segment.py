"""Array primitives over segments: runs of rows of one group that lie side by side.

A segment is given by ``starts`` and ``lengths``, both ``(n_segments,)``; every segment here has at least one row unless
said otherwise. Folds go from left to right one element at a time, as a loop over the rows would, so that floats come
out the same however rows were cut into batches (``ufunc.reduceat`` adds in pairs and would not do).
"""

from collections.abc import Iterator
from typing import Any, Final, Literal

import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]
Array = npt.NDArray[Any]

_LONG: Final = 24
"""Segments longer than this are scanned one at a time (a call of 1.5 us each), shorter ones side by side."""


def stable_argsort(codes: Ints, bound: int) -> Ints:
    """Sort positions by whole numbers in ``[0, bound)``, ties in order.

    Numpy's stable sort of 16-bit numbers is a radix sort (2 ns an element against 50 ns for 64 bits), so wider ones are
    sorted half by half.
    """
    if bound <= 1:
        return np.arange(len(codes), dtype=np.int64)
    order: Ints = np.argsort((codes & 0xFFFF).astype(np.uint16), kind="stable")
    shift = 16
    while bound > 1 << shift:
        part = ((codes >> shift) & 0xFFFF).astype(np.uint16)
        order = order[np.argsort(part[order], kind="stable")]
        shift += 16
    return order


def find_segments(*columns: Array) -> tuple[Ints, Ints]:
    """Segments of rows with equal values in all of these sorted columns."""
    n_rows = len(columns[0])
    if n_rows == 0:
        return np.empty(0, dtype=np.int64), np.empty(0, dtype=np.int64)
    is_start = np.ones(n_rows, dtype=np.bool_)
    is_start[1:] = columns[0][1:] != columns[0][:-1]
    for column in columns[1:]:
        is_start[1:] |= column[1:] != column[:-1]
    starts = np.flatnonzero(is_start)
    return starts, np.diff(np.append(starts, n_rows))


def search(rising: Ints, values: Array, *, side: Literal["left", "right"] = "left") -> Ints:
    """Place of each value in rising numbers."""
    places: Ints = np.searchsorted(rising, values, side=side)
    return places


def expand(lengths: Ints) -> tuple[Ints, Ints]:
    """Owner and position within its owner of each element of segments of these lengths (0 is allowed)."""
    owner = np.repeat(np.arange(len(lengths), dtype=np.int64), lengths)
    ends = np.cumsum(lengths)
    total = int(ends[-1]) if len(ends) else 0
    return owner, np.arange(total, dtype=np.int64) - np.repeat(ends - lengths, lengths)


def scan(ufunc: np.ufunc, initial: Array, values: Array, *, starts: Ints, lengths: Ints) -> Array:
    """Running fold within each segment, from ``initial`` (one for each segment) on."""
    if ufunc is np.add and values.dtype == np.int64:
        # Whole numbers add up the same in any order, modulo 2**64 too.
        running: Array = np.cumsum(values)
        running += np.repeat(initial - (running[starts] - values[starts]), lengths)
        return running
    out: Array = values.copy()
    out[starts] = ufunc(initial, values[starts])
    for index in np.flatnonzero(lengths > _LONG).tolist():
        part = out[starts[index] : starts[index] + lengths[index]]
        ufunc.accumulate(part, out=part)
    short = (lengths > 1) & (lengths <= _LONG)
    rows, left = starts[short], lengths[short] - 1
    while len(rows):
        rows = rows + 1
        out[rows] = ufunc(out[rows - 1], values[rows])
        left = left - 1
        is_open = left > 0
        if not is_open.all():
            rows, left = rows[is_open], left[is_open]
    return out


def scan_linear(initial: Array, factors: Array, terms: Array, *, starts: Ints, lengths: Ints) -> Array:
    """Running ``value = value * factor + term`` within each segment, from ``initial`` (one for each segment) on."""
    out: Array = terms.copy()
    out[starts] += initial * factors[starts]
    for index in np.flatnonzero(lengths > _LONG).tolist():
        # One by one: each value hangs on the one before it by more than one function (0.1 us a row).
        start, stop = int(starts[index]), int(starts[index] + lengths[index])
        value, values = float(out[start]), terms[start:stop].tolist()
        for row, factor in enumerate(factors[start + 1 : stop].tolist(), start=1):
            values[row] = value = value * factor + values[row]
        out[start + 1 : stop] = values[1:]
    short = (lengths > 1) & (lengths <= _LONG)
    rows, left = starts[short], lengths[short] - 1
    while len(rows):
        rows = rows + 1
        out[rows] += out[rows - 1] * factors[rows]
        left = left - 1
        is_open = left > 0
        if not is_open.all():
            rows, left = rows[is_open], left[is_open]
    return out


class Places:
    """Where dense numbers stand in a short list of them; each use costs what it touches, not how many there are."""

    def __init__(self) -> None:
        self._place: Ints = np.empty(0, dtype=np.int64)

    def grow(self, n_numbers: int) -> None:
        """Make room for numbers below ``n_numbers``."""
        if n_numbers > len(self._place):
            size = max(n_numbers, 2 * len(self._place))
            self._place = np.concatenate([self._place, np.full(size - len(self._place), -1, dtype=np.int64)])

    def mark(self, numbers: Ints) -> None:
        """Note where each of these stands; of one that stands there more than once, the last place."""
        self._place[numbers] = np.arange(len(numbers))

    def of(self, numbers: Ints) -> Ints:
        """Place of each of these numbers, -1 for those not marked."""
        places: Ints = self._place[numbers]
        return places

    def clear(self, numbers: Ints) -> None:
        """Forget what was marked."""
        self._place[numbers] = -1

    def last_of_each(self, numbers: Ints) -> Ints:
        """Position of the last of each of these numbers, rising."""
        self.mark(numbers)
        last = np.flatnonzero(self.of(numbers) == np.arange(len(numbers)))
        self.clear(numbers)
        return last


def newest_until(segment: Ints, limit: Ints, order: Ints, starts: Ints, lengths: Ints) -> Ints:
    """Last row of each of these segments that is not after ``limit`` (a position in the batch), -1 for none.

    ``order`` holds the position in the batch of each row, rising within a segment.
    """
    last = starts[segment] + lengths[segment] - 1
    newest: Ints = np.where(order[last] <= limit, last, -1)
    between = np.flatnonzero((newest < 0) & (order[starts[segment]] <= limit))
    if len(between):
        n_rows = len(order)
        code = np.repeat(np.arange(len(starts), dtype=np.int64), lengths) * n_rows + order
        newest[between] = search(code, segment[between] * n_rows + limit[between], side="right") - 1
    return newest


class Steps:
    """Order in which segments (empty ones allowed) are folded side by side: first elements first, then second ones."""

    def __init__(self, starts: Ints, lengths: Ints) -> None:
        self.n_segments = len(lengths)
        self._starts = starts
        self._lengths = lengths

    def __iter__(self) -> Iterator[tuple[Ints, Ints]]:
        """Give the segments that have a next element, and where it is."""
        segments = np.flatnonzero(self._lengths > 0)
        rows, left = self._starts[segments], self._lengths[segments]
        while len(rows):
            yield segments, rows
            is_open = left > 1
            rows, left = rows + 1, left - 1
            if not is_open.all():
                segments, rows, left = segments[is_open], rows[is_open], left[is_open]
