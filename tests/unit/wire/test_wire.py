import math
from datetime import UTC, datetime, timedelta
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from schemas.errors import DecodeError
from schemas.row import TIMESTAMP
from streams.wire import decode_rows, encode_keys, encode_rows

SCHEMA = pa.schema(
    [
        ("key", pa.string()),
        ("at", TIMESTAMP),
        ("n", pa.int64()),
        ("x", pa.float64()),
        ("flag", pa.bool_()),
        ("words", pa.list_(pa.string())),
        ("numbers", pa.list_(pa.int64())),
        ("floats", pa.list_(pa.float64())),
    ]
)
EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
TEXTS = st.text(st.characters(exclude_categories=["Cs"]), max_size=6)
INTEGERS = st.integers(-(2**63), 2**63 - 1)
FLOATS = st.floats(allow_nan=False, allow_infinity=False)
# The years 1 to 9999, in microseconds since 1970.
TIMES = st.integers(-62_135_596_800_000_000, 253_402_300_799_999_999)
ROWS = st.fixed_dictionaries(
    {
        "key": st.none() | TEXTS,
        "at": st.none() | TIMES,
        "n": st.none() | INTEGERS,
        "x": st.none() | FLOATS,
        "flag": st.none() | st.booleans(),
        "words": st.none() | st.lists(st.none() | TEXTS, max_size=3),
        "numbers": st.none() | st.lists(st.none() | INTEGERS, max_size=3),
        "floats": st.none() | st.lists(st.none() | FLOATS, max_size=3),
    }
)


@settings(max_examples=100, deadline=None)
@given(st.lists(ROWS, max_size=5))
def test_rows_come_back_as_they_were(rows: list[dict[str, Any]]) -> None:
    table = pa.Table.from_pylist(rows, schema=SCHEMA)
    encoded = encode_rows(table)
    assert len(encoded) == len(rows)
    if rows:
        decoded = decode_rows(encoded, SCHEMA)
        assert decoded.schema == SCHEMA
        assert repr(decoded.to_pylist()) == repr(table.to_pylist())  # by repr: -0.0 is not 0.0


def test_a_row_is_one_line_of_json_with_rfc_3339_times() -> None:
    at = EPOCH + timedelta(days=365, microseconds=7)
    table = pa.Table.from_pylist([{"key": "é\n", "at": at, "n": 2**63 - 1, "words": ["a"]}], schema=SCHEMA)
    assert encode_rows(table) == [
        '{"key":"é\\n","at":"1971-01-01T00:00:00.000007Z","n":9223372036854775807,"x":null,"flag":null,'
        '"words":["a"],"numbers":null,"floats":null}'.encode()
    ]


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_what_json_has_no_number_for_becomes_null(value: float) -> None:
    table = pa.table({"x": pa.array([value, 1.5])})
    assert decode_rows(encode_rows(table), table.schema)["x"].to_pylist() == [None, 1.5]


def test_columns_that_a_reader_does_not_know_are_left_out_and_absent_ones_are_null() -> None:
    decoded = decode_rows([b'{"n": 1, "new": {"a": []}}'], pa.schema([("n", pa.int64()), ("x", pa.float64())]))
    assert decoded.to_pylist() == [{"n": 1, "x": None}]


@pytest.mark.parametrize(
    "values", [[None], [b""], [b"{}", None], [b"{"], [b'{"n": "1"}'], [b'{"n": 1}{"n": 2}'], [b"[]"], [b"{}\n{}"]]
)
def test_what_is_no_feature_row_is_a_decode_error(values: list[bytes | None]) -> None:
    with pytest.raises(DecodeError, match="expected"):
        decode_rows(values, pa.schema([("n", pa.int64())]))


def test_rows_of_other_tables_do_not_make_up_for_each_other() -> None:
    with pytest.raises(DecodeError):
        decode_rows([b'{"n": 1}{"n": 2}', b""], pa.schema([("n", pa.int64())]))


def test_no_rows_encode_to_nothing() -> None:
    assert encode_rows(SCHEMA.empty_table()) == []


def test_keys_are_their_text() -> None:
    assert encode_keys(pa.chunked_array([["a", None], ["é"]])) == [b"a", None, "é".encode()]
    assert encode_keys(pa.chunked_array([[1, -2]])) == [b"1", b"-2"]
