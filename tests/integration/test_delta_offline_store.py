import resource
import tempfile
from concurrent.futures import ThreadPoolExecutor
from datetime import date
from pathlib import Path
from uuid import uuid4

import pyarrow as pa
import pyarrow.compute as pc
import pytest
from deltalake import DeltaTable, write_deltalake
from hypothesis import given, settings
from hypothesis import strategies as st

from schemas.aggregation import count
from schemas.errors import SchemaMismatchError, SinkConflictError, SinkRejectedError, SinkUnavailableError
from schemas.view import FeatureView
from streams.sinks.offline import (
    History,
    OfflineWriter,
    complete_rows,
    read_features,
    scan_features,
    table_schema,
    table_uri,
)
from tests.support.feature_rows import T0_US, make_rows, make_view

VIEW = make_view()
COUNTS = make_view("counts", features={"n": count().over("5m")})
DAY_US = 86_400_000_000


def numbered(view: FeatureView, numbers: range | list[int]) -> pa.Table:
    return make_rows(view, [{"n": n, "source_offset": n} for n in numbers])


def stored(root: Path, view: FeatureView = COUNTS) -> list[int]:
    numbers: list[int] = read_features(root, view)["n"].to_pylist()
    return sorted(numbers)


class TestRows:
    def test_rows_read_back_as_they_were_written(self, tmp_path: Path) -> None:
        rows = make_rows(
            VIEW,
            [
                {
                    "clicks_5m": 2**63 - 1,
                    "amount_mean_1h": -1e308,
                    "category_last": "☂",
                    "clicked_last": False,
                    "amounts": [0.1, None, 5e-324],
                    "categories": [],
                    "prices": [[1.0], None],
                    "watermark": None,
                    "event_time": T0_US + 1,
                },
            ],
        )
        OfflineWriter(tmp_path).write(rows, view=VIEW, partition=0, offsets=[5])
        read = read_features(tmp_path, VIEW)
        assert read.schema == table_schema(VIEW)
        assert read.drop_columns(["event_date", "available_time"]).equals(rows)
        assert read["event_date"].to_pylist() == [date(2023, 11, 14)]

    def test_days_are_those_of_event_time_in_utc(self, tmp_path: Path) -> None:
        midnight = T0_US // DAY_US * DAY_US
        times = [midnight - 1, midnight, -1, 0]
        rows = make_rows(COUNTS, [{"event_time": time_us, "n": n} for n, time_us in enumerate(times)])
        OfflineWriter(tmp_path).write(rows, view=COUNTS, partition=0, offsets=[1, 2, 3, 4])
        days = read_features(tmp_path, COUNTS).sort_by("n")["event_date"].to_pylist()
        assert days == [date(2023, 11, 13), date(2023, 11, 14), date(1969, 12, 31), date(1970, 1, 1)]
        table = DeltaTable(table_uri(tmp_path, COUNTS))
        assert table.metadata().partition_columns == ["event_date"]
        assert {p["event_date"] for p in table.partitions()} == {str(day) for day in days}

    def test_a_filter_reads_some_rows(self, tmp_path: Path) -> None:
        rows = make_rows(COUNTS, [{"event_time": T0_US + day * DAY_US, "n": day} for day in range(3)])
        OfflineWriter(tmp_path).write(rows, view=COUNTS, partition=0, offsets=range(3))
        where = (pc.field("event_date") >= date(2023, 11, 15)) & (pc.field("n") < 2)
        assert read_features(tmp_path, COUNTS, where=where)["n"].to_pylist() == [1]
        assert scan_features(tmp_path, COUNTS).count_rows() == 3

    def test_a_table_says_what_it_holds(self, tmp_path: Path) -> None:
        OfflineWriter(tmp_path).write(numbered(COUNTS, [1]), view=COUNTS, partition=0, offsets=[1])
        metadata = DeltaTable(tmp_path / "counts" / "v1").metadata()
        assert metadata.configuration == {
            "headrace.view": "counts",
            "headrace.view_version": "1",
            "headrace.definition_hash": COUNTS.definition_hash,
        }
        assert metadata.name == "counts_v1"

    def test_no_rows_make_no_table(self, tmp_path: Path) -> None:
        result = OfflineWriter(tmp_path).write(COUNTS.row_schema.empty_table(), view=COUNTS, partition=0, offsets=[])
        assert not result
        assert list(tmp_path.iterdir()) == []


