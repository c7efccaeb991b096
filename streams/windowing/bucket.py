"""Buckets of state: full snapshots are taken one bucket of keys at a time, so that none of them stalls the rows.

A key's bucket hangs on its value alone, never on its number in memory, which is used again for other keys: what stands
in the newest copy of a bucket then stands in no other, whoever wrote it.
"""

from typing import Any, Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from streams.windowing.key_word import Hashes, hash_words, to_words
from streams.windowing.segment import Ints

N_BUCKETS: Final = 64
"""Part of the format: another number, or another hash, needs another format version."""
_SHIFT: Final = np.uint64(58)

Buckets = npt.NDArray[np.uint8]


def buckets_of(hashes: Hashes) -> Buckets:
    """Bucket of each hash of a key: its upper six bits."""
    buckets: Buckets = (hashes >> _SHIFT).astype(np.uint8)
    return buckets


def bucket_of(key: Any) -> int:
    """Bucket of one entity key, text or a whole number."""
    return int(buckets_of(hash_words(to_words(pa.array([key]))))[0])


def buckets_of_numbers(numbers: Ints) -> Buckets:
    """Bucket of each number, for state that has no key."""
    return buckets_of(hash_words(to_words(pa.array(numbers))))
