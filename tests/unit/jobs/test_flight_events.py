"""The events of the flights: order, keys, payloads, ranges."""

import json

import polars as pl
import pytest

from jobs.flights.dataset import load_reports
from jobs.flights.events import TOPICS, plan_events
from jobs.flights.views import VIEWS
from schemas.contract import load_contract
from schemas.errors import ConfigError
from schemas.time import parse_rfc3339_us

JANUARY = parse_rfc3339_us("2013-01-01T00:00:00Z")
MIDDLE = parse_rfc3339_us("2013-01-05T12:34:00Z")
DAY_10 = parse_rfc3339_us("2013-01-10T00:00:00Z")
CONTRACTS = {
    "flights.departed": "flight_departed@1",
    "flights.landed": "flight_landed@1",
}


@pytest.fixture(scope="module")
def reports() -> pl.DataFrame:
    return load_reports()


@pytest.fixture(scope="module")
def records(reports: pl.DataFrame) -> pl.DataFrame:
    return plan_events(start_us=JANUARY, end_us=DAY_10, reports=reports).table()


def test_the_year_has_each_departure_and_each_landing_once(reports: pl.DataFrame) -> None:
    plan = plan_events(reports=reports).plan
    assert dict(plan.group_by("topic").len().iter_rows()) == {
        "flights.departed": 328_521,
        "flights.landed": 327_346,
    }
    assert plan["fault"].null_count() == plan.height
    assert (plan["known_us"] == plan["event_us"]).all()
    assert plan.select("topic", "flight_id").is_unique().all()


def test_order_is_by_known_time_then_topic_then_flight(reports: pl.DataFrame) -> None:
    plan = plan_events(start_us=JANUARY, end_us=DAY_10, late_share=0.1, seed=3, reports=reports).plan
    order = plan.select("known_us", pl.col("topic").cast(pl.String), "flight_id")
    assert order.equals(order.sort("known_us", "topic", "flight_id"))
    assert not plan["event_us"].is_sorted()


def test_views_read_the_topics_that_are_produced_by_the_key_they_are_keyed_by() -> None:
    sources = [source for view in VIEWS for source in view.sources]
    assert {source.topic: (source.key, source.contract) for source in sources} == {
        topic.name: (topic.key, CONTRACTS[topic.name]) for topic in TOPICS.values()
    }


def test_each_record_is_keyed_by_the_entity_in_its_payload(records: pl.DataFrame) -> None:
    for topic, key, value in records.select("topic", "key", "value").gather_every(7).iter_rows():
        assert json.loads(value)[TOPICS[topic].key].encode() == key


@pytest.mark.parametrize("topic", list(CONTRACTS))
def test_payloads_pass_their_contract_and_have_all_of_its_fields(records: pl.DataFrame, topic: str) -> None:
    contract = load_contract(CONTRACTS[topic])
    for value in records.filter(pl.col("topic") == topic)["value"].gather_every(11):
        event = json.loads(value)
        contract.validator.validate(event)
        assert list(event) == list(contract.fields)


def test_a_payload_tells_the_first_flight_of_the_year(records: pl.DataFrame) -> None:
    value = records.filter(pl.col("topic") == "flights.departed")["value"][0]
    assert json.loads(value) == {
        "flight_id": "2013-01-01:UA1545:EWR:0515",
        "event_time": "2013-01-01T10:17:00Z",
        "carrier": "UA",
        "flight_number": 1545,
        "tail_number": "N14228",
        "origin": "EWR",
        "destination": "IAH",
        "scheduled_departure": "2013-01-01T10:15:00Z",
        "scheduled_arrival": "2013-01-01T14:19:00Z",
        "scheduled_duration_minutes": 244.0,
        "scheduled_hour_local": 5,
        "day_of_week": 2,
        "departure_delay": 2.0,
        "distance": 1400.0,
    }


def test_request_ids_are_unique_and_name_topic_and_flight(records: pl.DataFrame) -> None:
    assert records["request_id"].is_unique().all()
    assert records["request_id"][0] == "flights.departed/2013-01-01:UA1545:EWR:0515"


def test_batches_joined_are_the_table(reports: pl.DataFrame) -> None:
    events = plan_events(start_us=JANUARY, end_us=MIDDLE, invalid_share=0.1, reports=reports)
    batches = [events.batch(start, start + 997) for start in range(0, len(events), 997)]
    assert pl.concat(batches).equals(events.table())


def test_ranges_are_half_open_and_split_anywhere(reports: pl.DataFrame) -> None:
    whole = plan_events(start_us=JANUARY, end_us=DAY_10, late_share=0.2, invalid_share=0.1, seed=5, reports=reports)
    cut = whole.plan["known_us"][len(whole) // 2]
    before = plan_events(start_us=JANUARY, end_us=cut, late_share=0.2, invalid_share=0.1, seed=5, reports=reports)
    after = plan_events(start_us=cut, end_us=DAY_10, late_share=0.2, invalid_share=0.1, seed=5, reports=reports)
    assert pl.concat([before.plan, after.plan]).equals(whole.plan)


def test_a_range_without_events_is_refused_with_the_range_of_the_data(reports: pl.DataFrame) -> None:
    with pytest.raises(ConfigError, match=r"2013-01-01T10:17:00.000000Z to 2014-01-01T09:01:00.000000Z"):
        plan_events(start_us=parse_rfc3339_us("2015-01-01T00:00:00Z"), reports=reports)


def test_a_report_without_tail_number_has_no_key(reports: pl.DataFrame) -> None:
    unnamed = reports.head(1_000).with_columns(tail_number=pl.lit(None, dtype=pl.String))
    landed = plan_events(reports=unnamed).table().filter(pl.col("topic") == "flights.landed")
    assert landed.height > 0
    assert landed["key"].null_count() == landed.height
    assert all(json.loads(value)["tail_number"] is None for value in landed["value"])
