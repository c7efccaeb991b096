"""Whole numbers as text are what Python writes."""

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given, settings

from streams.windowing.number_text import number_texts


@settings(deadline=None)
@given(
    numbers=st.lists(st.one_of(st.integers(-(2**63), 2**63 - 1), st.integers(0, 20_000)), max_size=20),
    prefix=st.sampled_from(["clicks-0-", "é-"]),
)
def test_numbers_are_written_as_python_writes_them(numbers: list[int], prefix: str) -> None:
    texts = number_texts(np.array(numbers, dtype=np.int64), prefix=prefix)

    texts.validate(full=True)
    assert texts.to_pylist() == [f"{prefix}{number}" for number in numbers]


@pytest.mark.parametrize("edge", [10**power for power in range(19)])
def test_digits_grow_at_powers_of_ten(edge: int) -> None:
    numbers = [edge - 1, edge, edge + 1]

    assert number_texts(np.array(numbers), prefix="n").to_pylist() == [f"n{number}" for number in numbers]
