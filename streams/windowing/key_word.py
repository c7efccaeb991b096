"""Entity keys as rows of 64-bit words, which numpy hashes and compares without a Python object for each."""

from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from streams.windowing.segment import Bools, Ints, expand

Hashes = npt.NDArray[np.uint64]
Words = npt.NDArray[np.uint64]

MOST_WORDS: Final = 8
"""Of keys that are longer, the words hold the first 64 bytes, lest each key take as much room as the longest."""
_WORD_BYTES: Final = 8
_MASKS: Final = np.array([(1 << (8 * n)) - 1 for n in range(_WORD_BYTES + 1)], dtype=np.uint64)
"""What remains of a word of which the first 0 to 8 bytes count."""
_GOLDEN: Final = 0x9E37_79B9_7F4A_7C15
_MULTIPLIERS: Final = (np.uint64(0xBF58_476D_1CE4_E5B9), np.uint64(0x94D0_49BB_1331_11EB))
_SHIFTS: Final = (np.uint64(30), np.uint64(27), np.uint64(31))


@dataclass(frozen=True)
class KeyWords:
    """Keys of one type.

    Attributes:
        words: ``(n_keys, n_words)`` their first bytes, little-endian; zero after the last.
        n_bytes: ``(n_keys,)`` how many bytes they have.
    """

    words: Words
    n_bytes: Ints

    @property
    def is_whole(self) -> Bools:
        """Whether all bytes of a key are in its words."""
        is_whole: Bools = self.n_bytes <= MOST_WORDS * _WORD_BYTES
        return is_whole

    def take(self, rows: Any) -> "KeyWords":
        """Some of them."""
        return KeyWords(self.words[rows], self.n_bytes[rows])


def to_words(keys: pa.Array) -> KeyWords:
    """Keys, text or whole numbers without nulls, as words: as many as the longest needs, but at most 8."""
    if pa.types.is_integer(keys.type):
        numbers = keys.cast(pa.int64()).to_numpy().view(np.uint64)
        return KeyWords(numbers.reshape(-1, 1), np.full(len(keys), _WORD_BYTES, dtype=np.int64))
    _, offsets_buffer, bytes_buffer = keys.buffers()
    if not len(keys) or offsets_buffer is None:
        return KeyWords(np.zeros((0, 1), dtype=np.uint64), np.zeros(0, dtype=np.int64))
    offsets = np.frombuffer(offsets_buffer, dtype=np.int32)[keys.offset : keys.offset + len(keys) + 1].astype(np.int64)
    n_bytes = np.diff(offsets)
    content = np.zeros(int(offsets[-1] - offsets[0]) + _WORD_BYTES, dtype=np.uint8)
    if bytes_buffer is not None:
        content[:-_WORD_BYTES] = np.frombuffer(bytes_buffer, dtype=np.uint8)[offsets[0] : offsets[-1]]
    # A word may begin at any byte, so the words of a text overlap those that begin a byte later.
    overlapping: Words = np.ndarray((len(content) - _WORD_BYTES + 1,), dtype="<u8", buffer=content.data, strides=(1,))
    n_words = min(max(1, -(-int(n_bytes.max()) // _WORD_BYTES)), MOST_WORDS)
    words = np.empty((len(keys), n_words), dtype=np.uint64)
    for number in range(n_words):
        left = np.clip(n_bytes - number * _WORD_BYTES, 0, _WORD_BYTES)
        starts = np.where(left > 0, offsets[:-1] - offsets[0] + number * _WORD_BYTES, 0)
        words[:, number] = overlapping[starts] & _MASKS[left]
    return KeyWords(words, n_bytes)


def to_keys(keys: KeyWords, key_type: pa.DataType) -> pa.Array:
    """The keys of words that hold all of them, in Arrow."""
    if pa.types.is_integer(key_type):
        return pa.array(keys.words[:, 0].view(np.int64)).cast(key_type)
    owner, within = expand(keys.n_bytes)
    content = np.ascontiguousarray(keys.words).view(np.uint8)[owner, within]
    offsets = np.concatenate([[0], np.cumsum(keys.n_bytes)]).astype(np.int32)
    return pa.StringArray.from_buffers(len(keys.n_bytes), pa.py_buffer(offsets), pa.py_buffer(content))


def hash_words(keys: KeyWords) -> Hashes:
    """Hash of each key; it hangs on the first 64 bytes and their number alone, and is part of the format of the state.

    Words are multiplied by odd numbers and added up, so that zeros after the last one add nothing; then the bits are
    mixed as splitmix64 does (Steele, Lea, Flood 2014).
    """
    hashes: Hashes = keys.n_bytes.astype(np.uint64) * np.uint64(_GOLDEN)
    for number in range(keys.words.shape[1]):
        word = keys.words[:, number]
        odd = np.uint64((_GOLDEN * (2 * number + 3)) % 2**64)
        hashes += (word ^ (word >> np.uint64(32))) * odd
    for shift, multiplier in zip(_SHIFTS, _MULTIPLIERS, strict=False):
        hashes = (hashes ^ (hashes >> shift)) * multiplier
    return hashes ^ (hashes >> _SHIFTS[-1])
