"""The flights as Kafka records, in the order in which they would have become known.

A departure is on a topic that is keyed by the airport, a landing on one that is keyed by the aircraft. A report becomes
known when the event happens, unless it is delayed.
"""

from dataclasses import dataclass
from typing import Final

import polars as pl

from jobs.flights.dataset import DEPARTED, LANDED, load_reports
from jobs.flights.fault import FAULTS, MAX_DELAY_MINUTES, NO_FAULT, corrupt, draw_fate
from schemas.errors import ConfigError
from schemas.time import END_OF_TIME_US, MINUS_INFINITY_US, format_rfc3339


@dataclass(frozen=True)
class FlightTopic:
    """A topic that flight events are on.

    Attributes:
        name: Name of the topic.
        kind: Kind of the reports on it.
        key: Column that keys its records.
        fields: Expressions of the payload's fields, in order.
    """

    name: str
    kind: str
    key: str
    fields: tuple[pl.Expr, ...]


def _rfc3339(name: str) -> pl.Expr:
    return pl.from_epoch(name, time_unit="us").dt.strftime("%Y-%m-%dT%H:%M:%SZ")


_DEPARTED_FIELDS: Final = (
    pl.col("flight_id"),
    _rfc3339("event_us").alias("event_time"),
    pl.col("carrier", "flight_number", "tail_number", "origin", "destination"),
    _rfc3339("scheduled_departure_us").alias("scheduled_departure"),
    _rfc3339("scheduled_arrival_us").alias("scheduled_arrival"),
    pl.col("scheduled_duration_minutes", "scheduled_hour_local", "day_of_week", "departure_delay", "distance"),
)
_LANDED_FIELDS: Final = (
    pl.col("flight_id"),
    _rfc3339("event_us").alias("event_time"),
    pl.col("carrier", "flight_number", "tail_number", "origin", "destination"),
    _rfc3339("actual_departure_us").alias("actual_departure"),
    _rfc3339("scheduled_arrival_us").alias("scheduled_arrival"),
    pl.col("departure_delay", "arrival_delay", "air_time_minutes", "distance"),
)
TOPICS: Final = {
    topic.name: topic
    for topic in (
        FlightTopic("flights.departed", DEPARTED, "origin", _DEPARTED_FIELDS),
        FlightTopic("flights.landed", LANDED, "tail_number", _LANDED_FIELDS),
    )
}
"""The topics by name, in the order in which events of the same moment are sent."""
_TOPIC: Final = pl.Enum(list(TOPICS))
_FAULT: Final = pl.Enum([fault.name for fault in FAULTS])
_FAULT_BY_PLACE: Final = {NO_FAULT: None} | {place: fault.name for place, fault in enumerate(FAULTS)}


@dataclass(frozen=True)
class FlightEvents:
    """Events in the order in which they become known: by (``known_us``, topic, ``flight_id``).

    Payloads are made batch by batch, so that the whole year does not have to fit into memory as JSON.

    Attributes:
        plan: One row an event: ``known_us``, ``event_us``, ``topic``, ``flight_id``, ``fault`` (its name or null),
            ``is_delayed``, and ``report``, the event's row in ``reports``.
        reports: See :func:`jobs.flights.dataset.load_reports`.
    """

    plan: pl.DataFrame
    reports: pl.DataFrame

    def __len__(self) -> int:
        return self.plan.height

    def batch(self, start: int, stop: int) -> pl.DataFrame:
        """Make the records of the events in ``[start, stop)``.

        Returns:
            Columns ``topic``, ``key`` (null: no key), ``value`` (bytes), ``known_us`` (becomes Kafka's record
            timestamp), ``event_us``, ``flight_id``, ``request_id``, ``fault``, ``is_delayed``.
        """
        plan = self.plan.slice(start, stop - start).with_row_index("position")
        parts = [
            _encode(part, self.reports, TOPICS[str(name)])
            for (name,), part in plan.partition_by("topic", as_dict=True).items()
        ]
        if not parts:
            parts = [_encode(plan, self.reports, topic) for topic in TOPICS.values()]
        return _with_faults(pl.concat(parts).sort("position").drop("position"))

    def table(self) -> pl.DataFrame:
        """Make the records of all events; see :meth:`batch`."""
        return self.batch(0, len(self))


