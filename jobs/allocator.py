"""What the C library does with memory that was freed.

The engine makes some hundred arrays a batch, most of them of 100 KB to 2 MB. By default glibc gives each such array
back to the system when it is freed, or cuts the heap off behind it, and the next batch takes its pages again one by
one: some 1,500 page faults a batch of 20,000 events, 15 % of the engine's time. On the other hand it learns from what
is freed to keep blocks of up to 32 MB, so that after a window has closed for a million keys its heap is full of holes.
"""

import ctypes
import sys
from typing import Final

_M_TRIM_THRESHOLD: Final = -1
_M_MMAP_THRESHOLD: Final = -3
_KEPT_BYTES: Final = 128 << 20
_LARGE_BYTES: Final = 4 << 20


def keep_freed_memory() -> None:
    """Keep up to 128 MB of freed blocks below 4 MB, and give larger ones back at once; nothing without glibc."""
    if sys.platform != "linux":
        return
    if (mallopt := getattr(ctypes.CDLL(None), "mallopt", None)) is not None:
        mallopt(_M_TRIM_THRESHOLD, _KEPT_BYTES)
        mallopt(_M_MMAP_THRESHOLD, _LARGE_BYTES)
