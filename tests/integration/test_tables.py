"""Upkeep of the offline store's tables: every row once before, during and after, whoever else is at work."""

import json
import os
import tempfile
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from threading import Event
from typing import Any

import pyarrow as pa
import pytest
from deltalake import DeltaTable, write_deltalake
from deltalake.exceptions import CommitFailedError
from deltalake.transaction import AddAction
from hypothesis import given, settings
from hypothesis import strategies as st

import offline.compaction
from offline.compaction import SmallFiles, compact, plan_compaction
from offline.maintenance import FoundTable, Kind, Maintained, cluster_columns, find_tables, look, maintain
from schemas.errors import SinkRejectedError, SinkUnavailableError
from streams.sinks.archive import Archive, ArchiveWriter, archive_uri
from streams.sinks.offline import OfflineWriter, table_uri
from streams.sinks.staging import Stage, open_files
from tests.integration.test_archive import TOPIC, read, records
from tests.integration.test_backfill import unnamed_files
from tests.support.dying_maintenance import STEPS
from tests.support.history import FILES, N_RECORDS, Place, expected, stored

NO_AGE = {"retention_hours": 0, "unnamed_hours": 0}


@pytest.fixture
def place(tmp_path: Path) -> Place:
    return Place(tmp_path)


def found(root: Path, name: str) -> FoundTable:
    return next(table for table in find_tables(str(root)) if table.name == name)


@contextmanager
def maintained_meanwhile(root: Path, name: str, **ages: int) -> Iterator[list[Maintained]]:
    """Maintain a table over and over, once at least, for as long as the block takes."""
    done, results, begun = Event(), list[Maintained](), Event()

    def work() -> None:
        while not (done.is_set() and results):
            begun.set()
            if any(table.name == name for table in find_tables(str(root))):
                results.append(maintain(found(root, name), attempts=50, **ages))

    with ThreadPoolExecutor(1) as pool:
        working = pool.submit(work)
        begun.wait()
        try:
            yield results
        finally:
            done.set()
            working.result()


def write_live_in_steps(place: Place) -> None:
    """Write the rows of each batch as a commit of its own, by a writer of its own, each twice."""
    view = place.view
    for partition, tables in place.live_rows(view).items():
        reached = 0
        for rows in tables:
            offsets = range(reached, reached + rows.num_rows)
            assert OfflineWriter(place.delta).write(rows, view=view, partition=partition, offsets=offsets).rows
            again = OfflineWriter(place.delta).write(rows, view=view, partition=partition, offsets=offsets)
            assert (again.rows, again.skipped) == (0, rows.num_rows)
            reached = offsets.stop


@pytest.mark.parametrize("is_clustered", [False, True])
def test_each_row_is_there_once_before_and_after(place: Place, is_clustered: bool) -> None:
    write_live_in_steps(place)
    view = place.view
    before = stored(place.delta, view)
    table = found(place.delta, "activity/v1")
    state = look(table)
    assert (state.files, state.small_files, state.rows) == (2 * FILES, 2 * FILES, len(before))
    result = maintain(table, sort_by=cluster_columns(table) if is_clustered else (), **NO_AGE)
    assert (result.files_removed, result.files_added, result.after.files) == (2 * FILES, 1, 1)
    assert result.files_deleted == 2 * FILES
    assert stored(place.delta, view) == before == expected(view, place.live_rows(view))
    (uri,) = DeltaTable(table.uri).file_uris()
    keys = pa.parquet.read_table(uri)["user_id"].to_pylist()
    assert (keys == sorted(keys)) == is_clustered
    again = maintain(table, **NO_AGE)
    assert (again.files_removed, again.files_deleted, again.after.version) == (0, 0, result.after.version)


def test_writers_know_after_it_what_is_there(place: Place) -> None:
    write_live_in_steps(place)
    view = place.view
    last = [OfflineWriter(place.delta).last_offset(view, partition) for partition in place.batches]
    for table in find_tables(str(place.delta)):
        maintain(table, **NO_AGE)
    assert [OfflineWriter(place.delta).last_offset(view, partition) for partition in place.batches] == last
    place.write_live(view, place.live_rows(view))
    place.archive(0, range(FILES))
    assert stored(place.delta, view) == expected(view, place.live_rows(view))
    assert read(place.delta) == list(range(N_RECORDS))


