"""Aggregations one value at a time, and the law that makes sessions of them: merging parts is taking in the whole."""

import json
import math
import statistics
from typing import Any

import hypothesis.strategies as st
import pyarrow as pa
import pytest
from hypothesis import given, settings

from streams.windowing.accumulator import Accumulator, entropy_bits, fits_int64, make_accumulator
from streams.windowing.plan import PlannedFeature, Scope

COUNTS = {"count", "distinct", "approx_distinct"}
RANGE_US = 2_000_000
TYPES = {
    "count": pa.int64(),
    "rate": pa.float64(),
    "time_since_last": pa.int64(),
    "decayed_sum": pa.float64(),
    "sum": pa.int64(),
    "mean": pa.float64(),
    "min": pa.int64(),
    "max": pa.int64(),
    "variance": pa.float64(),
    "stddev": pa.float64(),
    "first": pa.int64(),
    "last": pa.int64(),
    "last_n": pa.list_(pa.int64()),
    "top_k": pa.list_(pa.int64()),
    "quantile": pa.float64(),
    "approx_distinct": pa.int64(),
    "distinct": pa.int64(),
    "entropy": pa.float64(),
}
VALUES = st.lists(st.integers(-50, 50), max_size=12)


PARAMETERS = {
    "decayed_sum": {"half_life_us": 100},
    "top_k": {"k": 3},
    "quantile": {"q": 0.6},
    "approx_distinct": {"lg_k": 12},
}


def make(function: str) -> Accumulator:
    feature = PlannedFeature(
        name="feature",
        function=function,
        column=None if function in {"count", "time_since_last"} else "n",
        filter_index=None,
        scope=Scope.WINDOW,
        n_tiles=0,
        last=0,
        input_type=pa.int64(),
        result_type=TYPES[function],
        parameters=PARAMETERS.get(function, {}),
    )
    return make_accumulator(feature)


def value_of(accumulator: Accumulator) -> Any:
    return accumulator.result(300, RANGE_US)


def taken_in(function: str, values: list[int], start: int = 0) -> Accumulator:
    accumulator = make(function)
    for position, value in enumerate(values, start=start):
        accumulator.update(value, (position, position))
    return accumulator


@pytest.mark.parametrize("function", TYPES)
@settings(max_examples=40, deadline=None)
@given(one=VALUES, two=VALUES, three=VALUES)
def test_merging_is_associative_and_equals_the_whole(
    function: str, one: list[int], two: list[int], three: list[int]
) -> None:
    def parts() -> list[Accumulator]:
        return [taken_in(function, one), taken_in(function, two, 100), taken_in(function, three, 200)]

    left, right = parts(), parts()
    left[0].merge(left[1])
    left[0].merge(left[2])
    right[1].merge(right[2])
    right[0].merge(right[1])
    whole = taken_in(function, one)
    for values, start in ((two, 100), (three, 200)):
        for position, value in enumerate(values, start=start):
            whole.update(value, (position, position))

    assert_close(value_of(left[0]), value_of(whole))
    assert_close(value_of(right[0]), value_of(whole))


@pytest.mark.parametrize("function", TYPES)
@given(values=VALUES)
def test_a_state_goes_through_json(function: str, values: list[int]) -> None:
    accumulator = taken_in(function, values)
    copy = make(function)
    copy.load(json.loads(json.dumps(accumulator.dump())))
    for each in (accumulator, copy):
        each.update(7, (1_000, 1_000))

    assert value_of(copy) == value_of(accumulator)


def assert_close(got: Any, expected: Any) -> None:
    if isinstance(expected, float):
        assert math.isclose(got, expected, rel_tol=1e-9, abs_tol=1e-9)
    else:
        assert got == expected


def test_results_of_some_values() -> None:
    values = [3, 1, 4, 1, 5]
    results = {function: value_of(taken_in(function, values)) for function in TYPES}

    assert results["variance"] == pytest.approx(statistics.pvariance(values))
    assert results["stddev"] == pytest.approx(statistics.pstdev(values))
    assert results["decayed_sum"] == pytest.approx(sum(v * 0.5 ** ((300 - t) / 100) for t, v in enumerate(values)))
    del results["variance"], results["stddev"], results["entropy"], results["decayed_sum"]
    assert results == {
        "count": 5,
        "rate": 7.0,
        "time_since_last": 296,
        "sum": 14,
        "mean": 2.8,
        "min": 1,
        "max": 5,
        "first": 3,
        "last": 5,
        "last_n": values,
        "top_k": [1, 3, 4],
        "quantile": 3.0,
        "approx_distinct": 4,
        "distinct": 4,
    }


def test_results_of_no_value() -> None:
    results = {function: value_of(make(function)) for function in TYPES}

    assert {function for function, result in results.items() if result == 0} == COUNTS
    assert all(result is None for function, result in results.items() if function not in COUNTS)


def test_spread_keeps_small_differences_of_large_values() -> None:
    values = [1_000_000_000 + offset for offset in (0, 1, 2, 3)]

    assert value_of(taken_in("variance", values)) == pytest.approx(1.25, rel=1e-12)


def test_entropy_is_in_bits() -> None:
    assert entropy_bits([1, 1, 1, 1]) == 2.0
    assert entropy_bits([8]) == 0.0
    assert entropy_bits([]) is None


def test_the_range_of_int64() -> None:
    assert [fits_int64(value) for value in (2**63 - 1, 2**63, -(2**63), -(2**63) - 1)] == [True, False, True, False]
