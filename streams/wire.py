"""Feature rows on Kafka: one JSON object per row, times as RFC 3339 UTC with microseconds.

Encoding and decoding work on columns; int64, float64, text, booleans, lists and nulls come back as they were. NaN and
the infinities, for which JSON has no number, come back as null.
"""

import io
from collections.abc import Sequence

import polars as pl
import pyarrow as pa
import pyarrow.json

from schemas.errors import DecodeError

_RFC3339 = "%Y-%m-%dT%H:%M:%S%.6fZ"


def encode_rows(rows: pa.Table) -> list[bytes]:
    """Encode each row as one JSON object."""
    return encode_lines(rows).splitlines()


def encode_lines(rows: pa.Table) -> bytes:
    """Encode each row as one JSON object on a line of its own."""
    if not rows.num_rows:
        return b""
    frame = pl.from_arrow(rows)
    if not isinstance(frame, pl.DataFrame):
        msg = f"expected a table, got {type(rows).__name__}"
        raise TypeError(msg)
    times = [name for name, dtype in frame.schema.items() if isinstance(dtype, pl.Datetime)]
    buffer = io.BytesIO()
    frame.with_columns(pl.col(times).dt.strftime(_RFC3339)).write_ndjson(buffer)
    return buffer.getvalue()


def decode_rows(values: Sequence[bytes | None], schema: pa.Schema) -> pa.Table:
    """Decode rows that :func:`encode_rows` made.

    Raises:
        DecodeError: A payload is not such a row.
    """
    for value in values:
        if value is None or not value.startswith(b"{") or not value.endswith(b"}"):
            msg = f"{(value or b'nothing')[:100]!r} is no feature row, expected one JSON object"
            raise DecodeError(msg)
    if not values:
        return schema.empty_table()
    payload = b"\n".join(value for value in values if value is not None)
    try:
        rows = pyarrow.json.read_json(
            io.BytesIO(payload),
            read_options=pyarrow.json.ReadOptions(use_threads=False, block_size=len(payload) + 1),
            parse_options=pyarrow.json.ParseOptions(explicit_schema=schema, unexpected_field_behavior="ignore"),
        )
    except pa.ArrowInvalid as exc:
        msg = f"not feature rows of the expected columns {schema.names}: {exc}"
        raise DecodeError(msg) from exc
    if rows.num_rows != len(values):
        msg = f"{len(values)} payloads hold {rows.num_rows} rows, expected one JSON object in each"
        raise DecodeError(msg)
    return rows.select(schema.names)


def encode_keys(column: pa.ChunkedArray) -> list[bytes | None]:
    """Encode entity keys as record keys: their text in UTF-8."""
    return [None if key is None else str(key).encode() for key in column.to_pylist()]
