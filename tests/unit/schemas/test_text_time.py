"""Times as text are the same whichever way they are written."""

from datetime import UTC, datetime, timedelta

import polars as pl
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from schemas.text_time import text_times, with_text_times

PLAIN_US = st.integers(-62_167_219_200_000_000, 253_402_300_799_999_999)
ANY_US = st.integers(-(2**62), 2**62)


def with_format(times: pa.Array) -> list[str | None]:
    return pl.Series(pl.from_arrow(times)).dt.strftime("%Y-%m-%dT%H:%M:%S%.6fZ").to_list()


@given(us=st.lists(st.none() | PLAIN_US, max_size=8) | st.lists(st.none() | ANY_US, max_size=4), skip=st.integers(0, 2))
def test_a_column_is_written_as_a_format_writes_it(us: list[int | None], skip: int) -> None:
    times = pa.array(us, pa.int64()).cast(pa.timestamp("us", "UTC"))[skip:]
    text = text_times(times)
    text.validate(full=True)
    assert text.type == pa.string()
    assert text.to_pylist() == with_format(times)


@given(st.integers(0, 3_000_000_000_000_000))
def test_it_is_rfc_3339_with_microseconds(us: int) -> None:
    (text,) = text_times(pa.array([us]).cast(pa.timestamp("us", "UTC"))).to_pylist()
    assert datetime.fromisoformat(text) == datetime(1970, 1, 1, tzinfo=UTC) + timedelta(microseconds=us)
    assert len(text) == len("2023-11-14T22:13:20.000000Z")


@pytest.mark.parametrize("arrow", [pa.timestamp("us"), pa.timestamp("ms", "UTC"), pa.timestamp("ns", "UTC")])
def test_other_units_are_written_likewise(arrow: pa.DataType) -> None:
    times = pa.array([datetime(2023, 11, 14, 22, 13, 20, 7_000, tzinfo=UTC), None], pa.timestamp("us", "UTC"))
    written = ["2023-11-14T22:13:20.007000Z", None]
    assert text_times(times.cast(arrow)).to_pylist() == written
    assert text_times(pa.nulls(2, arrow)).to_pylist() == [None, None]


def test_times_in_structures_are_written_too_and_all_else_stays() -> None:
    time = datetime(2023, 11, 14, 22, 13, 20, tzinfo=UTC)
    at = pa.array([time, None, time], pa.timestamp("us", "UTC"))
    inner = pa.StructArray.from_arrays(
        [at, pa.array([1, 2, 3])], names=["at", "n"], mask=pa.array([False, False, True])
    )
    table = pa.table({"x": pa.chunked_array([[1.5], [None, 2.5]]), "inner": inner, "at": at}).slice(1)
    assert with_text_times(table).to_pylist() == [
        {"x": None, "inner": {"at": None, "n": 2}, "at": None},
        {"x": 2.5, "inner": {"at": None, "n": None}, "at": "2023-11-14T22:13:20.000000Z"},
    ]
