"""Batches of feature rows as the stores take them."""

from typing import Final, cast

import polars as pl
import pyarrow as pa

from schemas.errors import SchemaMismatchError, SinkRejectedError
from schemas.view import FeatureView

ORDER_COLUMNS: Final = ("window_end", "pane_index", "source_offset")
"""What decides which of two rows of an entity is newer, in this order."""


def check_rows(rows: pa.Table, *, view: FeatureView) -> None:
    """Refuse rows that are not of this view, version and definition.

    Raises:
        SchemaMismatchError: A column is missing or has another type, or a row names another view or definition.
        SinkRejectedError: A row has no entity key or no place in the order.
    """
    types = dict(zip(rows.schema.names, rows.schema.types, strict=True))
    for field in view.row_schema:
        got = types.get(field.name)
        if got != field.type:
            msg = (
                f"rows of view {view.name} have column `{field.name}` {got or 'missing'}, expected {field.type}; "
                f"make them with the view's `row_schema`"
            )
            raise SchemaMismatchError(msg)
    expected = {"view": view.name, "view_version": view.version, "definition_hash": view.definition_hash}
    for name, value in expected.items():
        got_values = rows[name].unique().to_pylist()
        if rows.num_rows and got_values != [value]:
            msg = (
                f"rows have {name} {got_values}, expected {value!r} of view {view.name} v{view.version}; "
                f"raise the view's version when its definition changes"
            )
            raise SchemaMismatchError(msg)
    for name in (view.entity.key, "event_time", "pane", *ORDER_COLUMNS):
        if rows[name].null_count:
            msg = f"{rows[name].null_count} rows of view {view.name} have no `{name}`, expected it in every row"
            raise SinkRejectedError(msg)


def newest_rows(rows: pa.Table, *, view: FeatureView) -> pa.Table:
    """Keep the newest row of each entity, by :data:`ORDER_COLUMNS`; among equals, the first one.

    Rows come out in their order of input.
    """
    columns = {name: rows[name].cast(pa.int64()) for name in ORDER_COLUMNS}
    order = cast(pl.DataFrame, pl.from_arrow(pa.table({"entity": rows[view.entity.key], **columns})))
    if order["entity"].n_unique() == rows.num_rows:
        return rows
    order = order.with_row_index("row").sort(*ORDER_COLUMNS, descending=True, maintain_order=True)
    newest = order.unique("entity", keep="first")["row"].sort()
    return rows.take(newest.to_arrow())
