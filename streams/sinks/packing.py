"""How a feature row becomes one Redis value, and comes back the same.

A value is ASCII digits, a tag and JSON, so that it can be read with ``GET`` and from any language::

    window_end pane_index source_offset   20 digits each, offset by 2^63: text order is number order, below 0 too
    "1:" + definition_hash                format and definition; a reader of another definition sees nothing
    [event_time, pane, watermark, broker_time, feature, feature, ...]

Times are integers in microseconds. Features stand in the order of their names (the definition hash does not depend on
the order they were written in). NaN and the infinities, which no row of the engine has, would be null. Where pseudonyms
stand for what is personal (:mod:`streams.sinks.pseudonym`) the format is "h".
"""

import io
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Final, Self

import numpy as np
import orjson
import polars as pl
import pyarrow as pa

from schemas.row import Pane
from schemas.view import FeatureView
from streams.ports import OnlineColumns
from streams.sinks.rows import ORDER_COLUMNS

_FORMATS: Final = {"plain": "1", "hash": "h"}
"""By what stands there for personal values, so that neither is read as the other."""
_BIAS: Final = 2**63
_DIGITS: Final = 20
ORDER_END: Final = _DIGITS * len(ORDER_COLUMNS)
TAG_END: Final = ORDER_END + len("1:") + 16
_CONTEXT: Final = ("event_time", "pane", "watermark", "broker_time")


@dataclass(frozen=True, kw_only=True)
class UnpackedValue:
    """A value as it was packed; see :class:`streams.sinks.online.OnlineValue` for the fields."""

    window_end_us: int
    pane_index: int
    source_offset: int
    event_time_us: int
    pane: Pane
    watermark_us: int | None
    broker_time_us: int | None
    features: dict[str, Any]


@dataclass(frozen=True)
class Packing:
    """How one view's rows are packed; made once for a view, as it is asked for each row.

    Attributes:
        tag: Format and definition hash, as they stand in each value.
        columns: What the JSON holds, in its order.
        features: Names of the features in the view's order, each with its place in the JSON.
    """

    tag: bytes
    columns: tuple[str, ...]
    features: tuple[tuple[str, int], ...]

    @classmethod
    def of(cls, view: FeatureView) -> Self:
        """Make the packing of a view."""
        names = sorted(view.features)
        columns = (*_CONTEXT, *names)
        return cls(
            tag=f"{_FORMATS[view.serving.personal]}:{view.definition_hash}".encode(),
            columns=columns,
            features=tuple((name, columns.index(name)) for name in view.features),
        )


@lru_cache(maxsize=256)
def _packing_by_id(
    name: str, version: int, definition_hash: str, personal: str, features: tuple[str, ...]
) -> list[Packing]:
    """Hold the packing of one view; empty until it is made, as a view itself cannot be hashed."""
    return []


def packing_of(view: FeatureView) -> Packing:
    """Give the packing of a view, made the first time."""
    held = _packing_by_id(view.name, view.version, view.definition_hash, view.serving.personal, tuple(view.features))
    if not held:
        held.append(Packing.of(view))
    return held[0]


def pack_rows(rows: pa.Table, *, view: FeatureView) -> list[bytes]:
    """Pack rows, each into one value; see the module's text for the format."""
    packing = packing_of(view)
    order = zip(*(rows[name].cast(pa.int64()).to_pylist() for name in ORDER_COLUMNS), strict=True)
    tag = packing.tag
    return [
        b"%020d%020d%020d%b[%b]" % (end + _BIAS, index + _BIAS, offset + _BIAS, tag, line)
        for (end, index, offset), line in zip(order, _json_lines(rows.select(packing.columns)), strict=True)
    ]


def pack_order(window_end_us: int, pane_index: int, source_offset: int) -> bytes:
    """Pack an order: text that sorts as the numbers do."""
    return b"%020d%020d%020d" % (window_end_us + _BIAS, pane_index + _BIAS, source_offset + _BIAS)


def _json_lines(rows: pa.Table) -> list[bytes]:
    """Write each row as the inside of a JSON array, by columns: row by row it takes three times as long.

    Numbers are as CSV writes them, the shortest that read back the same; any other value is made JSON before, and JSON
    has no line breaks inside.
    """
    columns = []
    for name, values in zip(rows.column_names, rows.columns, strict=True):
        column = pl.Series(
            name, pl.from_arrow(values.cast(pa.int64()) if pa.types.is_timestamp(values.type) else values)
        )
        if column.dtype.is_float():
            # What is no finite number is null, as JSON has none.
            column = column.to_frame().select(pl.when(pl.col(name).is_finite()).then(pl.col(name))).to_series()
        elif not (column.dtype.is_integer() or column.dtype == pl.Boolean):
            encoded = column.rename("v").to_frame().to_struct().struct.json_encode()  # {"v":…}
            column = encoded.str.slice(5).str.head(-1).rename(name)
        columns.append(column)
    buffer = io.BytesIO()
    pl.DataFrame(columns).write_csv(buffer, include_header=False, null_value="null", quote_style="never")
    return buffer.getvalue().split(b"\n")[:-1]


def unpack_value(value: bytes, *, view: FeatureView) -> UnpackedValue | None:
    """Unpack a value, or return None when another definition or format packed it."""
    packing = packing_of(view)
    if value[ORDER_END:TAG_END] != packing.tag:
        return None
    packed = orjson.loads(value[TAG_END:])
    event_time_us, pane, watermark_us, broker_time_us = packed[: len(_CONTEXT)]
    return UnpackedValue(
        window_end_us=int(value[:_DIGITS]) - _BIAS,
        pane_index=int(value[_DIGITS : 2 * _DIGITS]) - _BIAS,
        source_offset=int(value[2 * _DIGITS : ORDER_END]) - _BIAS,
        event_time_us=event_time_us,
        pane=Pane(pane),
        watermark_us=watermark_us,
        broker_time_us=broker_time_us,
        features={name: packed[place] for name, place in packing.features},
    )


def unpack_columns(values: Sequence[bytes | None], *, view: FeatureView) -> OnlineColumns:
    """Unpack values into columns: one by one it takes five times as long.

    Args:
        values: Values as they are stored; None where there is none.
        view: The view; what another definition or format packed is none.
    """
    packing = packing_of(view)
    ours = [None if value is None or value[ORDER_END:TAG_END] != packing.tag else value[TAG_END:] for value in values]
    is_ours = np.array([value is not None for value in ours], dtype=np.bool_)
    packed = orjson.loads(b"[%b]" % b",".join([value for value in ours if value is not None]))
    columns = list(zip(*packed, strict=True)) or [()] * len(packing.columns)
    return OnlineColumns(
        row_of=pa.array(np.cumsum(is_ours, dtype=np.int32) - 1, mask=~is_ours),
        event_time_us=columns[0],
        is_empty=[pane == Pane.EMPTY.value for pane in columns[1]],
        features={name: columns[place] for name, place in packing.features},
    )
