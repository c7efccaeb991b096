"""Rows of a Parquet file as the JSON that a producer of the contract would have sent.

Parquet has types that JSON has not, and writers differ in the ones they choose. A column goes by what the contract says
of the field of its name:

- a timestamp is RFC 3339 in UTC with microseconds, or a whole number in the field's ``x-unit`` (what is finer is cut
  off); one without a time zone is UTC; so is a date where the contract wants a date-time;
- a whole number that was stored as a decimal, or as a float (as pandas does where some are missing), is one again;
- null where the contract allows none is an absent field; NaN, for which JSON has no number, is null.
"""

from typing import Any, Final

import numpy as np
import orjson
import pyarrow as pa
import pyarrow.compute as pc

from schemas.contract import Contract
from schemas.field import EVENT_TIME_UNITS_US, json_types
from streams.wire import encode_rows

_PLACES: Final = ("_partition", "_offset", "_broker_time")
_PLACE: Final = {"type": "integer", "x-unit": "us"}
_FLOORS: Final = {"us": "microsecond", "ms": "millisecond", "s": "second"}
_EXACT: Final = 2.0**53


def encode_events(rows: pa.Table, contract: Contract) -> list[bytes]:
    """Write each row as one JSON object, which depends on that row alone.

    Raises:
        pyarrow.ArrowException: A column cannot be converted.
        polars.exceptions.PolarsError: A column has a type that JSON cannot hold.
    """
    broken: dict[int, dict[str, float]] = {}
    for position, name in enumerate(rows.column_names):
        field = _PLACE if name in _PLACES else contract.fields.get(name, {})
        column = _convert(rows.column(position), field)
        if pa.types.is_floating(column.type) and "integer" in json_types(field):
            column, apart = _as_integers(column)
            for row, value in apart.items():
                broken.setdefault(row, {})[name] = value
        rows = rows.set_column(position, name, column)
    values = encode_rows(rows)
    absent = {
        name
        for name in rows.column_names
        if name in contract.fields and rows.column(name).null_count and not contract.is_nullable(name)
    }
    lacking = [np.flatnonzero(pc.is_null(rows.column(name)).to_numpy()) for name in absent]
    for row in np.union1d(np.concatenate([*lacking, []]), list(broken)).astype(np.int64).tolist():
        document = orjson.loads(values[row]) | broken.get(row, {})
        kept = {name: value for name, value in document.items() if value is not None or name not in absent}
        values[row] = orjson.dumps(kept)
    return values


def _convert(column: pa.ChunkedArray, field: dict[str, Any]) -> pa.ChunkedArray:
    arrow = column.type
    if pa.types.is_dictionary(arrow):
        return _convert(column.cast(arrow.value_type), field)
    if pa.types.is_date(arrow) and ("x-unit" in field or field.get("format") == "date-time"):
        return _convert(column.cast(pa.timestamp("ms")), field)
    if pa.types.is_timestamp(arrow):
        unit = field.get("x-unit") if "integer" in json_types(field) else None
        utc = column.cast(pa.timestamp(arrow.unit, tz="UTC"))
        # Floored first: a cast alone would cut off towards 1970.
        times = pc.floor_temporal(utc, unit=_FLOORS[unit or "us"]).cast(pa.timestamp("us", tz="UTC"))
        return times if unit is None else pc.divide(times.cast(pa.int64()), EVENT_TIME_UNITS_US[unit])
    if pa.types.is_binary(arrow) or pa.types.is_large_binary(arrow):
        return column.cast(pa.string())
    if pa.types.is_decimal(arrow):
        return column.cast(pa.int64() if arrow.scale == 0 else pa.float64())
    return column


def _as_integers(column: pa.ChunkedArray) -> tuple[pa.ChunkedArray, dict[int, float]]:
    """Make whole numbers of floats; those that are none are null, and given by row beside."""
    floats = column.cast(pa.float64())
    numbers = floats.to_numpy()
    with np.errstate(invalid="ignore"):
        is_whole = (numbers == np.floor(numbers)) & (np.abs(numbers) < _EXACT)
    apart = np.flatnonzero(~is_whole & ~np.isnan(numbers))
    integers = pa.array(np.where(is_whole, numbers, 0).astype(np.int64), mask=~is_whole)
    return pa.chunked_array([integers]), dict(zip(apart.tolist(), numbers[apart].tolist(), strict=True))
