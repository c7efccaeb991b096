import io
from datetime import UTC, datetime
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from streams.sinks.file_stats import file_stats


def stats_of(*groups: dict[str, Any], schema: pa.Schema) -> dict[str, Any]:
    described: list[pq.FileMetaData] = []
    with pq.ParquetWriter(io.BytesIO(), schema, metadata_collector=described) as writer:
        for group in groups:
            writer.write_table(pa.table(group, schema=schema))
    return file_stats(described[0])


def test_bounds_are_of_all_row_groups_and_nulls_of_all_too() -> None:
    schema = pa.schema({"n": pa.int64(), "name": pa.string()})
    found = stats_of({"n": [4, None], "name": ["b", "c"]}, {"n": [9, 2], "name": [None, "a"]}, schema=schema)
    assert found == {
        "numRecords": 4,
        "minValues": {"n": 2, "name": "a"},
        "maxValues": {"n": 9, "name": "c"},
        "nullCount": {"n": 1, "name": 1},
    }


def test_a_row_group_of_nulls_bounds_nothing_and_a_column_of_nulls_has_no_bounds() -> None:
    schema = pa.schema({"n": pa.int64(), "empty": pa.int64()})
    found = stats_of({"n": [None], "empty": [None]}, {"n": [3], "empty": [None]}, schema=schema)
    assert (found["minValues"], found["maxValues"]) == ({"n": 3}, {"n": 3})
    assert found["nullCount"] == {"n": 1, "empty": 2}


def test_a_text_that_is_too_long_in_one_row_group_leaves_the_column_without_bounds() -> None:
    schema = pa.schema({"name": pa.string()})
    found = stats_of({"name": ["a"]}, {"name": ["z" * 100]}, schema=schema)
    assert (found["minValues"], found["maxValues"], found["nullCount"]) == ({}, {}, {"name": 0})


def test_a_moment_is_rounded_away_from_the_values_that_it_bounds() -> None:
    schema = pa.schema({"at": pa.timestamp("us", "UTC")})
    first, last = (datetime(2026, 1, 1, 0, 0, second, 1_500, UTC) for second in (1, 2))
    found = stats_of({"at": [last]}, {"at": [first]}, schema=schema)
    assert found["minValues"] == {"at": "2026-01-01T00:00:01.001Z"}
    assert found["maxValues"] == {"at": "2026-01-01T00:00:02.002Z"}


def test_a_file_without_rows_has_no_bounds() -> None:
    found = stats_of(schema=pa.schema({"n": pa.int64()}))
    assert (found["numRecords"], found["minValues"]) == (0, {})
