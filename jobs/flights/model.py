"""The model of the demo: at departure, will the flight land more than 15 minutes late?"""

from typing import Final

from jobs.flights.views import aircraft_landings, airport_departures, carrier_departures
from schemas.model import ModelInput, ModelOutput, ModelSpec, ViewReference

LATE_MINUTES: Final = 15
"""A flight is late if it lands more than this many minutes behind its schedule."""

LATE_ARRIVAL: Final = ModelSpec(
    name="late_arrival",
    version="1",
    trigger=ViewReference.of(airport_departures),
    entity="flight_id",
    inputs=(
        ModelInput.of(airport_departures, "departure_delay"),
        ModelInput.of(airport_departures, "distance"),
        ModelInput.of(airport_departures, "scheduled_duration_minutes"),
        ModelInput.of(airport_departures, "scheduled_hour_local"),
        ModelInput.of(airport_departures, "day_of_week"),
        ModelInput.of(airport_departures, "departures_1h"),
        ModelInput.of(airport_departures, "mean_departure_delay_1h"),
        ModelInput.of(airport_departures, "max_departure_delay_1h"),
        ModelInput.of(carrier_departures, "departures_1h", key="carrier"),
        ModelInput.of(carrier_departures, "mean_departure_delay_1h", key="carrier"),
        ModelInput.of(carrier_departures, "max_departure_delay_1h", key="carrier"),
        ModelInput.of(aircraft_landings, "last_landing_delay", key="tail_number"),
        ModelInput.of(aircraft_landings, "mean_landing_delay_3", key="tail_number"),
    ),
    outputs=(
        ModelOutput(
            column="late_probability",
            tensor="probabilities",
            width=2,
            index=1,
            minimum=0,
            maximum=1,
            description=f"Probability that the flight lands more than {LATE_MINUTES} minutes late.",
        ),
    ),
    owner="operations",
)
