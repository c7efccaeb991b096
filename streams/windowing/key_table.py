"""Entity keys as small dense numbers, which index the state's arrays."""

from typing import Any, Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from streams.windowing.bucket import Buckets, bucket_of
from streams.windowing.segment import Ints

_FIRST_CAPACITY: Final = 1_024
_NO_BUCKET: Final = 255
"""Bucket of a number that is not in use."""


class KeyTable:
    """Gives each live key a number below :attr:`capacity`; numbers of released keys are used again."""

    def __init__(self, key_type: pa.DataType) -> None:
        self._type = key_type
        self._ids: dict[Any, int] = {}
        self._values: list[Any] = []
        self._free: list[int] = []
        self._buckets: Buckets = np.empty(0, dtype=np.uint8)

    def __len__(self) -> int:
        return len(self._ids)

    @property
    def capacity(self) -> int:
        """One more than the largest number in use."""
        return len(self._values)

    def find(self, key: Any) -> int | None:
        """Number of a key, None when it has none."""
        return self._ids.get(key)

    def intern(self, keys: list[Any]) -> Ints:
        """Number of each of these distinct keys; new keys get one."""
        ids = list(map(self._ids.get, keys))
        if None in ids:
            # A loop over new keys only: each is met once in its life.
            for position, number in enumerate(ids):
                if number is None:
                    ids[position] = self._add(keys[position])
        return np.array(ids, dtype=np.int64)

    def _add(self, key: Any) -> int:
        if self._free:
            number = self._free.pop()
            self._values[number] = key
        else:
            number = len(self._values)
            self._values.append(key)
            if number >= len(self._buckets):
                more = np.full(max(_FIRST_CAPACITY, number), _NO_BUCKET, dtype=np.uint8)
                self._buckets = np.concatenate([self._buckets, more])
        self._ids[key] = number
        self._buckets[number] = bucket_of(key)
        return number

    def release(self, ids: Ints) -> None:
        """Forget keys whose state is gone."""
        for number in ids.tolist():
            del self._ids[self._values[number]]
            self._values[number] = None
            self._free.append(number)
        self._buckets[ids] = _NO_BUCKET

    def live_ids(self, bucket: int | None = None) -> Ints:
        """Numbers in use, rising; only of the keys of a bucket if one is given."""
        return np.flatnonzero(self._buckets != _NO_BUCKET if bucket is None else self._buckets == bucket)

    def to_arrow(self, ids: Ints) -> pa.Array:
        """Keys of these numbers."""
        if len(ids) > 4 * len(self._values):
            return pa.array(self._values, self._type).take(pa.array(ids))
        distinct, inverse = np.unique(ids, return_inverse=True)
        keys = pa.array([self._values[number] for number in distinct.tolist()], self._type)
        return keys.take(pa.array(inverse))

    def ranks(self, ids: Ints) -> Ints:
        """Rank of each key in the order of the output: by number, or by Unicode code point."""
        distinct, inverse = np.unique(ids, return_inverse=True)
        keys = pa.array([self._values[number] for number in distinct.tolist()], self._type)
        ranks = np.empty(len(distinct), dtype=np.int64)
        ranks[pc.array_sort_indices(keys).to_numpy()] = np.arange(len(distinct))
        return ranks[inverse]