class TestOnce:
    def test_a_repeated_write_is_skipped(self, tmp_path: Path) -> None:
        writer = OfflineWriter(tmp_path)
        first = writer.write(numbered(COUNTS, range(3)), view=COUNTS, partition=0, offsets=[10, 11, 12])
        assert first
        assert (first.rows, first.skipped, first.table_version) == (3, 0, 1)
        for again in (writer, OfflineWriter(tmp_path)):
            result = again.write(numbered(COUNTS, range(3)), view=COUNTS, partition=0, offsets=[10, 11, 12])
            assert not result
            assert (result.rows, result.skipped, result.table_version) == (0, 3, None)
        assert stored(tmp_path) == [0, 1, 2]

    def test_of_a_batch_that_overlaps_only_the_new_rows_are_appended(self, tmp_path: Path) -> None:
        writer = OfflineWriter(tmp_path)
        writer.write(numbered(COUNTS, range(5)), view=COUNTS, partition=0, offsets=range(5))
        result = writer.write(numbered(COUNTS, range(3, 8)), view=COUNTS, partition=0, offsets=pa.array(range(3, 8)))
        assert (result.rows, result.skipped) == (3, 2)
        assert stored(tmp_path) == list(range(8))

    def test_partitions_have_offsets_of_their_own(self, tmp_path: Path) -> None:
        writer = OfflineWriter(tmp_path)
        writer.write(numbered(COUNTS, [1]), view=COUNTS, partition=0, offsets=[100])
        assert writer.write(numbered(COUNTS, [2]), view=COUNTS, partition=1, offsets=[7])
        assert (writer.last_offset(COUNTS, 0), writer.last_offset(COUNTS, 1)) == (100, 7)
        assert writer.last_offset(COUNTS, 2) is None

    def test_the_last_offset_is_none_without_a_table(self, tmp_path: Path) -> None:
        assert OfflineWriter(tmp_path).last_offset(COUNTS, 0) is None

    def test_the_last_offset_outlives_a_checkpoint(self, tmp_path: Path) -> None:
        writer = OfflineWriter(tmp_path)
        for offset in range(3):
            writer.write(numbered(COUNTS, [offset]), view=COUNTS, partition=0, offsets=[offset])
        table = DeltaTable(table_uri(tmp_path, COUNTS))
        table.optimize.compact()
        table.create_checkpoint()
        table.cleanup_metadata()
        fresh = OfflineWriter(tmp_path)
        assert fresh.last_offset(COUNTS, 0) == 2
        assert not fresh.write(numbered(COUNTS, [2]), view=COUNTS, partition=0, offsets=[2])
        assert stored(tmp_path) == [0, 1, 2]

    @settings(max_examples=15, deadline=None)
    @given(
        steps=st.lists(st.tuples(st.integers(0, 3), st.integers(1, 6), st.booleans()), min_size=1, max_size=6),
    )
    def test_any_splitting_and_rewinding_leaves_each_row_once(self, steps: list[tuple[int, int, bool]]) -> None:
        """Each step goes back by some rows, writes some, and may be made by a new writer, as after a crash."""
        with tempfile.TemporaryDirectory() as directory:
            writer, position, reached = OfflineWriter(directory), 0, 0
            for back, size, is_restarted in steps:
                writer = OfflineWriter(directory) if is_restarted else writer
                position = max(0, position - back)
                batch = range(position, position + size)
                writer.write(numbered(COUNTS, batch), view=COUNTS, partition=0, offsets=[n * 2 for n in batch])
                position = batch.stop
                reached = max(reached, position)
            assert stored(Path(directory)) == list(range(reached))

    def test_writers_of_one_partition_at_the_same_time_leave_each_row_once(self, tmp_path: Path) -> None:
        writers = [OfflineWriter(tmp_path) for _ in range(3)]

        def write_all(writer: OfflineWriter) -> int:
            return sum(
                writer.write(numbered(COUNTS, range(n, n + 4)), view=COUNTS, partition=0, offsets=range(n, n + 4)).rows
                for n in range(0, 20, 2)
            )

        with ThreadPoolExecutor(3) as pool:
            appended = list(pool.map(write_all, writers))
        assert stored(tmp_path) == list(range(22))
        assert sum(appended) == 22

    def test_writers_of_several_partitions_at_the_same_time_all_get_in(self, tmp_path: Path) -> None:
        def write_all(partition: int) -> None:
            writer = OfflineWriter(tmp_path)
            for n in range(8):
                number = partition * 100 + n
                writer.write(numbered(COUNTS, [number]), view=COUNTS, partition=partition, offsets=[n])

        with ThreadPoolExecutor(3) as pool:
            list(pool.map(write_all, range(3)))
        assert stored(tmp_path) == sorted(p * 100 + n for p in range(3) for n in range(8))


