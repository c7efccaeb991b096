"""The law that sessions hang on: cells that are merged, in whatever order, hold what one cell of all rows would."""

import math
import statistics
from typing import Any

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given, settings

from schemas.aggregation import FUNCTIONS, Aggregation
from schemas.entity import Entity
from schemas.view import FeatureView
from streams.windowing.bank import CellBank
from streams.windowing.columns import BatchColumns, Pools
from streams.windowing.overflow import fits_int64
from streams.windowing.plan import compile_view
from streams.windowing.register import CellReads, CellRows
from tests.support.builders import make_batch, make_source

COUNTS = {"count", "distinct", "approx_distinct"}
PARAMETERS = {
    "decayed_sum": (("half_life_us", 100),),
    "top_k": (("k", 3),),
    "quantile": (("q", 0.6),),
    "approx_distinct": (("lg_k", 12),),
}
MERGED = sorted(FUNCTIONS.keys() - {"last_n", "derived", "from_event"})
"""Every aggregation over windows."""
VIEW = FeatureView(
    "merging",
    version=1,
    entity=Entity("thing", key="key"),
    source=make_source(),
    gap="1m",
    features={
        name: Aggregation(
            function=name,
            column=None if name in {"count", "time_since_last"} else "n",
            parameters=PARAMETERS.get(name, ()),
        )
        for name in MERGED
    },
)
WHOLE = 6
AT_US, SPAN_US = 300, 2_000_000
VALUES = st.lists(st.integers(-50, 50), max_size=12)


def make_bank(cells: dict[int, list[tuple[int, int]]]) -> CellBank:
    """A bank in which cells have taken in rows of these times and values."""
    plan = compile_view(VIEW)
    pools = Pools(plan)
    bank = CellBank(list(plan.features), pools=pools)
    bank.grow(8)
    bank.reset(np.arange(8))
    filled = {cell: rows for cell, rows in cells.items() if rows}
    flat = [row for rows in filled.values() for row in rows]
    if not flat:
        return bank
    table = make_batch(VIEW, [{"key": "a", "at": 0, "n": value, "_offset": i} for i, (_, value) in enumerate(flat)])
    lengths = np.array([len(rows) for rows in filled.values()])
    rows = CellRows(
        order=np.arange(len(flat)),
        starts=np.cumsum(lengths) - lengths,
        lengths=lengths,
        cells=np.array(list(filled)),
        time_us=np.array([time_us for time_us, _ in flat]),
    )
    bank.commit(bank.scan(BatchColumns(table, plan=plan, pools=pools), rows))
    return bank


def merge(bank: CellBank, cells: list[int], into: int) -> None:
    cell_array = np.array(cells)
    nothing = np.full(len(cells), -1)
    reads = CellReads(cell_array, nothing, np.array([0]), np.array([len(cells)]), np.array([AT_US]), SPAN_US)
    for register in bank.registers.values():
        for name, merged in register.merge(reads, {}).items():
            register.state[name][[into]] = merged
    others = cell_array[cell_array != into]
    bank.move(others, np.full(len(others), into))


def results(bank: CellBank, cells: list[int]) -> dict[str, Any]:
    count = len(cells)
    reads = CellReads(
        np.array(cells, dtype=np.int64),
        np.full(count, -1),
        np.array([0]),
        np.array([count]),
        np.array([AT_US]),
        SPAN_US,
    )
    return {name: column[0].as_py() for name, column in bank.read(bank.features, reads, None).items()}


def assert_same(got: dict[str, Any], expected: dict[str, Any]) -> None:
    for name, value in expected.items():
        if isinstance(value, float):
            assert math.isclose(got[name], value, rel_tol=1e-9, abs_tol=1e-9), name
        else:
            assert got[name] == value, name


@settings(max_examples=150, deadline=None)
@given(one=VALUES, two=VALUES, three=VALUES)
def test_merging_is_associative_and_equals_the_whole(one: list[int], two: list[int], three: list[int]) -> None:
    parts = [[(100 * part + at, v) for at, v in enumerate(values)] for part, values in enumerate((one, two, three))]
    bank = make_bank({**dict(enumerate([*parts, *parts])), WHOLE: [row for part in parts for row in part]})
    whole = results(bank, [WHOLE])

    assert_same(results(bank, [0, 1, 2]), whole)
    merge(bank, [0, 1], into=0)
    merge(bank, [0, 2], into=0)
    assert_same(results(bank, [0]), whole)
    merge(bank, [4, 5], into=4)
    merge(bank, [3, 4], into=3)
    assert_same(results(bank, [3]), whole)


def test_results_of_some_values() -> None:
    values = [3, 1, 4, 1, 5]
    found = results(make_bank({0: list(enumerate(values))}), [0])

    assert found.pop("variance") == pytest.approx(statistics.pvariance(values))
    assert found.pop("stddev") == pytest.approx(statistics.pstdev(values))
    assert found.pop("decayed_sum") == pytest.approx(sum(v * 0.5 ** ((300 - t) / 100) for t, v in enumerate(values)))
    assert found.pop("entropy") == pytest.approx(-(2 / 5) * math.log2(2 / 5) - 3 * (1 / 5) * math.log2(1 / 5))
    assert found == {
        "count": 5,
        "rate": 7.0,
        "time_since_last": 296,
        "sum": 14,
        "mean": 2.8,
        "min": 1,
        "max": 5,
        "first": 3,
        "last": 5,
        "top_k": [1, 3, 4],
        "quantile": 3.0,
        "approx_distinct": 4,
        "distinct": 4,
    }


def test_results_of_no_value() -> None:
    found = results(make_bank({}), [])

    assert set(found) == set(MERGED)
    assert {name for name, value in found.items() if value == 0} == COUNTS
    assert all(value is None for name, value in found.items() if name not in COUNTS)


def test_spread_keeps_small_differences_of_large_values() -> None:
    values = [1_000_000_000 + offset for offset in (0, 1, 2, 3)]
    bank = make_bank({0: [(0, values[0]), (1, values[1])], 1: [(2, values[2]), (3, values[3])], 2: []})
    merge(bank, [0, 1], into=2)

    assert results(bank, [2])["variance"] == pytest.approx(1.25, rel=1e-12)


def test_the_range_of_int64() -> None:
    assert [fits_int64(value) for value in (2**63 - 1, 2**63, -(2**63), -(2**63) - 1)] == [True, False, True, False]
