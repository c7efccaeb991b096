import math
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from schemas.aggregation import count, mean
from schemas.row import Pane
from streams.sinks.packing import TAG_END, pack_rows, unpack_columns, unpack_value
from streams.sinks.rows import ORDER_COLUMNS
from tests.support.feature_rows import T0_US, make_rows, make_view

VIEW = make_view()
INT64 = st.integers(-(2**63), 2**63 - 1)
TIME_US = st.integers(-62_135_596_800_000_000, 253_402_300_799_000_000)  # the years 1 to 9999
TEXT = st.text(st.characters(codec="utf-8"), max_size=20)
FLOAT = st.floats(allow_nan=False, allow_infinity=False)
FEATURES = st.fixed_dictionaries(
    {
        "clicks_5m": st.none() | INT64,
        "amount_mean_1h": st.none() | FLOAT,
        "category_last": st.none() | TEXT,
        "clicked_last": st.none() | st.booleans(),
        "amounts": st.none() | st.lists(st.none() | FLOAT, max_size=3),
        "categories": st.none() | st.lists(st.none() | TEXT, max_size=3),
        "prices": st.none() | st.lists(st.none() | st.lists(FLOAT, max_size=2), max_size=2),
    }
)


def spell(value: Any) -> Any:
    """Spell floats so that -0.0 differs from 0.0."""
    if isinstance(value, list):
        return [spell(item) for item in value]
    return repr(value) if isinstance(value, float) else value


@settings(deadline=None)  # the first example loads the libraries
@given(features=FEATURES)
def test_features_of_every_type_come_back_the_same(features: dict[str, Any]) -> None:
    (packed,) = pack_rows(make_rows(VIEW, [features]), view=VIEW)
    value = unpack_value(packed, view=VIEW)
    assert value is not None
    assert {name: spell(v) for name, v in value.features.items()} == {name: spell(v) for name, v in features.items()}
    assert list(value.features) == list(VIEW.definitions)


@pytest.mark.parametrize("number", [math.nan, math.inf, -math.inf])
def test_what_json_has_no_number_for_becomes_null(number: float) -> None:
    features = {"category_last": str(number), "amount_mean_1h": number, "amounts": [1.5, number]}
    (packed,) = pack_rows(make_rows(VIEW, [features]), view=VIEW)
    value = unpack_value(packed, view=VIEW)
    assert value is not None
    assert value.features["category_last"] == str(number)
    assert value.features["amount_mean_1h"] is None
    assert value.features["amounts"] == [1.5, None]


def test_what_the_engine_says_of_a_row_comes_back_the_same() -> None:
    row = {
        "window_end": -1,
        "pane": "LATE",
        "pane_index": 3,
        "source_offset": 2**60 + 1,
        "event_time": -7,
        "watermark": None,
        "broker_time": None,
    }
    (packed,) = pack_rows(make_rows(VIEW, [row]), view=VIEW)
    value = unpack_value(packed, view=VIEW)
    assert value is not None
    assert (value.window_end_us, value.pane, value.pane_index) == (-1, Pane.LATE, 3)
    assert (value.source_offset, value.event_time_us) == (2**60 + 1, -7)
    assert (value.watermark_us, value.broker_time_us) == (None, None)


ORDER = st.tuples(TIME_US, st.integers(0, 2**63 - 1), st.integers(0, 2**63 - 1))


@settings(deadline=None)
@given(one=ORDER, other=ORDER)
def test_packed_values_sort_as_their_orders_do(one: tuple[int, int, int], other: tuple[int, int, int]) -> None:
    rows = make_rows(VIEW, [dict(zip(ORDER_COLUMNS, order, strict=True)) for order in (one, other)])
    first, second = pack_rows(rows, view=VIEW)
    assert (first[:60] < second[:60]) == (one < other)
    assert first[:60].isdigit()


def test_a_value_of_another_definition_is_not_unpacked() -> None:
    other = make_view(features={"clicks_5m": count().over("10m")})
    (packed,) = pack_rows(make_rows(other, [{"clicks_5m": 1}]), view=other)
    assert unpack_value(packed, view=VIEW) is None


@pytest.mark.parametrize("foreign", [b"", b"7", b"\xff" * 100])
def test_a_value_that_is_none_of_ours_is_not_unpacked(foreign: bytes) -> None:
    assert unpack_value(foreign, view=VIEW) is None


def test_features_are_told_apart_by_name_whatever_order_they_are_defined_in() -> None:
    first = make_view(features={"a": count().over("5m"), "b": mean("amount").over("5m")})
    second = make_view(features={"b": mean("amount").over("5m"), "a": count().over("5m")})
    assert first.definition_hash == second.definition_hash
    (packed,) = pack_rows(make_rows(first, [{"a": 4, "b": 0.5}]), view=first)
    value = unpack_value(packed, view=second)
    assert value is not None
    assert value.features == {"a": 4, "b": 0.5}


EMPTY_INSIDE = pack_rows(make_rows(VIEW, [{}]), view=VIEW)[0][:TAG_END]
"""A value of the right tag that has lost its end."""


def test_a_value_that_has_lost_its_end_is_told_and_passes_for_no_other() -> None:
    (whole,) = pack_rows(make_rows(VIEW, [{"clicks_5m": 7}]), view=VIEW)
    with pytest.raises(ValueError, match="unexpected"):
        unpack_columns([EMPTY_INSIDE, whole], view=VIEW)


STORED = st.none() | st.sampled_from([b"", b"7", b"\xff" * 100]) | st.tuples(FEATURES, st.sampled_from(list(Pane)))


@settings(deadline=None)
@given(stored=st.lists(STORED, max_size=6))
def test_columns_hold_what_values_hold_one_by_one(stored: list[Any]) -> None:
    values = [
        pack_rows(make_rows(VIEW, [given[0] | {"pane": str(given[1])}]), view=VIEW)[0]
        if isinstance(given, tuple)
        else given
        for given in stored
    ]
    columns = unpack_columns(values, view=VIEW)
    rows = columns.row_of.to_pylist()
    for value, row in zip(values, rows, strict=True):
        expected = None if value is None else unpack_value(value, view=VIEW)
        assert (row is None) == (expected is None)
        if expected is not None:
            assert columns.event_time_us[row] == expected.event_time_us
            assert columns.is_empty[row] == (expected.pane is Pane.EMPTY)
            found = {name: spell(column[row]) for name, column in columns.features.items()}
            assert found == {name: spell(value) for name, value in expected.features.items()}
    assert [row for row in rows if row is not None] == list(range(len(columns.is_empty)))
    assert set(columns.features) == set(VIEW.definitions)


def test_chunked_columns_are_packed_in_order() -> None:
    rows = pa.concat_tables([make_rows(VIEW, [{"clicks_5m": n, "event_time": T0_US + n}]) for n in range(3)])
    values = [unpack_value(packed, view=VIEW) for packed in pack_rows(rows, view=VIEW)]
    assert [v.features["clicks_5m"] for v in values if v] == [0, 1, 2]
