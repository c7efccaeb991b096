"""Rows of a Parquet file as the JSON that a producer of the contract would have sent.

Parquet has types that JSON has not, and writers differ in the ones they choose. A column goes by what the contract says
of the field of its name:

- a timestamp is RFC 3339 in UTC with microseconds, or a whole number in the field's ``x-unit`` (what is finer is cut
  off); one without a time zone is UTC; so is a date where the contract wants a date-time;
- a whole number that was stored as a decimal, or as a float (as pandas does where some are missing), is one again;
- null where the contract allows none is an absent field; NaN, for which JSON has no number, is null;
- a value that cannot be such JSON (an infinite number, bytes that are no UTF-8, a time beyond 64 bits) is told by a
  text or an object, which the contract's type does not allow: its row, and no other, becomes a dead letter;
- bytes are text in UTF-8. Columns with bytes that the contract does not name are left out: JSON has no bytes.
"""

from decimal import Decimal
from typing import Any, Final

import numpy as np
import orjson
import pyarrow as pa
import pyarrow.compute as pc

from schemas.contract import Contract
from schemas.field import EVENT_TIME_UNITS_US, json_types
from schemas.view_input import SOURCE_COLUMN
from streams.wire import encode_rows

_PLACES: Final = ("_partition", "_offset", "_broker_time")
_PLACE: Final = {"type": "integer", "x-unit": "us"}
_FLOORS: Final = {"us": "microsecond", "ms": "millisecond", "s": "second"}
_EXACT: Final = 2.0**53
_INT64_DIGITS: Final = 18
"""Digits that a whole number may have and be sure to fit 64 bits."""


def encode_events(rows: pa.Table, contract: Contract) -> list[bytes]:
    """Write each row as one JSON object, which depends on that row alone.

    Raises:
        pyarrow.ArrowException: A column cannot be converted, or has a type that JSON cannot hold; it names the column.
    """
    unnamed = set(rows.column_names) - {*contract.fields, *_PLACES, SOURCE_COLUMN}
    rows = rows.select(
        [at for at, column in enumerate(rows.schema) if column.name not in unnamed or _is_json(column.type)]
    )
    broken: dict[int, dict[str, Any]] = {}
    for position, name in enumerate(rows.column_names):
        field = _PLACE if name in _PLACES else contract.fields.get(name, {})
        try:
            column, apart = _convert_each(rows.column(position), field)
        except pa.ArrowException as exc:
            msg = f"column {name!r} ({rows.column(position).type}) cannot be converted: {exc}"
            raise pa.ArrowInvalid(msg) from exc
        if not _is_json(column.type):
            msg = f"column {name!r} is {column.type}, which JSON cannot hold"
            raise pa.ArrowInvalid(msg)
        if pa.types.is_decimal(column.type):
            column, beyond = _as_int64(column)
            apart |= beyond
        elif pa.types.is_floating(column.type):
            apart |= _infinite(column)
            if "integer" in json_types(field):
                column, fractions = _as_integers(column)
                apart = fractions | apart
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


def _convert_each(column: pa.ChunkedArray, field: dict[str, Any]) -> tuple[pa.ChunkedArray, dict[int, Any]]:
    """Convert a column; values that cannot be are null, and told by row beside. They are few: halves are tried."""
    try:
        return _convert(column, field), {}
    except pa.ArrowInvalid:
        nothing = _convert(column.slice(0, 0), field).type
        if len(column) == 1:
            return pa.chunked_array([pa.nulls(1, nothing)]), {0: _told(column[0])}
    middle = len(column) // 2
    (left, apart), (right, later) = (_convert_each(part, field) for part in (column[:middle], column[middle:]))
    return pa.chunked_array([*left.chunks, *right.chunks]), apart | {middle + row: v for row, v in later.items()}


def _told(value: pa.Scalar) -> Any:
    if pa.types.is_dictionary(value.type):
        value = value.dictionary[value.index.as_py()]
    if pa.types.is_timestamp(value.type):
        return f"{value.value} {value.type.unit}"
    return {"bytes": value.as_py().hex()} if _is_binary(value.type) else str(value.as_py())


def _infinite(column: pa.ChunkedArray) -> dict[int, Any]:
    is_infinite = pc.fill_null(pc.is_inf(column), fill_value=False).to_numpy()
    return {row: f"{column[row].as_py()}" for row in np.flatnonzero(is_infinite).tolist()}


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
    if _is_binary(arrow):
        return column.cast(pa.binary()).cast(pa.string())
    if pa.types.is_decimal(arrow) and arrow.scale != 0:
        return column.cast(pa.float64())
    return column


def _is_binary(arrow: pa.DataType) -> bool:
    kinds = (pa.types.is_binary, pa.types.is_large_binary, pa.types.is_fixed_size_binary, pa.types.is_binary_view)
    return any(is_kind(arrow) for is_kind in kinds)


def _is_json(arrow: pa.DataType) -> bool:
    """Tell whether JSON can hold a type."""
    if pa.types.is_dictionary(arrow):
        return _is_json(arrow.value_type)
    if pa.types.is_nested(arrow):
        return all(_is_json(arrow.field(at).type) for at in range(arrow.num_fields))
    return not _is_binary(arrow)


def _as_int64(column: pa.ChunkedArray) -> tuple[pa.ChunkedArray, dict[int, float]]:
    """Make whole numbers of decimals without a fraction; those beyond 64 bits are null, and given by row beside."""
    if column.type.precision <= _INT64_DIGITS:
        return column.cast(pa.int64()), {}
    low, high = Decimal(-(2**63)), Decimal(2**63 - 1)
    values = column.to_pylist()
    apart = {row: float(value) for row, value in enumerate(values) if value is not None and not low <= value <= high}
    kept = [None if value is None or row in apart else int(value) for row, value in enumerate(values)]
    return pa.chunked_array([pa.array(kept, pa.int64())]), apart


def _as_integers(column: pa.ChunkedArray) -> tuple[pa.ChunkedArray, dict[int, float]]:
    """Make whole numbers of floats; those that are none are null, and given by row beside."""
    floats = column.cast(pa.float64())
    numbers = floats.to_numpy()
    with np.errstate(invalid="ignore"):
        is_whole = (numbers == np.floor(numbers)) & (np.abs(numbers) < _EXACT)
    apart = np.flatnonzero(~is_whole & ~np.isnan(numbers))
    integers = pa.array(np.where(is_whole, numbers, 0).astype(np.int64), mask=~is_whole)
    return pa.chunked_array([integers]), dict(zip(apart.tolist(), numbers[apart].tolist(), strict=True))