class TestAvailableTime:
    """The bound of ``delayed``'s source is 5 s: so far ahead of a row's watermark was the newest event."""

    def rows(self, view: FeatureView) -> pa.Table:
        watermarks = [None, T0_US - 60_000_000, T0_US + 1_000_000, 2**63 - 1]
        return make_rows(view, [{"n": n, "source_offset": n, "watermark": w} for n, w in enumerate(watermarks)])

    def test_a_row_could_be_read_once_its_partition_had_got_so_far(self, tmp_path: Path) -> None:
        view = make_view("delayed", features={"n": count().over("5m")}, max_out_of_orderness="5s")
        OfflineWriter(tmp_path).write(self.rows(view), view=view, partition=0, offsets=range(4))
        stored = read_features(tmp_path, view).sort_by("n")["available_time"].cast(pa.int64()).to_pylist()
        assert stored == [T0_US, T0_US, T0_US + 6_000_000, 2**63 - 1]

    def test_a_table_of_before_gets_the_column_and_its_old_rows_their_times(self, tmp_path: Path) -> None:
        view = make_view("delayed", features={"n": count().over("5m")}, max_out_of_orderness="5s")
        rows = self.rows(view)
        day = rows["event_time"].cast(pa.date32())
        configuration = {
            "headrace.view": view.name,
            "headrace.view_version": "1",
            "headrace.definition_hash": view.definition_hash,
        }
        old = rows.append_column("event_date", day)
        table = DeltaTable.create(
            table_uri(tmp_path, view),
            old.schema,
            partition_by=["event_date"],
            configuration=configuration,
            raise_if_key_not_exists=False,
        )
        write_deltalake(table, old, mode="append")
        first = [T0_US, T0_US, T0_US + 6_000_000, 2**63 - 1]
        assert read_features(tmp_path, view).sort_by("n")["available_time"].cast(pa.int64()).to_pylist() == first
        later = make_rows(view, [{"n": 9, "source_offset": 9, "watermark": T0_US}])
        OfflineWriter(tmp_path).write(later, view=view, partition=0, offsets=[9])
        both = read_features(tmp_path, view).sort_by("n")["available_time"].cast(pa.int64()).to_pylist()
        assert both == [*first, T0_US + 5_000_000]


