"""Features of flights: how the airport, the carrier and the aircraft have been doing when a flight departs.

This file is all it takes to define them: entities, the topics that events come from, and a line for each feature.
"""

from typing import Final

from streams import Entity, EventSource, FeatureView, count, from_event, last, max_, mean

airport = Entity("airport", key="origin")
carrier = Entity("carrier", key="carrier")
aircraft = Entity("aircraft", key="tail_number")

# Departures are keyed by the airport: the view of carriers reads them by way of a repartition topic.
departures = EventSource(
    "flights.departed",
    contract="flight_departed@1",
    key="origin",
    max_out_of_orderness="2m",
    idle_timeout="30s",
    max_future_skew="1m",
)
landings = EventSource(
    "flights.landed",
    contract="flight_landed@1",
    key="tail_number",
    max_out_of_orderness="2m",
    idle_timeout="30s",
    max_future_skew="1m",
)

# Each as-of row of this view is a flight that departs: it asks the model whether the flight will land late.
airport_departures = FeatureView(
    "airport_departures",
    version=1,
    entity=airport,
    source=departures,
    slide="5m",
    allowed_lateness="10m",
    emit="every_event",
    owner="operations",
    features={
        "departures_1h": count().over("1h"),
        "mean_departure_delay_1h": mean("departure_delay").over("1h"),
        "max_departure_delay_1h": max_("departure_delay").over("1h"),
        "flight_id": from_event("flight_id"),
        "carrier": from_event("carrier"),
        "tail_number": from_event("tail_number"),
        "destination": from_event("destination"),
        "departure_delay": from_event("departure_delay"),
        "distance": from_event("distance"),
        "scheduled_duration_minutes": from_event("scheduled_duration_minutes"),
        "scheduled_hour_local": from_event("scheduled_hour_local"),
        "day_of_week": from_event("day_of_week"),
    },
)

carrier_departures = FeatureView(
    "carrier_departures",
    version=1,
    entity=carrier,
    source=departures,
    slide="5m",
    allowed_lateness="10m",
    emit="every_event",
    owner="operations",
    features={
        "departures_1h": count().over("1h"),
        "mean_departure_delay_1h": mean("departure_delay").over("1h"),
        "max_departure_delay_1h": max_("departure_delay").over("1h"),
    },
)

# An aircraft that came in late tends to leave late again. Last-N features have no window, so there is nothing to close.
aircraft_landings = FeatureView(
    "aircraft_landings",
    version=1,
    entity=aircraft,
    source=landings,
    slide="5m",
    allowed_lateness="10m",
    emit="every_event",
    owner="operations",
    features={
        "last_landing_delay": last("arrival_delay").over(last=1),
        "mean_landing_delay_3": mean("arrival_delay").over(last=3),
        # What became of the flight: the model is trained on it, and its predictions are measured against it.
        "flight_id": from_event("flight_id"),
        "arrival_delay": from_event("arrival_delay"),
    },
)

VIEWS: Final = [airport_departures, carrier_departures, aircraft_landings]
