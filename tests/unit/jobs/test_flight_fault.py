"""Injected faults: drawn by the seed alone, and each ending as the dead letter it is said to."""

import json
from collections import Counter

import numpy as np
import polars as pl
import pytest

from jobs.flights.dataset import DEPARTED, LANDED, load_reports
from jobs.flights.events import TOPICS, FlightEvents, plan_events
from jobs.flights.fault import FAULTS, MAX_DELAY_MINUTES, possible_faults
from jobs.flights.views import VIEWS
from schemas.errors import ConfigError
from schemas.row import Reason
from schemas.time import parse_rfc3339_us
from streams.batch import RawBatch
from streams.pipeline import PartitionPipeline

JUNE = parse_rfc3339_us("2013-06-01T00:00:00Z")
JULY = parse_rfc3339_us("2013-07-01T00:00:00Z")
DAY_US = 86_400_000_000


@pytest.fixture(scope="module")
def reports() -> pl.DataFrame:
    return load_reports()


def plan_june(reports: pl.DataFrame, **options: float | int) -> FlightEvents:
    return plan_events(start_us=JUNE, end_us=JULY, reports=reports, **options)  # type: ignore[arg-type]  # by name


def test_the_same_seed_draws_the_same_and_another_seed_another(reports: pl.DataFrame) -> None:
    first = plan_june(reports, late_share=0.05, invalid_share=0.05, seed=1)
    again = plan_june(reports, late_share=0.05, invalid_share=0.05, seed=1)
    other = plan_june(reports, late_share=0.05, invalid_share=0.05, seed=2)
    assert first.plan.equals(again.plan)
    assert first.table()["value"].equals(again.table()["value"])
    assert not first.plan.equals(other.plan)


