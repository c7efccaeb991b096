"""Rows of 64-bit words, for state that is read and written a row at a time.

What is kept of a million keys or tiles is read at random, so its cost is that of cache lines and of pages. Rows begin
at cache lines, large arrays lie in large pages where the system has them, and a page that nothing was written to takes
no memory: room for more rows costs nothing until it is used.
"""

import contextlib
import mmap
import sys
from typing import Final

import numpy as np

from streams.windowing.segment import Ints

_WORD_BYTES: Final = 8
_LINE_WORDS: Final = 8
_LARGE_BYTES: Final = 1 << 22


def zero_rows(n_rows: int, n_words: int) -> Ints:
    """Rows of zeros."""
    size = n_rows * n_words
    if sys.platform == "linux" and size * _WORD_BYTES >= _LARGE_BYTES:
        pages = mmap.mmap(-1, size * _WORD_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        with contextlib.suppress(OSError):  # a kernel without large pages
            pages.madvise(mmap.MADV_HUGEPAGE)
        return np.frombuffer(pages, dtype=np.int64).reshape(n_rows, n_words)
    room = np.zeros(size + _LINE_WORDS, dtype=np.int64)
    skipped = -(room.ctypes.data // _WORD_BYTES) % _LINE_WORDS
    return room[skipped : skipped + size].reshape(n_rows, n_words)


def grown_rows(rows: Ints, n_rows: int) -> Ints:
    """The same rows, and rows of zeros after them."""
    grown = zero_rows(n_rows, rows.shape[1])
    grown[: len(rows)] = rows
    return grown


def next_capacity(capacity: int, needed: int, *, fewest: int) -> int:
    """Room to grow to, half as much again, so that growing costs little per row."""
    return max(fewest, capacity + capacity // 2, needed)


def put_rows(rows: Ints, at: Ints, values: Ints) -> None:
    """Write whole rows, each at once: a third of the time of ``rows[at] = values``."""
    whole = np.dtype((np.void, rows.shape[1] * _WORD_BYTES))
    rows.view(whole).ravel().put(at, np.ascontiguousarray(values).view(whole).ravel())
