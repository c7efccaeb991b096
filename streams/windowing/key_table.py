"""Entity keys as small dense numbers, which index the state's arrays."""

from typing import Any, Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from streams.windowing.bucket import Buckets, buckets_of
from streams.windowing.hash_index import HashIndex
from streams.windowing.key_word import Hashes, KeyWords, hash_words, to_keys, to_words
from streams.windowing.record import grown_rows, next_capacity, put_rows, zero_rows
from streams.windowing.segment import Bools, Ints

_FIRST_CAPACITY: Final = 1_024
_NO_BUCKET: Final = 255
"""Bucket of a number that is not in use."""


class KeyTable:
    """Gives each live key a number below :attr:`capacity`; numbers of released keys are used again."""

    def __init__(self, key_type: pa.DataType) -> None:
        self._type = key_type
        self._index = HashIndex()
        # Of each key the number of bytes and the words, side by side as they are compared.
        self._records = zero_rows(0, 2)
        self._buckets: Buckets = np.empty(0, dtype=np.uint8)
        self._free: Ints = np.empty(0, dtype=np.int64)
        self._long: dict[Any, int] = {}
        self._long_keys: dict[int, Any] = {}
        self.capacity = 0

    def __len__(self) -> int:
        return self.capacity - len(self._free)

    def find(self, keys: pa.Array) -> Ints:
        """Number of each key, -1 for one that has none."""
        words = to_words(keys)
        return self._find(keys, words, hash_words(words))

    def intern(self, keys: pa.Array) -> Ints:
        """Number of each of these distinct keys; new keys get one."""
        words = to_words(keys)
        hashes = hash_words(words)
        ids = self._find(keys, words, hashes)
        new = np.flatnonzero(ids < 0)
        if len(new):
            ids[new] = self._add(keys.take(pa.array(new)), words.take(new), hashes[new])
        return ids

    def _find(self, keys: pa.Array, words: KeyWords, hashes: Hashes) -> Ints:
        n_words = min(words.words.shape[1], self._records.shape[1] - 1)

        def is_same(queries: Ints, numbers: Ints) -> Bools:
            # Bytes of the words that one side has more of are counted by the lengths, which must be alike.
            known = self._of(numbers)
            same: Bools = words.n_bytes[queries] == known.n_bytes
            for number in range(n_words):
                same &= words.words[queries, number] == known.words[:, number]
            return same

        is_whole = words.is_whole
        if is_whole.all():
            return self._index.find(hashes, is_same)
        ids = np.full(len(hashes), -1, dtype=np.int64)
        short = np.flatnonzero(is_whole)
        ids[short] = self._index.find(hashes[short], lambda queries, numbers: is_same(short[queries], numbers))
        for row in np.flatnonzero(~is_whole).tolist():
            ids[row] = self._long.get(keys[row].as_py(), -1)
        return ids

    def _add(self, keys: pa.Array, words: KeyWords, hashes: Hashes) -> Ints:
        numbers = self._allocate(len(hashes))
        is_whole = words.is_whole
        for row in np.flatnonzero(~is_whole).tolist():
            key, number = keys[row].as_py(), int(numbers[row])
            self._long[key], self._long_keys[number] = number, key
        n_words = words.words.shape[1]
        if n_words >= self._records.shape[1]:
            wider = zero_rows(len(self._records), n_words + 1)
            wider[:, : self._records.shape[1]] = self._records
            self._records = wider
        short = np.flatnonzero(is_whole)
        if not self._index.has_room(len(short)):
            live = self.live_ids()
            live = live[self._of(live).is_whole]
            self._index.rebuild(hash_words(self._of(live)), live, n_more=len(short))
        self._index.add(hashes[short], numbers[short])
        records = np.zeros((len(numbers), self._records.shape[1]), dtype=np.int64)
        records[:, 0], records[:, 1 : n_words + 1] = words.n_bytes, words.words.view(np.int64)
        put_rows(self._records, numbers, records)
        self._buckets[numbers] = buckets_of(hashes)
        return numbers

    def _allocate(self, n_keys: int) -> Ints:
        reused, self._free = self._free[:n_keys], self._free[n_keys:]
        before, self.capacity = self.capacity, self.capacity + n_keys - len(reused)
        if self.capacity > len(self._buckets):
            size = next_capacity(len(self._buckets), self.capacity, fewest=_FIRST_CAPACITY)
            more = np.full(size - len(self._buckets), _NO_BUCKET, dtype=np.uint8)
            self._records = grown_rows(self._records, size)
            self._buckets = np.concatenate([self._buckets, more])
        return np.concatenate([reused, np.arange(before, self.capacity)])

    def _of(self, ids: Ints) -> KeyWords:
        records = self._records.take(ids, axis=0)
        return KeyWords(records[:, 1:].view(np.uint64), records[:, 0])

    def release(self, ids: Ints) -> None:
        """Forget keys whose state is gone."""
        words = self._of(ids)
        is_whole = words.is_whole
        for number in ids[~is_whole].tolist():
            del self._long[self._long_keys.pop(number)]
        self._index.remove(hash_words(words.take(is_whole)), ids[is_whole])
        self._buckets[ids] = _NO_BUCKET
        self._free = np.concatenate([self._free, ids])

    def renumber(self) -> Ints:
        """Number the keys anew from 0 on, in the order of their numbers, and give the old ones."""
        live = self.live_ids()
        words, self._buckets = self._of(live), self._buckets[live]
        self._records = grown_rows(self._records.take(live, axis=0), len(live))
        self._free, self.capacity = live[:0], len(live)
        numbers = np.arange(len(live))
        is_whole = words.is_whole
        self._long_keys = {number: self._long_keys[int(live[number])] for number in numbers[~is_whole].tolist()}
        self._long = {key: number for number, key in self._long_keys.items()}
        self._index.rebuild(hash_words(words.take(is_whole)), numbers[is_whole], n_more=0)
        return live

    def live_ids(self, bucket: int | None = None) -> Ints:
        """Numbers in use, rising; only of the keys of a bucket if one is given."""
        return np.flatnonzero(self._buckets != _NO_BUCKET if bucket is None else self._buckets == bucket)

    def to_arrow(self, ids: Ints) -> pa.Array:
        """Keys of these numbers."""
        words = self._of(ids)
        if not self._long:
            return to_keys(words, self._type)
        is_whole = words.is_whole
        short, long = np.flatnonzero(is_whole), np.flatnonzero(~is_whole)
        kept = to_keys(words.take(short), self._type)
        others = pa.array([self._long_keys[number] for number in ids[long].tolist()], self._type)
        place = np.empty(len(ids), dtype=np.int64)
        place[np.concatenate([short, long])] = np.arange(len(ids))
        return pa.concat_arrays([kept, others]).take(pa.array(place))

    def ranks(self, ids: Ints) -> Ints:
        """Rank of each key in the order of the output: by number, or by Unicode code point."""
        distinct, inverse = np.unique(ids, return_inverse=True)
        ranks = np.empty(len(distinct), dtype=np.int64)
        ranks[pc.array_sort_indices(self.to_arrow(distinct)).to_numpy()] = np.arange(len(distinct))
        return ranks[inverse]
