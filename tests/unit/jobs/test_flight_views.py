"""The example views: what they are over, and what they leave a model to work with."""

from jobs.flights.views import VIEWS, aircraft_landings, airport_departures


def test_every_view_emits_each_event_and_bounds_disorder_and_future() -> None:
    for view in VIEWS:
        assert view.emit == "every_event"
        assert view.allowed_lateness_us == 600_000_000
        assert view.sources[0].max_out_of_orderness_us == 120_000_000
        assert view.sources[0].idle_timeout_us == 30_000_000
        assert view.sources[0].max_future_skew_us == 60_000_000


def test_names_and_definitions_are_distinct() -> None:
    assert len({view.name for view in VIEWS}) == len({view.definition_hash for view in VIEWS}) == len(VIEWS)


def test_a_departure_names_what_the_other_views_are_looked_up_by() -> None:
    assert {"flight_id", "carrier", "tail_number"} <= set(airport_departures.feature_schema.names)


def test_a_landing_tells_what_became_of_which_flight() -> None:
    assert {"flight_id", "arrival_delay"} <= set(aircraft_landings.feature_schema.names)