def test_a_live_writer_is_not_hindered(place: Place) -> None:
    with maintained_meanwhile(place.delta, "activity/v1", retention_hours=0) as results:
        write_live_in_steps(place)
    assert sum(result.files_removed for result in results) > FILES
    assert stored(place.delta, place.view) == expected(place.view, place.live_rows(place.view))


def test_an_archive_is_written_and_compacted_at_once_and_stays_in_log_order(tmp_path: Path) -> None:
    writer = ArchiveWriter(tmp_path)
    with maintained_meanwhile(tmp_path, f"raw.{TOPIC}", retention_hours=0) as results:
        for first in range(0, 600, 10):
            writer.write(records(range(first, first + 10)))
            ArchiveWriter(tmp_path).write(records(range(max(0, first - 10), first + 10)))
    assert sum(result.files_removed for result in results) > 10
    assert read(tmp_path) == list(range(600))


def test_two_at_once_do_it_once(place: Place) -> None:
    write_live_in_steps(place)
    table = found(place.delta, "activity/v1")
    with ThreadPoolExecutor(4) as pool:
        results = list(pool.map(lambda _: maintain(table, retention_hours=0), range(4)))
    assert sum(result.files_added for result in results) == 1
    assert stored(place.delta, place.view) == expected(place.view, place.live_rows(place.view))


@settings(max_examples=15, deadline=None)
@given(rounds=st.lists(st.lists(st.integers(1, 40), min_size=1, max_size=5), min_size=1, max_size=5))
def test_whatever_is_compacted_again_and_again_log_order_stays(rounds: list[list[int]]) -> None:
    with tempfile.TemporaryDirectory() as directory:
        at = 0
        for sizes in rounds:
            for size in sizes:
                ArchiveWriter(directory).write(records(range(at, at + size)))
                at += size
            # So small a target that a round makes several files, some of which the next takes up again.
            maintain(found(Path(directory), f"raw.{TOPIC}"), target_bytes=9_000, **NO_AGE)
            assert read(Path(directory)) == list(range(at))


def test_a_compacted_archive_is_in_log_order_and_any_range_of_it_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("offline.compaction._GROUP_ROWS", 16)
    monkeypatch.setattr("streams.sinks.archive._JOINED_ROWS", 1)
    for first in range(0, 100, 25):
        ArchiveWriter(tmp_path).write(records(range(first, first + 25)))
    maintain(found(tmp_path, f"raw.{TOPIC}"))
    (uri,) = DeltaTable(archive_uri(tmp_path, TOPIC)).file_uris()
    assert pa.parquet.read_table(uri)["offset"].to_pylist() == list(range(100))
    batches = [batch.offsets.tolist() for batch in Archive(str(tmp_path), TOPIC).read(0, range(100))]
    assert max(map(len, batches)) <= 16
    for wanted in (range(100), range(24, 51), range(30, 31), range(99, 200)):
        assert read(tmp_path, 0, wanted) == list(range(wanted.start, min(wanted.stop, 100)))


def test_what_another_engine_has_mixed_is_put_into_log_order(tmp_path: Path) -> None:
    for first in range(0, 100, 25):
        ArchiveWriter(tmp_path).write(records(range(first, first + 25)))
    uri = archive_uri(tmp_path, TOPIC)
    DeltaTable(uri).optimize.z_order(["value"])
    ArchiveWriter(tmp_path).write(records(range(100, 110)))
    maintain(found(tmp_path, f"raw.{TOPIC}"), **NO_AGE)
    (compacted,) = DeltaTable(uri).file_uris()
    assert pa.parquet.read_table(compacted)["offset"].to_pylist() == list(range(110))


