"""Rows and dead letters of a replay, by the records that they are of as those were live."""

from dataclasses import replace

import numpy as np
import pyarrow as pa
import pytest

from jobs.namespace import view_in
from offline.replayed import Letter, _stretches, compare_letters, restore_places
from schemas.aggregation import count
from tests.support.feature_rows import make_rows, make_view

COUNTS = make_view("counts", features={"n": count().over("5m")})


def test_rows_name_their_records_as_these_were_live_whatever_offsets_there_are_none_of() -> None:
    replayed = view_in("replay_x", COUNTS)
    topic = replayed.input.topic
    assert topic == f"replay_x.{COUNTS.input.topic}"
    own, given = f"{topic}-1-2", "the-producers-own"
    rows = make_rows(replayed, [{"n": 1, "source_offset": 2}, {"n": 2, "source_offset": 0}])
    at = rows.schema.get_field_index("source_partition")
    rows = rows.set_column(at, rows.schema.field(at), pa.array([1, 1], rows.schema.field(at).type))
    at = rows.schema.get_field_index("request_id")
    rows = rows.set_column(at, rows.schema.field(at), pa.array([own, given]))
    restored = restore_places(rows, replayed=replayed, view=COUNTS, originals={1: np.array([7, 9, 40])})
    assert restored["source_offset"].to_pylist() == [40, 7]
    assert restored["request_id"].to_pylist() == [f"{COUNTS.input.topic}-1-40", given]
    assert set(restored["definition_hash"].to_pylist()) == {COUNTS.definition_hash}
    assert restored["n"].to_pylist() == [1, 2]


def test_stretches_are_all_that_is_wanted_and_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("offline.replayed.COMPARED_ROWS", 2)
    offsets = np.array([3, 4, 8, 9, 11, 15])
    assert list(_stretches(offsets, range(4, 15))) == [range(4, 9), range(9, 15)]
    assert list(_stretches(offsets, range(0, 100))) == [range(0, 8), range(8, 11), range(11, 100)]
    assert list(_stretches(offsets, range(20, 30))) == [range(20, 30)]


def test_letters_are_compared_by_record_reason_and_view_within_what_is_wanted() -> None:
    same = Letter(partition=0, offset=5, reason="late", view="a")
    here, there = replace(same, offset=6), replace(same, offset=7, view=None, reason="decode_error")
    outside = replace(same, offset=100)
    found = compare_letters({same, here, outside}, {same, there}, wanted={0: range(10)}, ends={0: 10}, is_whole=True)
    assert (found.rows, found.mismatched, found.not_judged) == (3, 2, 0)
    assert [(m.kind, m.lineage["source_offset"]) for m in found.mismatches] == [("missing", 7), ("unexpected", 6)]


def test_letters_that_retention_may_have_taken_are_not_judged() -> None:
    there = Letter(partition=0, offset=5, reason="late", view="a")
    found = compare_letters(set(), {there}, wanted={0: range(10)}, ends={0: 10}, is_whole=False)
    assert (found.mismatched, found.not_judged) == (0, 1)


def test_letters_that_the_live_path_has_yet_to_write_are_not_judged() -> None:
    before = Letter(partition=0, offset=4, reason="late", view="a")
    behind, elsewhere = replace(before, offset=5), replace(before, partition=1, offset=0)
    found = compare_letters(
        set(), {before, behind, elsewhere}, wanted=dict.fromkeys((0, 1), range(10)), ends={0: 5}, is_whole=True
    )
    assert [mismatch.lineage["source_offset"] for mismatch in found.mismatches] == [4]
    assert (found.rows, found.not_judged) == (1, 2)
