"""How a feature row becomes one Redis value, and comes back the same.

A value is ASCII digits, a tag and JSON, so that it can be read with ``GET`` and from any language::

    window_end pane_index source_offset   20 digits each, offset by 2^63: text order is number order, below 0 too
    "1:" + definition_hash                format and definition; a reader of another definition sees nothing
    [event_time, pane, watermark, broker_time, feature, feature, ...]

Times are integers in microseconds. Features stand in the order of their names (the definition hash does not depend on
the order they were written in). NaN and the infinities, which JSON has no numbers for, are the texts ``"nan"``,
``"inf"`` and ``"-inf"`` where the feature's type is float64.
"""

import math
from dataclasses import dataclass
from typing import Any, Final, cast

import orjson
import polars as pl
import pyarrow as pa
import pyarrow.compute as pc

from schemas.row import Pane
from schemas.view import FeatureView
from streams.sinks.rows import ORDER_COLUMNS

_FORMAT: Final = "1"
_BIAS: Final = 2**63
_DIGITS: Final = 20
_ORDER_END: Final = _DIGITS * len(ORDER_COLUMNS)
_TAG_END: Final = _ORDER_END + len(_FORMAT) + 1 + 16


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


def pack_rows(rows: pa.Table, *, view: FeatureView) -> list[bytes]:
    """Pack rows, each into one value; see the module's text for the format."""
    order = [[time_us + _BIAS for time_us in _integers(rows[name])] for name in ORDER_COLUMNS]
    context = [_integers(rows["event_time"]), rows["pane"].to_pylist()]
    context += [_integers(rows[name]) for name in ("watermark", "broker_time")]
    features = [_json_values(rows[name]) for name in sorted(view.definitions)]
    tag = f"{_FORMAT}:{view.definition_hash}".encode()
    dump = orjson.dumps
    return [
        b"%020d%020d%020d%b%b" % (end, index, offset, tag, dump(row))
        for end, index, offset, row in zip(*order, zip(*context, *features, strict=True), strict=True)
    ]


def unpack_value(value: bytes, *, view: FeatureView) -> UnpackedValue | None:
    """Unpack a value, or return None when another definition or format packed it."""
    if value[_ORDER_END:_TAG_END] != f"{_FORMAT}:{view.definition_hash}".encode():
        return None
    end, index, offset = (int(value[start : start + _DIGITS]) - _BIAS for start in range(0, _ORDER_END, _DIGITS))
    event_time_us, pane, watermark_us, broker_time_us, *packed = orjson.loads(value[_TAG_END:])
    by_name = dict(zip(sorted(view.definitions), packed, strict=True))
    types = view.feature_schema
    return UnpackedValue(
        window_end_us=end,
        pane_index=index,
        source_offset=offset,
        event_time_us=event_time_us,
        pane=Pane(pane),
        watermark_us=watermark_us,
        broker_time_us=broker_time_us,
        features={name: _from_json(by_name[name], arrow=types.field(name).type) for name in view.definitions},
    )


def _integers(column: pa.ChunkedArray) -> list[Any]:
    return _values(column.cast(pa.int64()))


def _values(column: pa.ChunkedArray) -> list[Any]:
    # Several times faster than pyarrow's to_pylist.
    return cast(pl.Series, pl.from_arrow(column)).to_list()


def _json_values(column: pa.ChunkedArray) -> list[Any]:
    leaves = column
    while pa.types.is_list(leaves.type):
        leaves = pc.list_flatten(leaves)
    if not pa.types.is_floating(leaves.type) or pc.all(pc.is_finite(leaves), min_count=0).as_py():
        return _values(column)
    return [_to_json(value) for value in _values(column)]


def _to_json(value: Any) -> Any:
    if isinstance(value, list):
        return [_to_json(item) for item in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def _from_json(value: Any, *, arrow: pa.DataType) -> Any:
    if pa.types.is_list(arrow):
        return None if value is None else [_from_json(item, arrow=arrow.value_type) for item in value]
    return float(value) if isinstance(value, str) and pa.types.is_floating(arrow) else value