def test_large_files_stay_and_those_of_an_archive_keep_to_their_place(tmp_path: Path) -> None:
    for size in (3, 2_000, 4, 5, 2_000, 6):
        held = read(tmp_path) if find_tables(str(tmp_path)) else []
        ArchiveWriter(tmp_path).write(records(range(len(held), len(held) + size)))
    sizes = sorted(DeltaTable(archive_uri(tmp_path, TOPIC)).get_add_actions()["size_bytes"].to_pylist())
    result = maintain(found(tmp_path, f"raw.{TOPIC}"), target_bytes=sizes[-2] * 2, **NO_AGE)
    assert (result.files_removed, result.files_added, result.after.small_files) == (2, 1, 0)
    actions = pa.table(DeltaTable(archive_uri(tmp_path, TOPIC)).get_add_actions(flatten=True))
    assert sorted(actions["min.offset"].to_pylist()) == [0, 3, 2_003, 2_012, 4_012]
    assert read(tmp_path) == list(range(4_018))


def compact_again(place: Place, meanwhile: Callable[[DeltaTable, SmallFiles], object]) -> bool:
    """Compact what was to be compacted before something else happened."""
    uri = table_uri(place.delta, place.view)
    files, table = open_files(uri, None), DeltaTable(uri)
    (small,) = plan_compaction(table, target_bytes=2**20, is_archive=False)
    meanwhile(DeltaTable(uri), small)
    return compact(table, small, files=files, is_archive=False, attempts=3)


def test_what_another_compaction_has_done_is_left_to_it(place: Place) -> None:
    write_live_in_steps(place)

    def overtake(table: DeltaTable, small: SmallFiles) -> None:
        assert compact(table, small, files=open_files(table.table_uri, None), is_archive=False, attempts=1)

    assert not compact_again(place, overtake)
    assert stored(place.delta, place.view) == expected(place.view, place.live_rows(place.view))
    assert len(unnamed_files(place)) == 2 * FILES  # those that were put together, and none of the second


def test_what_delta_rs_itself_has_put_together_is_not_there_twice(place: Place) -> None:
    write_live_in_steps(place)
    assert not compact_again(place, lambda table, small: table.optimize.compact())
    assert stored(place.delta, place.view) == expected(place.view, place.live_rows(place.view))


def test_files_that_another_maintenance_has_removed_by_now_are_left_to_it(place: Place) -> None:
    write_live_in_steps(place)
    table = found(place.delta, "activity/v1")
    assert not compact_again(place, lambda _, small: maintain(table, **NO_AGE))
    assert stored(place.delta, place.view) == expected(place.view, place.live_rows(place.view))


def test_a_file_that_is_gone_though_the_table_names_it_is_an_error(place: Place) -> None:
    write_live_in_steps(place)

    def lose(table: DeltaTable, small: SmallFiles) -> None:
        (Path(table_uri(place.delta, place.view)) / next(iter(small.sizes))).unlink()

    with pytest.raises(SinkUnavailableError):
        compact_again(place, lose)
    assert unnamed_files(place) == set()


