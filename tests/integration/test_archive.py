"""The archive of a topic: records as they came, each once, in the order of the log."""

import tempfile
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from deltalake import DeltaTable, write_deltalake
from hypothesis import given, settings
from hypothesis import strategies as st

from schemas.errors import SchemaMismatchError, SinkRejectedError, SinkUnavailableError
from streams.batch import RawBatch
from streams.sinks.archive import Archive, ArchiveWriter, archive_uri

TOPIC = "shop.events"


def records(offsets: list[int] | range, *, partition: int = 0, time_us: int = 1_000_000) -> RawBatch:
    numbers = list(offsets)
    return RawBatch(
        topic=TOPIC,
        partition=partition,
        offsets=np.array(numbers, np.int64),
        broker_time_us=np.array([time_us + n for n in numbers], np.int64),
        keys=[f"k{n}".encode() for n in numbers],
        values=[f"v{n}".encode() for n in numbers],
        headers=[None] * len(numbers),
        next_offset=numbers[-1] + 1,
    )


def read(root: Path, partition: int = 0, offsets: range = range(2**40)) -> list[int]:
    found = [batch.offsets for batch in Archive(str(root), TOPIC).read(partition, offsets)]
    return np.concatenate(found).tolist() if found else []


def test_records_come_back_as_they_were(tmp_path: Path) -> None:
    batch = RawBatch(
        topic=TOPIC,
        partition=3,
        offsets=np.array([7, 9, 10, 12]),
        broker_time_us=np.array([5, -1, 1_700_000_000_123_000, 0]),
        keys=[None, b"", b"\xff\x00", b"k"],
        values=[b"\xff", None, b"", b'{"a": 1}'],
        headers=[None, [], [("request_id", b"\x00"), ("request_id", b"")], [("n", None)]],  # type: ignore[list-item]
        next_offset=13,
    )
    assert ArchiveWriter(tmp_path).write(batch).rows == 4
    (found,) = Archive(str(tmp_path), TOPIC).read(3, range(100))
    for name in ("topic", "partition", "headers", "next_offset"):
        assert getattr(found, name) == getattr(batch, name), name
    assert (list(found.keys), list(found.values)) == (batch.keys, batch.values)
    assert found.offsets.tolist() == batch.offsets.tolist()
    assert found.broker_time_us.tolist() == batch.broker_time_us.tolist()


@settings(max_examples=10, deadline=None)
@given(steps=st.lists(st.tuples(st.integers(0, 3), st.integers(1, 6), st.booleans()), min_size=1, max_size=6))
def test_any_splitting_and_rewinding_leaves_each_record_once_in_log_order(steps: list[tuple[int, int, bool]]) -> None:
    with tempfile.TemporaryDirectory() as directory:
        writer, position, reached = ArchiveWriter(directory), 0, 0
        for back, size, is_restarted in steps:
            writer = ArchiveWriter(directory) if is_restarted else writer
            position = max(0, position - back)
            writer.write(records(range(position, position + size)))
            position += size
            reached = max(reached, position)
        assert read(Path(directory)) == list(range(reached))


def test_two_writers_of_a_partition_leave_each_record_once(tmp_path: Path) -> None:
    slow, fast = ArchiveWriter(tmp_path), ArchiveWriter(tmp_path)
    slow.write(records([0]))
    fast.write(records([1, 2]))
    result = slow.write(records([1, 2, 3]))
    assert (result.rows, result.skipped) == (1, 2)
    assert not slow.write(records([1, 2, 3]))
    assert read(tmp_path) == [0, 1, 2, 3]


def test_partitions_are_apart_and_a_range_is_read_alone(tmp_path: Path) -> None:
    writer = ArchiveWriter(tmp_path)
    for first in range(0, 30, 10):
        writer.write(records(range(first, first + 10), partition=0))
        writer.write(records(range(first, first + 10, 3), partition=1))
    assert read(tmp_path, 0, range(8, 13)) == [8, 9, 10, 11, 12]
    assert read(tmp_path, 1) == [0, 3, 6, 9, 10, 13, 16, 19, 20, 23, 26, 29]
    assert read(tmp_path, 2) == []
    parts = Archive(str(tmp_path), TOPIC).parts()
    assert Archive(str(tmp_path), TOPIC).count({0: 25, 1: 0}) == 17
    assert {number: (part.offsets, part.records) for number, part in parts.items()} == {
        0: (range(30), 30),
        1: (range(30), 12),
    }


@pytest.mark.parametrize("how", ["compact", "z_order"])
def test_the_order_of_the_log_outlives_compaction(tmp_path: Path, how: str) -> None:
    writer = ArchiveWriter(tmp_path)
    # Files of very different sizes: compaction takes them in the order of these.
    at = 0
    for size in (40, 1, 200, 3, 90, 1, 1, 500):
        writer.write(records(range(at, at + size)))
        at += size
    table = DeltaTable(archive_uri(tmp_path, TOPIC))
    if how == "compact":
        table.optimize.compact()
    else:
        table.optimize.z_order(["offset"])
    writer.write(records(range(at, at + 10)))
    assert read(tmp_path) == list(range(at + 10))


def test_a_time_is_found_by_the_first_record_that_has_it(tmp_path: Path) -> None:
    writer = ArchiveWriter(tmp_path)
    writer.write(records(range(10), time_us=100))
    writer.write(records(range(5), partition=1, time_us=0))
    archive = Archive(str(tmp_path), TOPIC)
    assert archive.first_at(104) == {0: 4, 1: 5}
    assert archive.first_at(0) == {0: 0, 1: 0}


def test_what_is_added_or_compacted_while_it_is_read_is_not_seen(tmp_path: Path) -> None:
    writer = ArchiveWriter(tmp_path)
    for first in range(0, 9, 3):
        writer.write(records(range(first, first + 3)))
    batches = Archive(str(tmp_path), TOPIC).read(0, range(100))
    found = next(batches).offsets.tolist()
    writer.write(records(range(9, 12)))
    DeltaTable(archive_uri(tmp_path, TOPIC)).optimize.compact()
    for batch in batches:
        found += batch.offsets.tolist()
    assert found == list(range(9))


def test_an_archive_that_is_not_there_says_who_writes_it(tmp_path: Path) -> None:
    assert not Archive(str(tmp_path), TOPIC).is_there
    with pytest.raises(SinkUnavailableError, match=r"no archive .*raw\.shop\.events.*role offline.*--source kafka"):
        Archive(str(tmp_path), TOPIC).parts()


def test_a_table_of_something_else_is_refused(tmp_path: Path) -> None:
    write_deltalake(archive_uri(tmp_path, TOPIC), pa.table({"a": [1]}))
    for ask in (lambda: ArchiveWriter(tmp_path).write(records([1])), Archive(str(tmp_path), TOPIC).parts):
        with pytest.raises(SchemaMismatchError, match=r"archive of None, expected 'shop\.events'"):
            ask()


def test_a_root_that_is_a_file_is_rejected(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(SinkRejectedError, match="Not a directory"):
        ArchiveWriter(tmp_path / "file").write(records([1]))