def plan_events(
    *,
    start_us: int = MINUS_INFINITY_US,
    end_us: int = END_OF_TIME_US,
    late_share: float = 0.0,
    invalid_share: float = 0.0,
    seed: int = 0,
    reports: pl.DataFrame | None = None,
) -> FlightEvents:
    """Plan the events that become known in ``[start_us, end_us)``.

    Args:
        start_us: Beginning of the range.
        end_us: End of the range, not in it.
        late_share: Share of reports that become known up to 6 hours after the event, 0 to 1.
        invalid_share: Share of reports with a corrupted payload, 0 to 1; see :data:`jobs.flights.fault.FAULTS`.
        seed: Draws which.
        reports: Reports to use, default those of the data.

    Raises:
        ConfigError: A share is out of range, the range has no event, or the data are not installed.
    """
    reports = load_reports() if reports is None else reports
    all_reports = reports.select(
        "event_us", "kind", "flight_id", "tail_number", report=pl.int_range(pl.len(), dtype=pl.UInt64)
    )
    earliest_us = max(start_us - MAX_DELAY_MINUTES * 60_000_000, MINUS_INFINITY_US)
    chosen = all_reports.filter(pl.col("event_us").is_between(earliest_us, end_us, closed="left"))
    fate = draw_fate(
        chosen["report"].to_numpy(),
        is_landed=(chosen["kind"] == LANDED).to_numpy(),
        late=late_share,
        invalid=invalid_share,
        seed=seed,
    )
    chosen = chosen.with_columns(
        known_us=pl.col("event_us") + pl.Series(fate.delay_us),
        is_delayed=pl.Series(fate.delay_us > 0),
        fault=pl.Series(fate.fault).replace_strict(_FAULT_BY_PLACE, return_dtype=_FAULT),
    ).filter(pl.col("known_us").is_between(start_us, end_us, closed="left"))
    plan = pl.concat(
        [
            chosen.filter(pl.col("kind") == topic.kind).with_columns(topic=pl.lit(topic.name, dtype=_TOPIC))
            for topic in TOPICS.values()
        ]
    )
    if plan.is_empty():
        first_us, last_us = reports["event_us"].min(), reports["event_us"].max()
        msg = (
            f"no flight event becomes known from {_bound(start_us)} to {_bound(end_us)}, expected a range (UTC, its "
            f"end not in it) that meets the data, {_bound(first_us)} to {_bound(last_us)}"
        )
        raise ConfigError(msg)
    columns = ("known_us", "event_us", "topic", "flight_id", "fault", "is_delayed", "report")
    return FlightEvents(plan=plan.sort("known_us", "topic", "flight_id").select(columns), reports=reports)


def _encode(plan: pl.DataFrame, reports: pl.DataFrame, topic: FlightTopic) -> pl.DataFrame:
    told = reports[plan["report"]].select(
        key=pl.col(topic.key).cast(pl.Binary), value=pl.struct(*topic.fields).struct.json_encode().cast(pl.Binary)
    )
    request_id = pl.concat_str(pl.lit(f"{topic.name}/"), "flight_id")
    return plan.drop("report").hstack(told).with_columns(request_id=request_id)


def _with_faults(records: pl.DataFrame) -> pl.DataFrame:
    faulty = records.with_row_index("row").filter(pl.col("fault").is_not_null())
    if faulty.is_empty():
        return records
    faults = {fault.name: fault for fault in FAULTS}
    rows, keys, values = [], [], []
    for row, name, key, value in faulty.select("row", "fault", "key", "value").iter_rows():
        fault = faults[name]
        rows.append(row)
        keys.append(None if fault.is_keyless else key)
        values.append(corrupt(value, fault))
    return records.with_columns(
        records["key"].scatter(rows, pl.Series(keys, dtype=pl.Binary)),
        records["value"].scatter(rows, pl.Series(values, dtype=pl.Binary)),
    )


def _bound(time_us: object) -> str:
    if not isinstance(time_us, int) or time_us in (MINUS_INFINITY_US, END_OF_TIME_US):
        return "the beginning" if time_us == MINUS_INFINITY_US else "the end"
    return format_rfc3339(time_us)
