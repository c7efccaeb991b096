"""Levels keep the order of numbers and are off by at most 1 in 512."""

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given

from streams.windowing.level import from_levels, to_levels
from tests.support.oracle import nine_bits

NUMBERS = st.floats(allow_nan=False, allow_subnormal=False)


@given(value=NUMBERS)
def test_a_level_is_the_number_to_nine_significant_bits(value: float) -> None:
    (got,) = from_levels(to_levels(np.array([value]))).tolist()

    assert got == pytest.approx(value, rel=1 / 512)
    if abs(value) < 1.79e308:
        assert got == nine_bits(value)


@given(values=st.lists(NUMBERS, min_size=2, max_size=2))
def test_levels_are_in_the_order_of_the_numbers(values: list[float]) -> None:
    low, high = to_levels(np.array(sorted(values))).tolist()

    assert 0 <= low <= high < 2**20


def test_small_whole_numbers_and_infinities_stay_as_they_are() -> None:
    numbers = np.array([*range(-512, 513), np.inf, -np.inf])

    assert from_levels(to_levels(numbers)).tolist() == numbers.tolist()
    assert np.isfinite(from_levels(to_levels(np.array([1.797e308]))))[0]
