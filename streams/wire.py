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
from schemas.text_time import text_times


def encode_rows(rows: pa.Table) -> list[bytes]:
    """Encode each row as one JSON object."""
    return encode_lines(rows).splitlines()


def encode_lines(rows: pa.Table) -> bytes:
    """Encode each row as one JSON object on a line of its own."""
    if not rows.num_rows:
        return b""
    columns = [text_times(c.combine_chunks()) if pa.types.is_timestamp(c.type) else c for c in rows.columns]
    frame = pl.from_arrow(pa.table(columns, names=rows.column_names))
    if not isinstance(frame, pl.DataFrame):
        msg = f"expected a table, got {type(rows).__name__}"
        raise TypeError(msg)
    buffer = io.BytesIO()
    frame.write_ndjson(buffer)
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