class TestHistory:
    def add(self, writer: OfflineWriter, read: range) -> History:
        """Add history of a backfill that made rows of offsets 0 to 9, in files of four."""
        stage = writer.stage(COUNTS, name=uuid4().hex)
        parts = [numbered(COUNTS, range(first, min(first + 4, 10))) for first in (0, 4, 8)]
        files = [file for part in parts for file in stage.write(complete_rows(part, COUNTS), partition=0)]
        return writer.add_history(stage, files, view=COUNTS, read={0: read})

    def test_it_ends_where_the_rows_of_the_table_begin_and_they_stay_as_they_are(self, tmp_path: Path) -> None:
        writer = OfflineWriter(tmp_path)
        live = make_rows(COUNTS, [{"n": 100 + n, "source_offset": n} for n in (6, 7)])
        writer.write(live, view=COUNTS, partition=0, offsets=[50, 51])
        added = self.add(writer, range(10))
        assert (added.live_from, added.rows, added.table_version) == ({0: 6}, 6, 2)
        assert stored(tmp_path) == [0, 1, 2, 3, 4, 5, 106, 107]

    def test_what_the_live_path_makes_of_it_later_is_left_out(self, tmp_path: Path) -> None:
        writer, live = OfflineWriter(tmp_path), OfflineWriter(tmp_path)
        assert self.add(writer, range(2, 8)).spans == {0: range(2, 8)}
        result = live.write(numbered(COUNTS, range(12)), view=COUNTS, partition=0, offsets=range(12))
        assert (result.rows, result.skipped) == (6, 6)
        assert stored(tmp_path) == list(range(12)), "what is before the history is the live path's too"
        assert live.last_offset(COUNTS, 0) == 11

    def test_it_is_added_once(self, tmp_path: Path) -> None:
        writer = OfflineWriter(tmp_path)
        assert self.add(writer, range(4, 8)).rows == 4
        again = self.add(OfflineWriter(tmp_path), range(9))
        assert (again.rows, again.spans, again.live_from) == (5, {0: range(9)}, {})
        assert self.add(OfflineWriter(tmp_path), range(9)).rows == 0
        assert stored(tmp_path) == list(range(9))
        result = writer.write(numbered(COUNTS, range(10)), view=COUNTS, partition=0, offsets=range(10))
        assert (result.rows, result.skipped) == (1, 9)
        assert stored(tmp_path) == list(range(10))

    def test_it_is_continued_up_to_where_live_rows_begin(self, tmp_path: Path) -> None:
        writer = OfflineWriter(tmp_path)
        self.add(writer, range(4))
        live = make_rows(COUNTS, [{"n": 107, "source_offset": 7}])
        writer.write(live, view=COUNTS, partition=0, offsets=[0])
        held = writer.history(COUNTS, [0, 1])
        assert (held.spans, held.live_from) == ({0: range(4)}, {0: 7})
        assert self.add(writer, range(2, 10)).spans == {0: range(7)}
        assert stored(tmp_path) == [0, 1, 2, 3, 4, 5, 6, 107]

    def test_one_that_leaves_a_gap_to_another_is_refused(self, tmp_path: Path) -> None:
        writer = OfflineWriter(tmp_path)
        self.add(writer, range(4, 6))
        for apart in (range(3), range(7, 9)):
            with pytest.raises(SinkRejectedError, match="does not meet that of 4 to 5"):
                self.add(writer, apart)
        assert stored(tmp_path) == [4, 5]

    @pytest.mark.parametrize("is_history_first", [True, False])
    def test_it_and_a_live_commit_cannot_pass_each_other(self, tmp_path: Path, is_history_first: bool) -> None:
        """Each has read the table before the other commits; whoever comes second looks again."""
        live, history = OfflineWriter(tmp_path), OfflineWriter(tmp_path)
        live.write(numbered(COUNTS, [20]), view=COUNTS, partition=0, offsets=[0])
        history.last_offset(COUNTS, 0)
        rows = numbered(COUNTS, range(5, 15))
        if is_history_first:
            self.add(history, range(10))
            live.write(rows, view=COUNTS, partition=0, offsets=range(1, 11))
        else:
            table = history._open(COUNTS)
            assert table is not None
            live.write(rows, view=COUNTS, partition=0, offsets=range(1, 11))
            with pytest.MonkeyPatch.context() as patch:
                opened = [DeltaTable(table_uri(tmp_path, COUNTS)), table]
                patch.setattr(history, "_open", lambda _: opened.pop())
                added = self.add(history, range(10))
            assert opened == []
            assert (added.rows, added.live_from) == (5, {0: 5})
        assert stored(tmp_path) == [*range(15), 20]

    def test_files_that_a_vacuum_took_are_missed_before_the_commit(self, tmp_path: Path) -> None:
        writer = OfflineWriter(tmp_path)
        stage = writer.stage(COUNTS, name="gone")
        files = stage.write(complete_rows(numbered(COUNTS, range(4)), COUNTS), partition=0)
        (Path(table_uri(tmp_path, COUNTS)) / files[0].path).unlink()
        with pytest.raises(SinkRejectedError, match=r"1 of 1 files of the backfill are not in .* `--restart`"):
            writer.add_history(stage, files, view=COUNTS, read={0: range(4)})

    def test_what_is_not_taken_in_is_removed_and_what_is_taken_in_stays(self, tmp_path: Path) -> None:
        writer = OfflineWriter(tmp_path)
        stage = writer.stage(COUNTS, name="cut")
        rows = complete_rows(numbered(COUNTS, range(10)), COUNTS)
        files = [file for part in (rows[:5], rows[5:]) for file in stage.write(part, partition=0)]
        stray = stage.write(rows[:1], partition=0)
        stage.clear(keep=files)
        assert stage.absent([*files, *stray]) == stray
        added = writer.add_history(stage, files, view=COUNTS, read={0: range(3)})
        assert (added.rows, stored(tmp_path)) == (3, [0, 1, 2])
        stage.clear()
        assert stored(tmp_path) == [0, 1, 2]
        named = {Path(uri).name for uri in DeltaTable(table_uri(tmp_path, COUNTS)).file_uris()}
        assert {path.name for path in Path(table_uri(tmp_path, COUNTS)).glob("event_date=*/*.parquet")} == named

    def test_bounds_of_its_files_are_those_of_the_rows_a_millisecond_wider_at_most(self, tmp_path: Path) -> None:
        writer = OfflineWriter(tmp_path)
        rows = make_rows(
            COUNTS, [{"n": n, "source_offset": n, "event_time": T0_US + n, "watermark": T0_US} for n in (7, 1_001)]
        )
        stage = writer.stage(COUNTS, name="bounds")
        (file,) = stage.write(complete_rows(rows, COUNTS), partition=0)
        writer.add_history(stage, [file], view=COUNTS, read={0: range(2_000)})
        (told,) = pa.table(DeltaTable(table_uri(tmp_path, COUNTS)).get_add_actions(flatten=True)).to_pylist()
        assert (told["num_records"], told["min.n"], told["max.n"], told["null_count.n"]) == (2, 7, 1_001, 0)
        assert (told["min.source_offset"], told["max.source_offset"]) == (7, 1_001)
        first, last = (told[f"{end}.event_time"].timestamp() * 1e6 for end in ("min", "max"))
        assert (round(first), round(last)) == (T0_US, T0_US + 2_000)
        by_time = scan_features(tmp_path, COUNTS).to_table(
            filter=pc.field("event_time") > pa.scalar(T0_US + 1_000, pa.int64()).cast(pa.timestamp("us", "UTC"))
        )
        assert by_time["n"].to_pylist() == [1_001]


