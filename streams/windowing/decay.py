"""Exponential decay in half-lives, to the same last bit on every machine.

Powers of two are made of additions, multiplications and shifts of the exponent alone; a machine's own ``exp2`` may
differ in the last bit from that of another, or between the lanes of a vector and the rest.
"""

import math
from typing import Any, Final

import numpy as np

from streams.windowing.segment import Array, Ints

_N_TERMS: Final = 18
"""Terms of the exponential series: what is left out is below 2**-60 of the result."""
_COEFFICIENTS: Final = tuple(math.log(2) ** power / math.factorial(power) for power in reversed(range(_N_TERMS)))
_MOST: Final = 1_022.0
"""No weight is below 2**-1022, the smallest normal number, so that an infinity stays one."""


def decay(elapsed_us: Ints, half_life_us: int) -> Array:
    """Weight of values of these ages: ``2 ** -(age / half-life)``; ages are 0 or more."""
    halvings = np.minimum(elapsed_us / np.float64(half_life_us), _MOST)
    whole = np.floor(halvings)
    weights: Array = np.ldexp(_power_of_two(whole - halvings), -whole.astype(np.int32))
    return weights


def decay_one(elapsed_us: int, half_life_us: int) -> float:
    """Weight of one value, as :func:`decay` gives it."""
    halvings = min(elapsed_us / half_life_us, _MOST)
    whole = math.floor(halvings)
    return math.ldexp(float(_power_of_two(whole - halvings)), -whole)


def _power_of_two(fraction: Any) -> Any:
    """``2 ** fraction`` for ``-1 < fraction <= 0``, a number or an array, by Horner's rule."""
    result = 0.0 * fraction + _COEFFICIENTS[0]
    for coefficient in _COEFFICIENTS[1:]:
        result = result * fraction + coefficient
    return result
