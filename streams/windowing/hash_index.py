"""Numbers found by hash: open addressing with triangular probing, all look-ups of a batch side by side.

A slot is one 64-bit word, the upper half of a hash beside the number, so that a look-up touches one cache line and then
one of what it compares with.
"""

from collections.abc import Callable
from itertools import count
from typing import Final

import numpy as np
import numpy.typing as npt

from streams.windowing.key_word import Hashes
from streams.windowing.record import zero_rows
from streams.windowing.segment import Bools, Ints

_EMPTY: Final = np.uint64(0)
_REMOVED: Final = np.uint64(1)
_FIRST: Final = np.uint64(2)
"""What is added to a number, so that it is neither of these."""
_LOWER: Final = np.uint64(0xFFFF_FFFF)
_UPPER: Final = np.uint64(0xFFFF_FFFF_0000_0000)
_FEWEST_SLOTS: Final = 1_024

Same = Callable[[Ints, Ints], Bools]
"""Tells of queries (by position) and numbers that have hashes alike whether the keys are the same."""


class HashIndex:
    """Which number each hash stands for; up to 2**32 - 3 of them."""

    def __init__(self) -> None:
        self._slots: npt.NDArray[np.uint64] = np.zeros(_FEWEST_SLOTS, dtype=np.uint64)
        self._n_used = 0

    def has_room(self, n_more: int) -> bool:
        """Tell whether so many more can be added before it has to be rebuilt: at most half of the slots are used."""
        return 2 * (self._n_used + n_more) <= len(self._slots)

    def rebuild(self, hashes: Hashes, numbers: Ints, *, n_more: int) -> None:
        """Begin anew with these, and with room for as many more (and half as much again)."""
        n_slots = _FEWEST_SLOTS
        while n_slots < 3 * (len(numbers) + n_more):
            n_slots *= 2
        self._slots, self._n_used = zero_rows(n_slots, 1).ravel().view(np.uint64), 0
        self.add(hashes, numbers)

    def find(self, hashes: Hashes, is_same: Same) -> Ints:
        """Number of each hash, -1 for none."""
        found = np.full(len(hashes), -1, dtype=np.int64)
        queries, at, upper = np.arange(len(hashes)), self._places(hashes), hashes & _UPPER
        for turn in count(1):
            if not len(queries):
                break
            slots = self._slots.take(at)
            alike = np.flatnonzero(((slots & _UPPER) == upper) & (slots & _LOWER >= _FIRST))
            numbers = ((slots[alike] & _LOWER) - _FIRST).astype(np.int64)
            is_found = is_same(queries[alike], numbers)
            found[queries[alike[is_found]]] = numbers[is_found]
            goes_on = slots != _EMPTY
            goes_on[alike[is_found]] = False
            rest = np.flatnonzero(goes_on)
            queries, at, upper = queries[rest], self._next(at[rest], turn), upper[rest]
        return found

    def add(self, hashes: Hashes, numbers: Ints) -> None:
        """Add numbers, each of them new, whose keys are not there; there is room for them."""
        self._n_used += len(numbers)
        at, slots = self._places(hashes), self._to_slots(hashes, numbers)
        for turn in count(1):
            if not len(at):
                break
            is_free = self._slots[at] == _EMPTY
            # Of several that want a slot one gets it; the others see that they have not.
            self._slots[at[is_free]] = slots[is_free]
            rest = np.flatnonzero(self._slots[at] != slots)
            at, slots = self._next(at[rest], turn), slots[rest]

    def remove(self, hashes: Hashes, numbers: Ints) -> None:
        """Remove numbers that are there. Their slots are used again when it is rebuilt."""
        at, slots = self._places(hashes), self._to_slots(hashes, numbers)
        for turn in count(1):
            if not len(at):
                break
            is_here = self._slots[at] == slots
            self._slots[at[is_here]] = _REMOVED
            rest = np.flatnonzero(~is_here)
            at, slots = self._next(at[rest], turn), slots[rest]

    def _places(self, hashes: Hashes) -> Ints:
        return (hashes & np.uint64(len(self._slots) - 1)).astype(np.int64)

    def _next(self, at: Ints, turn: int) -> Ints:
        # Steps that grow by one come to every slot, and do not queue up behind each other as steps of one do.
        return (at + turn) & (len(self._slots) - 1)

    def _to_slots(self, hashes: Hashes, numbers: Ints) -> npt.NDArray[np.uint64]:
        slots: npt.NDArray[np.uint64] = (hashes & _UPPER) | (numbers.astype(np.uint64) + _FIRST)
        return slots