class TestFailures:
    def test_a_table_of_another_definition_is_refused_with_the_remedy(self, tmp_path: Path) -> None:
        OfflineWriter(tmp_path).write(numbered(COUNTS, [1]), view=COUNTS, partition=0, offsets=[1])
        changed = make_view("counts", features={"n": count().over("10m")})
        message = (
            f"has definition {COUNTS.definition_hash}, expected {changed.definition_hash}.*raise the view's version"
        )
        with pytest.raises(SchemaMismatchError, match=message):
            OfflineWriter(tmp_path).write(numbered(changed, [2]), view=changed, partition=0, offsets=[2])
        with pytest.raises(SchemaMismatchError, match=message):
            read_features(tmp_path, changed)
        with pytest.raises(SchemaMismatchError, match=message):
            OfflineWriter(tmp_path).last_offset(changed, 0)

    def test_the_remedy_works(self, tmp_path: Path) -> None:
        OfflineWriter(tmp_path).write(numbered(COUNTS, [1]), view=COUNTS, partition=0, offsets=[1])
        raised = make_view("counts", version=2, features={"n": count().over("10m")})
        OfflineWriter(tmp_path).write(numbered(raised, [2]), view=raised, partition=0, offsets=[1])
        assert (stored(tmp_path), stored(tmp_path, raised)) == ([1], [2])

    def test_a_table_that_headrace_did_not_make_is_refused(self, tmp_path: Path) -> None:
        write_deltalake(table_uri(tmp_path, COUNTS), pa.table({"a": [1]}))
        with pytest.raises(SchemaMismatchError, match="has definition None"):
            OfflineWriter(tmp_path).write(numbered(COUNTS, [1]), view=COUNTS, partition=0, offsets=[1])

    def test_a_conflict_is_tried_again_after_a_fresh_look(self, tmp_path: Path) -> None:
        slow, fast = OfflineWriter(tmp_path), OfflineWriter(tmp_path)
        slow.write(numbered(COUNTS, [1]), view=COUNTS, partition=0, offsets=[1])
        fast.write(numbered(COUNTS, [2, 3]), view=COUNTS, partition=0, offsets=[2, 3])
        result = slow.write(numbered(COUNTS, [2, 3, 4]), view=COUNTS, partition=0, offsets=[2, 3, 4])
        assert (result.rows, result.skipped) == (1, 2)
        assert stored(tmp_path) == [1, 2, 3, 4]

    def test_a_conflict_that_stays_is_an_error(self, tmp_path: Path) -> None:
        slow, fast = OfflineWriter(tmp_path, attempts=1), OfflineWriter(tmp_path)
        slow.write(numbered(COUNTS, [1]), view=COUNTS, partition=0, offsets=[1])
        fast.write(numbered(COUNTS, [2]), view=COUNTS, partition=0, offsets=[2])
        with pytest.raises(SinkConflictError, match="met another one 1 times"):
            slow.write(numbered(COUNTS, [2]), view=COUNTS, partition=0, offsets=[2])
        assert stored(tmp_path) == [1, 2]

    def test_storage_that_does_not_answer_is_unavailable(self) -> None:
        options = {
            "AWS_ENDPOINT_URL": "http://127.0.0.1:1",
            "AWS_REGION": "local",
            "AWS_ACCESS_KEY_ID": "a",
            "AWS_SECRET_ACCESS_KEY": "b",
            "AWS_ALLOW_HTTP": "true",
            "max_retries": "0",
        }
        writer = OfflineWriter("s3://bucket/features", storage_options=options)
        with pytest.raises(SinkUnavailableError, match="s3://bucket/features/counts/v1 is not available") as caught:
            writer.write(numbered(COUNTS, [1]), view=COUNTS, partition=0, offsets=[1])
        assert caught.value.__cause__ is not None
        assert caught.value.retry_after_ms > 0
        assert "\x1b" not in str(caught.value)

    def test_a_full_disk_is_unavailable_and_the_same_write_goes_on_once_there_is_room(self, tmp_path: Path) -> None:
        writer = OfflineWriter(tmp_path)
        writer.write(numbered(COUNTS, [1]), view=COUNTS, partition=0, offsets=[1])
        limits = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (0, limits[1]))
        try:
            with pytest.raises(SinkUnavailableError, match="File too large"):
                writer.write(numbered(COUNTS, [2]), view=COUNTS, partition=0, offsets=[2])
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        assert stored(tmp_path) == [1]
        writer.write(numbered(COUNTS, [2]), view=COUNTS, partition=0, offsets=[2])
        assert stored(tmp_path) == [1, 2]

    def test_a_root_that_is_a_file_is_rejected(self, tmp_path: Path) -> None:
        root = tmp_path / "file"
        root.write_text("")
        with pytest.raises(SinkRejectedError, match=r"file/counts/v1 refused the write.*Not a directory"):
            OfflineWriter(root).write(numbered(COUNTS, [1]), view=COUNTS, partition=0, offsets=[1])

    def test_reading_a_view_that_was_never_written_says_who_writes_it(self, tmp_path: Path) -> None:
        with pytest.raises(SinkUnavailableError, match="expected the offline role or a backfill"):
            read_features(tmp_path, COUNTS)

    def test_offsets_must_be_one_for_each_row(self, tmp_path: Path) -> None:
        with pytest.raises(SinkRejectedError, match="got 1 offsets for 2 rows"):
            OfflineWriter(tmp_path).write(numbered(COUNTS, [1, 2]), view=COUNTS, partition=0, offsets=[1])