def test_a_commit_whose_answer_was_lost_is_found(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    write_live_in_steps(place)

    class Forgetful(DeltaTable):  # type: ignore[misc]
        def create_write_transaction(self, *arguments: Any, **options: Any) -> None:
            super().create_write_transaction(*arguments, **options)
            raise CommitFailedError

    uri = table_uri(place.delta, place.view)
    table = Forgetful(uri)
    (small,) = plan_compaction(table, target_bytes=2**20, is_archive=False)
    assert compact(table, small, files=open_files(uri, None), is_archive=False, attempts=3)
    assert stored(place.delta, place.view) == expected(place.view, place.live_rows(place.view))
    assert len(DeltaTable(uri).file_uris()) == 1


def test_a_file_that_someone_removes_before_it_is_committed_is_not_committed(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_live_in_steps(place)
    write = offline.compaction._write

    def lost(*arguments: Any, **options: Any) -> AddAction:
        added = write(*arguments, **options)
        (Path(table_uri(place.delta, place.view)) / added.path).unlink()
        return added

    monkeypatch.setattr("offline.compaction._write", lost)
    with pytest.raises(SinkRejectedError, match="is not there any more as it was written"):
        compact_again(place, lambda table, small: None)
    assert stored(place.delta, place.view) == expected(place.view, place.live_rows(place.view))


@pytest.mark.parametrize(("step", "times"), [(step, 1) for step in STEPS] + [("committed", 2)])
def test_killed_at_any_step_and_run_again_each_row_is_there_once(place: Place, step: str, times: int) -> None:
    write_live_in_steps(place)
    place.kill(step=step, times=times, module="dying_maintenance", command="tables maintain")
    assert stored(place.delta, place.view) == expected(place.view, place.live_rows(place.view))
    again = place.run(command="tables maintain")
    assert again.code == 0, again.err
    assert [look(table).small_files for table in find_tables(str(place.delta))] == [0, 0]
    assert stored(place.delta, place.view) == expected(place.view, place.live_rows(place.view))
    assert [read(place.delta, partition) for partition in (0, 1)] == [list(range(N_RECORDS))] * 2


def test_files_of_an_interrupted_backfill_stay_and_others_that_belong_to_nothing_go(place: Place) -> None:
    place.kill(step="state", times=5)
    place.write_live(place.view, {0: [rows.slice(0, 0) for rows in place.live_rows(place.view)[0]]})
    made = place.live_rows(place.view)
    place.write_live(place.view, {partition: tables[7:] for partition, tables in made.items()})
    staged = unnamed_files(place)
    other = Path(table_uri(place.delta, place.view)) / "event_date=2023-11-14" / "left.parquet"
    other.parent.mkdir(exist_ok=True)
    other.write_bytes(b"")
    table = found(place.delta, "activity/v1")
    (name,) = look(table, **NO_AGE).backfills
    assert look(table, **NO_AGE).backfills == {name: len(staged)}
    assert maintain(table, **NO_AGE).files_deleted >= 1
    assert not other.exists()
    assert staged <= unnamed_files(place)
    place.backfill()
    assert stored(place.delta, place.view) == expected(place.view, made)
    assert look(table, **NO_AGE).backfills == {}


def test_a_running_backfill_is_not_hindered(place: Place) -> None:
    view = place.view
    made = place.live_rows(view)
    place.write_live(view, {partition: tables[7:] for partition, tables in made.items()})
    with maintained_meanwhile(place.delta, "activity/v1", **NO_AGE) as results:
        place.backfill("--workers", "2")
    assert results
    assert stored(place.delta, view) == expected(view, made)
    maintain(found(place.delta, "activity/v1"), **NO_AGE)
    assert unnamed_files(place) == set()
    assert stored(place.delta, view) == expected(view, made)


def test_a_backfill_that_is_given_up_is_dropped_by_name(place: Place) -> None:
    place.kill(step="state", times=5)
    made = place.live_rows(place.view)
    place.write_live(place.view, {partition: tables[7:] for partition, tables in made.items()})
    listed = json.loads(place.run("--json", command="tables list activity/v1").out)
    ((name, n_files),) = listed[0]["backfills"].items()
    assert n_files > 0
    for options in ((), ("--dry-run",)):
        wrong = place.run("--drop-backfill", "0", *options, command="tables maintain")
        assert (wrong.code, f"expected one of: {name}" in wrong.err) == (2, True)
    tried = place.run("--dry-run", "--drop-backfill", name, command="tables maintain")
    assert (tried.code, f"activity/v1: backfill {name} would be dropped" in tried.out) == (0, True)
    assert json.loads(place.run("--json", command="tables list activity/v1").out) == listed
    assert place.run("--drop-backfill", name, command="tables maintain").code == 0
    assert unnamed_files(place)  # not a day old yet
    maintain(found(place.delta, "activity/v1"), **NO_AGE)
    assert unnamed_files(place) == set()


def test_younger_files_than_a_day_stay_that_a_writer_may_be_about_to_commit(place: Place) -> None:
    write_live_in_steps(place)
    young = Path(table_uri(place.delta, place.view)) / "event_date=2023-11-14" / "young.parquet"
    old = young.with_name("old.parquet")
    for path, age_s in ((young, 23 * 3_600), (old, 25 * 3_600)):
        path.write_bytes(b"")
        written_s = path.stat().st_mtime - age_s
        os.utime(path, (written_s, written_s))
    maintain(found(place.delta, "activity/v1"), retention_hours=0)
    assert (young.exists(), old.exists()) == (True, False)


@pytest.mark.parametrize(
    ("name", "statistics", "missing"),
    [("activity/v1", {}, "num_records"), (f"raw.{TOPIC}", {"numRecords": 1}, "min.offset")],
)
def test_a_file_that_another_engine_wrote_without_statistics_is_named(
    place: Place, name: str, statistics: dict[str, int], missing: str
) -> None:
    write_live_in_steps(place)
    uri = place.delta / name
    table = DeltaTable(str(uri))
    (column,) = table.metadata().partition_columns
    action = pa.table(table.get_add_actions()).to_pylist()[0]
    foreign = uri / action["path"]
    foreign = foreign.with_name("foreign.parquet")
    foreign.write_bytes((uri / action["path"]).read_bytes())
    path = str(foreign.relative_to(uri))
    added = AddAction(
        path, foreign.stat().st_size, {column: str(action["partition"][column])}, 0, True, json.dumps(statistics)
    )
    table.create_write_transaction([added], "append", table.schema(), [column])
    with pytest.raises(SinkRejectedError, match=f"file {path} of table .* has no statistic `{missing}`"):
        look(found(place.delta, name))
    said = place.run(command="tables maintain")
    assert (said.code, f"headrace: {name}: file {path}" in said.err) == (1, True), said.err


def test_tables_are_found_by_what_they_say_of_themselves(place: Place) -> None:
    write_live_in_steps(place)
    write_deltalake(str(place.delta / "other" / "v1"), pa.table({"a": [1]}))
    Stage(str(place.delta / "begun" / "v1"), name="ab").announce()
    assert [(table.name, table.kind) for table in find_tables(str(place.delta))] == [
        ("activity/v1", Kind.FEATURES),
        ("raw.shop.events", Kind.ARCHIVE),
    ]


def test_a_dry_run_says_what_would_be_done_and_does_nothing(place: Place) -> None:
    write_live_in_steps(place)
    before = sorted(path for path in place.delta.rglob("*") if path.is_file())
    said = place.run("--dry-run", command="tables maintain")
    assert (said.code, "nothing was done" in said.out) == (0, True)
    listed = json.loads(place.run("--json", command="tables list").out)
    assert [(table["table"], table["small_files"], table["partitions"]) for table in listed] == [
        ("activity/v1", 2 * FILES, 1),
        ("raw.shop.events", 2 * FILES, 2),
    ]
    assert json.loads(place.run("--dry-run", "--json", command="tables maintain").out) == listed
    assert sorted(path for path in place.delta.rglob("*") if path.is_file()) == before


def test_the_command_maintains_all_or_those_that_are_named(place: Place) -> None:
    write_live_in_steps(place)
    (one,) = json.loads(place.run("--json", command="tables maintain raw.shop.events").out)
    assert (one["table"], one["before"]["files"], one["after"]["files"]) == ("raw.shop.events", 2 * FILES, 2)
    every = place.run("--cluster", command="tables maintain")
    assert every.code == 0, every.err
    assert f"{2 * FILES}" in every.out
    assert "-> 1" in every.out
    assert stored(place.delta, place.view) == expected(place.view, place.live_rows(place.view))


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--target-size", "12"], "`--target-size` is '12', expected a size such as 128MB"),
        (["--retention", "30m"], "`--retention` is '30m', expected whole hours, 1h at least"),
        (["nothing/v1"], "there is no table nothing/v1 below"),
    ],
)
def test_what_is_asked_for_wrongly_is_refused(place: Place, arguments: list[str], said: str) -> None:
    done = place.run(*arguments, command="tables maintain")
    assert (done.code, said in done.err) == (2, True), done.err
