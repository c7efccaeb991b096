"""Numbers rounded to nine significant bits, as whole numbers in their order: what quantiles are made of.

Sketches of quantiles (KLL, REQ) choose at random what they keep, and there is no way to give the ones in
``datasketches`` a seed: the same rows give another answer each time. Counting rounded values needs no chance. How
often each level occurs adds up in any order, so that neither batching nor merging shows, and a quantile is off by no
more than the rounding, 1 in 512. A level is the sign, the exponent and the upper bits of a float64: 256 of them from
each power of two to the next. Whole numbers up to 512 stay as they are.
"""

from typing import Final

import numpy as np

from streams.windowing.segment import Array, Ints

_DROPPED_BITS: Final = 44
_ZERO: Final = 1 << 19
_INFINITY: Final = 0x7FF << 8
_MAGNITUDE: Final = 0x7FFF_FFFF_FFFF_FFFF


def to_levels(values: Array) -> Ints:
    """Level of each number that is not NaN, from 0 to 2**20; halves are rounded away from zero."""
    numbers = values.astype(np.float64) + 0.0
    magnitude = numbers.view(np.int64) & _MAGNITUDE
    rounded = (magnitude + (1 << (_DROPPED_BITS - 1))) >> _DROPPED_BITS
    # Only an infinity is one: the largest numbers are rounded down.
    rounded = np.where(np.isinf(numbers), _INFINITY, np.minimum(rounded, _INFINITY - 1))
    return np.where(np.signbit(numbers), _ZERO - rounded, _ZERO + rounded)


def from_levels(levels: Ints) -> Array:
    """The number that each level stands for."""
    steps = levels - _ZERO
    magnitude = (np.abs(steps) << _DROPPED_BITS).view(np.float64)
    numbers: Array = np.where(steps < 0, -magnitude, magnitude)
    return numbers