def test_the_draw_is_what_it_was_when_this_was_written(reports: pl.DataFrame) -> None:
    plan = plan_june(reports, late_share=0.01, invalid_share=0.01, seed=7).plan
    landed = plan.filter(pl.col("topic") == "flights.landed")
    delay_minutes = ((pl.col("known_us") - pl.col("event_us")) // 60_000_000).alias("delay_minutes")
    assert landed.filter("is_delayed").select("flight_id", delay_minutes).rows()[:3] == [
        ("2013-05-31:UA1164:EWR:1420", 206),
        ("2013-05-31:MQ4579:LGA:1525", 297),
        ("2013-05-31:9E3315:JFK:1600", 306),
    ]
    assert landed.filter(pl.col("fault").is_not_null()).select("flight_id", "fault").rows()[:3] == [
        ("2013-05-31:US2140:LGA:1900", "time_in_milliseconds"),
        ("2013-05-31:HA51:JFK:1000", "tail_number_missing"),
        ("2013-05-31:UA697:EWR:1830", "truncated_json"),
    ]


def test_the_fate_of_a_report_does_not_depend_on_the_range(reports: pl.DataFrame) -> None:
    june = plan_june(reports, late_share=0.05, invalid_share=0.05, seed=1).plan
    year = plan_events(late_share=0.05, invalid_share=0.05, seed=1, reports=reports).plan
    within = year.filter(pl.col("known_us").is_between(JUNE, JULY, closed="left"))
    assert within.equals(june)


def test_shares_are_kept_and_kinds_are_even(reports: pl.DataFrame) -> None:
    plan = plan_june(reports, late_share=0.1, invalid_share=0.2, seed=1).plan
    assert plan["is_delayed"].mean() == pytest.approx(0.1, abs=0.01)
    faulty = plan.filter(pl.col("fault").is_not_null())
    assert faulty.height / plan.height == pytest.approx(0.2, abs=0.01)
    for topic in TOPICS.values():
        counts = Counter(faulty.filter(pl.col("topic") == topic.name)["fault"])
        assert set(counts) == {fault.name for fault in possible_faults(topic.kind)}
        assert min(counts.values()) > 0.8 * max(counts.values())


def test_delays_and_faults_are_drawn_apart(reports: pl.DataFrame) -> None:
    plan = plan_june(reports, late_share=0.3, invalid_share=0.3, seed=1).plan
    both = plan.filter(pl.col("is_delayed") & pl.col("fault").is_not_null()).height / plan.height
    assert both == pytest.approx(0.09, abs=0.01)


def test_delays_are_whole_minutes_up_to_six_hours(reports: pl.DataFrame) -> None:
    plan = plan_june(reports, late_share=0.5, seed=1).plan
    delay = (plan["known_us"] - plan["event_us"]) / 60_000_000
    assert set(delay) == set(range(MAX_DELAY_MINUTES + 1))
    assert ((delay > 0) == plan["is_delayed"]).all()


def test_share_one_corrupts_every_report_and_share_zero_none(reports: pl.DataFrame) -> None:
    assert plan_june(reports, invalid_share=1.0).plan["fault"].null_count() == 0
    assert plan_june(reports, invalid_share=0.0).plan["fault"].count() == 0


@pytest.mark.parametrize("option", ["late_share", "invalid_share"])
@pytest.mark.parametrize("share", [-0.1, 1.5, float("nan")])
def test_a_share_out_of_range_is_refused(reports: pl.DataFrame, option: str, share: float) -> None:
    with pytest.raises(ConfigError, match=f"`{option}` is {share}"):
        plan_june(reports, **{option: share})


@pytest.mark.parametrize("topic", list(TOPICS))
def test_each_corrupted_payload_becomes_a_dead_letter_of_its_reason(reports: pl.DataFrame, topic: str) -> None:
    events = plan_events(
        start_us=JUNE, end_us=JUNE + 7 * DAY_US, late_share=0.1, invalid_share=0.05, seed=1, reports=reports
    )
    records = events.table().filter(pl.col("topic") == topic)
    views = [view for view in VIEWS if view.input.topic == topic]
    pipeline = PartitionPipeline(views[0].source, views, partition=0)
    processed = pipeline.process(as_raw_batch(records, topic), processing_time_us=0, computed_time_us=0, epoch=0)
    dead_letters = processed.dead_letters.select(["_offset", "reason"]).to_pylist()
    reasons = {row["_offset"]: row["reason"] for row in dead_letters if row["reason"] != Reason.LATE}
    expected = {fault.name: fault.reason.value for fault in FAULTS}
    faulty = records.with_row_index("offset").filter(pl.col("fault").is_not_null())
    assert reasons == {offset: expected[fault] for offset, fault in faulty.select("offset", "fault").iter_rows()}
    late = {row["_offset"] for row in dead_letters if row["reason"] == Reason.LATE}
    delayed = set(records.with_row_index("offset").filter("is_delayed")["offset"])
    assert late <= delayed
    assert late or topic == "flights.landed"  # features over the last landings have no window to be late for


def test_only_a_landing_can_lose_its_key(reports: pl.DataFrame) -> None:
    table = plan_june(reports, invalid_share=0.2, seed=1).table()
    keyless = table.filter(pl.col("key").is_null())
    assert set(keyless["topic"]) == {"flights.landed"}
    assert set(keyless["fault"]) == {"tail_number_missing"}
    assert all(json.loads(value)["tail_number"] is None for value in keyless["value"])
    assert len(possible_faults(LANDED)) == len(possible_faults(DEPARTED)) + 1


def as_raw_batch(records: pl.DataFrame, topic: str) -> RawBatch:
    values = records["value"].to_list()
    return RawBatch(
        topic=topic,
        partition=0,
        offsets=np.arange(records.height, dtype=np.int64),
        broker_time_us=records["known_us"].to_numpy(),
        keys=records["key"].to_list(),
        values=values,
        headers=[[("request_id", request_id.encode())] for request_id in records["request_id"]],
        next_offset=records.height,
    )
