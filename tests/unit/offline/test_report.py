import json
import random
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from offline.computation import Computation
from offline.report import LatenessReport, SettingReport, report_lateness
from schemas.aggregation import count, last, sum_
from schemas.entity import Entity
from schemas.errors import SchemaMismatchError
from schemas.view import FeatureView
from tests.support.builders import make_source

Row = dict[str, Any]
HOUR_S, MINUTE_S = 3_600, 60
START_S = 1_357_034_400  # 2013-01-01 10:00:00 UTC


def make_view(*, source: Row | None = None, **settings: Any) -> FeatureView:
    defaults: Row = {
        "version": 1,
        "entity": Entity("thing", key="key"),
        "slide": "1m",
        "features": {"n": count().over("1m"), "total": sum_("x", where="n > 3").over("5m")},
    }
    return FeatureView("things", source=make_source(**source or {}), **defaults | settings)


def write(path: Path, rows: list[Row]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def at(report: LatenessReport, setting: str) -> SettingReport:
    (found,) = (entry for entry in report.settings if entry.max_out_of_orderness == setting)
    return found


def disordered(*, n_rows: int = 400, partitions: int = 2) -> list[Row]:
    chance = random.Random(3)
    rows: list[Row] = []
    for number in range(n_rows):
        delay_s = chance.choice([0, 0, 0, 1, 2, 4, 9, 40, 200, 700])
        row = {
            "key": chance.choice(["a", "b", "c", None]),
            "at": START_S + number * 3 - delay_s,
            "id": f"e{chance.randint(0, 150)}",
            "x": 1.5,
            "_partition": chance.randrange(partitions),
        }
        rows.append(row)
    return rows


# The two failures from the field


def test_it_shows_the_watermark_that_stalls_when_a_whole_batch_carries_one_event_time(tmp_path: Path) -> None:
    # An exporter stamps each of its runs with one time; until the next run nothing moves the watermark.
    runs_s = [START_S + run * (2 * HOUR_S + 48 * MINUTE_S) for run in range(4)]
    rows = [{"key": f"k{n % 7}", "at": run_s, "x": 1.0} for run_s in runs_s for n in range(500)]

    report = report_lateness(make_view(), write(tmp_path / "in.ndjson", rows))

    assert report.clock == "event_time"
    for setting in report.settings:
        assert setting.late == 0  # nothing is lost, so that counts of late rows do not tell
        assert setting.open == 500
        if setting.max_out_of_orderness != "5m":
            assert setting.staleness_p50_us == (2 * HOUR_S + 47 * MINUTE_S) * 1_000_000


def test_by_broker_time_the_stall_is_what_a_reader_waited(tmp_path: Path) -> None:
    runs_s = [START_S, START_S + 2 * HOUR_S + 48 * MINUTE_S]
    rows = [
        {"key": "a", "at": run_s, "_broker_time": run_s * 1_000_000 + 2_500_000 + n * 1_000}
        for run_s in runs_s
        for n in range(100)
    ]

    report = report_lateness(make_view(), write(tmp_path / "in.ndjson", rows))

    assert report.clock == "broker_time"
    assert at(report, "0s").staleness_p99_us == (2 * HOUR_S + 47 * MINUTE_S) * 1_000_000 + 2_500_000


def test_a_tolerance_raised_from_2_s_to_5_s_keeps_more_rows_and_is_3_s_staler(tmp_path: Path) -> None:
    chance = random.Random(11)
    rows = []
    for number in range(6_000):  # 10 events a second, of which one in five comes up to 5 s late
        delay_ms = chance.randint(0, 4_900) if chance.random() < 0.2 else chance.randint(0, 100)
        rows.append({"key": "a", "at": START_S * 1_000 + number * 100 - delay_ms})
    fields = {"key": {"type": "string"}, "at": {"type": "integer", "x-unit": "ms"}}
    source = make_source(fields, max_out_of_orderness="2s")
    features = {"n": count().over("1s")}
    view = FeatureView("things", version=1, entity=Entity("t", key="key"), source=source, slide="1s", features=features)

    report = report_lateness(view, write(tmp_path / "in.ndjson", rows))

    before, after = at(report, "2s"), at(report, "5s")
    assert before.is_own
    assert before.late > 0.05 * report.rows
    assert after.late == 0
    assert before.staleness_p50_us is not None
    assert after.staleness_p50_us is not None
    assert after.staleness_p50_us - before.staleness_p50_us == pytest.approx(3_000_000, abs=100_000)


# It is the engine's own word

VIEWS = {
    "sliding": make_view(),
    "lateness": make_view(allowed_lateness="2m"),
    "odd sizes": make_view(slide="40s", features={"n": count().over("1m"), "m": count(where="x > 1").over("100s")}),
    "aligned": make_view(align_to="2013-01-01T00:00:13Z"),
    "deduplicated": make_view(source={"event_id": "id", "dedup_window": "5m"}),
    "session": make_view(slide=None, gap="20s", features={"n": count(), "total": sum_("x")}),
    "session with lateness": make_view(slide=None, gap="20s", allowed_lateness="1m", features={"n": count()}),
    "no window": make_view(features={"x": last("x").over(last=2)}, emit="every_event"),
}


@pytest.mark.parametrize("view", VIEWS.values(), ids=VIEWS.keys())
@pytest.mark.parametrize("batch_rows", [37, 50_000])
def test_late_rows_are_those_that_the_engine_would_reject(tmp_path: Path, view: FeatureView, batch_rows: int) -> None:
    path = write(tmp_path / "in.ndjson", disordered())

    report = report_lateness(view, path, batch_rows=batch_rows)

    assert [setting.is_own for setting in report.settings] == [True] + [False] * 8
    for setting in report.settings:
        source = replace(view.source, max_out_of_orderness=setting.max_out_of_orderness)
        letters = [made.dead_letters for made in Computation(replace(view, source=source)).run(path)]
        reasons = Counter(reason for part in letters for reason in part["reason"].to_pylist())
        assert setting.late == reasons.pop("late", 0)
        if setting.is_own:
            assert report.rejected == reasons
            assert report.rows == 400 - reasons.total()
            assert setting.late > 0
    lost = [setting.late + setting.partially_late for setting in (at(report, "5m"), at(report, "0s"))]
    assert lost[0] < lost[1]


def test_rows_after_the_close_and_partially_late_ones_are_told_apart(tmp_path: Path) -> None:
    moments = [0, 130, 70, 50, 10, 190]  # watermarks before each of them: -, 0, 130, 130, 130, 130
    view = make_view(allowed_lateness="10s", features={"n": count().over("2m")})
    path = write(tmp_path / "in.ndjson", [{"key": "a", "at": START_S + moment} for moment in moments])

    own = at(report_lateness(view, path, settings=()), "0s")

    # At 130 s the first row's window [.., 60 s) closes. 70 s is in windows that end at 120 s, expired at 130 s, and at
    # 180 s, open: partially late. 50 s and 10 s are in those that end at 60 s and 120 s, both expired: late.
    assert (own.late, own.partially_late, own.after_close, own.open) == (2, 1, 1, 1)
    # The windows that end at 60 s and at 180 s were closed by the rows of 130 s and of 190 s.
    assert (own.staleness_p50_us, own.staleness_max_us) == (10_000_000, 70_000_000)


def test_rows_that_come_after_the_close_are_counted_where_none_is_late(tmp_path: Path) -> None:
    view = make_view(allowed_lateness="1h")
    path = write(tmp_path / "in.ndjson", disordered(partitions=1))

    report = report_lateness(view, path, settings=("0s",))

    expected, watermark_s = 0, 0
    for row in disordered(partitions=1):
        if row["key"] is not None:
            expected += (row["at"] // 60 + 1) * 60 <= watermark_s
            watermark_s = max(watermark_s, row["at"])
    assert at(report, "0s").after_close == expected > 0
    assert at(report, "0s").late == 0


def test_of_a_session_the_time_from_its_end_to_its_first_closing_counts(tmp_path: Path) -> None:
    view = make_view(slide=None, gap="20s", allowed_lateness="1m", features={"n": count()})
    rows = [{"key": key, "at": START_S + moment} for key, moment in [("a", 0), ("b", 25), ("a", 10), ("b", 90)]]

    own = at(report_lateness(view, write(tmp_path / "in.ndjson", rows), settings=()), "0s")

    # a's session ends at 20 s and closes at 25 s; the late row lengthens it to 30 s, which the row of 90 s closes.
    assert (own.after_close, own.open) == (1, 1)
    assert (own.staleness_p50_us, own.staleness_max_us) == (5_000_000, 45_000_000)


# Around it


def test_a_view_without_windows_has_nothing_that_closes(tmp_path: Path) -> None:
    report = report_lateness(VIEWS["no window"], write(tmp_path / "in.ndjson", disordered()))

    assert {(s.staleness_p50_us, s.staleness_max_us, s.open, s.after_close) for s in report.settings} == {
        (None, None, 0, 0)
    }


def test_an_empty_log_has_no_shares(tmp_path: Path) -> None:
    report = report_lateness(make_view(), write(tmp_path / "in.ndjson", []))

    assert (report.rows, report.rejected, report.clock) == (0, {}, "event_time")
    assert at(report, "5s").staleness_p99_us is None


def test_what_is_rejected_for_another_reason_is_told_apart(tmp_path: Path) -> None:
    path = tmp_path / "in.ndjson"
    path.write_text('{"key": "a", "at": 100}\n{"key": null, "at": 100}\n{"key": "a"}\ngarbage\n')

    report = report_lateness(make_view(), path)

    assert report.rejected == {"decode_error": 1, "missing_event_time": 1, "missing_key": 1}
    assert report.rows == 1


def test_the_clock_is_mixed_where_some_rows_name_a_broker_time(tmp_path: Path) -> None:
    rows = [{"key": "a", "at": 100, "_broker_time": 100_500_000}, {"key": "a", "at": 200}]

    report = report_lateness(make_view(), write(tmp_path / "in.ndjson", rows))

    assert report.clock == "mixed"
    assert at(report, "0s").staleness_p50_us == 80_000_000


def test_settings_of_one_length_stand_once_in_the_views_own_words(tmp_path: Path) -> None:
    view = make_view(source={"max_out_of_orderness": "120s"})

    report = report_lateness(view, write(tmp_path / "in.ndjson", []))

    names = [setting.max_out_of_orderness for setting in report.settings]
    assert names == ["0s", "1s", "2s", "5s", "10s", "30s", "1m", "120s", "5m"]
    assert at(report, "120s").is_own


def test_a_log_whose_offsets_fall_is_refused(tmp_path: Path) -> None:
    rows = [{"key": "a", "at": 100, "_offset": 5}, {"key": "a", "at": 100, "_offset": 4}]

    with pytest.raises(SchemaMismatchError, match="expected rising offsets"):
        report_lateness(make_view(), write(tmp_path / "in.ndjson", rows))
