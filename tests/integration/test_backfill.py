"""``headrace backfill`` over an archive: what it makes, whatever becomes of it on the way, and what it refuses."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from deltalake import DeltaTable

from offline.late import with_late
from schemas.row import TIMESTAMP
from schemas.view import FeatureView
from streams.batch import RawBatch
from streams.pipeline import PartitionPipeline
from streams.sinks.archive import ArchiveWriter
from streams.sinks.offline import read_features, table_uri
from tests.support.dying_backfill import STEPS
from tests.support.history import FILES, N_RECORDS, TOPIC, Place, expected, stored, write_application
from tests.support.workbench import T0_MS


@pytest.fixture
def place(tmp_path: Path) -> Place:
    return Place(tmp_path)


@pytest.mark.parametrize("workers", ["1", "2"])
def test_rows_are_those_of_the_live_path(place: Place, workers: str) -> None:
    done = place.backfill("--workers", workers)
    view = place.view
    made = expected(view, place.live_rows(view))
    assert stored(place.delta, view) == made
    assert done["rows_added"] == len(made) > N_RECORDS
    assert done["records"] == 2 * N_RECORDS
    assert set(done["dead_letters"]) == {"decode_error", "late"}
    assert [part["history"] for part in done["partitions"]] == [[0, N_RECORDS]] * 2
    assert unnamed_files(place) == set()


@pytest.mark.parametrize(("step", "times"), [(step, 1) for step in STEPS] + [("rows", 11), ("state", 12)])
def test_after_a_kill_at_any_step_it_goes_on_and_has_each_row_once(place: Place, step: str, times: int) -> None:
    place.kill("--json", step=step, times=times)
    again = place.run("--json")
    assert again.code == 0, again.err
    assert ("going on with the backfill" in again.err) == (step not in ("ended", "cleared"))
    view = place.view
    assert stored(place.delta, view) == expected(view, place.live_rows(view))
    assert unnamed_files(place) == set()
    assert not list((place.directory / "home" / "backfill" / "activity-v1").glob("*.json"))


def test_after_a_kill_what_was_done_is_not_done_again(place: Place) -> None:
    place.kill(step="state", times=5)
    before = unnamed_files(place)
    assert before
    place.kill(step="state", times=2 * FILES - 5)  # the checkpoints that were left, and no more
    assert before < unnamed_files(place)


def test_of_a_view_that_emits_the_latest_each_event_has_its_row(tmp_path: Path) -> None:
    place = Place(tmp_path, emit="latest")
    place.backfill()
    view = place.view
    latest = expected(view, place.live_rows(view))
    every = stored(place.delta, view)
    n_admitted = len({(row["source_partition"], row["source_offset"]) for row in every if row["pane"] == "EARLY"})
    assert n_admitted > len([row for row in latest if row["pane"] == "EARLY"])
    by_place = {
        (r["source_partition"], r["source_offset"], r["user_id"], r["pane"], r["window_end"], r["pane_index"]): r
        for r in every
    }
    assert len(by_place) == len(every)
    for row in latest:
        at = (*(row[n] for n in ("source_partition", "source_offset", "user_id", "pane", "window_end", "pane_index")),)
        assert by_place[at] == row
    closing = [row for row in latest if row["pane"] != "EARLY"]
    assert [row for row in every if row["pane"] != "EARLY"] == closing


def test_history_ends_where_live_rows_begin_and_those_stay(place: Place) -> None:
    view = place.view
    made = place.live_rows(view)
    place.write_live(view, {partition: tables[5:] for partition, tables in made.items()})
    first = {partition: tables[5]["source_offset"][0].as_py() for partition, tables in made.items()}
    done = place.backfill()
    assert {part["partition"]: part["live_from"] for part in done["partitions"]} == first
    assert all(part["missing"] is None for part in done["partitions"])
    assert stored(place.delta, view) == expected(view, made)
    rows = read_features(place.delta, view)
    is_live = [row["epoch"] == 1 for row in rows.select(["epoch"]).to_pylist()]
    assert sum(is_live) == sum(table.num_rows for tables in made.values() for table in tables[5:])


def test_it_reaches_on_to_a_live_path_that_has_begun_meanwhile(tmp_path: Path) -> None:
    place = Place(tmp_path, n_archived=4)
    view = place.view
    made = place.live_rows(view)
    place.kill(step="state", times=6)
    for partition in place.batches:
        place.archive(partition, range(4, FILES))
    place.write_live(view, {partition: tables[6:] for partition, tables in made.items()})
    done = place.backfill()
    assert [part["live_from"] for part in done["partitions"]] == [
        t[6]["source_offset"][0].as_py() for t in made.values()
    ]
    assert all(part["missing"] is None for part in done["partitions"])
    assert stored(place.delta, view) == expected(view, made)


def test_a_gap_that_is_left_to_the_live_rows_is_told_and_can_be_filled(place: Place) -> None:
    view = place.view
    made = place.live_rows(view)
    place.write_live(view, {partition: tables[6:] for partition, tables in made.items()})
    first = [tables[6]["source_offset"][0].as_py() for tables in made.values()]
    part = place.run("--to", "2023-11-14T22:17:20Z")
    assert part.code == 0
    assert f"partition 0: offsets 200 to {first[0] - 1} are neither history nor live" in part.out
    filled = place.backfill()
    assert [found["history"] for found in filled["partitions"]] == [[0, offset] for offset in first]
    assert stored(place.delta, view) == expected(view, made)


def test_a_part_by_time_is_continued_at_both_ends_and_what_comes_later(place: Place) -> None:
    view = place.view
    middle = place.backfill("--from", "2023-11-14T22:15:40Z", "--to", "2023-11-14T22:17:20Z")
    assert [part["history"] for part in middle["partitions"]] == [[100, 200]] * 2
    every = expected(view, place.live_rows(view))
    assert stored(place.delta, view) == [row for row in every if 100 <= row["source_offset"] < 200]
    apart = place.run("--from", "2023-11-14T22:18:00Z")
    assert apart.code == 2
    assert "expected nothing between them" in apart.err
    assert place.backfill()["partitions"][0]["history"] == [0, N_RECORDS]
    assert stored(place.delta, view) == every
    assert place.backfill()["rows_added"] == 0


def test_a_dry_run_says_what_would_be_done_and_does_nothing(place: Place) -> None:
    plan = place.backfill("--dry-run", "--to", "2023-11-14T22:17:20Z")
    assert plan["records"] == 2 * 200
    assert plan["estimated_s"] >= 0
    assert [(part["read"], part["wanted"]) for part in plan["partitions"]] == [([0, 200], [0, 200])] * 2
    assert all(part["size_bytes"] > 0 for part in plan["partitions"])
    assert not (place.delta / "activity").exists()
    assert not (place.directory / "home" / "backfill").exists()
    said = place.run("--dry-run")
    assert "0 to 399" in said.out
    assert "s in 1 process, by the speed of 800 of them" in said.out
    assert " s in 2 processes" in place.run("--dry-run", "--workers", "8").out


def test_an_interrupted_one_is_gone_on_with_only_by_the_same_options(place: Place) -> None:
    place.kill(step="state", times=3)
    other = place.run("--to", "2023-11-14T22:17:20Z")
    assert other.code == 2
    assert "had to_us None" in other.err
    assert "`--restart`" in other.err
    done = place.backfill("--to", "2023-11-14T22:17:20Z", "--restart")
    assert [part["history"] for part in done["partitions"]] == [[0, 200]] * 2
    assert unnamed_files(place) == set()


def test_one_that_an_older_release_began_is_begun_anew(place: Place) -> None:
    place.kill(step="planned")
    path = place.directory / "home" / "backfill" / "activity-v1" / "run.json"
    found = json.loads(path.read_text())
    path.write_text(json.dumps({"job": found["job"], "side": "/gone", "plans": found["plans"]}))
    refused = place.run()
    assert (refused.code, "an older release had begun" in refused.err) == (2, True)
    assert place.backfill("--restart")["records"] == 2 * N_RECORDS


def test_another_store_takes_it_beside_the_one_that_is_there(place: Place) -> None:
    view = place.view
    made = place.live_rows(view)
    place.write_live(view, made)
    other = place.directory / "other"
    place.backfill("--into", str(other))
    assert stored(other, view) == stored(place.delta, view) == expected(view, made)
    assert place.backfill()["rows_added"] == 0
    assert DeltaTable(table_uri(place.delta, view)).version() == 2


def test_late_rows_count_where_they_came_in_a_store_of_their_own(place: Place) -> None:
    view = place.view
    made = place.live_rows(view)
    place.write_live(view, made)
    folded, other = with_late(view, 600_000_000), place.directory / "other"
    options = ("--with-late", "10m", "--into", str(other))
    place.kill(*options, step="state", times=5)
    done = place.backfill(*options)
    assert stored(other, folded) == expected(folded, place.live_rows(folded))
    assert set(done["dead_letters"]) == {"decode_error"}
    assert (done["definition_hash"], done["allowed_lateness"]) == (folded.definition_hash, "10m")
    counted = {(row["source_partition"], row["source_offset"]) for row in stored(other, folded)}
    assert len(counted) == 2 * N_RECORDS - done["dead_letters"]["decode_error"]
    before = {(row["source_partition"], row["source_offset"]) for row in expected(view, made) if row["pane"] == "EARLY"}
    assert before < counted
    assert place.backfill(*options)["rows_added"] == 0
    assert stored(place.delta, view) == expected(view, made)
    plain = place.run("--into", str(other))
    assert (plain.code, "has definition" in plain.err) == (1, True)


def test_a_late_row_that_was_sent_again_counts_once(place: Place) -> None:
    view = place.view
    late = [letter for letters in dead_letters(place, view) for letter in letters if letter["reason"] == "late"]
    copies = []
    for number, letter in enumerate(late):
        batch = place.batches[letter["_partition"]][letter["_offset"] // (N_RECORDS // FILES)]
        at = letter["_offset"] - int(batch.offsets[0])
        headers = [("headrace.redriven", b"1"), ("headrace.views", b"activity"), ("headrace.late_for", b"activity")]
        copies.append((batch.partition, number, batch.values[at], headers))
    for partition in place.batches:
        mine = [copy for copy in copies if copy[0] == partition]
        ArchiveWriter(place.delta).write(
            RawBatch(
                topic=TOPIC,
                partition=partition,
                offsets=np.arange(N_RECORDS, N_RECORDS + len(mine)),
                broker_time_us=np.full(len(mine), (T0_MS + N_RECORDS * 1_000) * 1_000),
                keys=[None] * len(mine),
                values=[value for *_, value, _ in mine],
                headers=[headers for *_, headers in mine],
                next_offset=N_RECORDS + len(mine),
            )
        )
    folded, other = with_late(view, 1_200_000_000), place.directory / "other"
    done = place.backfill("--with-late", "20m", "--into", str(other))
    assert done["copies"] == len(late) > 10
    assert stored(other, folded) == expected(folded, place.live_rows(folded))
    plain = place.backfill()
    assert plain["copies"] == 0
    assert plain["dead_letters"]["late"] == 2 * len(late)


def test_training_sets_take_what_was_late_from_its_own_store(place: Place) -> None:
    other = place.directory / "other"
    place.backfill("--with-late", "10m", "--into", str(other))
    labels = pa.table({"user_id": ["u0-0"], "at": pa.array([(T0_MS + 300_000) * 1_000], TIMESTAMP)})
    pq.write_table(labels, place.directory / "labels.parquet")
    arguments = [str(place.directory / name) for name in ("labels.parquet", "set.parquet")]
    settings = {"HEADRACE_DELTA": str(other)}
    command = "training-set --view activity --time at --json"
    refused = place.run(*arguments, command=command, settings=settings)
    assert (refused.code, "has definition" in refused.err) == (1, True)
    made = place.run(*arguments, "--with-late", "10m", command=command, settings=settings)
    assert made.code == 0, made.err
    (manifest,) = json.loads(made.out)["views"]
    assert manifest["definition_hash"] == with_late(place.view, 600_000_000).definition_hash
    assert manifest["status_shares"]["present"] == 1.0


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--with-late", "10m"], "expected `--into` with another root"),
        (["--with-late", "10s", "--into", "other"], "it waits for those itself"),
        (["--with-late", "late", "--into", "other"], "`--with-late` is 'late'"),
    ],
)
def test_late_rows_that_cannot_be_folded_in_are_refused(place: Place, arguments: list[str], said: str) -> None:
    done = place.run(*arguments)
    assert (done.code, said in done.err) == (2, True), done.err


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--from", "2013-13-01"], "`--from` is '2013-13-01', expected a date such as 2013-03-01"),
        (["--from", "2013-03-02", "--to", "2013-03-01"], "expected the earlier one first"),
    ],
)
def test_times_that_are_none_are_refused(place: Place, arguments: list[str], said: str) -> None:
    done = place.run(*arguments)
    assert (done.code, said in done.err) == (2, True), done.err


def test_a_view_whose_windows_the_clock_closes_is_refused(tmp_path: Path) -> None:
    write_application(tmp_path, source='idle_timeout="5s", idle_advance=True')
    done = Place.run(_bare(tmp_path))
    assert done.code == 2
    assert "`idle_advance` of shop.events lets the clock close windows" in done.err


def test_without_an_archive_it_says_who_writes_it(tmp_path: Path) -> None:
    write_application(tmp_path)
    done = Place.run(_bare(tmp_path))
    assert done.code == 1
    assert "--source kafka" in done.err


def unnamed_files(place: Place) -> set[str]:
    """Files in the view's directory that no reader sees."""
    uri = Path(table_uri(place.delta, place.view))
    named = set(DeltaTable(str(uri)).file_uris()) if DeltaTable.is_deltatable(str(uri)) else set()
    return {str(path) for path in uri.rglob("*.parquet") if "_delta_log" not in path.parts} - named


def _bare(directory: Path) -> Place:
    place = Place.__new__(Place)
    place.directory, place.delta = directory, directory / "delta"
    return place


def dead_letters(place: Place, view: FeatureView) -> list[list[dict[str, Any]]]:
    """What the live path rejects, by partition."""
    found = []
    for partition, batches in place.batches.items():
        pipeline = PartitionPipeline(view.sources[0], [view], partition=partition)
        made = [
            pipeline.process(batch, processing_time_us=0, computed_time_us=1, epoch=1).dead_letters for batch in batches
        ]
        found.append([{**row, "_partition": partition} for row in pa.concat_tables(made).to_pylist()])
    return found
