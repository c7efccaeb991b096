"""Weights by age: exact powers of two at whole half-lives, and the same for one value as for many."""

import math

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given

from streams.windowing.decay import decay, decay_one
from streams.windowing.segment import scan_linear


def test_a_value_weighs_half_as_much_with_every_half_life() -> None:
    assert decay(np.array([0, 10, 20, 100]), 10).tolist() == [1.0, 0.5, 0.25, 2.0**-10]


@given(age_us=st.integers(0, 2**62), half_life_us=st.integers(1, 2**52))
def test_one_weight_is_the_same_alone_as_among_others(age_us: int, half_life_us: int) -> None:
    (weight, *_) = decay(np.array([age_us, 1, 2, 3, 4, 5, 6, 7, 8]), half_life_us).tolist()

    assert weight == decay(np.array([age_us]), half_life_us)[0] == decay_one(age_us, half_life_us)
    assert weight == pytest.approx(2.0 ** -min(age_us / half_life_us, 1_022), rel=1e-15)


def test_an_infinity_never_fades() -> None:
    assert math.inf * decay_one(2**62, 1) == math.inf


@pytest.mark.parametrize("length", [1, 3, 24, 25, 70])
def test_a_linear_recurrence_is_a_loop_however_long(length: int) -> None:
    chance = np.random.default_rng(length)
    factors, terms = chance.random(length + 2), chance.random(length + 2)
    expected = []
    for initial, part in ((0.25, range(length)), (7.0, range(length, length + 2))):
        value = initial
        for row in part:
            value = value * factors[row] + terms[row]
            expected.append(value)
    got = scan_linear(
        np.array([0.25, 7.0]), factors, terms, starts=np.array([0, length]), lengths=np.array([length, 2])
    )

    assert got.tolist() == expected
