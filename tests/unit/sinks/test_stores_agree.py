"""A row says the same, to the bit, on its topic, in Redis, in Delta and in the files of ``headrace compute``."""

import json
import math
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from jobs.row_file import open_row_file
from schemas.aggregation import (
    count,
    decayed_sum,
    derived,
    from_event,
    last_n,
    max_,
    mean,
    rate,
    stddev,
    sum_,
    variance,
)
from schemas.entity import Entity
from schemas.view import FeatureView
from streams.pipeline import PartitionPipeline
from streams.sinks.offline import OfflineWriter, read_features
from streams.sinks.packing import pack_rows, unpack_value
from streams.wire import decode_rows, encode_rows
from tests.support.builders import make_source
from tests.support.transport import make_batch

VIEW = FeatureView(
    "extremes",
    version=1,
    entity=Entity("thing", key="key"),
    source=make_source(),
    slide="1m",
    emit="every_event",
    features={
        "n": count().over("1m"),
        "total": sum_("x").over("1m"),
        "average": mean("x").over("1m"),
        "spread": variance("x").over("1m"),
        "deviation": stddev("x").over("2m"),
        "per_s": rate("x").over("1m"),
        "fading": decayed_sum("x", half_life="1h").over("1m"),
        "largest": max_("x").over("1m"),
        "newest": last_n("x").over(last=3),
        "x": from_event("x"),
        "grown": derived("total * 10"),
        "known": derived("coalesce(total, -1)"),
    },
)
INPUTS = [-0.0, 0.1, 1e308, 1e308, -1e308, -1e308, 5e-324, 1 / 3, -1.7976931348623157e308, 1.5, 0.30000000000000004]


@pytest.fixture(scope="module")
def rows() -> pa.Table:
    """Rows of every overflow: one key adds up all inputs, the others fewer and fewer of them."""
    events = [
        json.dumps({"key": key, "at": 10 + at, "x": x}).encode()
        for at, x in enumerate(INPUTS)
        for key in "abcdefgh"[: 8 - at % 8]
    ]
    pipeline = PartitionPipeline(VIEW.source, [VIEW], partition=0)
    made = pipeline.process(make_batch(events), processing_time_us=0, computed_time_us=123, epoch=7)
    assert made.dead_letters.num_rows == 0
    return made.rows["extremes"]


def spelled(rows: pa.Table) -> list[str]:
    """Rows as text: -0.0 is not 0.0 in it, and NaN is like NaN."""
    return [repr({name: row[name] for name in VIEW.feature_schema.names}) for row in rows.to_pylist()]


def test_what_is_no_finite_number_is_null_in_the_row_itself(rows: pa.Table) -> None:
    found = rows.to_pylist()

    assert {math.isfinite(v) for row in found for v in row.values() if isinstance(v, float)} == {True}
    broken = [row for row in found if row["total"] is None]
    assert broken
    assert {row["largest"] for row in broken} == {1e308}
    assert all(row["average"] is None and row["spread"] is None and row["n"] >= 4 for row in broken)


def test_a_derived_feature_reads_what_stands_in_the_row(rows: pa.Table) -> None:
    found = rows.to_pylist()

    assert {row["known"] for row in found if row["total"] is None} == {-1.0}
    assert any(row["total"] is not None and row["grown"] is None for row in found)


def test_every_store_gives_back_the_same_rows(rows: pa.Table, tmp_path: Path) -> None:
    on_topic = decode_rows(encode_rows(rows), VIEW.row_schema)
    OfflineWriter(tmp_path / "delta").write(rows, view=VIEW, partition=0, offsets=rows["source_offset"].to_pylist())
    in_delta = read_features(tmp_path / "delta", VIEW).sort_by([("source_offset", "ascending")])
    with open_row_file(tmp_path / "rows.parquet", VIEW.row_schema) as file:
        file.write(rows)
    with open_row_file(tmp_path / "rows.ndjson", VIEW.row_schema) as file:
        file.write(rows)
    online: list[Any] = [unpack_value(packed, view=VIEW) for packed in pack_rows(rows, view=VIEW)]

    assert spelled(on_topic) == spelled(rows)
    assert spelled(in_delta) == spelled(rows)
    assert spelled(pq.read_table(tmp_path / "rows.parquet")) == spelled(rows)
    assert (tmp_path / "rows.ndjson").read_bytes().splitlines() == encode_rows(rows)
    keys = rows["key"].to_pylist()
    assert [repr({"key": key} | value.features) for key, value in zip(keys, online, strict=True)] == spelled(rows)
