"""Times as text, in whole tables."""

from typing import cast

import polars as pl
import pyarrow as pa


def with_text_times(table: pa.Table) -> pa.Table:
    """Write every timestamp of the table, nested ones too, as RFC 3339 text with microseconds."""
    frame = cast(pl.DataFrame, pl.from_arrow(table))
    return frame.select(_text_times(pl.col(name), dtype).alias(name) for name, dtype in frame.schema.items()).to_arrow()


def _text_times(values: pl.Expr, dtype: pl.DataType) -> pl.Expr:
    if isinstance(dtype, pl.Datetime):
        return values.dt.strftime("%Y-%m-%dT%H:%M:%S%.6fZ")
    if isinstance(dtype, pl.Struct):
        return pl.struct(
            _text_times(values.struct.field(field.name), cast(pl.DataType, field.dtype)).alias(field.name)
            for field in dtype.fields
        )
    return values
