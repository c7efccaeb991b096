"""Buckets of state: full snapshots are taken one bucket of keys at a time, so that none of them stalls the rows.

A key's bucket hangs on its value alone, never on its number in memory, which is used again for other keys: what stands
in the newest copy of a bucket then stands in no other, whoever wrote it.
"""

import zlib
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from streams.windowing.segment import Ints

N_BUCKETS: Final = 64
"""Part of the format: another number needs another format version."""

Buckets = npt.NDArray[np.uint8]


def bucket_of(key: Any) -> int:
    """Bucket of an entity key, text or a whole number: CRC-32 of its UTF-8 or little-endian bytes."""
    content = key.encode() if isinstance(key, str) else int(key).to_bytes(9, "little", signed=True)
    return zlib.crc32(content) % N_BUCKETS


def buckets_of(numbers: Ints) -> Buckets:
    """Bucket of each number, for state that has no key: multiplied by 2**64 over the golden ratio, its upper bits."""
    mixed = numbers.astype(np.uint64) * np.uint64(0x9E37_79B9_7F4A_7C15)
    buckets: Buckets = (mixed >> np.uint64(58)).astype(np.uint8)
    return buckets
